"""The opaque calls that are open in one workspace, by number."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ringfence.participants import Change
from ringfence_sandbox.disk.confined import Confined, is_reserved
from ringfence_sandbox.disk.kernel import Renames, birth_ns
from ringfence_sandbox.disk.state import Json
from ringfence_sandbox.opaque.heartbeat import GRACE_NS, Heartbeat
from ringfence_sandbox.opaque.scans import Scans
from ringfence_sandbox.opaque.states import (
    Aborted,
    After,
    Before,
    Displaced,
    KeptOpen,
    ScannedFiles,
    is_only_time,
)
from ringfence_sandbox.opaque.tree_rollback import Judge, TreeRollback
from ringfence_sandbox.scan.scan import clock_ahead_ns
from ringfence_sandbox.store.entries import Difference, Entry, is_directory
from ringfence_sandbox.transaction.changes import ChangedFiles
from ringfence_sandbox.transaction.hold import Hold, Holding
from ringfence_sandbox.transaction.restore import RestoreReport
from ringfence_sandbox.transaction.undo_records import Epoch, is_below, rebased

Note = Callable[[Mapping[str, Json]], None]
"""Writes a record into the log, if there is room."""
MOST_LISTED = 20
"""Paths in a note; the rest is counted."""


@dataclass(slots=True)
class _Call:
    """One that is open."""

    before: Before
    kept_open: KeptOpen = field(default_factory=KeptOpen)
    seen: tuple[int, After] | None = None
    """What the last look at the tree found, with the version of the workspace that was looked at."""
    tried: set[str] | None = None
    """The paths of the call, once a way back was begun."""

    def seen_at(self, version: int) -> After | None:
        """What a look at the tree has found, unless calls have gone on since."""
        return self.seen[1] if self.seen is not None and self.seen[0] == version else None


class OpaqueCalls:
    """What is known of them, and the rollback of each."""

    def __init__(self, files: Confined, renames: Renames, scans: Scans, stamp: Heartbeat) -> None:
        self._files = files
        self._renames = renames
        self._scans = scans
        self._stamp = stamp
        self._calls: dict[int, _Call] = {}
        self.contained = False
        """Whether a command that is to get nobody's rights ran in one of these calls."""

    @property
    def any_open(self) -> bool:
        return bool(self._calls)

    @property
    def stamp(self) -> int:
        """The descriptor of the file that is stamped while one is open."""
        return self._stamp.descriptor

    def begin(self, early: ChangedFiles | None, epochs: Sequence[Epoch], holding: Holding | None) -> Before:
        """Look at the tree and store it, before a call and after what typed calls have done. OSError: it cannot be."""
        displaced, inodes, shared = Displaced(), _inodes(self._files, epochs), set[int]()
        if holding is not None and holding.paths:
            displaced = Displaced(holding.name, {holding.place(slot): path for slot, path in holding.paths.items()})
            held = {place: found for place, found in holding.entries() if displaced.has(place)}
            inodes |= {place: found.st_ino for place, found in held.items()}
            shared = {one.st_ino for one in held.values() if one.st_nlink > 1 and not stat.S_ISDIR(one.st_mode)}
        before = self._scans.before(early, inodes, displaced, nested=self.any_open)
        if shared:
            before.inodes = {**before.paths_of(shared), **before.inodes}
        self._stamp.start()
        return before

    def begun(self, number: int, before: Before) -> None:
        """The log has the record that a call begins with."""
        self._stamp.begun()
        self._calls[number] = _Call(before)
        self._calls[number].kept_open.open(self._files, before.left)

    def sealed(self) -> None:
        """The outermost call has ended all its programs. What changes from now on is somebody else's."""
        self._stamp.pause()

    def end(self, down_to: int = -1) -> None:
        """Of these calls none is open any more."""
        for number in [number for number in self._calls if number >= down_to]:
            self._calls.pop(number).kept_open.close()
        if not self._calls:
            self._stamp.stop()
            self.contained = False

    def changes(self, number: int, version: int, early: Sequence[Change]) -> list[Change]:
        """Look at the tree; what changed since a call began. ``early`` had changed before, in a call around it."""
        after = self._look(number, version)
        return _merged(early, self._scans.changes(self._calls[number].before, after))

    def scanned(self, number: int, version: int, early: Sequence[Change]) -> ScannedFiles:
        """What changed, for a history; as `changes` saw it, if it was asked."""
        before, after = self._calls[number].before, self._calls[number].seen_at(version) or self._look(number, version)
        return self._scans.scanned(before, after, _merged(early, self._scans.changes(before, after)))

    def differs(self, number: int, version: int) -> bool:
        """Whether anything is not as it was when a call began, be it the time of a file; as `changes` saw it."""
        after = self._calls[number].seen_at(version)
        return after is None or not all(map(is_only_time, after.differing))

    def _look(self, number: int, version: int) -> After:
        call = self._calls[number]
        after = self._scans.after(call.before)
        if self.contained:
            after = self._scans.disarmed(call.before, after)
        call.seen = version, after
        return after

    def roll_back(self, number: int, version: int, hold: Hold, note: Note, *, tool: str, call_id: str) -> RestoreReport:
        """Bring the tree back to where a call began. OSError: it could not be completed, and may be tried again."""
        call = self._calls[number]
        before, after, tried = call.before, call.seen_at(version), call.tried
        if after is None or tried is not None:
            after = self._scans.after(before)
        seen = {path for path, _, _ in after.differing} | after.found.excluded.keys() if tried is None else tried
        after, opened = self._scans.made_readable(before, after)

        def judge(item: Difference, here: os.stat_result | None) -> bool:
            path, wanted, now = item
            below_opened = any(path.startswith(f"{above}/") for above in opened)
            by_trying = tried is not None and is_directory(wanted) and (now is None or is_directory(now))
            return path in seen or below_opened or by_trying

        way = TreeRollback(
            self._files, self._renames, hold, self._scans.store.states, before, after, judge, call.kept_open
        )
        call.tried = {*way.items, *(tried or ())}
        way.copied = lambda old, new: note({"copied": [old, new], "before": number})
        done = self._go(way, number, note, self._scans.keep(before, after, way.items, tool=tool, call_id=call_id))
        for outer in [outer for index, outer in self._calls.items() if index < number]:
            outer.before.know_again(done.new_inodes)
            outer.kept_open.release(done.new_inodes)
            outer.kept_open.open(self._files, outer.before.left)
        return done

    def recover(
        self,
        number: int,
        commit: str,
        more: bytes,
        became: Mapping[int, int],
        kept: str | None,
        stamp_path: str,
        hold: Hold,
        note: Note,
        *,
        tool: str,
        call_id: str,
    ) -> RestoreReport:
        """`roll_back` for a call whose process was killed; ``became`` has the inodes of what was copied back since it
        began, and ``kept`` is the commit that an earlier try has kept.

        Raises:
            LookupError: the store does not have the state before the call.
            OSError: it could not be completed.
        """
        before = self._scans.recovered(commit, more)
        before.know_again(became)
        after, opened = self._scans.made_readable(before, self._scans.after(before))
        # The stamp is of the system's clock, and the times of files may be of a server's.
        try:
            ahead_ns = clock_ahead_ns(self._files.root)
        except OSError:
            ahead_ns = clock_ahead_ns(hold.make().descriptor, "clock")
        limit_ns = Heartbeat.last_ns(stamp_path) + ahead_ns + GRACE_NS
        judge = _ended(self._files, limit_ns, self._scans.kept_states(before, kept), opened)
        way = TreeRollback(self._files, self._renames, hold, self._scans.store.states, before, after, judge, KeptOpen())
        if kept is None:  # an earlier try has given directories new times itself
            way.spare_times(limit_ns, opened)
            aborted = self._scans.keep(before, after, way.items, tool=tool, call_id=call_id)
        else:
            aborted = self._scans.kept_as(kept)
        return self._go(way, number, note, aborted)

    def _go(self, way: TreeRollback, number: int, note: Note, aborted: Aborted) -> RestoreReport:
        told = [
            path or "the root"
            for path, item in sorted(way.items.items())
            if not is_only_time(item) and not is_reserved(path)
        ]
        note({"taking back": number, "kept": aborted.commit})
        done = way.run()
        path_of = way.before.displaced.path_of
        done.conflicts = {path_of(path) for path in done.conflicts}
        done.displaced = {path_of(path): slot for path, slot in done.displaced.items()}
        self._scans.sync()
        became: Json = [[old, new] for old, new in done.new_inodes.items()]
        note({"undone": number, "became": became, "conflicts": [*done.conflicts], "displaced": {**done.displaced}})
        done.notes[:0] = [*_rollback_notes(told, aborted), *aborted.notes]
        return done


