"""Replace text in a file's bytes. Bytes outside of the match never change. An error shows text that nearly matches."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path

from ringfence.escapes import escape_path
from ringfence.filesystem.encodings import as_utf8, from_utf8, is_foreign
from ringfence.filesystem.near_misses import MAX_COUNTED, NearMisses, find_places
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, MAX_TEXT_BYTES, READ_ENTIRE_FILE

MAX_LISTED = 20
"""The number of line numbers that an error lists."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A file after ``count`` replacements. ``lines`` has the line of `content`, from 1, where each of them begins."""

    content: bytes
    count: int
    lines: tuple[int, ...]


def replace_exact(content: bytes, old: str, new: str, *, replace_all: bool = False) -> Replacement:
    """Replace the only occurrence of `old` by `new`, or every occurrence with ``replace_all``.

    Text is matched in UTF-8, byte for byte. A file in UTF-16 or UTF-32 keeps its encoding. Line ends are the
    exception: a ``\\n`` of `old` matches ``\\r\\n`` too, and the replacement gets the line ends of the text that it
    replaces. Mixed line ends are kept line by line.

    An `old` with a ``\\r`` is first searched exactly. If it occurs, a `new` with a ``\\r`` is written exactly.
    Occurrences that differ only in their line ends count as several occurrences.

    Raises:
        ValueError: `old` is empty, equals `new` or does not occur (the message shows near matches), or occurs more
            than once without ``replace_all`` (the message lists the lines). `new` is not ASCII, and the file is in
            an encoding that nobody can tell.
    """
    if not old:
        raise ValueError("old_string is empty: quote the text that is to be replaced")
    if old == new:
        raise ValueError("old_string and new_string are the same: there is nothing to change")
    literal = utf8(old, "old_string")
    verbatim = utf8(new, "new_string")
    content, encoding = as_utf8(content)
    if "\r" in old and literal in content:
        text, wanted, ends_follow_file = _Ends(content, b""), literal, False
    else:
        text, wanted = _Ends(content, b"\r\n"), literal.replace(b"\r\n", b"\n")
        ends_follow_file = "\r" in old or "\r" not in new
    # Overlapping occurrences count too, since each of them could be meant.
    starts = list(islice(find_places(text.plain, wanted, 1), MAX_COUNTED + 1))
    if not starts:
        raise ValueError(NearMisses(content).describe("old_string does not occur in the file", old, new))
    if len(starts) > 1 and not replace_all:
        raise ValueError(_describe_places(text.plain, starts))
    parts: list[bytes] = []
    lines: list[int] = []
    line, end = 1, 0
    for start in find_places(text.plain, wanted, len(wanted)):
        first, after = text.original(start), text.original(start + len(wanted))
        parts += (content[end:first], _with_ends(content, first, after, old, new) if ends_follow_file else verbatim)
        line += parts[-2].count(b"\n")
        lines.append(line)
        line += parts[-1].count(b"\n")
        end = after
    edited = b"".join((*parts, content[end:]))
    if edited == content:
        raise ValueError(
            "the replacement is what stands there already (line ends are kept): there is nothing to change"
        )
    check_same_encoding(content, new, "new_string")
    return Replacement(from_utf8(edited, encoding), len(lines), tuple(lines))


def check_same_encoding(content: bytes, text: str, what: str) -> None:
    """Raise ValueError for text that would be the only UTF-8 in a file of another encoding."""
    if not text.isascii() and is_foreign(content):
        raise ValueError(
            f"the file is in another encoding than UTF-8, and {what} is not ASCII: it would be written as UTF-8. "
            "Use ASCII, or a program that knows the encoding"
        )


class _Ends:
    """A file's bytes with each ``\\r\\n`` as ``\\n``. It maps positions in them to positions in the file."""

    def __init__(self, content: bytes, end: bytes) -> None:
        found = re.finditer(end, content) if end and end in content else ()
        self._shortened = [match.start() - before for before, match in enumerate(found)]
        self.plain = content.replace(end, b"\n") if self._shortened else content

    def original(self, position: int) -> int:
        return position + bisect_left(self._shortened, position)


def _with_ends(content: bytes, start: int, end: int, old: str, new: str) -> bytes:
    """Return `new` with the line ends of the bytes from `start` to `end`, or else of the line around them."""
    wanted = [line.encode() for line in new.replace("\r\n", "\n").split("\n")]
    ends = re.findall(rb"\r?\n", content[start:end])
    if len(set(ends)) <= 1:
        return (ends[0] if ends else line_end_at(content, end)).join(wanted)
    # Mixed ends: lines that old and new share at the top and bottom keep their own ends. The lines between get the end
    # that follows the shared top.
    given = [line.encode() for line in old.replace("\r\n", "\n").split("\n")]
    breaks = len(wanted) - 1
    top = min(_shared(given, wanted), len(ends))
    bottom = _shared(given[top:][::-1], wanted[top:][::-1])
    bottom = min(bottom, len(ends) - top, max(breaks - top, 0))
    between = [ends[min(top, len(ends) - 1)]] * (breaks - top - bottom)
    taken = [*ends[:top], *between, *ends[len(ends) - bottom :]][:breaks]
    return b"".join(line + end for line, end in zip(wanted, [*taken, b""], strict=True))


