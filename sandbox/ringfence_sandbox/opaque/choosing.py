"""What a way back is to bring back: of all that differs from before an opaque call, what the call has changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable

from ringfence.filesystem.paths import directories_above
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.opaque.states import After, Before
from ringfence_sandbox.scan.stat_cache import Stamp, stamp_of
from ringfence_sandbox.store.entries import Difference, Entry, is_directory

Judge = Callable[[Difference, os.stat_result | None], bool]
"""Whether a path that differs was changed by the call; what is there now is given too."""


class Chosen:
    """``items`` are to be brought back, by path, and of ``modes``, which no scan took in, the permission bits. What
    somebody else changed is in ``conflicts``, and left alone. What no scan took in, and where somebody else's is now,
    ``stays`` at the place to which the call has moved it: there is no other copy."""

    def __init__(self, files: Confined, before: Before, after: After, judge: Judge) -> None:
        self.items: dict[str, Difference] = {}
        self.modes: set[str] = set()
        self.conflicts: set[str] = set()
        self.stays: dict[str, str] = {}
        self._files = files
        self._before = before
        self._after = after
        self._judge = judge
        self._choose()
        self._let_stay()

    def _choose(self) -> None:
        for item in self._all():
            path, wanted, now = item
            here = self._files.look(path)
            if self._was_left_out(path, here):
                continue
            if self._judge(item, here) and self._is_as_seen(path, now, here):
                self.items[path] = item
            elif here is not None or wanted is not None:
                self.conflicts.add(path)
        for path, left in self._before.left.items():
            here = self._files.look(path)
            if here is not None and left.is_at(here) and not left.has_mode(here):
                if self._judge(Difference(path, None, None), here):
                    self.modes.add(path)
                else:
                    self.conflicts.add(path)

    def _is_as_seen(self, path: str, now: Entry | None, here: os.stat_result | None) -> bool:
        """Whether what is at a path is still what the scan saw there, or has gone since."""
        if now is None and path not in self._after.found.excluded:
            return here is None
        if here is None:
            return True
        if is_directory(now):
            return stat.S_ISDIR(here.st_mode)
        return stamp_of(here) == self._after.stamps.get(path)

    def _let_stay(self) -> None:
        moved = {
            stamp[0]: path for path in self._after.found.excluded if (stamp := self._after.stamps.get(path)) is not None
        }
        for path, left in self._before.left.items():
            place = moved.get(left.inode)
            if place is None or place not in self.items or self.conflicts.isdisjoint({path, *directories_above(path)}):
                continue
            here = self._files.look(place)
            if here is not None and left.fits(here):
                del self.items[place]
                self.conflicts.add(path)
                self.stays[path] = place

    def _all(self) -> Iterable[Difference]:
        known = {path for path, _, _ in self._after.differing}
        yield from self._after.differing
        for path in self._after.found.excluded:
            if path not in known and path not in self._before.left:
                yield Difference(path, None, None)
        for path, left in self._before.left.items():
            here = self._files.look(path)
            if path not in known and here is not None and not left.is_at(here):
                if left.reason == "hidden" and not self._before.paths_of({here.st_ino}):
                    continue  # somebody has saved it anew, as editors do: there is no other copy
                yield Difference(path, None, None)

    def _was_left_out(self, path: str, here: os.stat_result | None) -> bool:
        """Whether it is, or is in, something that was there before and that no scan took in; or is just as it was."""
        left = self._before.left
        if path in left:
            return here is None or left[path].is_at(here)
        if path in self._after.found.excluded and here is not None and self._stamp_before(path) == stamp_of(here):
            return True
        above = path.rpartition("/")[0] if left else ""
        while above:
            if above in left:
                there = self._files.look(above)
                return there is not None and left[above].is_at(there)
            above = above.rpartition("/")[0]
        return False

    def _stamp_before(self, path: str) -> Stamp | None:
        folder, _, name = path.rpartition("/")
        return self._before.stamps.get(path) or self._before.known.get(folder, {}).get(name)
