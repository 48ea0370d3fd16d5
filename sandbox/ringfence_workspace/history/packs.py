"""Git packs on disk, which are written whole, synced, and only then named; and the deltas in them."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from dulwich.object_format import SHA1
from dulwich.objects import RawObjectID
from dulwich.pack import OFS_DELTA, REF_DELTA, Pack, PackFileDisappeared, write_pack_index_v2

from ringfence_workspace.history.trees import DeltaBase
from ringfence_workspace.tree.places import not_written, sync_directory

_HEADER_BYTES = 12
_OID_BYTES = 20
_INSERT_MOST, _COPY_MOST = 0x7F, 0xFFFF
_COPY = struct.Struct("<BIH")
_WHOLE_COPY = 0xBF
"""Begins a copy with four bytes of its offset and two of its size."""


def delta(base: DeltaBase, size: int) -> bytes:
    """How an object of ``size`` bytes is made of the one that it is an edit of."""
    keys, ends = [*base.rows], [0, *accumulate(map(len, base.rows.values()))]
    out = [_varint(ends[-1]), _varint(size)]
    done = 0
    for key, new in sorted(base.edits.items()):
        start = ends[bisect_left(keys, key)]
        out += _copies(done, start)
        for at in range(0, len(new or b""), _INSERT_MOST):
            piece = (new or b"")[at : at + _INSERT_MOST]
            out += (bytes((len(piece),)), piece)
        done = start + len(base.rows.get(key, b""))
    return b"".join([*out, *_copies(done, ends[-1])])


def _copies(start: int, end: int) -> list[bytes]:
    return [_COPY.pack(_WHOLE_COPY, at, min(_COPY_MOST, end - at)) for at in range(start, end, _COPY_MOST)]


def _varint(size: int) -> bytes:
    out = bytearray()
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def write_pack(folder: Path, count: int, entries: Callable[[Callable[[bytes, bytes], None]], None]) -> Path:
    """Write a pack of ``count`` objects and its index; ``entries`` gives each one's id and pack entry to its argument.

    Deltas must be to objects of the same pack. When it returns, both files will survive a loss of power.

    Returns:
        The path of both without the suffix.
    """
    beside = folder / "tmp_pack_new"
    try:
        with open(beside, "wb", buffering=1 << 20) as file:
            name = _write(file, folder, count, entries)
            file.flush()
            os.fsync(file.fileno())
        # git looks for packs by their index, so that comes last.
        os.replace(beside, name.with_suffix(".pack"))
        os.replace(_hidden_index(name), name.with_suffix(".idx"))
    except BaseException as error:
        remove_half_packs(folder)
        if isinstance(error, OSError):
            raise not_written(error, str(beside)) from error
        raise
    sync_directory(folder)
    return name


def _write(file: BinaryIO, folder: Path, count: int, entries: Callable[[Callable[[bytes, bytes], None]], None]) -> Path:
    digest = hashlib.sha1(usedforsecurity=False)
    header = b"PACK" + (2).to_bytes(4, "big") + count.to_bytes(4, "big")
    file.write(header)
    digest.update(header)
    index: list[tuple[bytes, int, int | None]] = []
    at = _HEADER_BYTES

    def take(oid: bytes, entry: bytes) -> None:
        nonlocal at
        file.write(entry)
        digest.update(entry)
        index.append((oid, at, zlib.crc32(entry)))
        at += len(entry)

    entries(take)
    if len(index) != count:
        raise ValueError(f"{count} objects were announced for a pack, and {len(index)} came")
    checksum = digest.digest()
    file.write(checksum)
    index.sort()
    name = folder / f"pack-{checksum.hex()}"
    with open(_hidden_index(name), "wb") as index_file:
        write_pack_index_v2(index_file, index, checksum)
        index_file.flush()
        os.fsync(index_file.fileno())
    return name


def _hidden_index(pack: Path) -> Path:
    """The index of a pack that is not there yet, or not any more: without one, a pack has lost its index."""
    return pack.with_name(f"tmp_{pack.stem}.idx")


def remove_half_packs(folder: Path) -> None:
    """Delete what was left of a pack that was not written to its end, or not deleted to its end."""
    for pack in folder.glob("pack-*.pack"):
        if not pack.with_suffix(".idx").exists() and _hidden_index(pack).exists():
            pack.unlink()
    for path in folder.glob("tmp_*"):
        path.unlink()


def open_packs(folder: Path) -> list[Pack]:
    """The packs of a folder, newest first, their files open: a pack that is deleted meanwhile can still be read.

    Raises:
        FileNotFoundError: one was deleted between being listed and being opened.
    """
    names = sorted(folder.glob("pack-*.idx"), key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)
    packs: list[Pack] = []
    try:
        for name in names:
            packs.append(Pack(str(name.with_suffix("")), object_format=SHA1))
            _ = packs[-1].index, packs[-1].data  # which opens them
    except BaseException as error:
        close_packs(packs)
        if isinstance(error, PackFileDisappeared):
            raise FileNotFoundError(errno.ENOENT, "a pack was deleted meanwhile", str(folder)) from error
        raise
    return packs


def close_packs(packs: Iterable[Pack]) -> None:
    for pack in packs:
        try:
            pack.close()
        except BufferError:  # an interrupt of a read is on its way, and holds a part of the mapping, which goes with it
            pack.close()


def copied_entry(pack: Pack, oid: bytes, kept: Callable[[bytes], bool]) -> bytes:
    """An object's pack entry for another pack: the bytes as they are, except a delta to what is not ``kept`` there."""
    offset = pack.index.object_offset(RawObjectID(oid))
    unpacked = pack.data.get_unpacked_object_at(offset, include_comp=True)
    base, compressed, size = unpacked.delta_base, unpacked.comp_chunks, unpacked.decomp_len
    if compressed is not None and size is not None:
        if unpacked.pack_type_num < OFS_DELTA:
            return entry_header(unpacked.pack_type_num, size) + b"".join(compressed)
        if unpacked.pack_type_num == REF_DELTA and isinstance(base, bytes) and kept(base):
            return entry_header(REF_DELTA, size) + base + b"".join(compressed)
    return pack_entry(*pack.get_raw(RawObjectID(oid)))


