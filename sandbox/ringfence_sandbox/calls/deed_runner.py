"""Doing deeds and undoing them. Rollback in the process and recovery after a crash both come here.

Undoing looks first: a deed that was noted and never done, or undone already, is left alone, so undoing can be
interrupted anywhere and repeated. What the call left at a path is recognised by its identity; anything else there is
somebody's who came later. It stays, and is a conflict.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ringfence_sandbox.calls.directory_times import ChangedDirectory, DirectoryTimes
from ringfence_sandbox.calls.holding import Holding
from ringfence_sandbox.calls.power_loss import is_same_writing, is_torn_file
from ringfence_sandbox.disk.confined import UNREACHABLE, Confined, read_file
from ringfence_sandbox.disk.kernel import Abilities, Renames, failpoint, lstat
from ringfence_sandbox.disk.records import Deed, Identity

_HASHED_BYTES = 1 << 20
"""In the process, what is larger is known by its size and time alone: a rollback must not cost what a file weighs."""


class Conflict(Exception):
    """Somebody else's is at the path, and stays."""


class DeedRunner:
    """What changes a tree: one system call a deed."""

    def __init__(self, files: Confined, can: Abilities) -> None:
        self.files = files
        self.holding: Holding | None = None
        self.thorough = False
        """Whether content of any size is compared before it is taken for the call's own, as after a crash."""
        self.lost_power = False
        """Whether a file of the call may have lost bytes to the loss of power that ended it."""
        self.swapped: dict[int, int] = {}
        """By slot, the inode that a swap took from its path."""
        self.notes: list[str] = []
        """What undoing could not bring back, in words."""
        self.times = DirectoryTimes(files)
        self._near: tuple[str, int] | None = None
        """The directory that the swap undone last was in, open: what comes next is another one in it, or its times."""
        self._renames = Renames(can)
        self._undo: dict[str, Callable[[Deed], None]] = {
            "put": self._undo_put,
            "take": self._undo_take,
            "swap": self._undo_swap,
            "move": self._undo_move,
            "mkdir": self._undo_mkdir,
            "rmdir": self._undo_rmdir,
            "mode": self._undo_mode,
            "times": self._undo_times,
        }

    @property
    def _held(self) -> int:
        assert self.holding is not None, "a deed with a slot has a holding directory"
        return self.holding.descriptor

    # -- doing

    def do(self, deed: Deed, there: tuple[int, str] | None = None) -> None:
        """Raises OSError where it was not done. Completes what the deed says about what it met. ``there`` is the
        directory of a swap and the name in it, if it is open already."""
        match deed.kind:
            case "put":
                with ChangedDirectory(self.times, deed.path) as (at, name):
                    self._renames.rename(self._held, str(deed.slot), at, name)
            case "take":
                with ChangedDirectory(self.times, deed.path) as (at, name):
                    self._renames.rename(at, name, self._held, str(deed.slot))
                deed.new = self._in_slot(deed.slot)
            case "swap" if there is not None:
                self._swap(deed, *there)
            case "swap":
                with self.files.parent(deed.path) as (at, name):
                    self._swap(deed, at, name)
            case "move":
                with (
                    ChangedDirectory(self.times, deed.path) as (at, name),
                    ChangedDirectory(self.times, deed.to) as (to, new),
                ):
                    self._renames.rename(at, name, to, new)
            case "mkdir":
                with ChangedDirectory(self.times, deed.path) as (at, name):
                    failpoint("mkdir")
                    os.mkdir(name, deed.mode or 0o777, dir_fd=at)
                    found = os.lstat(name, dir_fd=at)
                    deed.new = Identity.of(found)
                    if deed.mode and stat.S_IMODE(found.st_mode) != deed.mode:
                        self._set_mode(at, name, deed.mode, deed.new)
                    deed.mode = deed.mode or stat.S_IMODE(found.st_mode)
            case "rmdir":
                with ChangedDirectory(self.times, deed.path) as (at, name):
                    failpoint("rmdir")
                    os.rmdir(name, dir_fd=at)
            case "mode":
                with self.files.parent(deed.path) as (at, name):
                    self._set_mode(at, name, deed.mode, deed.new)
            case "times" | "opaque":
                pass

    def _swap(self, deed: Deed, at: int, name: str) -> None:
        held, slot = self._held, str(deed.slot)
        self.times.before(at)
        self._renames.exchange(at, name, held, slot)
        self.times.after(at)
        found = lstat(held, slot)
        if deed.old is None or not deed.old.fits(found):
            deed.old = None if found is None else Identity.of(found)

    def _in_slot(self, slot: int) -> Identity | None:
        found = lstat(self._held, str(slot))
        return None if found is None else Identity.of(found)

    def stands(self, deed: Deed) -> bool:
        """Whether the tree is as `deed` expects it, so that doing it changes nobody else's work."""
        there = self.files.look(deed.path)
        match deed.kind:
            case "put":
                return there is None and self.is_held(deed.slot)
            case "take":
                return self._is(deed.path, deed.new)
            case "swap":
                return self.is_held(deed.slot) and self._is(deed.path, deed.old)
            case "move":
                return self._is(deed.path, deed.new) and self.files.look(deed.to) is None
            case "mkdir":
                return there is None
            case _:
                return there is not None and (deed.new is None or there.st_ino == deed.new.inode)

    def is_empty(self, path: str) -> bool:
        """Whether a directory is there, with nothing in it."""
        try:
            return not self.files.names(path)
        except OSError:
            return False

    def is_held(self, slot: int) -> bool:
        """Whether there is something in a slot."""
        return self.holding is not None and self.holding.look(slot) is not None

    def is_missing(self, deed: Deed) -> bool:
        """Whether `deed` does not stand for this alone, that what it would give the path is not held."""
        if deed.kind not in ("put", "swap") or self.is_held(deed.slot):
            return False
        try:
            return self._is(deed.path, deed.old) if deed.kind == "swap" else self.files.look(deed.path) is None
        except FileNotFoundError:
            return False

    # -- undoing

    def undo(self, deed: Deed) -> None:
        """Take a deed back, if it was done. Raises Conflict where somebody else's is in the way; OSError."""
        if deed.kind not in ("swap", "times"):
            self.let_go()  # first, or the time that a swap has just left its directory with is taken for somebody's
        try:
            self._undo[deed.kind](deed)
        except OSError as error:
            if error.errno in UNREACHABLE:  # a directory on the way is gone, or is somebody's link now
                raise Conflict(deed.path) from error
            raise
        finally:
            if deed.kind != "swap":
                self.let_go()

    def let_go(self) -> None:
        """Of what the last undoing left open."""
        if self._near is not None:
            self.times.after(self._near[1])
            os.close(self._near[1])
            self._near = None

    def _opened(self, directory: str) -> int:
        """The directory of a swap; that of the one undone just before is open, often."""
        if self._near is None or self._near[0] != directory:
            self.let_go()
            self._near = directory, self.files.open_directory(directory, readable=False)
            self.times.before(self._near[1])
        return self._near[1]

    def _undo_put(self, deed: Deed) -> None:
        if self.holding is None:
            return
        held = self.holding.look(deed.slot)
        if held is not None:
            with suppress(FileNotFoundError), ChangedDirectory(self.times, deed.path) as (at, name):
                self._unlink_second(at, name, deed.new)
            if deed.new is not None and not (self.lost_power or deed.new.fits(held)):
                self._give_back(deed)
            return
        with ChangedDirectory(self.times, deed.path) as (at, name):
            if lstat(at, name) is None:
                return
            expected = self._expect(at, name, deed.path, deed.new)
            self._renames.rename(at, name, self._held, str(deed.slot))
            if not expected.fits(lstat(self._held, str(deed.slot))):
                self._renames.rename(self._held, str(deed.slot), at, name)
                raise Conflict(deed.path)

    def _give_back(self, deed: Deed) -> None:
        """Complete an undoing that was cut off between finding that somebody had saved a file and giving it back."""
        with ChangedDirectory(self.times, deed.path) as (at, name), suppress(FileExistsError):
            self._renames.rename(self._held, str(deed.slot), at, name)
        raise Conflict(deed.path)

    def _undo_take(self, deed: Deed) -> None:
        held = None if self.holding is None else self.holding.look(deed.slot)
        if held is None:
            if self.files.look(deed.path) is None:
                self._lost(deed)
            return
        if held.st_ino == self.swapped.get(deed.slot):  # what a swap that stayed a conflict left there
            raise Conflict(deed.path)
        with ChangedDirectory(self.times, deed.path) as (at, name):
            try:
                self._renames.rename(self._held, str(deed.slot), at, name)
            except FileExistsError:
                if not self._same_inode(lstat(at, name), Identity.of(held)):
                    raise Conflict(deed.path) from None

    def note_swap(self, deed: Deed) -> None:
        """Remember what a swap takes from its path, also of one that is undone already: see `_undo_take`. Two names of
        one file may have been exchanged; it makes no difference which of them is held."""
        if deed.kind == "swap" and deed.old is not None and (deed.new is None or deed.old.inode != deed.new.inode):
            self.swapped[deed.slot] = deed.old.inode

    def _lost(self, deed: Deed) -> NoReturn:
        """The deed was done, and what it displaced is no longer held: a program of the call took it away."""
        self.notes.append(f"what was at {deed.path} before is lost: it was removed from where displaced files wait")
        raise Conflict(deed.path)

    def _undo_swap(self, deed: Deed) -> None:
        self.note_swap(deed)
        if self.holding is not None and (self.thorough or self._renames.in_steps):
            self._settle(deed)
        held = None if self.holding is None else self.holding.look(deed.slot)
        if held is None and self._same_inode(self.files.look(deed.path), deed.new):
            self._lost(deed)
        if held is None:
            return
        if self._same_inode(held, deed.new) and (self.lost_power or deed.new is None or deed.new.fits(held)):
            return
        above, _, name = deed.path.rpartition("/")
        at = self._opened(above)
        there, holding, slot = lstat(at, name), self._held, str(deed.slot)
        if self._same_inode(there, deed.old) and not self._same_inode(held, deed.old):
            # An undoing was cut off between finding that somebody had saved the file and giving it back.
            self._renames.exchange(at, name, holding, slot)
            raise Conflict(deed.path)
        expected = self._expected(at, name, deed.path, deed.new, there)
        self._renames.exchange(at, name, holding, slot)
        if not expected.fits(lstat(holding, slot)):
            self._renames.exchange(at, name, holding, slot)
            raise Conflict(deed.path)

    def _settle(self, deed: Deed) -> None:
        if not self._renames.is_cut_off(self._held, str(deed.slot)):
            return
        above, _, name = deed.path.rpartition("/")
        tree = None
        with suppress(FileNotFoundError, NotADirectoryError):
            tree = self._opened(above)
        self._renames.settle(tree, name, self._held, str(deed.slot))

    def _undo_move(self, deed: Deed) -> None:
        with ChangedDirectory(self.times, deed.path) as (at, name):
            if self._same_inode(lstat(at, name), deed.new):
                with suppress(FileNotFoundError), ChangedDirectory(self.times, deed.to) as (to, new):
                    self._unlink_second(to, new, deed.new)
                return
            with ChangedDirectory(self.times, deed.to) as (to, new):
                found = lstat(to, new)
                if not self._same_inode(found, deed.new):
                    raise Conflict(deed.to)
                try:
                    self._renames.rename(to, new, at, name)
                except FileExistsError:
                    raise Conflict(deed.path) from None

    def _undo_mkdir(self, deed: Deed) -> None:
        with ChangedDirectory(self.times, deed.path) as (at, name):
            found = lstat(at, name)
            if found is None:
                return
            if not stat.S_ISDIR(found.st_mode) or (deed.new is not None and found.st_ino != deed.new.inode):
                raise Conflict(deed.path)
            failpoint("rmdir")
            try:
                os.rmdir(name, dir_fd=at)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise Conflict(deed.path) from None
                raise

    def _undo_rmdir(self, deed: Deed) -> None:
        with ChangedDirectory(self.times, deed.path) as (at, name):
            if lstat(at, name) is None:
                failpoint("mkdir")
                os.mkdir(name, 0o700, dir_fd=at)
                self._set_mode(at, name, deed.mode, None)

    def _undo_mode(self, deed: Deed) -> None:
        with self.files.parent(deed.path) as (at, name):
            found = os.lstat(name, dir_fd=at)
            mode = stat.S_IMODE(found.st_mode)
            if mode == deed.mode_before:
                return
            if mode != deed.mode or not self._same_inode(found, deed.new):
                raise Conflict(deed.path)
            self._set_mode(at, name, deed.mode_before, deed.new)

    def _undo_times(self, deed: Deed) -> None:
        if self._near is not None and self._near[0] == deed.path:
            with suppress(PermissionError):
                self._set_times(self._near[1], ".", deed.atime_ns, deed.mtime_ns, deed.new)
                return
        try:
            self.set_times(deed.path, deed.atime_ns, deed.mtime_ns, deed.new)
        except PermissionError:  # somebody else owns the directory: whoever may write in it may not set its times
            self.notes.append(f"the time of {deed.path or 'the root'} cannot be brought back, it is another user's")

    def set_times(self, path: str, atime_ns: int, mtime_ns: int, of: Identity | None) -> None:
        """Give a directory its times; nothing where another one, or none, is there now."""
        with suppress(FileNotFoundError, NotADirectoryError), self.files.parent(path) as (at, name):
            self._set_times(at, name, atime_ns, mtime_ns, of)

    def _set_times(self, at: int, name: str, atime_ns: int, mtime_ns: int, of: Identity | None) -> None:
        found = os.lstat(name, dir_fd=at)
        if self._same_inode(found, of) and (found.st_atime_ns, found.st_mtime_ns) != (atime_ns, mtime_ns):
            failpoint("utime")
            os.utime(name, ns=(atime_ns, mtime_ns), dir_fd=at, follow_symlinks=False)
            self.times.gave(found.st_ino, mtime_ns)

    def _unlink_second(self, at: int, name: str, of: Identity | None) -> None:
        """Complete a rename that is a link and an unlink, and ended between the two: take the new name back."""
        found = lstat(at, name)
        if of is not None and found is not None and found.st_ino == of.inode and not stat.S_ISDIR(found.st_mode):
            failpoint("unlink")
            os.unlink(name, dir_fd=at)

    # -- recognising

    def _is(self, path: str, identity: Identity | None) -> bool:
        try:
            with self.files.parent(path) as (at, name):
                self._expect(at, name, path, identity)
        except (Conflict, OSError):
            return False
        return True

    def _expect(self, at: int, name: str, path: str, identity: Identity | None) -> Identity:
        """Conflict unless the very thing is there, with the content that it was given; what it is now."""
        return self._expected(at, name, path, identity, lstat(at, name))

    def _expected(
        self, at: int, name: str, path: str, identity: Identity | None, found: os.stat_result | None
    ) -> Identity:
        if identity is None or found is None:
            raise Conflict(path)
        if not self._holds(at, name, path, identity, found) and not (
            self.lost_power and is_same_writing(found, identity) and is_torn_file(at, name, path, identity)
        ):
            raise Conflict(path)
        return identity if identity.fits(found) else Identity.of(found)

    def _holds(self, at: int, name: str, path: str, identity: Identity, found: os.stat_result) -> bool:
        if not identity.fits(found):
            return False
        if identity.sha256 is not None and (self.thorough or identity.size <= _HASHED_BYTES):
            try:
                content, _ = read_file(at, name, path, found)
            except PermissionError:  # it has the permission bits of the file that the call replaced, which say so
                return True
            return hashlib.sha256(content).hexdigest() == identity.sha256
        return True

    def _same_inode(self, found: os.stat_result | None, identity: Identity | None) -> bool:
        return found is not None and (identity is None or found.st_ino == identity.inode)

    def _set_mode(self, at: int, name: str, mode: int, of: Identity | None) -> None:
        # By a descriptor that no link can mislead, and that needs no permission to read.
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISLNK(found.st_mode) or not self._same_inode(found, of):
                raise FileNotFoundError(errno.ENOENT, "was replaced meanwhile", name)
            failpoint("chmod")
            os.chmod(f"/proc/self/fd/{descriptor}", mode)
        finally:
            os.close(descriptor)
