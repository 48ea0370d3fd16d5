"""Opaque calls, which change files unseen: the tree is looked through before and after, and what differs is the call's.

`Scans` keeps states: the one before, whole and with all bytes, and the one that a rollback is about to take away.
`tree_rollback` brings the tree from one to the other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeGuard

from ringfence.participants import Change, FileVersion
from ringfence_sandbox.disk.confined import Confined, is_reserved, open_file, sha256_of
from ringfence_sandbox.disk.kernel import free_bytes, set_mode, sync_filesystem
from ringfence_sandbox.opaque.states import Aborted, After, Before, Displaced, ExcludedFile, ScannedFiles, is_only_time
from ringfence_sandbox.scan.scan import Exclusion, Hides, ScanResult
from ringfence_sandbox.scan.stat_cache import Stamp
from ringfence_sandbox.steps.aborted_calls import keep_commit
from ringfence_sandbox.steps.step_history import StepHistory
from ringfence_sandbox.steps.step_states import Differing, all_above
from ringfence_sandbox.store.commits import CommitInfo, PreparedStep
from ringfence_sandbox.store.entries import Difference, Entry, Unknown, blob_id, is_directory
from ringfence_sandbox.store.store import Store
from ringfence_sandbox.store.trees import walk
from ringfence_sandbox.transaction.changes import ChangedFiles, ScannedStates, noting_failure

KEPT_BYTES = 1 << 30
"""Of one call's new files: beyond it only names and hashes are kept of what is taken back."""
_HASHED_BYTES = 1 << 30
_NAMES_BYTES = 1 << 14
"""What it takes, for a few paths, to keep that they were there at all."""

_LOOKING = stat.S_IRUSR | stat.S_IXUSR


