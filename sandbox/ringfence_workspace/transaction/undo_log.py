"""The undo log of the open call, as operations add to it: the state of each path before it is changed."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringfence_workspace.transaction.call_log import CallLog
from ringfence_workspace.transaction.changes import Written, states_inside
from ringfence_workspace.transaction.hold import DirectoryTimes, HoldDirectory, HoldHandle
from ringfence_workspace.transaction.read_set import ReadSet
from ringfence_workspace.transaction.records import DirectoryMove, Epoch, UndoRecord, is_below
from ringfence_workspace.transaction.restore import Restore, RestoreReport
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import Renames
from ringfence_workspace.tree.state import Json, State

if TYPE_CHECKING:
    from ringfence_workspace.transaction.opaque_states import Base


@dataclass(slots=True, eq=False)
class SnapshotPoint:
    """A state of the tree that a snapshot holds. While one lives, displaced files are kept."""

    before: dict[str, State | None] = field(default_factory=dict[str, State | None])
    """Of the paths that have changed since, what they were."""
    opaque: bool = False
    """Whether a program has changed files since, or was about to when it was taken."""
    __weakref__: object = field(init=False, repr=False)


@dataclass(slots=True, eq=False)
class Savepoint:
    """Where a call, or a call within it, began."""

    position: int
    """How many epochs of the undo log there were."""
    outermost: bool
    call_id: str
    tool: str
    opaque: bool
    before: dict[str, State | None] = field(default_factory=dict[str, State | None])
    """Of the paths that have changed since, what they were."""
    first: list[tuple[dict[str, State | None], str]] = field(default_factory=list[tuple[dict[str, State | None], str]])
    """The records of the calls around it whose first change of a path is within it."""
    base: Base | None = None
    """Of an opaque call: the tree to which it goes back, whatever has changed."""
    conflicts: set[str] = field(default_factory=set[str])
    """Where somebody else's was in the way of what was rolled back within it."""


@dataclass(slots=True)
class RunningOperation:
    """What the running operation has logged: to undo it alone, should it fail."""

    epochs: list[Epoch] = field(default_factory=lambda: [Epoch()])
    logged: list[tuple[Epoch, UndoRecord, int]] = field(default_factory=list[tuple[Epoch, UndoRecord, int]])
    """Records, with how many states each had before."""
    first: list[tuple[dict[str, State | None], str]] = field(default_factory=list[tuple[dict[str, State | None], str]])
    """Where it has added what paths were before."""
    left: dict[str, State | None] = field(default_factory=dict[str, State | None])
    slots: int = 0


