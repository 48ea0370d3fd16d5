"""Standard output and standard error as they are: closed by a pager, on a terminal or not, not UTF-8."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from ringfence_cli.printable import printable
from ringfence_cli.signals import interrupted

if TYPE_CHECKING:
    import click
    from _typeshed import ReadableBuffer

STANDARD_ERROR = 2
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""That a process which was interrupted waits for somebody to read what it prints."""


class ErrorStream(io.TextIOWrapper):
    """Standard error, which never fails: who does not read it misses something, and that is all."""

    def __init__(self) -> None:
        raw = _Forgiving(STANDARD_ERROR, "wb", closefd=False)
        super().__init__(io.BufferedWriter(raw), sys.stderr.encoding, errors="backslashreplace", line_buffering=True)

    def say(self, text: str) -> None:
        """Print `text`, which may come from anywhere."""
        self.write(f"{printable(text)}\n")

    def show(self, error: click.ClickException) -> None:
        """Print what click says of an error, in which words of the command line stand as they came."""
        said = io.StringIO()
        error.show(said)
        self.write(printable(said.getvalue()))


class WaitingStream(io.FileIO):
    """A stream that may be one that does not wait: whoever has the other end, or gave it to us, can have made it so.
    Waiting in ours is better anyway: it ends when the process has to."""

    def write(self, data: ReadableBuffer, /) -> int:
        part = memoryview(data)[: select.PIPE_BUF]  # for so much there is room where there is any: nothing waits in it
        self._wait()
        while (written := cast("int | None", super().write(part))) is None:
            self._wait()
        return written

    def _wait(self) -> None:
        """InterruptedError: nobody reads, and the process was interrupted. What is still printed goes nowhere."""
        patience = PATIENCE_SECONDS
        while not select.select((), (self,), (), LOOK_SECONDS)[1]:
            patience -= LOOK_SECONDS * interrupted()
            if patience <= 0:
                _lead_nowhere(self.fileno())
                raise InterruptedError(errno.EINTR, "interrupted while nobody read what is printed")


class _Forgiving(WaitingStream):
    def write(self, data: ReadableBuffer, /) -> int:
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def put(data: bytes) -> None:
    """Write to standard output. A reader who has gone is no error.

    Raises:
        InterruptedError: the process was interrupted, and nobody reads.
        OSError: it could not be written for another reason (no space).
    """
    try:
        sys.stdout.flush()
        # Not by way of its buffer: with PYTHONUNBUFFERED it has none, and may take only a part without a word.
        stream, rest = WaitingStream(sys.stdout.fileno(), "wb", closefd=False), memoryview(data)
        while rest:
            rest = rest[stream.write(rest) :]
    except BrokenPipeError:
        _lead_nowhere(sys.stdout.fileno())


def _lead_nowhere(descriptor: int) -> None:
    """What is still buffered would fail again when Python closes the stream."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
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
