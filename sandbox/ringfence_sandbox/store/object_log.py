"""Git objects in one append-only file, each with a checksum: cheap to add to, and read back up to the first damage.

A record is its length, its CRC-32, its kind, and the payload. An object's payload is its id and then exactly what a
pack holds for it, so that a log becomes a pack by copying. What refs became is recorded between the objects: of a
log that was cut short, any beginning is a state that the store once had.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from ringfence_sandbox.disk.places import kept_damaged, not_written, sync_directory

MAGIC = b"ringfence object log 1\n"
_HEAD = struct.Struct("<II")
_OBJECT, _REF = b"O", b"R"
_KINDS = re.compile(b"[OR]")
_ID_BYTES = 20
_BEFORE_ENTRY_BYTES = _HEAD.size + 1 + _ID_BYTES + 1
REF_DELTA = 7


Location: TypeAlias = tuple[int, int, int]
"""Where the pack entry of an object is in the file, its length, and how many deltas must be undone to read it. (There
are many, and the garbage collector does not look into plain tuples of numbers again and again.)"""


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
        return type_number, entry[at : at + _ID_BYTES], zlib.decompress(entry[at + _ID_BYTES :])
    return type_number, None, zlib.decompress(entry[at:])


def _is_torn(data: bytes, at: int) -> bool:
    """Whether what follows is nothing, or one record that was not written to its end: no more is lost by it."""
    if not data[at:].strip(b"\0"):
        return True
    if not data.startswith(MAGIC):
        return len(data) < len(MAGIC)
    if at + _HEAD.size <= len(data) and at + _HEAD.size + _HEAD.unpack_from(data, at)[0] <= len(data):
        return False
    kinds = _KINDS.finditer(data, at + _HEAD.size)
    view = memoryview(data)
    return not any(_end_of(view, found.start() - _HEAD.size) for found in kinds)


def _end_of(data: memoryview, at: int) -> int:
    """The end of the record that is there; 0 where none is, or not a whole one."""
    length, checksum = _HEAD.unpack_from(data, at)
    start = at + _HEAD.size
    end = start + length
    # A file's tail of zeros after a power failure must not pass for records: no record is that short.
    return end if length > _ID_BYTES and end <= len(data) and zlib.crc32(data[start:end]) == checksum else 0


class ObjectLog:
    """One log file. ``objects`` has all that it holds, ``refs`` what it says that refs became (None: dropped).

    ``damaged_bytes`` at its end were not readable when it was opened. Of an open log they are cut off by `open`; one
    that is only looked at leaves them, as its owner may be writing them at this moment. Where they are more than a
    record that a crash cut short, the log is copied before, and ``damage`` says so.
    """

    def __init__(self, path: Path, descriptor: int, *, writable: bool) -> None:
        self.path = path
        self.objects: dict[bytes, Location] = {}
        self.refs: dict[bytes, bytes | None] = {}
        self.damaged_bytes = 0
        self.damage: str | None = None
        self._fd = descriptor
        self._writable = writable
        self._pending: list[bytes] = []
        self.pending_bytes = 0
        """Of what was added since the last `flush`."""
        self._name_synced = False
        self.size = 0
        """Bytes, those not written yet included."""

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> ObjectLog:
        """Open a log; a writable one is created if it is not there, and cut where it is damaged."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if writable else os.O_RDONLY
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise not_written(error, str(path)) from error
        log = cls(path, descriptor, writable=writable)
        try:
            log._load()
        except BaseException:
            os.close(log._fd)
            raise
        return log

    def _load(self) -> None:
        data = self._whole()
        good = self._parse(data)
        self.damaged_bytes = len(data) - good
        self.size = good
        if not _is_torn(data, good):
            self.damage = (
                f"the history is damaged: of its log {self.path} the last {len(data) - good} bytes cannot be read"
            )
            if self._writable:
                self.damage += (
                    "; steps in them are lost, what they changed is somebody else's now: the log as it was is kept at "
                    f"{kept_damaged(str(self.path), data)}"
                )
        if self._writable and (self.damaged_bytes or good == 0):
            os.ftruncate(self._fd, good)
            if good == 0:
                self._write(MAGIC)
                self.size = len(MAGIC)

    def _whole(self) -> bytes:
        with open(self._fd, "rb", closefd=False) as file:  # not by its path: it may be gone
            file.seek(0)
            return file.read()

    def _parse(self, data: bytes) -> int:
        """Takes in the records up to the first that is damaged; where that is."""
        if not data.startswith(MAGIC):
            return 0
        view, at = memoryview(data), len(MAGIC)
        while at + _HEAD.size <= len(data) and (end := _end_of(view, at)):
            start = at + _HEAD.size
            self._take(data, start, end - start)
            at = end
        return at

    def _take(self, data: bytes, start: int, length: int) -> None:
        oid = data[start + 1 : start + 1 + _ID_BYTES]
        if data[start : start + 1] == _OBJECT:
            entry = start + 1 + _ID_BYTES + 1
            self.objects[oid] = entry, start + length - entry, data[entry - 1]
        else:
            name = data[start + 1 + _ID_BYTES : start + length]
            self.refs[name] = None if oid == bytes(_ID_BYTES) else oid

    def add(self, oid: bytes, entry: bytes, depth: int) -> None:
        """Add an object; it is in the file after the next `flush`, and can be read at once."""
        self.objects[oid] = self.size + _BEFORE_ENTRY_BYTES, len(entry), depth
        self._append(b"%b%b%c%b" % (_OBJECT, oid, depth, entry))

    def set_ref(self, name: bytes, oid: bytes | None) -> None:
        """Record what a ref became (None: it is dropped), after the objects added before."""
        self._append(_REF + (oid or bytes(_ID_BYTES)) + name)
        self.refs[name] = oid

    def _append(self, payload: bytes) -> None:
        self._pending += (_HEAD.pack(len(payload), zlib.crc32(payload)), payload)
        length = _HEAD.size + len(payload)
        self.pending_bytes += length
        self.size += length

    def flush(self, *, sync: bool = False) -> None:
        """Hand what was added to the operating system; with ``sync``, to the disk.

        Raises:
            OSError: it could not be written (no space left). Nothing of it is in the log then.
        """
        if self._pending:
            batch = b"".join(self._pending)
            try:
                self._check_there()
                self._write(batch)
            except BaseException:
                self.abandon()
                raise
            self._pending.clear()
            self.pending_bytes = 0
        if sync:
            os.fsync(self._fd)
            if not self._name_synced:
                sync_directory(self.path.parent)
                self._name_synced = True

    def _check_there(self) -> None:
        try:
            there = os.stat(self.path, follow_symlinks=False).st_ino
        except OSError:
            there = -1
        own = os.fstat(self._fd)
        if there != own.st_ino:
            raise OSError(
                errno.ESTALE,
                "was removed while the workspace was open, so no step can be kept: open it again",
                str(self.path),
            )
        if own.st_size != self.size - self.pending_bytes:  # what was abandoned could not be cut off then
            os.ftruncate(self._fd, self.size - self.pending_bytes)

    def abandon(self) -> None:
        """Forget what was added since the last `flush`."""
        if self._pending:
            self.size -= self.pending_bytes
            self._pending.clear()
            self.pending_bytes = 0
            # What refs were before is only known in the file. A part of what is abandoned may be there, too.
            self.objects.clear()
            self.refs.clear()
            self._parse(self._whole()[: self.size])
            with suppress(OSError):  # the next `flush` tries again, before it writes
                os.ftruncate(self._fd, self.size)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise not_written(error, str(self.path)) from error

    def entry(self, oid: bytes) -> bytes:
        """The pack entry of an object that the log has."""
        offset, length, _ = self.objects[oid]
        if offset + length > self.size - self.pending_bytes:
            self.flush()
        return os.pread(self._fd, length, offset)

    def each(self, visit: Callable[[bytes, bytes], None]) -> None:
        """Give every object's id and pack entry, in the order they came."""
        self.flush()
        for oid, (offset, length, _) in self.objects.items():
            visit(oid, os.pread(self._fd, length, offset))

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


LEVEL = 1
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
        return _compress(raw, LEVEL if size > _LITTLE_BYTES else 0)
    return b"%b%b%b" % (_STORED.pack(b"x\x01\x01", size, size ^ 0xFFFF), raw, _CHECKSUM.pack(zlib.adler32(raw)))
