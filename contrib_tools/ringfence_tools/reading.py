"""The tool ``read_file``: what it takes and gives, and how a file's lines are shown to a model."""

from __future__ import annotations

import hashlib
import mimetypes
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ringfence.errors import ToolValidationError
from ringfence.filesystem.patch import split_lines
from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, Filesystem
from ringfence.prompt.tool import ToolContext
from ringfence.runtime.tool_result import ToolResult, kept_result
from ringfence_sandbox import is_output
from ringfence_tools.handlers import FileHandlers, check_size, count_fitting_lines, explain_errors, format_count

MAX_LINE_CHARACTERS = 2_000
_LONG_LINE = re.compile(rb"[^\n]{%d}" % (MAX_LINE_CHARACTERS + 1))
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class ReadFile:
    file_path: str = field(metadata={"description": "The file, relative to the root."})
    offset: int = field(default=0, metadata={"description": "How many lines to skip."})
    limit: int = field(
        default=DEFAULT_READ_LIMIT, metadata={"description": f"How many lines to read, at most {DEFAULT_READ_LIMIT}."}
    )

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise ToolValidationError(f"offset is the number of lines to skip, it cannot be {self.offset}")
        if self.limit <= 0:
            raise ToolValidationError(f"limit is the number of lines to read, it cannot be {self.limit}")


@dataclass(frozen=True, slots=True)
class FileText:
    """Lines of a file, or what is known of one that is not text."""

    path: str
    content: str
    """Each line after its number, from 1; "" for a binary file."""
    offset: int
    """How many lines are before these."""
    limit: int
    """How many lines these are."""
    total_lines: int
    notes: tuple[str, ...] = ()
    """What cannot be seen in the lines: what is left, unusual line ends, an encoding."""
    kind: str = "text"
    """Of a file that is not text: what it seems to be."""
    size_bytes: int | None = None
    sha256: str | None = None

    def render(self) -> str:
        facts: list[str] = []
        if self.size_bytes is not None:
            facts += [f"kind: {self.kind}", f"size: {format_count(self.size_bytes, 'byte')}", f"sha256: {self.sha256}"]
        return "\n".join((*facts, *([self.content] if self.content else ()), *(f"[{note}]" for note in self.notes)))


class ReadHandler(FileHandlers):
    def read_file(self, params: ReadFile, *, context: ToolContext) -> ToolResult[FileText]:
        filesystem, path = self._open(context, params.file_path)
        if (kept := kept_result(context.session, path)) is not None and not filesystem.exists(path):
            return _show_kept_result(path, kept, params)
        if (printed := _find_long_lined_output(filesystem, path)) is not None:
            return _show_kept_result(path, printed, params, "a command printed")
        with explain_errors(filesystem, path, if_directory="is a directory: list it with ls"):
            check_size(filesystem, path)
            try:
                read = filesystem.read(path, offset=params.offset, limit=min(params.limit, DEFAULT_READ_LIMIT))
            except ValueError:  # not UTF-8, and the path has been looked at before
                return _read_unusual_file(filesystem, path, params)
        if "\0" in read.content:
            return _read_unusual_file(filesystem, path, params)
        return _show_lines(path, read.content, params.offset, read.total_lines)


def _show_lines(path: str, text: str, offset: int, total: int, notes: Iterable[str] = ()) -> ToolResult[FileText]:
    """The answer to reading lines: ``text`` from the line after ``offset``, of ``total``."""
    all_notes = list(notes)
    if offset == 0 and text.startswith(BYTE_ORDER_MARK):
        text = text.removeprefix(BYTE_ORDER_MARK)
        all_notes.append("the file begins with a byte order mark, which is not shown")
    raw = text.split("\n")
    ended = raw[-1] == ""
    if ended:
        raw.pop()
    returns = sum(line.endswith("\r") for line in (raw if ended else raw[:-1]))
    if returns:
        all_notes.append(
            "lines end with CRLF" if returns == len(raw) - (not ended) else "some lines end with CRLF, some with LF"
        )
    bare = [line.removesuffix("\r") if ended or at < len(raw) - 1 else line for at, line in enumerate(raw)]
    width = len(str(offset + len(raw)))
    lines = [f"{number:>{width}} | {_cut(line)}" for number, line in enumerate(bare, offset + 1)]
    kept = count_fitting_lines(lines)
    last = offset + kept
    if not kept:
        where = "it is empty" if total == 0 else f"no lines from offset {offset}: it has {format_count(total, 'line')}"
        return ToolResult.ok(FileText(escape_path(path), "", offset, 0, total), f"{escape_path(path)}: {where}")
    if last < total:
        all_notes.append(f"{format_count(total - last, 'line')} left: read on with offset={last}")
    elif not ended:
        all_notes.append("no newline at the end of the file")
    value = FileText(escape_path(path), "\n".join(lines[:kept]), offset, kept, total, tuple(all_notes))
    return ToolResult.ok(value, f"{escape_path(path)}: lines {offset + 1} to {last} of {total:,}")


def _show_kept_result(path: str, text: str, params: ReadFile, what: str = "a call answered") -> ToolResult[FileText]:
    """The answer to reading what a call answered. Long lines go on in the next, so that none is out of reach."""
    lines = text.split("\n")
    folded = [
        line[at : at + MAX_LINE_CHARACTERS] for line in lines for at in range(0, len(line) or 1, MAX_LINE_CHARACTERS)
    ]
    notes = [f"this is no file of the workspace, but all that {what}"]
    if len(folded) > len(lines):
        notes.append(f"lines of more than {MAX_LINE_CHARACTERS:,} characters go on in the next")
    window = folded[params.offset : params.offset + min(params.limit, DEFAULT_READ_LIMIT)]
    return _show_lines(path, "".join(f"{line}\n" for line in window), params.offset, len(folded), notes)


def _find_long_lined_output(filesystem: Filesystem, path: str) -> str | None:
    """The text of what a command printed, if a line of it is too long to be shown; None for any other path."""
    if not is_output(path):
        return None
    with suppress(OSError):
        content = filesystem.read_bytes(path).content
        if _LONG_LINE.search(content) is not None:
            return content.decode("utf-8", "backslashreplace")
    return None


def _cut(line: str) -> str:
    if len(line) <= MAX_LINE_CHARACTERS:
        return line
    return f"{line[:MAX_LINE_CHARACTERS]} [... {len(line) - MAX_LINE_CHARACTERS:,} more characters in this line]"


def _read_unusual_file(filesystem: Filesystem, path: str, params: ReadFile) -> ToolResult[FileText]:
    """The answer to reading what is not UTF-8. It reads all of the file, and tells the model its hash."""
    content = filesystem.read_bytes(path).content
    digest = hashlib.sha256(content).hexdigest()
    if b"\0" not in content:
        lines = split_lines(content)
        window = b"".join(lines[params.offset : params.offset + min(params.limit, DEFAULT_READ_LIMIT)])
        note = "the file is not UTF-8: other bytes are shown as \\xNN, and stay as they are when other text is edited"
        return _show_lines(path, window.decode(errors="backslashreplace"), params.offset, len(lines), [note])
    kind = mimetypes.guess_type(path)[0] or "binary"
    value = FileText(escape_path(path), "", 0, 0, 0, kind=kind, size_bytes=len(content), sha256=digest)
    return ToolResult.ok(value, f"{escape_path(path)} is not text")
