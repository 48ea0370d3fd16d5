"""Opening a workspace whose last opener may have been killed: what the journal says, made true.

See `docs/recovery.md` for the table of what is found and what is done.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from ringfence.errors import RestoreFailedError
from ringfence_sandbox.calls.deed_rollback import Hold, RolledBack, undo_deeds
from ringfence_sandbox.calls.deed_runner import DeedRunner
from ringfence_sandbox.calls.differences import Differences
from ringfence_sandbox.calls.history import DeedsChanges, History, RolledBackCall
from ringfence_sandbox.calls.holding import Holding, new_name
from ringfence_sandbox.calls.holding_cleanup import drop_holding, keep_displaced
from ringfence_sandbox.calls.journal import Journal
from ringfence_sandbox.calls.journal_replay import Replay
from ringfence_sandbox.calls.killed_calls import note_killed
from ringfence_sandbox.calls.operation import NOT_ROLLED_BACK, is_full
from ringfence_sandbox.calls.power_loss import repair_torn
from ringfence_sandbox.calls.states import led_to
from ringfence_sandbox.disk.confined import Confined, is_reserved
from ringfence_sandbox.disk.kernel import Abilities, Before, Renames, boot_id
from ringfence_sandbox.disk.places import root_record
from ringfence_sandbox.disk.records import Deed, undone_json

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


def waiting(root: str, store: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that a killed process left half done, for the next opening to take back. None where
    there is none, or somebody has the workspace open. Changes nothing."""
    with suppress(OSError, ValueError), open(os.path.join(store, "holder"), "rb") as holder:
        _check_free(holder)
        found = begun(root, store)
        _check_free(holder)  # nobody has come meanwhile
        return found
    return None


