"""All objects of a store: those of its log and those of its packs, as a dulwich object store."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dulwich.errors import ApplyDeltaError, ChecksumMismatch, FileFormatException
from dulwich.object_store import BaseObjectStore
from dulwich.objects import ObjectID, RawObjectID, ShaFile, hex_to_sha, sha_to_hex
from dulwich.pack import Pack

from ringfence.errors import format_error
from ringfence_sandbox.disk.state_files import sync_directory
from ringfence_sandbox.store.deltas import Before, applied, delta
from ringfence_sandbox.store.object_ids import object_id
from ringfence_sandbox.store.object_log import MAGIC, ObjectLog, pack_entry, read_pack_entry
from ringfence_sandbox.store.packs import copied_entry, open_packs, remove_half_packs, remove_packs, write_pack

_DEEPEST_DELTA = 30
_SMALLEST_DELTA_BYTES = 200
_FLUSH_BYTES = 4 << 20
MOST_PACKS = 12
"""More are made into one: every lookup asks every pack."""
UNREADABLE = (
    *(ValueError, TypeError, AssertionError, OverflowError, struct.error, zlib.error),
    *(ApplyDeltaError, ChecksumMismatch, FileFormatException),
)
"""What comes of packs that are not what they were."""


def _missing(oid: bytes, why: str = "") -> KeyError:
    """``why`` is what came of reading it, in words: such an error holds a part of its pack, which could not be closed
    while it is handled."""
    return KeyError(f"the store has no object {oid.hex()}" + (f" that can be read ({why})" if why else ""))


class HistoryObjects(BaseObjectStore):
    """Objects are added to the log, and only there; `seal` makes a pack of it.

    ``folder`` is the git repository. Nothing but its objects and the log is ever read: no configuration, no
    alternates, no hooks.
    """

    def __init__(self, folder: Path, *, writable: bool) -> None:
        super().__init__()
        self._folder = folder
        self._writable = writable
        self._in_memory: dict[bytes, tuple[int, bytes]] = {}
        """What was added to a store that is not to be written."""
        self._pack_folder = folder / "objects" / "pack"
        self.log, self._packs = self._open()
        if writable:
            self._remove_leftovers()

    def _open(self) -> tuple[ObjectLog, list[Pack]]:
        # A log's objects are in a pack before the log goes: opened in this order, a reader without the lock misses
        # nothing, unless what it has listed is gone when it opens it.
        for _ in range(20):
            try:
                log = ObjectLog.open(self._log_path(), writable=self._writable)
            except FileNotFoundError:
                continue
            try:
                return log, open_packs(self._pack_folder)
            except FileNotFoundError:
                log.close()
        raise LookupError("a pack of it, or its log, is not there")

    def _logs(self) -> list[Path]:
        return sorted(self._folder.glob("objects.*.log"))

    def _log_path(self) -> Path:
        logs = self._logs()
        # After a crash in sealing there may be two: of the older one everything is in a pack. But a new one that could
        # not be begun, for want of space say, has nothing, and the older one went on.
        logs = [path for path in logs if path.stat().st_size >= len(MAGIC)] or logs
        return logs[-1] if logs else self._folder / "objects.000001.log"

    # What dulwich asks of a store.

    @property
    def packs(self) -> list[Pack]:
        return self._packs

    def contains_loose(self, sha: ObjectID) -> bool:
        return hex_to_sha(sha) in self.log.objects

    def contains_packed(self, sha: ObjectID | RawObjectID) -> bool:
        return any(sha in pack for pack in self._packs)

    def __contains__(self, sha1: ObjectID) -> bool:
        return self.has(hex_to_sha(sha1) if len(sha1) == 40 else sha1)

    def __iter__(self) -> Iterator[ObjectID]:
        for oid in self.ids():
            yield sha_to_hex(RawObjectID(oid))

    def get_raw(self, name: RawObjectID | ObjectID) -> tuple[int, bytes]:
        return self.raw(hex_to_sha(ObjectID(name)) if len(name) == 40 else name)

    def add_object(self, obj: ShaFile) -> None:
        self.add(obj.type_num, obj.as_raw_string())

    def add_objects(
        self, objects: Sequence[tuple[ShaFile, str | None]], progress: Callable[..., None] | None = None
    ) -> Pack | None:
        for obj, _ in objects:
            self.add_object(obj)

    # The same by binary ids, without objects around the bytes.

    def has(self, oid: bytes) -> bool:
        if oid in self.log.objects or oid in self._in_memory:
            return True
        return bool(self._packs) and any(RawObjectID(oid) in pack for pack in self._packs)

    def raw(self, oid: bytes) -> tuple[int, bytes]:
        """The type and the bytes of an object.

        Raises:
            KeyError: there is none, or it cannot be read.
        """
        if oid in self.log.objects:
            return self._from_log(oid)
        if oid in self._in_memory:
            return self._in_memory[oid]
        why = ""
        for pack in self._packs:
            try:
                return pack.get_raw(RawObjectID(oid))
            except KeyError:
                pass
            except UNREADABLE as error:
                why = format_error(error)
        raise _missing(oid, why)

    def _from_log(self, oid: bytes) -> tuple[int, bytes]:
        deltas: list[bytes] = []
        while True:
            type_number, base, raw = read_pack_entry(self.log.entry(oid))
            if base is None:
                break
            deltas.append(raw)
            oid = base
        for change in reversed(deltas):
            raw = applied(raw, change)
        return type_number, raw

    def ids(self) -> set[bytes]:
        found = set(self.log.objects)
        for pack in self._packs:
            found.update(entry[0] for entry in pack.index.iterentries())
        return found

    def add(self, type_number: int, raw: bytes, before: Before | None = None) -> bytes:
        """Add an object, if it is new; ``before`` is what it came from by a small change.

        Returns:
            Its id.
        """
        oid = object_id(type_number, raw)
        if not self.has(oid):
            self._store(oid, type_number, raw, before)
        return oid

    def _store(self, oid: bytes, type_number: int, raw: bytes, before: Before | None) -> None:
        if not self._writable:
            self._in_memory[oid] = type_number, raw
            return
        # Only to objects of the same log: it becomes one pack, and a pack must hold what its deltas need.
        if before is not None and len(raw) >= _SMALLEST_DELTA_BYTES and before.oid in self.log.objects:
            depth = self.log.objects[before.oid][2] + 1
            change = delta(before, len(raw)) if depth <= _DEEPEST_DELTA else raw
            if len(change) < len(raw) // 2:
                self.log.add(oid, pack_entry(type_number, change, before.oid), depth)
                return
        self.log.add(oid, pack_entry(type_number, raw), 0)
        if self.log.pending_bytes > _FLUSH_BYTES:
            self.log.flush()

    # Packs.

    def seal(self, *, before_deleting: Callable[[], None] = lambda: None) -> None:
        """Move the log's objects into a pack; ``before_deleting`` must put the refs that it names on disk elsewhere.

        The pack is on disk before the log is deleted, and a crash in between leaves both, which is no harm.
        """
        log = self.log
        log.flush()
        if log.objects:
            write_pack(self._pack_folder, len(log.objects), log.each)
            self._reopen_packs()
        if log.objects or log.refs:
            before_deleting()
            number = int(log.path.name.split(".")[1]) + 1
            self.log = ObjectLog.open(self._folder / f"objects.{number:06}.log", writable=True)
            log.close()
            self._remove_old_logs()
        if len(self._packs) > MOST_PACKS:
            small = self._small_packs()
            # Where something in them cannot be read they stay as they are, with the rest that can.
            with suppress(KeyError):
                self.repack({entry[0] for pack in small for entry in pack.index.iterentries()}, small)

    def _remove_old_logs(self) -> None:
        for path in self._logs():
            if path != self.log.path:
                path.unlink()
        sync_directory(self._folder)

    def _remove_leftovers(self) -> None:
        """What a crash left behind: files and packs half written, logs of which all is in a pack."""
        for path in self._folder.glob("tmp_*"):
            path.unlink()
        if len(self._logs()) > 1:
            self._remove_old_logs()
        remove_half_packs(self._pack_folder)

    def _small_packs(self) -> list[Pack]:
        """All but those that are larger than everything smaller together: what is large is seldom copied."""
        sizes = {id(pack): os.stat(pack.data.path).st_size for pack in self._packs}
        packs = sorted(self._packs, key=lambda pack: sizes[id(pack)], reverse=True)
        while packs and sizes[id(packs[0])] > sum(sizes[id(pack)] for pack in packs[1:]):
            del packs[0]
        return packs

    def repack(
        self,
        kept: Iterable[bytes],
        old: Sequence[Pack] | None = None,
        *,
        before_deleting: Callable[[], None] = lambda: None,
    ) -> None:
        """Make one pack of the objects ``kept`` of the packs ``old`` (None: all), and delete those."""
        old = self._packs if old is None else old
        of: dict[bytes, Pack] = {}
        for oid in kept:
            for pack in old:
                if RawObjectID(oid) in pack:
                    of[oid] = pack
                    break
            else:
                raise _missing(oid)
        new = write_pack(self._pack_folder, len(of), lambda take: self._copy(of, take)) if of else None
        before_deleting()
        self._remove_indexes_of_git()
        try:
            remove_packs(pack for pack in old if new is None or Path(os.fspath(pack.data.path)).stem != new.name)
            sync_directory(self._pack_folder)
        finally:
            self._reopen_packs()

    def _remove_indexes_of_git(self) -> None:
        """If somebody ran git's own `gc` here, it left indexes over all packs and commits."""
        for path in (self._folder / "objects" / "info" / "commit-graph", self._pack_folder / "multi-pack-index"):
            path.unlink(missing_ok=True)
        for path in (self._folder / "objects" / "info" / "commit-graphs").glob("*"):
            path.unlink()

    def _copy(self, of: dict[bytes, Pack], take: Callable[[bytes, bytes], None]) -> None:
        def together(base: bytes) -> bool:
            # Among packs with different deltas of the same objects, a circle of them is possible.
            return of.get(base) is pack

        for oid, pack in of.items():
            entry, why = b"", ""
            try:
                entry = copied_entry(pack, oid, together)
            except UNREADABLE as error:
                why = format_error(error)
            if why:
                raise _missing(oid, why)
            take(oid, entry)

    def _reopen_packs(self) -> None:
        before, self._packs = self._packs, open_packs(self._pack_folder)
        for pack in before:
            pack.close()

    @property
    def closed(self) -> bool:
        return self.log.closed

    def close(self) -> None:
        for pack in self._packs:
            pack.close()
        self.log.close()
