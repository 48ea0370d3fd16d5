"""The write-ahead log of one workspace: what a call is about to do, and whether it was committed.

One file, written at its end only. A record is a JSON object and, optionally, bytes; its checksum covers where in the
file it stands and a number that every new file draws, so that neither what a crash tore nor what an earlier file left
behind passes for a record. Room is reserved ahead, so that a rollback on a full disk can still be written down: the
file ends with zeros.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.kernel import failpoint
from ringfence_sandbox.disk.places import kept_damaged, not_written, root_record, sync_directory
from ringfence_sandbox.disk.state import Json
from ringfence_sandbox.transaction.changes import Recorded

_MAGIC = b"ringfence journal 1\n"
_HEAD = struct.Struct("<4sIII")
_MARK = b"\xa5rec"
_FIRST = len(_MAGIC) + 16
_RESERVE_BYTES = 1 << 16
_ROOM_BYTES = 1 << 18
_ALIGN = struct.Struct("<Q")
_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its values, and the bytes that came with it."""

    values: Mapping[str, object]
    blob: bytes = b""
    payload: Mapping[str, object] | None = None
    """What the history has to say in a commit record."""


class Journal:
    """An open journal. ``records`` is what it held when it was opened, ``cut`` says what of it could not be read.
    Behind a damaged record those that are whole still count: a record {"damaged": BYTES} stands for it.

    ``sync`` makes `flush` wait for the disk; without it what is written survives the process, not the machine.
    """

    def __init__(self, path: str, *, sync: bool = False, only_read: bool = False) -> None:
        """OSError where the file cannot be opened; ValueError where it is no journal."""
        self.path: Final = path
        self.cut: str | None = None
        self._sync = sync
        new = not os.path.exists(path)
        self._only_read = only_read
        flags = os.O_RDONLY if only_read else os.O_RDWR | os.O_CREAT
        self._file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.modified_ns: Final = os.fstat(self._file).st_mtime_ns
        """When it was last written to before it was opened here."""
        self._nonce = b""
        self._nonce_checksum = 0
        self._end = 0
        self._room = 0
        try:
            self.records: Sequence[Record] = self._read()
            self.keeps_steps = any(record.payload is not None for record in self.records)
            """Whether it has steps that a history may not have seen; an opener without one leaves them to the next."""
            if new and sync:
                sync_directory(os.path.dirname(path))
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        os.close(self._file)

    def renewed(self) -> Journal:
        """A new journal at the same path, after this one was closed and moved away."""
        return Journal(self.path, sync=self._sync)

    def named(self, began_ns: int, position: int) -> str:
        """A name for a call that no call of another journal has."""
        return f"{self._nonce.hex()}-{began_ns}-{position}"

    @property
    def size_bytes(self) -> int:
        return self._end

    def _read(self) -> list[Record]:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if self._only_read and (not content.startswith(_MAGIC) or len(content) < _FIRST):
            return []
        if not content.startswith(_MAGIC):
            if content.strip(b"\0") and not _MAGIC.startswith(content[: len(_MAGIC)].rstrip(b"\0")):
                raise ValueError(f"{self.path} is no journal of this version; move it away to start a new one")
            self._start()
            return []
        if len(content) < _FIRST:
            self._start()
            return []
        self._draw(content[len(_MAGIC) : _FIRST])
        found: list[Record] = []
        at, next_at = _FIRST, _FIRST
        while next_at is not None:
            if next_at != at:
                found.append(Record({"damaged": next_at - at}))
                at = next_at
            while (record := self._record_at(content, at)) is not None:
                at, record = record
                found.append(record)
            next_at = self._behind(content, at)
        self._end = at
        self._room = len(content)
        written = len(content.rstrip(b"\0"))
        if self._only_read:
            return found
        if at < written:
            self.cut = f"the journal was cut after {at} bytes: the {written - at} bytes behind them are no whole record"
        lost = sum(int(str(record.values["damaged"])) for record in found if "damaged" in record.values)
        if lost:
            self.cut = f"the journal is damaged: {lost} bytes within it are no whole record, those behind them are"
        if lost or (at < written and not self._is_torn(content, at, written)):
            self.cut = f"{self.cut}; the journal as it was is kept at {kept_damaged(self.path, content[:written])}"
        if at < written:
            os.ftruncate(self._file, at)
            self._room = at
        return found

    def _behind(self, content: bytes, at: int) -> int | None:
        """Where the next whole record is, behind a damaged one."""
        while (at := content.find(_MARK, at + 1)) != -1:
            if self._record_at(content, at) is not None:
                return at
        return None

    def _is_torn(self, content: bytes, at: int, written: int) -> bool:
        """Whether it is a record that was not written to its end, of which nothing has been done yet."""
        if at + _HEAD.size > written:
            return True
        _, text_size, blob_size, _ = _HEAD.unpack_from(content, at)
        return at + _HEAD.size + text_size + blob_size > written

    def _record_at(self, content: bytes, at: int) -> tuple[int, Record] | None:
        if at + _HEAD.size > len(content):
            return None
        mark, text_size, blob_size, checksum = _HEAD.unpack_from(content, at)
        start = at + _HEAD.size
        end = start + text_size + blob_size
        if mark != _MARK or end > len(content) or self._checksum(at, content[start:end]) != checksum:
            return None
        values = json.loads(content[start : start + text_size])
        return end, Record(values, content[start + text_size : end], values.get("payload"))

    def _checksum(self, at: int, payload: bytes) -> int:
        return zlib.crc32(payload, zlib.crc32(_ALIGN.pack(at), self._nonce_checksum))

    def append(self, *records: Mapping[str, Json], blob: bytes = b"", reserve: int = _RESERVE_BYTES) -> None:
        """Write records in one go; ``blob`` belongs to the last. OSError (no space): none is
        written."""
        at = end = self._end
        parts: list[bytes] = []
        last = len(records) - 1
        for place, values in enumerate(records):
            payload = _json(values).encode()
            text_size = len(payload)
            if blob and place == last:
                payload += blob
            head = _HEAD.pack(_MARK, text_size, len(payload) - text_size, self._checksum(end, payload))
            parts += (head, payload)
            end += _HEAD.size + len(payload)
        written = b"".join(parts)
        try:
            if end + reserve > self._room:
                self._make_room(end + reserve)
            failpoint("journal")
            done = os.pwrite(self._file, written, at)
            while done < len(written):
                done += os.pwrite(self._file, memoryview(written)[done:], at + done)
        except OSError as error:
            raise not_written(error, self.path) from error
        self._end = end

    def check_there(self) -> None:
        """Raises OSError (ESTALE) where somebody has removed or replaced the file: what is written to it is lost."""
        own = os.fstat(self._file)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise OSError(
                errno.ESTALE,
                "was removed while the workspace was open, so nothing can be changed: open it again",
                self.path,
            )

    def flush(self) -> None:
        """Wait until all that was appended is on the disk, where this journal is to survive the machine."""
        if self._sync:
            failpoint("fsync journal")
            os.fdatasync(self._file)

    def note(self, *records: Mapping[str, Json]) -> None:
        """`append` for a rollback, which goes on where even the reserve is used up: undoing can be repeated."""
        with suppress(OSError):
            self.append(*records, reserve=0)

    def reset(self) -> None:
        """Start anew, empty. Only for when nothing is open."""
        if self._end > _FIRST or self._room > _FIRST:
            failpoint("journal")
            self._start()
        self.keeps_steps = False

    def _start(self) -> None:
        self._draw(secrets.token_bytes(16))
        os.ftruncate(self._file, 0)
        try:
            os.pwrite(self._file, _MAGIC + self._nonce, 0)
        except OSError as error:
            raise not_written(error, self.path) from error
        self._end = self._room = _FIRST

    def _draw(self, nonce: bytes) -> None:
        self._nonce = nonce
        self._nonce_checksum = zlib.crc32(nonce)

    def _make_room(self, needed: int) -> None:
        if hasattr(os, "posix_fallocate"):
            failpoint("journal room")
            length = max(needed, self._end + _ROOM_BYTES)
            os.posix_fallocate(self._file, 0, length)
            self._room = length


