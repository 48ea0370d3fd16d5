"""The host's end of a sandbox's executor: commands go to it over one socket, and their output comes back in pipes.

What comes from the executor is data from an untrusted place, although no command can reach its socket: messages are
bounded, anything unexpected closes the channel, and nothing waits for what is behind a pipe.

The socket is the dead man's switch of both sides. When it ends, the executor ends, and with it every process of its
PID namespace; and when the executor ends, a `Channel.run` under way raises `ExecutorLostError`.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from ringfence.errors import RingfenceError
from ringfence_sandbox.container import executor as protocol
from ringfence_workspace.commands import CommandExit
from ringfence_workspace.pipes import OnOutput, Pipes
from ringfence_workspace.tree.kernel import FORKS

EXECUTOR: Final = Path(protocol.__file__)
"""The script to mount into a container, and to start as its first process."""

SOCKET_NAME: Final = "socket"

_PATIENCE_SECONDS = protocol.ENDING_SECONDS + 5  # after a timeout the executor answers in this time, or ends itself
_ENDING_ALONE_SECONDS = 1.0  # an executor whose stream has ended is killed after so long
_EVER = 1e9  # seconds
_ENDED = "the container has ended: its memory was used up, or somebody ended it"
_MUST_NOT = "the executor sent what it must not send"


class ExecutorLostError(RingfenceError, RuntimeError):
    """The executor of a container has ended or cannot be trusted any more, so no command can run there.

    ``ended`` says that every process of the container is known to have ended; otherwise end the container.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class Listener:
    """Where the executor of one new container connects, once."""

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        """``parent`` is a directory that only its owner can enter; one of the listener's own is made in it."""
        self.directory: Final = tempfile.mkdtemp(prefix="channel-", dir=parent)
        """To be mounted into the container, read-only. The socket in it is called `SOCKET_NAME`."""
        with FORKS:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _sockets.add(self._socket)
        try:
            os.chmod(self.directory, 0o755)  # noqa: S103 - for the container's user; nobody else passes the parent
            place = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                name = f"/proc/self/fd/{place}/{SOCKET_NAME}"  # the path of a socket has at most 107 bytes
                self._socket.bind(name)
                os.chmod(name, 0o666)  # noqa: S103 - as above
            finally:
                os.close(place)
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise

    def accept(self, timeout_seconds: float, *, pid: int | None = None) -> Channel:
        """Wait for the executor, and close the listener: nobody can connect any more.

        ``pid`` is the container's first process as the host numbers it, None where that is not known: then nothing else
        may connect, and the channel cannot say whether everything in the container has ended.

        Raises:
            TimeoutError: nobody connected; it may be called again.
            ExecutorLostError: somebody else connected, or the executor cannot work here; the text says why.
        """
        if not _is_ready(self._socket, timeout_seconds):
            raise TimeoutError(f"no executor connected within {timeout_seconds:g} seconds")
        with FORKS:
            connection, _ = self._socket.accept()
            _sockets.add(connection)
        self.close()
        return Channel(connection, pid=pid, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Also done by `accept`. What a container has mounted stays there, empty."""
        with FORKS:
            self._socket.close()
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, SOCKET_NAME))
        with suppress(FileNotFoundError):
            os.rmdir(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Channel:
    """The executor of one container. Its commands run one at a time; further callers wait for their turn."""

    def __init__(self, connection: socket.socket, *, pid: int | None, timeout_seconds: float) -> None:
        """``connection`` is the channel's from now on. Raises ExecutorLostError as `Listener.accept` does."""
        self._turn = threading.Lock()
        self._closing = threading.Lock()
        self._number = 0
        self._running = 0  # the number of the command that runs, or 0
        self._killed = 0, math.inf  # the number of the last command that was killed, and since when
        self.closed = False
        """Whether no other command can run here, as far as it is known."""
        self._gone = False
        self._process: int | None = None
        self.listener: socket.socket | None = None
        """Listens in the container where its executor was given a port, for this process to accept from. Whoever takes
        it closes it."""
        self._connection = connection
        descriptors: list[int] = []
        with FORKS:
            connection.setblocking(False)
            _sockets.add(connection)
            _open_channels.add(self)
        try:
            self._process = _first_process(connection, pid)
            kind, payload, descriptors = self._wait_for_answer(time.monotonic() + timeout_seconds, most=1)
            if kind == protocol.REFUSED:
                raise ExecutorLostError(f"no command can run in this container: {_text(payload)}")
            if kind != protocol.READY:
                raise ExecutorLostError(_MUST_NOT)
            if descriptors:
                with FORKS:
                    self.listener = socket.socket(fileno=descriptors[0])
                    _sockets.add(self.listener)
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self.close()
            if isinstance(error, OSError):  # no socket came
                raise ExecutorLostError(_MUST_NOT) from error
            raise

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str | None],
        stdin: bytes | None,
        timeout_seconds: float,
        on_output: OnOutput,
        report: bool = False,
        heartbeat: int | None = None,
    ) -> CommandExit:
        """Run a command, and return when it and every process that it started have ended.

        ``cwd`` is a directory in the container; ``env`` is added to the container's own environment, and what is None
        in it is taken out; without ``stdin`` the command reads nothing. With ``report`` the command may write to the
        descriptor `executor.REPORT`, which is one more stream. ``on_output`` gets the output in pieces of up to 256 KiB
        while the command runs; as long as it does not return, the command waits. If it raises, or on Ctrl-C, the
        command is ended first. To the file of the descriptor ``heartbeat`` the executor writes the time, once a second
        while the command runs: `executor.HEARTBEAT`.

        Raises:
            ExecutorLostError: the container or the executor ended, before or during the command.
            ValueError: ``timeout_seconds`` is not positive and finite.
        """
        if not 0 < timeout_seconds < math.inf:
            raise ValueError(f"a command needs a time limit above 0 seconds, not {timeout_seconds}")
        try:
            with self._turn, Pipes(stdin, report) as pipes:
                if self.closed:
                    ended = self._wait_until_gone(0)
                    raise ExecutorLostError("this channel is closed; start another container", ended=ended)
                given = pipes.inner if heartbeat is None else {**pipes.inner, "heartbeat": heartbeat}
                seconds = min(timeout_seconds, _EVER)
                request = {"argv": argv, "cwd": cwd, "env": {**env}, "seconds": seconds, "descriptors": [*given]}
                limit = time.monotonic() + timeout_seconds + _PATIENCE_SECONDS
                return self._run(request, [*given.values()], pipes, limit, on_output)
        finally:
            self._free_if_closed()

    def _run(
        self, request: object, descriptors: Sequence[int], pipes: Pipes, limit: float, on_output: OnOutput
    ) -> CommandExit:
        self._number = self._number % 0xFFFF_FFFF + 1
        sent = False
        try:
            self._running = self._number  # until the executor says that it has ended
            self._send(protocol.RUN, self._number, request, descriptors)
            sent = True
            pipes.close_inner()
            ended = self._attend(pipes, limit, on_output)
        except ExecutorLostError as error:
            raise ExecutorLostError(str(error), ended=self.close()) from None
        except BaseException:
            pipes.close()
            if self.closed or not sent:  # or sent just now
                self.close()
            elif self._running:
                self._abandon()
            raise
        finally:
            self._running = 0
        if self.closed:
            self.close()
        return ended

    def _attend(self, pipes: Pipes, limit: float, on_output: OnOutput) -> CommandExit:
        """Hand on output and input until the command has ended."""
        stream = self._connection.fileno()
        pipes.events.register(stream, select.POLLIN)
        while True:
            # Another thread may kill the command, and cannot wake this one.
            seconds = min(limit - time.monotonic(), _PATIENCE_SECONDS)
            ready = [descriptor for descriptor, _ in pipes.events.poll(_milliseconds(seconds))]
            number, since = self._killed
            if number == self._number:  # a container that is paused does not answer, whatever time is left
                limit = min(limit, since + _PATIENCE_SECONDS)
            for descriptor in ready:
                if descriptor != stream:
                    pipes.serve(descriptor, on_output)
            if stream in ready:
                try:
                    ended = self._outcome(*self._received()[:2])
                finally:
                    pipes.drain(on_output)
                return ended
            if time.monotonic() > limit:
                raise ExecutorLostError("the executor does not answer")

    def _outcome(self, kind: int, payload: bytes) -> CommandExit:
        """How the command that ran has ended, as the executor has it."""
        if kind == protocol.ENDED and len(payload) >= protocol.OUTCOME.size:
            number, code, timed_out, took, kills, leftovers, is_last = protocol.OUTCOME.unpack_from(payload)
            if number == self._number:
                self._running = 0
                self.closed |= is_last
                problem = _text(payload[protocol.OUTCOME.size :])
                return CommandExit(code, timed_out, kills > 0, took / 1e9, leftovers, problem)
        raise ExecutorLostError(_MUST_NOT)

    def _abandon(self) -> None:
        """The caller does not wait for the answer any more: end the command, and see that it has ended."""
        try:
            self._send(protocol.KILL, self._number)
            self._outcome(*self._wait_for_answer(time.monotonic() + _PATIENCE_SECONDS)[:2])
        except ExecutorLostError:
            self.close()
        except BaseException:
            self.close()
            raise
        if self.closed:
            self.close()

    def kill(self) -> None:
        """End the command that runs now, if one does; its `run` returns with exit code 137. For any thread."""
        number = self._running
        if number and not self.closed:
            if self._killed[0] != number:
                self._killed = number, time.monotonic()
            with suppress(ExecutorLostError):  # its `run` finds that out, too
                self._send(protocol.KILL, number)

    def uncovered(self, paths: Sequence[str]) -> str:
        """Return the first path in the container that nothing empty and read-only is mounted on; "" if there is none.

        Raises ExecutorLostError as `run` does.
        """
        with self._turn:
            if self.closed:
                raise ExecutorLostError("this channel is closed; start another container")
            try:
                self._send(protocol.LOOK, 0, paths)
                kind, payload, _ = self._wait_for_answer(time.monotonic() + _PATIENCE_SECONDS)
                if kind != protocol.COVERED:
                    raise ExecutorLostError(_MUST_NOT)
            except BaseException:
                self.close()
                raise
        return os.fsdecode(payload)

    def _send(self, kind: int, number: int, content: object = None, descriptors: Sequence[int] = ()) -> None:
        """For any thread. Raises ExecutorLostError where the executor is gone, or does not take it."""
        file = None if content is None else _file_of(content)
        try:
            given = descriptors if file is None else [file, *descriptors]
            socket.send_fds(self._connection, [protocol.MESSAGE.pack(kind, number)], given)
        except OSError as error:
            raise ExecutorLostError(f"{_ENDED} ({error.strerror})") from None
        finally:
            if file is not None:
                os.close(file)

    def _received(self, most: int = 0) -> tuple[int, bytes, list[int]]:
        """Kind, payload and up to ``most`` descriptors of the answer that is there. Raises ExecutorLostError."""
        try:
            message, descriptors, is_cut = protocol.received(self._connection, protocol.LONGEST_ANSWER, most)
        except OSError as error:
            raise ExecutorLostError(f"{_ENDED} ({error.strerror})") from None
        if is_cut or not message:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ExecutorLostError(_MUST_NOT if is_cut else _ENDED)
        return message[0], message[1:], descriptors

    def _wait_for_answer(self, limit: float, most: int = 0) -> tuple[int, bytes, list[int]]:
        if not _is_ready(self._connection, limit - time.monotonic()):
            raise ExecutorLostError("the executor does not answer")
        return self._received(most)

    def close(self) -> bool:
        """End the executor, and with it every process of the container; whether all are known to have ended."""
        with self._closing:
            self.closed = True
            if not self._gone:
                with suppress(OSError):  # it has ended already
                    self._connection.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up
                if not self._wait_until_gone(_ENDING_ALONE_SECONDS) and self._process is not None:
                    with suppress(OSError):
                        signal.pidfd_send_signal(self._process, signal.SIGKILL)
                    self._wait_until_gone(protocol.ENDING_SECONDS)
        self._free_if_closed()
        return self._gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_child(self) -> None:
        """In a forked child: let go of the copies, so that the stream ends with the parent."""
        self.closed = True
        self._free()

    def _wait_until_gone(self, seconds: float) -> bool:
        """Whether the first process has ended: it is the last one, the kernel ends it after all others."""
        if not self._gone and self._process is not None:
            self._gone = _is_ready(self._process, seconds)
        return self._gone

    def _free_if_closed(self) -> None:
        # Not under the feet of a `run`: that one comes here itself.
        if self.closed and self._turn.acquire(blocking=False):
            try:
                with self._closing:
                    self._free()
            finally:
                self._turn.release()

    def _free(self) -> None:
        with FORKS:
            _open_channels.discard(self)
            self._connection.close()
            if self._process is not None:
                os.close(self._process)
                self._process = None


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # where executors wait to be heard, too
_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _after_fork() -> None:
    for one in [*_open_channels]:
        one.in_child()
    for one in [*_sockets]:
        one.close()


os.register_at_fork(after_in_child=_after_fork)


def _first_process(connection: socket.socket, expected: int | None) -> int | None:
    """A descriptor of the process that connected; None where nobody says who it should be, or the kernel has none."""
    peer, _, _ = struct.unpack("=3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if expected is not None and peer != expected:
        raise ExecutorLostError(f"process {peer} connected in the place of the container's, {expected}")
    try:
        return os.pidfd_open(peer) if expected is not None else None
    except OSError:
        return None


def _file_of(content: object) -> int:
    """A file in memory with JSON, to be read from its beginning."""
    file = os.memfd_create("message")
    os.pwrite(file, json.dumps(content).encode(), 0)
    return file


def _is_ready(readable: int | socket.socket, seconds: float) -> bool:
    events = select.poll()
    events.register(readable, select.POLLIN)
    return bool(events.poll(_milliseconds(seconds)))


def _milliseconds(seconds: float) -> float:
    """For `poll`, which takes no great numbers; its caller looks at the clock again."""
    return min(max(0.0, seconds), 3600.0) * 1000


def _text(payload: bytes) -> str:
    return payload.decode("utf-8", "replace")
