"""Opaque calls, which change files unseen: the tree is looked through before and after, and what differs is the call's.

`Scans` keeps states: the one before, whole and with all bytes, and the one that a rollback is about to take away.
`tree_rollback` brings the tree from one to the other.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeGuard

from ringfence.filesystem.paths import directories_above
from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.commits import CommitInfo, PreparedStep
from ringfence_workspace.history.entries import Difference, Entry, Unknown, blob_id, is_directory
from ringfence_workspace.history.scan import Exclusion, Hides, ScanResult, Separates
from ringfence_workspace.history.stat_cache import Stamp, stamp_of
from ringfence_workspace.history.store import Store
from ringfence_workspace.history.trees import walk
from ringfence_workspace.transaction.aborted_calls import Aborted, noting_failure
from ringfence_workspace.transaction.changes import ScannedFiles
from ringfence_workspace.transaction.named_files import NamedFiles
from ringfence_workspace.transaction.opaque_states import (
    SEPARATE,
    After,
    ExcludedFile,
    ScanCommit,
    is_only_time,
)
from ringfence_workspace.transaction.step_history import StepHistory
from ringfence_workspace.transaction.step_states import all_above
from ringfence_workspace.tree.confined import Confined, open_file, sha256_of
from ringfence_workspace.tree.git_index import has_same_entries, is_index
from ringfence_workspace.tree.kernel import free_bytes, set_mode, sync_filesystem
from ringfence_workspace.tree.linked_worktrees import LINKED_WORKTREE, is_open_workspace

KEPT_BYTES = 1 << 30
"""Of one call's new files: beyond it only names and hashes are kept of what is taken back."""
_HASHED_BYTES = 1 << 30
_WITH_CONTENT: Collection[Exclusion] = frozenset[Exclusion]({"too large", "too many files", "too deep", "unreadable"})
"""Why scans leave something out that may have bytes which are nowhere else. (What is hidden is in no history.)"""
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

    def before(self, *, outermost: bool) -> ScanCommit:
        """Look at the tree and store all of it.

        Where the call is ``outermost``, what differs from the newest commit is somebody else's, and becomes a commit.

        Raises:
            OSError: the tree cannot be read, or the store not be written.
        """
        history, store = self.history, self.store
        history.detector.begin(outermost=outermost)
        found = history.take_in() if outermost else history.scan(store.tip)
        tip = store.tip
        assert tip is not None, "the first call of all takes in the tree"
        left = {path: self._excluded(path, reason, found.stamps.get(path)) for path, reason in found.excluded.items()}
        commit, prepared = (tip, None) if outermost else self._prepare(tip, found, left)
        history.stand_for(commit)
        room = free_bytes(store.folder) // 4
        return ScanCommit(commit, prepared, history.known(commit), found.stamps, left, history.attributes, room)

    def look(self, paths: tuple[str, ...] | None) -> bytes:
        """Take in what somebody else has changed, at these paths alone or everywhere. Return what no commit has of the
        tree, for `before_adopted`."""
        history, store = self.history, self.store
        if paths is None:
            history.detector.begin(outermost=True)
            history.look()
        else:
            found = self.after(self.before_adopted(b"", paths)).found.known()
            if found:
                store.publish(store.prepare(found, CommitInfo("external", datetime.now(UTC))))
        left: dict[str, ExcludedFile] = {}
        for path, (reason, _) in history.left_out.items():
            here = self._look(path)
            left[path] = self._excluded(path, reason, None if here is None else stamp_of(here))
        attributes = history.attributes
        if not (left or attributes):
            return b""
        return ScanCommit("", excluded=left, attributes=attributes).more()

    def before_adopted(self, more: bytes, paths: tuple[str, ...] | None) -> ScanCommit:
        """What the newest commit has, as the state before a call that somebody else ran. ``more`` is of its look."""
        tip = self.store.tip
        assert tip is not None, "an opened workspace has a baseline"
        before = ScanCommit(tip, None)
        if paths is None:
            before.known = self.history.known(tip)
        if more:
            before.with_more(more)
        before.adopted, before.paths, before.room = True, paths, free_bytes(self.store.folder) // 4
        return before

    def _prepare(
        self, tip: str, found: ScanResult, left: Mapping[str, ExcludedFile]
    ) -> tuple[str, PreparedStep | None]:
        """The commit that has the tree within a call, and the objects of it: it is not to be the newest one."""
        store = self.store
        known = {path: one for path, one in found.known().items() if not self._files.is_reserved(path)}
        states = {path: state for path, state in known.items() if state != store.states.entry(tip, path)}
        if not states:
            return tip, self._as_prepared(tip)
        info = CommitInfo("external", datetime.now(UTC), title="before an opaque call in a call")
        unknown = self._unknown({path: one.reason for path, one in left.items()})
        prepared = store.prepare(states, info, after=self._as_prepared(tip), unknown=unknown)
        return prepared.commit, prepared

    def _as_prepared(self, commit: str) -> PreparedStep:
        states = self.store.states
        parent = self.store.commit(commit).parent
        return PreparedStep(commit, parent, None, 0, states.root(commit), (), states.unknown(commit))

    def _excluded(self, path: str, reason: Exclusion, stamp: Stamp | None) -> ExcludedFile:
        here = self._look(path)
        mode = -1 if here is None or reason in SEPARATE else here.st_mode
        return ExcludedFile(reason, *(stamp[:3] if stamp is not None else (0, 0, 0)), mode)

    def recovered(self, commit: str, more: bytes) -> tuple[ScanCommit, After]:
        """What `before` gave to a process that was killed, and a look at the tree. LookupError where the store does not
        have it."""
        before = ScanCommit(commit, self._as_prepared(commit), self.history.known(commit)).with_more(more)
        return before, self.after(before)

    def after(self, before: ScanCommit) -> After:
        """Look at the tree again. What is new is stored, up to a bound and while there is space.

        What was hidden before the call still is, and what has come to be hidden since is not stored either. A file that
        was not hidden and that has been moved to a hidden path is no secret: the store has it.
        """
        self._keep_root_open(before.commit)
        keeper = _Keeper(self.store, before.room)
        hides, separates = self._hides_since(before), _separates_since(before)
        if before.paths is not None:
            files = NamedFiles(
                self._files,
                self.store.states,
                before.commit,
                keeper.keep,
                limits=self.history.limits,
                hides=hides,
            )
            found = files.look(before.paths)
            keeper.flush()
            return After(found, sorted(self._differing(before, found), key=lambda one: one.path))
        found = self.history.scan(before.commit, keeper.keep, hides=hides, separates=separates)
        keeper.flush()
        differing = self._without_outer_names(before, sorted(self._differing(before, found), key=lambda one: one.path))
        differing = [*differing, *self._of_other_attributes(before, found, {item.path for item in differing})]
        self.history.stand_for(before.commit, [*differing, *(Difference(path, None, None) for path in found.excluded)])
        return After(found, differing)

    def _hides_since(self, before: ScanCommit) -> Hides:
        """Whether something was hidden before a call, by its path or by its inode, or has come to be hidden since."""
        left, tree = before.hidden, self.history.hidden
        by_inode = {one.inode: one for one in left.values()}

        def hides(directory: int, name: str, path: str, found: os.stat_result) -> bool:
            known = by_inode.get(found.st_ino)
            was_hidden = path in left or (known is not None and known.is_at(found))
            is_hidden = tree is not None and tree.sees(directory, name, path, found, before.has_stored)
            return was_hidden or is_hidden

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

    def made_readable(self, before: ScanCommit, after: After) -> tuple[After, dict[str, int]]:
        """Look again, where a call took away the permission to; the ctimes of what permission was given to."""
        opened: dict[str, int] = {}
        while new := [
            path
            for path, reason in after.found.excluded.items()
            if reason == "unreadable" and path not in opened and not before.was_excluded(self._look(path))
        ]:
            for path in new:
                with self._files.parent(path) as (at, name):
                    here = os.lstat(name, dir_fd=at)
                    opened[path] = here.st_ctime_ns
                    with suppress(PermissionError):
                        set_mode(at, name, stat.S_IMODE(here.st_mode) | stat.S_IRWXU)
            after = self.after(before)
        return after, opened

    def disarmed(self, before: ScanCommit, after: After) -> After:
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

    def _differing(self, before: ScanCommit, found: ScanResult) -> Iterator[Difference]:
        states, commit = self.store.states, before.commit
        for path, now in found.changes.items():
            if path in before.excluded or self._went_before(
                before, path
            ):  # what the commit has of it is from before that
                if now is not None:
                    yield Difference(path, None, now)
                continue
            old = states.entry(commit, path)
            yield Difference(path, old, now)
            if is_directory(old) and not is_directory(now):
                folder = states.folder(commit, path)
                for name, entry in walk(folder, states.objects, path) if folder is not None else ():
                    if name != path and not self._went_before(before, name):
                        yield Difference(name, entry, None)

    def _of_other_attributes(self, before: ScanCommit, found: ScanResult, known: Set[str]) -> Iterator[Difference]:
        """What has other extended attributes, and else is as it was: no commit has them, and a rollback restores them.
        ``known`` are the paths that differ anyway."""
        were, are = before.attributes, self.history.attributes
        for path in sorted((were.keys() | are.keys()) - known - before.excluded.keys() - found.excluded.keys()):
            # What is in a directory that could not be read is not known.
            if were.get(path) != are.get(path) and found.excluded.keys().isdisjoint(directories_above(path)):
                entry = self.store.states.entry(before.commit, path)
                if entry is not None:
                    yield Difference(path, entry, entry)

    def _without_outer_names(self, before: ScanCommit, differing: Sequence[Difference]) -> Sequence[Difference]:
        """Without files that have only lost or got a name outside of the tree, or in the hold."""

        def link_of(old: Entry | None, now: Entry | None) -> int | None:
            """The number of a file's group of links before, where only that differs."""
            if old is None or now is None or old != now._replace(meta=now.meta._replace(link=old.meta.link)):
                return None
            return old.meta.link

        links = [link_of(old, now) for _, old, now in differing]
        names = self.store.states.linked(before.commit, {link for link in links if link})
        groups = Counter(now.meta.link for _, _, now in differing if now is not None)

        def is_alone(item: Difference, link: int | None) -> bool:
            if link is None or item.after is None:
                return False
            return len(names[link]) == 1 if link else groups[item.after.meta.link] == 1

        return [item for item, link in zip(differing, links, strict=True) if not is_alone(item, link)]

    def _went_before(self, before: ScanCommit, path: str) -> bool:
        """Whether what the commit has of a path had gone before the call: it was in a directory, in the place of which
        came something that no scan took in, and that in the call went, too."""
        for above in all_above([path]) if before.excluded else ():
            left = before.excluded.get(above)
            if left is not None:
                here = self._look(above)
                if here is None or not left.is_at(here):
                    return True
        return False

    def changes(self, before: ScanCommit, after: After) -> list[Change]:
        """What a call changed, by path: bytes, kinds, permission bits and link targets."""
        found: dict[str, Change] = {}
        for item in after.differing:
            path = item.path
            if path not in before.excluded and item.changes_content:
                now = self._version(item.after, after.stamps.get(path))
                found[path] = Change(path, self._version(item.before, None), now)
        for path in after.found.excluded.keys() - before.excluded.keys():
            was = found[path].before if path in found else None
            found[path] = Change(path, was, self._unread(path))
        found |= {change.path: change for change in self._changes_not_covered(before, after)}
        return [found[path] for path in sorted(found) if not self._files.is_reserved(path)]

    def _changes_not_covered(self, before: ScanCommit, after: After) -> Iterator[Change]:
        """The changes of what was there before and no scan covered."""
        read = {path: now for path, _, now in after.differing if path in before.excluded and now is not None}
        for path, left in before.excluded.items():
            here = self._look(path)
            if here is not None and left.reason == LINKED_WORKTREE and left.is_at(here):
                continue  # what is changed in it is no change of this workspace
            if here is None or not left.is_as_before(here):
                kind = "directory" if left.reason in SEPARATE else "file"
                was = FileVersion(kind, stat.S_IMODE(max(left.mode, 0)), left.size)
                now = self._version(read[path], after.stamps.get(path)) if path in read else self._unread(path)
                yield Change(path, was, now)

    def refreshed_indexes(self, before: ScanCommit, after: After) -> Set[str]:
        """The indexes of git in which a call changed nothing but the stat data of files, and caches.

        `git status` does that, and `git describe --dirty`."""
        found: set[str] = set()
        for path, was, now in after.differing:
            if not is_index(path) or was is None or now is None or was.oid is None or now.oid is None:
                continue
            if (was.kind, was.meta.mode) == (now.kind, now.meta.mode) == ("file", was.meta.mode):
                with suppress(LookupError, OSError):
                    stored = self.store.states.content
                    content = stored(now.oid) if self._has(now.oid) else self._read_again(path, now.oid)
                    if has_same_entries(stored(was.oid), content):
                        found.add(path)
        return found

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

    def scanned(self, before: ScanCommit, after: After, changes: Sequence[Change]) -> ScannedFiles:
        """The call as a history records it; what was too much to be stored so far is stored now."""
        states: dict[str, Entry | None] = {
            path: state for path, state in after.found.known().items() if not self._files.is_reserved(path)
        }
        for path, _, now in after.differing:
            if not self._files.is_reserved(path) and now is not None and now.oid is not None and not self._has(now.oid):
                states[path] = now
                self.store.add_blob(self._read_again(path, now.oid))
        left = {path: now for path, _, now in after.differing}

        def content_after(path: str) -> bytes:
            entry = left.get(path)
            if entry is None or entry.oid is None:
                raise FileNotFoundError(path)
            return self.store.states.content(entry.oid)

        content_before = partial(self.store.states.read, before.commit)
        unknown = self._unknown(after.found.excluded)
        return ScannedFiles(changes, states, before.prepared, unknown, content_before, content_after)

    def _has(self, oid: str) -> bool:
        return self.store.objects.has(bytes.fromhex(oid))

    def _read_again(self, path: str, oid: str) -> bytes:
        content = self._files.read_content(path)
        if blob_id(content) != oid:
            raise OSError(f"{path} was changed while the call was being recorded")
        return content

    # What is taken back.

    def keep(self, before: ScanCommit, after: After, taken: Iterable[str], *, tool: str, call_id: str) -> Aborted:
        """Keep what is about to be taken away at these paths, under a name. Never fails: what could not be is said."""
        taken = {path for path in taken if not self._files.is_reserved(path)}
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
        if all(item.before == item.after or is_only_time(item) for item in after.differing if item.path in states):
            return Aborted(None, None, tuple(notes))
        if before.room < _NAMES_BYTES:
            return Aborted(None, None, (*notes, "the changes that were rolled back were not kept, for want of space"))
        kept = Aborted(None, None)
        with noting_failure(notes):
            info = CommitInfo("aborted", datetime.now(UTC), tool, call_id, opaque=True)
            kept = self.history.keeper.keep(states, info, after=before.prepared)
        return replace(kept, notes=tuple(notes))

    def unkept(self, before: ScanCommit, after: After, taken: Collection[str]) -> list[str]:
        """The files among these paths that `keep` could not keep: there is no room, or no scan covers them."""
        lost = [
            path for path in sorted(after.found.excluded.keys() & taken) if after.found.excluded[path] in _WITH_CONTENT
        ]
        has_room = before.room >= _NAMES_BYTES
        for path, _, now in after.differing:
            oid = None if now is None else now.oid
            if path in taken and oid is not None and not (has_room and self._has(oid)):
                lost.append(path)
        return lost

    def kept_states(self, before: ScanCommit, commit: str | None) -> dict[str, Entry]:
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

    def _unknown(self, reasons: Mapping[str, Exclusion]) -> Unknown:
        return Unknown.of_scan({path: reason for path, reason in reasons.items() if not self._files.is_reserved(path)})

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


def _separates_since(before: ScanCommit) -> Separates:
    """Whether a directory was a linked worktree before a call, or has come to be one that somebody has open. Any other
    new one is the call's work: policies see what is in it, and a rollback removes it."""
    left = {path: one for path, one in before.excluded.items() if one.reason == LINKED_WORKTREE}
    inodes = {one.inode for one in left.values()}

    def separates(directory: int, path: str, status: os.stat_result, is_linked: bool) -> bool:
        if path in left and left[path].is_at(status):
            return True
        return is_linked and (status.st_ino in inodes or is_open_workspace(directory))

    return separates


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
