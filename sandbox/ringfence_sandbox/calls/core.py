"""What all handles of one workspace on disk share: the open call, its deeds, and the states that snapshots hold."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ringfence.errors import SnapshotRestoreError, TransactionError
from ringfence.participants import CLEAN, Change, RollbackReport, Step
from ringfence_sandbox.calls.call_changes import CallChanges
from ringfence_sandbox.calls.call_journal import CallJournal
from ringfence_sandbox.calls.deed_log import DeedLog
from ringfence_sandbox.calls.deed_rollback import Hold, RolledBack, Undone, undo_deeds
from ringfence_sandbox.calls.deed_runner import DeedRunner
from ringfence_sandbox.calls.history import ChangedFiles, History, Recorded, RolledBackCall, noting_failure
from ringfence_sandbox.calls.holding import Holding
from ringfence_sandbox.calls.holding_cleanup import (
    drop_holding,
    keep_displaced,
    keep_written_into,
    saved_after,
    saved_between,
    written_into,
)
from ringfence_sandbox.calls.journal import Journal
from ringfence_sandbox.calls.operation import Operation
from ringfence_sandbox.calls.seen import Seen, stale, written_meanwhile
from ringfence_sandbox.calls.snapshot_restore import SnapshotRestore
from ringfence_sandbox.calls.states import Mark, State, Token, line, since_opaque, way
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.kernel import Abilities, failpoint, sync_filesystem
from ringfence_sandbox.disk.records import Deed, Identity

if TYPE_CHECKING:
    from ringfence.runtime.receipts import Receipt
    from ringfence_sandbox.disk.call_process import CallProcess
    from ringfence_sandbox.opaque.opaque_calls import OpaqueCalls

logger = logging.getLogger(__name__)


class Core:
    """One opened workspace. Its callers hold the filesystem's lock."""

    def __init__(
        self,
        files: Confined,
        can: Abilities,
        journal: Journal | None,
        *,
        kept: str,
        history: History | None,
        opaque: Callable[[], OpaqueCalls],
        power: bool,
    ) -> None:
        """``opaque`` gives what opaque calls need, when the first of them begins."""
        self.files = files
        self.power = power
        self.runner = DeedRunner(files, can)
        self.runner.times.changed = self._keep_times
        self.seen = Seen(files)
        self._journal = CallJournal(files, journal, power=power)
        self.deed_log = DeedLog(files, self._journal, self.runner.times)
        self._kept = kept
        self._history = history
        self._new_opaque = opaque
        self._opaque: OpaqueCalls | None = None
        self._early: dict[Mark, Sequence[Change]] = {}
        """Of marks that an opaque call came after, what had changed until then."""
        self._deeds: list[Deed] = []
        self.changed = CallChanges(files, self.runner, self._deeds)
        self._until_opaque = 0
        """How many there were when the last opaque call ended."""
        self._met: dict[Mark, set[str]] = {}
        """Where somebody else's was in the way of what was taken back within a call."""
        self._marks: list[Mark] = []
        self._tip = State(None)
        self._left_over = False
        """Whether a holding directory could not be dropped: the next opening has to find its name in the journal."""
        self._live: weakref.WeakSet[Token] = weakref.WeakSet()
        self._after_opaque: list[tuple[int, State]] = []
        """What snapshots have taken after an opaque call within the one that is open, and how many deeds there were."""

    # -- deeds

    @property
    def in_call(self) -> bool:
        return bool(self._marks)

    @property
    def has_deeds(self) -> bool:
        return bool(self._deeds)

    @property
    def holding(self) -> Holding:
        """The holding directory, made if there is none."""
        if self._opaque is not None and self._opaque.any_open:
            self._find_holding()
        if self.runner.holding is None:
            # Without a wait for the disk: until the next record there is nothing in it that anybody could miss.
            self.runner.holding = Holding.noted(
                self.files,
                lambda record: self._journal.write(record, wait=False),
                self._journal.store,
            )
        return self.runner.holding

    def perform(self, deed: Deed, there: tuple[int, str] | None = None, *, on_tip: bool = True) -> None:
        """Note a deed, then do it. OSError: it was not done. ``there`` is its directory and the name in it, if that is
        open already; ``on_tip`` is whether the state now has come to be by it."""
        deeds = self.deed_log.note_next(deed, None if there is None else there[0])
        self._deeds += deeds
        try:
            self.runner.do(deed, there)
        except OSError:
            if self._deeds[-1] is deed:
                self._deeds.pop()
                self._journal.note_undone([deed])
            deeds.pop()
            raise
        finally:
            if on_tip:
                self._tip.deeds += deeds
        if deed.kind in ("move", "take", "put"):
            self.deed_log.touched.clear()  # a directory may have another name now
        self.seen.note_deed(deed)

    def note_own(self, place: str, deed: Deed) -> None:
        """A deed has given the path a file of the call's own."""
        if self.in_call:
            self.seen.note_own(place, deed.new)

    def set_times(self, place: str, found: os.stat_result, mtime_ns: int) -> None:
        """Give a directory that is ``found`` at a place another time of its last change."""
        times = (found.st_atime_ns, found.st_mtime_ns)
        self.perform(Deed("times", place, new=Identity.of(found), atime_ns=times[0], mtime_ns=times[1]))
        self.runner.set_times(place, times[0], mtime_ns, Identity.of(found))

    def announce(self, deeds: Sequence[Deed]) -> None:
        """Write down deeds that will be done next and in this order, with one wait for the disk for all of them."""
        times = self.deed_log.announce(deeds)
        self._deeds += times
        self._tip.deeds += times

    def _keep_times(self, found: os.stat_result) -> None:
        """Have a directory that somebody else has changed during the call keep the time of that."""
        for deed in since_opaque(self._deeds):
            if deed.kind == "times" and deed.new is not None and deed.new.inode == found.st_ino:
                deed.atime_ns, deed.mtime_ns = found.st_atime_ns, found.st_mtime_ns
                if self._journal.file is not None:
                    self._journal.file.note(deed.to_json())

    # -- transactions

    def operation(self) -> Operation:
        """For a ``with``: all of its deeds, or none. Outside of calls it is a transaction of its own.

        Ctrl-C waits for its end: between a system call and the line that remembers what it did is no place for it.
        """
        return Operation(self)

    def begin_operation(self) -> Mark | tuple[int, int, int]:
        """Where it began: a mark of its own, or within a call how much has been done and held before."""
        if not self._marks:
            return self.begin("", "outside of calls")
        holding = self.runner.holding
        return len(self._deeds), len(self._tip.deeds), 0 if holding is None else holding.slots

    def end_operation(self, began: Mark | tuple[int, int, int], *, failed: bool) -> None:
        """Keep what was done since then, or take it back. OSError: it could not be kept, and is taken back."""
        if not isinstance(began, Mark):
            if failed:
                self._take_back_operation(*began)
            return
        if failed:
            self.rollback(began)
            return
        try:
            if self._journal.begun:
                self._sync_directories()
                self._journal.commit(None)
        except BaseException:
            self.rollback(began)
            raise
        self._leave(began)
        self._close_call(committed=True)

    def _take_back_operation(self, deeds_before: int, tip_before: int, slots_before: int) -> None:
        deeds = self._deeds[deeds_before:]
        undone = self._undo(deeds_before)
        if self.runner.holding is not None and not (undone.conflicts or undone.errors):
            self.runner.holding.discard(slots_before)
        if undone.conflicts:
            self._meet(undone.conflicts)
            for note in self._keep(undone, deeds):
                logger.warning("a change failed half way, and %s", note)
        del self._tip.deeds[tip_before:]
        self.seen.forget_vacated()

    def begin(self, call_id: str, tool: str, *, opaque: bool = False) -> Mark:
        """Remember the state now. OSError: it cannot be stored, as it has to be before an ``opaque`` call."""
        outermost = not self._marks
        if outermost:
            self._journal.label = (call_id, tool)
            if not self._live and self._tip.parent is not None:
                self._forget()
            if self.runner.holding is not None and self.runner.holding.is_gone:
                self._find_holding()
        mark = Mark(len(self._deeds), self._freeze(), outermost, call_id, tool, opaque)
        self._marks.append(mark)
        if opaque:
            try:
                self._begin_opaque()
            except BaseException:
                self._leave(mark)
                if outermost:
                    self._close_call(committed=False)
                raise
        return mark

    def _begin_opaque(self) -> None:
        if self._opaque is None:
            self._opaque = self._new_opaque()
        self._find_holding()
        self.deed_log.give_up_announced()
        early = None
        for mark in self._marks[:-1]:
            if self._opaque_since(mark) is None:
                # Also where there are none: another opaque call may have begun here that was taken back with others.
                compared = self.changed.since(mark)
                self._early[mark] = compared.changes if compared is not None else ()
                if compared is not None and compared.changes and mark.outermost:
                    early = self.changed.for_history(compared)
        before = self._opaque.begin(early, self._deeds, self.runner.holding)
        deed = Deed("opaque", "", seq=self.deed_log.next_seq(), commit=before.commit)
        self._journal.write(deed.to_json(), blob=before.more())
        self._deeds.append(deed)
        self._opaque.begun(deed, before)
        self.runner.times.forget()
        self.seen.unsure = True
        self.changed.written.forget()  # a file may come to have the stamp that another one had

    def _opaque_since(self, mark: Mark) -> int | None:
        """The number of the first opaque deed since a mark."""
        if self._opaque is None:
            return None
        return next((n for n in range(mark.deeds, len(self._deeds)) if self._deeds[n].kind == "opaque"), None)

    def _find_holding(self) -> None:
        """A command may have taken the holding directory away; what deeds held in it comes from the store."""
        if self.runner.holding is not None:
            self.runner.holding.find_again()

    def note_process(self, process: CallProcess) -> int:
        """Have the journal name a process that recovery is to end; the descriptor that it may stamp. TransactionError
        outside of opaque calls."""
        if self._opaque is None or not self._opaque.any_open:
            raise TransactionError(f"{process.name} can only be noted while an opaque call runs")
        self._opaque.contained = True
        self._journal.write({"process": process.to_json()})
        return self._opaque.stamp

    def _freeze(self) -> State:
        """The state now, for ever; the next deeds lead on from it."""
        self.deed_log.touched.clear()
        if not self._tip.deeds and self._tip.parent is not None:
            return self._tip.parent
        state = self._tip
        self._tip = State(state)
        return state

    def commit(self, mark: Mark, receipt: Receipt) -> Step | None:
        if not mark.outermost:
            self._note_opaque(mark)
            self._leave(mark)
            self._freeze()
            return None
        recorded = self._recorded(mark, receipt) if self._history is not None else None
        if self._journal.begun:
            self._sync_directories()
            if self.power and self._opaque_since(mark) is not None:
                sync_filesystem(self.files.root)
            self._check_displaced(mark)
            self._journal.commit(recorded)
        self._note_opaque(mark)
        self._leave(mark)  # the commit point is behind us: from here on nothing fails
        if recorded is not None and self._history is not None:
            self._history.committed(recorded)
        elif self._deeds and self._history is not None:
            self._history.ended_without_step()
        self._close_call(committed=True)
        return None if recorded is None else recorded.step

    def _note_opaque(self, mark: Mark) -> None:
        """From the states before an opaque call no way leads to those after it: its deed does not say what it did."""
        first = self._opaque_since(mark)
        if self._live and first is not None and self._opaque is not None and self._opaque.differs(self._deeds[first:]):
            self._tip.opaque = True
            self._tip = State(self._tip)

    def _check_displaced(self, mark: Mark) -> None:
        """Raises OSError (ESTALE) where the call has displaced what somebody saved during it, which would be lost and
        comes back to its place with the rollback, or where somebody has saved over what the call left."""
        deeds = self._deeds[self._until_opaque :]
        if not deeds or self._marks[-1].opaque:  # what a program saves during its call is the call's
            return
        # For the history, the same has been gone back over, if that is all of them.
        compared = self.changed.known_since(mark) if len(deeds) == len(self._deeds) else None
        path = saved_after(deeds, compared.differences) if compared is not None else None
        if self.runner.holding is not None and path is None:
            for path in written_into(self.runner.holding, deeds).values():
                raise written_meanwhile(path)
            differences = self.changed.over(reversed(deeds)) if compared is None else compared.differences
            path = saved_between(deeds, differences)
        if path is not None:
            raise stale(path)

    def _recorded(self, mark: Mark, receipt: Receipt) -> Recorded | None:
        assert self._history is not None
        changed = self.changed_files(mark)
        return None if changed is None else self._history.record(changed, receipt)

    def changed_files(self, mark: Mark) -> ChangedFiles | None:
        """What has changed since a mark, with the bytes; None where nothing has."""
        first = self._opaque_since(mark)
        if first is not None and self._opaque is not None:
            scanned = self._opaque.scanned(self._deeds[first:], self._early.get(mark, ()))
            return scanned if scanned.changes else None
        compared = self.changed.since(mark)
        return self.changed.for_history(compared) if compared is not None and compared.changes else None

    def _sync_directories(self) -> None:
        """Have the names that deeds gave and took survive a loss of power, if the commit record is to survive it."""
        if not self.power:
            return
        for path in {place.rpartition("/")[0] for deed in self._deeds for place in deed.places()}:
            with suppress(OSError):
                descriptor = self.files.open_directory(path)
                try:
                    failpoint("fsync directory")
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def rollback(self, mark: Mark) -> RollbackReport:
        """Raises OSError where something could not be brought back; it may be tried again."""
        if mark not in self._marks:
            return CLEAN
        while self._marks[-1] is not mark:  # inner calls that did not come to an end of their own
            self._marks.pop()
        self.seen.clear()
        taken = self._take_back(mark)
        notes = [*taken.notes, *self._keep_taken(mark)]
        deeds = self._deeds[mark.deeds :]
        undone = self._undo(mark.deeds)
        if undone.errors:
            raise undone.errors[0]
        self.deed_log.touched.clear()
        self._tip = State(State(mark.state, opaque=True) if taken.remade and self._live else mark.state)
        if not self._deeds and self._history is not None:
            self._history.ended_without_step()
        self._leave(mark)
        undone.displaced.update(taken.displaced)
        notes += [*self.runner.notes, *self._keep(undone, deeds)]
        conflicts = taken.conflicts | undone.conflicts | self._met.pop(mark, set())
        self.runner.notes.clear()
        self._meet(conflicts)
        if mark.outermost:
            notes += self._close_call(committed=False)
        return RollbackReport(tuple(sorted(conflicts)), tuple(notes)) if conflicts or notes else CLEAN

    def _meet(self, conflicts: set[str]) -> None:
        """Conflicts are those of the calls around, too, should they be taken back; not where an opaque call has begun
        within them: to there all goes back, whoever changed it."""
        for mark in reversed(self._marks):
            if not conflicts or self._opaque_since(mark) is not None:
                break
            self._met.setdefault(mark, set()).update(conflicts)

    def _take_back(self, mark: Mark) -> RolledBack:
        """Go back to where the first opaque call since a mark began, whatever deeds came after."""
        first = self._opaque_since(mark)
        if first is None or self._opaque is None or self._journal.file is None:
            return RolledBack()
        self.deed_log.give_up_announced()
        self._find_holding()
        hold = Hold(self.runner.holding, lambda: self.holding)
        call_id, tool = self._journal.label
        taken = self._opaque.take_back(self._deeds[first:], hold, self._journal.file.note, tool=tool, call_id=call_id)
        del self._deeds[first:]
        for number, state in self._after_opaque:
            if number > first and state not in line(mark.state):
                state.opaque = True  # what its deeds had made is removed with what the program had, and held nowhere
        self.runner.times.forget()
        taken.settle(self._deeds)
        self.seen.unsure = self._opaque.any_open
        return taken

    def _keep_taken(self, mark: Mark) -> Sequence[str]:
        """Have the history keep what the deeds since a mark have changed, before they are undone."""
        if self._history is None or self._journal.file is None or not mark.call_id or len(self._deeds) == mark.deeds:
            return ()
        notes: list[str] = []
        with noting_failure(notes):
            compared = self.changed.known_since(mark) or self.changed.unread_since(mark)
            if compared.changes:
                call = RolledBackCall(mark.call_id, mark.tool, self._journal.file.named(self._deeds[mark.deeds].seq))
                notes += self._history.rolling_back(self.changed.for_history(compared), call)
        return notes

    def _undo(self, down_to: int) -> Undone:
        self.deed_log.give_up_announced()
        self.deed_log.touched.clear()
        self.changed.look_again()
        if self._opaque is not None and len(self._deeds) > down_to:
            self._opaque.look_again()
        return undo_deeds(self.runner, self._deeds, down_to, self._journal.note_undone)

    def _keep(self, undone: Undone, deeds: Sequence[Deed]) -> list[str]:
        """Bring what a conflict keeps from its path to where it can be looked at."""
        return keep_displaced(self.runner.holding, undone, deeds, self._kept)

    def _leave(self, mark: Mark) -> None:
        while self._marks and self._marks[-1] is not mark:
            self._marks.pop()
        if self._marks:
            self._marks.pop()
        self._until_opaque = len(self._deeds) if mark.opaque else min(self._until_opaque, len(self._deeds))

    def _close_call(self, *, committed: bool) -> list[str]:
        """The last of an outermost call: drop what nobody needs. Never fails; what is left over is said."""
        notes: list[str] = []
        self.deed_log.give_up_announced()
        self._deeds.clear()
        self._met.clear()
        self._until_opaque = 0
        self._early.clear()
        self._after_opaque.clear()
        self.seen.unsure = False
        if self._opaque is not None:
            if self._opaque.any_open:
                with suppress(OSError):
                    self._find_holding()  # what a program moved from there into the tree is the tree's
            self._opaque.end()
        self.changed.forget()
        self.deed_log.touched.clear()
        self.runner.times.forget()
        self.seen.clear()
        if not self._live:
            notes = self._forget()
        if self._journal.begun and self._journal.end(committed=committed):
            self._reset_journal(again=True)
        return notes

    def _forget(self) -> list[str]:
        """Drop all states but the one now, and the files that were held for them."""
        tip, self._tip = self._tip, State(None)
        holding, self.runner.holding = self.runner.holding, None
        self.runner.swapped.clear()  # the next one's slots count anew
        if holding is None or self._journal.file is None:
            return []
        keep_written_into(holding, [deed for state in reversed([*line(tip)]) for deed in state.deeds], self._kept)
        notes = drop_holding(self.files, holding, self._journal.file)
        self._left_over = self._left_over or bool(notes)
        return notes

    def _reset_journal(self, *, again: bool = False) -> None:
        """Start the journal anew, unless it is still needed."""
        journal = self._journal.file
        if journal is None or self.runner.holding is not None or self._left_over:
            return
        if self._history.sealed() if self._history is not None else not journal.keeps_steps:
            self._journal.reset(again=again)

    def close(self) -> None:
        """End what is open by rolling it back, and drop what snapshots held."""
        if self._marks:
            self.rollback(self._marks[0])
        self._live = weakref.WeakSet()
        self._forget()
        self._reset_journal()

    # -- what differs

    def changes_since_mark(self, mark: Mark) -> list[Change]:
        first = self._opaque_since(mark)
        if first is not None and self._opaque is not None:
            changes = self._opaque.changes(self._deeds[first:], self._early.get(mark, ()))
            if mark.outermost:
                self._opaque.sealed()
            return changes
        compared = self.changed.since(mark)
        return compared.changes if compared is not None else []

    # -- snapshots

    def snapshot(self) -> tuple[State, Token]:
        if not self._marks and not self._live:
            self._forget()
        token = Token()
        state = self._freeze()
        if any(mark.opaque for mark in self._marks):  # what its program has done up to now is not among the deeds
            state = State(state, opaque=True)
        elif self._marks:
            SnapshotRestore(self).note_times(state, self._marks[0].state)
            if self._opaque_since(self._marks[0]) is not None:
                self._after_opaque.append((len(self._deeds), state))
        self._live.add(token)
        return state, token

    def _way(self, state: State) -> tuple[list[State], list[State]]:
        up, down = way(self._tip, state)
        if any(one.opaque for one in (*self._marks, *up, *down)):
            raise SnapshotRestoreError(
                "since that snapshot, or in the call that took it, a tool has changed files by itself, which it knows "
                "nothing of: go back to a step of the history instead"
            )
        return up, down

    def changes_since(self, state: State) -> Sequence[Change]:
        up, down = self._way(state)
        back = itertools.chain(
            (deed for left in up for deed in reversed(left.deeds)),
            (deed.inverse() for entered in down for deed in entered.deeds),
        )
        return self.changed.over(back).changes()

    def restore(self, state: State) -> None:
        """Go to a state, wherever it is; what others changed is left alone."""
        up, down = self._way(state)
        with self.operation():
            self.deed_log.touched.clear()
            self.seen.clear()
            SnapshotRestore(self).go(up, down)
            self._tip = State(state)
            self.deed_log.touched.clear()
