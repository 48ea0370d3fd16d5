"""The parser of patches that begin with ``*** Begin Patch``. It returns file patches, as that of unified diffs does.

The context lines of a hunk show its place. A line ``@@ TEXT`` above a hunk quotes a line of the file that stands above
the place, and ``@@ -3,2 +3,2 @@`` states the place as in a unified diff.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringfence.filesystem.hunk_text import (
    HUNK_NUMBERS,
    bad_line,
    is_end_of_file,
    is_no_newline,
    parse_heading,
    parse_hunk_lines,
    stated_line,
)
from ringfence.filesystem.patch import FilePatch, Hunk

BEGIN, END = b"*** Begin Patch", b"*** End Patch"
_ADD, _DELETE, _UPDATE = b"*** Add File: ", b"*** Delete File: ", b"*** Update File: "
_MOVE = b"*** Move to: "


def begins_v4a(line: bytes) -> bool:
    """Whether a patch of this form begins here. Its first line may have been left out."""
    return line.rstrip() == BEGIN or line.startswith((_ADD, _DELETE, _UPDATE))


def parse_v4a(lines: Sequence[bytes], begin: int) -> tuple[list[FilePatch], int]:
    """Parse the patch whose first line is ``lines[begin]``. Return its files, and the index after its last line.

    Raises:
        ValueError: A line does not fit the form, or the last line is missing. The message names the line.
    """
    files: list[FilePatch] = []
    at = begin + (lines[begin].rstrip() == BEGIN)
    while at < len(lines) and lines[at].rstrip() != END:
        line, end = lines[at], _next_header(lines, at + 1)
        if line.startswith(_ADD):
            path = _path(line, _ADD)
            files.append(FilePatch(None, path, _new_lines(lines, _after_names(lines, at + 1, {path}), end)))
        elif line.startswith(_DELETE):
            files.append(FilePatch(_path(line, _DELETE), None, whole=True))
            if any(rest.strip() for rest in lines[at + 1 : end]):
                raise bad_line(at + 1, "a file that is deleted has no lines here")
        elif line.startswith(_UPDATE):
            source = target = _path(line, _UPDATE)
            if end == at + 1 < len(lines) and lines[end].startswith(_MOVE):
                target = _path(lines[end], _MOVE)
                at, end = end, _next_header(lines, end + 1)
            hunks = _hunks(lines, _after_names(lines, at + 1, {source, target}), end)
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
    while at < len(lines) and (not lines[at].startswith(b"*** ") or is_end_of_file(lines[at])):
        at += 1
    return at


def _path(line: bytes, header: bytes) -> str:
    return line.removeprefix(header).strip().decode("utf-8", "surrogateescape")


def _has_names(lines: Sequence[bytes], at: int) -> bool:
    """Whether the two names of a unified diff stand here, above a hunk."""
    marks = (b"--- ", b"+++ ", b"@@")
    there = lines[at : at + 3]
    return len(there) == 3 and all(line.startswith(mark) for line, mark in zip(there, marks, strict=True))


def _after_names(lines: Sequence[bytes], at: int, paths: set[str]) -> int:
    """Return the index after the two names of a unified diff, if they repeat the paths of the file."""
    if not _has_names(lines, at):
        return at
    names = {line[4:].partition(b"\t")[0].strip().decode("utf-8", "surrogateescape") for line in lines[at : at + 2]}
    allowed = {"/dev/null"} | {prefix + path for path in paths for prefix in ("", "a/", "b/")}
    return at + 2 if names <= allowed else at


def _new_lines(lines: Sequence[bytes], at: int, end: int) -> tuple[Hunk, ...]:
    while end > at and (not lines[end - 1].strip() or is_end_of_file(lines[end - 1])):
        end -= 1
    if at < end and (numbers := HUNK_NUMBERS.match(lines[at])) is not None and numbers[2] == b"0":
        at += 1
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
        at_end = is_end_of_file(line)
        if at_end or line.startswith(b"@@"):
            numbers = HUNK_NUMBERS.match(header)
            if body := parse_hunk_lines(lines, first, number):
                shown = header[:60].decode(errors="replace")
                hunks.append(Hunk(shown, stated_line(numbers, body), body, tuple(anchors), at_end))
                anchors = []
            elif numbers is not None:
                raise bad_line(first - 1, "this hunk has no lines")
            header, first = line, number + 1
            if anchor := parse_heading(line):
                anchors.append(anchor)
        elif number + 2 < end and _has_names(lines, number):
            raise bad_line(
                number, "names of a unified diff in a file of another form: begin that file with '*** Update File: '"
            )
    if anchors:
        raise bad_line(end - 1, "nothing is said about what to change there")
    return tuple(hunks)
