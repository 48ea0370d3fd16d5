"""A window of a file's lines from chunks of its bytes: never more than the window and a chunk are in memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import AnyStr

from ringfence.filesystem.edits import check_window, decoding_error, ends_lines_with_newline_bytes
from ringfence.filesystem.protocol import READ_ENTIRE_FILE


def stream_window(
    chunks: Iterable[bytes], offset: int, limit: int | None, encoding: str, path: str
) -> tuple[str, int, int]:
    """Return what `line_window` returns, and raise what it raises. All chunks are consumed."""
    limit = check_window(offset, limit)
    if ends_lines_with_newline_bytes(encoding):
        parts, returned, total = _window(chunks, offset, limit, b"\n")
        try:
            return b"".join(parts).decode(encoding), returned, total
        except UnicodeDecodeError as error:
            raise decoding_error(error, encoding, path) from error
    texts, returned, total = _window(_decoded(chunks, encoding, path), offset, limit, "\n")
    return "".join(texts), returned, total


def _decoded(chunks: Iterable[bytes], encoding: str, path: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for chunk in chunks:
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise decoding_error(error, encoding, path) from error


def _window(chunks: Iterable[AnyStr], offset: int, limit: int, newline: AnyStr) -> tuple[list[AnyStr], int, int]:
    end = None if limit == READ_ENTIRE_FILE else offset + limit
    parts: list[AnyStr] = []
    line, is_open = 0, False
    """The number of line ends before the chunk, and whether a line goes on there."""
    for chunk in chunks:
        if not chunk:
            continue
        ends = chunk.count(newline)
        if (end is None or line < end) and line + ends >= offset:
            start = _after(chunk, newline, offset - line)
            stop = len(chunk) if end is None or line + ends < end else _after(chunk, newline, end - line)
            parts.append(chunk[start:stop])
        line += ends
        is_open = not chunk.endswith(newline)
    total = line + is_open
    returned = max(0, (total if end is None else min(end, total)) - offset)
    return parts if returned else [], returned, total


def _after(chunk: AnyStr, newline: AnyStr, ends: int) -> int:
    """The position after so many line ends."""
    return len(chunk) - len(chunk.split(newline, ends)[-1]) if ends > 0 else 0
