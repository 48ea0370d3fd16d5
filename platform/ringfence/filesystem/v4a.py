"""The parser of patches that begin with ``*** Begin Patch``. It returns file patches, as that of unified diffs does.

Hunks have no line numbers. Their context lines show their place. A line ``@@ TEXT`` above a hunk quotes a line of the
file that stands above the place.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringfence.filesystem.hunk_text import bad_line, is_no_newline, parse_hunk_lines
from ringfence.filesystem.patch import FilePatch, Hunk

BEGIN, END = b"*** Begin Patch", b"*** End Patch"
_ADD, _DELETE, _UPDATE = b"*** Add File: ", b"*** Delete File: ", b"*** Update File: "
_MOVE, _END_OF_FILE = b"*** Move to: ", b"*** End of File"


def begins_v4a(line: bytes) -> bool:
    return line.rstrip() == BEGIN


def parse_v4a(lines: Sequence[bytes], begin: int) -> tuple[list[FilePatch], int]:
    """Parse the patch whose first line is ``lines[begin]``. Return its files, and the index after its last line.

    Raises:
        ValueError: A line does not fit the form, or the last line is missing. The message names the line.
    """
    files: list[FilePatch] = []
    at = begin + 1
    while at < len(lines) and lines[at].rstrip() != END:
        line, end = lines[at], _next_header(lines, at + 1)
        if line.startswith(_ADD):
            files.append(FilePatch(None, _path(line, _ADD), _new_lines(lines, at + 1, end)))
        elif line.startswith(_DELETE):
            files.append(FilePatch(_path(line, _DELETE), None, whole=True))
            if any(rest.strip() for rest in lines[at + 1 : end]):
                raise bad_line(at + 1, "a file that is deleted has no lines here")
        elif line.startswith(_UPDATE):
            source = target = _path(line, _UPDATE)
            if end == at + 1 < len(lines) and lines[end].startswith(_MOVE):
                target = _path(lines[end], _MOVE)
                at, end = end, _next_header(lines, end + 1)
            hunks = _hunks(lines, at + 1, end)
            if source == target and not hunks:
                raise bad_line(at, f"nothing is said about what to change in {source}")
            files.append(FilePatch(source, target, hunks))
        elif line.strip():
            raise bad_line(at, "a file begins with '*** Add File: ', '*** Update File: ' or '*** Delete File: '")
        at = end
    if at >= len(lines):
        raise ValueError("the patch is cut off: its last line is '*** End Patch'")
    if not files:
        raise ValueError("the patch names no file: begin each with a line such as '*** Update File: PATH'")
    return files, at + 1


def _next_header(lines: Sequence[bytes], at: int) -> int:
    while at < len(lines) and (not lines[at].startswith(b"*** ") or lines[at].rstrip() == _END_OF_FILE):
        at += 1
    return at


def _path(line: bytes, header: bytes) -> str:
    return line.removeprefix(header).strip().decode("utf-8", "surrogateescape")


def _new_lines(lines: Sequence[bytes], at: int, end: int) -> tuple[Hunk, ...]:
    while end > at and (not lines[end - 1].strip() or lines[end - 1].rstrip() == _END_OF_FILE):
        end -= 1
    for number in range(at, end):
        if not lines[number].startswith(b"+") and not is_no_newline(lines[number]):
            raise bad_line(number, "each line of a new file begins with '+'")
    body = parse_hunk_lines(lines, at, end)
    return (Hunk("the new file", None, body),) if body else ()


def _hunks(lines: Sequence[bytes], at: int, end: int) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    header, anchors, first = b"@@", list[bytes](), at
    while end > at and not lines[end - 1]:
        end -= 1
    for number in range(at, end + 1):
        line = lines[number] if number < end else b"@@"
        at_end = line.rstrip() == _END_OF_FILE
        if at_end or line.startswith(b"@@"):
            if body := parse_hunk_lines(lines, first, number):
                shown = header[:60].decode(errors="replace")
                hunks.append(Hunk(shown, None, body, tuple(anchors), at_end))
                anchors = []
            header, first = line, number + 1
            if not at_end and (anchor := line[2:].strip()):
                anchors.append(anchor)
    if anchors:
        raise bad_line(end - 1, "nothing is said about what to change there")
    return tuple(hunks)
