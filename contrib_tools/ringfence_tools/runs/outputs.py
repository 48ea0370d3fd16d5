"""Where a command writes: standard output and error, and the files of a run. Readers may be gone, or disks full."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import stat
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, combinations, product
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

import click

from ringfence.escapes import escape_path
from ringfence.filesystem.readable_diff import readable_patch
from ringfence_tools.printable import one_line, plural, printable, why
from ringfence_tools.runs.signals import interrupted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from ringfence_tools.contents import LeftOut
    from ringfence_tools.runs.report import ReportFile

_NOT_ASCII = re.compile("[^\x00-\x7e]")
_STREAMS = ((1, "standard output"), (2, "standard error"))
STANDARD_ERROR = 2
MAX_LISTED = 20
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""That a process which was interrupted waits for somebody to read what it prints."""
SILENT_SECONDS, EVERY_SECONDS = 1.0, 0.1
"""After which progress is shown, and how often it is renewed."""
MAX_DIFF_LINES = 400
"""The most lines of the diff of a run that a terminal gets."""
STYLES = {"@": "cyan", "+": "green", "-": "red"}
CLEARED = "\r\x1b[K"


class ErrorStream(io.TextIOWrapper):
    """Standard error. A failed write to it is ignored."""

    def __init__(self) -> None:
        raw = _Forgiving(STANDARD_ERROR, "wb", closefd=False)
        super().__init__(io.BufferedWriter(raw), sys.stderr.encoding, errors="backslashreplace", line_buffering=True)

    def say(self, text: str) -> None:
        """Print `text`, with control characters escaped. At a terminal, lines are wrapped between words."""
        lines = printable(text).split("\n")
        columns = os.get_terminal_size(self.fileno()).columns if self.isatty() else 0
        self.write("".join(f"{_wrapped(line, columns)}\n" for line in lines))

    def show(self, error: click.ClickException) -> None:
        """Print what click says of an error, in which words of the command line stand as they came."""
        said = io.StringIO()
        error.show(said)
        self.write(printable(said.getvalue()))


def _wrapped(line: str, columns: int) -> str:
    """Return a line with line ends between its words. One with a command is as it was, so that it can be copied."""
    if not 0 < columns < len(line) or "`" in line:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class WaitingStream(io.FileIO):
    """A stream that waits for its reader. The other end of a pipe can have made it non-blocking.

    The wait happens here and not in the kernel, so that it can end with the process.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        part = memoryview(data)[: select.PIPE_BUF]  # a pipe with any room takes this much without blocking
        self._wait()
        while (written := cast("int | None", super().write(part))) is None:
            self._wait()
        return written

    def _wait(self) -> None:
        """Raise InterruptedError if the process was interrupted while nobody reads. Later output is dropped."""
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


def put_line(text: object) -> None:
    """Write a line to standard output, as `put` does."""
    put(f"{text}\n".encode(errors="backslashreplace"))


def _lead_nowhere(descriptor: int) -> None:
    """Drop the buffer of a stream. Else the write would fail again when Python closes the stream."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def put_diff(patch: bytes, whole: str | None = None, readable: bytes | None = None) -> None:
    """Write a patch to standard output: as it is, or, for a person at a terminal, in colours and with nothing in it
    that could act on the terminal. There binary files are described, as in ``readable`` if that is given, and it is cut
    after `MAX_DIFF_LINES` if ``whole`` says how to see all of it."""
    if not sys.stdout.isatty():
        put(patch)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False, soft_wrap=True)
    shown = Text()
    shown_patch = readable_patch(patch) if readable is None else readable
    lines = printable(shown_patch.decode("utf-8", "surrogateescape")).splitlines(keepends=True)
    for line in lines if whole is None else lines[:MAX_DIFF_LINES]:
        shown.append(line, diff_style(line))
    if whole is not None and len(lines) > MAX_DIFF_LINES:
        shown.append(f"[{plural(len(lines) - MAX_DIFF_LINES, 'more line')} of the diff: {whole}]\n", "bold yellow")
    with console.capture() as captured:
        console.print(shown, end="")
    put(captured.get().encode(sys.stdout.encoding, "backslashreplace"))


def diff_style(line: str) -> str:
    return "bold" if line.startswith(("diff ", "--- ", "+++ ")) else STYLES.get(line[:1], "")


@contextmanager
def recording(
    *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = monotonic
) -> Generator[Callable[[int], None]]:
    """Show the progress of `Workspace.open`: one line on a terminal's standard error, which is removed at the end."""
    terminal = stream if stream is not None else ErrorStream()
    is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    shows, is_shown, next_at = not quiet and not is_dumb and terminal.isatty(), False, clock() + SILENT_SECONDS

    def show(files: int) -> None:
        nonlocal is_shown, next_at
        if shows and (now := clock()) >= next_at:
            is_shown, next_at = True, now + EVERY_SECONDS
            terminal.write(f"{CLEARED}recording the tree: {plural(files, 'file')} so far")
            terminal.flush()

    try:
        yield show
    finally:
        if is_shown:
            terminal.write(CLEARED)
            terminal.flush()