class UndoLog:
    """Of one opened workspace. A change is told to `touch`, `touch_move` or `touch_directory` before it is made. When
    that returns, it is in the log."""

    def __init__(self, files: Confined, renames: Renames, log: CallLog, store: str) -> None:
        """``store`` is the directory of the store, which the holding directory names."""
        self.files = files
        self.renames = renames
        self.log = log
        self.times = DirectoryTimes(files)
        self.times.changed = self._keep_time
        self.read_set = ReadSet(files)
        self.written = Written()
        self.held: HoldDirectory | None = None
        self.epochs: list[Epoch] = [Epoch()]
        self.version = 0
        """Grows with every change: what was found out about an earlier one does not hold."""
        self.savepoints: list[Savepoint] = []
        self.snapshots: weakref.WeakSet[SnapshotPoint] = weakref.WeakSet()
        self.running: RunningOperation | None = None
        self.own: dict[str, State | None] = {}
        """What paths were given last by calls."""
        self._store = store

    @property
    def holding(self) -> HoldDirectory:
        """The directory of displaced files, made if there is none."""
        if self.read_set.unsure:
            self.find_holding()
        if self.held is None:
            self.held = HoldDirectory.make(self.files, self.log.write, self._store)
            self.log.name_hold(self.held.name)
        return self.held

    @property
    def hold(self) -> HoldHandle:
        return HoldHandle(self.held, lambda: self.holding)

    def find_holding(self) -> None:
        """A command may have taken the holding directory away; what was in it comes from the store."""
        if self.held is not None:
            self.held.find_again()

    def touch(
        self,
        path: str,
        found: os.stat_result | None,
        after: State | None,
        slot: int | None = None,
        at: int | None = None,
    ) -> None:
        """Log a change of a path before it is made: what is there, and what will be; in which slot that is, or comes
        what it displaces; and the directory that the path is in, if it is open."""
        lines: list[Mapping[str, Json]] = []
        self._touch_directory(path.rpartition("/")[0], at, lines)
        self._touch_path(path, found, after, lines, slot)
        self.log.write(*lines)

    def touch_move(self, old: str, new: str, found: os.stat_result) -> None:
        """`touch` both paths of a file that is about to be renamed."""
        lines: list[Mapping[str, Json]] = []
        self._touch_directory(old.rpartition("/")[0], None, lines)
        self._touch_directory(new.rpartition("/")[0], None, lines)
        self._touch_path(old, found, None, lines)
        self._touch_path(new, None, State.of(found, self.written.hash_of(found)), lines)
        self.log.write(*lines)

    def touch_directory(self, old: str, new: str, found: os.stat_result) -> Mapping[str, State]:
        """Log that a directory is about to be renamed; one of the two paths may be among the displaced files. Returns
        the states of what is in it, by their paths there.

        Raises:
            PermissionError: what is in it cannot be listed.
        """
        inside = states_inside(self.files, old)
        for path in [path for path in self.read_set.left if is_below(path, old)]:
            self.read_set.check(path, self.files.look(path), read=False)
        lines: list[Mapping[str, Json]] = []
        for name, state in {"": State.of(found), **inside}.items():
            was, will_be = f"{old}/{name}".rstrip("/"), f"{new}/{name}".rstrip("/")
            self._first(was, state)
            self.own[was] = None
            self._first(will_be, None)
            self.own[will_be] = state
        for place in (old,) if self.files.is_reserved(new) else (old, new):
            self._touch_directory(place.rpartition("/")[0], None, lines)
        self._end_epoch(DirectoryMove(old, new, found.st_ino), lines)
        self.log.write(*lines)
        self.read_set.moved(old, None if self.files.is_reserved(new) else new)
        return inside

    def _touch_path(
        self,
        path: str,
        found: os.stat_result | None,
        after: State | None,
        lines: list[Mapping[str, Json]],
        slot: int | None = None,
    ) -> None:
        """Append to the undo record of a path, or begin one; `lines` gets what is to be written to the log."""
        before = None if found is None else State.of(found, self.written.hash_of(found))
        if after is not None and after.sha256 is None:
            after = after._replace(sha256=self.written.hash_of_state(after))
        epoch = self.epochs[-1]
        record = epoch.records.get(path)
        slots = [] if slot is None else [slot]
        if record is None:
            record = epoch.records[path] = UndoRecord(path, before, [after], slots)
            lines.append(record.to_json())
        else:
            record.afters.append(after)
            record.slots += slots
            state = None if after is None else after.to_json()
            lines.append({"after": path, "state": state, "slots": [*slots]})
        self._first(path, before)
        self.own[path] = after
        self.version += 1
        if self.running is not None:
            operation = self.running
            operation.logged.append((epoch, record, len(record.afters) - 1))
            operation.epochs[-1].records.setdefault(path, UndoRecord(path, before)).afters.append(after)
            if path in self.read_set.left:
                operation.left.setdefault(path, self.read_set.left[path])

    def made_directory(self, path: str, made: State) -> None:
        """A directory that was touched has been made, and its inode is known."""
        self.epochs[-1].records[path].afters[-1] = made
        self.own[path] = made
        if self.running is not None:
            self.running.epochs[-1].records[path].afters[-1] = made

    def _touch_directory(self, path: str, opened: int | None, lines: list[Mapping[str, Json]]) -> None:
        """Log what a directory is like before the first change of an entry of it."""
        records = self.epochs[-1].records
        if path in records and (self.running is None or path in self.running.epochs[-1].records):
            return
        found = self.files.look(path) if opened is None else os.fstat(opened)
        if found is None:
            return
        self.times.observe(found)
        state = State.of(found)
        for point in self.snapshots if self.snapshots and not self.files.is_reserved(path) else ():
            point.before.setdefault(path, state)
        if path not in records:
            records[path] = UndoRecord(path, state)
            lines.append(records[path].to_json())
        if self.running is not None:
            self.running.epochs[-1].records.setdefault(path, UndoRecord(path, state))

    def _first(self, path: str, before: State | None) -> None:
        """Have the open savepoints and snapshots know what a path was, if it has not changed since they were made."""
        if self.files.is_reserved(path):
            return
        scopes = [*self.savepoints, *self.snapshots] if self.snapshots else self.savepoints
        for depth, scope in enumerate(scopes):
            if path not in scope.before:
                scope.before[path] = before
                for within in (self.running, *self.savepoints[depth + 1 :]):
                    if within is not None:
                        within.first.append((scope.before, path))

    def _end_epoch(self, move: DirectoryMove, lines: list[Mapping[str, Json]]) -> None:
        """Begin a new epoch: after the move of a directory, the same names mean other files."""
        self.version += 1
        self.epochs[-1].move = move
        self.epochs.append(Epoch())
        lines.append(move.to_json())
        if self.running is not None:
            self.running.epochs[-1].move = move
            self.running.epochs.append(Epoch())

    def displaced(self, path: str, found: os.stat_result, place: str) -> None:
        """What was at a path has come to a place among the displaced files."""
        assert self.held is not None, "something was displaced"
        if stat.S_ISREG(found.st_mode):
            self.held.displaced[place] = path, State.of(found)

    def _keep_time(self, found: os.stat_result) -> None:
        """Have a directory that somebody else has changed during the call keep the time of that."""
        for epoch in reversed(self.epochs):
            for path, record in epoch.records.items():
                before = record.before
                if before is not None and before.is_directory and before.inode == found.st_ino:
                    record.before = State(
                        "directory", before.mode, before.uid, before.gid, found.st_mtime_ns, 0, before.inode
                    )
                    self.log.note(UndoRecord(path, record.before).to_json())

    def position(self) -> int:
        """How many epochs there are; what is logged from now on belongs to another one."""
        if not self.epochs[-1].is_empty:
            if self.log.begun:
                self.log.write({"epoch": None})
            self.epochs.append(Epoch())
        return len(self.epochs) - 1

    def undo_operation(self, operation: RunningOperation) -> RestoreReport:
        """Undo an operation that failed half way, and what it has logged."""
        restore = Restore(self.files, self.renames, self.hold, self.times)
        report = restore.run(operation.epochs)
        for move in [epoch.move for epoch in operation.epochs if epoch.move is not None]:
            self.epochs.pop()
            self.epochs[-1].move = None
            self.log.note({"unmoved": move.old})
        for epoch, record, number in reversed(operation.logged):
            del record.afters[number:]
            self.read_set.left.pop(record.path, None)
            if not number:
                epoch.records.pop(record.path, None)
            self.found_again(record.path)
        for states, path in operation.first:
            states.pop(path, None)
            self.found_again(path)
        self.read_set.left |= operation.left
        self.version += 1
        if self.held is not None and not (report.conflicts or report.errors):
            self.held.discard(operation.slots)
        return report

    def found_again(self, path: str) -> None:
        """What a path had before it was changed is there again."""
        found = self.files.look(path)
        self.own[path] = None if found is None else State.of(found)

    def close(self) -> None:
        """Remove the holding directory, unless something in it would not go: then the next opening has to find it."""
        if self.held is None or not self.held.remove(self.log.note_removal):
            self.log.name_hold(None)
        self.held = None
