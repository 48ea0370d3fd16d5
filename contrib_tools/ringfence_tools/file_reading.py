"""How a file's lines are shown to a model, and what is said of a file that has none."""

from __future__ import annotations

import hashlib
import mimetypes
import re
from collections.abc import Iterable
from contextlib import suppress

from ringfence.filesystem.patch import split_lines
from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, MAX_TEXT_BYTES, Filesystem
from ringfence.runtime.tool_result import ToolResult
from ringfence_sandbox.disk.outputs import is_output
from ringfence_tools.file_params import ReadFile
from ringfence_tools.file_results import MAX_LINE_CHARACTERS, FileText, count, fitting

_LONG_LINE = re.compile(rb"[^\n]{%d}" % (MAX_LINE_CHARACTERS + 1))
BYTE_ORDER_MARK = "\ufeff"


def too_large(size: int) -> str | None:
    """Why a file of so many bytes is not read; None where it is."""
    if size <= MAX_TEXT_BYTES:
        return None
    most = f"more than the {MAX_TEXT_BYTES:,} that these tools take"
    return f"it has {size:,} bytes, {most}: leave it to a program that reads a part of it at a time"


def numbered(path: str, text: str, offset: int, total: int, notes: Iterable[str] = ()) -> ToolResult[FileText]:
    """The answer to reading lines: ``text`` from the line after ``offset``, of ``total``."""
    said = list(notes)
    if offset == 0 and text.startswith(BYTE_ORDER_MARK):
        text = text.removeprefix(BYTE_ORDER_MARK)
        said.append("the file begins with a byte order mark, which is not shown")
    raw = text.split("\n")
    ended = raw[-1] == ""
    if ended:
        raw.pop()
    returns = sum(line.endswith("\r") for line in (raw if ended else raw[:-1]))
    if returns:
        said.append(
            "lines end with CRLF" if returns == len(raw) - (not ended) else "some lines end with CRLF, some with LF"
        )
    bare = [line.removesuffix("\r") if ended or at < len(raw) - 1 else line for at, line in enumerate(raw)]
    width = len(str(offset + len(raw)))
    lines = [f"{number:>{width}} | {_cut(line)}" for number, line in enumerate(bare, offset + 1)]
    kept = fitting(lines)
    last = offset + kept
    if not kept:
        where = "it is empty" if total == 0 else f"no lines from offset {offset}: it has {count(total, 'line')}"
        return ToolResult.ok(FileText(escape_path(path), "", offset, 0, total), f"{escape_path(path)}: {where}")
    if last < total:
        said.append(f"{count(total - last, 'line')} left: read on with offset={last}")
    elif not ended:
        said.append("no newline at the end of the file")
    value = FileText(escape_path(path), "\n".join(lines[:kept]), offset, kept, total, tuple(said))
    return ToolResult.ok(value, f"{escape_path(path)}: lines {offset + 1} to {last} of {total:,}")


def kept_lines(path: str, text: str, params: ReadFile, what: str = "a call answered") -> ToolResult[FileText]:
    """The answer to reading what a call answered. Long lines go on in the next, so that none is out of reach."""
    lines = text.split("\n")
    folded = [
        line[at : at + MAX_LINE_CHARACTERS] for line in lines for at in range(0, len(line) or 1, MAX_LINE_CHARACTERS)
    ]
    notes = [f"this is no file of the workspace, but all that {what}"]
    if len(folded) > len(lines):
        notes.append(f"lines of more than {MAX_LINE_CHARACTERS:,} characters go on in the next")
    window = folded[params.offset : params.offset + min(params.limit, DEFAULT_READ_LIMIT)]
    return numbered(path, "".join(f"{line}\n" for line in window), params.offset, len(folded), notes)


def long_lined_output(filesystem: Filesystem, path: str) -> str | None:
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


def unusual_file(filesystem: Filesystem, path: str, params: ReadFile) -> ToolResult[FileText]:
    """The answer to reading what is not UTF-8. It reads all of the file, and tells the model its hash."""
    content = filesystem.read_bytes(path).content
    digest = hashlib.sha256(content).hexdigest()
    if b"\0" not in content:
        lines = split_lines(content)
        window = b"".join(lines[params.offset : params.offset + min(params.limit, DEFAULT_READ_LIMIT)])
        note = "the file is not UTF-8: other bytes are shown as \\xNN, and stay as they are when other text is edited"
        return numbered(path, window.decode(errors="backslashreplace"), params.offset, len(lines), [note])
    kind = mimetypes.guess_type(path)[0] or "binary"
    value = FileText(escape_path(path), "", 0, 0, 0, kind=kind, size_bytes=len(content), sha256=digest)
    return ToolResult.ok(value, f"{escape_path(path)} is not text")
