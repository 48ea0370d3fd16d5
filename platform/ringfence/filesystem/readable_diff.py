r"""A patch for a person: what ``git apply`` needs of a binary file gives way to text, or to its size and hash."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterator

from ringfence.filesystem.diff import hunks_of
from ringfence.filesystem.encodings import as_utf8
from ringfence.filesystem.patch import split_lines

BINARY = b"GIT binary patch\n"
_LENGTHS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_LITERAL = re.compile(rb"literal (\d+)\n((?:[A-Za-z][^\n]+\n)*)\n")
_PART = re.compile(rb"^GIT binary patch\n(?:literal \d+\n(?:[A-Za-z][^\n]+\n)*\n)+", re.MULTILINE)
_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
CHARACTERS_PER_CONTROL = 8
"""A file is nearly text if it has at least so many characters for each control character."""


def readable_patch(patch: bytes) -> bytes:
    """Return a patch of `unified_diff` with its binary files readable. ``git apply`` does not take it any more.

    A file in UTF-16 or UTF-32, and one that is text but for some NULs, is shown as text, with each NUL as ``\\x00``.
    Of any other binary file the size and the hash are shown, before and after.
    """
    if BINARY not in patch:
        return patch
    return _PART.sub(lambda found: b"".join(_readable(found[0])), patch)


def _readable(part: bytes) -> Iterator[bytes]:
    new, *rest = (_unpacked(lines) for _, lines in _LITERAL.findall(part))
    old = rest[0] if rest else None
    before, after = (None if content is None else _as_text(content) for content in (old, new))
    if before is None or after is None:
        sizes = [_size(content) for content in (old, new)]
        yield b"binary, %s -> %s\n" % (sizes[0], sizes[1])
        return
    yield b"(binary for git, and shown as text: each NUL as \\x00)\n"
    yield from hunks_of(split_lines(before), split_lines(after))


def _unpacked(lines: bytes) -> bytes:
    pieces = (base64.b85decode(line[1:])[: _LENGTHS.index(line[:1]) + 1] for line in lines.split(b"\n") if line)
    return zlib.decompress(b"".join(pieces))


def _as_text(content: bytes) -> bytes | None:
    """Return the bytes as text without NULs; None if they are none."""
    content, encoding = as_utf8(content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    if encoding is None and len(_NO_TEXT.findall(text)) * CHARACTERS_PER_CONTROL > len(text):
        return None
    return content.replace(b"\0", b"\\x00")


def _size(content: bytes | None) -> bytes:
    if content is None:
        return b"not shown"
    if not content:
        return b"nothing"
    size = "1 byte" if len(content) == 1 else f"{len(content):,} bytes"
    return f"{size} (sha256 {hashlib.sha256(content).hexdigest()[:16]})".encode()