def json_line(value: Mapping[str, object]) -> bytes:
    r"""One object on one line, in ASCII, with its line end. Half of a surrogate pair, which is how a byte that is not
    UTF-8 stands in a name, becomes the text ``\xNN``: JSON readers need not take it."""
    return (_NOT_ASCII.sub(_escaped, json.dumps(value, ensure_ascii=False)) + "\n").encode()


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xD800 <= code <= 0xDFFF:
        return f"\\\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\\\u{code:04x}"
    return json.dumps(match[0])[1:-1]


def left_out_lines(paths: Sequence[LeftOut]) -> Iterator[str]:
    """Yield lines for the paths that are hidden from the agent or not covered by the history."""
    for one in paths[:MAX_LISTED]:
        yield f"left out: {escape_path(one.path)} ({one_line(one.reason, 200)})"
    if len(paths) > MAX_LISTED:
        yield f"left out: {len(paths) - MAX_LISTED} more; --json lists all"


OutputT = TypeVar("OutputT", bound="OutputFile | ReportFile")


def open_output(
    kind: Callable[[Path], OutputT], path: Path | None, directory: Path, stack: ExitStack
) -> OutputT | None:
    """Open a file that an option names, until ``stack`` ends. Raises click.UsageError if it cannot be written."""
    if path is None:
        return None
    try:
        refuse_way_out(path, directory)
        return stack.enter_context(closing(kind(path)))
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {why(error)}") from None


def refuse_way_out(path: Path, directory: Path) -> None:
    """Raise OSError for a path in a workspace if a link leads from there to a file outside."""
    root = os.path.realpath(directory)
    is_in = any(os.path.realpath(above) == root for above in Path(os.path.abspath(path)).parents)
    if is_in and not Path(os.path.realpath(path)).is_relative_to(root):
        words = f"a link in {directory} leads from there to a file outside: remove the link, or name that file"
        raise OSError(errno.EPERM, words, str(path))


def refuse_one_file(read: Iterable[tuple[str, Path]], written: Iterable[tuple[str, Path | None]]) -> None:
    """Raise click.UsageError if a file to write is also named by another option, or is a standard stream.

    This is checked before any file is opened, since opening may empty it.
    """
    results = [(option, path) for option, path in written if path is not None]
    for (option, path), (other, also) in chain(product(read, results), combinations(results, 2)):
        if _is_one_file(path, also):
            raise click.UsageError(f"{option} and {other} name the same file")
    for (option, path), (descriptor, stream) in product(results, _STREAMS):
        if _goes_into(descriptor, path):
            raise click.UsageError(f"{option} names the file that {stream} goes into: keep them apart")


def _is_one_file(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other) and path.is_file()
    except OSError:
        return os.path.realpath(path) == os.path.realpath(other)


def _goes_into(descriptor: int, path: Path) -> bool:
    try:
        found = path.stat()
        return stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(descriptor))
    except OSError:
        return False


def clear(directory: Path, patch: Path | None, report: Path | None) -> None:
    """Remove the results of an earlier run, in case this run writes none.

    The patch is emptied and not removed, since another run may have it open.
    """
    with suppress(OSError):
        if patch is not None and stat.S_ISREG(patch.stat().st_mode):
            refuse_way_out(patch, directory)
            os.truncate(patch, 0)
    with suppress(OSError):
        if report is not None and stat.S_ISREG(report.lstat().st_mode):
            refuse_way_out(report, directory)
            report.unlink()


class OutputFile:
    """A file that the user named. It is opened for writing, and unchanged until the first write.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else 0)
        self._descriptor = os.open(path, flags, 0o666)
        regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        # Where somebody may have to read before there is room, an interrupt ends the waiting.
        self._pipe = None if regular else WaitingStream(self._descriptor, "wb", closefd=False)

    def write(self, data: bytes) -> None:
        """Append `data` without a buffer.

        If only a part can be written, that part is removed: half a line would spoil the next one.
        """
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) if self._pipe is None else self._pipe.write(rest) :]
        except OSError as error:
            self._cut_off(len(data) - len(rest))
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _cut_off(self, written: int) -> None:
        found = os.fstat(self._descriptor)
        if written and stat.S_ISREG(found.st_mode):
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if found.st_size == end:  # else somebody has written more
                os.ftruncate(self._descriptor, end - written)
                os.lseek(self._descriptor, end - written, os.SEEK_SET)

    def replace(self, data: bytes) -> None:
        """Replace the content of the file by `data`."""
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.ftruncate(self._descriptor, 0)
        self.write(data)

    def close(self) -> None:
        os.close(self._descriptor)
