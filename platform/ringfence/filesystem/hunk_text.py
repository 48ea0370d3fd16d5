"""The lines of a hunk as text. Both forms of a patch have the same ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ringfence.filesystem.patch import LineKind

KINDS: dict[bytes, LineKind] = {b" ": " ", b"-": "-", b"+": "+", b"": " "}
EACH_LINE = "each line of a hunk begins with ' ' (stays), '-' (goes) or '+' (comes)"
# No file has more lines than 18 digits count, and int() rejects very long numbers.
HUNK_NUMBERS = re.compile(rb"@@ -(\d{1,18})(?:,(\d{1,18}))? \+(\d{1,18})(?:,(\d{1,18}))?(?: @@|\s*$)")
"""The first line of a hunk with its old line and count, and its new line and count. Some leave out the last ``@@``."""
NO_NEWLINE = "'\\ No newline at end of file'"


def bad_line(at: int, words: str) -> ValueError:
    return ValueError(f"line {at + 1} of the patch: {words}")


def is_no_newline(line: bytes) -> bool:
    """Whether the line says that the line above has no newline. Diffs say it in the language of their user."""
    return line.startswith(b"\\ ")


def is_end_of_file(line: bytes) -> bool:
    return line.rstrip() == b"*** End of File"


def parse_heading(line: bytes) -> bytes:
    """Return the line of the file that the first line of a hunk quotes, without blanks around it, or b"".

    A heading behind numbers is no quote: git cuts it off, and it may stand far above. A last ``@@`` is no part of it.
    """
    if not line.startswith(b"@@") or HUNK_NUMBERS.match(line) is not None:
        return b""
    heading = line[2:].strip().removesuffix(b"@@").strip()
    return b"" if heading == b"..." else heading


def parse_hunk_lines(lines: Sequence[bytes], start: int, end: int) -> tuple[tuple[LineKind, bytes], ...]:
    """Parse ``lines[start:end]``. The line end is removed from a line above a mark that it has none.

    Raises:
        ValueError: A line has no kind, or a mark stands where no file can end. The message names the line.
    """
    body: list[tuple[LineKind, bytes]] = []
    marks: dict[int, int] = {}
    for number in range(start, end):
        line = lines[number]
        if is_no_newline(line):
            if len(body) - 1 in marks:
                raise bad_line(number, f"{NO_NEWLINE} stands here twice")
            marks[len(body) - 1] = number
        elif line[:1] in KINDS:
            body.append((KINDS[line[:1]], line[1:] + b"\n"))
        else:
            raise bad_line(number, f"{EACH_LINE}; this one does not")
    last = {max((at for at, (kind, _) in enumerate(body) if kind != other), default=None) for other in "-+"}
    for at, number in marks.items():
        if at not in last:
            raise bad_line(number, f"{NO_NEWLINE} belongs below the last old or the last new line of a hunk")
        kind, line = body[at]
        body[at] = kind, line.removesuffix(b"\n")
    return tuple(body)


def stated_line(numbers: re.Match[bytes] | None, body: Sequence[tuple[LineKind, bytes]]) -> int | None:
    """Return the line that the numbers of a hunk state. None if they count old lines and it has none."""
    if numbers is None or (numbers[2] != b"0" and all(kind == "+" for kind, _ in body)):
        return None
    return int(numbers[1])
