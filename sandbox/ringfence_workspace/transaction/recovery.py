"""Recovery: an opening undoes the call of the log that has no commit record, or finishes the one that has.

`docs/understand/recovery.md` has the table of what is found and what is done.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ringfence.errors import RestoreFailedError
from ringfence_workspace.history.log import Log
from ringfence_workspace.transaction.aborted_calls import RolledBackCall, noting_failure
from ringfence_workspace.transaction.call_log import Replay
from ringfence_workspace.transaction.changes import TypedChanges, Written, states_inside
from ringfence_workspace.transaction.heartbeat import RUNS, STAMP
from ringfence_workspace.transaction.hidden_copies import remove_copies
from ringfence_workspace.transaction.hold import DirectoryTimes, HoldDirectory, HoldHandle, describe_unknown
from ringfence_workspace.transaction.interrupted_calls import KilledCall, note_killed
from ringfence_workspace.transaction.opaque_calls import OpaqueCalls
from ringfence_workspace.transaction.records import last_slot
from ringfence_workspace.transaction.restore import NOT_ROLLED_BACK, Restore, RestoreReport, is_full
from ringfence_workspace.transaction.step_history import StepHistory
from ringfence_workspace.tree.confined import Confined, is_reserved
from ringfence_workspace.tree.kernel import Abilities, Renames
from ringfence_workspace.tree.state import Json, State

_MOMENT_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Recovered:
    """What opening did about a call that did not come to its end, or about what it had left behind.

    "rolled back": the call was not committed, and is undone. "finished": it was, and only its displaced files were
    still to be dropped. "set aside": another tree stands at the root now, so nothing was touched.
    """

    outcome: Literal["rolled back", "finished", "set aside"]
    call_id: str
    tool: str
    conflicts: tuple[str, ...] = ()
    """Paths that somebody else has changed since; they were left alone."""
    notes: tuple[str, ...] = ()


class Recovery:
    """What one opening does. It may be killed anywhere, and is done again at the next opening."""

    def __init__(
        self,
        files: Confined,
        can: Abilities,
        log: Log,
        *,
        store: str,
        history: StepHistory,
        opaque: Callable[[], OpaqueCalls],
    ) -> None:
        """``store`` is the directory of the store. ``opaque`` gives what opaque calls need, if there is one."""
        self._files = files
        self._log = log
        self._replay = Replay.of(log.records)
        self._renames = Renames(can)
        self._history = history
        self._opaque = opaque
        self._store = store
        self._stamp = os.path.join(self._store, STAMP)
        self._notes = [log.cut] if log.cut is not None else []
        self._held: HoldDirectory | None = None

    def run(self) -> Recovered | None:
        """Bring the tree to the state before the open call, or after it where it was committed.

        Raises:
            RestoreFailedError: something could not be brought back; the log stays as it is.
        """
        try:
            return self._run()
        finally:
            if self._held is not None:
                self._held.close()

    def _run(self) -> Recovered | None:
        replay = self._replay
        if not replay.is_of(self._files.root):
            self._note_damage()
            if replay.call is not None:  # then the log of it is not lost
                self._take_stamp_off()
            return self._set_aside()
        for name in replay.holdings:
            self._files.reserve(name)
        self._log.busy = replay.call is not None
        self._mend_root_times()
        recovered = self._roll_back_open_call()
        self._remove_unknown_holdings()
        left = [note for name in replay.holdings for note in self._drop(name)]
        self._notes += left
        if self._take_stamp_off() and replay.call is None:
            self._notes.append(
                "a call that ran a program was killed, and the log that knew of it is lost: what the program had "
                "changed is still there, and in the history as somebody else's"
            )
        self._note_damage()
        if replay.unclear is not None:
            call_id, tool = replay.unclear
            self._notes.append(f"the log is damaged where it tells of {tool or call_id}: what that call changed stays")
        if recovered is None and (replay.call is not None or self._notes):
            recovered = Recovered("finished", *(replay.call or ("", "")))
        if recovered is not None:
            recovered = replace(recovered, notes=tuple(self._notes))
        self._end_call(recovered, is_needed=bool(left))
        return recovered

    def _roll_back_open_call(self) -> Recovered | None:
        replay = self._replay
        if replay.committed or (replay.call or replay.unclear) is None:
            return None
        for process in replay.processes:
            process.end()
        return self._roll_back(replay.call) if replay.call is not None else None

    def _end_call(self, recovered: Recovered | None, *, is_needed: bool) -> None:
        """The last of a recovery: nothing is to be done at the next opening."""
        replay, log = self._replay, self._log
        if recovered is not None and replay.call is not None:
            self._note_killed(replay.call, recovered)
            log.append({"end": replay.call[0], "committed": replay.committed}, reserve=0)
            log.flush()
        if replay.call is None and replay.ended is not None:  # it may have been killed before it wrote the receipt
            self._note_killed(replay.ended, Recovered("finished", *replay.ended))
        log.busy = False
        remove_copies(self._store)
        if is_needed:  # the next opening has to find the names of what is left
            return
        self._history.seal()

    def _note_killed(self, call: tuple[str, str], recovered: Recovered) -> None:
        """Have the store remember a call that nobody has a receipt of."""
        if not call[0]:
            return
        replay = self._replay
        killed = KilledCall(
            self._log.name(replay.began_ns, 0),
            *call,
            committed=replay.committed,
            commit=replay.step if replay.committed else None,
            conflicts=recovered.conflicts,
            notes=recovered.notes,
            at=replay.at.isoformat(),
        )
        with suppress(OSError):  # for want of space, say: the recovery must go on
            note_killed(Path(self._store), killed)

    def _note_damage(self) -> None:
        self._notes += self._history.damage()

    def _set_aside(self) -> Recovered | None:
        """The log is about another tree, which stood at the root before: a copy has its call, which is over here."""
        replay, log = self._replay, self._log
        recovered = None
        if replay.call is not None:
            aside = next(path for n in itertools.count(1) if not os.path.exists(path := f"{log.path}.aside-{n}"))
            shutil.copyfile(log.path, aside)
            said = (
                f"the tree at the root is another one than the log is about; a copy of the log was set aside as {aside}"
            )
            recovered = Recovered("set aside", *replay.call, (), (*self._notes, said))
        log.append({"set aside": True})
        remove_copies(self._store)
        self._history.seal()
        return recovered

    # -- going back

    def _roll_back(self, call: tuple[str, str]) -> Recovered:
        replay = self._replay
        was_removed = self._find_holding()
        if replay.base is not None:
            return self._rolled_back(call, self._go_to_base(call, *replay.base))
        if not was_removed:
            self._keep_changes(call)
        self._spare_times()
        times = DirectoryTimes(self._files)
        restore = Restore(
            self._files,
            self._renames,
            HoldHandle(self._held, self._make_holding),
            times,
            thorough=True,
            from_history=self._history.remake,
        )
        restore.report.moved |= replay.moved
        report = restore.run(replay.epochs, on_undone=lambda count: self._log.note(restore.report.to_json(count)))
        if report.errors:
            raise RestoreFailedError([(error.filename or call[0], _with_advice(error)) for error in report.errors])
        return self._rolled_back(call, report)

    def _rolled_back(self, call: tuple[str, str], report: RestoreReport) -> Recovered:
        report.displaced |= self._replay.displaced
        report.conflicts |= self._replay.conflicts
        self._notes += report.notes
        if self._held is not None:
            self._notes += self._history.keeper.keep_conflicts(self._held, report)
        return Recovered("rolled back", *call, tuple(sorted(report.conflicts)))

    def _find_holding(self) -> bool:
        """Open the holding directory of the open call, or make it again; whether somebody had removed it."""
        was_removed = False
        for name in self._replay.holdings[-1:]:
            there = self._files.look(name)
            if there is not None or any(not epoch.is_empty for epoch in self._replay.epochs):
                was_removed = there is None or not stat.S_ISDIR(there.st_mode)
                self._held = HoldDirectory.found(self._files, name, last_slot(self._replay.epochs))
        return was_removed

    def _make_holding(self) -> HoldDirectory:
        if self._held is None:
            self._held = HoldDirectory.make(self._files, self._write, self._store)
            self._replay.holdings.append(self._held.name)
        return self._held

    def _write(self, record: Mapping[str, Json]) -> None:
        self._log.append(record, reserve=0)
        self._log.flush()

    def _keep_changes(self, call: tuple[str, str]) -> None:
        """Have the history keep what the call had changed, unless the rollback that was killed has done so."""
        replay = self._replay
        if not replay.has_changes or not call[0]:
            return
        with noting_failure(self._notes):
            changed = self._changes()
            if changed.changes:
                rolled_back = RolledBackCall(*call, self._log.name(replay.began_ns, 0))
                self._notes += self._history.rolling_back(changed, rolled_back)

    def _changes(self) -> TypedChanges:
        """What the call had changed, as far as its files are at the names of the last epoch."""
        before: dict[str, State | None] = {}
        for epoch in self._replay.epochs:
            for path, record in epoch.records.items():
                if record.afters and not self._files.is_reserved(path):
                    before.setdefault(path, record.before)
            if epoch.move is not None:
                before |= self._moved(epoch.move.old, epoch.move.new, before)
        return TypedChanges(self._files, before, self._held, Written())

    def _moved(self, old: str, new: str, before: Mapping[str, State | None]) -> dict[str, State | None]:
        """The first states of what was in a directory that has been moved, where it is still there."""
        found = self._files.look(new)
        if found is None or not stat.S_ISDIR(found.st_mode):
            return {}
        inside = {"": State.of(found), **states_inside(self._files, new)}
        states: dict[str, State | None] = {f"{old}/{name}".rstrip("/"): state for name, state in inside.items()}
        if not self._files.is_reserved(new):
            states |= dict.fromkeys(f"{new}/{name}".rstrip("/") for name in inside)
        return {path: state for path, state in states.items() if path not in before}

    def _go_to_base(self, call: tuple[str, str], commit: str, more: bytes) -> RestoreReport:
        """Go back to the tree before the call, as the store has it, whatever came after."""
        call_id, tool = call
        opaque = self._opaque()
        try:
            return opaque.recover(
                commit,
                more,
                self._replay.kept,
                self._stamp,
                HoldHandle(self._held, self._make_holding),
                self._log.note,
                tool=tool,
                call_id=call_id,
            )
        except LookupError as error:
            what = (
                f"{tool or call_id}: the store does not have the tree as it was before this call; to go on with the "
                f"tree as it is, move {self._log.path} away and open the workspace again"
            )
            raise RestoreFailedError([(what, error)]) from error
        except OSError as error:
            raise RestoreFailedError([(error.filename or call_id, _with_advice(error))]) from error

    def _spare_times(self) -> None:
        """Have directories that somebody has changed since the call was killed keep the times of that."""
        changed: dict[int, int] = {}
        for epoch in self._replay.epochs:
            for path, record in epoch.records.items():
                found = self._files.look(path) if record.before is not None and record.before.is_directory else None
                if found is not None and found.st_mtime_ns > self._log.modified_ns + _MOMENT_NS:
                    changed[found.st_ino] = found.st_mtime_ns
        for epoch in self._replay.epochs if changed else ():
            for record in epoch.records.values():
                if record.before is not None and record.before.is_directory and record.before.inode in changed:
                    record.before = record.before._replace(mtime_ns=changed[record.before.inode])

    # -- what was left behind

    def _take_stamp_off(self) -> bool:
        """Whether the stamp says that an opaque call runs; from now on it does not."""
        with suppress(OSError), open(self._stamp, "r+b") as file:
            stamped = file.read()
            if stamped.endswith(RUNS):
                file.truncate(len(stamped) - len(RUNS))
                return True
        return False

    def _remove_unknown_holdings(self) -> None:
        """Remove empty holds of which neither the log nor the history knows: records were lost, or they came with a
        copy. What has something in it stays, is named, and is a directory like any other."""
        for name in os.listdir(self._files.root):
            if not is_reserved(name) or name in self._replay.holdings or self._history.has(name):
                continue
            found = self._files.look(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                with suppress(OSError):
                    holding = HoldDirectory(self._files, name)
                    if not holding.inodes():
                        holding.remove(self._log.note)
                        continue
                    holding.close()
                self._notes.append(describe_unknown(self._files, name, self._store))

    def _mend_root_times(self) -> None:
        """Where the last opener was killed between making or removing a holding directory and setting the root's
        times."""
        root, times = os.fstat(self._files.root), self._replay.root_times
        # A change of the root that is not from the very moment of the last record is somebody else's.
        if times is not None and abs(root.st_mtime_ns - self._log.modified_ns) < _MOMENT_NS:
            with suppress(OSError):
                os.utime(self._files.root, ns=times)

    def _drop(self, name: str) -> list[str]:
        """Remove a holding directory with what is in it; in words what would not go."""
        there = self._files.look(name)
        if there is None:
            self._files.reserve(name, ends=True)
            return []
        if not stat.S_ISDIR(there.st_mode):
            self._files.reserve(name, ends=True)
            words = "in the root is not the directory any more in which displaced files waited: remove it"
            self._notes.append(f"{name} {words}")
            return []
        return HoldDirectory.found(self._files, name, -1).remove(self._log.note)


def _with_advice(error: OSError) -> OSError:
    return OSError(error.errno, f"{error.strerror}: {NOT_ROLLED_BACK}") if is_full(error) else error
