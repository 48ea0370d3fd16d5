"""Deltas of git packs between two states of one thing, of which it is known what changed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_INSERT_MOST = 127
_LENGTHS = [bytes([length]) for length in range(_INSERT_MOST + 1)]
_COPY_MOST = 0xFFFF
_COPY_NEAR = struct.Struct("<BHH")
_COPY_FAR = struct.Struct("<BIH")
_NEAR, _FAR = 0xB3, 0xBF
"""A copy with two bytes of its offset, or all four, and both bytes of its size."""


@dataclass(frozen=True, slots=True)
class Before:
    """What an object came from: the id of that one and its length, and the pieces of it that others took the place of,
    in order: where each begins, how long it was, and what stands there now."""

    oid: bytes
    size: int
    pieces: Sequence[tuple[int, int, bytes]]


def delta(before: Before, size: int) -> bytes:
    """How an object of ``size`` bytes is made of the one before."""
    out = [_size(before.size), _size(size)]
    done = 0
    for at, length, new in before.pieces:
        if done < at:
            _copy(out, done, at - done)
        if len(new) <= _INSERT_MOST:
            if new:
                out += (_LENGTHS[len(new)], new)
        else:
            for start in range(0, len(new), _INSERT_MOST):
                piece = new[start : start + _INSERT_MOST]
                out += (_LENGTHS[len(piece)], piece)
        done = at + length
    _copy(out, done, before.size - done)
    return b"".join(out)


def _size(size: int) -> bytes:
    if size < 1 << 14:
        return bytes((size & 0x7F | 0x80, size >> 7)) if size > 0x7F else _LENGTHS[size]
    out = bytearray()
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def _copy(out: list[bytes], offset: int, size: int) -> None:
    if offset <= 0xFFFF and 0 < size <= _COPY_MOST:
        out.append(_COPY_NEAR.pack(_NEAR, offset, size))
        return
    while size:
        part = min(size, _COPY_MOST)
        if offset <= 0xFFFF:
            out.append(_COPY_NEAR.pack(_NEAR, offset, part))
        else:
            out.append(_COPY_FAR.pack(_FAR, offset, part))
        offset += part
        size -= part


def applied(old: bytes, change: bytes) -> bytes:
    """What `delta` was made for.

    Raises:
        ValueError: it does not fit `old`.
    """
    at, sizes = 0, [0, 0]
    for which in (0, 1):
        shift = 0
        while True:
            byte = change[at]
            at += 1
            sizes[which] |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
    out: list[bytes] = []
    while at < len(change):
        operation = change[at]
        at += 1
        if operation & 0x80:
            values = bytearray(7)
            for bit in range(7):
                if operation >> bit & 1:
                    values[bit] = change[at]
                    at += 1
            offset = int.from_bytes(values[:4], "little")
            size = int.from_bytes(values[4:], "little") or 0x10000
            out.append(old[offset : offset + size])
        else:
            out.append(change[at : at + operation])
            at += operation
    new = b"".join(out)
    if sizes != [len(old), len(new)]:
        raise ValueError("the store is damaged: a delta does not fit the object that it is for")
    return new
