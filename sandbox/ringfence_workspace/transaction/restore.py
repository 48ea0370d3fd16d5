"""Restore: make every path of an undo log what it was before.

Rollback, failed operations, recovery after a crash, snapshots, and undo and restore of steps use it alike:

1. Compare. A path that is as before is left alone. One that the call has put there is restored. Anything else is
   somebody else's: it stays, and is a conflict.
2. Remove what is in the way, what is in a directory before the directory. A file is moved to the hold, not unlinked, so
   a full disk does not matter (``discard`` is the exception). An empty directory is removed.
3. Put back the very file of before, by one rename, or by one exchange with what the call has put in its place. It is
   found by its inode, in the hold or where the call has moved it.
4. Give files their permission bits, then directories their bits and times, from the bottom.

The *hold* is a directory in the root with numbered *slots*. A call makes a new file in a slot, and by one exchange that
file gets its path, and what was there the slot: it is *displaced*. So a call that writes ``a`` goes through these
states, and from each of them there is a way back:

    a: old, slot 0: nothing      no record yet
    a: old, slot 0: new          the record says: before old, after new
    a: new, slot 0: old          old is displaced

Each step is idempotent: it looks first, and what is done already is as before. So a restore that was killed is done
again.

An epoch is a run of changes and, at its end, at most one rename of a directory: from then on the same paths mean other
files. The newest epoch is undone first, and in each the rename before the changes. If the rename that ended the epoch
before is undone already, so is this epoch, by an earlier restore that was killed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeGuard

from ringfence.filesystem.paths import directories_above
from ringfence_workspace.transaction.hold import ChangedDirectory, DirectoryTimes, HoldDirectory, HoldHandle
from ringfence_workspace.transaction.records import DirectoryMove, Epoch, UndoRecord, is_below, rebased
from ringfence_workspace.tree.confined import UNREACHABLE, Confined, PathLooks, read_file
from ringfence_workspace.tree.kernel import Renames, failpoint, lstat, set_mode
from ringfence_workspace.tree.new_files import make_directory
from ringfence_workspace.tree.state import Json, State, is_unchanged, kind_of

logger = logging.getLogger(__name__)

NOT_ROLLED_BACK = (
    "the workspace's filesystem is full, so what a call replaced cannot be brought back: make room, and open the "
    "workspace again, which completes it"
)
_HASHED_BYTES = 1 << 20
"""In the process, what is larger is known by its size and time alone: a rollback must not cost what a file weighs."""
_IN_THE_WAY = UNREACHABLE | {errno.EEXIST, errno.ENOTEMPTY, errno.EXDEV, errno.EBUSY, errno.EPERM}
"""Errors of the system that mean: somebody else has put something at the path, or above it, or it is a file that nobody
may replace, such as one that may only be added to (``chattr +a``)."""

FromHistory = Callable[[str, State, HoldDirectory], int | None]
"""Makes the file that a path had as the history has it, in a slot of the hold; None where it has another, or none."""
Make = Callable[[str, Callable[[str], bool]], int | None]
"""Makes the file that a path is to have, and returns its slot in the hold; None: it cannot be made. The second argument
says of another path whether it is as before already."""


class ChangeLog(Protocol):
    """The undo log of a restore that is a change of a call itself, and can be rolled back."""

    def touch(self, path: str, found: os.stat_result | None, after: State | None, slot: int | None = None) -> None:
        """A path is about to change from what was found there."""
        ...

    def touch_directory(self, old: str, new: str, found: os.stat_result) -> object:
        """A directory is about to be renamed. FileExistsError: it has to stay."""
        ...

    def displaced(self, path: str, found: os.stat_result, place: str) -> None:
        """What was at a path has come to a place among the displaced files."""
        ...


@dataclass(slots=True)
class RestoreReport:
    """``conflicts`` are paths that somebody else has changed; they were left alone."""

    conflicts: set[str] = field(default_factory=set[str])
    displaced: dict[str, str] = field(default_factory=dict[str, str])
    """Of the conflicts, where what was at the path before is held."""
    moved: dict[str, str] = field(default_factory=dict[str, str])
    """Of the conflicts, where what the call had moved from there still is."""
    notes: list[str] = field(default_factory=list[str])
    lost: set[str] = field(default_factory=set[str])
    """Paths whose file of before was not found where it has to be."""
    errors: list[OSError] = field(default_factory=list[OSError])
    """Why something could not be put right now; it may be tried again."""
    put_back: bool = False
    """Whether anything was put back: it may be another inode than before."""

    def to_json(self, epochs: int) -> dict[str, Json]:
        """For the log: how many epochs are left, and what must not be lost of the others."""
        displaced, moved = self.displaced, self.moved
        return {"restored": epochs, "conflicts": [*self.conflicts], "displaced": {**displaced}, "moved": {**moved}}


class Restore:
    """One restore over epochs of an undo log."""

    def __init__(
        self,
        files: Confined,
        renames: Renames,
        hold: HoldHandle,
        times: DirectoryTimes,
        *,
        thorough: bool = False,
        log: ChangeLog | None = None,
        make: Make | None = None,
        from_history: FromHistory | None = None,
        finish: Callable[[str], None] | None = None,
        discard: bool = False,
    ) -> None:
        """``thorough`` compares content of any size before it is taken for the call's own. ``make`` makes a file that
        is nowhere, and so does ``from_history``, after the hold was removed. ``finish`` gives what is at a path all its
        metadata. ``discard`` unlinks what the call has made, for the room, instead of holding it; the caller then sets
        ``held`` before `run`."""
        self.report = RestoreReport()
        self.files = files
        self.renames = renames
        self.hold = hold
        self.times = times
        self.thorough = thorough
        self.log = log
        self.make = make
        self.from_history = from_history
        self.finish = finish
        self.discard = discard
        self.whole: set[str] = set()
        """Directories that go with all that is in them."""
        self.known: dict[int, list[State]] = {}
        """By inode, the states that the log has of files."""
        self.before: set[int] = set()
        """The inodes of files of before."""
        self.held: dict[int, list[str]] = {}
        """By inode, the places of what is displaced."""

    def run(self, epochs: Sequence[Epoch], *, on_undone: Callable[[int], None] = lambda _: None) -> RestoreReport:
        """Undo the epochs, the newest first; ``on_undone`` gets how many are left."""
        if self.hold.held is not None and not self.discard:
            self.held = self.hold.held.inodes(below=self.log is not None)
        records = [record for epoch in epochs for record in epoch.records.values()]
        self.before = {record.before.inode for record in records if record.before is not None}
        for state in [state for record in records for state in (record.before, *record.afters)]:
            if state is not None:
                self.known.setdefault(state.inode, []).append(state)
        for number in reversed(range(len(epochs))):
            epoch = epochs[number]
            if epoch.move is not None:
                self.attempt(lambda epoch=epoch, move=epoch.move: self._move_back(epoch, move))
            if self.report.errors:  # under the old names there is nothing yet
                break
            previous = epochs[number - 1].move if number else None
            # On a full disk the log lacks the note of `on_undone`. Then it is known by the move before.
            is_undone = previous is not None and self.is_at(previous.old, previous.inode)
            if not is_undone:
                _EpochRestore(self, epoch).run()
            if self.report.errors:
                break
            on_undone(number)
        moved = self.report.moved.items()
        self.report.notes += [f"what was moved from {path} is still at {place}" for path, place in moved]
        return self.report

    def attempt(self, work: Callable[[], None], path: str | None = None, inode: int | None = None) -> bool:
        """Do something, and return whether it was done. An error is a conflict, or goes to the report."""
        try:
            work()
        except OSError as error:
            if error.errno in _IN_THE_WAY and path is not None:
                self.conflict(path, inode)
                if error.errno == errno.EPERM:
                    note = f"{path} may not be replaced or removed ({error.strerror}): see `lsattr`"
                    self.report.notes.append(note)
            elif error.errno in _IN_THE_WAY:
                pass
            else:
                self.report.errors.append(error)
            return False
        return True

    def conflict(self, path: str, inode: int | None = None) -> None:
        """Somebody else's is at a path; what was there before, with that inode, is kept if it is held."""
        self.report.conflicts.add(path)
        if inode is not None and self.held.get(inode):
            self.report.displaced[path] = self.held[inode][-1]

    def lose(self, path: str) -> None:
        self.report.lost.add(path)
        words = "before is lost: it was removed from where displaced files wait"
        self.report.notes.append(f"what was at {path} {words}")

    def opened(self, place: str) -> AbstractContextManager[tuple[int, str]]:
        """The directory of a displaced file, open, and the name there."""
        above, _, name = place.rpartition("/")
        holding = self.hold.held
        if holding is not None and above == holding.name:
            return nullcontext((holding.descriptor, name))
        return ChangedDirectory(self.times, place)

    def is_at(self, path: str, inode: int) -> bool:
        found = self.files.look(path)
        return found is not None and found.st_ino == inode

    def _move_back(self, epoch: Epoch, move: DirectoryMove) -> None:
        if self.is_at(move.old, move.inode):
            return
        held = self.hold.held is not None and move.new.startswith(f"{self.hold.held.name}/")
        if not self.is_at(move.new, move.inode):
            made = epoch.records.get(move.old)
            if made is not None and made.before is None:  # by the call: it was moved back and removed already
                return
            self.conflict(move.old)
            if held:
                self.lose(move.old)
            return
        try:
            if self.files.look(move.old) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), move.old)
            self.move(move.new, move.old)
            for path, place in self.report.moved.items():
                if is_below(place, move.new):
                    self.report.moved[path] = rebased(place, move.new, move.old)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            self.conflict(move.old, move.inode)
            if not held:
                self.report.moved[move.old] = move.new

    def move(self, source: str, target: str) -> None:
        found = self.files.look(source) if self.log is not None else None
        if self.log is not None and found is not None:
            self.log.touch_directory(source, target, found)
        self.rename(source, target)

    def rename(self, source: str, target: str) -> None:
        with (
            ChangedDirectory(self.times, source) as (at, name),
            ChangedDirectory(self.times, target) as (to, new),
        ):
            self.renames.rename(at, name, to, new)


