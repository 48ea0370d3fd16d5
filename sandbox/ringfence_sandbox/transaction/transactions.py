"""The transactions of one workspace on disk: savepoints, the undo log of the open call, its commit and its rollback."""

from __future__ import annotations

import logging
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import filterfalse
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
    noting_failure,
)
from ringfence_sandbox.transaction.hold import Holding
from ringfence_sandbox.transaction.operation import Operation
from ringfence_sandbox.transaction.read_set import stale, written_meanwhile
from ringfence_sandbox.transaction.restore import Make, Restore, RestoreReport
from ringfence_sandbox.transaction.undo_log import RunningOperation, Savepoint, SnapshotPoint, UndoLog
from ringfence_sandbox.transaction.undo_records import Epoch, UndoRecord

if TYPE_CHECKING:
    from ringfence.runtime.receipts import Receipt
    from ringfence_sandbox.disk.call_process import CallProcess
    from ringfence_sandbox.opaque.opaque_calls import OpaqueCalls

logger = logging.getLogger(__name__)


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
        self.undo = UndoLog(files, Renames(can), CallLog(files, log), os.path.dirname(kept))
        self._kept = kept
        self._history = history
        self._new_opaque = opaque
        self._opaque: OpaqueCalls | None = None
        self._compared: tuple[Savepoint, int, TypedChanges] | None = None
        self._calls_opaque = 0
        """The number of the next opaque call."""
        self._places: dict[int, dict[int, str]] = {}
        """Where files of before were when the opaque call with a number began."""

    @property
    def has_changes(self) -> bool:
        start = self.undo.savepoints[0].position if self.undo.savepoints else len(self.undo.epochs)
        return any(not epoch.is_empty for epoch in self.undo.epochs[start:])

    # -- operations

    def operation(self) -> Operation:
        """For a ``with``: all of its changes, or none. Outside of calls it is a transaction of its own.

        Ctrl-C waits for its end: between a system call and the line that remembers what it did is no place for it.
        """
        return Operation(self)

    def begin_operation(self) -> Savepoint | RunningOperation | None:
        """A savepoint of its own outside of calls; None within another operation."""
        if self.undo.running is not None:
            return None
        began = None if self.undo.savepoints else self.begin("", "outside of calls")
        self.undo.running = RunningOperation(slots=0 if self.undo.held is None else self.undo.held.slots)
        return began or self.undo.running

    def end_operation(self, began: Savepoint | RunningOperation | None, *, failed: bool) -> None:
        """Keep what was done since then, or undo it. OSError: it could not be kept, and is undone."""
        if began is None:
            return
        operation, self.undo.running = self.undo.running, None
        assert operation is not None, "it has begun"
        if isinstance(began, RunningOperation):
            if failed:
                self._undo_operation(operation)
            return
        if failed:
            self.rollback(began)
            return
        try:
            if self.undo.log.begun:
                self._sync_directories()
                self.undo.log.commit(None)
        except BaseException:
            self.rollback(began)
            raise
        self._leave(began)
        self._close_call(committed=True)

    def _undo_operation(self, operation: RunningOperation) -> None:
        report = self.undo.undo_operation(operation)
        self._add_conflicts(report.conflicts)
        for note in self._keep(report) if report.conflicts else ():
            logger.warning("a change failed half way, and %s", note)

    # -- transactions

    def begin(self, call_id: str, tool: str, *, opaque: bool = False) -> Savepoint:
        """Remember the state now. OSError: it cannot be stored, as it has to be before an ``opaque`` call."""
        outermost = not self.undo.savepoints
        if outermost:
            if call_id and self._history is not None:
                self._history.begin()
            self.undo.log.label = (call_id, tool)
            if not self.undo.snapshots:
                self._forget()
            if self.undo.held is not None and not self.undo.held.is_in_place:  # removed: the next need makes another
                self.undo.held.close()
                self.undo.held = None
        savepoint = Savepoint(self.undo.position(), outermost, call_id, tool, opaque)
        self.undo.savepoints.append(savepoint)
        if opaque:
            try:
                self._begin_opaque()
            except BaseException:
                self._leave(savepoint)
                if outermost:
                    self._close_call(committed=False)
                raise
        return savepoint

    def _begin_opaque(self) -> None:
        if self._opaque is None:
            self._opaque = self._new_opaque()
        self.undo.find_holding()
        early: ChangedFiles | None = None
        for savepoint in self.undo.savepoints[:-1]:
            if self._opaque_since(savepoint) is None:
                # Also where there are none: another opaque call may have begun here that was rolled back with others.
                compared = self._typed_changes(savepoint)
                savepoint.early = compared.changes
                if compared.changes and savepoint.outermost:
                    early = compared
        number, self._calls_opaque = self._calls_opaque, self._calls_opaque + 1
        before = self._opaque.begin(early, self.undo.epochs[self.undo.savepoints[0].position :], self.undo.held)
        record: Mapping[str, Json] = {"opaque": number, "commit": before.commit}
        self.undo.log.write(record, blob=before.more())
        self.undo.epochs[-1:] = [self.undo.epochs[-1], Epoch(opaque=number), Epoch()]
        self.undo.version += 1
        self._places[number] = self.undo.places.copy()
        self._opaque.begun(number, before)
        self.undo.times.forget()
        self.undo.read_set.left.clear()
        self.undo.read_set.unsure = True
        if self.undo.held is not None:
            self.undo.held.displaced.clear()
        self.undo.written.forget()  # a file may come to have the stamp that another one had

    def _opaque_since(self, savepoint: Savepoint) -> int | None:
        """The index of the first opaque epoch since a savepoint."""
        epochs = self.undo.epochs
        return next((n for n in range(savepoint.position, len(epochs)) if epochs[n].opaque is not None), None)

    def _opaque_number(self, index: int) -> int:
        number = self.undo.epochs[index].opaque
        assert number is not None, "it is an opaque one"
        return number

    def note_process(self, process: CallProcess) -> int:
        """Have the log name a process that recovery is to end; the descriptor that it may stamp. TransactionError
        outside of opaque calls."""
        if self._opaque is None or not self._opaque.any_open:
            raise TransactionError(f"{process.name} can only be noted while an opaque call runs")
        self._opaque.contained = True
        self.undo.log.write({"process": process.to_json()})
        return self._opaque.stamp

    def commit(self, savepoint: Savepoint, receipt: Receipt) -> Step | None:
        if not savepoint.outermost:
            self._leave(savepoint)
            return None
        step = self._step(savepoint, receipt)
        if self.undo.log.begun:
            self._sync_directories()
            if self.power and self._opaque_since(savepoint) is not None:
                sync_filesystem(self.files.root)
            self._check_left(savepoint)
            self.undo.log.commit(step and step.commit)
        self._note_opaque(savepoint)
        self._leave(savepoint)  # the commit point is behind us: from here on nothing fails
        if self._history is not None:
            self._history.ended(step)
        self._close_call(committed=True)
        return step

    def _note_opaque(self, savepoint: Savepoint) -> None:
        first = self._opaque_since(savepoint)
        if self.undo.snapshots and first is not None and self._opaque is not None:
            number = self._opaque_number(first)
            if self._opaque.differs(number, self.undo.version):
                for point in self.undo.snapshots:
                    point.opaque = True

    def _check_left(self, savepoint: Savepoint) -> None:
        """Raises OSError (ESTALE) where somebody has saved over what the call left, or has written into what it has
        displaced, which would be lost and comes back to its place with the rollback."""
        if savepoint.opaque:  # what a program saves during its call is the call's
            return
        looked = self._typed_changes(savepoint).looked if self._opaque_since(savepoint) is None else {}
        for path, state in self.undo.read_set.left.items():
            found = looked.get(path) or self.files.look(path)
            if not self.undo.read_set.is_left(path, state, found):
                raise stale(path)
        if self.undo.held is not None:
            for path in self.undo.held.written().values():
                raise written_meanwhile(path)

    def _step(self, savepoint: Savepoint, receipt: Receipt) -> Step | None:
        changed = None if self._history is None else self.changed_files(savepoint)
        return None if self._history is None or changed is None else self._history.record(changed, receipt)

    def _typed_changes(self, savepoint: Savepoint, *, read: bool = True) -> TypedChanges:
        """What typed calls have changed since a savepoint. It is looked at once."""
        known = self._compared
        if known is not None and known[:2] == (savepoint, self.undo.version):
            return known[2]
        found = TypedChanges(self.files, savepoint.before, self.undo.places, self.undo.written, read=read)
        if read:
            self._compared = savepoint, self.undo.version, found
        return found

    def changed_files(self, savepoint: Savepoint) -> ChangedFiles | None:
        """What has changed since a savepoint, with the bytes; None where nothing has."""
        first = self._opaque_since(savepoint)
        if first is not None and self._opaque is not None:
            number = self._opaque_number(first)
            changed: ChangedFiles = self._opaque.scanned(number, self.undo.version, savepoint.early or ())
        else:
            changed = self._typed_changes(savepoint)
        return changed if changed.changes else None

    def changes_since_savepoint(self, savepoint: Savepoint) -> Sequence[Change]:
        first = self._opaque_since(savepoint)
        if first is None or self._opaque is None:
            return self._typed_changes(savepoint).changes
        changes = self._opaque.changes(self._opaque_number(first), self.undo.version, savepoint.early or ())
        if savepoint.outermost:
            self._opaque.sealed()
        return changes

    def _sync_directories(self) -> None:
        """Have the names that the call gave and took survive a loss of power, if the commit record is to survive it."""
        if not self.power:
            return
        epochs = self.undo.epochs[self.undo.savepoints[0].position :] if self.undo.savepoints else self.undo.epochs
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
        if savepoint not in self.undo.savepoints:
            return CLEAN
        while self.undo.savepoints[-1] is not savepoint:  # inner calls that did not come to an end of their own
            self.undo.savepoints.pop()
        self.undo.running = None
        taken = self._roll_back_opaque(savepoint)
        notes = [*taken.notes, *self._keep_changes(savepoint)]
        report = self._undo_since(savepoint)
        if report.errors:
            raise report.errors[0]
        if self.power and self.undo.log.begun:  # before the next record puts on the disk that it is undone
            sync_filesystem(self.files.root)
        self.undo.read_set.clear()
        self._compared = None
        for point in self.undo.snapshots if taken.remade else ():
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
        epochs, start = self.undo.epochs[savepoint.position :], savepoint.position
        touched = {*savepoint.before, *(path for epoch in epochs for path in epoch.records)}
        for path in filterfalse(is_reserved, touched) if self.undo.snapshots else ():
            found = self.files.look(path)
            is_directory = found is not None and stat.S_ISDIR(found.st_mode)
            state = State.of(found) if found is not None and is_directory else self.undo.own.get(path)
            for point in self.undo.snapshots:  # what was taken within the call is to find what it was then
                point.before.setdefault(path, state)
        first = self.undo.savepoints[0].position

        def note_undone(count: int) -> None:
            """Have neither a second try nor a recovery undo again what is undone: the names may mean other files by
            then."""
            self.undo.epochs[start + count :] = [Epoch()]
            self.undo.log.note(restore.report.to_json(start - first + count))

        self.undo.version += 1
        undo = self.undo
        if undo.held is not None and not undo.held.is_in_place:  # somebody has removed it
            undo.find_holding()
        remake = None if self._history is None else self._history.remake
        restore = Restore(self.files, undo.renames, undo.hold, undo.times, from_history=remake, places=undo.places)
        report = restore.run(epochs, on_undone=note_undone)
        self._remap(report.new_inodes)
        if report.errors:
            savepoint.conflicts |= report.conflicts
        return report

    def _note_restored(self, savepoint: Savepoint, report: RestoreReport) -> None:
        for path in savepoint.before if self.undo.snapshots else ():
            if path not in report.conflicts:
                found = self.files.look(path)
                self.undo.own[path] = None if found is None else State.of(found)

    def _add_conflicts(self, conflicts: set[str]) -> None:
        """Conflicts are those of the calls around, too, should they be rolled back; not where an opaque call has begun
        within them: to there all goes back, whoever changed it."""
        for savepoint in reversed(self.undo.savepoints):
            if not conflicts or self._opaque_since(savepoint) is not None:
                break
            savepoint.conflicts |= conflicts

    def _roll_back_opaque(self, savepoint: Savepoint) -> RestoreReport:
        """Go back to where the first opaque call since a savepoint began, whatever came after."""
        first = self._opaque_since(savepoint)
        if first is None or self._opaque is None or self.undo.log.file is None:
            return RestoreReport()
        self.undo.find_holding()
        call_id, tool = self.undo.log.label
        number = self._opaque_number(first)
        taken = self._opaque.roll_back(
            number, self.undo.version, self.undo.hold, self.undo.log.file.note, tool=tool, call_id=call_id
        )
        self.undo.version += 1
        self.undo.times.forget()
        self.undo.places = self._places[number].copy()
        self._remap(taken.new_inodes)
        self.undo.epochs[first:] = [Epoch()]
        self._opaque.end(number)  # not before: what is interrupted until then is done again
        self.undo.read_set.unsure = self._opaque.any_open
        return taken

    def _remap(self, new_inodes: Mapping[int, int]) -> None:
        """Know files again that had to become other inodes."""
        for epoch in self.undo.epochs:
            epoch.remap(new_inodes)
        for savepoint in self.undo.savepoints:
            for path, state in savepoint.before.items():
                if state is not None and state.inode in new_inodes:
                    savepoint.before[path] = replace(state, inode=new_inodes[state.inode])
        self.undo.places = {new_inodes.get(inode, inode): place for inode, place in self.undo.places.items()}

    def _keep_changes(self, savepoint: Savepoint) -> Sequence[str]:
        """Have the history keep what typed calls have changed since a savepoint, before they are undone."""
        if self._history is None or self.undo.log.file is None or not savepoint.call_id or not savepoint.before:
            return ()
        if all(epoch.is_empty for epoch in self.undo.epochs[savepoint.position :]):
            return ()
        notes: list[str] = []
        with noting_failure(notes):
            known = self._compared
            if known is None or known[:2] != (savepoint, self.undo.version):
                changed = self._typed_changes(savepoint, read=False)
            else:
                changed = known[2]
            if changed.changes:
                begun = self.undo.log.name(savepoint.position - self.undo.savepoints[0].position)
                notes += self._history.rolling_back(changed, RolledBackCall(savepoint.call_id, savepoint.tool, begun))
        return notes

    def _keep(self, report: RestoreReport) -> list[str]:
        return [] if self.undo.held is None else keep_conflicts(self.undo.held, report, self._kept)

    def _leave(self, savepoint: Savepoint) -> None:
        while self.undo.savepoints and self.undo.savepoints[-1] is not savepoint:
            self.undo.savepoints.pop()
        if self.undo.savepoints:
            self.undo.savepoints.pop()
        if savepoint.opaque:  # whatever its program has changed since is its own
            self.undo.read_set.left.clear()
            if self.undo.held is not None:
                self.undo.held.displaced.clear()

    def _close_call(self, *, committed: bool) -> list[str]:
        """The last of an outermost call: drop what nobody needs. Never fails; what is left over is said."""
        notes: list[str] = []
        self.undo.read_set.unsure = False
        if self._opaque is not None:
            if self._opaque.any_open:
                with suppress(OSError):
                    self.undo.find_holding()  # what a program moved from there into the tree is the tree's
            self._opaque.end()
        self._compared = None
        self._places.clear()
        self.undo.written.forget()
        self.undo.times.forget()
        self.undo.read_set.clear()
        self.undo.epochs = [Epoch()]
        if not self.undo.snapshots:
            notes = self._forget()
        if self.undo.log.begun:
            self.undo.log.end(committed=committed)
            if self._history is not None:
                self._history.seal(only_long=True)
        return notes

    def _forget(self) -> list[str]:
        """Drop the undo log, and the files that were held for it."""
        self.undo.epochs = [Epoch()]
        self.undo.places.clear()
        self.undo.own.clear()
        if self.undo.held is None:
            return []
        keep_written(self.undo.held, self._kept)
        return self.undo.held.empty()

    def close(self) -> None:
        """End what is open by rolling it back, and drop what snapshots held."""
        if self.undo.savepoints:
            self.rollback(self.undo.savepoints[0])
        self.undo.snapshots = weakref.WeakSet()
        self._forget()
        self.undo.close()

    # -- snapshots

    def snapshot(self) -> SnapshotPoint:
        if not self.undo.savepoints and not self.undo.snapshots:
            self._forget()
        point = SnapshotPoint(opaque=self.undo.read_set.unsure)
        self.undo.snapshots.add(point)
        return point

    def _check_can_go_to(self, point: SnapshotPoint) -> None:
        if point.opaque or self.undo.read_set.unsure:
            raise SnapshotRestoreError(
                "since that snapshot, or in the call that took it, a tool has changed files by itself, which it knows "
                "nothing of: go back to a step of the history instead"
            )

    def changes_since(self, point: SnapshotPoint) -> Sequence[Change]:
        self._check_can_go_to(point)
        return TypedChanges(self.files, point.before, self.undo.places, self.undo.written).changes

    def restore(self, point: SnapshotPoint) -> None:
        """Go to a state, wherever it is; what others changed is left alone. It is a change as any other, and can be
        rolled back."""
        self._check_can_go_to(point)
        epoch = Epoch()
        for path, before in point.before.items():
            found = self.files.look(path)
            if before is not None and before.is_directory and found is not None and stat.S_ISDIR(found.st_mode):
                before = replace(before, inode=found.st_ino)
            epoch.records[path] = UndoRecord(path, before, [self.undo.own.get(path, before)])
        with self.operation():
            self.undo.read_set.clear()
            report = self.make(epoch, None)
            if report.lost:
                raise SnapshotRestoreError(
                    f"what the snapshot held of {min(report.lost)} was removed from where displaced files wait in the "
                    "root, so it cannot be gone back to: go back to a step of the history instead"
                )

    def make(self, epoch: Epoch, make: Make | None) -> RestoreReport:
        """Make paths what they are in the records, as changes of the open call."""
        undo = self.undo
        report = Restore(self.files, undo.renames, undo.hold, undo.times, log=undo, make=make, places=undo.places).run(
            [epoch]
        )
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
