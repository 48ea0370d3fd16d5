"""Deltas of git packs between two states of one thing, where little changed between a beginning and an end."""

from __future__ import annotations

from collections.abc import Callable

_INSERT_MOST = 127
_COPY_MOST = 0xFFFF


def delta(old: bytes, new: bytes) -> bytes:
    """How `new` is made of `old`: what they begin with in common, what is new, what they end with in common."""
    most = min(len(old), len(new))
    start = _common(most, lambda n: old[:n] == new[:n])
    end = _common(most - start, lambda n: n == 0 or old[-n:] == new[-n:])
    out = [_size(len(old)), _size(len(new))]
    _copy(out, 0, start)
    middle = new[start : len(new) - end]
    for at in range(0, len(middle), _INSERT_MOST):
        piece = middle[at : at + _INSERT_MOST]
        out += (bytes([len(piece)]), piece)
    _copy(out, len(old) - end, end)
    return b"".join(out)


def _common(most: int, equal: Callable[[int], bool]) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if equal(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _size(size: int) -> bytes:
    out = bytearray()
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def _copy(out: list[bytes], offset: int, size: int) -> None:
    while size:
        part = min(size, _COPY_MOST)
        operation, arguments = 0x80, bytearray()
        for bit, byte in enumerate((*offset.to_bytes(4, "little"), *part.to_bytes(2, "little"))):
            if byte:
                operation |= 1 << bit
                arguments.append(byte)
        out.append(bytes([operation, *arguments]))
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
