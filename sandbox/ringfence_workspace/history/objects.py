"""The git repository of a store: its objects, which are in a log and in packs, and its refs."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

from dulwich.errors import ApplyDeltaError, ChecksumMismatch, FileFormatException
from dulwich.objects import ObjectID, RawObjectID
from dulwich.pack import Pack, apply_delta  # pyright: ignore[reportUnknownVariableType]  # it may be of Rust
from dulwich.refs import Ref, read_packed_refs, write_packed_refs

from ringfence.errors import format_error
from ringfence_workspace.history.entries import object_id
from ringfence_workspace.history.log import Log
from ringfence_workspace.history.packs import (
    close_packs,
    copied_entry,
    delta,
    open_packs,
    pack_entry,
    read_pack_entry,
    remove_half_packs,
    remove_packs,
    write_pack,
)
from ringfence_workspace.history.trees import DeltaBase
from ringfence_workspace.tree.places import replacing, sync_directory

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

# What a workspace's own files of these names may be and contain is no fault of the store. (Only what git 2.39 knows:
# git ends at a name that it does not know.)
_TOLERATED = (
    *(
        f"gitmodules{what}"
        for what in ("Blob", "Large", "Missing", "Name", "Parse", "Path", "Symlink", "Update", "Url")
    ),
    *(f"gitattributes{what}" for what in ("Blob", "Large", "LineLength", "Missing", "Symlink")),
    "gitignoreSymlink",
    "mailmapSymlink",
)
_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
\tlogAllRefUpdates = false
[gc]
\tauto = 0
[fsck]
""" + "".join(f"\t{problem} = ignore\n" for problem in _TOLERATED)
_ALTERNATES = "objects/info/alternates"
# The lines of `meta` are for programs: without this they would be most of what `git log -p` shows.
_ATTRIBUTES = "meta/** -diff\n"


def _missing(oid: bytes, why: str = "") -> KeyError:
    """``why`` is what came of reading it, in words: such an error holds a part of its pack, which could not be closed
    while it is handled."""
    return KeyError(f"the store has no object {oid.hex()}" + (f" that can be read ({why})" if why else ""))


