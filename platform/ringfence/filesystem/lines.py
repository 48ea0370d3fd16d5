"""Windows of lines out of a file's bytes."""

from __future__ import annotations

import re
from functools import lru_cache

from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import DEFAULT_READ_LIMIT, READ_ENTIRE_FILE

# Skipping in blocks of lines keeps the work in C; a match always exists, since the lines were counted before.
_BLOCK = 256
_NEWLINE = ord("\n")
_BLOCK_OF_LINES = re.compile(rb"(?:[^\n]*\n){%d}" % _BLOCK)


def line_window(content: bytes, offset: int, limit: int | None, encoding: str, path: str) -> tuple[str, int, int]:
    """The text of lines ``offset`` to ``offset + limit``, how many lines that is, and how many there are in all.

    Lines end at \\n (a \\r before it belongs to the end), and at nothing else. ``limit`` is as in `Filesystem.read`.
    Only the window is decoded, where the encoding lets a line end be recognised before that.

    Raises:
        ValueError: a bad window, an unknown encoding, or bytes that do not decode; ``path`` is for the message.
    """
    if offset < 0:
        raise ValueError(f"offset counts lines from 0, it cannot be {offset}")
    if limit is not None and limit < READ_ENTIRE_FILE:
        raise ValueError(f"limit is a number of lines, or {READ_ENTIRE_FILE} for all of them; it cannot be {limit}")
    if _ends_lines_with_newline_bytes(encoding):
        total = content.count(b"\n")
        if content and content[-1] != _NEWLINE:
            total += 1
        returned = _returned(total, offset, limit)
        if returned < total:
            start = _after_lines(content, 0, offset) if returned else 0
            content = content[start : _after_lines(content, start, returned)]
        return _decoded(content, encoding, path), returned, total
    lines = _decoded(content, encoding, path).split("\n")
    lines = [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    returned = _returned(len(lines), offset, limit)
    return "".join(lines[offset : offset + returned]), returned, len(lines)


def _returned(total: int, offset: int, limit: int | None) -> int:
    after = max(0, total - offset)
    return after if limit == READ_ENTIRE_FILE else min(after, DEFAULT_READ_LIMIT if limit is None else limit)


def _after_lines(content: bytes, start: int, count: int) -> int:
    """Where the line after ``count`` lines from ``start`` begins; the end of the content if there is none."""
    blocks, rest = divmod(count, _BLOCK)
    for _ in range(blocks):
        block = _BLOCK_OF_LINES.match(content, start)
        if block is None:  # the last line has no end
            return len(content)
        start = block.end()
    for _ in range(rest):
        start = content.find(b"\n", start) + 1
        if start == 0:
            return len(content)
    return start


@lru_cache(maxsize=64)
def _ends_lines_with_newline_bytes(encoding: str) -> bool:
    try:
        return "a\nb".encode(encoding) == b"a\nb"
    except LookupError as error:
        raise ValueError(f"cannot decode with {encoding!r}: {error}") from None


def _decoded(content: bytes, encoding: str, path: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        bad = content[error.start]
        raise ValueError(
            f"{escape_path(path)} is not {encoding} text (byte 0x{bad:02x}): read_bytes reads it as it is"
        ) from error


def no_content(text: object, error: UnicodeEncodeError | AttributeError) -> ValueError | TypeError:
    """What is said of a text that no file can hold, and of what is no text."""
    if isinstance(error, AttributeError):
        return TypeError(f"the content of a file is a text, not {text!r:.80}; write_bytes takes bytes")
    return ValueError(
        f"the text cannot be written as UTF-8: it has the lone surrogate {error.object[error.start]!r} at "
        f"character {error.start}; write_bytes takes any bytes"
    )
