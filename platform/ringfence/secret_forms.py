"""The forms that programs write a secret in, and one search for all of them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html.entities import codepoint2name
from importlib import import_module
from itertools import groupby
from typing import Any
from urllib.parse import unquote

from ringfence.setting_lines import is_plain

SHORTEST = 8
"""Characters of a value that is masked. A shorter one stands in too many other words."""
MAX_MEMORY = 1 << 25
"""The bytes that a search may take for its automaton."""
_LONGEST_FORM = 24
"""The most bytes that one character is expected to have. More backslashes may quote it."""
_BEGUN_FORM = re.compile(rb"""[\\%&'"][\w\\%&'"#;{}]*""")
"""What may be the beginning of a quoted character, where a piece of a stream ends."""
_ROW = re.compile(rb"\\*")
_LINE_ENDS = b"\r\n"
_QUOTED_AGAIN = {b"%": b"25", b"&": b"amp;"}
"""What each further quoting for a URL, or for HTML, puts behind a character."""
_HEAD = 4
"""The number of characters by which the beginning of a secret is looked for."""
_USER_OF_URL = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/?#@:]*:)?([^\s/?#]*)@", re.IGNORECASE)
"""The password in a URL, or the user where there is none, which may be a token."""
_NAMED_PART = re.compile(r"(?:^|[?&;\s])([\w.-]+)=([^&;\s]+)")
_NAME_OF_PART = re.compile("key|token|secret|pass|pwd|sig$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Token:
    """A character of a secret, and a regular expression for its other forms; or several that have none.

    Backslashes in a row are one token, since no one can tell which of them quotes which.
    """

    raw: bytes
    others: bytes = b""

    @property
    def is_row(self) -> bool:
        return self.raw[0] == _BACKSLASH

    @property
    def pattern(self) -> bytes:
        raw = re.escape(self.raw) + (rb"\\*" if self.is_row else b"")
        return b"(?:%b|%b)" % (raw, self.others) if self.others else raw

    @property
    def length(self) -> int:
        """The most bytes that it is expected to have."""
        if self.is_row:
            return len(self.raw) * _LONGEST_FORM
        return _LONGEST_FORM if self.others else len(self.raw)

    def ends(self, data: bytes, at: int) -> Iterator[int]:
        """Yield where this character may end that begins at a place."""
        if data.startswith(self.raw, at):
            yield at + len(self.raw)
            if self.is_row:
                # The rest of the row quotes this one, or the next character, which takes any number of them.
                yield _end_of_row(data, at)
        if self.others and (found := _compiled_token(self.others).match(data, at)) is not None:
            yield found.end()
            quoted = _QUOTED_AGAIN.get(self.raw, b"")
            if quoted and data.startswith(self.raw + quoted, at):  # which the value may go on with itself
                yield from range(at + len(self.raw + quoted), found.end(), len(quoted))

    def goes_on(self, data: bytes, at: int) -> bool:
        """Whether ``data``, from ``at`` on, may be no more than the beginning of this character."""
        rest = len(data) - at
        if rest < len(self.raw) and self.raw.startswith(data[at:]):
            return True
        if self.raw == b"\n" and data.endswith(b"\r") and rest == 1:
            return True
        return bool(self.others) and rest < self.length and _BEGUN_FORM.fullmatch(data, at) is not None


@dataclass(frozen=True, slots=True)
class Needle:
    """One text that is looked for, character by character. Base64 may be broken into lines anywhere."""

    tokens: Sequence[Token]
    mask: bytes
    head: bytes
    """A regular expression for its first characters."""
    head_length: int
    length: int
    """The most bytes that it is expected to have. Broken into lines, it has no more line ends than characters."""
    wraps: bool = False

    @classmethod
    def of(cls, tokens: Sequence[Token], mask: bytes, *, wraps: bool = False) -> Needle:
        """Make one of the tokens of single characters."""
        lengths = [token.length + 2 * wraps for token in tokens]
        head = (b"[\r\n]*" if wraps else b"").join(token.pattern for token in tokens[:_HEAD])
        if not wraps:
            runs = groupby(tokens, key=lambda token: not token.others)
            plain = ([Token(b"".join(token.raw for token in run))] if have_none else run for have_none, run in runs)
            tokens = [token for run in plain for token in run]
        return cls(tokens, mask, head, sum(lengths[:_HEAD]), sum(lengths), wraps)

    def find(self, data: bytes, at: int) -> tuple[int, bool]:
        """Return where this text ends that begins at a place, or 0; and whether it may go on behind the data."""
        places, goes_on = {at}, False
        for token in self.tokens:
            reached = set[int]()
            for place in places:
                while self.wraps and place < len(data) and data[place] in _LINE_ENDS:
                    place += 1
                goes_on = goes_on or place == len(data) or token.goes_on(data, place)
                reached.update(token.ends(data, place))
            places = reached
            if not places:
                return 0, goes_on
        return max(places), goes_on


class Search:
    """One search for many needles: for their beginnings at once, and there for each of them.

    It is not changed when it has been made.
    """

    def __init__(self, needles: Sequence[Needle]) -> None:
        self._heads = _compiled(b"|".join(dict.fromkeys(needle.head for needle in needles)))
        self._window = max(needle.length for needle in needles)
        self._end = max(needle.head_length for needle in needles)
        self._by_first: dict[int, list[Needle]] = {}
        for needle in needles:
            token = needle.tokens[0]
            for first in {token.raw[0], *(_FIRSTS if token.others else b"")}:
                self._by_first.setdefault(first, []).append(needle)

    def masked(self, data: bytes) -> tuple[bytes, set[str]]:
        """Return ``data`` with a mask in the place of each secret, and the masks. The very data without one.

        Of several secrets that begin at one place, the longest counts.
        """
        parts, masks, done = list[bytes](), set[str](), 0
        for start, end, mask in self._found(data):
            parts += (data[done:start], mask)
            masks.add(mask.decode())
            done = end
        return (b"".join((*parts, data[done:])), masks) if parts else (data, masks)

    def open_end(self, data: bytes) -> int:
        """Return where in a piece of a stream a secret may begin that goes on in the next piece; else its length."""
        cut = self._first_open(data)
        # A whole one is not cut in two, though its end may begin another one.
        return next((start for start, end, _ in self._found(data) if start < cut < end), cut)

    def _found(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield the start, the end and the mask of each secret."""
        at = 0
        while (head := self._heads.search(data, at)) is not None:
            start: int = head.start()
            end, mask = 0, b""
            for needle in self._by_first.get(data[start], ()):
                if (found := needle.find(data, start)[0]) > end:
                    end, mask = found, needle.mask
            if end:
                yield start, end, mask
            at = end or _next_start(data, start)

    def _first_open(self, data: bytes) -> int:
        at, end = max(0, len(data) - self._window), max(0, len(data) - self._end)
        while at < end:
            head = self._heads.search(data, at)
            if head is None or (at := head.start()) >= end:
                break
            if self._is_open(data, at):
                return at
            at = min(end, _next_start(data, at))
        return next((at for at in range(end, len(data)) if self._is_open(data, at)), len(data))

    def _is_open(self, data: bytes, at: int) -> bool:
        return any(needle.find(data, at)[1] for needle in self._by_first.get(data[at], ()))


def _end_of_row(data: bytes, at: int) -> int:
    """Return where the backslashes end that begin at a place."""
    found = _ROW.match(data, at)
    return at if found is None else found.end()


def _next_start(data: bytes, at: int) -> int:
    """Return where the next secret may begin behind a place at which none does.

    None begins at a later one of several backslashes: as many as there are may quote a character. Trying each of them
    would take the square of their number.
    """
    return max(at + 1, _end_of_row(data, at))


def _compiled(pattern: bytes) -> Any:
    re2: Any = import_module("re2")  # imported late, since few programs have secrets
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.never_capture = True
    options.log_errors = False
    options.max_mem = MAX_MEMORY
    try:
        return re2.compile(pattern, options)
    except re2.error:  # it is too large
        return re.compile(pattern)


def search_of(values: Mapping[str, str]) -> Search | None:
    """Return the search for values, each with its mask; None if all are too short.

    A value is looked for as it is, line by line, by the passwords in it, and in base64. A text that is all of one value
    and a part of another has the mask of the first.
    """
    texts: dict[str, str] = {}
    for find in (_wholes, _parts):
        for value, mask in values.items():
            for text in find(value):
                if len(value) >= SHORTEST and len(text) >= SHORTEST:
                    texts.setdefault(text, mask)
    needles = [Needle.of(_tokens(text), mask.encode()) for text, mask in texts.items()]
    for value, mask in values.items():
        if len(value) >= SHORTEST:
            needles += _in_base64(value, mask.encode())
    return Search(needles) if needles else None


def _wholes(value: str) -> Iterator[str]:
    yield from (value, value.strip())


def _parts(value: str) -> Iterator[str]:
    """Yield the lines of a value, and what in it is a secret by itself."""
    lines = [line for each in value.splitlines() for line in each.split("\\n")]
    if len(lines) > 1:
        yield from (line.strip() for line in lines if not line.startswith("-----"))
    named = [("password" if found[1] else "", found[2]) for found in _USER_OF_URL.finditer(value)]
    named += [(found[1], found[2]) for found in _NAMED_PART.finditer(value) if _NAME_OF_PART.search(found[1])]
    for name, text in named:
        if not is_plain(name, text):
            yield from (text, unquote(text, errors="surrogateescape"))


def _in_base64(value: str, mask: bytes) -> Iterator[Needle]:
    data = value.encode("utf-8", "surrogateescape")
    for offset in range(3):
        bits = (offset + len(data)) * 8
        # Without the characters that also depend on the bytes before and after it.
        encoded = base64.b64encode(b"\0" * offset + data)[-(-offset * 8 // 6) : bits // 6].decode()
        yield Needle.of([*map(_token_of_base64, encoded)], mask, wraps=True)


_LETTERS = {"\n": b"n", "\r": b"r", "\t": b"t", "\b": b"b", "\f": b"f", "\v": b"v", "\0": b"0", "\x1b": b"[eE]"}
_BACKSLASH = ord("\\")
_CHARACTERS = re.compile(r"\\+|.", re.DOTALL)
_FIRSTS = b"\\%&'+\r\xef"
"""The first bytes that a form of a character may have, besides its own."""


def _tokens(text: str) -> list[Token]:
    tokens = list[Token]()
    for part in _CHARACTERS.findall(text):
        one, count = _token(part[0]), len(part)
        tokens.append(one if count == 1 else Token(one.raw * count, b"(?:%b){%d}" % (one.others, count)))
    return tokens


@lru_cache(maxsize=4096)
def _token(character: str) -> Token:
    """Return a character with its forms in Python, Go, PHP, JavaScript, JSON, shells, URLs and HTML."""
    raw = character.encode("utf-8", "surrogateescape")
    if character.isascii() and character.isalnum():
        return Token(raw)
    forms = [_escapes(character, raw), _each(rb"%%(?:25)*(?i:%02x)", raw), _entity(character)]
    if character.isascii() and character != "\\":
        forms.append(rb"\\+" + re.escape(raw))
    if character in _LETTERS:
        forms.append(rb"\\+" + _LETTERS[character])
    if character == "\n":
        forms.append(rb"\r\n|\\+r\\+n|%0[dD]%0[aA]")
    elif character == "'":  # how shells write it in single quotes
        forms.append(rb"""'\\+''|'"'"'""")
    elif character == " ":
        forms.append(rb"\+")
    elif "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8
        forms.append("\ufffd".encode() + rb"|\\+ufffd")
    return Token(raw, b"|".join(forms))


def _escapes(character: str, raw: bytes) -> bytes:
    """Return an expression for the escape sequences with the number of a character, or with those of its bytes."""
    code, units = ord(character), character.encode("utf-16-be", "surrogatepass")
    wide = b"".join(rb"\\+u%02x%02x" % (units[at], units[at + 1]) for at in range(0, len(units), 2))
    one = rb"\\+(?:u\{0*%x\}|u%08x" % (code, code) + (rb"|x%02x)" % code if code < 256 else b")")
    return b"(?i:%b|%b|%b|%b)" % (wide, one, _each(rb"\\+x%02x", raw), _each(rb"\\+%03o", raw))


def _each(form: bytes, raw: bytes) -> bytes:
    return b"".join(form % byte for byte in raw)


def _entity(character: str) -> bytes:
    code = ord(character)
    name = "apos" if character == "'" else codepoint2name.get(code)
    names = b"" if name is None else name.encode() + b"|"
    return rb"&(?:amp;)*(?:%b#0*%d|#[xX]0*(?i:%x));" % (names, code, code)


@lru_cache(maxsize=128)
def _token_of_base64(character: str) -> Token:
    other = {"+": "-", "/": "_"}.get(character)
    if other is None:
        return _token(character)
    token, url = _token(character), _token(other)
    return Token(token.raw, b"|".join((token.others, re.escape(url.raw), url.others)))


@lru_cache(maxsize=4096)
def _compiled_token(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)
