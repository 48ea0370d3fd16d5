"""Patches for a browser: files, rows with line numbers, changed words and highlighting. All content is escaped."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape
from pygments.lexers import get_lexer_for_filename  # pyright: ignore[reportUnknownVariableType]  # it has no types
from pygments.token import Token
from pygments.util import ClassNotFound

from ringfence.filesystem.patch_text import unquoted
from ringfence.filesystem.readable_diff import readable_patch
from ringfence_tools.printable import files_of, line_counts, printable

MAX_ROWS = 2_000
"""The most rows of a diff that are sent at a time."""
MAX_LINE_CHARACTERS = 1_000
WIDE_CHARACTERS = 200_000
"""The most characters of one line that somebody asked to see whole."""
MAX_WORDS_CHARACTERS = 600
"""In longer lines no changed words are marked."""
MAX_HIGHLIGHTED_CHARACTERS = 200_000
_HUNK = re.compile(rb"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,(\d+))? @@")
_META = (b"diff --git ", b"index ", b"--- ", b"+++ ")
"""The beginnings of lines of a header that say nothing to a person."""
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_KINDS = {
    Token.Keyword: "tk",
    Token.Literal.String: "ts",
    Token.Literal.Number: "tn",
    Token.Comment: "tc",
    Token.Name.Function: "tf",
    Token.Name.Class: "tf",
    Token.Name.Decorator: "tf",
}

Span = tuple[int, int, str]
"""From, to, and the class of what is between."""


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One line. ``kind`` is add, del, same, hunk, head or meta, which is not shown.

    ``left_out`` is how many characters of it are not shown.
    """

    kind: str
    old: int | None
    new: int | None
    code: Markup
    left_out: int
    at: int
    """Its place among the rows of its file."""


@dataclass(frozen=True, slots=True)
class DiffFile:
    """The part of a patch for one file. Paths are as git quotes them."""

    old_path: str
    path: str
    added: int
    removed: int
    part: bytes

    @property
    def name(self) -> str:
        return printable(self.path if self.old_path == self.path else f"{self.old_path} -> {self.path}")

    @property
    def place(self) -> str:
        """The path as it is in the workspace."""
        return os.fsdecode(unquoted(os.fsencode(self.path)))

    @property
    def old_place(self) -> str:
        """The path before, which is the same unless it was moved."""
        return os.fsdecode(unquoted(os.fsencode(self.old_path)))

    @property
    def rows(self) -> int:
        return self.part.count(b"\n") + 1

    def patch_of_hunk(self, at: int) -> bytes:
        """The patch of the one hunk whose head is row ``at``. Raises LookupError if no hunk begins there."""
        lines = self.part.split(b"\n")
        starts = [n for n, line in enumerate(lines) if _HUNK.match(line)]
        if at not in starts:
            raise LookupError(f"no hunk begins at row {at}")
        end = next((n for n in starts if n > at), len(lines))
        return b"\n".join([*lines[: starts[0]], *lines[at:end]]) + b"\n"

    def lines_of_hunk(self, at: int) -> str:
        """The lines that the hunk whose head is row ``at`` has afterwards. Raises LookupError if none begins there."""
        lines = self.part.split(b"\n")
        found = _HUNK.match(lines[at]) if 0 <= at < len(lines) else None
        if found is None:
            raise LookupError(f"no hunk begins at row {at}")
        first, count = int(found[2]), int(found[3] or 1)
        return f"{first}-{first + count - 1}" if count > 1 else str(first)


def diff_files(patch: bytes, mask: Callable[[bytes], bytes] | None = None) -> Sequence[DiffFile]:
    """The files of a patch of the history, binary ones made readable, and masked after that."""
    readable = readable_patch(patch)
    shown = readable if mask is None else mask(readable)
    return [DiffFile(old, new, *line_counts(part), part) for old, new, part in files_of(shown)]


@dataclass(frozen=True, slots=True)
class _Line:
    kind: str
    old: int | None
    new: int | None
    text: str
    left_out: int


def diff_rows(
    file: DiffFile, start: int = 0, count: int = MAX_ROWS, *, width: int = MAX_LINE_CHARACTERS
) -> Sequence[DiffRow]:
    """The rows of a file from ``start`` on, each with at most ``width`` characters."""
    lines = list(_lines(file, start, start + min(count, MAX_ROWS), min(width, WIDE_CHARACTERS)))
    spans: dict[int, list[Span]] = {}
    for chosen in (("same", "add"), ("same", "del")):
        _highlight(file.path, lines, chosen, spans)
    words = dict(_changed_words(lines))
    return [
        DiffRow(
            line.kind,
            line.old,
            line.new,
            _markup(line.text, spans.get(at, []), words.get(at, [])),
            line.left_out,
            start + at,
        )
        for at, line in enumerate(lines)
    ]


