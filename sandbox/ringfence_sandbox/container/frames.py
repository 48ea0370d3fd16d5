"""The stream of frames between the host and an executor, as the host sees it: nothing that comes is trusted."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ringfence.errors import RingfenceError
from ringfence_sandbox.container.executor import HEADER, LONGEST, RUN_HEAD, first_frame, taken

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
