"""Standard output and standard error as they are: closed by a pager, on a terminal or not, not UTF-8."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from ringfence_cli.printable import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ErrorStream(io.TextIOWrapper):
    """Standard error, which never fails: who does not read it misses something, and that is all."""

    def __init__(self) -> None:
        super().__init__(_Forgiving(sys.stderr), sys.stderr.encoding, errors="backslashreplace", write_through=True)

    def say(self, text: str) -> None:
        """Print `text`, which may come from anywhere."""
        self.write(f"{printable(text)}\n")


class _Forgiving(io.BufferedIOBase):
    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def name(self) -> str:
        return self._stream.name

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError, ValueError):
            self._stream.buffer.write(data)
            self._stream.buffer.flush()
        return memoryview(data).nbytes

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def put(data: bytes) -> None:
    """Write to standard output. A reader who has gone is no error.

    Raises:
        OSError: it could not be written for another reason (no space).
    """
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # What is still buffered would fail again when Python closes the stream.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def put_diff(patch: bytes) -> None:
    """Write a patch to standard output: as it is, or, for a person at a terminal, in colours and with nothing in it
    that could act on the terminal."""
    if not sys.stdout.isatty():
        put(patch)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False, soft_wrap=True)
    shown = Text()
    for line in printable(patch.decode("utf-8", "surrogateescape")).splitlines(keepends=True):
        shown.append(line, _style(line))
    with console.capture() as captured:
        console.print(shown, end="")
    put(captured.get().encode(sys.stdout.encoding, "backslashreplace"))


def _style(line: str) -> str:
    if line.startswith(("diff ", "--- ", "+++ ")):
        return "bold"
    return {"@": "cyan", "+": "green", "-": "red"}.get(line[:1], "")