def _lines(file: DiffFile, start: int, end: int, width: int) -> Iterator[_Line]:
    old = new = 0
    in_header = True
    for at, line in enumerate(file.part.split(b"\n")):
        if at >= end:
            return
        sign, old_here, new_here = line[:1], None, None
        if found := _HUNK.match(line):
            in_header, old, new = False, int(found[1]), int(found[2])
            kind = "hunk"
        elif in_header or sign == b"\\":
            kind = "meta" if line.startswith(_META) else "head"
        elif sign == b"-":
            kind, old_here, old = "del", old, old + 1
        elif sign == b"+":
            kind, new_here, new = "add", new, new + 1
        else:
            kind, old_here, new_here, old, new = "same", old, new, old + 1, new + 1
        if at >= start:
            text = line.decode("utf-8", "surrogateescape")
            text = text[1:] if kind in ("add", "del", "same") else text
            yield _Line(kind, old_here, new_here, printable(text[:width]), max(len(text) - width, 0))


def _highlight(path: str, lines: Sequence[_Line], kinds: Sequence[str], spans: dict[int, list[Span]]) -> None:
    """Find what is a keyword, a string and the like in the lines of one side."""
    chosen = [(at, line.text) for at, line in enumerate(lines) if line.kind in kinds]
    if sum(len(text) for _, text in chosen) > MAX_HIGHLIGHTED_CHARACTERS:
        return
    try:
        lexer = get_lexer_for_filename(path, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return
    row = column = 0
    for token, value in lexer.get_tokens("\n".join(text for _, text in chosen)):
        kind = next((name for parent, name in _KINDS.items() if token in parent), "")
        for number, piece in enumerate(value.split("\n")):
            row, column = (row + 1, 0) if number else (row, column)
            if kind and piece and row < len(chosen):
                at = chosen[row][0]
                if not (kinds[1] == "del" and lines[at].kind == "same"):  # the other side has it
                    spans.setdefault(at, []).append((column, column + len(piece), kind))
            column += len(piece)


def _changed_words(lines: Sequence[_Line]) -> Iterator[tuple[int, list[Span]]]:
    """Yield the changed words of each line that took the place of another."""
    at = 0
    while at < len(lines):
        removed = _run(lines, at, "del")
        added = _run(lines, removed, "add")
        for old, new in zip(range(at, removed), range(removed, added), strict=False):
            one, other = lines[old].text, lines[new].text
            if max(len(one), len(other)) <= MAX_WORDS_CHARACTERS:
                ours, theirs = _word_marks(one, other)
                yield old, ours
                yield new, theirs
        at = max(added, at + 1)


def _run(lines: Sequence[_Line], start: int, kind: str) -> int:
    while start < len(lines) and lines[start].kind == kind:
        start += 1
    return start


def _word_marks(one: str, other: str) -> tuple[list[Span], list[Span]]:
    before, after = _WORD.findall(one), _WORD.findall(other)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    if matcher.ratio() < 0.4:  # it is another line
        return [], []
    ours: list[Span] = []
    theirs: list[Span] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            for words, low, high, marks in ((before, a, b, ours), (after, c, d, theirs)):
                start = sum(map(len, words[:low]))
                if high > low:
                    marks.append((start, start + sum(map(len, words[low:high])), "word"))
    return ours, theirs


def _markup(text: str, spans: Sequence[Span], words: Sequence[Span]) -> Markup:
    if not spans and not words:
        return escape(text)
    cuts = sorted({0, len(text), *(edge for low, high, _ in (*spans, *words) for edge in (low, high))})
    of_token, of_word = _cursor(spans), _cursor(words)
    pieces: list[str] = []
    for low, high in itertools.pairwise(cuts):
        names = " ".join(filter(None, (of_token(low), of_word(low))))
        piece = escape(text[low:high])
        pieces.append(f'<span class="{names}">{piece}</span>' if names else str(piece))
    return Markup("".join(pieces))  # noqa: S704  # each piece is escaped


def _cursor(spans: Sequence[Span]) -> Callable[[int], str]:
    """A function from rising places to the class there."""
    at = 0

    def kind(place: int) -> str:
        nonlocal at
        while at < len(spans) and spans[at][1] <= place:
            at += 1
        return spans[at][2] if at < len(spans) and spans[at][0] <= place else ""

    return kind


def reversed_patch(patch: bytes) -> bytes:
    """The inverse of a patch of one hunk of text. Raises ValueError for one that makes, removes or moves a file."""
    header, _, hunk = patch.partition(b"\n@@ ")
    names = re.search(rb"^--- (.+)\n\+\+\+ (.+)$", header, re.MULTILINE)
    if names is None or b"/dev/null" in names.groups() or b"\nrename from " in header or not hunk:
        raise ValueError("this part can only be undone with its whole step")
    ranges, _, body = hunk.partition(b" @@")
    old, _, new = ranges.removeprefix(b"-").partition(b" +")
    title, *lines = body.split(b"\n")
    swap = {b"-": b"+", b"+": b"-"}
    swapped = [swap.get(line[:1], line[:1]) + line[1:] for line in lines]
    inverse = b"--- %b\n+++ %b\n@@ -%b +%b @@%b\n" % (names[1], names[1].replace(b"a/", b"b/", 1), new, old, title)
    return inverse + b"\n".join(swapped)
