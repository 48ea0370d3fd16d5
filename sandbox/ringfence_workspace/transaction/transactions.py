"""The transactions of one workspace on disk: savepoints, the undo log of the open call, its commit and its rollback."""

from __future__ import annotations

import errno
import logging
import os
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, filterfalse
from typing import TYPE_CHECKING

from ringfence.errors import SnapshotRestoreError, TransactionError
from ringfence.participants import CLEAN, Change, RollbackReport, Step
from ringfence.runtime.interrupts import Interrupts
from ringfence_workspace.history.log import Log
from ringfence_workspace.transaction.aborted_calls import RolledBackCall, noting_failure
from ringfence_workspace.transaction.call_log import CallLog
from ringfence_workspace.transaction.changes import ScannedFiles, TypedChanges
from ringfence_workspace.transaction.opaque_states import MOST_LISTED
from ringfence_workspace.transaction.read_set import stale, written_meanwhile
from ringfence_workspace.transaction.records import Epoch, UndoRecord
from ringfence_workspace.transaction.restore import Make, Restore, RestoreReport, is_full
from ringfence_workspace.transaction.undo_log import RunningOperation, Savepoint, SnapshotPoint, UndoLog
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import Abilities, Renames, failpoint, sync_filesystem
from ringfence_workspace.tree.state import Json, State

if TYPE_CHECKING:
    from types import TracebackType

    from ringfence.receipts import Receipt
    from ringfence_workspace.call_process import CallProcess
    from ringfence_workspace.transaction.opaque_calls import OpaqueCalls
    from ringfence_workspace.transaction.opaque_states import Base
    from ringfence_workspace.transaction.step_history import StepHistory

logger = logging.getLogger(__name__)

_ELSEWHERE = (
    "cannot be changed, since that could not be rolled back: it is on another filesystem than the workspace's root "
    "(mounted in it, or a layer of an overlay)"
)
_FULL = "the workspace's filesystem is full, and what a call replaces stays there until it ends: make room"
_GONE = (
    "the directory in the root in which displaced files wait ({}) was removed during the call, which cannot be taken "
    "back without it: let the call fail, and find what has removed it"
)


