"""Opaque calls in one workspace, and the way back to where each of them began."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ringfence.participants import Change
from ringfence_workspace.history.entries import Difference, Entry, is_directory
from ringfence_workspace.history.scan import clock_ahead_ns
from ringfence_workspace.transaction.aborted_calls import Aborted
from ringfence_workspace.transaction.changes import ScannedFiles
from ringfence_workspace.transaction.detection import Detector
from ringfence_workspace.transaction.git_at_work import is_in_git, is_new_object, wait_for_git
from ringfence_workspace.transaction.heartbeat import GRACE_NS, LivenessFile
from ringfence_workspace.transaction.hidden_copies import HiddenCopies
from ringfence_workspace.transaction.hold import HoldDirectory, HoldHandle
from ringfence_workspace.transaction.opaque_states import (
    MOST_LISTED,
    After,
    Base,
    ExcludedFile,
    ScanCommit,
    is_only_time,
)
from ringfence_workspace.transaction.restore import RestoreReport
from ringfence_workspace.transaction.scans import Scans
from ringfence_workspace.transaction.tree_rollback import Judge, TreeRollback
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import Renames, birth_ns
from ringfence_workspace.tree.state import Json

Note = Callable[[Mapping[str, Json]], None]
"""Writes a record into the log, if there is room."""


class OpaqueCalls:
    """What they share while an outermost call is open, and the rollback to each of its bases."""

    def __init__(
        self, files: Confined, renames: Renames, scans: Scans, stamp: LivenessFile, copies: HiddenCopies
    ) -> None:
        self._files = files
        self._renames = renames
        self._scans = scans
        self._stamp = stamp
        self._copies = copies
        self.any_open = False
        """Whether one has begun in the outermost call."""
        self.contained = False
        """Whether a command that is to get nobody's rights ran in one of these calls."""

    @property
    def stamp(self) -> int:
        """The descriptor of the file that is stamped while one is open."""
        return self._stamp.descriptor

    def begin(self, hold: HoldHandle, *, outermost: bool) -> Base:
        """Look at the tree before an opaque call, and store it; see `Scans.before`. OSError: it cannot be."""
        base = Base(self._scans.before(outermost=outermost), self._detector.how)
        held = self._hold_large(base.before.excluded, hold)
        self._scans.history.guard(None if held is None else held.descriptor)
        self._stamp.start()
        return base

    @property
    def _detector(self) -> Detector:
        return self._scans.history.detector

    def _hold_large(self, left: Mapping[str, ExcludedFile], hold: HoldHandle) -> HoldDirectory | None:
        """Give the files that are too large for the store another name, in the hold: what the call removes is still
        there then. Each call gives one, as its rollback may use it up. A file that cannot have one is not held. The
        hold, if there is one then."""
        held = hold.held
        for path, one in left.items():
            if one.reason == "too large":
                with suppress(OSError):
                    held = hold.make()
                    held.new_link(path)
        return held

    def look(self, paths: tuple[str, ...] | None) -> bytes:
        """See `Scans.look`."""
        return self._scans.look(paths)

    def adopt(self, more: bytes, paths: tuple[str, ...] | None) -> Base:
        """The tree before a call that somebody else ran: that of the newest commit. Nothing is written."""
        return Base(self._scans.before_adopted(more, paths), "watch" if paths is None else "scan")

    def take_back(self, base: Base) -> None:
        """A call that was adopted is about to be rolled back. OSError: the liveness file cannot be written."""
        base.before.git_stays = self._changes_git(base) and not wait_for_git(self._files)
        self._stamp.start()

    def _changes_git(self, base: Base) -> bool:
        return base.seen is not None and any(is_in_git(item.path) for item in base.seen[1].differing)

    def begun(self, base: Base) -> None:
        """The log has the record that a call begins with."""
        self._stamp.begun()
        self.any_open = True

    def copy_hidden(self, call_id: str) -> None:
        """Copy the hidden files, which a rollback of the outermost call restores. OSError: they cannot be kept."""
        if self._scans.history.hidden is not None:
            self._copies.make(self._scans.history.hidden, call_id)

    def sealed(self) -> None:
        """The outermost call has ended all its programs. What changes from now on is somebody else's."""
        self._stamp.pause()

    def end(self) -> None:
        """The outermost call has ended."""
        self._stamp.stop()
        self._copies.clear()
        self.any_open = self.contained = self._detector.calling = False

    def changes(self, base: Base, version: int) -> list[Change]:
        """Look at the tree; what changed since a call began. An index of git that was refreshed is no change."""
        return self._changes(base, self._look(base, version))

    def _changes(self, base: Base, after: After) -> list[Change]:
        changes = self._scans.changes(base.before, after)
        hidden = self._scans.history.hidden
        if self._copies.paths and hidden is not None:
            found = {change.path: change for change in changes if change.path not in self._copies.paths}
            found |= {change.path: change for change in self._copies.changes(hidden)}
            changes = [found[path] for path in sorted(found)]
        refreshed = self._scans.refreshed_indexes(base.before, after)
        return [change for change in changes if change.path not in refreshed]

    def scanned(self, base: Base, version: int) -> ScannedFiles:
        """What changed, for a history; as `changes` saw it, if it was asked. The history has refreshed indexes too."""
        after = base.seen_at(version) or self._look(base, version)
        return self._scans.scanned(base.before, after, self._changes(base, after))

    def differs(self, base: Base, version: int) -> bool:
        """Whether anything is not as it was when a call began, be it the time of a file; as `changes` saw it."""
        after = base.seen_at(version)
        return after is None or not all(map(is_only_time, after.differing))

    def _look(self, base: Base, version: int) -> After:
        after = self._scans.after(base.before)
        base.looked(self._detector.how)
        if self.contained:
            after = self._scans.disarmed(base.before, after)
        base.seen = version, after
        return after

    def unkept(self, base: Base, version: int, hold: HoldHandle) -> list[str]:
        """The paths of which a rollback to where a call began would keep no copy. OSError: the tree cannot be read."""
        after = base.seen_at(version) or self._look(base, version)
        after, _ = self._scans.made_readable(base.before, after)
        way = self._way(base.before, after, lambda item, here: True, hold)
        return self._scans.unkept(base.before, after, way.items.keys())

    def roll_back(
        self, base: Base, version: int, hold: HoldHandle, note: Note, *, tool: str, call_id: str
    ) -> RestoreReport:
        """Bring the tree back to where a call began. OSError: it could not be completed, and may be tried again."""
        before, after, tried = base.before, base.seen_at(version), base.tried
        if after is None or tried is not None:
            after = self._scans.after(before)
        seen = {path for path, _, _ in after.differing} | after.found.excluded.keys() if tried is None else tried
        after, opened = self._scans.made_readable(before, after)

        def judge(item: Difference, here: os.stat_result | None) -> bool:
            path, wanted, now = item
            below_opened = any(path.startswith(f"{above}/") for above in opened)
            by_trying = tried is not None and is_directory(wanted) and (now is None or is_directory(now))
            return path in seen or below_opened or by_trying

        way = self._way(before, after, judge, hold)
        base.tried = {*way.items, *(tried or ())}
        return self._go(way, hold, note, self._scans.keep(before, after, way.items, tool=tool, call_id=call_id))

    def recover(
        self,
        commit: str,
        more: bytes,
        kept: str | None,
        stamp_path: str,
        hold: HoldHandle,
        note: Note,
        *,
        tool: str,
        call_id: str,
    ) -> RestoreReport:
        """`roll_back` for an outermost call whose process was killed; ``kept`` is the commit that an earlier try has
        kept.

        Raises:
            LookupError: the store does not have the state before the call.
            OSError: it could not be completed.
        """
        before, after = self._scans.recovered(commit, more)
        after, opened = self._scans.made_readable(before, after)
        # The stamp is of the system's clock, and the times of files may be of a server's.
        try:
            ahead_ns = clock_ahead_ns(self._files.root)
        except OSError:
            ahead_ns = clock_ahead_ns(hold.make().descriptor, "clock")
        self._copies.load(call_id)
        limit_ns = LivenessFile.last_ns(stamp_path) + ahead_ns + GRACE_NS
        judge = _ended(self._files, limit_ns, self._scans.kept_states(before, kept), opened)
        way = self._way(before, after, judge, hold)
        if kept is None:  # an earlier try has given directories new times itself
            way.spare_times(limit_ns, opened)
            aborted = self._scans.keep(before, after, way.items, tool=tool, call_id=call_id)
        else:
            aborted = self._scans.history.keeper.kept_as(kept)
        return self._go(way, hold, note, aborted, limit_ns)

    def _way(self, before: ScanCommit, after: After, judge: Judge, hold: HoldHandle) -> TreeRollback:
        states, hidden = self._scans.store.states, self._scans.history.hidden
        if before.adopted:  # a commit that somebody else makes meanwhile needs what it adds
            after = After(after.found, [one for one in after.differing if not is_new_object(one)])
        if before.git_stays:
            judge = _sparing_git(judge)
        copied = self._copies.restorable
        return TreeRollback(self._files, self._renames, hold, states, before, after, judge, hidden, copied)

    def _go(
        self, way: TreeRollback, hold: HoldHandle, note: Note, aborted: Aborted, limit_ns: int | None = None
    ) -> RestoreReport:
        told = [path or "the root" for path, item in sorted(way.items.items()) if not is_only_time(item)]
        note({"taking back": aborted.commit})
        done = way.run()
        self._copies.restore(hold, done, limit_ns)
        self._scans.sync()
        done.notes[:0] = [*_rollback_notes(told, aborted), *aborted.notes]
        return done


def _sparing_git(judge: Judge) -> Judge:
    def spare(item: Difference, here: os.stat_result | None) -> bool:
        return not is_in_git(item.path) and judge(item, here)

    return spare


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


def _rollback_notes(listed: Sequence[str], aborted: Aborted) -> list[str]:
    if not listed:
        return []
    more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    kept = f"; what they were is kept as {aborted.name}" if aborted.name is not None else ""
    return [f"rolled back: {', '.join(listed[:MOST_LISTED])}{more}{kept}"]
