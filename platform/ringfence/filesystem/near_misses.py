"""Text of a file that is like another text. Errors show it where an edit or a patch does not match."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from heapq import nlargest
from itertools import islice
from typing import TypeVar

LineT = TypeVar("LineT", str, bytes)

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


def find_places(content: LineT, wanted: LineT, step: int) -> Iterator[int]:
    """Yield the positions of a text or bytes. After each, the search goes on ``step`` further."""
    # `bytes.find` is linear. A regular expression is quadratic on a file of one repeated letter.
    start = content.find(wanted)
    while start >= 0:
        yield start
        start = content.find(wanted, start + step)


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


class NearMisses:
    """The text of a file that is like a text which does not occur in it."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def describe(
        self,
        miss: str,
        old: str,
        new: str,
        *,
        names: tuple[str, str] = ("old_string", "new_string"),
        whole_lines: bool = False,
        near: int = 0,
    ) -> str:
        """Return the sentence `miss` with what is like `old` in the file, and how it differs.

        ``names`` are those of the texts for the reader. With ``whole_lines``, `old` is lines of the file, and ``near``
        the index of the line where it is expected.
        """
        old = old.replace("\r\n", "\n")
        if _NUMBERED.match(old) and self._has(_NUMBERED.sub("", old)):
            return f"{miss}: it would without the line numbers, which are not part of the file"
        for written, meant in (("\\n", "\n"), ("\\t", "\t"), ('\\"', '"')):
            if written in old and self._has(old.replace(written, meant)):
                return f"{miss}: it has {written} as two characters where the file has the character itself"
        hints = list(self._hints(old, names[0], whole_lines, near))
        if new.strip() and len(new.strip()) > 3 and self._has(new):
            hints.insert(0, f"{names[1]} is in the file already, perhaps from the same edit before")
        return ". ".join((miss, *(hints or ["Read the file again and quote it exactly"])))

    def _has(self, text: str) -> bool:
        encoded = text.encode(errors="replace")
        return encoded in self._content or encoded.replace(b"\n", b"\r\n") in self._content

    @cached_property
    def _text(self) -> str:
        return self._content.decode(errors="replace").replace("\r\n", "\n")

    @cached_property
    def _lines(self) -> Sequence[str]:
        return self._text.removesuffix("\n").split("\n")

    @cached_property
    def _text_key(self) -> str:
        return _key(self._text)

    @cached_property
    def _keys(self) -> Sequence[str]:
        return self._text_key.removesuffix("\n").split("\n")

    def _hints(self, old: str, name: str, whole_lines: bool, near: int) -> Iterator[str]:
        content = self._content
        if len(content) > MAX_HINT_BYTES:
            yield "The file is too large to look for what is near: find the place with grep and quote it exactly"
            return
        try:
            content.decode()
        except UnicodeDecodeError as error:
            if not old.isascii():
                line = content.count(b"\n", 0, error.start) + 1
                yield (
                    f"The file is not UTF-8 (the first other byte, 0x{content[error.start]:02x}, is in line {line}): "
                    "only its ASCII text can be quoted"
                )
        old = old.strip("\n")
        lines, wanted = self._lines, old.split("\n")
        wanted_key = _key(old)
        if not wanted_key:
            return
        # Around whole lines stand line ends. One more of them at the top keeps the count of lines.
        key, sought = (f"\n{text}\n" if whole_lines else text for text in (self._text_key, wanted_key))
        alike = [key.count("\n", 0, at) for at in islice(find_places(key, sought, 1), MAX_HINTS)]
        for start in alike:
            there = "\n".join(lines[start : start + len(wanted)])
            where, quoted = _name_lines(start, len(wanted)), _quote_lines(lines, start, len(wanted))
            likeness = _describe_likeness(old, there, whole_lines)
            yield f"{where} would match but for {likeness}:\n{quoted}"
        if not alike and len(lines) <= MAX_COMPARED_LINES:
            yield from _similar(lines, self._keys, wanted, wanted_key.split("\n"), name, near)


def _describe_likeness(old: str, there: str, whole_lines: bool) -> str:
    """Describe how `old` differs from the lines of `there`, which look like it.

    A text that is not ``whole_lines`` may begin and end within a line. Blanks around it count only if it has some
    itself.
    """
    there = there if whole_lines or old[:1].isspace() else there.lstrip()
    there = there if whole_lines or old[-1:].isspace() else there.rstrip()
    return describe_difference(old, there) or "blanks, upper and lower case, quotes or dashes"


def _similar(
    lines: Sequence[str], keys: Sequence[str], wanted: Sequence[str], wanted_keys: Sequence[str], name: str, near: int
) -> Iterator[str]:
    """Yield the lines at the best place for the wanted lines, or else the lines most like the longest of them."""
    best = best_place(keys, wanted_keys, near=near)
    counted = sum(1 for key in wanted_keys if key)
    if best is not None and counted > 1 and best[1] * 2 >= counted:
        start, same = best
        yield f"{_name_lines(start, len(wanted))} would match best ({same} of {counted} lines the same)"
        for at, line in enumerate(wanted, start):
            if at >= len(keys) or keys[at] != wanted_keys[at - start]:
                there = quote_line(lines[at]) if at < len(lines) else "the end of the file"
                yield f"Line {at + 1} is\n{there}\nwhere {name} has\n{quote_line(line)}"
                return
    longest = max(range(len(wanted)), key=lambda i: len(wanted_keys[i]))
    nearest = _nearest_lines(keys, wanted_keys[longest])
    if nearest:
        listed = "\n".join(f"{at + 1}: {quote_line(lines[at])}" for at in nearest)
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
