"""Where a command writes: standard output and error, and the files of a run. Readers may be gone, or disks full."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import reprlib
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, TextIO, cast
from uuid import NAMESPACE_OID, uuid5

import click

from ringfence.filesystem.paths import escape_path
from ringfence.runtime.receipts import Receipt
from ringfence_cli.signals import interrupted
from ringfence_sandbox import KilledCall
from ringfence_tools.printable import one_line, plural, printable, why

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from ringfence.adapters.model import ModelRetry, ModelText, ModelTurn
    from ringfence_sandbox import LogEntry, Workspace
    from ringfence_tools.contents import LeftOut
    from ringfence_tools.planning import Plan

_NOT_ASCII = re.compile("[^\x00-\x7e]")
_STREAMS = ((1, "standard output"), (2, "standard error"))
_NEWEST = 100
"""Entries of the log among which the newest step is looked for: the others are what somebody else changed since."""
STANDARD_ERROR = 2
MAX_LISTED = 20
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""That a process which was interrupted waits for somebody to read what it prints."""
SILENT_SECONDS, EVERY_SECONDS = 1.0, 0.1
"""After which progress is shown, and how often it is renewed."""
CLEARED = "\r\x1b[K"


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


class Recording:
    """The progress of `Workspace.open`: one line on a terminal's standard error, which is removed at the end."""

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream if stream is not None else ErrorStream()
        self._clock = clock
        is_dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
        self._shows = not quiet and not is_dumb and self._stream.isatty()
        self._next = clock() + SILENT_SECONDS
        self._is_shown = False

    def __call__(self, files: int) -> None:
        if not self._shows or (now := self._clock()) < self._next:
            return
        self._next, self._is_shown = now + EVERY_SECONDS, True
        self._put(f"{CLEARED}recording the tree: {plural(files, 'file')} so far")

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            self._put(CLEARED)

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def json_line(value: Mapping[str, object]) -> bytes:
    r"""One object on one line, in ASCII, with its line end. Half of a surrogate pair, which is how a byte that is not
    UTF-8 stands in a name, becomes the text ``\xNN``: JSON readers need not take it."""
    return (_NOT_ASCII.sub(_escaped, json.dumps(value, ensure_ascii=False)) + "\n").encode()


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xD800 <= code <= 0xDFFF:
        return f"\\\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\\\u{code:04x}"
    return json.dumps(match[0])[1:-1]


class JsonOutput:
    """What a program that asked for JSON gets on standard output: one object, the first that there is to say."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted

    def put(self, record: Mapping[str, object]) -> None:
        """Raises OSError where it cannot be written."""
        if self._wanted:
            self._wanted = False
            put(json_line(record))


def left_out_lines(paths: Sequence[LeftOut]) -> Iterator[str]:
    """Lines for the paths that the agent does not see, or that the history does not cover."""
    for one in paths[:MAX_LISTED]:
        yield f"left out: {escape_path(one.path)} ({one_line(one.reason, 200)})"
    if len(paths) > MAX_LISTED:
        yield f"left out: {len(paths) - MAX_LISTED} more; --json lists all"


def refuse_way_out(path: Path, directory: Path) -> None:
    """OSError for a path in a workspace from where a link, which an agent can have made, leads to a file outside."""
    root = os.path.realpath(directory)
    is_in = any(os.path.realpath(above) == root for above in Path(os.path.abspath(path)).parents)
    if is_in and not Path(os.path.realpath(path)).is_relative_to(root):
        words = f"a link in {directory} leads from there to a file outside: remove the link, or name that file"
        raise OSError(errno.EPERM, words, str(path))


def refuse_one_file(read: Iterable[tuple[str, Path]], written: Iterable[tuple[str, Path | None]]) -> None:
    """click.UsageError where an option names a file to write that another one names, to write or to read, or that a
    standard stream goes into: asked before any is touched, since what is in it would be gone."""
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
    """Let nobody take for this run's what an earlier one left, should this one not come to write it.

    The patch is emptied and not removed: another run, for which this one has to wait, may have it open.
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
    """A file that the user named, opened for writing and not yet changed.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else 0)
        self._descriptor = os.open(path, flags, 0o666)
        regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        # Where somebody may have to read before there is room, an interrupt ends the waiting.
        self._pipe = None if regular else WaitingStream(self._descriptor, "wb", closefd=False)

    def write(self, data: bytes) -> None:
        """Write to the end, at once: no buffer, so what is written is whole when the next instruction runs.

        Where not all of it can be written, nothing is: half a line would spoil the next one.
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
        """Make `data` all that the file holds."""
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.ftruncate(self._descriptor, 0)
        self.write(data)

    def is_same_file(self, other: OutputFile) -> bool:
        """Whether both are one file in which they would write over each other."""
        return self.is_file(os.fstat(other._descriptor))

    def is_file(self, found: os.stat_result) -> bool:
        """Whether it is a regular file, and the one that was found."""
        return stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(self._descriptor))

    def close(self) -> None:
        os.close(self._descriptor)


