"""What rollbacks of calls through the filesystem took away, as it was written down then: two files in a store.

Writing it down is one write. Commits are made of it when somebody looks (`aborted_calls.py`). When the one file is full
it takes the place of the other, so that the oldest goes. What a crash cut off at the end is not read, and is written
over.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ringfence_sandbox.disk.records import Json
from ringfence_sandbox.disk.state_files import sync_directory

MOST_CALLS = 50
MOST_BYTES = 32 << 20
"""Of each of the two files."""
_HEAD = struct.Struct("<4sIQI")
_MARK = b"\xa5gon"
_NEW, _OLD = "aborted", "aborted.old"
_json = json.JSONEncoder(separators=(",", ":")).encode

Spooled = tuple[Mapping[str, object], bytes]
"""The values of a record, and the bytes that came with it."""


def spooled(folder: Path) -> list[Spooled]:
    """All records, oldest first; also for one who has no lock."""
    found: list[Spooled] = []
    for name in (_OLD, _NEW):
        with suppress(FileNotFoundError):
            found += [record for record, _ in _records((folder / name).read_bytes())]
    return found


def _records(data: bytes) -> Iterator[tuple[Spooled, int]]:
    """The records, each with where it ends."""
    at = 0
    while at + _HEAD.size <= len(data):
        mark, text_size, blob_size, checksum = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        middle = start + text_size
        at = middle + blob_size
        text = data[start:middle]
        if mark != _MARK or at > len(data) or zlib.crc32(text) != checksum:
            return
        yield (json.loads(text), data[middle:at]), at


class Spool:
    """The two files of the store at ``folder``, for who has its lock; opened at the first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = -1
        self._end = 0
        self._calls = 0
        self._newest: Mapping[str, object] | None = None
        self._name_synced = False

    def newest(self) -> Mapping[str, object] | None:
        """The values of the newest record."""
        self._open()
        return self._newest

    def size(self) -> int:
        """How long the two files are."""
        paths = (self.folder / _OLD, self.folder / _NEW)
        return sum(path.stat().st_size for path in paths if path.exists())

    def append(self, values: Mapping[str, Json], contents: Sequence[bytes]) -> None:
        """Raises OSError where there is no space for it (EFBIG: it is too much); then nothing of it is kept."""
        self._open()
        text = _json(values).encode()
        head = _HEAD.pack(_MARK, len(text), sum(map(len, contents)), zlib.crc32(text))
        record = b"".join((head, text, *contents))
        if len(record) > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if self._calls >= MOST_CALLS or self._end + len(record) > MOST_BYTES:
            self._begin_anew()
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.pwrite(self._file, rest, self._end + len(record) - len(rest)) :]
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(record)
        self._calls += 1
        self._newest = values

    def sync(self) -> None:
        """Have what is written down survive a loss of power. OSError."""
        self._open()
        os.fsync(self._file)
        if not self._name_synced:
            sync_directory(self.folder)
            self._name_synced = True

    def clear(self) -> None:
        """Forget all of it."""
        self.close()
        for name in (_OLD, _NEW):
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        if self._file >= 0:
            return
        self._newest, self._calls, self._end = None, 0, 0
        before = spooled(self.folder)
        self._file = self._opened()
        if before:
            self._newest = before[-1][0]
            for _, end in _records((self.folder / _NEW).read_bytes()):
                self._calls, self._end = self._calls + 1, end
            os.ftruncate(self._file, self._end)

    def _opened(self) -> int:
        self._name_synced = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self.folder / _NEW, flags, 0o600)

    def _begin_anew(self) -> None:
        os.replace(self.folder / _NEW, self.folder / _OLD)
        self.close()
        self._file, self._calls, self._end = self._opened(), 0, 0
