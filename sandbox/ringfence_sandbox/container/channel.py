"""The host's end of a sandbox's executor: commands go to it over one stream, and their output comes back in pipes.

What comes from the executor is data from an untrusted place, although no command can reach its stream: frames are
bounded, anything unexpected closes the channel, and the descriptors that it hands over are pipes that nobody waits for.

The stream is the dead man's switch of both sides. When it ends, the executor ends, and with it every process of its
PID namespace; and when the executor ends, a `Channel.run` under way raises `ExecutorLostError`.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Final, Literal, Self

from ringfence.errors import RingfenceError
from ringfence_sandbox.container import executor as protocol
from ringfence_sandbox.container.executor import HEADER, LONGEST, RUN_HEAD, first_frame, taken
from ringfence_sandbox.disk.forks import FORKS

_LONGEST = 4096  # bytes of a payload from the executor
_MOST_DESCRIPTORS = 4
_EVER = 1e9  # seconds
_ENDED = "the container has ended: its memory was used up, or somebody ended it"


class ExecutorLostError(RingfenceError, RuntimeError):
    """The executor of a container has ended or cannot be trusted any more, so no command can run there.

    ``ended`` says that every process of the container is known to have ended; otherwise end the container.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class FrameStream:
    """Frames over a socket that is never waited for without a limit; a limit is an instant of `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._received = bytearray()
        self._descriptors: list[int] = []
        connection.setblocking(False)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, kind: int, payload: bytes, limit: float, descriptors: Sequence[int] = ()) -> None:
        """For any thread. Raises ExecutorLostError where the executor is gone, or does not take it in time."""
        rest = memoryview(HEADER.pack(kind, len(payload)) + payload)
        with self._sending:
            while rest:
                try:
                    rest = rest[socket.send_fds(self._connection, [rest], descriptors) :]
                    descriptors = ()
                except BlockingIOError:
                    self._wait(select.POLLOUT, limit)
                except OSError as error:
                    raise ExecutorLostError(f"{_ENDED} ({error.strerror})") from None

    def receive(self) -> None:
        """Take in what is there. Raises ExecutorLostError where nothing will come any more."""
        try:
            data, descriptors, lost = taken(self._connection, _MOST_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError as error:
            raise ExecutorLostError(f"{_ENDED} ({error.strerror})") from None
        self._descriptors += descriptors
        if lost:
            raise ExecutorLostError(
                "descriptors of the container were lost: is this process's limit of open files low?"
            )
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            raise ExecutorLostError("the executor sent what it must not send")
        if not data:
            raise ExecutorLostError(_ENDED)
        self._received += data

    def next_frame(self) -> tuple[int, bytes] | None:
        """The first frame of what was received: its kind and payload."""
        try:
            return first_frame(self._received, _LONGEST)
        except ValueError:
            raise ExecutorLostError("the executor sent what it must not send") from None

    def wait_for_frame(self, limit: float) -> tuple[int, bytes]:
        """The next frame. Raises ExecutorLostError where none comes in time."""
        while (frame := self.next_frame()) is None:
            self._wait(select.POLLIN, limit)
            self.receive()
        return frame

    def take_descriptors(self) -> list[int]:
        """The descriptors that came with frames, the taker's from now on."""
        descriptors, self._descriptors = self._descriptors, []
        return descriptors

    def shut_down(self) -> None:
        """End the stream in both directions; whoever waits for it wakes up."""
        with suppress(OSError):  # it has ended already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        for descriptor in self.take_descriptors():
            os.close(descriptor)

    def _wait(self, event: int, limit: float) -> None:
        ready = select.poll()
        ready.register(self._connection, event)
        if not ready.poll(max(0.0, limit - time.monotonic()) * 1000):
            raise ExecutorLostError("the executor does not answer")


