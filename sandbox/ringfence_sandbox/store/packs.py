"""Git packs on disk: written whole, synced, and only then named."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from dulwich.object_format import SHA1
from dulwich.objects import ObjectID, RawObjectID, hex_to_sha
from dulwich.pack import OFS_DELTA, REF_DELTA, Pack, PackFileDisappeared, write_pack_index_v2

from ringfence_sandbox.disk.state_files import not_written, sync_directory
from ringfence_sandbox.store.object_log import entry_header, pack_entry

_HEADER_BYTES = 12
_INDEX_2 = b"\xfftOc\0\0\0\2"
_UP_TO = struct.Struct(">256I")
"""For each first byte of an id, how many ids begin with it or a lesser one."""
_ID_BYTES = 20
_FIRST_ID = len(_INDEX_2) + _UP_TO.size
_SEARCHED_IDS = 64
"""So many are searched at once, sooner than in steps."""


class SearchedPack(Pack):
    """A pack that says soon whether it has an object: nearly all that it is asked for are new.

    dulwich's own answer takes three times as long, and every object of a step is asked for in every pack.
    """

    def __init__(self, path: Path) -> None:
        """``path`` is that of its files, without the suffix. FileNotFoundError where the index is not there."""
        super().__init__(str(path), object_format=SHA1)
        with open(f"{path}.idx", "rb") as file:
            self._ids = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._up_to = _UP_TO.unpack_from(self._ids, len(_INDEX_2)) if self._ids[: len(_INDEX_2)] == _INDEX_2 else ()

    def __contains__(self, sha1: ObjectID | RawObjectID) -> bool:
        oid = sha1 if len(sha1) == _ID_BYTES else hex_to_sha(ObjectID(sha1))
        up_to, first = self._up_to, oid[0]
        if not up_to:  # an index of a git of long ago
            return super().__contains__(sha1)
        low, high = up_to[first - 1] if first else 0, up_to[first]
        while high - low > _SEARCHED_IDS:
            middle = (low + high) // 2
            at = _FIRST_ID + middle * _ID_BYTES
            low, high = (low, middle) if oid < self._ids[at : at + _ID_BYTES] else (middle, high)
        at, end = _FIRST_ID + low * _ID_BYTES, _FIRST_ID + high * _ID_BYTES
        while (at := self._ids.find(oid, at, end)) != -1 and (at - _FIRST_ID) % _ID_BYTES:
            at += 1  # the end of one id and the beginning of the next
        return at != -1

    def close(self) -> None:
        try:
            super().close()
        except BufferError:  # an interrupt of a read is on its way, and holds a part of the mapping, which goes with it
            super().close()
        self._ids.close()


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
            packs.append(SearchedPack(name.with_suffix("")))
            _ = packs[-1].index, packs[-1].data  # which opens them
    except BaseException as error:
        for pack in packs:
            pack.close()
        if isinstance(error, PackFileDisappeared):
            raise FileNotFoundError(errno.ENOENT, "a pack was deleted meanwhile", str(folder)) from error
        raise
    return packs


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
        pack.close()
        with suppress(FileNotFoundError):  # somebody ran git's own gc
            os.replace(path.with_suffix(".idx"), _hidden_index(path))
        for suffix in (".pack", ".rev", ".bitmap"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        _hidden_index(path).unlink(missing_ok=True)
