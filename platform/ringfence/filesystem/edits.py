"""Replace text in a file's bytes. Bytes outside of the match never change. An error shows text that nearly matches."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from heapq import nlargest
from itertools import accumulate, islice
from pathlib import Path
from typing import TypeVar

from ringfence.filesystem.encodings import as_utf8, from_utf8, is_foreign
from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, MAX_TEXT_BYTES, READ_ENTIRE_FILE

LineT = TypeVar("LineT", str, bytes)

MAX_LISTED = 20
"""The number of line numbers that an error lists."""
MAX_COUNTED = 10_000
MAX_HINT_BYTES = 8_000_000
"""The largest file in which near matches are searched for a hint."""
MAX_COMPARED_LINES = 200_000
MAX_COMPARED_CHARACTERS = 199
"""The number of characters of a line that are compared. In a longer line, difflib ignores frequent characters."""
MAX_HINTS = 3
MAX_SHOWN_CHARACTERS = 200
"""The number of characters of a line that a hint quotes."""
MAX_SHOWN_LINES = 8


@dataclass(frozen=True, slots=True)
class Edit:
    """A file after ``count`` replacements. ``lines`` has the line of `content`, from 1, where each of them begins."""

    content: bytes
    count: int
    lines: tuple[int, ...]


def replace_exact(content: bytes, old: str, new: str, *, replace_all: bool = False) -> Edit:
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
    starts = list(islice(_places(text.plain, wanted, 1), MAX_COUNTED + 1))
    if not starts:
        raise ValueError(_describe_miss(content, old, new))
    if len(starts) > 1 and not replace_all:
        raise ValueError(_describe_places(text.plain, starts))
    parts: list[bytes] = []
    lines: list[int] = []
    line, end = 1, 0
    for start in _places(text.plain, wanted, len(wanted)):
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
    return Edit(from_utf8(edited, encoding), len(lines), tuple(lines))


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


def _places(content: LineT, wanted: LineT, step: int) -> Iterator[int]:
    # `bytes.find` is linear. A regular expression is quadratic on a file of one repeated letter.
    start = content.find(wanted)
    while start >= 0:
        yield start
        start = content.find(wanted, start + step)


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


# -- hints for text that does not match

_PLAIN: dict[int, str] = {
    **dict.fromkeys([0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " "),
    **dict.fromkeys([0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF], ""),
    **dict.fromkeys([0x2018, 0x2019, 0x201A], "'"),
    **dict.fromkeys([0x201C, 0x201D, 0x201E], '"'),
    **dict.fromkeys([*range(0x2010, 0x2016), 0x2212], "-"),
}
"""Maps special blanks, invisible characters, quotes and dashes to the plain text that they look like."""
_KEYED = {code: plain.strip() for code, plain in _PLAIN.items()} | dict.fromkeys(map(ord, " \t\r\f\v"), "")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBERED = re.compile(r"^ *\d+(?: \| ?|\t|\u2192|: )", re.MULTILINE)


def describe_difference(one: str, other: str) -> str:
    """Describe how two texts that look alike differ ("tabs against spaces"). Return "" if they do not look alike."""
    if _key(one) != _key(other):
        return ""
    words: list[str] = []
    odd_one, odd_other = ({character for character in text if ord(character) in _PLAIN} for text in (one, other))
    if odd := odd_one ^ odd_other:
        names = ", ".join(sorted(unicodedata.name(character) for character in odd))
        words.append(f"characters that look like plain ones ({names})")
    one, other = one.translate(_PLAIN), other.translate(_PLAIN)
    pairs = list(zip(one.split("\n"), other.split("\n"), strict=True))
    indents = [(_indent(a), _indent(b)) for a, b in pairs if a.strip()]
    if unlike := "".join(a + b for a, b in indents if a != b):
        words.append("tabs against spaces in the indentation" if {" ", "\t"} <= {*unlike} else "the indentation")
    if any(a[len(a.rstrip()) :] != b[len(b.rstrip()) :] for a, b in pairs):
        words.append("blanks at the end of a line")
    if any(a.strip() != b.strip() and _squeezed(a) == _squeezed(b) for a, b in pairs):
        words.append("blanks inside a line")
    if any(_squeezed(a) != _squeezed(b) for a, b in pairs):
        words.append("upper and lower case")
    return ", ".join(words)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _squeezed(line: str) -> str:
    return "".join(line.split())


def _key(text: str) -> str:
    """The key that texts of equal appearance share: no blanks, lower case, plain quotes and dashes."""
    return text.translate(_KEYED).casefold()


def _describe_miss(content: bytes, old: str, new: str) -> str:
    miss = "old_string does not occur in the file"
    old = old.replace("\r\n", "\n")
    if _NUMBERED.match(old) and _occurs(content, _NUMBERED.sub("", old)):
        return f"{miss}: it would without the line numbers, which are not part of the file"
    for written, meant in (("\\n", "\n"), ("\\t", "\t"), ('\\"', '"')):
        if written in old and _occurs(content, old.replace(written, meant)):
            return f"{miss}: it has {written} as two characters where the file has the character itself"
    hints = list(_near_misses(content, old))
    if new.strip() and len(new.strip()) > 3 and _occurs(content, new):
        hints.insert(0, "new_string is in the file already, perhaps from the same edit before")
    return ". ".join((miss, *(hints or ["Read the file again and quote it exactly"])))


def _occurs(content: bytes, text: str) -> bool:
    encoded = text.encode()
    return encoded in content or encoded.replace(b"\n", b"\r\n") in content


def _near_misses(content: bytes, old: str) -> Iterator[str]:
    if len(content) > MAX_HINT_BYTES:
        yield "The file is too large to look for what is near: find the place with grep and quote it exactly"
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        if not old.isascii():
            line = content.count(b"\n", 0, error.start) + 1
            yield (
                f"The file is not UTF-8 (the first other byte, 0x{content[error.start]:02x}, is in line {line}): "
                "only its ASCII text can be quoted"
            )
        text = content.decode(errors="replace")
    text = text.replace("\r\n", "\n")
    old = old.strip("\n")
    lines, wanted = text.split("\n"), old.split("\n")
    key, wanted_key = _key(text), _key(old)
    if not wanted_key:
        return
    alike = [key.count("\n", 0, at) for at in islice(_places(key, wanted_key, 1), MAX_HINTS)]
    for start in alike:
        there = "\n".join(lines[start : start + len(wanted)])
        where, quoted = _name_lines(start, len(wanted)), _quote_lines(lines, start, len(wanted))
        yield f"{where} would match but for {_describe_likeness(old, there)}:\n{quoted}"
    if not alike and len(lines) <= MAX_COMPARED_LINES:
        yield from _similar(lines, key.split("\n"), wanted, wanted_key.split("\n"))


def _describe_likeness(old: str, there: str) -> str:
    """Describe how `old` differs from the lines of `there`, which look like it.

    `old` may begin and end within a line. Blanks around it count only if it has some itself.
    """
    there = there if old[:1].isspace() else there.lstrip()
    there = there if old[-1:].isspace() else there.rstrip()
    return describe_difference(old, there) or "blanks, upper and lower case, quotes or dashes"


def _similar(
    lines: Sequence[str], keys: Sequence[str], wanted: Sequence[str], wanted_keys: Sequence[str]
) -> Iterator[str]:
    """Yield the lines at the best place for the wanted lines, or else the lines most like the longest of them."""
    best = best_place(keys, wanted_keys)
    counted = sum(1 for key in wanted_keys if key)
    if best is not None and counted > 1 and best[1] * 2 >= counted:
        start, same = best
        yield f"{_name_lines(start, len(wanted))} would match best ({same} of {counted} lines the same)"
        for at, line in enumerate(wanted, start):
            if at >= len(keys) or keys[at] != wanted_keys[at - start]:
                there = quote_line(lines[at]) if at < len(lines) else "the end of the file"
                yield f"Line {at + 1} is\n{there}\nwhere old_string has\n{quote_line(line)}"
                return
    longest = max(range(len(wanted)), key=lambda i: len(wanted_keys[i]))
    near = _nearest_lines(keys, wanted_keys[longest])
    if near:
        listed = "\n".join(f"{at + 1}: {quote_line(lines[at])}" for at in near)
        yield f"The nearest lines to {quote_line(wanted[longest])} are\n{listed}"


def best_place(lines: Sequence[LineT], wanted: Sequence[LineT], *, near: int = 0) -> tuple[int, int] | None:
    """Return the place at which most of the wanted lines match in order and distance, and the number of matches.

    Of several such places, the one nearest to ``near`` is returned. Empty and very frequent lines are not counted,
    which bounds the cost.
    """
    places: dict[LineT, list[int]] = {line: [] for line in wanted if line}
    for at, line in enumerate(lines):
        if line in places:
            places[line].append(at)
    votes: Counter[int] = Counter()
    for i, line in enumerate(wanted):
        if line and len(places[line]) <= MAX_COUNTED:
            votes.update(at - i for at in places[line] if at >= i)
    if not votes:
        return None
    start = min(votes, key=lambda at: (-votes[at], abs(at - near), at))
    return start, votes[start]


def _nearest_lines(keys: Sequence[str], wanted: str) -> list[int]:
    """Return the indices of the lines most like `wanted`, the best first. Of equal lines, only the first is returned.

    Common substrings select the few lines that are compared in full.
    """
    wanted = wanted[:MAX_COMPARED_CHARACTERS]
    size = 4 if len(wanted) >= 8 else 2
    parts = {wanted[at : at + size] for at in range(0, max(1, len(wanted) - size + 1), max(1, len(wanted) // 16))}
    first: dict[str, int] = {}
    for at, key in enumerate(keys):
        first.setdefault(key[:MAX_COMPARED_CHARACTERS], at)
    likely = nlargest(30, first, key=lambda key: sum(part in key for part in parts))
    return [first[key] for key in get_close_matches(wanted, likely, MAX_HINTS)]


def _name_lines(start: int, count: int) -> str:
    return f"Line {start + 1} of the file" if count == 1 else f"Lines {start + 1} to {start + count} of the file"


def _quote_lines(lines: Sequence[str], start: int, count: int) -> str:
    quoted = "\n".join(quote_line(line) for line in lines[start : start + min(count, MAX_SHOWN_LINES)])
    return quoted if count <= MAX_SHOWN_LINES else f"{quoted}\n..."


def quote_line(line: str) -> str:
    """Quote a line for a hint. Control characters except tabs are escaped, and a long line is cut."""
    cut = line if len(line) <= MAX_SHOWN_CHARACTERS else line[:MAX_SHOWN_CHARACTERS] + "..."
    return "'" + _CONTROL.sub(lambda match: repr(match.group())[1:-1], cut) + "'"


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