class ReceiptsFile(OutputFile):
    """A watcher that writes a line for every tool call, at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, append=True)

    def text(self, event: ModelText) -> None: ...

    def retry(self, event: ModelRetry) -> None: ...

    def turn(self, event: ModelTurn) -> None: ...

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        try:
            record = receipt.to_json()
        except (ValueError, TypeError, RecursionError):
            # A model's arguments that no JSON can hold (nested too deeply) must not cost the call its receipt.
            record = replace(receipt, params=reprlib.repr(receipt.params)).to_json()
        self.write(json_line(record))

    def complete(self, workspace: Workspace) -> None:
        """Write the receipts that crashes have cut off: of calls that openings of the workspace had to end, and of the
        newest step of each session that the file tells of, where it does not tell of that step.

        click.UsageError where they cannot be written."""
        said = self._read_existing()
        steps = [entry for entry in workspace.log(_NEWEST) if entry.number]
        for killed in workspace.killed_calls():
            step = next((entry for entry in steps if entry.commit == killed.commit), None)
            receipt = _of_killed(killed, step, workspace)
            if receipt.receipt_id.encode() not in said:
                self._complete_with(receipt)
        workspace.forget_killed_calls()
        said, last = self._read_existing(), dict[str, "LogEntry"]()
        for entry in steps:
            if entry.session_id:
                last.setdefault(entry.session_id, entry)
        for entry in reversed(last.values()):
            if entry.session_id.encode() in said and entry.receipt_id.encode() not in said:
                at = entry.created_at.isoformat()
                killed = KilledCall("", entry.call_id, entry.tool, True, entry.commit, (), (), at)
                self._complete_with(_of_killed(killed, entry, workspace))

    def _complete_with(self, receipt: Receipt) -> None:
        try:
            self.call(receipt, None, "")
        except OSError as error:
            raise click.UsageError(f"{str(self.path)!r} cannot be written: {why(error)}") from None

    def _read_existing(self) -> bytes:
        try:
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                return self.path.read_bytes()
        except OSError:  # it may be written, and not be read
            pass
        return b""


def _of_killed(killed: KilledCall, step: LogEntry | None, workspace: Workspace) -> Receipt:
    """What is known of a call whose process was killed, and of the step that it became, if it changed anything."""
    receipt = Receipt(
        receipt_id=str(uuid5(NAMESPACE_OID, killed.begun)),
        call_id=killed.call_id,
        tool=killed.tool,
        params=None,
        outcome="committed" if killed.committed else "rolled_back",
        message="; ".join(["its process was killed", *killed.notes]),
        started_at=killed.began_at,
        duration_seconds=0.0,
        session_id="",
        prompt_name="",
        conflicts=tuple(killed.conflicts),
        recovered=True,
    )
    if step is None or step.number is None:
        return receipt
    return replace(
        receipt,
        receipt_id=step.receipt_id,
        started_at=step.created_at,
        session_id=step.session_id,
        changes=workspace.show(step.number).changes,
        commit=step.commit,
    )