def _shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    unlike = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unlike, min(len(one), len(other)))


def line_end_at(content: bytes, position: int) -> bytes:
    """The line end of the file at `position`: the next line end, or else the previous one, or else ``\\n``."""
    found = content.find(b"\n", position)
    if found < 0:
        found = content.rfind(b"\n", 0, position)
    return b"\r\n" if found > 0 and content[found - 1 : found] == b"\r" else b"\n"


def utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not text: character {error.start} is half of a surrogate pair") from None


def _describe_places(content: bytes, starts: Sequence[int]) -> str:
    lines = [str(content.count(b"\n", 0, start) + 1) for start in starts[:MAX_LISTED]]
    count = f"more than {MAX_COUNTED:,}" if len(starts) > MAX_COUNTED else str(len(starts))
    more = ", ..." if len(starts) > MAX_LISTED else ""
    return (
        f"old_string occurs {count} times, at lines {', '.join(lines)}{more}: quote more of the lines around "
        "the one that is meant, or set replace_all"
    )


_NEWLINE = ord("\n")
_CHUNK_BYTES = 1 << 14


def count_newlines(content: bytes) -> list[int]:
    """Count the ``\\n`` before the end of each chunk. With these counts, `line_window` reads only its window."""
    chunks = range(0, len(content), _CHUNK_BYTES)
    return list(accumulate(content.count(b"\n", start, start + _CHUNK_BYTES) for start in chunks))


def line_window(
    content: bytes, offset: int, limit: int | None, encoding: str, path: str, newlines: Sequence[int] | None = None
) -> tuple[str, int, int]:
    """Return the text of lines ``offset`` to ``offset + limit``, the number of these lines, and of all lines.

    Lines end only at \\n or \\r\\n. ``limit`` is as in `Filesystem.read`. Only the window is decoded, if line ends can
    be recognised in the encoding's bytes. ``newlines`` is `count_newlines` of the content, if the caller knows it.

    Raises:
        ValueError: The window is bad, the encoding is unknown, or bytes do not decode. The message names ``path``.
    """
    limit = check_window(offset, limit)
    if ends_lines_with_newline_bytes(encoding):
        newlines = count_newlines(content) if newlines is None else newlines
        total = (newlines[-1] + (content[-1] != _NEWLINE)) if content else 0
        end = total if limit == READ_ENTIRE_FILE else min(offset + limit, total)
        returned = max(0, end - offset)
        if returned < total:
            content = content[_line_start(content, newlines, offset) : _line_start(content, newlines, end)]
        return _decoded(content, encoding, path), returned, total
    lines = _decoded(content, encoding, path).split("\n")
    lines = [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    window = lines[offset:] if limit == READ_ENTIRE_FILE else lines[offset : offset + limit]
    return "".join(window), len(window), len(lines)


def check_window(offset: int, limit: int | None) -> int:
    """Return the limit of a window. Raises ValueError for a bad one."""
    if offset < 0:
        raise ValueError(f"offset counts lines from 0, it cannot be {offset}")
    if limit is not None and limit < READ_ENTIRE_FILE:
        raise ValueError(f"limit is a number of lines, or {READ_ENTIRE_FILE} for all of them; it cannot be {limit}")
    return DEFAULT_READ_LIMIT if limit is None else limit


def _line_start(content: bytes, newlines: Sequence[int], line: int) -> int:
    """The position at which a line (from 0) begins. It is the end of the content for a line after the last one."""
    if line == 0:
        return 0
    chunk = bisect_left(newlines, line)
    if chunk == len(newlines):
        return len(content)
    start = chunk * _CHUNK_BYTES
    before = newlines[chunk - 1] if chunk else 0
    rest = content[start : start + _CHUNK_BYTES].split(b"\n", line - before)[-1]
    return min(start + _CHUNK_BYTES, len(content)) - len(rest)


@lru_cache(maxsize=64)
def ends_lines_with_newline_bytes(encoding: str) -> bool:
    try:
        return "a\nb".encode(encoding) == b"a\nb"
    except LookupError as error:
        raise ValueError(f"cannot decode with {encoding!r}: {error}") from None


def _decoded(content: bytes, encoding: str, path: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise decoding_error(error, encoding, path) from error


def decoding_error(error: UnicodeDecodeError, encoding: str, path: str) -> ValueError:
    bad = error.object[error.start]
    return ValueError(f"{escape_path(path)} is not {encoding} text (byte 0x{bad:02x}): read_bytes reads it as it is")


def read_host_text(path: Path) -> str:
    """Read the UTF-8 text of a host file. The length is limited: a device or a pipe may never end.

    Raises:
        ValueError: The file is longer than MAX_TEXT_BYTES, or not UTF-8.
        OSError: The file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(f"it has more than {MAX_TEXT_BYTES:,} characters, which is too much to hold in memory")
    return text
