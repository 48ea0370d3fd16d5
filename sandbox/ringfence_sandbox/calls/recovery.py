"""Opening a workspace whose last opener may have been killed: what the journal says, made true.

See `docs/understand/recovery.md` for the table of what is found and what is done.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ringfence.errors import RestoreFailedError
from ringfence_sandbox.calls.deed_rollback import Hold, RolledBack, undo_deeds
from ringfence_sandbox.calls.deed_runner import DeedRunner
from ringfence_sandbox.calls.differences import Differences
from ringfence_sandbox.calls.history import DeedsChanges, History, RolledBackCall, noting_failure
from ringfence_sandbox.calls.holding import Holding
from ringfence_sandbox.calls.holding_cleanup import drop_holding, keep_displaced, said_of_unknown
from ringfence_sandbox.calls.journal import Journal
from ringfence_sandbox.calls.journal_replay import Replay
from ringfence_sandbox.calls.killed_calls import KilledCall, note_killed
from ringfence_sandbox.calls.operation import NOT_ROLLED_BACK, is_full
from ringfence_sandbox.calls.power_loss import repair_torn
from ringfence_sandbox.calls.states import led_to
from ringfence_sandbox.disk.confined import Confined, is_reserved
from ringfence_sandbox.disk.kernel import Abilities, Renames
from ringfence_sandbox.disk.records import Deed, Json, undone_json

if TYPE_CHECKING:
    from ringfence_sandbox.opaque.opaque_calls import OpaqueCalls


STAMP = "alive"
"""In a store, the file that the owner of an opaque call stamps."""
RUNS = b"runs"
"""What is in it behind the stamp while the journal has such a call."""

_TOLD_BY_PLACE = frozenset({"put", "take", "swap", "move"})
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
        journal: Journal,
        *,
        kept: str,
        history: History | None,
        opaque: Callable[[], OpaqueCalls],
    ) -> None:
        """``kept`` is the directory for what conflicts keep from their paths. ``opaque`` gives what opaque calls need,
        if there is one."""
        self._files = files
        self._journal = journal
        self._replay = Replay.of(journal.records)
        self._renames = Renames(can)
        self._kept = kept
        self._history = history
        self._opaque = opaque
        self._stamp = os.path.join(os.path.dirname(journal.path), STAMP)
        self._notes = [journal.cut] if journal.cut is not None else []
        self._runner = DeedRunner(files, can)
        self._runner.thorough = True
        self._runner.lost_power = self._replay.lost_power

    def run(self) -> tuple[Recovered | None, Journal]:
        """Bring the tree to the state before the open call, or after it where it was committed; the journal to go on
        with.

        Raises:
            RestoreFailedError: something could not be brought back; the journal stays as it is.
        """
        replay = self._replay
        if not replay.is_of(self._files.root):
            self._note_damage()
            if replay.call is not None:  # then its journal is not lost
                self._take_stamp_off()
            return self._set_aside()
        for record in replay.commits:
            if self._history is not None and record.payload is not None:
                self._history.recovered(record.payload, record.blob)
        self._mend_root_times()
        recovered = None
        if replay.call is not None and not replay.committed:
            for process in replay.processes:
                process.end()
            recovered = self._roll_back(replay.call)
            if replay.doubtful:  # deeds of which nobody knows may have displaced something, which is there
                del replay.holdings[-1:]
        damaged = self._repair_torn() if replay.lost_power else ()
        self._remove_unknown_holdings()
        for name in replay.holdings:
            self._drop(name)
        if self._take_stamp_off() and replay.call is None:
            self._notes.append(
                "a call that ran a program was killed, and the journal that knew of it is lost: what the program had "
                "changed is still there, and in the history as somebody else's"
            )
        self._note_damage()
        if recovered is None and (replay.call is not None or self._notes):
            recovered = Recovered("finished", *(replay.call or ("", "")))
        if recovered is not None:
            conflicts = tuple(sorted({*recovered.conflicts, *damaged}))
            recovered = replace(recovered, conflicts=conflicts, notes=tuple(self._notes))
        self._end_call(recovered)
        return recovered, self._journal

    def _end_call(self, recovered: Recovered | None) -> None:
        """The last of a recovery: nothing is to be done at the next opening."""
        replay, journal = self._replay, self._journal
        if recovered is not None and replay.call is not None:
            self._note_killed(replay.call, recovered)
            journal.append({"end": replay.call[0], "committed": replay.committed}, reserve=0)
            journal.flush()
        if replay.call is None and replay.ended is not None:  # it may have been killed before it wrote the receipt
            self._note_killed(replay.ended, Recovered("finished", *replay.ended))
        kept_elsewhere = self._history.sealed() if self._history is not None else not journal.keeps_steps
        if kept_elsewhere and not any("could not be removed" in note for note in self._notes):
            journal.reset()

    def _note_killed(self, call: tuple[str, str], recovered: Recovered) -> None:
        """Have the store remember a call that nobody has a receipt of."""
        if not call[0]:
            return
        replay = self._replay
        payload = replay.done[-1].payload if replay.committed else None
        commit = None if payload is None else payload.get("history")
        killed = KilledCall(
            self._journal.named(replay.noted[0].seq if replay.noted else -1),
            *call,
            committed=replay.committed,
            commit=commit if isinstance(commit, str) else None,
            conflicts=recovered.conflicts,
            notes=recovered.notes,
            at=(replay.at or datetime.now(UTC)).isoformat(),
        )
        with suppress(OSError):  # for want of space, say: the recovery must go on
            note_killed(Path(os.path.dirname(self._journal.path)), killed)

    def _note_damage(self) -> None:
        self._notes += self._history.damage() if self._history is not None else ()

    def _set_aside(self) -> tuple[Recovered | None, Journal]:
        """The journal is about another tree, which stood at the root before."""
        replay, journal = self._replay, self._journal
        if replay.call is None and not replay.holdings and not replay.commits:
            journal.reset()
            return None, journal
        aside = next(path for n in itertools.count(1) if not os.path.exists(path := f"{journal.path}.aside-{n}"))
        journal.close()
        os.rename(journal.path, aside)
        call_id, tool = replay.call or ("", "")
        said = f"the tree at the root is another one than the journal is about; the journal was set aside as {aside}"
        return Recovered("set aside", call_id, tool, (), (*self._notes, said)), journal.renewed()

    # -- going back

    def _roll_back(self, call: tuple[str, str]) -> Recovered:
        replay, runner = self._replay, self._runner
        for deed in replay.noted:
            runner.note_swap(deed)
        first = next((n for n, deed in enumerate(replay.deeds) if deed.kind == "opaque"), len(replay.deeds))
        was_removed = self._find_holding(first)
        taken = RolledBack()
        if first < len(replay.deeds):
            taken = self._take_back(call, first)
            del replay.deeds[first:]
        lost = self._lost() if was_removed else []
        if not was_removed and not replay.lost_power:
            self._keep_taken(call)
        self._spare_times()
        undone = undo_deeds(runner, replay.deeds, 0, self._note_undone)
        if undone.errors:
            failures = [(error.filename or call[0], _said(error)) for error in undone.errors]
            raise RestoreFailedError(failures)
        undone.displaced.update(replay.met.displaced | taken.displaced)
        undone.moved += replay.met.moved
        undone.conflicts |= replay.met.conflicts
        self._notes += [*taken.notes, *runner.notes]
        self._notes += keep_displaced(runner.holding, undone, replay.noted, self._kept)
        if lost:
            self._notes.append(f"somebody removed the displaced files: what was at {', '.join(lost)} is lost")
        if runner.holding is not None:
            runner.holding.close()
        return Recovered("rolled back", *call, tuple(sorted(taken.conflicts | undone.conflicts | set(lost))))

    def _note_undone(self, deeds: Sequence[Deed], conflict: str | None) -> None:
        self._journal.note(undone_json(deeds, conflict))

    def _find_holding(self, first_opaque: int) -> bool:
        """Open the holding directory of the open call, or make it again; whether somebody had removed it."""
        was_removed = False
        deeds = self._replay.deeds
        for name in self._replay.holdings[-1:]:
            there = self._files.look(name)
            if there is not None or any(deed.slot >= 0 for deed in deeds[:first_opaque]):
                was_removed = there is None or not stat.S_ISDIR(there.st_mode)
                last = max((deed.slot for deed in deeds), default=-1)
                self._runner.holding = Holding.found(self._files, name, last)
        return was_removed

    def _new_holding(self) -> Holding:
        holding = Holding.noted(self._files, self._write, os.path.dirname(self._journal.path))
        self._replay.holdings.append(holding.name)
        return holding

    def _write(self, record: Mapping[str, Json]) -> None:
        self._journal.append(record, reserve=0)
        self._journal.flush()

    def _keep_taken(self, call: tuple[str, str]) -> None:
        """Have the history keep what the call had changed, unless the rollback that was killed has done so."""
        deeds = [*self._replay.deeds]
        while deeds and self._is_not_done(deeds[-1]):
            deeds.pop()
        if self._history is None or not deeds or not call[0]:
            return
        with noting_failure(self._notes):
            differences = Differences(self._files, self._runner.holding, lambda _: None)
            differences.undo(reversed(deeds))
            changes = differences.changes()
            if changes:
                rolled_back = RolledBackCall(*call, self._journal.named(deeds[0].seq))
                self._notes += self._history.rolling_back(DeedsChanges(changes, differences, {}), rolled_back)

    def _is_not_done(self, deed: Deed) -> bool:
        """Whether the last deed that is noted was not done; of some kinds that cannot be told."""
        return deed.kind == "times" or (deed.kind in _TOLD_BY_PLACE and self._runner.stands(deed))

    def _take_back(self, call: tuple[str, str], first: int) -> RolledBack:
        """Go back to where the first opaque call began, whatever came after."""
        replay, runner = self._replay, self._runner
        deed = replay.deeds[first]
        call_id, tool = call

        def make() -> Holding:
            if runner.holding is None:
                runner.holding = self._new_holding()
            return runner.holding

        opaque = self._opaque()
        try:
            taken = opaque.recover(
                deed,
                replay.more[deed.seq],
                replay.became.get(deed.seq, {}),
                replay.kept.get(deed.seq),
                self._stamp,
                Hold(runner.holding, make),
                self._journal.note,
                tool=tool,
                call_id=call_id,
            )
            taken.settle(replay.deeds[:first])
            return taken
        except LookupError as error:
            what = (
                f"{tool or call_id}: the store does not have the tree as it was before this call; to go on with the "
                f"tree as it is, move {self._journal.path} away and open the workspace again"
            )
            raise RestoreFailedError([(what, error)]) from error
        except OSError as error:
            raise RestoreFailedError([(error.filename or call_id, _said(error))]) from error

    def _lost(self) -> list[str]:
        """Of deeds whose holding directory somebody removed, the paths whose earlier content was in it."""
        lost: set[str] = set()
        for deed in self._replay.deeds:
            if self._runner.is_held(deed.slot):  # again: it came from the store
                continue
            there = self._files.look(deed.path)
            inode = None if there is None else there.st_ino
            ours = None if deed.new is None else deed.new.inode
            if (deed.kind == "take" and inode is None) or (deed.kind == "swap" and inode == ours):
                lost.add(deed.path)
        return sorted(lost)

    def _spare_times(self) -> None:
        """Have directories that somebody has changed since the call was killed keep the times of that."""
        deeds = self._replay.deeds
        for number, deed in enumerate(deeds):
            place = led_to(deed.path, deeds[number + 1 :]) if deed.kind == "times" else None
            found = None if place is None else self._files.look(place)
            if found is None or deed.new is None or found.st_ino != deed.new.inode:
                continue
            if found.st_mtime_ns > self._journal.modified_ns + _MOMENT_NS:
                deed.atime_ns, deed.mtime_ns = found.st_atime_ns, found.st_mtime_ns

    # -- what was left behind

    def _repair_torn(self) -> Sequence[str]:
        """Repair what the loss of power damaged; the paths of which nobody knows what they were."""
        if not any(call.deeds for call in self._replay.done):
            return ()
        content_of = self._history.content if self._history is not None else None
        with closing(self._new_holding()) as holding:
            found = repair_torn(self._files, self._replay.done, content_of, self._renames, holding)
        if found.repaired:
            self._notes.append(f"a loss of power had damaged {', '.join(found.repaired)}: repaired from the history")
        if found.damaged:
            names = ", ".join(found.damaged)
            self._notes.append(f"a loss of power has damaged {names}, and the history does not have them")
        return found.damaged

    def _take_stamp_off(self) -> bool:
        """Whether the stamp says that an opaque call runs; from now on it does not."""
        with suppress(OSError), open(self._stamp, "r+b") as file:
            stamped = file.read()
            if stamped.endswith(RUNS):
                file.truncate(len(stamped) - len(RUNS))
                return True
        return False

    def _remove_unknown_holdings(self) -> None:
        """Holding directories of which the journal knows nothing: its last records were lost, or they came with a copy.
        What has something in it stays, and is named."""
        root = os.fstat(self._files.root)
        for name in os.listdir(self._files.root):
            if is_reserved(name) and name not in self._replay.holdings:
                try:
                    os.rmdir(name, dir_fd=self._files.root)
                    os.utime(self._files.root, ns=(root.st_atime_ns, root.st_mtime_ns))
                except OSError:
                    self._notes.append(said_of_unknown(self._files, name, os.path.dirname(self._journal.path)))

    def _mend_root_times(self) -> None:
        """Where the last opener was killed between making or removing a holding directory and setting the root's
        times."""
        if self._replay.in_hand is None:
            return
        root = os.fstat(self._files.root)
        # A change of the root that is not from the very moment of the last record is somebody else's.
        if abs(root.st_mtime_ns - self._journal.modified_ns) < _MOMENT_NS:
            with suppress(OSError):
                os.utime(self._files.root, ns=self._replay.in_hand[1])

    def _drop(self, name: str) -> None:
        """Remove a holding directory with what is in it."""
        there = self._files.look(name)
        if there is None:
            return
        if not stat.S_ISDIR(there.st_mode):
            words = "in the root is not the directory any more in which displaced files waited: remove it"
            self._notes.append(f"{name} {words}")
            return
        holding = Holding.found(self._files, name, -1)
        self._notes += drop_holding(self._files, holding, self._journal)


def _said(error: OSError) -> OSError:
    return OSError(error.errno, f"{error.strerror}: {NOT_ROLLED_BACK}") if is_full(error) else error
