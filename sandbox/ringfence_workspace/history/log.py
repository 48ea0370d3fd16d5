"""The log of one workspace: what calls are about to do, the objects of steps, and which commits are the history.

One file, written at its end only. A record is JSON, with bytes where it needs them, or a git object as a pack holds
it, so that a log becomes a pack by copying. Its checksum covers where in the file it stands and a number that every new
file draws, so that neither what a crash tore nor what an earlier file left behind passes for a record. A log that is
cut anywhere is one that the workspace had earlier. Room is reserved ahead, so that a rollback on a full disk can still
be written down: the file ends with zeros.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from ringfence_workspace.tree.kernel import failpoint
from ringfence_workspace.tree.places import kept_damaged, not_written, sync_directory
from ringfence_workspace.tree.state import Json

_MAGIC = b"ringfence log 1\n"
_NONCE_BYTES = 16
_FIRST = len(_MAGIC) + _NONCE_BYTES
_HEAD = struct.Struct("<4sIII")
_OBJECT, _RECORD = b"\xa5obj", b"\xa5rec"
_MARKS = re.compile(b"\xa5(?:obj|rec)")
_ID_BYTES = 20
_POSITION = struct.Struct("<Q")
_RESERVE_BYTES = 1 << 16
_ROOM_BYTES = 1 << 18
_json = json.JSONEncoder(separators=(",", ":")).encode

Location: TypeAlias = tuple[int, int, int]
"""Where the pack entry of an object is in the file, its length, and how many deltas must be undone to read it. (There
are many, and the garbage collector does not look into plain tuples of numbers again and again.)"""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record that is no object: its values, and the bytes that came with it."""

    values: Mapping[str, object]
    blob: bytes = b""


class NoLogError(ValueError):
    """A file in the place of a log is none."""


