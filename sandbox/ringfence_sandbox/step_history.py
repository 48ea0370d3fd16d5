"""A step for every call that changed files: what a filesystem on disk tells, written into the store."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.participants import Change, FileVersion, Step
from ringfence_sandbox import aborted_calls
from ringfence_sandbox.commit_messages import REPLACED, CommitInfo
from ringfence_sandbox.confined import Confined, Looks, is_reserved
from ringfence_sandbox.entries import Entry, Meta, Pending, make_entry, make_meta
from ringfence_sandbox.history import ChangedFiles, History, Recorded, ScannedStates, TakenBackCall
from ringfence_sandbox.history_objects import BLOB, object_id
from ringfence_sandbox.kernel import Before, nothing_before
from ringfence_sandbox.scan import Exclusion, ScanLimits, Scanner, ScanResult, follow
from ringfence_sandbox.spool import Spool
from ringfence_sandbox.stat_cache import Attributes, Stamp, StatCache
from ringfence_sandbox.store import PreparedStep, Store
from ringfence_sandbox.unknown import NOTHING, Move, Unknown

if TYPE_CHECKING:
    from ringfence.runtime.receipts import Receipt
    from ringfence_sandbox.folders import Folder

FOLDER = "history"
_CACHE = "stat-cache"
_HASHED_BYTES = 1 << 16
_MOST_HASHES = 4096
"""What is longer, or longer ago, is read again where its hash is asked for."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step that its commit record will make part of the history, after what somebody else changed before it."""

    step: Step
    commits: Sequence[PreparedStep]