_NEW_JOURNAL_BYTES = 1 << 22


class CallLog:
    """The journal of one workspace, as its calls write it. One that only looks has none (`file` is None)."""

    def __init__(self, files: Confined, file: Journal | None, *, power: bool) -> None:
        self.file = file
        self.label: tuple[str, str] = ("", "")
        """The id and tool of the call that runs."""
        self.begun = False
        """Whether anything of it is written."""
        self._files = files
        self._power = power
        self._began_ns = 0
        self._root_record: Mapping[str, Json] = root_record(files.root)
        """To be written with the next record, if it is not written yet."""
        self._know_boot()

    def _know_boot(self) -> None:
        """Have the journal say on disk which root and which boot of the machine it is about, before anything else."""
        if self._power and self.file is not None:
            self.file.append(self._root_record)
            self.file.flush()
            self._root_record = {}

    @property
    def store(self) -> str:
        assert self.file is not None, "a read-only filesystem has no journal"
        return os.path.dirname(self.file.path)

    def write(self, *records: Mapping[str, Json], blob: bytes = b"", wait: bool = True) -> None:
        assert self.file is not None, "a read-only filesystem changes nothing"
        if not self.begun:
            self.file.check_there()
            call_id, tool = self.label
            self._began_ns = time.time_ns()
            first: list[Mapping[str, Json]] = [{"begin": call_id, "tool": tool, "at": self._began_ns}]
            if self._root_record:
                first.insert(0, self._root_record)
            records = (*first, *records)
        self.file.append(*records, blob=blob)
        if wait:
            self.file.flush()
        self.begun = True
        self._root_record = {}

    def named(self, position: int) -> str:
        """A name for the call that runs, or the one in it that began at a position, which no other has."""
        assert self.file is not None
        return self.file.named(self._began_ns, position)

    def note(self, record: Mapping[str, Json]) -> None:
        """Write down what makes a repeated rollback cheaper, if there is room."""
        if self.file is not None and self.begun:
            self.file.note(record)

    def commit(self, recorded: Recorded | None) -> None:
        """The commit point: with this record the call is committed."""
        assert self.file is not None
        self.file.check_there()
        payload = dict(recorded.payload) if recorded is not None else None
        blob = recorded.blob if recorded is not None else b""
        self.file.append({"commit": self.label[0], "payload": payload}, blob=blob)
        self.file.flush()

    def end(self, *, committed: bool) -> bool:
        """A call that has begun has ended; whether the journal is long enough by now to be started anew."""
        assert self.file is not None
        self.begun = False
        self.file.note({"end": self.label[0], "committed": committed})
        return self.file.size_bytes > _NEW_JOURNAL_BYTES

    def reset(self, *, again: bool) -> None:
        """Start anew, and ``again`` go on with it."""
        if self.file is not None:
            with suppress(OSError):
                self._root_record = root_record(self._files.root)
                self.file.reset()
                if again:
                    self._know_boot()
