"""The transactions of one workspace on disk: savepoints, the undo log of the open call, its commit and its rollback."""

from __future__ import annotations

import logging
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ringfence.errors import SnapshotRestoreError, TransactionError
from ringfence.participants import CLEAN, Change, RollbackReport, Step
from ringfence_sandbox.disk.confined import Confined, is_reserved
from ringfence_sandbox.disk.kernel import Abilities, Renames, failpoint, sync_filesystem
from ringfence_sandbox.disk.state import Json, State
from ringfence_sandbox.store.log import Log
from ringfence_sandbox.transaction.call_log import CallLog
from ringfence_sandbox.transaction.changes import (
    ChangedFiles,
    History,
    RolledBackCall,
    TypedChanges,
    Written,
    noting_failure,
    states_inside,
)
from ringfence_sandbox.transaction.hold import DirectoryTimes, Hold, Holding, drop_holding
from ringfence_sandbox.transaction.operation import Operation
from ringfence_sandbox.transaction.read_set import ReadSet, stale, written_meanwhile
from ringfence_sandbox.transaction.restore import Make, Restore, RestoreReport
from ringfence_sandbox.transaction.undo_log import Epoch, Move, UndoRecord, is_below

if TYPE_CHECKING:
    from ringfence.runtime.receipts import Receipt
    from ringfence_sandbox.disk.call_process import CallProcess
    from ringfence_sandbox.opaque.opaque_calls import OpaqueCalls

logger = logging.getLogger(__name__)


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
    early: Sequence[Change] | None = None
    """What had changed until the first opaque call within it began."""
    conflicts: set[str] = field(default_factory=set[str])
    """Where somebody else's was in the way of what was rolled back within it."""


@dataclass(slots=True)
class _Operation:
    """What the running operation has logged: to undo it alone, should it fail."""

    epochs: list[Epoch] = field(default_factory=lambda: [Epoch()])
    logged: list[tuple[Epoch, UndoRecord, int]] = field(default_factory=list[tuple[Epoch, UndoRecord, int]])
    """Records, with how many states each had before."""
    first: list[tuple[dict[str, State | None], str]] = field(default_factory=list[tuple[dict[str, State | None], str]])
    """Where it has added what paths were before."""
    left: dict[str, State | None] = field(default_factory=dict[str, State | None])
    slots: int = 0


