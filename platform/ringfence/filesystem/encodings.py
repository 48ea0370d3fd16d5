"""Text in UTF-16 and UTF-32: recognised by its bytes, and turned into UTF-8 and back without a loss."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

BEGINNING_BYTES = 8192
"""The part of a file that says what it is. A NUL in it marks a binary file, as for git and ripgrep."""
MIN_CHARACTERS = 8
"""The shortest text without a byte order mark that is recognised."""
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f\ufffe\uffff]")
_SINGULAR = frozenset({"idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined"})
"""Codecs for a name or a literal. Some of them take quadratic time."""


@dataclass(frozen=True, slots=True)
class WideEncoding:
    """UTF-16 or UTF-32 in one byte order. `mark` is the byte order mark at the beginning, or empty."""

    codec: str
    title: str
    mark: bytes = b""

    def decode(self, content: bytes) -> str:
        """Return the text without the mark. Raises UnicodeDecodeError for bytes that are no such text."""
        return content[len(self.mark) :].decode(self.codec)

    def encode(self, text: str) -> bytes:
        return self.mark + text.encode(self.codec)

    def __str__(self) -> str:
        return self.title if self.mark else f"{self.title} without a byte order mark"


_KINDS = (
    # UTF-32 comes first: in the little endian order its mark begins with that of UTF-16.
    WideEncoding("utf-32-le", "UTF-32 (little endian)", codecs.BOM_UTF32_LE),
    WideEncoding("utf-32-be", "UTF-32 (big endian)", codecs.BOM_UTF32_BE),
    WideEncoding("utf-16-le", "UTF-16 (little endian)", codecs.BOM_UTF16_LE),
    WideEncoding("utf-16-be", "UTF-16 (big endian)", codecs.BOM_UTF16_BE),
)
_MARKS = tuple(kind.mark for kind in _KINDS)


def wide_encoding(beginning: bytes, *, whole: bool = False) -> WideEncoding | None:
    """Return the encoding of a text in UTF-16 or UTF-32, or None for any other content.

    A byte order mark decides, if the bytes are valid. Without one, the text has to be longer than a few characters,
    mostly ASCII and free of control characters: no other file looks so. ``beginning`` may end within a character,
    unless it is ``whole``.
    """
    if not beginning.startswith(_MARKS) and b"\0" not in beginning:
        return None
    for kind in _KINDS:
        if beginning.startswith(kind.mark):
            return kind if _decode(kind, beginning, whole) is not None else None
    for kind in _KINDS:
        bare = WideEncoding(kind.codec, kind.title)
        text = _decode(bare, beginning, whole)
        if text is not None and len(text) >= MIN_CHARACTERS and not _CONTROL.search(text) and _is_mostly_ascii(text):
            return bare
    return None


def _decode(kind: WideEncoding, content: bytes, whole: bool) -> str | None:
    try:
        return codecs.getincrementaldecoder(kind.codec)().decode(content[len(kind.mark) :], whole)
    except UnicodeDecodeError:
        return None


def _is_mostly_ascii(text: str) -> bool:
    return len(text.encode("ascii", "ignore")) * 4 >= len(text) * 3


def as_utf8(content: bytes) -> tuple[bytes, WideEncoding | None]:
    """Return the UTF-8 form of a text in UTF-16 or UTF-32, and its encoding. Any other content is returned unchanged.

    `from_utf8` turns it back: the bytes of text that nobody changed stay as they were.
    """
    encoding = wide_encoding(content[:BEGINNING_BYTES], whole=len(content) <= BEGINNING_BYTES)
    if encoding is not None:
        try:
            return encoding.decode(content).encode(), encoding
        except UnicodeDecodeError:
            pass
    return content, None


def from_utf8(content: bytes, encoding: WideEncoding | None) -> bytes:
    return content if encoding is None else encoding.encode(content.decode())


def check_encoding(name: str) -> str:
    """Return the name of a text encoding as Python has it. Raises ValueError for any other name."""
    try:
        known = codecs.lookup(name).name
        "".encode(known)
    except (LookupError, ValueError, TypeError):
        known = ""
    if not known or known.replace("-", "_") in _SINGULAR:
        raise ValueError(f"{name!r} is no encoding: name one such as utf-16, cp1252 or shift_jis")
    return known


def is_foreign(content: bytes) -> bool:
    """Whether bytes are text in an encoding with other bytes than UTF-8 for all that is not ASCII."""
    if content.isascii():
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return content.decode(errors="ignore").isascii()
    return False
