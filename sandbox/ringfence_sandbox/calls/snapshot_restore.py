"""Going from the state now to one that a snapshot holds, over the deeds that lead there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ringfence_sandbox.calls.states import State, led_to, line
from ringfence_sandbox.disk.records import Deed, Identity

if TYPE_CHECKING:
    from ringfence_sandbox.calls.core import Core


class SnapshotRestore:
    """Acts within one operation. What others changed is left alone."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def go(self, up: Iterable[State], down: Iterable[State]) -> None:
        """Leave the states that lie above, latest first, and enter those that lie below, in order."""
        for left in up:
            left.times |= self._times_at_end(left.deeds)
            for number, deed in reversed(list(enumerate(left.deeds))):
                if deed.kind == "times":
                    self._set_times(deed.path, deed.atime_ns, deed.mtime_ns)
                elif deed.kind == "mkdir":
                    left.deeds[number] = self._set_aside(deed)
                else:
                    self._perform_if_it_stands(deed.inverse())
        became: dict[int, int] = {}
        for entered in down:
            for deed in entered.deeds:
                if deed.kind != "times":
                    self._do_again(deed, became)
            for path, (atime_ns, mtime_ns) in entered.times.items():
                self._set_times(path, atime_ns, mtime_ns)

    def _set_times(self, path: str, atime_ns: int, mtime_ns: int) -> None:
        """Give a directory the times that it had, so that a call around this restore can take that back."""
        found = self._core.files.look(path)
        if found is not None and path not in self._core.noting.touched:
            times = Deed("times", path, new=Identity.of(found), atime_ns=found.st_atime_ns, mtime_ns=found.st_mtime_ns)
            self._core.perform(times, on_tip=False)
            self._core.noting.touched.add(path)
        self._core.hands.set_times(path, atime_ns, mtime_ns, None)

    def _set_aside(self, made: Deed) -> Deed:
        """Hold a directory that a deed made, so that the same one can come back; the deed that then brings it.

        Only an empty one: what else is in it is somebody else's, and stays.
        """
        kept = Deed("put", made.path, slot=self._core.holding.new_slot(), new=made.new, mode=made.mode)
        if self._core.hands.is_empty(made.path):
            self._perform_if_it_stands(kept.inverse())
        return kept

    def _perform_if_it_stands(self, deed: Deed) -> bool:
        try:
            if self._core.hands.stands(deed):
                self._core.perform(deed, on_tip=False)
                return True
        except FileNotFoundError:
            pass
        return False

    def _do_again(self, deed: Deed, became: dict[int, int]) -> None:
        deed.become(became)
        again = Deed(deed.kind, deed.path, deed.to, deed.slot, deed.new, deed.old, deed.mode, deed.mode_before)
        if deed.kind == "put" and deed.mode and not self._core.hands.is_held(deed.slot):
            # A directory that was set aside in a call which was rolled back: it is made anew.
            again = Deed("mkdir", deed.path, mode=deed.mode)
        if self._perform_if_it_stands(again):
            if deed.new is not None and again.new is not None:  # what is made anew has another inode
                became[deed.new.inode] = again.new.inode
            deed.new, deed.old = again.new, again.old

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