def _check_free(holder: IO[bytes]) -> None:
    """BlockingIOError where an opener has the lock. It is tried for no longer than an opener has patience with."""
    fcntl.flock(holder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(holder, fcntl.LOCK_UN)


def begun(root: str, store: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that has begun to change the tree, and is not committed. Changes nothing."""
    with suppress(OSError, ValueError), closing(Journal(os.path.join(store, "journal"), only_read=True)) as journal:
        replay = Replay.of(journal.records)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            there = replay.root is None or _same_root(descriptor, replay.root)
        finally:
            os.close(descriptor)
        return replay.call if there and not replay.committed else None
    return None


def recover(
    files: Confined,
    can: Abilities,
    journal: Journal,
    *,
    before: Before,
    kept: str,
    history: History | None,
    opaque: Callable[[], OpaqueCalls],
) -> tuple[Recovered | None, Journal]:
    """Bring the tree to the state before the open call, or after it where it was committed; the journal to go on with.

    It may be killed anywhere, and is done again at the next opening.

    Raises:
        RestoreFailedError: something could not be brought back; the journal stays as it is.
    """
    replay = Replay.of(journal.records)
    notes = [journal.cut] if journal.cut is not None else []
    if replay.root is not None and not _same_root(files.root, replay.root):
        notes += history.damage() if history is not None else ()
        if replay.call is not None:
            _unknown_opaque(os.path.join(os.path.dirname(journal.path), STAMP), replay)  # its journal is not lost
        return _set_aside(journal, replay, notes)
    if history is not None:
        for record in replay.commits:
            if record.payload is not None:
                history.recovered(record.payload, record.blob)
    recovered = None
    _mend_root_times(files, journal, replay)
    if replay.call is not None and not replay.committed:
        for process in replay.processes:
            process.end()
        recovered = _roll_back(
            files, can, journal, replay, before=before, kept=kept, history=history, opaque=opaque, notes=notes
        )
        if replay.doubtful:  # deeds of which nobody knows may have displaced something, which is there
            del replay.holdings[-1:]
    damaged: Sequence[str] = ()
    if replay.lost_power:
        damaged = _repair_torn(files, can, journal, replay, before=before, history=history, notes=notes)
    notes += _unknown_holdings(files, replay)
    for name in replay.holdings:
        notes += _drop(files, journal, name, before)
    notes += _unknown_opaque(os.path.join(os.path.dirname(journal.path), STAMP), replay)
    notes += history.damage() if history is not None else ()
    if recovered is None and (replay.call is not None or notes):
        call_id, tool = replay.call or ("", "")
        recovered = Recovered("finished", call_id, tool)
    if recovered is not None:
        conflicts = tuple(sorted({*recovered.conflicts, *damaged}))
        recovered = Recovered(recovered.outcome, recovered.call_id, recovered.tool, conflicts, tuple(notes))
        if replay.call is not None:
            _note(journal, replay, replay.call, recovered)
            journal.append({"end": replay.call[0], "committed": replay.committed}, reserve=0)
            journal.flush()
    if replay.call is None and replay.ended is not None:  # it may have been killed before it wrote the receipt
        _note(journal, replay, replay.ended, Recovered("finished", *replay.ended))
    kept_elsewhere = history.sealed() if history is not None else not journal.keeps_steps
    if kept_elsewhere and not any("could not be removed" in note for note in notes):
        journal.reset()
    return recovered, journal


def _note(journal: Journal, replay: Replay, call: tuple[str, str], recovered: Recovered) -> None:
    """Have the store remember a call that nobody has a receipt of."""
    if not call[0]:
        return
    payload = replay.done[-1].payload if replay.committed else None
    commit = None if payload is None else payload.get("history")
    with suppress(OSError):  # for want of space, say: the recovery must go on
        note_killed(
            Path(os.path.dirname(journal.path)),
            journal.named(replay.noted[0].seq if replay.noted else -1),
            call,
            committed=replay.committed,
            commit=commit if isinstance(commit, str) else None,
            at=replay.at,
            conflicts=recovered.conflicts,
            notes=recovered.notes,
        )


def _same_root(root: int, recorded: Sequence[object]) -> bool:
    now = root_record(root)["root"]
    assert isinstance(now, list)
    if recorded[:2] != now[:2]:
        return False
    return recorded[2] == now[2] or recorded[3] != boot_id()


def _set_aside(journal: Journal, replay: Replay, notes: list[str]) -> tuple[Recovered | None, Journal]:
    if replay.call is None and not replay.holdings and not replay.commits:
        journal.reset()
        return None, journal
    aside = next(path for n in itertools.count(1) if not os.path.exists(path := f"{journal.path}.aside-{n}"))
    journal.close()
    os.rename(journal.path, aside)
    call_id, tool = replay.call or ("", "")
    said = f"the tree at the root is another one than the journal is about; the journal was set aside as {aside}"
    return Recovered("set aside", call_id, tool, (), (*notes, said)), journal.renewed()


def _roll_back(
    files: Confined,
    can: Abilities,
    journal: Journal,
    replay: Replay,
    *,
    before: Before,
    kept: str,
    history: History | None,
    opaque: Callable[[], OpaqueCalls],
    notes: list[str],
) -> Recovered:
    assert replay.call is not None
    runner = DeedRunner(files, can, before)
    runner.thorough = True
    runner.lost_power = replay.lost_power
    for deed in replay.noted:
        runner.note_swap(deed)
    gone = False
    first = next((n for n, deed in enumerate(replay.deeds) if deed.kind == "opaque"), len(replay.deeds))
    for name in replay.holdings[-1:]:
        there = files.look(name)
        if there is not None or any(deed.slot >= 0 for deed in replay.deeds[:first]):
            gone = there is None or not stat.S_ISDIR(there.st_mode)
            runner.holding = Holding.found(files, name, before, max((deed.slot for deed in replay.deeds), default=-1))
    taken = RolledBack()
    if first < len(replay.deeds):
        taken = _take_back(files, journal, replay, runner, first, before, opaque())
        del replay.deeds[first:]
    lost = _lost(runner, replay.deeds) if gone else []
    if history is not None and not gone and not replay.lost_power:
        notes += _keep_taken(files, journal, replay, runner, history)
    _spare_times(files, journal, replay.deeds)
    undone = undo_deeds(runner, replay.deeds, 0, lambda deeds, conflict: journal.note(undone_json(deeds, conflict)))
    if undone.errors:
        failures = [(error.filename or replay.call[0], _said(error)) for error in undone.errors]
        raise RestoreFailedError(failures)
    undone.displaced.update(replay.met.displaced | taken.displaced)
    undone.moved += replay.met.moved
    undone.conflicts |= replay.met.conflicts
    notes += [*taken.notes, *runner.notes, *keep_displaced(runner.holding, undone, replay.noted, kept)]
    if lost:
        notes.append(f"somebody removed the displaced files: what was at {', '.join(lost)} is lost")
    if runner.holding is not None:
        runner.holding.close()
    return Recovered("rolled back", *replay.call, tuple(sorted(taken.conflicts | undone.conflicts | set(lost))))


def _keep_taken(
    files: Confined, journal: Journal, replay: Replay, runner: DeedRunner, history: History
) -> Sequence[str]:
    """Have the history keep what the call had changed, unless the rollback that was killed has done so."""
    assert replay.call is not None
    deeds = [*replay.deeds]
    while deeds and (deeds[-1].kind == "times" or (deeds[-1].kind in _TOLD_BY_PLACE and runner.stands(deeds[-1]))):
        deeds.pop()  # noted, and not done
    if not deeds or not replay.call[0]:
        return ()
    try:
        differences = Differences(files, runner.holding, lambda _: None)
        differences.undo(reversed(deeds))
        changes = differences.changes()
        if not changes:
            return ()
        call = RolledBackCall(*replay.call, journal.named(deeds[0].seq))
        return history.rolling_back(DeedsChanges(changes, differences, {}), call)
    except Exception as error:  # whatever it is (no memory, no space), the recovery must go on
        return [f"what was taken back could not be kept: {error}"]


def _take_back(
    files: Confined,
    journal: Journal,
    replay: Replay,
    runner: DeedRunner,
    first: int,
    before: Before,
    opaque: OpaqueCalls,
) -> RolledBack:
    """Go back to where the first opaque call began, whatever came after."""
    assert replay.call is not None
    deed = replay.deeds[first]

    def make() -> Holding:
        if runner.holding is None:
            runner.holding = Holding.noted(files, lambda record: journal.append(record, reserve=0), before)
            replay.holdings.append(runner.holding.name)
        return runner.holding

    call_id, tool = replay.call
    try:
        taken = opaque.recover(
            deed,
            replay.more[deed.seq],
            replay.became.get(deed.seq, {}),
            replay.kept.get(deed.seq),
            os.path.join(os.path.dirname(journal.path), STAMP),
            Hold(runner.holding, make),
            journal.note,
            tool=tool,
            call_id=call_id,
        )
        taken.settle(replay.deeds[:first])
        return taken
    except LookupError as error:
        what = (
            f"{tool or call_id}: the store does not have the tree as it was before this call; to go on with the tree "
            f"as it is, move {journal.path} away and open the workspace again"
        )
        raise RestoreFailedError([(what, error)]) from error
    except OSError as error:
        raise RestoreFailedError([(error.filename or call_id, _said(error))]) from error


def _said(error: OSError) -> OSError:
    return OSError(error.errno, f"{error.strerror}: {NOT_ROLLED_BACK}") if is_full(error) else error


def _repair_torn(
    files: Confined,
    can: Abilities,
    journal: Journal,
    replay: Replay,
    *,
    before: Before,
    history: History | None,
    notes: list[str],
) -> Sequence[str]:
    """Repair what the loss of power damaged; the paths of which nobody knows what they were."""
    if not any(call.deeds for call in replay.done):
        return ()
    root = os.fstat(files.root)
    name = new_name()
    journal.append({"holding": name, "times": [root.st_atime_ns, root.st_mtime_ns]}, reserve=0)
    journal.flush()
    replay.holdings.append(name)
    holding = Holding.make(files, name, before)
    try:
        content_of = history.content if history is not None else None
        found = repair_torn(files, replay.done, content_of, Renames(can, before), holding)
    finally:
        holding.close()
        with suppress(PermissionError):
            os.utime(files.root, ns=(root.st_atime_ns, root.st_mtime_ns))
    if found.repaired:
        notes.append(f"a loss of power had damaged {', '.join(found.repaired)}: repaired from the history")
    if found.damaged:
        notes.append(f"a loss of power has damaged {', '.join(found.damaged)}, and the history does not have them")
    return found.damaged


def _unknown_opaque(stamp: str, replay: Replay) -> list[str]:
    """An opaque call that was killed, and of which the journal knows nothing."""
    with suppress(OSError), open(stamp, "r+b") as file:
        stamped = file.read()
        if stamped.endswith(RUNS):
            file.truncate(len(stamped) - len(RUNS))
            if replay.call is None:
                said = "a call that ran a program was killed, and the journal that knew of it is lost"
                return [f"{said}: what the program had changed is still there, and in the history as somebody else's"]
    return []


def _unknown_holdings(files: Confined, replay: Replay) -> list[str]:
    """Holding directories of which the journal knows nothing: its last records were lost, or they came with a copy."""
    notes: list[str] = []
    root = os.fstat(files.root)
    for name in os.listdir(files.root):
        if is_reserved(name) and name not in replay.holdings:
            try:
                os.rmdir(name, dir_fd=files.root)
                os.utime(files.root, ns=(root.st_atime_ns, root.st_mtime_ns))
            except OSError:
                notes.append(
                    f"{name} in the root has displaced files of a call that the journal does not know: "
                    "take out what you miss, and remove it"
                )
    return notes


def _lost(runner: DeedRunner, deeds: Sequence[Deed]) -> list[str]:
    """Of deeds whose holding directory somebody removed, the paths whose earlier content was in it."""
    lost: set[str] = set()
    for deed in deeds:
        if runner.is_held(deed.slot):  # again: it came from the store
            continue
        there = runner.files.look(deed.path)
        inode = None if there is None else there.st_ino
        ours = None if deed.new is None else deed.new.inode
        if (deed.kind == "take" and inode is None) or (deed.kind == "swap" and inode == ours):
            lost.add(deed.path)
    return sorted(lost)


def _spare_times(files: Confined, journal: Journal, deeds: Sequence[Deed]) -> None:
    """Have directories that somebody has changed since the call was killed keep the times of that."""
    for number, deed in enumerate(deeds):
        place = led_to(deed.path, deeds[number + 1 :]) if deed.kind == "times" else None
        found = None if place is None else files.look(place)
        if found is None or deed.new is None or found.st_ino != deed.new.inode:
            continue
        if found.st_mtime_ns > journal.modified_ns + _MOMENT_NS:
            deed.atime_ns, deed.mtime_ns = found.st_atime_ns, found.st_mtime_ns


def _mend_root_times(files: Confined, journal: Journal, replay: Replay) -> None:
    """Where the last opener was killed between making or removing a holding directory and setting the root's times."""
    if replay.in_hand is None:
        return
    root = os.fstat(files.root)
    # A change of the root that is not from the very moment of the last record is somebody else's.
    if abs(root.st_mtime_ns - journal.modified_ns) < _MOMENT_NS:
        with suppress(OSError):
            os.utime(files.root, ns=replay.in_hand[1])


def _drop(files: Confined, journal: Journal, name: str, before: Before) -> list[str]:
    there = files.look(name)
    if there is None:
        return []
    if not stat.S_ISDIR(there.st_mode):
        return [f"{name} in the root is not the directory any more in which displaced files waited: remove it"]
    return drop_holding(files, Holding.found(files, name, before, -1), journal, before)
