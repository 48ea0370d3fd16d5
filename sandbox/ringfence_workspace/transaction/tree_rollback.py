"""The way back from an opaque call: undo records from two scans, which `Restore` goes back over.

All of it can be done again after it was cut off anywhere: what is as it was before is left alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ringfence.filesystem.paths import directories_above
from ringfence_workspace.history.entries import Difference, Entry, blob_id, is_directory
from ringfence_workspace.history.stat_cache import Stamp, stamp_of
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.transaction.hold import DirectoryTimes, HoldHandle
from ringfence_workspace.transaction.opaque_states import SEPARATE, After, ExcludedFile, ScanCommit
from ringfence_workspace.transaction.records import Epoch, UndoRecord
from ringfence_workspace.transaction.restore import Restore, RestoreReport
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.hidden_tree import HiddenTree
from ringfence_workspace.tree.kernel import Renames, failpoint, set_mode
from ringfence_workspace.tree.linked_worktrees import LINKED_WORKTREE
from ringfence_workspace.tree.new_files import Given, give, make
from ringfence_workspace.tree.state import State, kind_of

Judge = Callable[[Difference, os.stat_result | None], bool]
"""Whether a path that differs was changed by the call; what is there now is given too."""


class TreeRollback:
    """One way back, from the state `after` to the state `before`.

    ``items`` are to be brought back, by path. What somebody else changed is a conflict, and left alone.
    """

    def __init__(
        self,
        files: Confined,
        renames: Renames,
        hold: HoldHandle,
        states: CommitStates,
        before: ScanCommit,
        after: After,
        judge: Judge,
        hidden: HiddenTree | None,
        copied: Collection[str] = (),
    ) -> None:
        """``copied`` are the hidden paths that have a copy, from which they are restored afterwards."""
        self.items: dict[str, Difference] = {}
        self.before = before
        self._files = files
        self._hold = hold
        self._states = states
        self._after = after
        self._judge = judge
        self._hidden = hidden
        self._copied = copied
        self._times_ns: dict[str, int] = {}
        """Of directories that somebody else has changed, the time that stays."""
        self._names: dict[int, list[str]] = {}
        """By link number, all paths that are to be names of one file."""
        self._staying: set[str] = set()
        """Paths of what is hidden and new, of linked worktrees that have come there, and of what was there before, at
        another path, and no scan covered. There is no copy of it."""
        self._restore = Restore(
            files, renames, hold, DirectoryTimes(files), make=self._make, finish=self._finish, discard=True
        )
        self._report = self._restore.report
        self._held = hold.held.inodes(below=True) if hold.held is not None else {}
        self._choose()

    # -- what is to be brought back

    def _choose(self) -> None:
        self._staying = {path for path in self._after.found.excluded if self._stays(path)}
        above = {one for path in self._staying for one in directories_above(path)}
        for item in self._all():
            path, wanted, now = item
            here = self._files.look(path)
            if not self._staying.isdisjoint((path, *directories_above(path))) or self._was_left_out(path, here):
                continue
            if path in above and not is_directory(wanted):
                if wanted is not None:
                    self._report.conflicts.add(path)
                continue
            if self._judge(item, here) and self._is_as_seen(path, now, here):
                self.items[path] = item
            elif here is not None or wanted is not None:
                self._report.conflicts.add(path)

    def _stays(self, path: str) -> bool:
        """Whether something was there before, at another path, and no scan covered it; or is hidden and was not there,
        or is what was hidden at a path for which somebody has saved something else; or is a new linked worktree."""
        reason, here = self._after.found.excluded[path], self._files.look(path)
        left = self.before.excluded.get(path)
        if reason == LINKED_WORKTREE:
            return here is not None and (left is None or not left.is_at(here))
        if reason == "hidden" and left is None:
            return self._stays_hidden(path, here)
        if here is None or (left is not None and left.is_at(here)) or here.st_ino in self._held:
            return False
        return reason != "hidden" and self.before.was_excluded(here)

    def _stays_hidden(self, path: str, here: os.stat_result | None) -> bool:
        homes = [(at, left) for at, left in self.before.hidden.items() if here is not None and left.is_at(here)]
        if homes:
            return all(self._is_saved_anew(at, left) for at, left in homes)
        # Of a file that was there, or of one with a name that hides nothing, the call would keep what it is denied.
        return self._hidden is not None and self._hidden.hides_itself(path) and not self._was_covered(path, here)

    def _was_covered(self, path: str, here: os.stat_result | None) -> bool:
        """Whether the history has something at a path, or at another one that is a name of the same file."""
        if here is None or self.before.inode(path) is not None:
            return True
        there = (self._files.look(at) for at in self.before.paths_of({here.st_ino}))
        return any(found is not None and found.st_ino == here.st_ino for found in there)

    def _is_saved_anew(self, path: str, left: ExcludedFile) -> bool:
        here = self._files.look(path)
        return (
            path not in self._copied
            and here is not None
            and not left.is_at(here)
            and not self.before.paths_of({here.st_ino})
        )

    def _all(self) -> Iterator[Difference]:
        known = {item.path for item in self._after.differing}
        yield from self._after.differing
        for path in self._after.found.excluded:
            if path not in known and path not in self.before.excluded:
                yield Difference(path, None, None)
        for path, left in self.before.excluded.items():
            here = self._files.look(path)
            if path not in known and here is not None and not left.is_at(here):
                if left.reason == "hidden" and self._is_saved_anew(path, left):
                    continue  # as editors do: there is no other copy
                yield Difference(path, None, None)

    def _is_as_seen(self, path: str, now: Entry | None, here: os.stat_result | None) -> bool:
        """Whether what is at a path is still what the scan saw there, or has gone since."""
        if now is None and path not in self._after.found.excluded:
            return here is None
        if here is None:
            return True
        return stat.S_ISDIR(here.st_mode) if is_directory(now) else stamp_of(here) == self._after.stamps.get(path)

    def _was_left_out(self, path: str, here: os.stat_result | None) -> bool:
        """Whether it is, or is in, something that was there before and that no scan took in; or is just as it was."""
        left = self.before.excluded
        if path in left:
            return here is None or left[path].is_at(here)
        if path in self._after.found.excluded and here is not None and self._stamp_before(path) == stamp_of(here):
            return True
        for above in directories_above(path) if left else ():
            if above in left:
                there = self._files.look(above)
                return there is not None and left[above].is_at(there)
        return False

    def _stamp_before(self, path: str) -> Stamp | None:
        folder, _, name = path.rpartition("/")
        return self.before.stamps.get(path) or self.before.known.get(folder, {}).get(name)

    def spare_times(self, limit_ns: int, ctimes_ns: Mapping[str, int]) -> None:
        """Have directories that were changed after a moment keep the time of that: somebody else did. ``ctimes_ns`` are
        those of what was changed only now, to be looked at."""
        for path, _, now in self._after.differing:
            here = self._files.look(path)
            if now is None or here is None or not is_directory(now):
                continue
            # By both its times: a program may give a directory any time of its last change.
            if min(now.meta.mtime_ns, ctimes_ns.get(path, here.st_ctime_ns)) > limit_ns:
                self._times_ns[path] = now.meta.mtime_ns

    # -- going back

    def run(self) -> RestoreReport:
        """Bring back what was chosen. OSError: something could not be; it may be tried again."""
        numbers = {item.before.meta.link for item in self.items.values() if item.before is not None} - {0}
        self._names = self._states.linked(self.before.commit, numbers)
        self._restore.whole = {path for path in self.items if path in self._after.found.excluded}
        bodies = self._bodies()
        records = {path: self._record(item, bodies.get(path, 0)) for path, item in self.items.items()}
        for path in bodies.keys() & self.before.excluded.keys():
            there = records.get(path, UndoRecord(path, None, [None]))
            records[path] = UndoRecord(path, _state_of(self.before.excluded[path]), there.afters)
        for path in {above for one in records for above in ("", *directories_above(one))} - records.keys():
            found, wanted = self._files.look(path), self._states.entry(self.before.commit, path)
            if found is not None and stat.S_ISDIR(found.st_mode) and is_directory(wanted):
                records[path] = UndoRecord(path, State.of(found))
        report = self._restore.run([Epoch(records)])
        if report.errors:
            raise report.errors[0]
        for path in sorted(bodies.keys() & self.before.excluded.keys() - report.conflicts):
            self._note(f"{path} is back in its place")
        self._note_not_covered()
        return report

    def _record(self, item: Difference, inode: int) -> UndoRecord:
        path, wanted, now = item
        found = self._files.look(path)
        after = None if found is None else State.of(found)
        if wanted is None:
            return UndoRecord(path, None, [after])
        if after is not None and found is not None and wanted.kind == after.kind:
            alone = not wanted.meta.link and found.st_nlink == 1
            same = now is not None and now.oid == wanted.oid and (alone or found.st_ino == self.before.inode(path))
            if same or after.is_directory:
                inode = found.st_ino
        return UndoRecord(path, wanted.as_state(0 if found is None else found.st_size, inode), [after])

    def _bodies(self) -> dict[str, int]:
        """The inodes of before that are elsewhere now, by the path that they belong to: where the call has moved them,
        or among what typed calls have displaced since. Only those that have their bytes still."""
        at: dict[int, list[str]] = {}
        for path, item in self.items.items():
            stamp = self._after.stamps.get(path)
            if stamp is not None and not is_directory(item.after):
                at.setdefault(stamp[0], []).append(path)
        held, found = self._held, dict[str, int]()
        for path, (_, wanted, _) in self.items.items():
            inode = self.before.inode(path)
            if wanted is not None and inode is not None and self._is_elsewhere(path, wanted, inode, at):
                found[path] = inode
        for path, left in self.before.excluded.items():
            if self._comes_back(path, left, at):
                found[path] = left.inode
        self._restore.held = {inode: held[inode] for inode in held.keys() & {*found.values()}}
        for place in [place for places in self._restore.held.values() for place in places]:
            self._open_above(place)
        return found

    def _is_elsewhere(self, path: str, wanted: Entry, inode: int, at: Mapping[int, Sequence[str]]) -> bool:
        """Whether the file of before is at another path, or held, and has its bytes still."""
        places = at.get(inode, ())
        if is_directory(wanted) or path in places:
            return False
        moved = {(one.kind, one.oid) for place in places if (one := self.items[place].after) is not None}
        if moved:
            return moved == {(wanted.kind, wanted.oid)}
        # In a subvolume of btrfs another file may have this number.
        return inode in self._held and self._content(self._held[inode][0]) == wanted.oid

    def _comes_back(self, path: str, left: ExcludedFile, at: Mapping[int, Sequence[str]]) -> bool:
        """Whether a file that no scan covered is not at its path, and is held; a hidden one also if it was moved."""
        there, is_hidden = self._files.look(path), left.reason == "hidden"
        if left.reason in SEPARATE or (there is not None and left.is_at(there)):
            return False
        if is_hidden and there is not None and path not in self.items:  # saved anew
            return False
        places = [*self._held.get(left.inode, ())]
        if is_hidden:
            places += [place for place in at.get(left.inode, ()) if place != path]
        for place in places:
            here = self._files.look(place)
            # In the tree another file may have got its number; what is held is the very file.
            if here is not None and (left.fits(here) or (self._files.is_reserved(place) and left.is_at(here))):
                return True
        return False

    def _open_above(self, place: str) -> None:
        """Have what is in a held directory be taken out of it, if that could not be written."""
        directory = place.rpartition("/")[0]
        if os.geteuid() != 0 and "/" in directory:
            with self._files.parent(directory) as (at, name):
                mode = stat.S_IMODE(os.lstat(name, dir_fd=at).st_mode)
                if mode & stat.S_IRWXU != stat.S_IRWXU:
                    failpoint("chmod")
                    set_mode(at, name, mode | stat.S_IRWXU)

    def _content(self, place: str) -> str | None:
        """The git object id of what a file has, or a link; None for what is neither, or may not be read."""
        try:
            return blob_id(self._files.read_content(place))
        except OSError:
            return None

    # -- bodies

    def _make(self, path: str, in_place: Callable[[str], bool]) -> int | None:
        """The slot of a file or link that is made for a path; None where nobody has what it was."""
        if path in self.before.excluded:  # somebody has taken it from where it was held
            return None
        wanted = self.items[path].before
        assert wanted is not None, "it was there"
        assert wanted.oid is not None, "a file has an object id"
        holding = self._hold.make()
        for other in self._names.get(wanted.meta.link, ()):
            if other == path or other in self._report.conflicts or not in_place(other):
                continue
            here = self._files.look(other)
            if here is not None and not stat.S_ISDIR(here.st_mode):
                return holding.new_link(other)
        content = self._states.content(wanted.oid)
        slot, attributes = holding.new_slot(), self.before.attributes.get(path, {})
        self._note_given(path, make(holding.descriptor, str(slot), wanted.kind, content, wanted.meta, attributes))
        return slot

    # -- metadata

    def _finish(self, path: str) -> None:
        """Give what is at a path its owner, permission bits, time and extended attributes."""
        found = self._files.look(path)
        assert found is not None, "it is there"
        if path in self.before.excluded:
            return
        wanted = self.items[path].before if path in self.items else self._states.entry(self.before.commit, path)
        if wanted is None or wanted.kind != kind_of(found.st_mode):
            return
        if path in self._times_ns:
            wanted = wanted._replace(meta=wanted.meta._replace(mtime_ns=self._times_ns[path]))
        with self._files.parent(path) as (at, name):
            attributes = self.before.attributes.get(path, {}) if path in self.items else None
            self._note_given(path, give(at, name, wanted.meta, attributes))

    def _note_given(self, path: str, given: Given) -> None:
        if not given.owner:
            self._note(f"{path} has another owner than before, which only root can bring back")
        if not given.attributes:
            self._note(f"{path} has not all of its extended attributes, which only root can bring back")

    # -- what is said

    def _note(self, note: str) -> None:
        if note not in self._report.notes:
            self._report.notes.append(note)

    def _note_not_covered(self) -> None:
        """One line for each path that no scan covered and that is not as before."""
        for path, left in sorted(self.before.excluded.items()):
            here = self._files.look(path)
            is_told = path in self._copied or path in self._report.moved or path in self._report.displaced
            if not is_told and (here is None or not left.is_as_before(here)):
                self._note(f"{path} is not as before the call: it is not covered ({left.reason})")
        for path in sorted(self._staying):
            what = {"hidden": "hidden", LINKED_WORKTREE: "a linked worktree of git"}
            what = what.get(self._after.found.excluded[path], "not covered")
            self._note(f"{path} is {what}: it stays as it is, and no history has it")


def _state_of(left: ExcludedFile) -> State:
    return State(kind_of(left.mode), stat.S_IMODE(left.mode), 0, 0, left.mtime_ns, left.size, left.inode)
