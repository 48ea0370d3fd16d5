"""Deltas of git packs between two states of one thing, where little changed between a beginning and an end."""

from __future__ import annotations

import struct

_INSERT_MOST = 127
_COPY_MOST = 0xFFFF
_COPY_NEAR = struct.Struct("<BHH")
_COPY_FAR = struct.Struct("<BIH")
_NEAR, _FAR = 0xB3, 0xBF
"""A copy with two bytes of its offset, or all four, and both bytes of its size."""


def delta(old: bytes, new: bytes) -> bytes:
    """How `new` is made of `old`: what they begin with in common, what is new, what they end with in common.

    And what they have in common behind the line that differs first: in the lines of a directory that is its own, whose
    time changes with every name that comes or goes.
    """
    most = min(len(old), len(new))
    start = _common_start(old, new, most)
    end = _common_end(old, new, most - start)
    rest_of_old, rest_of_new = old[start : len(old) - end], new[start : len(new) - end]
    in_old, in_new = rest_of_old.find(b"\n") + 1, rest_of_new.find(b"\n") + 1
    again = 0
    if in_old and in_new:
        behind_old, behind_new = rest_of_old[in_old:], rest_of_new[in_new:]
        again = _common_start(behind_old, behind_new, min(len(behind_old), len(behind_new)))
    out = [_size(len(old)), _size(len(new))]
    _copy(out, 0, start)
    _insert(out, rest_of_new[:in_new] if again else rest_of_new)
    if again:
        _copy(out, start + in_old, again)
        _insert(out, rest_of_new[in_new + again :])
    _copy(out, len(old) - end, end)
    return b"".join(out)


def _insert(out: list[bytes], new: bytes) -> None:
    for at in range(0, len(new), _INSERT_MOST):
        piece = new[at : at + _INSERT_MOST]
        out += (bytes([len(piece)]), piece)


def _common_start(old: bytes, new: bytes, most: int) -> int:
    same, open_to = 0, most
    while same < open_to:
        middle = (same + open_to + 1) // 2
        if old[same:middle] == new[same:middle]:
            same = middle
        else:
            open_to = middle - 1
    return same


def _common_end(old: bytes, new: bytes, most: int) -> int:
    old_end, new_end = len(old), len(new)
    same, open_to = 0, most
    while same < open_to:
        middle = (same + open_to + 1) // 2
        if old[old_end - middle : old_end - same] == new[new_end - middle : new_end - same]:
            same = middle
        else:
            open_to = middle - 1
    return same


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