def remove_packs(packs: Iterable[Pack]) -> None:
    """Delete packs whose objects are elsewhere, on disk. The index goes first: without it git does not see a pack."""
    for pack in packs:
        path = Path(os.fspath(pack.data.path))
        close_packs([pack])
        with suppress(FileNotFoundError):  # somebody ran git's own gc
            os.replace(path.with_suffix(".idx"), _hidden_index(path))
        for suffix in (".pack", ".rev", ".bitmap"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        _hidden_index(path).unlink(missing_ok=True)


# One object in a pack.


def entry_header(type_number: int, size: int) -> bytes:
    """What stands before an object in a pack; ``size`` is that of its bytes, or of its delta, uncompressed."""
    if 16 <= size < 1 << 11:
        return bytes((type_number << 4 | size & 15 | 0x80, size >> 4))
    head = bytearray()
    byte = (type_number << 4) | (size & 15)
    size >>= 4
    while size:
        head.append(byte | 0x80)
        byte = size & 0x7F
        size >>= 7
    head.append(byte)
    return bytes(head)


def pack_entry(type_number: int, raw: bytes, base: bytes | None = None) -> bytes:
    """An object as a pack holds it; with a ``base`` id, ``raw`` is the delta to that object."""
    head = entry_header(REF_DELTA if base is not None else type_number, len(raw))
    return b"%b%b%b" % (head, base or b"", deflated(raw))


def read_pack_entry(entry: bytes) -> tuple[int, bytes | None, bytes]:
    """The type, the id of a delta's base, and the bytes."""
    type_number = (entry[0] >> 4) & 7
    at = 0
    while entry[at] & 0x80:
        at += 1
    at += 1
    if type_number == REF_DELTA:
        return type_number, entry[at : at + _OID_BYTES], zlib.decompress(entry[at + _OID_BYTES :])
    return type_number, None, zlib.decompress(entry[at:])


_LEVEL = 1
"""Of zlib: 6 takes 2.7 times as long for a tenth less."""
_STORED_BYTES = 200
"""What is no longer, deltas above all, would hardly get shorter."""
_LITTLE_BYTES = 1 << 10
"""What is no longer has no tables of its own: they cost more time than they save bytes."""
_STORED = struct.Struct("<3sHH")
_CHECKSUM = struct.Struct(">I")


_compress: Callable[[bytes, int], bytes] = zlib.compress
with suppress(ImportError):
    _compress = import_module("isal.isal_zlib").compress


def deflated(raw: bytes) -> bytes:
    """The bytes as a zlib stream."""
    size = len(raw)
    if size > _STORED_BYTES:
        return _compress(raw, _LEVEL if size > _LITTLE_BYTES else 0)
    return b"%b%b%b" % (_STORED.pack(b"x\x01\x01", size, size ^ 0xFFFF), raw, _CHECKSUM.pack(zlib.adler32(raw)))