class StepHistory(History):
    """The history of one workspace. The store is opened when it is first needed, which is after the lock is taken."""

    def __init__(
        self, files: Confined, folder: Path, *, limits: ScanLimits, power: bool, before: Before = nothing_before
    ) -> None:
        """``files`` is the root, whose descriptor `close` closes; ``folder`` is the workspace's store."""
        self._files = files
        self._folder = folder / FOLDER
        self._spool = Spool(folder)
        self.limits = limits
        self._power = power
        self._before = before
        self._opened: Store | None = None
        self._closed = False
        self._prepared: _Prepared | None = None
        self._cache: StatCache | None = None
        self._cache_saved = True
        self._hashes: OrderedDict[str, str] = OrderedDict()
        """Of some files that steps of late left, the sha256 by object id: their bytes need not be read for it."""
        self.left_out: Mapping[str, tuple[Exclusion, Stamp | None]] = {}
        """What the newest scan did not take in, why, and as what it was seen."""
        self.last: Step | None = None
        """The newest step that was made since opening."""
        self.replaced = False
        """Whether what the next look finds to differ is that of another directory in the place of the one before."""
        self.lost: list[str] = []
        """Commits that the journal names and the store does not have."""

    @property
    def store(self) -> Store:
        if self._opened is None:
            self._opened = Store.open(self._folder)
        return self._opened

    def close(self) -> None:
        """Let go of the files. Sealing is for before, while the workspace's lock is held."""
        if not self._closed:
            self._closed = True
            if self._opened is not None:
                self._opened.objects.close()
            self._spool.close()
            os.close(self._files.root)

    # What the filesystem asks of a history.

    def record(self, changed: ChangedFiles, receipt: Receipt) -> Recorded:
        self._prepared = None
        info = CommitInfo(
            "step", receipt.started_at, receipt.tool, receipt.call_id, receipt.session_id, receipt.receipt_id
        )
        steps: list[PreparedStep] = []
        if changed.scanned is not None:
            ours, unknown = self._since_tip(changed.scanned, info), changed.scanned.unknown
        else:
            with closing(Looks(self._files)) as looks:
                differing = Differing(
                    self._files, self.store, changed, receipt.started_at, self.limits, self._hashes, looks
                )
                ours = differing.ours()
                theirs = differing.theirs()
                before, unknown = differing.unknown()
            if theirs or before.reasons != self.store.states.unknown(self.store.tip).reasons:
                external = CommitInfo("external", receipt.started_at)
                steps.append(self.store.prepare(theirs, external, unknown=before))
        after = steps[-1] if steps else None
        if self._power:
            self._before("fsync objects")
        prepared = self.store.prepare(ours, info, after=after, unknown=unknown, sync=self._power)
        if not prepared.changed:
            return Recorded()
        step = Step(
            prepared.number or 0,
            receipt.tool,
            receipt.call_id,
            receipt.session_id,
            receipt.started_at,
            prepared.changed,
            prepared.commit,
        )
        self._prepared = _Prepared(step, [*steps, prepared])
        return Recorded({"history": prepared.commit}, step=step)

    def _since_tip(self, scanned: ScannedStates, info: CommitInfo) -> Mapping[str, Entry | Pending | None]:
        if scanned.since is None:
            return scanned.states
        now = self.store.prepare(scanned.states, info, after=scanned.since)
        tip = self.store.tip
        differences = self.store.states.differences(tip, now.commit)
        return {path: state for path, _, state in differences if not is_reserved(path)}

    def committed(self, recorded: Recorded) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.step is recorded.step:
            for commit in prepared.commits:
                self.store.publish(commit)
            self.last = prepared.step

    def taking_back(self, changed: ChangedFiles, call: TakenBackCall) -> Sequence[str]:
        return aborted_calls.write_down(self._spool, self.store, self._files, changed, call)

    def take_in_aborted(self) -> None:
        """Have the store keep what was taken back since it last did."""
        aborted_calls.take_in(self.store, self._spool)

    def recovered(self, payload: Mapping[str, object], blob: bytes) -> None:
        commit = payload.get("history")
        if isinstance(commit, str):
            try:
                self.store.advance(commit)
                self.lost.clear()  # what has gone before one that is there was dropped by `gc`
            except LookupError:
                # Its files are there, so they are found as somebody else's change.
                self.lost.append(commit)

    def content(self, payload: Mapping[str, object], path: str) -> bytes | None:
        commit = payload.get("history")
        if not isinstance(commit, str):
            return None
        try:
            return self.store.states.read(commit, path)
        except (LookupError, OSError):
            return None

    def sealed(self) -> bool:
        try:
            self.store.seal()
        except OSError:
            return False
        self._save_cache()
        return True

    def _save_cache(self) -> None:
        if self._cache is not None and not self._cache_saved:
            with suppress(OSError):  # without it the next opening reads more, and knows as much
                self._cache.save(self._folder / _CACHE)
                self._cache_saved = True

    # Looking at the tree.

    def found(self, path: str) -> os.stat_result | None:
        """What is at a path now."""
        return self._files.look(path)

    def scan(self, commit: str | None, keep: Callable[[bytes], str] | None = None, *, also: str = "") -> ScanResult:
        """What differs from a commit. ``keep`` takes the bytes of what had to be read, by default the store. ``also``
        is a holding directory to look into, as if it were one of the tree's.

        The cache stands for no commit after changes, until `stand_for` says which.
        """
        store = self.store
        if self._cache is None:
            self._cache = StatCache.load(store.folder / _CACHE)
        scanner = Scanner(
            self._files.root,
            store.states,
            commit,
            keep or store.add_blob,
            self._cache,
            limits=self.limits,
            hidden=lambda name: name != also and is_reserved(name),
        )
        found = scanner.scan()
        self.left_out = {
            path: (reason, found.stamps.get(path)) for path, reason in found.excluded.items() if not is_reserved(path)
        }
        self._cache_saved = self._cache_saved and not (found.changes or found.read)
        return found

    def stand_for(self, commit: str, differing: Iterable[tuple[str, Entry | None, Entry | None]] = ()) -> None:
        """The tree that was scanned last is that of a commit, but for what is ``differing``."""
        assert self._cache is not None, "it was scanned"
        for path, now, other in differing:
            self._cache.differ(path, now, other)
        self._cache.commit = commit

    def known(self, commit: str) -> Mapping[str, Mapping[str, Stamp]]:
        """The stamps of what is in the tree as a commit has it, as far as an earlier scan left them."""
        if self._cache is None:
            self._cache = StatCache.load(self.store.folder / _CACHE)
        follow(self._cache, self.store.states, commit)
        return {folder: names.copy() for folder, names in self._cache.folders.items()}

    @property
    def attributes(self) -> Mapping[str, Attributes]:
        """The extended attributes of what is in the tree, as the last scan saw them, by path."""
        return {} if self._cache is None else self._cache.attributes.copy()

    def look(self) -> ScanResult:
        """Take in the tree as it is: the baseline where there is none, else what somebody else changed, if anything.

        Raises:
            OSError: the root cannot be read, or the store not be written.
        """
        first = self._cache is None
        found = self.take_in()
        if first:  # later ones are saved with the rest, at the end
            self._save_cache()
        return found

    def take_in(self) -> ScanResult:
        """`look`, without saving what makes the next scan cheap."""
        store = self.store
        found, tip = self.scan(store.tip), store.tip
        known, unknown = found.known(), Unknown.of_scan(found.excluded)
        if known or unknown.reasons != store.states.unknown(tip).reasons:
            kind = "baseline" if tip is None else "external"
            info = CommitInfo(kind, datetime.now(UTC), REPLACED if self.replaced else "")
            prepared = store.prepare(known, info, unknown=unknown, sync=self._power)
            store.publish(prepared)
            self.stand_for(prepared.commit)
        elif found.changes and tip is not None:
            self.stand_for(tip)
        self.replaced = False
        return found