class Scans:
    """The states around opaque calls, in the store of a workspace."""

    def __init__(self, files: Confined, history: StepHistory, *, power: bool) -> None:
        self._files = files
        self.history = history
        self._power = power

    @property
    def store(self) -> Store:
        return self.history.store

    def before(
        self, early: ChangedFiles | None, inodes: Mapping[str, int], displaced: Displaced, *, nested: bool
    ) -> Before:
        """Look at the tree and store all of it, before an opaque call.

        What differs from the newest commit is somebody else's, and becomes one. ``early`` is what typed calls around
        this one have changed so far; with ``nested`` there is an opaque one among those. ``inodes`` are those that the
        undo log so far is about, and ``displaced`` is what it may bring back.

        Raises:
            OSError: the tree cannot be read, or the store not be written.
        """
        history, store = self.history, self.store
        prepared = None
        if not nested and early is None and not displaced.paths:
            found = history.take_in()
        else:
            found = self._scan(store.tip, displaced)
            states: dict[str, Entry | None] = {**found.known()}
            if not nested:
                states = self._publish_external(early, found, states)
            if states:
                info = CommitInfo("external", datetime.now(UTC), title="before an opaque call in a call")
                unknown = _unknown(found)
                prepared = store.prepare(states, info, unknown=unknown)
        commit = store.tip if prepared is None else prepared.commit
        assert commit is not None, "a tree that was looked at has a commit"
        attributes = history.attributes
        history.stand_for(commit)
        return Before(
            commit,
            prepared,
            history.known(commit),
            found.stamps,
            {path: self._excluded(path, reason, found.stamps.get(path)) for path, reason in found.excluded.items()},
            inodes,
            displaced,
            attributes,
            room=free_bytes(store.folder) // 4,
        )

    def _scan(
        self,
        commit: str | None,
        displaced: Displaced,
        keep: Callable[[bytes], str] | None = None,
        hides: Hides | None = None,
    ) -> ScanResult:
        """What differs from a commit, in the tree and in what is displaced."""
        found = self.history.scan(commit, keep, also=displaced.holding, hides=hides)
        for known in (found.changes, found.excluded):
            for path in [path for path in known if displaced.hides(path) and path != displaced.holding]:
                del known[path]
        return found

    def _excluded(self, path: str, reason: Exclusion, stamp: Stamp | None) -> ExcludedFile:
        here = self._look(path)
        mode = -1 if here is None or reason == "mounted" else here.st_mode
        return ExcludedFile(reason, *(stamp[:3] if stamp is not None else (0, 0, 0)), mode)

    def _publish_external(
        self, early: ChangedFiles | None, found: ScanResult, states: dict[str, Entry | None]
    ) -> dict[str, Entry | None]:
        """Make a commit of what somebody else had changed before the calls around this one; all states after it."""
        store, tip = self.store, self.store.tip
        paths = {change.path for change in early.changes} if early is not None else set[str]()
        ours = paths | set(all_above(paths))
        theirs: dict[str, Entry | None] = {}
        if early is not None:
            theirs = Differing(self._files, store, early, datetime.now(UTC), self.history.limits).external_states()
        for path, state in found.known().items():
            if is_reserved(path):
                continue
            if path not in ours or (tip is None and path not in paths):
                theirs[path] = state
        if theirs:
            kind = "baseline" if tip is None else "external"
            unknown = _unknown(found) if tip is None else None
            store.publish(store.prepare(theirs, CommitInfo(kind, datetime.now(UTC)), unknown=unknown))
        was: dict[str, Entry | None] = {}
        for path in theirs:
            above = [states[one] for one in all_above([path]) if one in states]
            if all(map(is_directory, above)):  # else it went with that
                was[path] = store.states.entry(tip, path) if tip is not None else None
        return {**was, **states}

    def recovered(self, commit: str, more: bytes) -> Before:
        """What `before` gave to a process that was killed. LookupError where the store does not have it."""
        parent = self.store.commit(commit).parent
        states = self.store.states
        prepared = PreparedStep(commit, parent, None, 0, states.root(commit), (), states.unknown(commit))
        return Before(commit, prepared, self.history.known(commit)).with_more(more)

    def after(self, before: Before) -> After:
        """Look at the tree again. What is new is stored, up to a bound and while there is space.

        What was hidden before the call still is. What has got a hidden name in the call is the call's, and can be
        rolled back like all else.
        """
        self._keep_root_open(before.commit)
        keeper = _Keeper(self.store, before.room)
        found = self._scan(before.commit, before.displaced, keeper.keep, self._hidden_before(before))
        keeper.flush()
        differing = sorted(self._differing(before, found), key=lambda one: one.path)
        self.history.stand_for(before.commit, [*differing, *(Difference(path, None, None) for path in found.excluded)])
        return After(found, differing)

    def _hidden_before(self, before: Before) -> Hides:
        """Whether something was hidden before a call, by its path or by its inode. What has become hidden is noted."""
        left = {path: left for path, left in before.left.items() if left.reason == "hidden"}
        inodes = {one.inode for one in left.values()}
        tree = self.history.hidden

        def hides(directory: int, name: str, path: str, found: os.stat_result) -> bool:
            if tree is not None:
                tree.sees(directory, name, path, found)
            return path in left or found.st_ino in inodes

        return hides

    def _keep_root_open(self, commit: str) -> None:
        """Give the owner of the tree the right to look into its root back, where a call took it away: without that
        nothing of the call could be seen, kept or taken back."""
        mode = stat.S_IMODE(os.fstat(self._files.root).st_mode)
        if mode & _LOOKING == _LOOKING:
            return
        was = self.store.states.entry(commit, "")
        if was is not None and was.meta.mode & _LOOKING == _LOOKING:
            with suppress(PermissionError):  # somebody else's: it stays as it is
                os.fchmod(self._files.root, mode | _LOOKING)

    def made_readable(self, before: Before, after: After) -> tuple[After, dict[str, int]]:
        """Look again, where a call took away the permission to; the ctimes of what permission was given to."""
        opened: dict[str, int] = {}
        while new := [
            path
            for path, reason in after.found.excluded.items()
            if reason == "unreadable" and path not in before.left and path not in opened
        ]:
            for path in new:
                with self._files.parent(path) as (at, name):
                    here = os.lstat(name, dir_fd=at)
                    opened[path] = here.st_ctime_ns
                    with suppress(PermissionError):
                        set_mode(at, name, stat.S_IMODE(here.st_mode) | stat.S_IRWXU)
            after = self.after(before)
        return after, opened

    def disarmed(self, before: Before, after: After) -> After:
        """A program that runs as its owner, and has other bytes now, runs so no more. A write takes that bit away by
        itself; one through a shared mapping does not."""
        armed = {old.oid for _, old, _ in after.differing if _runs_as_owner(old)}
        changed = [path for path, _, now in after.differing if _runs_as_owner(now) and now.oid not in armed]
        for path in changed:
            with self._files.parent(path) as (at, name):
                mode = os.lstat(name, dir_fd=at).st_mode
                if stat.S_ISREG(mode):
                    set_mode(at, name, stat.S_IMODE(mode) & ~stat.S_ISUID)
        return self.after(before) if changed else after

    def _differing(self, before: Before, found: ScanResult) -> Iterator[Difference]:
        states, commit = self.store.states, before.commit
        for path, now in found.changes.items():
            if path in before.left or self._went_before(before, path):  # what the commit has of it is from before that
                if now is not None and not before.displaced.hides(path):
                    yield Difference(path, None, now)
                continue
            old = states.entry(commit, path)
            if not before.displaced.hides(path):
                yield Difference(path, old, now)
            if is_directory(old) and not is_directory(now):
                folder = states.folder(commit, path)
                for name, entry in walk(folder, states.objects, path) if folder is not None else ():
                    if name != path and not self._went_before(before, name):
                        yield Difference(name, entry, None)

    def _went_before(self, before: Before, path: str) -> bool:
        """Whether what the commit has of a path had gone before the call: it was in a directory, in the place of which
        came something that no scan took in, and that in the call went, too."""
        for above in all_above([path]) if before.left else ():
            left = before.left.get(above)
            if left is not None:
                here = self._look(above)
                if here is None or not left.is_at(here):
                    return True
        return False

    def changes(self, before: Before, after: After) -> list[Change]:
        """What a call changed, by path: bytes, kinds, permission bits and link targets."""
        found: dict[str, Change] = {}
        for item in after.differing:
            path = item.path
            if path not in before.left and item.changes_content:
                now = self._version(item.after, after.stamps.get(path))
                found[path] = Change(path, self._version(item.before, None), now)
        for path in after.found.excluded.keys() - before.left.keys():
            was = found[path].before if path in found else None
            found[path] = Change(path, was, self._unread(path))
        read = {path: now for path, _, now in after.differing if path in before.left and now is not None}
        for path, left in before.left.items():
            here = self._look(path)
            if here is None or not (left.fits(here) and left.has_mode(here)):
                was = FileVersion("file", stat.S_IMODE(max(left.mode, 0)), left.size)
                now = self._version(read[path], after.stamps.get(path)) if path in read else self._unread(path)
                found[path] = Change(path, was, now)
        return [found[path] for path in sorted(found) if not is_reserved(path)]

    def _look(self, path: str) -> os.stat_result | None:
        try:
            return self._files.look(path)
        except PermissionError:  # the call made a directory on the way unsearchable
            return None

    def _unread(self, path: str) -> FileVersion | None:
        here = self._look(path)
        if here is None:
            return None
        kind, size = ("directory", 0) if stat.S_ISDIR(here.st_mode) else ("file", here.st_size)
        return FileVersion(kind, stat.S_IMODE(here.st_mode), size)

    def _version(self, entry: Entry | None, stamp: Stamp | None) -> FileVersion | None:
        try:
            return self.store.states.version(entry)
        except KeyError:
            assert entry is not None
            return FileVersion(entry.kind, entry.meta.mode, stamp[1] if stamp is not None else 0)

    def scanned(self, before: Before, after: After, changes: Sequence[Change]) -> ScannedFiles:
        """The call as a history records it; what was too much to be stored so far is stored now."""
        states: dict[str, Entry | None] = {
            path: state for path, state in after.found.known().items() if not is_reserved(path)
        }
        for path, _, now in after.differing:
            if not is_reserved(path) and now is not None and now.oid is not None and not self._has(now.oid):
                states[path] = now
                self.store.add_blob(self._read_again(path, now.oid))
        scanned = ScannedStates(states, before.prepared, _unknown(after.found))
        return ScannedFiles(self.store, before.commit, after, changes, scanned)

    def _has(self, oid: str) -> bool:
        return self.store.objects.has(bytes.fromhex(oid))

    def _read_again(self, path: str, oid: str) -> bytes:
        content = self._files.read_content(path)
        if blob_id(content) != oid:
            raise OSError(f"{path} was changed while the call was being recorded")
        return content

    # What is taken back.

    def keep(self, before: Before, after: After, taken: Iterable[str], *, tool: str, call_id: str) -> Aborted:
        """Keep what is about to be taken away at these paths, under a name. Never fails: what could not be is said."""
        taken = {path for path in taken if not is_reserved(path)}
        above = set(all_above(taken))
        notes: list[str] = []
        states: dict[str, Entry | None] = {}
        for path, _, now in after.differing:
            if path not in taken and path not in above:
                continue
            if now is None or now.oid is None or self._has(now.oid):
                states[path] = now
            else:
                notes.append(f"{path} was not kept, for want of space: git blob {now.oid}")
        excluded = after.found.excluded
        notes += [
            f"{path} was not kept ({excluded[path]}): {self._named(path)}"
            for path in sorted(excluded.keys() & taken)
            if excluded[path] != "hidden"
        ]
        if all(is_only_time(item) for item in after.differing if item.path in states):
            return Aborted(None, None, tuple(notes))
        if before.room < _NAMES_BYTES:
            return Aborted(None, None, (*notes, "the changes that were rolled back were not kept, for want of space"))
        commit = name = None
        with noting_failure(notes):
            info = CommitInfo("aborted", datetime.now(UTC), tool, call_id)
            prepared = self.store.prepare(states, info, after=before.prepared)
            commit, name = prepared.commit, keep_commit(self.store, prepared.commit)
        return Aborted(commit, name, tuple(notes))

    def kept_as(self, commit: str) -> Aborted:
        """What `keep` gave to a process that was killed."""
        return Aborted(commit, next((name for name, kept in self.store.kept().items() if kept == commit), None))

    def kept_states(self, before: Before, commit: str | None) -> dict[str, Entry]:
        """What a kept commit has of the paths that a call had changed."""
        if commit is None:
            return {}
        try:
            found = self.store.states.differences(before.commit, commit)
        except LookupError:
            return {}
        return {path: now for path, _, now in found if now is not None}

    def sync(self) -> None:
        """Have the tree survive a loss of power, where the log does."""
        if self._power:
            sync_filesystem(self._files.root)

    def _named(self, path: str) -> str:
        try:
            with self._files.parent(path) as (directory, name):
                descriptor, found = open_file(directory, name, path)
        except OSError:
            return "no file"
        try:
            if found.st_size > _HASHED_BYTES:
                return f"{found.st_size} bytes"
            return f"{found.st_size} bytes, sha256 {sha256_of(descriptor)}"
        finally:
            os.close(descriptor)


def _runs_as_owner(entry: Entry | None) -> TypeGuard[Entry]:
    return entry is not None and entry.kind == "file" and bool(entry.meta.mode & stat.S_ISUID)


class _Keeper:
    """Stores bytes as long as they are not too many and there is space; their object id in any case."""

    def __init__(self, store: Store, room: int) -> None:
        self._store = store
        self._most = min(KEPT_BYTES, room)
        self._bytes = 0

    def keep(self, content: bytes) -> str:
        self._bytes += len(content)
        if self._bytes <= self._most:
            with suppress(OSError):
                return self._store.add_blob(content)
        return blob_id(content)

    def flush(self) -> None:
        with suppress(OSError):
            self._store.objects.log.flush()


def _unknown(found: ScanResult) -> Unknown:
    return Unknown.of_scan({path: reason for path, reason in found.excluded.items() if not is_reserved(path)})
