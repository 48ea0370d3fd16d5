"""Bringing the tree from one state of the history to another: undo records, computed from commits, and `Restore`."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from ringfence_workspace.history.entries import Entry, blob_id, is_directory
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.transaction.edits import Edits
from ringfence_workspace.transaction.read_set import stale
from ringfence_workspace.transaction.records import Epoch, UndoRecord
from ringfence_workspace.tree.confined import read_file
from ringfence_workspace.tree.new_files import attributes_to_copy, give, make
from ringfence_workspace.tree.state import State, kind_of


class TreeWriter:
    """Writes kinds, bytes, permission bits, times, owners where that is permitted, and which files are one file.

    ``notes`` has in words what was not brought back.
    """

    def __init__(self, edits: Edits, states: CommitStates, now: str, contents: Mapping[str, bytes]) -> None:
        """``now`` is the commit that has the tree as it is; ``contents`` has bytes by object id besides the store's."""
        self.notes: list[str] = []
        self._edits = edits
        self._transactions = edits.transactions
        self._files = edits.transactions.files
        self._states = states
        self._now = now
        self._contents = contents
        self._wanted: Mapping[str, Entry | None] = {}
        self._names: dict[int, list[str]] = {}
        """By link number, all paths that are to be names of one file."""
        self._numbers: dict[str, int] = {}
        """Of these paths the numbers."""

    def write(
        self,
        wanted: Mapping[str, Entry | None],
        before: Iterable[str] = (),
        *,
        whole: str | None = None,
        linked: Mapping[int, Sequence[str]] | None = None,
    ) -> Set[str]:
        """Make these paths so; those that are kept, since they hold what no history has.

        ``before`` are the commits that have the wanted states: there it says which paths are names of one file.
        ``linked`` says the same by link number, of states that come from elsewhere. ``whole`` is the commit that all
        of the tree is to be as, where there is one.

        Raises:
            OSError (ESTALE): somebody has changed a path since the history looked at it.
        """
        before = [*before]
        self._wanted = wanted
        self._names = {number: [*paths] for number, paths in (linked or {}).items()}
        self._find_names(before)
        directories = self._above(wanted, whole) if whole is not None else self._as_before(wanted, before)
        epoch = Epoch()
        for path, entry in {**directories, **wanted}.items():
            now = self._states.entry(self._now, path)
            found = self._check(path, now) if path in wanted else self._files.look(path)
            epoch.records[path] = self._record(path, entry, now, found)
            if path not in wanted:
                epoch.records[path].afters.clear()
        self._open_up(epoch)
        report = self._transactions.make(epoch, self._make)
        kept = {path for path in report.conflicts if self._holds_more(path)}
        for path in sorted(report.conflicts - kept):
            raise stale(path)
        self.notes += report.notes
        for path, entry in sorted(wanted.items()):
            if entry is not None and entry.kind == "directory" and path not in kept:
                self._give_owner(path, entry)
        return kept

    # -- the records

    def _record(self, path: str, entry: Entry | None, now: Entry | None, found: os.stat_result | None) -> UndoRecord:
        after = None if found is None else State.of(found)
        if entry is None:
            return UndoRecord(path, None, [after])
        inode = 0  # of another file, which is made
        if found is not None and now is not None and now.kind == entry.kind:
            only_mode = entry == now._replace(meta=now.meta._replace(mode=entry.meta.mode))
            if entry.kind == "directory" or (only_mode and found.st_nlink == 1):
                inode = found.st_ino
        return UndoRecord(path, entry.as_state(0 if found is None else found.st_size, inode), [after])

    def _open_up(self, epoch: Epoch) -> None:
        """Have directories that cannot be written be so for the moment."""
        for path in {path.rpartition("/")[0] for path in self._wanted} - epoch.records.keys():
            found = self._files.look(path)
            if found is not None and stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                epoch.records[path] = UndoRecord(path, State.of(found))

    def _check(self, path: str, entry: Entry | None) -> os.stat_result | None:
        """What is at a path. Raises OSError (ESTALE) where that is not what the history has of it; what somebody
        changes there after this is not written over, or removed, either."""
        found = self._files.look(path)
        if entry is None or found is None:
            if entry is not None or found is not None:
                raise stale(path)
            return None
        if kind_of(found.st_mode) != entry.kind:
            raise stale(path)
        if entry.kind == "directory":
            return found
        with self._files.parent(path) as (at, name):
            try:
                if entry.kind == "symlink":
                    content = os.fsencode(os.readlink(name, dir_fd=at))
                else:
                    content, found = read_file(at, name, path)
            except OSError:
                raise stale(path) from None
        if blob_id(content) != entry.oid:
            raise stale(path)
        return found

    def _above(self, paths: Iterable[str], commit: str) -> dict[str, Entry]:
        """The directories that paths are in, at a commit."""
        found: dict[str, Entry] = {}
        for path in paths:
            above = path.rpartition("/")[0]
            state = self._states.entry(commit, above) if above not in found else None
            if state is not None and state.kind == "directory":
                found[above] = state
        return found

    def _as_before(self, wanted: Mapping[str, Entry | None], before: Sequence[str]) -> dict[str, Entry]:
        """The directories that paths are in and that have the time of before, though paths in them differ."""
        was = self._above(wanted, before[-1]) if before else {}
        now = self._above(wanted, self._now)
        return {path: entry for path, entry in now.items() if path not in wanted and was.get(path) == entry}

    def _find_names(self, before: Iterable[str]) -> None:
        numbers = {state.meta.link for state in self._wanted.values() if state is not None and state.meta.link}
        for commit in before if numbers else ():
            for number, paths in self._states.linked(commit, numbers).items():
                self._names[number] = sorted({*self._names.get(number, ()), *paths})
                self._numbers |= dict.fromkeys(paths, number)

    def _holds_more(self, path: str) -> bool:
        """Whether a directory stays because of what is in it."""
        found = self._files.look(path)
        return found is not None and stat.S_ISDIR(found.st_mode) and bool(self._files.names(path))

    # -- bodies

    def _make(self, path: str, in_place: Callable[[str], bool]) -> int:
        """Make the file or symlink that a path is to have; its slot. ``in_place`` says of another path whether it is as
        wanted already."""
        entry = self._wanted[path]
        assert entry is not None, "it is to be there"
        assert entry.oid is not None, "a file has an object id"
        other = self._other_name(path, entry, in_place)
        holding = self._transactions.undo.holding
        if other is not None:
            return holding.new_link(other)
        content, meta, attributes = self._content(entry.oid), entry.meta, None
        if entry.oid in self._contents:  # merged just now, so its time is now, too
            meta = meta._replace(mtime_ns=time.time_ns())
        found = self._files.look(path)
        if found is not None and stat.S_ISREG(found.st_mode):
            with self._files.parent(path) as (at, name):
                attributes = attributes_to_copy(at, name)
        slot, power = holding.new_slot(), self._transactions.power
        given = make(holding.descriptor, str(slot), entry.kind, content, meta, attributes, sync=power)
        if not given.owner:
            self._note_owner(path, entry)
        if entry.kind == "file" and (there := holding.look(slot)) is not None:
            self._transactions.undo.written.note(State.of(there, hashlib.sha256(content).hexdigest()), content)
        return slot

    def _other_name(self, path: str, entry: Entry, in_place: Callable[[str], bool]) -> str | None:
        """Another name of what is to be one file with this path. It has no number where a step had given the others
        another file before it changed itself."""
        number = entry.meta.link or self._numbers.get(path, 0)
        for other in self._names.get(number, ()):
            if other == path:
                continue
            there = self._wanted.get(other, self._states.entry(self._now, other))
            if there is not None and in_place(other) and _alike(there, entry):
                return other
        return None

    def _content(self, oid: str) -> bytes:
        known = self._contents.get(oid)
        return known if known is not None else self._states.content(oid)

    def _give_owner(self, path: str, entry: Entry) -> None:
        """Give a directory its owner, if it was made just now: of another one, a rollback would not take that back."""
        found = self._files.look(path)
        if found is None or (found.st_uid, found.st_gid) == (entry.meta.uid, entry.meta.gid):
            return
        made = not is_directory(self._states.entry(self._now, path))
        with self._files.parent(path) as (at, name):
            if not made or not give(at, name, entry.meta).owner:
                self._note_owner(path, entry)

    def _note_owner(self, path: str, entry: Entry) -> None:
        meta = entry.meta
        self.notes.append(f"{path or 'the root'} is not given back to user {meta.uid} and group {meta.gid}")


def _alike(one: Entry, other: Entry) -> bool:
    """Whether two paths can be names of one file."""
    return one == other._replace(meta=other.meta._replace(link=one.meta.link))
