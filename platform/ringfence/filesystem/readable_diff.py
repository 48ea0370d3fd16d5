r"""A patch for a person: what ``git apply`` needs of a binary file gives way to text, or to its size and hash."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from ringfence.filesystem.diff import hunks_of
from ringfence.filesystem.encodings import WideEncoding, as_utf8
from ringfence.filesystem.patch import split_lines

BINARY = b"GIT binary patch\n"
_LENGTHS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LITERAL = re.compile(rb"literal (\d+)\n((?:[A-Za-z][^\n]+\n)*)\n")
_PART = re.compile(rb"^GIT binary patch\n(?:literal \d+\n(?:[A-Za-z][^\n]+\n)*\n)+", re.MULTILINE)
_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_LIKE_AN_ESCAPE = re.compile(rb"\\(?=x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
CHARACTERS_PER_CONTROL = 8
"""A file is nearly text if it has at least so many characters for each control character."""


def readable_patch(patch: bytes) -> bytes:
    """Return a patch of `unified_diff` with its binary files readable. ``git apply`` does not take it any more.

    A file in UTF-16 or UTF-32, and one that is text but for some NULs, is shown as text, with each NUL as ``\\x00``,
    and a backslash that would look like that of an escape as ``\\x5c``. Of any other binary file, and where the
    encoding changes, the size and the hash are shown, before and after.
    """
    if BINARY not in patch:
        return patch
    return _PART.sub(lambda found: b"".join(_readable(found[0])), patch)


def _readable(part: bytes) -> Iterator[bytes]:
    new, *rest = (_unpacked(lines) for _, lines in _LITERAL.findall(part))
    old = rest[0] if rest else None
    before, after = (None if content is None else _as_text(content) for content in (old, new))
    if before is None or after is None:
        yield b"binary, %s -> %s\n" % (_size(old), _size(new))
        return
    if old and new and before.encoding != after.encoding:
        yield b"encoding, %s in %s -> %s in %s\n" % (_size(old), before.title, _size(new), after.title)
    if before.lines != after.lines:
        yield b"(binary for git, and shown as text: each NUL as \\x00)\n"
        yield from hunks_of(split_lines(before.lines), split_lines(after.lines))


def _unpacked(lines: bytes) -> bytes:
    pieces = (base64.b85decode(line[1:])[: _LENGTHS.index(line[:1]) + 1] for line in lines.split(b"\n") if line)
    return zlib.decompress(b"".join(pieces))


@dataclass(frozen=True, slots=True)
class _Readable:
    """The text of a file without NULs. No two files of one encoding have the same."""

    lines: bytes
    encoding: WideEncoding | None

    @property
    def title(self) -> bytes:
        return str(self.encoding or "UTF-8").encode()


def _as_text(content: bytes) -> _Readable | None:
    """Return the bytes as text; None if they are none."""
    content, encoding = as_utf8(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if encoding is None and len(_NO_TEXT.findall(text)) * CHARACTERS_PER_CONTROL > len(text):
        return None
    return _Readable(_LIKE_AN_ESCAPE.sub(rb"\\x5c", content).replace(b"\0", b"\\x00"), encoding)


def _size(content: bytes | None) -> bytes:
    if content is None:
        return b"not shown"
    if not content:
        return b"nothing"
    size = "1 byte" if len(content) == 1 else f"{len(content):,} bytes"
    return f"{size} (sha256 {hashlib.sha256(content).hexdigest()[:16]})".encode()