def _inodes(files: Confined, epochs: Sequence[Epoch]) -> dict[str, int]:
    """The inodes at the places where what typed calls have changed is now, by place."""
    last = max((number for number, epoch in enumerate(epochs) if epoch.opaque is not None), default=-1)
    found: dict[str, int] = {}
    for number, epoch in enumerate(epochs[last + 1 :], last + 1):
        for path in [*epoch.records, *((epoch.move.old,) if epoch.move is not None else ())]:
            place = path
            for later in epochs[number:]:
                if later.move is not None and (place == later.move.old or is_below(place, later.move.old)):
                    place = rebased(place, later.move.old, later.move.new)
            there = None if is_reserved(place) else files.look(place)
            if there is not None:
                found[place] = there.st_ino
    return found


def _ended(files: Confined, limit_ns: int, kept: Mapping[str, Entry], ctimes_ns: Mapping[str, int]) -> Judge:
    """The call is over: what has changed after a moment is somebody else's, unless it is what was kept of the call.
    ``ctimes_ns`` are those of what was changed only now, to be looked at."""

    def judge(item: Difference, here: os.stat_result | None) -> bool:
        path, wanted, now = item
        if here is None or (is_directory(now) and is_directory(wanted)):
            return True
        if ctimes_ns.get(path, here.st_ctime_ns) <= limit_ns:
            return True
        if stat.S_ISDIR(here.st_mode):
            with files.parent(path) as (at, name):
                born = birth_ns(at, name)
            return born is not None and born <= limit_ns
        ours = [one for one in (kept.get(path), wanted) if one is not None]
        return path in kept and any(now is not None and (now.kind, now.oid) == (one.kind, one.oid) for one in ours)

    return judge


def _merged(early: Sequence[Change], late: Sequence[Change]) -> list[Change]:
    found = {change.path: change for change in early}
    for change in late:
        before = found[change.path].before if change.path in found else change.before
        found[change.path] = Change(change.path, before, change.after)
    return [found[path] for path in sorted(found) if found[path].before != found[path].after]


def _rollback_notes(listed: Sequence[str], aborted: Aborted) -> list[str]:
    if not listed:
        return []
    more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    kept = f"; what they were is kept as {aborted.name}" if aborted.name is not None else ""
    return [f"rolled back: {', '.join(listed[:MOST_LISTED])}{more}{kept}"]
