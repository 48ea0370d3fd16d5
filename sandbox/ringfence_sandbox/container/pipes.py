"""The host's ends of the pipes of one command in a sandbox."""

from __future__ import annotations

import fcntl
import os
import select
import stat
from collections.abc import Callable, Sequence
from typing import Final, Literal

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
