"""The host's ends of the pipes of one command in a sandbox."""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, Self

Stream = Literal["stdout", "stderr", "report"]
OnOutput = Callable[[Stream, bytes], None]

_CHUNK = 256 * 1024
_MOST_READS = 4096  # of one stream after its writers have ended; a pipe never holds so much


class Pipes:
    """Made here, and handed to the container in part: nothing here waits for what is behind them."""

    def __init__(self, stdin: bytes | None, report: bool) -> None:
        """With ``report`` there is one more that is read."""
        self.events = select.poll()
        """Told of each outer end as long as it is open."""
        self.inner: dict[str, int] = {}
        """The command's ends, until `close_inner`."""
        self._unwritten = memoryview(stdin or b"")
        self._readable: dict[int, Stream] = {}
        self._writable: int | None = None
        streams: Sequence[Stream] = ("stdout", "stderr", "report") if report else ("stdout", "stderr")
        try:
            for stream in streams:
                descriptor, self.inner[stream] = os.pipe()
                self._readable[descriptor] = stream
                with suppress(OSError):  # where the user has too many already, it stays as it is
                    fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _CHUNK)  # fewer turns a megabyte
                self.events.register(descriptor, select.POLLIN)
            if stdin is not None:
                self.inner["stdin"], self._writable = os.pipe()
                self.events.register(self._writable, select.POLLOUT)
            for descriptor in self.inner.values():
                os.fchmod(descriptor, 0o666)  # the container's user opens /dev/stdout anew
            for descriptor in (*self._readable, *([] if self._writable is None else [self._writable])):
                os.set_blocking(descriptor, False)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close_inner(self) -> None:
        """Close this process's copies of the command's ends."""
        while self.inner:
            os.close(self.inner.popitem()[1])

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
        self.close_inner()
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
        self.events.unregister(descriptor)
        os.close(descriptor)
        self._readable.pop(descriptor, None)
        if descriptor == self._writable:
            self._writable = None