class Transactions:
    """Of one opened workspace. Its callers hold the filesystem's lock."""

    def __init__(
        self,
        files: Confined,
        can: Abilities,
        log: Log | None,
        *,
        store: str,
        history: StepHistory | None,
        opaque: Callable[[], OpaqueCalls],
        power: bool,
    ) -> None:
        """``log`` and ``history`` are None where nothing is to be changed. ``store`` is the directory of the
        store. ``opaque`` gives what opaque calls need, when the first of them begins."""
        self.files = files
        self.power = power
        self.undo = UndoLog(files, Renames(can), CallLog(files, log), store)
        self._history = history
        self._new_opaque = opaque
        self._opaque: OpaqueCalls | None = None
        self._compared: tuple[Savepoint, int, TypedChanges] | None = None

    @property
    def has_changes(self) -> bool:
        if not self.undo.savepoints:
            return False
        outermost = self.undo.savepoints[0]
        return outermost.base is not None or any(not one.is_empty for one in self.undo.epochs[outermost.position :])

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
        """Remember the state now.

        Raises:
            OSError: it cannot be stored, as it has to be before an ``opaque`` call.
            TransactionError: the call is opaque, and the one that makes it is not.
        """
        outermost = not self.undo.savepoints
        if opaque and not outermost and not self.undo.savepoints[-1].opaque:
            around = self.undo.savepoints[-1].tool
            raise TransactionError(
                f"{tool} runs programs, and {around}, which calls it, is not declared opaque: no scan is made around "
                f"that. Declare {around} opaque, too: Tool(..., opaque=True)"
            )
        if outermost:
            if call_id and self._history is not None:
                self._history.begin()
            self.undo.log.label = (call_id, tool)
            if not self.undo.snapshots:
                self._forget()
            if self.undo.held is not None and not self.undo.held.is_in_place:  # removed: the next need makes another
                self.undo.held.close()
                self.files.reserve(self.undo.held.name, ends=True)
                self.undo.held = None
        savepoint = Savepoint(self.undo.position(), outermost, call_id, tool, opaque)
        self.undo.savepoints.append(savepoint)
        if opaque:
            try:
                self._begin_opaque(savepoint)
            except BaseException:
                self._leave(savepoint)
                if outermost:
                    self._close_call(committed=False)
                raise
        return savepoint

    def _begin_opaque(self, savepoint: Savepoint) -> None:
        """Store the tree, which the call goes back to from now on."""
        if self._opaque is None:
            self._opaque = self._new_opaque()
        undo = self.undo
        undo.find_holding()
        base = self._opaque.begin(undo.hold, outermost=savepoint.outermost)
        if savepoint.outermost:
            undo.log.write({"opaque": base.before.commit}, blob=base.before.more())
        savepoint.base, savepoint.position = base, 0
        undo.epochs = [Epoch()]
        undo.version += 1
        self._opaque.begun(base)
        undo.times.forget()
        undo.read_set.left.clear()
        undo.read_set.unsure = True
        if undo.held is not None:
            undo.held.displaced.clear()
        undo.written.forget()  # a file may come to have the stamp that another one had

    def look(self, paths: tuple[str, ...] | None) -> bytes:
        """Have the newest commit have the tree as it is, or these paths of it. Return what no commit has."""
        if self.has_changes:
            raise TransactionError("a look is made outside of calls that have changed files")
        if self._opaque is None:
            self._opaque = self._new_opaque()
        return self._opaque.look(paths)

    def adopt(self, more: bytes, paths: tuple[str, ...] | None) -> None:
        """Have the open call be one that somebody else ran: its changes are what differs from the newest commit. Until
        it is to be taken back, nothing is written that a recovery would act on.

        Raises:
            TransactionError: it is a part of another call, or has changed files itself.
        """
        if len(self.undo.savepoints) != 1 or self.has_changes:
            raise TransactionError("a call of somebody else's is adopted in a call of its own")
        if self._opaque is None:
            self._opaque = self._new_opaque()
        savepoint = self.undo.savepoints[0]
        savepoint.base, savepoint.opaque = self._opaque.adopt(more, paths), True

    def deny_adopted(self) -> None:
        """Have the rollback of the adopted call take back what somebody else's call did. OSError: it cannot begin."""
        base = self.undo.savepoints[0].base
        assert base is not None
        assert self._opaque is not None
        self.undo.find_holding()
        self._opaque.take_back(base)
        self.undo.log.write({"opaque": base.before.commit}, blob=base.before.more())
        self._opaque.begun(base)
        base.is_denied = True

    def note_process(self, process: CallProcess) -> int:
        """Have the log name a process that recovery is to end; the descriptor that it may stamp. TransactionError
        outside of opaque calls."""
        if self._opaque is None or not self._opaque.any_open:
            raise TransactionError(f"{process.name} can only be noted while an opaque call runs")
        self._opaque.contained |= not process.call_id  # a command on this machine has its caller's rights
        self.undo.log.write({"process": process.to_json()})
        return self._opaque.stamp

    def copy_hidden(self) -> None:
        """Have a rollback of the open opaque call restore hidden files. OSError: they cannot be copied."""
        if self._opaque is not None and self._opaque.any_open:
            self._opaque.copy_hidden(self.undo.log.label[0])

    def refuse_rollback(self) -> Sequence[str]:
        """Have the rollback of the open opaque call, if it is outermost, leave everything as it is where it could not
        keep all that it removes. The paths that it could not keep. OSError: the tree cannot be read."""
        savepoint = self.undo.savepoints[-1]
        if self._opaque is None or savepoint.base is None or not savepoint.outermost:
            return ()
        self.undo.find_holding()
        paths = self._opaque.unkept(savepoint.base, self.undo.version, self.undo.hold)
        if paths:
            more = f" and {len(paths) - MOST_LISTED} more" if len(paths) > MOST_LISTED else ""
            savepoint.base.left_note = (
                f"not rolled back, since no copy could be kept of {', '.join(paths[:MOST_LISTED])}{more}"
            )
        return paths

    def commit(self, savepoint: Savepoint, receipt: Receipt) -> Step | None:
        if not savepoint.outermost:
            self._leave(savepoint)
            return None
        step = self._step(savepoint, receipt)
        if step is not None and savepoint.base is not None and savepoint.base.before.adopted:
            assert self._history is not None
            self._history.publish()
        if self.undo.log.begun:
            self._sync_directories()
            if self.power and savepoint.base is not None:
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
        base = savepoint.base
        if self._opaque is not None and base is not None and self._opaque.differs(base, self.undo.version):
            for point in self.undo.snapshots:
                point.opaque = True

    def _check_left(self, savepoint: Savepoint) -> None:
        """Raises OSError (ESTALE) where somebody has saved over what the call left, or has written into what it has
        displaced, which would be lost and comes back to its place with the rollback."""
        if savepoint.opaque:  # what a program saves during its call is the call's
            return
        looked = self._typed_changes(savepoint).looked if savepoint.base is None else {}
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
        found = TypedChanges(self.files, savepoint.before, self.undo.held, self.undo.written, read=read)
        if read:
            self._compared = savepoint, self.undo.version, found
        return found

    def changed_files(self, savepoint: Savepoint) -> TypedChanges | ScannedFiles | None:
        """What has changed since a savepoint, with the bytes; None where nothing has."""
        if savepoint.base is not None and self._opaque is not None:
            changed: TypedChanges | ScannedFiles = self._opaque.scanned(savepoint.base, self.undo.version)
        else:
            changed = self._typed_changes(savepoint)
        return changed if changed.changes else None

    def changes_since_savepoint(self, savepoint: Savepoint) -> Sequence[Change]:
        if savepoint.base is None or self._opaque is None:
            return self._typed_changes(savepoint).changes
        changes = self._opaque.changes(savepoint.base, self.undo.version)
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
        if savepoint.base is None:
            notes = [*self._keep_changes(savepoint)]
            report = self._undo_since(savepoint)
            if report.errors:
                raise report.errors[0]
            if self.power and self.undo.log.begun:  # before the next record puts on the disk that it is undone
                sync_filesystem(self.files.root)
            self._note_restored(savepoint, report)
        elif savepoint.base.stays:
            notes, report = [*filter(None, [savepoint.base.left_note])], RestoreReport()
        else:
            notes, report = list[str](), self._go_to_base(savepoint, savepoint.base)
        self.undo.read_set.clear()
        self._compared = None
        if not report.moved:  # a later change of a path is the first one again: what is there may be somebody else's
            for states, path in savepoint.first:
                states.pop(path, None)
        if savepoint.outermost and self._history is not None:
            self._history.ended(None)
        self._leave(savepoint)
        notes += [*report.notes, *self._keep(report)]
        conflicts = report.conflicts | savepoint.conflicts
        self._add_conflicts(conflicts)
        if savepoint.outermost:
            notes += self._close_call(committed=False)
        return RollbackReport(tuple(sorted(conflicts)), tuple(notes)) if conflicts or notes else CLEAN

    def _undo_since(self, savepoint: Savepoint) -> RestoreReport:
        """Undo the log back to a savepoint."""
        epochs, start = self.undo.epochs[savepoint.position :], savepoint.position
        touched = {*savepoint.before, *chain(*(epoch.records for epoch in epochs))} if self.undo.snapshots else ()
        for path in filterfalse(self.files.is_reserved, touched):
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
        restore = Restore(self.files, undo.renames, undo.hold, undo.times, from_history=remake)
        report = restore.run(epochs, on_undone=note_undone)
        if report.errors:
            savepoint.conflicts |= report.conflicts
        return report

    def _note_restored(self, savepoint: Savepoint, report: RestoreReport) -> None:
        for path in savepoint.before if self.undo.snapshots or not savepoint.outermost else ():
            if path not in report.conflicts:
                self.undo.found_again(path)

    def _add_conflicts(self, conflicts: set[str]) -> None:
        """Conflicts are those of the calls around, too, should they be rolled back; not of opaque ones: all of it goes
        back, whoever changed it."""
        for savepoint in reversed(self.undo.savepoints):
            if not conflicts or savepoint.base is not None:
                break
            savepoint.conflicts |= conflicts

    def _go_to_base(self, savepoint: Savepoint, base: Base) -> RestoreReport:
        """Make the tree what it was when an opaque call began, whoever changed it since."""
        assert self._opaque is not None, "one has begun"
        undo = self.undo
        undo.find_holding()
        call_id, tool = undo.log.label
        # A recovery goes back to where the outermost call began, and is told of no other way back.
        note = undo.log.note if savepoint.outermost else _no_note
        report = self._opaque.roll_back(base, undo.version, undo.hold, note, tool=tool, call_id=call_id)
        undo.version += 1
        undo.times.forget()
        undo.epochs = [Epoch()]
        for point in undo.snapshots if report.put_back else ():
            point.opaque = True
        if savepoint.outermost:
            self._opaque.end()  # not before: what is interrupted until then is done again
        return report

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
        if self.undo.held is None or self._history is None:
            return []
        return self._history.keeper.keep_conflicts(self.undo.held, report)

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
        self.undo.own.clear()
        if self.undo.held is None or self._history is None:
            return []
        self._history.keeper.keep_written(self.undo.held)
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
        return TypedChanges(self.files, point.before, self.undo.held, self.undo.written).changes

    def restore(self, point: SnapshotPoint) -> None:
        """Go to a state, wherever it is; what others changed is left alone. It is a change as any other, and can be
        rolled back."""
        self._check_can_go_to(point)
        epoch = Epoch()
        for path, before in point.before.items():
            found = self.files.look(path)
            if before is not None and before.is_directory and found is not None and stat.S_ISDIR(found.st_mode):
                before = before._replace(inode=found.st_ino)
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
        report = Restore(self.files, undo.renames, undo.hold, undo.times, log=undo, make=make).run([epoch])
        if report.errors:
            raise report.errors[0]
        return report


class Operation:
    """One operation on a workspace. (On the way of every file: no generator.)"""

    __slots__ = ("_began", "_held", "_transactions")

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def __enter__(self) -> None:
        self._held = Interrupts()
        try:
            self._began = self._transactions.begin_operation()
        except BaseException:
            self._held.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._transactions.end_operation(self._began, failed=error is not None)
            if isinstance(error, OSError) and error.errno == errno.EXDEV:
                raise OSError(errno.EXDEV, _ELSEWHERE, error.filename) from error
            if isinstance(error, FileNotFoundError) and (hold := self._transactions.undo.held) and not hold.is_in_place:
                raise OSError(errno.ESTALE, _GONE.format(hold.name)) from error
            if is_full(error):
                raise OSError(error.errno, f"{error.strerror}: {_FULL}") from error
        finally:
            self._held.remove()


def _no_note(record: Mapping[str, Json]) -> None:
    pass