class Transactions:
    """Of one opened workspace. Its callers hold the filesystem's lock."""

    def __init__(
        self,
        files: Confined,
        can: Abilities,
        log: Log | None,
        *,
        kept: str,
        history: History | None,
        opaque: Callable[[], OpaqueCalls],
        power: bool,
    ) -> None:
        """``log`` and ``history`` are None where nothing is to be changed. ``kept`` is the directory for what conflicts
        keep from their paths. ``opaque`` gives what opaque calls need, when the first of them begins."""
        self.files = files
        self.power = power
        self.renames = Renames(can)
        self.times = DirectoryTimes(files)
        self.times.changed = self._keep_time
        self.read_set = ReadSet(files)
        self.written = Written()
        self.held: Holding | None = None
        self._log = CallLog(files, log)
        self._kept = kept
        self._history = history
        self._new_opaque = opaque
        self._opaque: OpaqueCalls | None = None
        self._epochs: list[Epoch] = [Epoch()]
        self._version = 0
        """Grows with every change: what was found out about an earlier one does not hold."""
        self._savepoints: list[Savepoint] = []
        self._snapshots: weakref.WeakSet[SnapshotPoint] = weakref.WeakSet()
        self._operation: _Operation | None = None
        self._places: dict[int, str] = {}
        """By inode, where files of before are now that were moved or displaced."""
        self._own: dict[str, State | None] = {}
        """What paths were given last, while a snapshot lives."""
        self._compared: tuple[Savepoint, int, TypedChanges] | None = None
        self._calls_opaque = 0
        """The number of the next opaque call."""

    # -- the undo log

    @property
    def has_changes(self) -> bool:
        start = self._savepoints[0].position if self._savepoints else len(self._epochs)
        return any(not epoch.is_empty for epoch in self._epochs[start:])

    @property
    def holding(self) -> Holding:
        """The directory of displaced files, made if there is none."""
        if self._opaque is not None and self._opaque.any_open:
            self._find_holding()
        if self.held is None:
            self.held = Holding.make_logged(self.files, self._log.write_hold, os.path.dirname(self._kept))
        return self.held

    @property
    def hold(self) -> Hold:
        return Hold(self.held, lambda: self.holding)

    def _find_holding(self) -> None:
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
        self._log.write(*lines)

    def touch_move(self, old: str, new: str, found: os.stat_result) -> None:
        """`touch` both paths of a file that is about to be renamed."""
        lines: list[Mapping[str, Json]] = []
        self._touch_directory(old.rpartition("/")[0], None, lines)
        self._touch_directory(new.rpartition("/")[0], None, lines)
        self._touch_path(old, found, None, lines)
        self._touch_path(new, None, State.of(found, self.written.hash_of(found)), lines)
        self._places[found.st_ino] = new
        self._log.write(*lines)

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
            self._places[state.inode] = will_be
            self._first(was, state)
            self._own[was] = None
            if not is_reserved(will_be):
                self._first(will_be, None)
                self._own[will_be] = state
        for place in (old,) if is_reserved(new) else (old, new):
            self._touch_directory(place.rpartition("/")[0], None, lines)
        self._end_epoch(Move(old, new, found.st_ino), lines)
        self._log.write(*lines)
        self.read_set.moved(old, None if is_reserved(new) else new)
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
            after = replace(after, sha256=self.written.hash_of_state(after))
        epoch = self._epochs[-1]
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
        self._own[path] = after
        self._version += 1
        if self._operation is not None:
            operation = self._operation
            operation.logged.append((epoch, record, len(record.afters) - 1))
            operation.epochs[-1].records.setdefault(path, UndoRecord(path, before)).afters.append(after)
            if path in self.read_set.left:
                operation.left.setdefault(path, self.read_set.left[path])

    def made_directory(self, path: str, made: State) -> None:
        """A directory that was touched has been made, and its inode is known."""
        self._epochs[-1].records[path].afters[-1] = made
        self._own[path] = made
        if self._operation is not None:
            self._operation.epochs[-1].records[path].afters[-1] = made

    def _touch_directory(self, path: str, opened: int | None, lines: list[Mapping[str, Json]]) -> None:
        """Log what a directory is like before the first change of an entry of it."""
        records = self._epochs[-1].records
        if path in records and (self._operation is None or path in self._operation.epochs[-1].records):
            return
        found = self.files.look(path) if opened is None else os.fstat(opened)
        if found is None:
            return
        self.times.observe(found)
        record = UndoRecord(path, State.of(found))
        for point in self._snapshots:
            point.before.setdefault(path, record.before)
        if path not in records:
            records[path] = record
            lines.append(record.to_json())
        if self._operation is not None:
            self._operation.epochs[-1].records.setdefault(path, UndoRecord(path, record.before))

    def _first(self, path: str, before: State | None) -> None:
        """Have the open savepoints and snapshots know what a path was, if it has not changed since they were made."""
        scopes = [*self._savepoints, *self._snapshots] if self._snapshots else self._savepoints
        for depth, scope in enumerate(scopes):
            if path not in scope.before:
                scope.before[path] = before
                for within in (self._operation, *self._savepoints[depth + 1 :]):
                    if within is not None:
                        within.first.append((scope.before, path))

    def _end_epoch(self, move: Move, lines: list[Mapping[str, Json]]) -> None:
        """Begin a new epoch: after the move of a directory, the same names mean other files."""
        self._version += 1
        self._epochs[-1].move = move
        self._epochs.append(Epoch())
        lines.append(move.to_json())
        if self._operation is not None:
            self._operation.epochs[-1].move = move
            self._operation.epochs.append(Epoch())

    def displaced(self, path: str, found: os.stat_result, place: str) -> None:
        """What was at a path has come to a place among the displaced files."""
        assert self.held is not None, "something was displaced"
        self._places[found.st_ino] = place
        if stat.S_ISREG(found.st_mode):
            self.held.displaced[place] = path, State.of(found)

    def placed(self, path: str, inode: int) -> None:
        """What was displaced is at a path again."""
        if inode in self._places:
            self._places[inode] = path

    def _keep_time(self, found: os.stat_result) -> None:
        """Have a directory that somebody else has changed during the call keep the time of that."""
        for epoch in reversed(self._epochs):
            if epoch.opaque is not None:
                break
            for path, record in epoch.records.items():
                before = record.before
                if before is not None and before.is_directory and before.inode == found.st_ino:
                    record.before = State(
                        "directory", before.mode, before.uid, before.gid, found.st_mtime_ns, 0, before.inode
                    )
                    self._log.note(UndoRecord(path, record.before).to_json())

    # -- operations

    def operation(self) -> Operation:
        """For a ``with``: all of its changes, or none. Outside of calls it is a transaction of its own.

        Ctrl-C waits for its end: between a system call and the line that remembers what it did is no place for it.
        """
        return Operation(self)

    def begin_operation(self) -> Savepoint | _Operation | None:
        """A savepoint of its own outside of calls; None within another operation."""
        if self._operation is not None:
            return None
        began = None if self._savepoints else self.begin("", "outside of calls")
        self._operation = _Operation(slots=0 if self.held is None else self.held.slots)
        return began or self._operation

    def end_operation(self, began: Savepoint | _Operation | None, *, failed: bool) -> None:
        """Keep what was done since then, or undo it. OSError: it could not be kept, and is undone."""
        if began is None:
            return
        operation, self._operation = self._operation, None
        assert operation is not None, "it has begun"
        if isinstance(began, _Operation):
            if failed:
                self._undo_operation(operation)
            return
        if failed:
            self.rollback(began)
            return
        try:
            if self._log.begun:
                self._sync_directories()
                self._log.commit(None)
        except BaseException:
            self.rollback(began)
            raise
        self._leave(began)
        self._close_call(committed=True)

    def _undo_operation(self, operation: _Operation) -> None:
        report = Restore(self.files, self.renames, self.hold, self.times).run(operation.epochs)
        for move in [epoch.move for epoch in operation.epochs if epoch.move is not None]:
            self._epochs.pop()
            self._epochs[-1].move = None
            self._log.note({"unmoved": move.old})
        for epoch, record, number in reversed(operation.logged):
            del record.afters[number:]
            self.read_set.left.pop(record.path, None)
            if not number:
                epoch.records.pop(record.path, None)
        for states, path in operation.first:
            states.pop(path, None)
        self.read_set.left |= operation.left
        self._version += 1
        if self.held is not None and not (report.conflicts or report.errors):
            self.held.discard(operation.slots)
        if report.conflicts:
            self._add_conflicts(report.conflicts)
            for note in self._keep(report):
                logger.warning("a change failed half way, and %s", note)

    # -- transactions

    def begin(self, call_id: str, tool: str, *, opaque: bool = False) -> Savepoint:
        """Remember the state now. OSError: it cannot be stored, as it has to be before an ``opaque`` call."""
        outermost = not self._savepoints
        if outermost:
            if call_id and self._history is not None:
                self._history.begin()
            self._log.label = (call_id, tool)
            if not self._snapshots and self.held is not None:
                self._forget()
            if self.held is not None and self.held.is_gone:
                self._find_holding()
        savepoint = Savepoint(self._position(), outermost, call_id, tool, opaque)
        self._savepoints.append(savepoint)
        if opaque:
            try:
                self._begin_opaque()
            except BaseException:
                self._leave(savepoint)
                if outermost:
                    self._close_call(committed=False)
                raise
        return savepoint

    def _position(self) -> int:
        """How many epochs there are; what is logged from now on belongs to another one."""
        if not self._epochs[-1].is_empty:
            if self._log.begun:
                self._log.write({"epoch": None})
            self._epochs.append(Epoch())
        return len(self._epochs) - 1

    def _begin_opaque(self) -> None:
        if self._opaque is None:
            self._opaque = self._new_opaque()
        self._find_holding()
        early: ChangedFiles | None = None
        for savepoint in self._savepoints[:-1]:
            if self._opaque_since(savepoint) is None:
                # Also where there are none: another opaque call may have begun here that was rolled back with others.
                compared = self._typed_changes(savepoint)
                savepoint.early = compared.changes
                if compared.changes and savepoint.outermost:
                    early = compared
        number, self._calls_opaque = self._calls_opaque, self._calls_opaque + 1
        before = self._opaque.begin(early, self._epochs[self._savepoints[0].position :], self.held)
        record: Mapping[str, Json] = {"opaque": number, "commit": before.commit}
        self._log.write(record, blob=before.more())
        self._epochs[-1:] = [self._epochs[-1], Epoch(opaque=number), Epoch()]
        self._version += 1
        self._opaque.begun(number, before)
        self.times.forget()
        self.read_set.left.clear()
        self.read_set.unsure = True
        if self.held is not None:
            self.held.displaced.clear()
        self.written.forget()  # a file may come to have the stamp that another one had

    def _opaque_since(self, savepoint: Savepoint) -> int | None:
        """The index of the first opaque epoch since a savepoint."""
        epochs = self._epochs
        return next((n for n in range(savepoint.position, len(epochs)) if epochs[n].opaque is not None), None)

    def _opaque_number(self, index: int) -> int:
        number = self._epochs[index].opaque
        assert number is not None, "it is an opaque one"
        return number

    def note_process(self, process: CallProcess) -> int:
        """Have the log name a process that recovery is to end; the descriptor that it may stamp. TransactionError
        outside of opaque calls."""
        if self._opaque is None or not self._opaque.any_open:
            raise TransactionError(f"{process.name} can only be noted while an opaque call runs")
        self._opaque.contained = True
        self._log.write({"process": process.to_json()})
        return self._opaque.stamp

    def commit(self, savepoint: Savepoint, receipt: Receipt) -> Step | None:
        if not savepoint.outermost:
            self._leave(savepoint)
            return None
        step = self._step(savepoint, receipt)
        if self._log.begun:
            self._sync_directories()
            if self.power and self._opaque_since(savepoint) is not None:
                sync_filesystem(self.files.root)
            self._check_left(savepoint)
            self._log.commit(step and step.commit)
        self._note_opaque(savepoint)
        self._leave(savepoint)  # the commit point is behind us: from here on nothing fails
        if self._history is not None:
            self._history.ended(step)
        self._close_call(committed=True)
        return step

    def _note_opaque(self, savepoint: Savepoint) -> None:
        first = self._opaque_since(savepoint)
        if self._snapshots and first is not None and self._opaque is not None:
            number = self._opaque_number(first)
            if self._opaque.differs(number, self._version):
                for point in self._snapshots:
                    point.opaque = True

    def _check_left(self, savepoint: Savepoint) -> None:
        """Raises OSError (ESTALE) where somebody has saved over what the call left, or has written into what it has
        displaced, which would be lost and comes back to its place with the rollback."""
        if savepoint.opaque:  # what a program saves during its call is the call's
            return
        looked = self._typed_changes(savepoint).looked if self._opaque_since(savepoint) is None else {}
        for path, state in self.read_set.left.items():
            found = looked.get(path) or self.files.look(path)
            if not self.read_set.is_left(path, state, found):
                raise stale(path)
        if self.held is not None:
            for path in self.held.written().values():
                raise written_meanwhile(path)

    def _step(self, savepoint: Savepoint, receipt: Receipt) -> Step | None:
        changed = None if self._history is None else self.changed_files(savepoint)
        return None if self._history is None or changed is None else self._history.record(changed, receipt)

    def _typed_changes(self, savepoint: Savepoint, *, read: bool = True) -> TypedChanges:
        """What typed calls have changed since a savepoint. It is looked at once."""
        known = self._compared
        if known is not None and known[:2] == (savepoint, self._version):
            return known[2]
        found = TypedChanges(self.files, savepoint.before, self._places, self.written, read=read)
        if read:
            self._compared = savepoint, self._version, found
        return found

    def changed_files(self, savepoint: Savepoint) -> ChangedFiles | None:
        """What has changed since a savepoint, with the bytes; None where nothing has."""
        first = self._opaque_since(savepoint)
        if first is not None and self._opaque is not None:
            number = self._opaque_number(first)
            changed: ChangedFiles = self._opaque.scanned(number, self._version, savepoint.early or ())
        else:
            changed = self._typed_changes(savepoint)
        return changed if changed.changes else None

    def changes_since_savepoint(self, savepoint: Savepoint) -> Sequence[Change]:
        first = self._opaque_since(savepoint)
        if first is None or self._opaque is None:
            return self._typed_changes(savepoint).changes
        changes = self._opaque.changes(self._opaque_number(first), self._version, savepoint.early or ())
        if savepoint.outermost:
            self._opaque.sealed()
        return changes

    def _sync_directories(self) -> None:
        """Have the names that the call gave and took survive a loss of power, if the commit record is to survive it."""
        if not self.power:
            return
        epochs = self._epochs[self._savepoints[0].position :] if self._savepoints else self._epochs
        paths = {path for epoch in epochs for path, record in epoch.records.items() if record.afters}
        paths |= {place for epoch in epochs if epoch.move for place in (epoch.move.old, epoch.move.new)}
        for path in {path.rpartition("/")[0] for path in paths}:
            with suppress(OSError):
                descriptor = self.files.open_directory(path)
                try:
                    failpoint("fsync directory")
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def rollback(self, savepoint: Savepoint) -> RollbackReport:
        """Raises OSError where something could not be brought back; it may be tried again."""
        if savepoint not in self._savepoints:
            return CLEAN
        while self._savepoints[-1] is not savepoint:  # inner calls that did not come to an end of their own
            self._savepoints.pop()
        self._operation = None
        taken = self._roll_back_opaque(savepoint)
        notes = [*taken.notes, *self._keep_changes(savepoint)]
        report = self._undo_since(savepoint)
        if report.errors:
            raise report.errors[0]
        self.read_set.clear()
        self._compared = None
        for point in self._snapshots if taken.remade else ():
            point.opaque = True
        self._note_restored(savepoint, report)
        if not report.moved:  # a later change of a path is the first one again: what is there may be somebody else's
            for states, path in savepoint.first:
                states.pop(path, None)
        if savepoint.outermost and self._history is not None:
            self._history.ended(None)
        self._leave(savepoint)
        report.displaced |= taken.displaced
        notes += [*report.notes, *self._keep(report)]
        conflicts = taken.conflicts | report.conflicts | savepoint.conflicts
        self._add_conflicts(conflicts)
        if savepoint.outermost:
            notes += self._close_call(committed=False)
        return RollbackReport(tuple(sorted(conflicts)), tuple(notes)) if conflicts or notes else CLEAN

    def _undo_since(self, savepoint: Savepoint) -> RestoreReport:
        """Undo the log back to a savepoint."""
        epochs, start = self._epochs[savepoint.position :], savepoint.position
        touched = {*savepoint.before, *(path for epoch in epochs for path in epoch.records)}
        for path in touched if self._snapshots else ():
            found = self.files.look(path)
            is_directory = found is not None and stat.S_ISDIR(found.st_mode)
            state = State.of(found) if found is not None and is_directory else self._own.get(path)
            for point in self._snapshots:  # what was taken within the call is to find what it was then
                point.before.setdefault(path, state)
        first = self._savepoints[0].position

        def note_undone(count: int) -> None:
            """Have neither a second try nor a recovery undo again what is undone: the names may mean other files by
            then."""
            self._epochs[start + count :] = [Epoch()]
            self._log.note(restore.report.to_json(start - first + count))

        self._version += 1
        restore = Restore(self.files, self.renames, self.hold, self.times)
        report = restore.run(epochs, on_undone=note_undone)
        if report.errors:
            savepoint.conflicts |= report.conflicts
        return report

    def _note_restored(self, savepoint: Savepoint, report: RestoreReport) -> None:
        for path in savepoint.before if self._snapshots else ():
            if path not in report.conflicts:
                found = self.files.look(path)
                self._own[path] = None if found is None else State.of(found)

    def _add_conflicts(self, conflicts: set[str]) -> None:
        """Conflicts are those of the calls around, too, should they be rolled back; not where an opaque call has begun
        within them: to there all goes back, whoever changed it."""
        for savepoint in reversed(self._savepoints):
            if not conflicts or self._opaque_since(savepoint) is not None:
                break
            savepoint.conflicts |= conflicts

    def _roll_back_opaque(self, savepoint: Savepoint) -> RestoreReport:
        """Go back to where the first opaque call since a savepoint began, whatever came after."""
        first = self._opaque_since(savepoint)
        if first is None or self._opaque is None or self._log.file is None:
            return RestoreReport()
        self._find_holding()
        call_id, tool = self._log.label
        number = self._opaque_number(first)
        taken = self._opaque.roll_back(
            number, self._version, self.hold, self._log.file.note, tool=tool, call_id=call_id
        )
        self._version += 1
        self.times.forget()
        self._remap(taken.new_inodes)
        self._epochs[first:] = [Epoch()]
        self._opaque.end(number)  # not before: what is interrupted until then is done again
        self.read_set.unsure = self._opaque.any_open
        return taken

    def _remap(self, new_inodes: Mapping[int, int]) -> None:
        """Know files again that had to become other inodes."""
        for epoch in self._epochs:
            epoch.remap(new_inodes)
        for savepoint in self._savepoints:
            for path, state in savepoint.before.items():
                if state is not None and state.inode in new_inodes:
                    savepoint.before[path] = replace(state, inode=new_inodes[state.inode])
        self._places = {new_inodes.get(inode, inode): place for inode, place in self._places.items()}

    def _keep_changes(self, savepoint: Savepoint) -> Sequence[str]:
        """Have the history keep what typed calls have changed since a savepoint, before they are undone."""
        if self._history is None or self._log.file is None or not savepoint.call_id or not savepoint.before:
            return ()
        if all(epoch.is_empty for epoch in self._epochs[savepoint.position :]):
            return ()
        notes: list[str] = []
        with noting_failure(notes):
            known = self._compared
            if known is None or known[:2] != (savepoint, self._version):
                changed = self._typed_changes(savepoint, read=False)
            else:
                changed = known[2]
            if changed.changes:
                begun = self._log.name(savepoint.position - self._savepoints[0].position)
                notes += self._history.rolling_back(changed, RolledBackCall(savepoint.call_id, savepoint.tool, begun))
        return notes

    def _keep(self, report: RestoreReport) -> list[str]:
        return [] if self.held is None else keep_conflicts(self.held, report, self._kept)

    def _leave(self, savepoint: Savepoint) -> None:
        while self._savepoints and self._savepoints[-1] is not savepoint:
            self._savepoints.pop()
        if self._savepoints:
            self._savepoints.pop()
        if savepoint.opaque:  # whatever its program has changed since is its own
            self.read_set.left.clear()
            if self.held is not None:
                self.held.displaced.clear()

    def _close_call(self, *, committed: bool) -> list[str]:
        """The last of an outermost call: drop what nobody needs. Never fails; what is left over is said."""
        notes: list[str] = []
        self.read_set.unsure = False
        if self._opaque is not None:
            if self._opaque.any_open:
                with suppress(OSError):
                    self._find_holding()  # what a program moved from there into the tree is the tree's
            self._opaque.end()
        self._compared = None
        self.written.forget()
        self.times.forget()
        self.read_set.clear()
        self._epochs = [Epoch()]
        if not self._snapshots:
            notes = self._forget()
        if self._log.begun:
            self._log.end(committed=committed)
            if self._history is not None:
                self._history.seal(only_long=True)
        return notes

    def _forget(self) -> list[str]:
        """Drop the undo log, and the files that were held for it."""
        self._epochs = [Epoch()]
        self._places.clear()
        self._own.clear()
        holding, self.held = self.held, None
        if holding is None or self._log.file is None:
            return []
        keep_written(holding, self._kept)
        notes = drop_holding(self.files, holding, self._log.file)
        if not notes:
            del self._log.file.head["holding"]
        return notes

    def close(self) -> None:
        """End what is open by rolling it back, and drop what snapshots held."""
        if self._savepoints:
            self.rollback(self._savepoints[0])
        self._snapshots = weakref.WeakSet()
        self._forget()

    # -- snapshots

    def snapshot(self) -> SnapshotPoint:
        if not self._savepoints and not self._snapshots:
            self._forget()
        point = SnapshotPoint(opaque=self.read_set.unsure)
        self._snapshots.add(point)
        return point

    def _check_can_go_to(self, point: SnapshotPoint) -> None:
        if point.opaque or self.read_set.unsure:
            raise SnapshotRestoreError(
                "since that snapshot, or in the call that took it, a tool has changed files by itself, which it knows "
                "nothing of: go back to a step of the history instead"
            )

    def changes_since(self, point: SnapshotPoint) -> Sequence[Change]:
        self._check_can_go_to(point)
        return TypedChanges(self.files, point.before, self._places, self.written).changes

    def restore(self, point: SnapshotPoint) -> None:
        """Go to a state, wherever it is; what others changed is left alone. It is a change as any other, and can be
        rolled back."""
        self._check_can_go_to(point)
        epoch = Epoch()
        for path, before in point.before.items():
            found = self.files.look(path)
            if before is not None and before.is_directory and found is not None and stat.S_ISDIR(found.st_mode):
                before = replace(before, inode=found.st_ino)
            epoch.records[path] = UndoRecord(path, before, [self._own.get(path, before)])
        with self.operation():
            self.read_set.clear()
            report = self.make(epoch, None)
            if report.lost:
                raise SnapshotRestoreError(
                    f"what the snapshot held of {min(report.lost)} was removed from where displaced files wait in the "
                    "root, so it cannot be gone back to: go back to a step of the history instead"
                )

    def make(self, epoch: Epoch, make: Make | None) -> RestoreReport:
        """Make paths what they are in the records, as changes of the open call."""
        report = Restore(self.files, self.renames, self.hold, self.times, log=self, make=make).run([epoch])
        if report.errors:
            raise report.errors[0]
        return report


def keep_conflicts(holding: Holding, report: RestoreReport, directory: str) -> list[str]:
    """Copy what conflicts keep from their paths to where it can be looked at, and what a program has written into a
    file that the call had displaced; where that is, in words."""
    late = {(path, place) for place, path in holding.written().items() if path in report.conflicts}
    notes: list[str] = []
    for path, place in sorted(late.union(report.displaced.items())):
        before = report.displaced.get(path) == place
        what = f"what {path} was before the call" if before else f"what was saved as {path}"
        try:
            kept = holding.keep(place, directory)
        except OSError as error:
            notes.append(f"{what} could not be kept: {error}")
            continue
        if kept is not None:
            notes.append(f"{what} is kept at {kept}: copy it back from there if it is wanted")
    return notes


def keep_written(holding: Holding, directory: str) -> None:
    """Copy what nobody would ever see otherwise to where it can be looked at, and say so in the log."""
    try:
        for place, path in holding.written().items():
            kept = holding.keep(place, directory)
            logger.warning("a program that had %s open wrote into it after a call had replaced it: %s", path, kept)
    except OSError:
        logger.exception("what a program wrote into a file that a call had replaced is lost")