class HistoryObjects:
    """Objects by binary id. They are added to the log, and only there; `seal` makes a pack of it.

    ``folder`` is the git repository. Nothing but its objects and the log is ever read: no configuration, no hooks. A
    fork's also has the packs that it borrows, by git's alternates: those are read, and never written or copied.
    """

    def __init__(self, folder: Path, *, writable: bool, power: bool = False) -> None:
        """``power`` is as for `Log`."""
        self._folder = folder
        self._pack_folder = folder / "objects" / "pack"
        self.log, self.packs, self.borrowed = self._open(writable, power)
        if writable:
            self._remove_leftovers()

    def _open(self, writable: bool, power: bool) -> tuple[Log, list[Pack], list[Pack]]:
        # A log's objects are in a pack before the log goes: opened in this order, a reader without the lock misses
        # nothing, unless what it has listed is gone when it opens it.
        damage = None
        for _ in range(20):
            try:
                log = Log(self._folder, writable=writable, power=power)
            except FileNotFoundError:
                continue
            if not writable and log.damage != damage:  # so looks a record, too, that was just being written
                damage = log.damage
                log.close()
                continue
            packs: list[Pack] = []
            try:
                packs = open_packs(self._pack_folder)
                return log, packs, self._open_borrowed()
            except FileNotFoundError:
                close_packs(packs)
                log.close()
        raise LookupError("a pack of it, or its log, is not there")

    def _open_borrowed(self) -> list[Pack]:
        packs: list[Pack] = []
        try:
            for place in read_alternates(self._folder):
                if not place.is_dir():
                    raise LookupError(f"it borrows from {place}, which is gone")
                packs += open_packs(place / "pack")
        except BaseException:
            close_packs(packs)
            raise
        return packs

    def has(self, oid: bytes) -> bool:
        return self.has_own(oid) or any(RawObjectID(oid) in pack for pack in self.borrowed)

    def has_own(self, oid: bytes) -> bool:
        """`has`, without what is borrowed."""
        return oid in self.log.objects or any(RawObjectID(oid) in pack for pack in self.packs)

    def raw(self, oid: bytes) -> tuple[int, bytes]:
        """The type and the bytes of an object.

        Raises:
            KeyError: there is none, or it cannot be read.
        """
        if oid in self.log.objects:
            return self._from_log(oid)
        why = ""
        for pack in (*self.packs, *self.borrowed):
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
            raw = b"".join(apply_delta(raw, change))  # pyright: ignore[reportUnknownArgumentType]
        return type_number, raw

    def add(self, type_number: int, raw: bytes, base: DeltaBase | None = None) -> bytes:
        """Add an object, if it is new; ``base`` is the one that it is a small edit of. Its id.

        Of what is borrowed only that is kept which the commit needs that the fork began with. So a copy is added."""
        oid = object_id(type_number, raw)
        if not self.has_own(oid):
            self._store(oid, type_number, raw, base)
        return oid

    def _store(self, oid: bytes, type_number: int, raw: bytes, base: DeltaBase | None) -> None:
        # Only to objects of the same log: it becomes one pack, and a pack must hold what its deltas need.
        if base is not None and len(raw) >= _SMALLEST_DELTA_BYTES and base.oid in self.log.objects:
            depth = self.log.objects[base.oid][2] + 1
            change = delta(base, len(raw)) if depth <= _DEEPEST_DELTA else raw
            if len(change) < len(raw) // 2:
                self.log.add(oid, pack_entry(type_number, change, base.oid), depth)
                return
        self.log.add(oid, pack_entry(type_number, raw), 0)
        if self.log.writable and self.log.pending_bytes > _FLUSH_BYTES:
            self.log.append()

    # Packs.

    def seal(self, *, before_deleting: Callable[[], None] = lambda: None) -> None:
        """Move the log's objects into a pack; ``before_deleting`` must put the refs that it names on disk elsewhere.

        The pack is on disk before the log is deleted, and a crash in between leaves both, which is no harm.
        """
        log = self.log
        if log.objects:
            write_pack(self._pack_folder, len(log.objects), log.each)
            self._reopen_packs()
        if not log.is_new:
            before_deleting()
            log.renew()
        if len(self.packs) > MOST_PACKS:
            small = self._small_packs()
            # Where something in them cannot be read they stay as they are, with the rest that can.
            with suppress(KeyError):
                self.repack({entry[0] for pack in small for entry in pack.index.iterentries()}, small)

    def _remove_leftovers(self) -> None:
        """What a crash left behind: files and packs half written."""
        for path in self._folder.glob("tmp_*"):
            path.unlink()
        remove_half_packs(self._pack_folder)

    def _small_packs(self) -> list[Pack]:
        """All but those that are larger than everything smaller together: what is large is seldom copied."""
        sizes = {id(pack): os.stat(pack.data.path).st_size for pack in self.packs}
        packs = sorted(self.packs, key=lambda pack: sizes[id(pack)], reverse=True)
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
        old = self.packs if old is None else old
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
        before, self.packs = self.packs, open_packs(self._pack_folder)
        close_packs(before)

    @property
    def closed(self) -> bool:
        return self.log.closed

    def close(self) -> None:
        close_packs(self.packs)
        close_packs(self.borrowed)
        self.log.close()


def create_repository(folder: Path) -> None:
    for name in ("objects/pack", "objects/info", "refs/heads", "refs/tags", "info"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    # HEAD last: with it, this is a store.
    files = {"config": _CONFIG, "info/attributes": _ATTRIBUTES, "HEAD": "ref: refs/heads/main\n"}
    for name, text in files.items():
        with replacing(folder / name) as file:
            file.write(text.encode())
    sync_directory(folder)


def read_alternates(folder: Path) -> list[Path]:
    """The directories of objects that a repository borrows from."""
    try:
        lines = (folder / _ALTERNATES).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [Path(os.fsdecode(line)) for line in lines if line]


def write_alternates(folder: Path, places: Iterable[Path]) -> None:
    """Have a repository borrow the objects of these directories."""
    with replacing(folder / _ALTERNATES) as file:
        file.write(b"".join(os.fsencode(place) + b"\n" for place in places))


def read_refs(folder: Path) -> dict[bytes, str]:
    """Commits by the names of their refs."""
    try:
        with open(folder / "packed-refs", "rb") as file:
            return {bytes(name): oid.decode() for oid, name in read_packed_refs(file)}
    except FileNotFoundError:
        return {}


def write_refs(folder: Path, refs: Mapping[bytes, str]) -> None:
    with replacing(folder / "packed-refs") as file:
        write_packed_refs(file, {Ref(name): ObjectID(oid.encode()) for name, oid in refs.items()})
    sync_directory(folder)


def read_shallow(folder: Path) -> set[str]:
    """The commits whose parents were dropped."""
    try:
        return set((folder / "shallow").read_text().split())
    except FileNotFoundError:
        return set()


def write_shallow(folder: Path, commits: Set[str]) -> None:
    with replacing(folder / "shallow") as file:
        file.write("".join(f"{commit}\n" for commit in sorted(commits)).encode())
    sync_directory(folder)