class Differing:
    """What a call changed, as states of the store: what was there before it and is not in the history, and what it
    left."""

    def __init__(
        self,
        files: Confined,
        store: Store,
        changed: ChangedFiles,
        at: datetime,
        limits: ScanLimits,
        hashes: OrderedDict[str, str] | None = None,
        looks: Looks | None = None,
    ) -> None:
        """What is larger than the ``limits``, and has only got another path, is not read. ``hashes`` has the sha256 of
        some objects by their ids, and gets what is written here."""
        self._look = looks.look if looks is not None else files.look
        self._files = files
        self._store = store
        self._changed = changed
        self._hashes = hashes if hashes is not None else OrderedDict[str, str]()
        self._at_ns = int(at.timestamp() * 1e9)
        self._paths = {change.path for change in changed.changes}
        self._directories = _above(self._paths)
        self._tip = store.tip
        self._folders: dict[str, Folder | None] = {}
        """Of the newest step, directories that were asked for."""
        self.moves = tuple(self._moves(limits.max_file_bytes))
        self._from = {move.old for move in self.moves}
        self._to = {move.new for move in self.moves}

    def _moves(self, most_bytes: int) -> Iterator[Move]:
        for change in self._changed.changes:
            before = change.before
            if before is None or before.kind != "file" or before.size <= most_bytes:
                continue
            new = self._changed.moved(change.path)
            found = self._files.look(new) if new is not None and new in self._paths and change.after is None else None
            if new is not None and found is not None and stat.S_ISREG(found.st_mode):
                yield Move(change.path, new, stat.S_IMODE(found.st_mode), found.st_size, found.st_mtime_ns)

    def unknown(self) -> tuple[Unknown, Unknown]:
        """What is not known of the tree before the call, and after it."""
        before = self._store.states.unknown(self._tip)
        if not before.reasons and not self.moves:
            return NOTHING, NOTHING
        if before.reasons:
            were = {change.path: change.before for change in self._changed.changes if change.path not in self._from}
            before = before.knowing(_kinds(were))
        after = before
        if after.reasons:
            after = after.knowing(_kinds({change.path: change.after for change in self._changed.changes}))
        return before, after.with_moves(self.moves)

    def theirs(self) -> dict[str, Entry | Pending | None]:
        found: dict[str, Entry | Pending | None] = {}
        for change in self._changed.changes:
            known = self._known(change.path)
            if change.path in self._from:
                continue
            if change.before is None or _is_special(change.before):
                if known is not None:
                    found[change.path] = None
            elif not self._is_known(change, change.before, known):
                found[change.path] = self._before(change.path, change.before, known)
        # Somebody may have put a file into a directory that the call had made.
        holding = set(_above([path for path, state in found.items() if state is not None]))
        for path in self._directories:
            known, given = self._known(path), found.get(path)
            if (known is not None and known.kind == "directory") or (given is not None and given.kind == "directory"):
                continue
            if path not in self._paths or path in holding:
                state = self._now(path)
                if path in holding and (state is None or state.kind != "directory"):  # the call has removed it again
                    state = Pending("directory", Meta(0o755, os.geteuid(), os.getegid(), self._at_ns))
                if state is not None:
                    found[path] = state
        return found

    def ours(self) -> dict[str, Entry | Pending | None]:
        found: dict[str, Entry | Pending | None] = {
            change.path: None
            if change.after is None or change.path in self._to
            else self._now(change.path, change.after.content_hash)
            for change in self._changed.changes
        }
        for path in self._directories:
            state = found.get(path) or self._now(path)
            if state is not None and state.kind == "directory":
                found[path] = state
        return found

    def _known(self, path: str) -> Entry | None:
        if self._tip is None:
            return None
        above, _, name = path.rpartition("/")
        if above not in self._folders:
            self._folders[above] = self._store.states.folder(self._tip, above)
        folder = self._folders[above]
        return None if folder is None else self._store.states.entry_in(folder, name)

    def _is_known(self, change: Change, before: FileVersion, known: Entry | None) -> bool:
        if known is None or known.kind != before.kind:
            return False
        if before.kind != "symlink" and known.meta.mode != before.mode:
            return False
        if known.oid is None:
            return True
        if before.content_hash is not None and known.oid in self._hashes:
            return self._hashes[known.oid] == before.content_hash
        bytes_before = self._changed.known_before(change.path)
        if bytes_before is not None:
            return object_id(BLOB, bytes_before).hex() == known.oid
        content = self._store.states.content(known.oid)
        if before.kind == "symlink":
            return content == os.fsencode(before.target or "")
        if before.content_hash is not None:
            return hashlib.sha256(content).hexdigest() == before.content_hash
        return len(content) == before.size and content == self._changed.before(change.path)

    def _before(self, path: str, before: FileVersion, known: Entry | None) -> Pending | None:
        if known is not None:
            meta = replace(known.meta, mode=before.mode, link=0)
        else:
            meta = Meta(before.mode, os.geteuid(), os.getegid(), self._at_ns)
        if before.kind == "symlink":
            return Pending("symlink", meta, os.fsencode(before.target or ""))
        if before.kind == "directory":
            return Pending("directory", meta)
        return Pending("file", meta, partial(self._changed.before, path))

    def _now(self, path: str, sha256: str | None = None) -> Entry | Pending | None:
        found = self._changed.found(path)
        if found is None:
            found = self._look(path)
            sha256 = None  # it is read again, and may be another
        if found is None:
            return None
        mode = found.st_mode
        link = found.st_ino if found.st_nlink > 1 and not stat.S_ISDIR(mode) else 0
        meta = make_meta(stat.S_IMODE(mode), found.st_uid, found.st_gid, found.st_mtime_ns, link)
        if stat.S_ISREG(mode):
            return self._stored(path, meta, sha256)
        if stat.S_ISDIR(mode):
            return Entry("directory", meta)
        if stat.S_ISLNK(mode):
            return Pending("symlink", meta, os.fsencode(self._files.read_link(path)))
        return None  # a socket, a pipe or a device: no history has it

    def _stored(self, path: str, meta: Meta, sha256: str | None) -> Entry:
        content = self._changed.after(path)
        oid = self._store.add_blob(content)
        if len(content) <= _HASHED_BYTES and oid not in self._hashes:
            if len(self._hashes) >= _MOST_HASHES:
                self._hashes.popitem(last=False)
            self._hashes[oid] = sha256 or hashlib.sha256(content).hexdigest()
        return make_entry("file", meta, oid)


def _above(paths: Iterable[str]) -> list[str]:
    """The directories above, from the top; the root is one."""
    found = {""}
    for path in paths:
        while path := path.rpartition("/")[0]:
            if path in found:
                break
            found.add(path)
    return sorted(found)


def _kinds(versions: Mapping[str, FileVersion | None]) -> dict[str, str | None]:
    return {path: one and one.kind for path, one in versions.items() if one is None or not _is_special(one)}


def _is_special(version: FileVersion) -> bool:
    """Whether it is a socket, a pipe or a device, which no history has: it has neither bytes nor a hash."""
    return version.kind == "file" and version.size == 0 and version.content_hash is None
