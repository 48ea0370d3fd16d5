"""Compression of what the history keeps: streams that every zlib reads, git's too.

By ISA-L, whose level 1 takes a quarter of zlib's time for as many bytes; by zlib where there is none for the processor.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

LEVEL = 1
"""Of zlib: 6 takes 2.7 times as long for a tenth less."""
_STORED_BYTES = 200
"""What is no longer, deltas above all, would hardly get shorter."""
_LITTLE_BYTES = 1 << 10
"""Of what is no longer, tables of its own cost more time than they save bytes."""
_SMALL_BYTES = 1 << 13
_SMALL_WINDOW, _SMALL_MEMORY = 13, 6
"""For what fits into this window. To make the usual one of 32 KiB ready takes ten times as long as to use it."""
_STORED = struct.Struct("<3sHH")
_CHECKSUM = struct.Struct(">I")


def by_zlib(raw: bytes, level: int) -> bytes:
    """What `zlib.compress` gives, sooner for what is small."""
    if len(raw) > _SMALL_BYTES:
        return zlib.compress(raw, level)
    small = zlib.compressobj(level, zlib.DEFLATED, _SMALL_WINDOW, _SMALL_MEMORY)
    return small.compress(raw) + small.flush()


_compress: Callable[[bytes, int], bytes] = by_zlib
_little = LEVEL
with suppress(ImportError):
    _compress = import_module("isal.isal_zlib").compress
    _little = 0  # of ISA-L, which compresses then too, by tables that need not be made


def deflated(raw: bytes) -> bytes:
    """The bytes as a zlib stream."""
    size = len(raw)
    if size > _STORED_BYTES:
        return _compress(raw, LEVEL if size > _LITTLE_BYTES else _little)
    return b"%b%b%b" % (_STORED.pack(b"x\x01\x01", size, size ^ 0xFFFF), raw, _CHECKSUM.pack(zlib.adler32(raw)))