def run_request(
    number: int,
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str | None],
    pipes: tuple[bool, bool],
    seconds: float,
) -> bytes:
    """The payload of a RUN; ``pipes``: whether there is stdin, and a report. Raises ValueError where a command cannot
    be said so."""
    if not argv:
        raise ValueError("a command has at least one argument: the program")
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"not a name of a variable: {name!r}")
    words = [cwd, *argv, *(name if value is None else f"{name}={value}" for name, value in env.items())]
    if any("\0" in word for word in words):
        raise ValueError("a command cannot hold a zero character")
    head = RUN_HEAD.pack(number, *pipes, math.ceil(min(seconds, _EVER) * 1000), len(argv), len(env))
    request = head + b"".join(os.fsencode(word) + b"\0" for word in words)
    if len(request) > LONGEST:
        raise ValueError(f"a command and its environment have at most {LONGEST} bytes; use stdin or a file")
    return request


Stream = Literal["stdout", "stderr", "report"]
OnOutput = Callable[[Stream, bytes], None]

_CHUNK = 256 * 1024
_MOST_READS = 4096  # of one stream after its writers have ended; a pipe never holds so much
_STREAMS: Final[tuple[Stream, ...]] = ("stdout", "stderr", "report")


class Pipes:
    """They came from the container: nothing here waits for what is behind them."""

    def __init__(self, stdin: bytes | None, events: select.poll, *, report: bool = False) -> None:
        """``events`` is told of each pipe as long as it is open; with ``report``, one more comes that is read."""
        self._events = events
        self._streams = _STREAMS if report else _STREAMS[:2]
        self._expected: list[int] = [os.O_RDONLY] * len(self._streams) + [os.O_WRONLY] * (stdin is not None)
        self._unwritten = memoryview(stdin or b"")
        self._readable: dict[int, Stream] = {}
        self._writable: int | None = None

    def take(self, descriptors: Sequence[int]) -> bool:
        """Take over the descriptors that a started command came with; False where they are not what they should be."""
        fits = 0 < len(descriptors) == len(self._expected) and all(map(_is_pipe, descriptors, self._expected))
        if not fits:
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        self._expected = []  # once
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)
        self._readable = dict(zip(descriptors, self._streams, strict=False))
        for descriptor in self._readable:
            self._events.register(descriptor, select.POLLIN)
        if len(descriptors) > len(self._streams):
            self._writable = descriptors[-1]
            self._events.register(self._writable, select.POLLOUT)
            self._write(self._writable)
        return True

    def serve(self, descriptor: int, on_output: OnOutput) -> None:
        """Do what a descriptor is ready for."""
        if descriptor == self._writable:
            self._write(descriptor)
        elif descriptor in self._readable:
            self._read(descriptor, on_output)

    def drain(self, on_output: OnOutput) -> None:
        """Hand on what is left when nobody writes any more."""
        for descriptor in list(self._readable):
            for _ in range(_MOST_READS):
                if not self._read(descriptor, on_output):
                    break

    def close(self) -> None:
        for descriptor in [*self._readable, self._writable]:
            if descriptor is not None:
                self._close(descriptor)

    def _read(self, descriptor: int, on_output: OnOutput) -> bool:
        """False where there is nothing now, or never again."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            on_output(self._readable[descriptor], data)
        else:
            self._close(descriptor)
        return bool(data)

    def _write(self, descriptor: int) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(descriptor, self._unwritten[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the command does not read the rest
            pass
        self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._events.unregister(descriptor)
        os.close(descriptor)
        self._readable.pop(descriptor, None)
        if descriptor == self._writable:
            self._writable = None


def _is_pipe(descriptor: int, access: int) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    return stat.S_ISFIFO(os.fstat(descriptor).st_mode) and flags & os.O_ACCMODE == access


EXECUTOR: Final = Path(protocol.__file__)
"""The script to mount into a container, and to start as its first process: ``python3 -I -S -B SCRIPT SOCKET``."""

SOCKET_NAME: Final = "socket"

_PATIENCE_SECONDS = protocol.ENDING_SECONDS + 5  # after a timeout the executor answers in this time, or ends itself
_ENDING_ALONE_SECONDS = 1.0  # an executor whose stream has ended is killed after so long
_NOT_STARTED, _NOT_FOUND = 126, 127  # a shell's exit codes for what it cannot start


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. Every process that it started has ended with it.

    ``exit_code`` is the main process's: 128 + N where signal N ended it, 124 after a timeout, 127 where there is no
    such program, 126 where it could not be started for another reason; ``problem`` says which, and is empty where it
    was started. ``killed_by_oom``: the out-of-memory killer took a process of the container, not always the main one.
    ``leftovers``: about how many other processes had to be ended.
    """

    exit_code: int
    timed_out: bool = False
    killed_by_oom: bool = False
    duration_seconds: float = 0.0
    leftovers: int = 0
    problem: str = ""