class _EpochRestore:
    """The records of one epoch, under the names of its time."""

    def __init__(self, restore: Restore, epoch: Epoch) -> None:
        self._restore = restore
        self.report = restore.report
        self._files = restore.files
        self._looks = PathLooks(restore.files)
        self._renames = restore.renames
        self._times = restore.times
        self._held = restore.held
        self._records: Mapping[str, UndoRecord] = epoch.records
        self._to_restore: dict[str, os.stat_result | None] = {}
        """The paths that are not as before, with what is there now: the call's, or nothing."""
        self._own_paths: dict[int, list[str]] = {}
        """By inode, the paths where the call has put something that is to be removed."""
        self._placed: set[str] = set()
        """What has its own file again."""
        self._modes: dict[str, int] = {}
        """The permission bits that directories get in the end."""

    def run(self) -> None:
        with closing(self._looks):
            self._open_directories()
            self._compare()
        self._let_moved_stay()
        for path in sorted(self._to_restore, reverse=True):
            if self._is_removed(path):
                self._do(path, self._remove)
        for path in sorted(self._to_restore):
            if path not in self.report.conflicts and self._records[path].before is not None:
                self._do(path, self._put_back)
        with closing(self._looks):
            for path in sorted(self._records, reverse=True):
                if path not in self.report.conflicts:
                    self._do(path, self._finish)

    def _do(self, path: str, work: Callable[[str], None]) -> None:
        before = self._records[path].before
        if self._restore.discard:
            work = partial(self._with_room, work=work)
        self._restore.attempt(partial(work, path), path, None if before is None else before.inode)

    def _with_room(self, path: str, work: Callable[[str], None]) -> None:
        """Do something, and where the disk is too full for it, again without the files that the call has made, which is
        all that there is to give up."""
        try:
            work(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            for one, found in self._to_restore.items():
                if found is None or stat.S_ISDIR(found.st_mode) or found.st_ino in self._restore.before:
                    continue
                if one not in self._placed and one not in self.report.conflicts:
                    self._restore.attempt(lambda one=one, found=found: self._discard(one, found), one)
                    self._to_restore[one] = None
            work(path)

    def _touch(self, path: str, found: os.stat_result | None, after: State | None, slot: int | None = None) -> None:
        if self._restore.log is not None:
            self._restore.log.touch(path, found, after, slot)

    # -- 1. compare

    def _open_directories(self) -> None:
        """Have the directories of the epoch be writable while it is undone. Bits that somebody else has set stay."""
        for path, record in sorted(self._records.items()):
            states = [one for one in (record.before, *record.afters) if one is not None and one.is_directory]
            found = self._looks.look(path) if states else None
            if found is None or all(one.inode != found.st_ino for one in states):
                continue
            mode, before = stat.S_IMODE(found.st_mode), record.before
            if before is not None and before.inode == found.st_ino:
                own = {one.mode for one in states}
                own |= {one | stat.S_IRWXU for one in own}  # as a restore that was killed has opened them
                self._modes[path] = before.mode if mode in own else mode
            if mode & stat.S_IRWXU != stat.S_IRWXU and os.geteuid() != 0:
                with self._files.parent(path) as (at, name), suppress(PermissionError):
                    failpoint("chmod")
                    set_mode(at, name, mode | stat.S_IRWXU)

    def _compare(self) -> None:
        for path, record in self._records.items():
            found = self._looks.look(path)
            if self._is_before(record.before, found):
                self._return_foreign(path, record, found)
            elif not record.afters:  # a directory in which the call did something, and that somebody has removed
                continue
            elif self._is_own(path, record, found):
                if self._return_foreign(path, record, found):
                    continue
                self._to_restore[path] = found
                if found is not None and not stat.S_ISDIR(found.st_mode):
                    self._own_paths.setdefault(found.st_ino, []).append(path)
            elif not self._is_not_made_yet(record):
                self._restore.conflict(path, None if record.before is None else record.before.inode)

    def _is_before(self, before: State | None, found: os.stat_result | None) -> bool:
        """Whether a path has what it had; its permission bits come later, and the content of a file that is its own
        inode is not looked at: no call writes into one."""
        if before is None or found is None:
            return before is None and found is None
        return before.inode == found.st_ino and before.kind == kind_of(found.st_mode)

    def _is_own(self, path: str, record: UndoRecord, found: os.stat_result | None) -> bool:
        """Whether the call has put there what is there."""
        if found is None:
            # An exchange may have been cut off, in several renames: then what the call has made is still held.
            last = record.afters[-1]
            return None in record.afters or (last is not None and self._is_away(last.inode))
        return any(one is not None and self._is_state(path, one, found) for one in record.afters)

    def _is_away(self, inode: int) -> bool:
        """Whether a file that the call had given a path is displaced, or back where the call had moved it from."""
        if self._held.get(inode):
            return True
        sources = (path for path, one in self._records.items() if one.before is not None and one.before.inode == inode)
        return any(self._restore.is_at(path, inode) for path in sources)

    def _is_state(self, path: str, state: State, found: os.stat_result) -> bool:
        if state.is_directory:
            return stat.S_ISDIR(found.st_mode) and state.inode in (0, found.st_ino)
        if state.fits(found):
            return self._has_content(path, state, found)
        return stat.S_ISREG(found.st_mode) and state.same_content(lambda: self._sha256(path, found))

    def _has_content(self, path: str, state: State, found: os.stat_result) -> bool:
        if state.sha256 is None or not (self._restore.thorough or state.size <= _HASHED_BYTES):
            return True
        sha256 = self._sha256(path, found)
        return sha256 is None or sha256 == state.sha256  # None: the bits of the file that it replaced shut it

    def _sha256(self, path: str, found: os.stat_result) -> str | None:
        try:
            return hashlib.sha256(read_file(*self._looks.parent(path), path, found)[0]).hexdigest()
        except OSError:
            return None

    def _return_foreign(self, path: str, record: UndoRecord, found: os.stat_result | None) -> bool:
        """Put a file of somebody else back that the call has displaced, and return whether there was one.

        They had saved the path in the instant of the change, or written into a file that the call had made."""
        holding, before = self._restore.hold.held, record.before
        for slot in record.slots if holding is not None else ():
            assert holding is not None
            there = holding.look(slot)
            if there is None or not stat.S_ISREG(there.st_mode):
                continue
            if any(one.fits(there) for one in self._restore.known.get(there.st_ino, ())):
                continue
            if there.st_ino in self._restore.before:  # a program had it open: it goes back to its own path
                continue
            with ChangedDirectory(self._times, path) as (at, name):
                if found is None:
                    with suppress(FileExistsError):
                        self._renames.rename(holding.descriptor, str(slot), at, name)
                else:
                    self._renames.exchange(at, name, holding.descriptor, str(slot))
                    self._held.setdefault(found.st_ino, []).append(holding.place(slot))
            self._restore.conflict(path, None if before is None else before.inode)
            return True
        return False

    def _is_not_made_yet(self, record: UndoRecord) -> bool:
        """Whether a kill came between a record and its change: then the call's file is still in the hold, and that of
        before is not. The path was never the call's, so nothing there is a conflict."""
        before, last = record.before, record.afters[-1]
        new_is_held = last is not None and bool(self._held.get(last.inode))
        return new_is_held and not (before is not None and self._held.get(before.inode))

    def _let_moved_stay(self) -> None:
        """What the call has moved from a path that somebody else has taken, or a directory above, stays where it is."""
        for path, record in self._records.items() if self.report.conflicts else ():
            if record.before is None or self.report.conflicts.isdisjoint((path, *directories_above(path))):
                continue
            for place in self._own_paths.get(record.before.inode, ()):
                if self._records[place].before is None and self._to_restore.pop(place, None) is not None:
                    self._restore.conflict(path)
                    self.report.displaced.pop(path, None)
                    self.report.moved[path] = place

    # -- 2. remove

    def _is_removed(self, path: str) -> bool:
        found, before = self._to_restore.get(path), self._records[path].before
        return found is not None and (before is None or before.is_directory or stat.S_ISDIR(found.st_mode))

    def _remove(self, path: str) -> None:
        found = self._to_restore[path]
        if found is None:  # it has gone already, for the room
            return
        if not stat.S_ISDIR(found.st_mode):
            self._displace(path, found)
        elif path in self._restore.whole:
            holding = self._restore.hold.make()
            place = holding.place(holding.new_slot())
            self._restore.rename(path, place)
            self._has_displaced(path, found, place)
        elif self._restore.log is not None:
            if self._files.names(path):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            holding = self._restore.hold.make()
            place = holding.place(holding.new_slot())
            self._restore.move(path, place)
            if not self._restore.is_at(place, found.st_ino) or self._files.names(place):
                self._restore.rename(place, path)
                raise OSError(errno.ENOTEMPTY, "was changed by somebody else", path)
        else:
            with ChangedDirectory(self._times, path) as (at, name):
                failpoint("rmdir")
                os.rmdir(name, dir_fd=at)

    def _displace(self, path: str, found: os.stat_result) -> None:
        """Move a file to the hold. One that somebody has saved in this instant comes back, and is a conflict."""
        if self._restore.discard and found.st_ino not in self._restore.before:
            self._discard(path, found)
            return
        holding = self._restore.hold.make()
        free = (slot for slot in self._records[path].slots if holding.look(slot) is None)
        slot = next(free, None)
        if slot is None:
            slot = holding.new_slot()
        self._touch(path, found, None)
        with ChangedDirectory(self._times, path) as (at, name):
            self._renames.rename(at, name, holding.descriptor, str(slot))
            taken = holding.look(slot)
            if not is_unchanged(found, taken):
                self._renames.rename(holding.descriptor, str(slot), at, name)
                raise FileExistsError(errno.EEXIST, "was changed by somebody else", path)
        self._has_displaced(path, found, holding.place(slot))

    def _discard(self, path: str, found: os.stat_result) -> None:
        with ChangedDirectory(self._times, path) as (at, name):
            if not is_unchanged(found, lstat(at, name)):
                raise FileExistsError(errno.EEXIST, "was changed by somebody else", path)
            failpoint("unlink")
            os.unlink(name, dir_fd=at)

    def _has_displaced(self, path: str, found: os.stat_result, place: str) -> None:
        if self._restore.discard and not stat.S_ISDIR(found.st_mode) and found.st_ino not in self._restore.before:
            self._discard(place, found)
            return
        self._held.setdefault(found.st_ino, []).append(place)
        if self._restore.log is not None:
            self._restore.log.displaced(path, found, place)

    # -- 3. put back

    def _put_back(self, path: str) -> None:
        record = self._records[path]
        before, found = record.before, self._to_restore[path]
        assert before is not None, "there is something to put back"
        self.report.put_back = True
        comes_back_whole = self._restore.discard and self._held.get(before.inode)
        if before.is_directory and not comes_back_whole:
            self._make_directory(path, before)
            return
        body = self._body(record, before) or self._new_body(path, before)
        if body is None:
            self._note_missing(path, before)
            return
        exchanged = found if found is not None and not self._is_removed(path) else None
        if not self._move_body(path, before, body, exchanged):
            self._restore.conflict(path, before.inode)
            return
        if exchanged is not None:
            self._has_displaced(path, exchanged, body)
        if body in self._held.get(before.inode, ()):
            self._held[before.inode].remove(body)
        self._placed.add(path)

    def _move_body(self, path: str, before: State, body: str, exchanged: os.stat_result | None) -> bool:
        """Give a path its file from the hold, in exchange for what the call has put there. False, and nothing is done:
        it was changed by somebody else in this instant."""
        with self._restore.opened(body) as (held, held_name), ChangedDirectory(self._times, path) as (at, name):
            if self._restore.log is not None:
                there = lstat(held, held_name)
                slot = int(held_name) if body.count("/") == 1 and held_name.isdecimal() else None
                if slot is None:  # in a directory that was displaced with it, where it is to be once that comes back
                    self._touch(body, there, None if exchanged is None else State.of(exchanged))
                self._touch(path, exchanged, None if there is None else State.of(there, before.sha256), slot)
            if exchanged is None:
                self._renames.rename(held, held_name, at, name)
            else:
                self._renames.exchange(at, name, held, held_name)
                if not is_unchanged(exchanged, lstat(held, held_name)):
                    self._renames.exchange(at, name, held, held_name)
                    return False
        return True

    def _body(self, record: UndoRecord, before: State) -> str | None:
        """The place in the hold of the file of before. Where the call has moved it, it is moved to the hold first. Of
        more than one hard link it is that of the path itself: the others are what calls around have displaced."""
        if not self._held.get(before.inode):
            for place in self._own_paths.get(before.inode, ()):
                there = self._files.look(place)
                if there is not None and there.st_ino == before.inode and place not in self.report.conflicts:
                    self._displace(place, there)
                    self._to_restore[place] = None
                    break
        places = self._held.get(before.inode, ())
        own = [place for place in places if place.partition("/")[2] in map(str, record.slots)]
        return next(reversed(own or places), None)

    def _new_body(self, path: str, before: State) -> str | None:
        """The place in the hold of a file that is made anew, where somebody knows what it was."""
        if self._restore.make is None:
            return self._body_from_history(path, before)
        slot = self._restore.make(path, lambda other: other in self._placed or other not in self._to_restore)
        return None if slot is None else self._restore.hold.make().place(slot)

    def _note_missing(self, path: str, before: State) -> None:
        """The file of before is neither held nor known."""
        self._restore.conflict(path)
        if self._restore.make is not None:
            return
        place = next((one for one in self._records if self._restore.is_at(one, before.inode)), None)
        if place is None:
            self._restore.lose(path)
        else:  # somebody has changed it where the call had moved it
            self.report.moved[path] = place

    def _body_from_history(self, path: str, before: State) -> str | None:
        if self._restore.from_history is None or any(self._restore.is_at(one, before.inode) for one in self._records):
            return None
        holding = self._restore.hold.make()
        slot = self._restore.from_history(path, before, holding)
        return None if slot is None else holding.place(slot)

    def _make_directory(self, path: str, before: State) -> None:
        if self._files.look(path) is not None:
            return
        self._touch(path, None, before._replace(inode=0))
        with ChangedDirectory(self._times, path) as (at, name):
            make_directory(at, name)
        self._modes[path] = before.mode

    # -- 4. metadata

    def _finish(self, path: str) -> None:
        before = self._records[path].before
        found = None if before is None else self._looks.look(path)
        if before is None or found is None:
            return
        if self._restore.finish is not None:
            self._restore.finish(path)
        elif stat.S_ISLNK(found.st_mode):
            pass
        elif before.is_directory:
            if stat.S_ISDIR(found.st_mode) and path in self._modes:
                self._finish_directory(path, before, found)
        elif found.st_ino == before.inode and stat.S_IMODE(found.st_mode) != before.mode:
            own = {one.mode for one in self._restore.known[found.st_ino]}  # wherever the call had moved it
            if path in self._placed or stat.S_IMODE(found.st_mode) in own:
                self._set_mode(path, found, before.mode)
            else:
                self._restore.conflict(path)

    def _finish_directory(self, path: str, before: State, found: os.stat_result) -> None:
        mode = self._modes[path]
        if mode != before.mode and self._records[path].afters:
            self._restore.conflict(path)
        self._times.observe(found)  # where somebody has changed it, the record has their time from now on
        wanted = self._records[path].before
        assert wanted is not None, "it was a directory"
        if stat.S_IMODE(found.st_mode) != mode:
            self._set_mode(path, found, mode)
        if found.st_mtime_ns != wanted.mtime_ns:
            self._touch(path, found, State.of(found)._replace(mode=mode, mtime_ns=wanted.mtime_ns))
            with self._files.parent(path) as (at, name):
                failpoint("utime")
                try:
                    os.utime(name, ns=(found.st_atime_ns, wanted.mtime_ns), dir_fd=at, follow_symlinks=False)
                except PermissionError:  # whoever may write in it may not set its times
                    whose = f"the time of {path or 'the root'} cannot be brought back, it is another user's"
                    self.report.notes.append(whose)
                self._times.gave(found.st_ino, wanted.mtime_ns)

    def _set_mode(self, path: str, found: os.stat_result, mode: int) -> None:
        self._touch(path, found, State.of(found)._replace(mode=mode))
        with self._files.parent(path) as (at, name):
            failpoint("chmod")
            try:
                set_mode(at, name, mode)
            except PermissionError:
                whose = f"the permissions of {path or 'the root'} cannot be brought back, it is another user's"
                self.report.notes.append(whose)


def is_full(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether a disk is full, and nobody has said more than that: of the store it is said what to do."""
    return (
        isinstance(error, OSError)
        and error.errno in (errno.ENOSPC, errno.EDQUOT)
        and error.strerror == os.strerror(error.errno)
    )
