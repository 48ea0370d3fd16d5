"""Bringing back a tree that was changed unseen, from the store: by descriptors, never through a link.

New things go first, so that a full disk has room. Then inodes that only moved are held, what is in the way goes,
directories come from the top, files each by a new one and an exchange, and directories get their modes and times last,
from the bottom. All of it can be done again after it was cut off anywhere: what is as it was before is left alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final

from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.kernel import Renames, failpoint, lstat, set_mode
from ringfence_sandbox.opaque.choosing import Chosen
from ringfence_sandbox.opaque.file_rollback import IN_THE_WAY, FileRollback
from ringfence_sandbox.opaque.kept_open import KeptOpen
from ringfence_sandbox.opaque.states import After, Before, Left
from ringfence_sandbox.scan.stat_cache import stamp_of
from ringfence_sandbox.store.entries import Entry, is_directory
from ringfence_sandbox.store.states import States
from ringfence_sandbox.transaction.hold import Hold
from ringfence_sandbox.transaction.restore import RestoreReport


class TreeRollback:
    """One rollback, from the state `after` to the state `before`."""

    def __init__(
        self,
        files: Confined,
        renames: Renames,
        hold: Hold,
        states: States,
        before: Before,
        after: After,
        chosen: Chosen,
        *,
        kept_open: KeptOpen,
    ) -> None:
        self._files = files
        self._kept_open = kept_open
        self._renames = renames
        self._hold_of = hold
        self._make_holding = hold.make
        self._states = states
        self.before: Final = before
        self._after = after
        self._done = RestoreReport(chosen.conflicts)
        self._items = chosen.items
        self._modes = chosen.modes
        self._stays = chosen.stays
        self._times_ns: dict[int, int] = {}
        """By their inodes, the times that files of before have got back."""
        self._held: dict[int, str] = {}
        """Places of inodes of before the call, by number: in slots, or below them."""
        self._file_rollback = FileRollback(files, states, before, self._items, hold.make, self._done)
        self.copied: Callable[[int, int], None] = lambda old, new: None
        """Is told of a file that no scan took in, and that has another inode now, before it gets its name."""

    def spare_times(self, limit_ns: int, ctimes_ns: Mapping[str, int]) -> None:
        """Have directories that were changed after a moment keep the time of that: somebody else did. ``ctimes_ns`` are
        those of what was changed only now, to be looked at."""
        for path, _, now in self._after.differing:
            here = self._look(path)
            if now is None or here is None or not is_directory(now):
                continue
            # By both its times: a program may give a directory any time of its last change.
            if min(now.meta.mtime_ns, ctimes_ns.get(path, here.st_ctime_ns)) > limit_ns:
                self._file_rollback.times_ns[path] = now.meta.mtime_ns

    def run(self) -> RestoreReport:
        """Bring back what was chosen. OSError: something could not be; it may be tried again."""
        self._index_held()
        sources = self._sources()
        gathered = {place for places in sources.values() for place in places}
        away = [path for path in sorted(self._items, reverse=True) if self._goes(path)]
        for path in away:
            if path not in gathered and not self._is_directory(path):
                self._remove(path)
        for inode, places in sources.items():
            self._with_room(lambda inode=inode, places=places: self._hold(inode, places), gathered)
        for path in away:
            self._remove(path)
        for path, (_, wanted, _) in sorted(self._items.items()):
            if is_directory(wanted):
                self._with_room(lambda path=path: self._make_directory(path), gathered)
        self._put_files()
        self._put_left_out()
        self._file_rollback.finish()
        self._find_new_inodes()
        return self._done

    def _goes(self, path: str) -> bool:
        _, wanted, now = self._items[path]
        if now is None:
            return path in self._after.found.excluded or path in self.before.left
        return wanted is None or wanted.kind != now.kind

    def _is_directory(self, path: str) -> bool:
        here = self._look(path)
        return here is not None and stat.S_ISDIR(here.st_mode)

    # -- inodes of before

    def _index_held(self) -> None:
        """What typed calls since have displaced, and what an earlier try has gathered."""
        for place, inode in self._hold_of:
            if not self.before.displaced.has(place):
                self._held[inode] = place

    def _sources(self) -> dict[int, list[str]]:
        """Where inodes of before are now that are to be held, since they belong elsewhere."""
        at: dict[int, list[str]] = {}
        for path, (_, _, now) in self._items.items():
            stamp = self._after.stamps.get(path)
            if stamp is not None and not is_directory(now):
                at.setdefault(stamp[0], []).append(path)
        found: dict[int, list[str]] = {}
        for path, (_, wanted, _) in self._items.items():
            inode = self.before.inode(path)
            if wanted is None or is_directory(wanted) or inode not in at or path in at[inode]:
                continue
            for place in at[inode]:
                now = self._items[place].after
                if now is not None and (now.kind, now.oid) == (wanted.kind, wanted.oid):
                    found.setdefault(inode, []).append(place)
        for path, left in self.before.left.items():
            for place in at.get(left.inode, ()):
                here = self._look(place)
                if place != path and here is not None and left.fits(here):
                    found.setdefault(left.inode, []).append(place)
        return found

    def _hold(self, inode: int, places: Sequence[str]) -> None:
        for place in places:
            here = self._look(place)
            if here is None or here.st_ino != inode or inode in self._held:
                continue
            holding = self._make_holding()
            slot = holding.new_slot()
            self._file_rollback.touch(place)
            try:
                with self._files.parent(place) as (at, name):
                    self._renames.rename(at, name, holding.descriptor, str(slot))
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EBUSY):
                    raise
                return  # in a subvolume, say: it is made anew; what is mounted stays where it was moved to
            self._held[inode] = f"{holding.name}/{slot}"

    # -- taking away

    def _remove(self, path: str) -> None:
        here = self._look(path)
        if here is None:
            return
        self._file_rollback.touch(path)
        try:
            with self._files.parent(path) as (at, name):
                if not stat.S_ISDIR(here.st_mode):
                    if not self._as_left(path, here):
                        raise OSError(errno.EEXIST, "was changed by somebody else", path)
                    failpoint("unlink")
                    os.unlink(name, dir_fd=at)
                elif path in self._after.found.excluded:  # nobody knows what is in it, all of it is the call's
                    holding = self._make_holding()
                    self._renames.rename(at, name, holding.descriptor, str(holding.new_slot(path)))
                else:
                    failpoint("rmdir")
                    os.rmdir(name, dir_fd=at)
        except OSError as error:
            self._conflict_or_raise(path, error)
            self._items.pop(path, None)

    def _as_left(self, path: str, here: os.stat_result) -> bool:
        """Whether a file is as the scan saw it, or has got its time of before meanwhile, by another of its names.
        (Taking another of its names away changes its ctime.)"""
        stamp, now = self._after.stamps.get(path), stamp_of(here)
        if stamp is None or stamp[:2] != now[:2]:
            return False
        return stamp[2] == now[2] or self._times_ns.get(here.st_ino) == here.st_mtime_ns

    # -- bringing back

    def _make_directory(self, path: str) -> None:
        here = self._look(path)
        if here is not None:
            if not stat.S_ISDIR(here.st_mode):
                self._done.conflicts.add(path)
            return
        self._file_rollback.touch(path)
        try:
            with self._files.parent(path) as (at, name):
                failpoint("mkdir")
                os.mkdir(name, 0o700, dir_fd=at)
            self._done.remade = True
        except OSError as error:
            self._conflict_or_raise(path, error)

    def _put_files(self) -> None:
        files = {
            path: wanted
            for path, (_, wanted, _) in self._items.items()
            if wanted is not None and not is_directory(wanted) and path not in self._done.conflicts
        }
        numbers = {wanted.meta.link for wanted in files.values() if wanted.meta.link}
        groups = self._states.linked(self.before.commit, numbers)
        done: set[str] = set()
        for path, wanted in sorted(files.items()):
            if path not in done:
                group = groups.get(wanted.meta.link, [path]) if wanted.meta.link else [path]
                done.update(group)
                unreachable = {one for one in group if not self._is_reachable(one)}
                self._done.conflicts |= unreachable & files.keys()
                group = [one for one in group if one not in unreachable | self._done.conflicts]
                if not group:
                    continue
                try:
                    self._with_room(lambda group=group, wanted=wanted: self._put_group(group, wanted))
                except OSError as error:
                    self._conflict_or_raise(path, error)

    def _is_reachable(self, path: str) -> bool:
        above = self._look(path.rpartition("/")[0])
        return above is not None and stat.S_ISDIR(above.st_mode)

    def _with_room(self, work: Callable[[], None], but: Set[str] = frozenset()) -> None:
        """Do something, and where the disk is too full for it, again without what the call made of the files that are
        still to be put, which is all that there is to give up; ``but`` those that are to be held first."""
        try:
            work()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            for path, (_, wanted, now) in [*self._items.items()]:
                if wanted is None or is_directory(wanted) or path in but or path in self._done.conflicts:
                    continue
                if now is not None and not is_directory(now) and not self._stands(path, wanted, alone=False):
                    self._remove(path)
            work()

    def _put_group(self, group: Sequence[str], wanted: Entry) -> None:
        """Have these paths be one file, as before: the very inode where that is still somewhere, else a new one."""
        standing = next((path for path in group if self._stands(path, wanted, alone=len(group) == 1)), None)
        if standing is not None:
            with self._files.parent(standing) as (at, name):
                self._make_alike(at, name, wanted, standing)
            first = standing
        else:
            slot = self._held_slot(group, wanted)
            if slot is None:
                slot = self._file_rollback.new(wanted, group[0])
            # Where one name may not be given, the others are.
            first = next((path for path in group if self._puts(path, slot)), None)
            if first is None:
                return
        there = self._look(first)
        for path in group:
            here = self._look(path)
            if path in self._done.conflicts:
                continue
            if there is not None and (here is None or here.st_ino != there.st_ino):
                holding = self._make_holding()
                slot = holding.new_slot()
                with self._files.parent(first) as (at, name):
                    failpoint("link")
                    os.link(name, str(slot), src_dir_fd=at, dst_dir_fd=holding.descriptor, follow_symlinks=False)
                self._puts(path, slot)

    def _make_alike(self, at: int, name: str, wanted: Entry, path: str) -> None:
        self._file_rollback.make_alike(at, name, wanted, path)
        here = os.lstat(name, dir_fd=at)
        self._times_ns[here.st_ino] = here.st_mtime_ns

    def _stands(self, path: str, wanted: Entry, *, alone: bool) -> bool:
        here = self._look(path)
        if here is None or stat.S_ISDIR(here.st_mode):
            return False
        item = self._items.get(path)
        if item is None:
            return True
        now = item.after
        if now is None or (now.kind, now.oid) != (wanted.kind, wanted.oid) or not self._as_left(path, here):
            return False
        return here.st_ino == self.before.inode(path) or (alone and here.st_nlink == 1)

    def _held_slot(self, group: Sequence[str], wanted: Entry) -> int | None:
        """The slot to which the inode of before has come, if it has still its bytes."""
        for path in group:
            place = self._held.get(self.before.inode(path) or -1)
            if place is None or self._file_rollback.content(place) != wanted.oid:
                continue
            holding = self._make_holding()
            slot = holding.new_slot()
            with self._files.parent(place) as (at, name):
                self._renames.rename(at, name, holding.descriptor, str(slot))
            self._make_alike(holding.descriptor, str(slot), wanted, path)
            return slot
        return None

    def _puts(self, path: str, slot: int) -> bool:
        """`_put`; False, and a conflict, where it cannot."""
        try:
            self._put(path, slot)
        except OSError as error:
            self._conflict_or_raise(path, error)
            return False
        return True

    def _put(self, path: str, slot: int) -> None:
        """Give what is in a slot its name. Somebody else's at the path stays, and is a conflict."""
        self._done.remade = True
        holding = self._make_holding()
        self._file_rollback.touch(path)
        with self._files.parent(path) as (at, name):
            if lstat(at, name) is None:
                self._renames.rename(holding.descriptor, str(slot), at, name)
                return
            self._renames.exchange(at, name, holding.descriptor, str(slot))
            displaced = holding.look(slot)
            item = self._items.get(path)
            mine = item is None or (displaced is not None and self._as_left(path, displaced))
            if not mine:
                self._renames.exchange(at, name, holding.descriptor, str(slot))
                raise OSError(errno.EEXIST, "was changed by somebody else", path)
        if item is not None and displaced is not None and displaced.st_ino not in self._held:
            failpoint("unlink")
            os.unlink(str(slot), dir_fd=holding.descriptor)  # at once, for the room

    def _put_left_out(self) -> None:
        """What no scan took in: back to its place if it only moved; else it is said."""
        for path, left in self.before.left.items():
            here = self._look(path)
            if here is not None and left.is_at(here):
                if not left.fits(here) and not stat.S_ISDIR(here.st_mode):
                    self._say_left(path, left, "was changed, and stays so")
                if path in self._modes:
                    self._give_mode(path, left)
                    self._done.notes.append(f"{path} has its permissions again")
                continue
            if path in self._stays:
                self._done.notes.append(f"{path} stays at {self._stays[path]}: somebody else's is in its place")
                continue
            if left.reason == "hidden" and here is not None:
                self._say_left(path, left, "was saved anew, and stays so")
                continue
            place = self._held.get(left.inode)
            held = None if place is None else self._files.look(place)
            if (held is None or not left.fits(held)) and self._kept_open.has(left):
                place = self._reopened(path, left)
                held = None if place is None else self._files.look(place)
                left = self.before.left[path]
            if place is None or held is None or not left.fits(held):
                self._say_left(path, left, "is gone, and cannot be brought back")
            elif here is None and self._is_reachable(path) and self._moved(place, path):
                if not left.has_mode(held):
                    self._give_mode(path, left)
                self._done.notes.append(f"{path} is back in its place")
            else:
                holding = self._make_holding()
                slot = holding.new_slot()
                with self._files.parent(place) as (at, name):
                    self._renames.rename(at, name, holding.descriptor, str(slot))
                self._done.conflicts.add(path)
                self._done.displaced[path] = holding.place(slot)
        self._done.new_inodes.update(self._kept_open.became)

    def _moved(self, place: str, path: str) -> bool:
        """Move it to its path, unless somebody has saved another file there since the look."""
        self._file_rollback.touch(path)
        with self._files.parent(place) as (at, name), self._files.parent(path) as (to, new):
            try:
                self._renames.rename(at, name, to, new)
            except FileExistsError:
                return False
        return True

    def _reopened(self, path: str, left: Left) -> str | None:
        """The place to which a file that the call has removed, and that is open, has come."""
        holding = self._make_holding()
        try:
            slot = self._kept_open.brought_back(left, holding)
        except OSError as error:
            self._done.notes.append(f"{path} could not be copied back: {error.strerror}")
            return None
        inode = self._kept_open.became.get(left.inode, left.inode)
        if inode != left.inode:
            self._done.remade = True
            self.copied(left.inode, inode)
        self.before.left = {**self.before.left, path: replace(left, inode=inode)}  # for another try, too
        return f"{holding.name}/{slot}"

    def _say_left(self, path: str, left: Left, what: str) -> None:
        thing = path
        if self.before.displaced.has(path):  # the way back from the deed that holds it cannot be right
            self._done.conflicts.add(path)
            thing = f"what was at {self.before.displaced.said(path)} before"
        self._done.notes.append(f"{thing} {what}: it was not taken in ({left.reason})")

    def _give_mode(self, path: str, left: Left) -> None:
        with self._files.parent(path) as (at, name):
            failpoint("chmod")
            set_mode(at, name, stat.S_IMODE(left.mode))

    def _find_new_inodes(self) -> None:
        """Of what earlier deeds are about: this way back has made some anew, or one before it, or a try cut off."""
        for path, old in self.before.inodes.items():
            here, wanted = self._look(path), self._states.entry(self.before.commit, path)
            if here is None or wanted is None or path in self._done.conflicts:
                continue
            if here.st_ino != old and stat.S_ISDIR(here.st_mode) == is_directory(wanted):
                self._done.new_inodes[old] = here.st_ino

    # -- shared

    def _look(self, path: str) -> os.stat_result | None:
        return self._files.look(path)

    def _conflict_or_raise(self, path: str, error: OSError) -> None:
        if error.errno not in IN_THE_WAY:
            raise error
        self._done.conflicts.add(path)
        if error.errno == errno.EPERM:
            self._done.notes.append(f"{path} may not be replaced or removed ({error.strerror}): see `lsattr`")
