"""Going from the state now to one that a snapshot holds, over the deeds that lead there."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ringfence.errors import SnapshotRestoreError
from ringfence_sandbox.calls.holding import entries_below
from ringfence_sandbox.calls.states import State, led_to, line
from ringfence_sandbox.disk.records import Deed, Identity

if TYPE_CHECKING:
    from ringfence_sandbox.calls.core import Core


class SnapshotRestore:
    """Acts within one operation. What others changed is left alone."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def go(self, up: Iterable[State], down: Iterable[State]) -> None:
        """Leave the states that lie above, latest first, and enter those that lie below, in order.

        SnapshotRestoreError where somebody has removed what a snapshot held.
        """
        for left in up:
            left.times |= self._times_at_end(left.deeds)
            for number, deed in reversed(list(enumerate(left.deeds))):
                self._leave(left, number, deed)
        became: dict[int, int] = {}
        for entered in down:
            for number, deed in enumerate(entered.deeds):
                if deed.kind != "times":
                    self._enter(entered, number, deed, became)
            for path, (atime_ns, mtime_ns) in entered.times.items():
                self._set_times(path, atime_ns, mtime_ns)

    def _set_times(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        """Give a directory the times that it had, so that a call around this restore can take that back."""
        found = self._core.files.look(path)
        if found is not None and path not in self._core.deed_log.touched:
            times = Deed("times", path, new=Identity.of(found), atime_ns=found.st_atime_ns, mtime_ns=found.st_mtime_ns)
            self._core.perform(times, on_tip=False)
            self._core.deed_log.touched.add(path)
        self._core.runner.set_times(path, atime_ns, mtime_ns, None)

    def _leave(self, left: State, number: int, deed: Deed) -> None:
        if deed.kind == "times":
            self._set_times(deed.path, deed.atime_ns, deed.mtime_ns)
        elif deed.kind == "mkdir":
            left.deeds[number] = self._set_aside(deed)
        elif deed.kind == "put" and deed.mode:  # a directory that was set aside before
            if self._core.runner.is_empty(deed.path):
                self._perform_if_it_stands(deed.inverse())
        elif self._went(left, number, deed.inverse()) and deed.kind == "take" and _is_directory(deed):
            left.came_back[number] = self._below(deed.path)

    def _enter(self, entered: State, number: int, deed: Deed, became: dict[int, int]) -> None:
        known = entered.came_back.get(number)
        if known is not None and deed.kind == "take" and self._below(deed.path) != known:
            entered.apart.add(number)  # somebody has changed what is in it since it came back, so it stays
        elif deed.kind == "put" and deed.mode:
            self._do_again(deed, became)
        else:
            self._went(entered, number, deed, became)

    def _went(self, state: State, number: int, deed: Deed, became: dict[int, int] | None = None) -> bool:
        """Do a deed of a state, or its inverse, if the tree is as it expects. SnapshotRestoreError where only what was
        held for it is missing, though nobody's change had kept it in its place when the state was last gone through."""
        done = self._perform_if_it_stands(deed) if became is None else self._do_again(deed, became)
        if done:
            state.apart.discard(number)
        elif number not in state.apart:
            if self._core.runner.is_missing(deed):
                raise SnapshotRestoreError(
                    f"what the snapshot held of {deed.path} was removed from where displaced files wait in the root, "
                    "so it cannot be gone back to: go back to a step of the history instead"
                )
            state.apart.add(number)
        return done

    def _below(self, path: str) -> set[tuple[str, object]]:
        """All that is in a directory: its files as they are, its directories by their names."""
        found = self._core.files.look(path)
        if found is None or not stat.S_ISDIR(found.st_mode):
            return set()
        try:
            return {
                (os.path.relpath(place, path), None if stat.S_ISDIR(one.st_mode) else Identity.of(one))
                for place, one in entries_below(self._core.files, path)
            }
        except PermissionError:  # nobody who is not let in can say that it has changed
            return set()

    def _set_aside(self, made: Deed) -> Deed:
        """Hold a directory that a deed made, so that the same one can come back; the deed that then brings it.

        Only an empty one: what else is in it is somebody else's, and stays.
        """
        kept = Deed("put", made.path, slot=self._core.holding.new_slot(), new=made.new, mode=made.mode)
        if self._core.runner.is_empty(made.path):
            self._perform_if_it_stands(kept.inverse())
        return kept

    def _perform_if_it_stands(self, deed: Deed) -> bool:
        try:
            if self._core.runner.stands(deed):
                self._core.perform(deed, on_tip=False)
                return True
        except FileNotFoundError:
            pass
        return False

    def _do_again(self, deed: Deed, became: dict[int, int]) -> bool:
        deed.become(became)
        again = Deed(deed.kind, deed.path, deed.to, deed.slot, deed.new, deed.old, deed.mode, deed.mode_before)
        if deed.kind == "put" and deed.mode and not self._core.runner.is_held(deed.slot):
            # A directory that was set aside in a call which was rolled back: it is made anew.
            again = Deed("mkdir", deed.path, mode=deed.mode)
        if not self._perform_if_it_stands(again):
            return False
        if deed.new is not None and again.new is not None:  # what is made anew has another inode
            became[deed.new.inode] = again.new.inode
        deed.new, deed.old = again.new, again.old
        return True

    def note_times(self, state: State, since: State | None) -> None:
        """Have a state remember now what a rollback, which leaves it without a look, would take: of the directories
        that changed on the way to it from an earlier one."""
        states = [*itertools.takewhile(lambda one: one is not since, line(state))]
        state.times |= self._times_at_end([deed for one in reversed(states) for deed in one.deeds])

    def _times_at_end(self, deeds: Sequence[Deed]) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for number, deed in enumerate(deeds):
            if deed.kind not in ("times", "mkdir"):
                continue
            path = led_to(deed.path, deeds[number + 1 :])
            there = None if path is None else self._core.files.look(path)
            if path is not None and there is not None:
                found[path] = (there.st_atime_ns, there.st_mtime_ns)
        return found


def _is_directory(deed: Deed) -> bool:
    return deed.new is not None and deed.new.kind == oct(stat.S_IFDIR)