class Listener:
    """Where the executor of one new container connects, once."""

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        """``parent`` is a directory that only its owner can enter; one of the listener's own is made in it."""
        self.directory: Final = tempfile.mkdtemp(prefix="channel-", dir=parent)
        """To be mounted into the container, read-only. The socket in it is called `SOCKET_NAME`."""
        with FORKS:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _sockets.add(self._socket)
        try:
            os.chmod(self.directory, 0o755)  # noqa: S103 - for the container's user; nobody else passes the parent
            self._bind()
        except BaseException:
            self.close()
            raise

    def _bind(self) -> None:
        place = os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            name = f"/proc/self/fd/{place}/{SOCKET_NAME}"  # the path of a socket has at most 107 bytes
            self._socket.bind(name)
            os.chmod(name, 0o666)  # noqa: S103 - as above
        finally:
            os.close(place)
        self._socket.listen(1)

    def accept(self, timeout_seconds: float, *, pid: int | None = None) -> Channel:
        """Wait for the executor, and close the listener: nobody can connect any more.

        ``pid`` is the container's first process as the host numbers it, None where that is not known: then nothing else
        may connect, and the channel cannot say whether everything in the container has ended.

        Raises:
            TimeoutError: nobody connected; it may be called again.
            ExecutorLostError: somebody else connected, or the executor cannot work here; the text says why.
        """
        somebody = select.poll()
        somebody.register(self._socket, select.POLLIN)
        if not somebody.poll(_milliseconds(timeout_seconds)):
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
        self._closed = False
        self._gone = False
        self._process: int | None = None
        with FORKS:
            _sockets.add(connection)
            self._stream = FrameStream(connection)
            _open_channels.add(self)
        try:
            self._process = _first_process(connection, pid)
            _greet(self._stream, time.monotonic() + timeout_seconds)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def listen(parent: str | os.PathLike[str]) -> Listener:
        """Where a container that is about to be made can connect; ``parent`` is a directory of the owner's alone."""
        return Listener(parent)

    @property
    def closed(self) -> bool:
        """Whether no other command can run here, as far as it is known."""
        return self._closed

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
        stamp: int | None = None,
    ) -> Ended:
        """Run a command, and return when it and every process that it started have ended.

        ``cwd`` is a directory in the container; ``env`` is added to the container's own environment, and what is None
        in it is taken out; without ``stdin`` the command reads nothing. With ``report`` the command may write to the
        descriptor `executor.REPORT`, which is one more stream. ``on_output`` gets the output in pieces of up to 256 KiB
        while the command runs; as long as it does not return, the command waits. If it raises, or on Ctrl-C, the
        command is ended first. On the file of the descriptor ``stamp`` the executor writes, once a second while the
        command runs, the time: `executor.STAMP`.

        Raises:
            ExecutorLostError: the container or the executor ended, before or during the command.
            ValueError: ``timeout_seconds`` is not positive and finite.
        """
        if not 0 < timeout_seconds < math.inf:
            raise ValueError(f"a command needs a time limit above 0 seconds, not {timeout_seconds}")
        try:
            with self._turn:
                return self._run(argv, cwd, env, stdin, timeout_seconds, on_output, report, stamp)
        finally:
            self._free_if_closed()

    def _run(
        self,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str | None],
        stdin: bytes | None,
        timeout_seconds: float,
        on_output: OnOutput,
        report: bool,
        stamp: int | None,
    ) -> Ended:
        if self._closed:
            raise ExecutorLostError("this channel is closed; start another container", ended=self._wait_until_gone(0))
        self._number = self._number % 0xFFFF_FFFF + 1
        try:
            request = run_request(self._number, argv, cwd, env, (stdin is not None, report), timeout_seconds)
        except ValueError as error:
            return Ended(_NOT_STARTED, problem=str(error))
        limit = time.monotonic() + timeout_seconds + _PATIENCE_SECONDS
        events = select.poll()
        events.register(self._stream, select.POLLIN)
        pipes = Pipes(stdin, events, report=report)
        sent = False
        try:
            self._running = self._number  # until the executor says that it has ended
            self._stream.send(protocol.RUN, request, limit, () if stamp is None else (stamp,))
            sent = True
            ended = self._attend(events, pipes, limit, on_output)
        except ExecutorLostError as error:
            raise ExecutorLostError(str(error), ended=self.close()) from None
        except BaseException:
            pipes.close()
            if self._closed or not sent:  # but half a frame, perhaps
                self.close()
            elif self._running:
                self._abandon()
            raise
        finally:
            self._running = 0
            pipes.close()
        if self._closed:
            self.close()
        return ended

    def _attend(self, events: select.poll, pipes: Pipes, limit: float, on_output: OnOutput) -> Ended:
        """Hand on output and input until the command has ended."""
        stream = self._stream.fileno()
        while True:
            # Another thread may kill the command, and cannot wake this one.
            seconds = min(limit - time.monotonic(), _PATIENCE_SECONDS)
            ready = [descriptor for descriptor, _ in events.poll(_milliseconds(seconds))]
            number, since = self._killed
            if number == self._number:  # a container that is paused does not answer, whatever time is left
                limit = min(limit, since + _PATIENCE_SECONDS)
            for descriptor in ready:
                if descriptor != stream:
                    pipes.serve(descriptor, on_output)
            if stream in ready:
                try:
                    self._stream.receive()
                except ExecutorLostError:
                    pipes.drain(on_output)
                    raise
                while (frame := self._stream.next_frame()) is not None:
                    ended = self._understood(frame, pipes)
                    if ended is not None:
                        pipes.drain(on_output)
                        return ended
            elif time.monotonic() > limit:
                raise ExecutorLostError("the executor does not answer")

    def _understood(self, frame: tuple[int, bytes], pipes: Pipes) -> Ended | None:
        """What a frame says about the command that runs: how it ended, or None while it runs."""
        kind, payload = frame
        with suppress(struct.error):
            if kind == protocol.STARTED and protocol.NUMBER.unpack(payload) == (self._number,):
                if pipes.take(self._stream.take_descriptors()):
                    return None
            elif kind == protocol.FAILED:
                head, text = payload[: protocol.FAILED_HEAD.size], payload[protocol.FAILED_HEAD.size :]
                number, code = protocol.FAILED_HEAD.unpack(head)
                if number == self._number:
                    self._running = 0
                    return Ended(_NOT_FOUND if code == ENOENT else _NOT_STARTED, problem=_text(text))
            elif kind == protocol.ENDED:
                number, code, timed_out, took, kills, leftovers, changed = protocol.OUTCOME.unpack(payload)
                if number == self._number:
                    self._running = 0
                    self._closed |= changed
                    return Ended(code, timed_out, kills > 0, took / 1e9, leftovers)
        raise ExecutorLostError("the executor sent what it must not send")

    def uncovered(self, paths: Sequence[str]) -> str:
        """Return the first path in the container that nothing empty and read-only is mounted on; "" if there is none.

        Raises ExecutorLostError as `run` does.
        """
        payload, _ = self._ask(protocol.LOOK, b"".join(os.fsencode(path) + b"\0" for path in paths), protocol.COVERED)
        return os.fsdecode(payload)

    def listen_inside(self, port: int) -> socket.socket:
        """Return a socket that listens at a port of the container's 127.0.0.1, for this process to accept from.

        Raises ExecutorLostError as `run` does.
        """
        _, descriptors = self._ask(protocol.LISTEN, protocol.NUMBER.pack(port), protocol.LISTENING)
        with FORKS:
            sockets = [socket.socket(fileno=one) for one in descriptors if stat.S_ISSOCK(os.fstat(one).st_mode)]
            _sockets.update(sockets)
        if len(sockets) != 1 or not sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self.close()
            raise ExecutorLostError("the executor sent what it must not send")
        return sockets[0]

    def _ask(self, question: int, payload: bytes, answer: int) -> tuple[bytes, list[int]]:
        """The payload and the descriptors of an answer, between commands."""
        limit = time.monotonic() + _PATIENCE_SECONDS
        with self._turn:
            if self._closed:
                raise ExecutorLostError("this channel is closed; start another container")
            try:
                self._stream.send(question, payload, limit)
                kind, payload = self._stream.wait_for_frame(limit)
                if kind != answer:
                    raise ExecutorLostError("the executor sent what it must not send")
            except BaseException:
                self.close()
                raise
            return payload, self._stream.take_descriptors()

    def kill(self) -> None:
        """End the command that runs now, if one does; its `run` returns with exit code 137. For any thread."""
        number = self._running
        if number and not self._closed:
            if self._killed[0] != number:
                self._killed = number, time.monotonic()
            with suppress(ExecutorLostError):  # its `run` finds that out, too
                self._stream.send(protocol.KILL, protocol.NUMBER.pack(number), time.monotonic() + 1)

    def _abandon(self) -> None:
        """The caller does not wait for the answer any more: end the command, and see that it has ended."""
        limit = time.monotonic() + _PATIENCE_SECONDS
        try:
            self._stream.send(protocol.KILL, protocol.NUMBER.pack(self._number), limit)
            kind = 0
            while kind not in (protocol.FAILED, protocol.ENDED):
                kind, payload = self._stream.wait_for_frame(limit)
                for descriptor in self._stream.take_descriptors():
                    os.close(descriptor)
                if kind == protocol.ENDED and payload[-1:] != b"\0":
                    self.close()
        except ExecutorLostError:
            self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> bool:
        """End the executor, and with it every process of the container; whether all are known to have ended."""
        with self._closing:
            self._closed = True
            if not self._gone:
                self._stream.shut_down()
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
        self._closed = True
        self._free()

    def _wait_until_gone(self, seconds: float) -> bool:
        """Whether the first process has ended: it is the last one, the kernel ends it after all others."""
        if not self._gone and self._process is not None:
            gone = select.poll()
            gone.register(self._process, select.POLLIN)
            self._gone = bool(gone.poll(seconds * 1000))
        return self._gone

    def _free_if_closed(self) -> None:
        # Not under the feet of a `run`: that one comes here itself.
        if self._closed and self._turn.acquire(blocking=False):
            try:
                with self._closing:
                    self._free()
            finally:
                self._turn.release()

    def _free(self) -> None:
        with FORKS:
            _open_channels.discard(self)
            self._stream.close()
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


def _greet(stream: FrameStream, limit: float) -> None:
    kind, payload = stream.wait_for_frame(limit)
    if kind == protocol.REFUSED:
        raise ExecutorLostError(f"no command can run in this container: {_text(payload)}")
    if kind != protocol.READY or payload != protocol.NUMBER.pack(protocol.PROTOCOL):
        raise ExecutorLostError("the container does not speak this executor's protocol")


def _milliseconds(seconds: float) -> float:
    """For `poll`, which takes no great numbers; its caller looks at the clock again."""
    return min(max(0.0, seconds), 3600.0) * 1000


def _text(payload: bytes) -> str:
    return payload.decode("utf-8", "replace")