class Log:
    """An open log: the newest file ``log.NUMBER`` of a folder. `renew` begins the next one.

    `objects` are those that it has, by binary id. As it was opened, `records` has the rest, and `refs` what refs became
    (None: dropped). Behind damage nothing counts, so that the history is one that once was: the file is copied, and a
    record {"damaged": BYTES} takes the place of what is cut off.
    """

    def __init__(self, folder: Path, *, writable: bool, power: bool = False) -> None:
        """With ``power``, `flush` waits for the disk; without, what is written survives the process, not the machine.

        Raises:
            FileNotFoundError: it was sealed just now, and it is not to be written.
            OSError: it cannot be opened.
            NoLogError: it is no log.
        """
        self.objects: dict[bytes, Location] = {}
        self.records: list[LogRecord] = []
        self.refs: dict[bytes, bytes | None] = {}
        self.cut: str | None = None
        """What of its end was a record that was not written whole, in words."""
        self.damage: str | None = None
        """What else cannot be read, in words."""
        self.head: dict[str, Mapping[str, Json]] = {}
        """Records that every new file is to begin with, by what they are about."""
        self.busy = False
        """Whether a call has begun to change files, so that what is here is needed."""
        self.pending_bytes = 0
        """Of the objects that are not written yet."""
        self._pending: dict[bytes, bytes] = {}
        """Objects that are not written yet, with their headers."""
        self.writable: Final = writable
        self.power: Final = power
        self._folder = folder
        self._end: int = 0
        self._room: int = 0
        self._begin: int = 0
        self._draw(b"")
        self.path = self._newest()
        if not writable and not self._logs():  # somebody has removed it: the rest is still there
            self.path = Path(os.devnull)
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        try:
            self._file = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise not_written(error, str(self.path)) from error
        self.modified_ns: Final = os.fstat(self._file).st_mtime_ns
        """When it was last written to before it was opened here."""
        try:
            self._read(writable)
            if writable:
                self._remove_others()
        except BaseException:
            os.close(self._file)
            raise

    def _newest(self) -> Path:
        logs = self._logs()
        # A new one that could not be begun, for want of space say, has nothing, and the older one went on.
        logs = [path for path in logs if path.stat().st_size >= _FIRST] or logs
        return logs[-1] if logs else self._folder / "log.000001"

    def _logs(self) -> list[Path]:
        return sorted(self._folder.glob("log.??????"))

    def _remove_others(self) -> None:
        """Those before it: of what they have everything is in packs."""
        others = [path for path in self._logs() if path != self.path]
        for path in others:
            path.unlink()
        if others or self.power:
            sync_directory(self._folder)

    # -- reading

    def _read(self, writable: bool) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        begins = content[: len(_MAGIC)].rstrip(b"\0")
        if content.strip(b"\0") and not _MAGIC.startswith(begins):
            raise NoLogError(f"{self.path} is no log of this version: move it away, and the rest of the history stays")
        if begins != _MAGIC or len(content) < _FIRST:
            if writable:
                self._start(self._file)
            return
        self._draw(content[len(_MAGIC) : _FIRST])
        view, at = memoryview(content), _FIRST
        while end := self._whole(view, at):
            self._take(content, at)
            at = end
        self._end = self._begin = at
        self._room = len(content)
        if bad := max(0, len(content.rstrip(b"\0")) - at):
            self._cut_off(content, bad, writable=writable)

    def _cut_off(self, content: bytes, bad: int, *, writable: bool) -> None:
        """Cut off the bytes behind the last record that counts; a copy is kept first where a crash cannot have left
        them."""
        at, view = self._end, memoryview(content)
        in_the_middle = any(self._whole(view, mark.start()) for mark in _MARKS.finditer(content, at + 1))
        if in_the_middle or not self._is_torn(content, at, at + bad):
            self.damage = (
                f"the history is damaged: of its log {self.path} the {bad} bytes behind the first {at} do not count"
            )
            if writable:
                self.damage += (
                    "; steps in them are lost, what they changed is somebody else's now: the log as it was is kept at "
                    f"{kept_damaged(str(self.path), content)}"
                )
        else:
            self.cut = f"the log was cut after {at} bytes: the {bad} bytes behind them are no whole record"
        if in_the_middle:
            self.records.append(LogRecord({"damaged": bad}))
        if writable:
            if in_the_middle:  # before they go: without it, the call before it would pass for one that was killed
                self.append({"damaged": bad}, reserve=0)
                self.flush()
            os.ftruncate(self._file, self._end)
            self._room = self._end

    def _whole(self, data: memoryview, at: int) -> int:
        """The end of the record that is there; 0 where none is, or not a whole one."""
        if at + _HEAD.size > len(data):
            return 0
        mark, text_size, blob_size, checksum = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + text_size + blob_size
        if mark not in (_OBJECT, _RECORD) or end > len(data):
            return 0
        return end if self._checksum(at, data[at + _HEAD.size : end]) == checksum else 0

    def _is_torn(self, content: bytes, at: int, written: int) -> bool:
        """Whether it is a record that was not written to its end, of which nothing has been done yet."""
        if at + _HEAD.size > written:
            return True
        _, text_size, blob_size, _ = _HEAD.unpack_from(content, at)
        return at + _HEAD.size + text_size + blob_size > written

    def _take(self, content: bytes, at: int) -> None:
        mark, text_size, blob_size, _ = _HEAD.unpack_from(content, at)
        start = at + _HEAD.size
        blob = start + text_size
        if mark == _OBJECT:
            self.objects[content[start : start + _ID_BYTES]] = blob, blob_size, content[blob - 1]
            return
        record = LogRecord(json.loads(content[start:blob]), content[blob : blob + blob_size])
        self.records.append(record)
        match record.values:
            case {"ref": str(name), "oid": (str() | None) as oid}:
                self.refs[name.encode()] = None if oid is None else bytes.fromhex(oid)
            case _:
                pass

    def _checksum(self, at: int, payload: bytes | memoryview) -> int:
        return zlib.crc32(payload, zlib.crc32(_POSITION.pack(at), self._nonce_checksum))

    def entry(self, oid: bytes) -> bytes:
        """The pack entry of an object that the log has."""
        offset, length, _ = self.objects[oid]
        if oid in self._pending:
            return self._pending[oid][-length:]
        return os.pread(self._file, length, offset)

    def each(self, visit: Callable[[bytes, bytes], None]) -> None:
        """Give every object's id and pack entry, in the order they came."""
        self.append()
        for oid, (offset, length, _) in self.objects.items():
            visit(oid, os.pread(self._file, length, offset))

    # -- writing

    @property
    def size(self) -> int:
        """Bytes, those not written yet included."""
        return self._end + self.pending_bytes

    @property
    def is_new(self) -> bool:
        """Whether nothing has come to it since it began."""
        return self.size <= self._begin and not self.records

    def add(self, oid: bytes, entry: bytes, depth: int) -> None:
        """Add an object, as a pack holds it. It can be read at once, and is in the file with the next record."""
        at = self._end + self.pending_bytes
        text = b"%b%c" % (oid, depth)
        self._pending[oid] = self._encoded(at, _OBJECT, text, entry)
        self.objects[oid] = at + _HEAD.size + len(text), len(entry), depth
        self.pending_bytes += _HEAD.size + len(text) + len(entry)

    def _encoded(self, at: int, mark: bytes, text: bytes, blob: bytes) -> bytes:
        payload = text + blob
        return _HEAD.pack(mark, len(text), len(blob), self._checksum(at, payload)) + payload

    def append(self, *records: Mapping[str, Json], blob: bytes = b"", reserve: int = _RESERVE_BYTES) -> None:
        """Write what was added and the records, in one go; ``blob`` belongs to the last record.

        Raises:
            OSError: it could not be written (no space). Nothing of it is in the log, nor what was added.
        """
        parts = [*self._pending.values()]
        end = self._end + self.pending_bytes
        for values in records:
            parts.append(self._encoded(end, _RECORD, _json(values).encode(), blob if values is records[-1] else b""))
            end += len(parts[-1])
        try:
            self._write(b"".join(parts), end, reserve)
        except BaseException:
            self.abandon()
            raise
        self._end = end
        self._pending.clear()
        self.pending_bytes = 0

    def _write(self, written: bytes, end: int, reserve: int) -> None:
        done = 0
        try:
            if end + reserve > self._room:
                self._make_room(end + reserve)
            failpoint("log")
            while done < len(written):
                done += os.pwrite(self._file, memoryview(written)[done:], self._end + done)
        except OSError as error:
            with suppress(OSError):
                if done:  # else the room that is reserved stays
                    os.ftruncate(self._file, self._end)
                    self._room = self._end
                    self._make_room(self._end + reserve)
            raise not_written(error, str(self.path)) from error

    def _make_room(self, needed: int) -> None:
        if hasattr(os, "posix_fallocate"):
            failpoint("log room")
            length = max(needed, self._end + _ROOM_BYTES)
            os.posix_fallocate(self._file, 0, length)
            self._room = length

    def abandon(self) -> None:
        """Forget the objects that are not written yet."""
        for oid in self._pending:
            del self.objects[oid]
        self._pending.clear()
        self.pending_bytes = 0

    def note(self, *records: Mapping[str, Json]) -> None:
        """`append` for a rollback, which goes on where even the reserve is used up: undoing can be repeated."""
        with suppress(OSError):
            self.append(*records, reserve=0)

    def flush(self) -> None:
        """Have all that was added survive what this log is to survive: the process, or the machine."""
        if self._pending:
            self.append()
        if self.power:
            failpoint("fsync log")
            os.fdatasync(self._file)

    def wait_for_objects(self) -> None:
        """With ``power``, have what was added on the disk, before a record that must not be there without it."""
        if self.power:
            self.flush()

    def check_there(self) -> None:
        """Raises OSError (ESTALE) where somebody has removed, replaced or cut off the file: what is written to it is
        lost."""
        own = os.fstat(self._file)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            there = None
        replaced = there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)
        if replaced or own.st_size < self._end:
            raise OSError(
                errno.ESTALE,
                "was removed or cut off while the workspace was open, so nothing can be changed: open it again",
                str(self.path),
            )

    # -- its files

    def name(self, began_ns: int, position: int) -> str:
        """A name for a call that no call of another log has."""
        return f"{self._nonce.hex()}-{began_ns}-{position}"

    def renew(self) -> None:
        """Begin a new file, and delete this one: all that is needed of it is elsewhere. OSError: this one goes on."""
        new = self._folder / f"log.{int(self.path.suffix[1:]) + 1:06}"
        failpoint("new log")
        try:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise not_written(error, str(new)) from error
        before = self._nonce, self._nonce_checksum, self._end, self._room
        try:
            self._start(file)
        except BaseException:
            self._nonce, self._nonce_checksum, self._end, self._room = before
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self.path = file, new
        self.objects.clear()
        self.refs.clear()
        self.records.clear()
        self._remove_others()

    def _start(self, file: int) -> None:
        """Begin an empty file."""
        self._draw(secrets.token_bytes(_NONCE_BYTES))
        content = _MAGIC + self._nonce
        for values in self.head.values():
            content += self._encoded(len(content), _RECORD, _json(values).encode(), b"")
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)
            if self.power:
                os.fdatasync(file)
        except OSError as error:
            raise not_written(error, str(self.path)) from error
        self._end = self._room = self._begin = len(content)

    def _draw(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._nonce_checksum = zlib.crc32(nonce)

    @property
    def closed(self) -> bool:
        return self._file < 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
