"""What a filesystem on disk does to files, in deeds: everything is checked first, and noted before it is done."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from ringfence.filesystem.paths import os_error
from ringfence.filesystem.protocol import WriteMode
from ringfence_sandbox.calls.core import Core
from ringfence_sandbox.calls.holding import Holding
from ringfence_sandbox.calls.seen import stale
from ringfence_sandbox.disk.confined import Confined, Found, is_reserved
from ringfence_sandbox.disk.kernel import OVERLAY, Abilities, exists, failpoint, mounts_below
from ringfence_sandbox.disk.new_files import copy_and_append, resemble, umask, write_all
from ringfence_sandbox.disk.records import Deed, Identity

_TMPFILE = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


class HostWrites:
    """Every method is one operation: it happens as a whole, or an OSError says why not and nothing has changed."""

    def __init__(self, core: Core, can: Abilities) -> None:
        self._core = core
        self._files: Confined = core.files
        self._tmpfile = can.tmpfile
        self._filesystem_type = can.filesystem_type

    def write(self, normal: str, content: bytes, mode: WriteMode, create_parents: bool) -> None:
        if mode == "overwrite" and self._overwrite(normal, content):
            return
        found = self.place(normal, follow=mode != "create", parents=create_parents)
        if found.stat is not None:
            if mode == "create":
                raise os_error(errno.EEXIST, normal)
            if found.is_directory:
                raise os_error(errno.EISDIR, normal)
            if not found.is_file:
                raise PermissionError(errno.EACCES, "is a socket, a pipe or a device, which is never opened", normal)
        with self._core.operation():
            if found.stat is None:
                self._make_parents(found.place)
                self._create(found.place, content)
            else:
                self._replace(found.place, found.stat, content, append=mode == "append")

    def _overwrite(self, normal: str, content: bytes) -> bool:
        """`write` to a file that is there, with no link on the way to it: its directory is opened once. False where
        that is not so, and nothing is done."""
        if is_reserved(normal):
            return False
        try:
            parent = self._files.parent(normal)
        except OSError:
            return False
        with parent as (at, name):
            try:
                found = os.lstat(name, dir_fd=at)
            except OSError:
                return False
            if not stat.S_ISREG(found.st_mode):
                return False
            with self._core.operation():
                self._replace_in(at, name, normal, found, content, append=False, mode=None)
        return True

    def announce(self, writes: Mapping[str, bytes]) -> None:
        """Make new files ready that `write` is about to be given, in this order, so that all of them together wait for
        the disk once. What does not come as announced is done as ever."""
        if not (self._core.power and self._core.in_call):
            return
        deeds: list[Deed] = []
        making: set[str] = set()
        for normal, content in writes.items():
            try:
                found = self.place(normal)
            except OSError:  # it may be in order when its turn comes
                continue
            if found.stat is None:
                missing = [above for above in self._missing(found.place) if above not in making]
                making.update(missing)
                deeds += [Deed("mkdir", above) for above in missing]
                deeds.append(self._put(found.place, content, self._there(found.place)))
            elif found.is_file:
                with self._files.parent(found.place) as (at, name):
                    deeds.append(self._swap(at, name, found.place, found.stat, content, append=False, mode=None))
        self._core.announce(deeds)

    def delete(self, normal: str, recursive: bool) -> None:
        found = self._files.itself(normal)
        if found.is_directory and not recursive and self._has_names(found.place):
            raise IsADirectoryError(errno.ENOTEMPTY, "the directory is not empty, it takes recursive=True", normal)
        with self._core.operation():
            slot = self._take(found)
            taken = f"{self._core.holding.name}/{slot}"
            if found.is_directory and not recursive and not self._core.runner.is_empty(taken):
                raise stale(found.place)  # somebody has come between

    def mkdir(self, normal: str, parents: bool, exist_ok: bool) -> None:
        if self._files.find(normal, follow=False).stat is not None:
            if not exist_ok or not self._leads_to_directory(normal):
                raise os_error(errno.EEXIST, normal)
            return
        found = self.place(normal, follow=False, parents=parents)
        with self._core.operation():
            self._make_parents(found.place)
            self._core.perform(Deed("mkdir", found.place))

    def move(self, old: str, new: str, overwrite: bool) -> None:
        source = self._files.itself(old)
        target = self.place(new, follow=False)
        old, new = source.place, target.place
        if target.stat is not None and not overwrite:
            raise os_error(errno.EEXIST, new)
        if old == new:
            return
        if f"{new}/".startswith(f"{old}/"):
            raise ValueError(f"a directory cannot be moved into itself: {old!r} to {new!r}")
        if target.is_directory:
            raise IsADirectoryError(errno.EISDIR, "is a directory, which a move does not replace", new)
        if target.stat is not None and source.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "is no directory, so a directory cannot replace it", new)
        with self._core.operation():
            self._make_parents(new)
            if target.stat is None:
                self._check_mounts(source)
                self._core.seen.forget(old)
                self._perform(Deed("move", old, to=new, new=Identity.of(self._copied_up(source))))
            else:
                slot = self._take(source)
                held = self._core.holding.look(slot)  # as it is by now, not as it was found
                assert held is not None, "it was taken just now"
                self._core.seen.check(new, target.stat)
                swap = Deed("swap", new, slot=slot, new=Identity.of(held), old=Identity.of(target.stat))
                self._perform(swap)
                self._core.seen.check_displaced(new, Identity.of(target.stat), swap.old)
                self._core.seen.forget(new)

    def chmod(self, normal: str, mode: int) -> None:
        found = self._files.existing(normal)
        assert found.stat is not None
        if stat.S_IMODE(found.stat.st_mode) == mode:
            return
        with self._core.operation():
            if found.is_file and found.stat.st_nlink > 1:
                # The bits belong to the inode, and its other names may lie outside of the workspace.
                self._replace(found.place, found.stat, b"", append=True, mode=mode)
                return
            before = stat.S_IMODE(found.stat.st_mode)
            self._core.perform(Deed("mode", found.place, new=Identity.of(found.stat), mode=mode, mode_before=before))

    def symlink(self, normal: str, target: str) -> None:
        found = self.place(normal, follow=False)
        if found.stat is not None:
            raise os_error(errno.EEXIST, normal)
        with self._core.operation():
            self._make_parents(found.place)
            holding = self._core.holding
            slot = holding.new_slot()
            failpoint("symlink")
            os.symlink(target, str(slot), dir_fd=holding.descriptor)
            made = os.lstat(str(slot), dir_fd=holding.descriptor)
            self._core.perform(Deed("put", found.place, slot=slot, new=Identity.of(made)))

    # -- what is there

    def place(self, normal: str, *, follow: bool = True, parents: bool = True) -> Found:
        """Where something is to be made or replaced. Raises what stands against it, before anything is changed."""
        found = self._files.find(normal, follow=follow)
        if found.obstacle is not None:
            raise found.obstacle
        if found.stat is None and not parents and self._files.look(found.place.rpartition("/")[0]) is None:
            raise FileNotFoundError(errno.ENOENT, "has no parent directory", normal)
        return found

    def _leads_to_directory(self, normal: str) -> bool:
        try:
            return self._files.find(normal).is_directory
        except OSError:
            return False

    def _has_names(self, place: str) -> bool:
        descriptor = self._files.open_directory(place)
        try:
            with os.scandir(descriptor) as entries:
                return next(entries, None) is not None
        finally:
            os.close(descriptor)

    # -- deeds

    def _missing(self, place: str) -> list[str]:
        """The directories above a place that are not there, from the top."""
        missing: list[str] = []
        above = place.rpartition("/")[0]
        while above and self._files.look(above) is None:
            missing.append(above)
            above = above.rpartition("/")[0]
        return missing[::-1]

    def _there(self, place: str) -> str:
        """The lowest directory above a place that is there."""
        missing = self._missing(place)
        return (missing[0] if missing else place).rpartition("/")[0]

    def _make_parents(self, place: str) -> None:
        for directory in self._missing(place):
            self._core.perform(self._core.deed_log.announced("mkdir", directory) or Deed("mkdir", directory))

    def _take(self, found: Found) -> int:
        assert found.stat is not None
        self._check_mounts(found)
        self._core.seen.check(found.place, found.stat)
        slot = self._core.holding.new_slot()
        expected = Identity.of(found.stat)
        self._perform(Deed("take", found.place, slot=slot, new=expected))
        taken = self._core.holding.look(slot)
        if taken is not None and not found.is_directory:
            self._core.seen.check_displaced(found.place, expected, Identity.of(taken))
        self._core.seen.forget(found.place)
        return slot

    def _check_mounts(self, found: Found) -> None:
        """What is mounted in a directory would go along, and in the end be removed."""
        if found.is_directory:
            path = os.path.realpath(f"/proc/self/fd/{self._files.root}")
            for mounted in mounts_below(os.path.join(path, found.place)):
                place = os.path.relpath(mounted, path)
                raise OSError(errno.EBUSY, "has something mounted on it, so it stays: unmount it first", place)

    def _copied_up(self, found: Found) -> os.stat_result:
        """What is there, as it will be known after a move: one of several names of a file in a lower layer of an
        overlay gets an inode of its own with its first change."""
        assert found.stat is not None
        if found.is_file and found.stat.st_nlink > 1 and self._filesystem_type(self._files.root) == OVERLAY:
            with self._files.parent(found.place) as (at, name), suppress(PermissionError):
                times = (found.stat.st_atime_ns, found.stat.st_mtime_ns)
                os.utime(name, ns=times, dir_fd=at, follow_symlinks=False)
                return os.lstat(name, dir_fd=at)
        return found.stat

    def _perform(self, deed: Deed, there: tuple[int, str] | None = None) -> None:
        """A deed on what was there a moment ago. If somebody has removed it meanwhile, or it must not be renamed (what
        can only be appended to, or is another's in a sticky directory), an error names its path, and not the slot that
        it was to have."""
        try:
            self._core.perform(deed, there)
        except FileNotFoundError as error:
            gone = os_error(errno.ENOENT, deed.path) if deed.kind == "take" else stale(deed.path)
            raise gone from error
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            see = "see `lsattr`, and whether its directory is sticky"
            words = f"may not be replaced, moved or removed ({error.strerror}): {see}"
            raise PermissionError(error.errno, words, deed.path) from error

    def _create(self, place: str, content: bytes) -> None:
        announced = self._core.deed_log.announced("put", place)
        if announced is None or not _gives(announced, content):
            announced = self._put(place, content, place.rpartition("/")[0])
        self._core.perform(announced)
        self._core.note_own(place, announced)
        self._core.changed.keep_bytes(announced, content)

    def _put(self, place: str, content: bytes, like_in: str) -> Deed:
        """A new file, held until the deed is done, as if it were made in the directory ``like_in``."""
        holding = self._core.holding
        slot = holding.new_slot()
        with self._files.parent(f"{like_in}/.") as (at, _):
            descriptor = self._new_file(at, holding, slot)
        try:
            write_all(descriptor, content)
            identity = self.finish(descriptor, hashlib.sha256(content).hexdigest())
        finally:
            os.close(descriptor)
        return Deed("put", place, slot=slot, new=identity)

    def _new_file(self, at: int, holding: Holding, slot: int) -> int:
        """A new file, held in a slot, as if it were made in the directory `at`: its group, and its default ACL."""
        if self._tmpfile:
            failpoint("create")
            try:
                descriptor = os.open(".", _TMPFILE, 0o666, dir_fd=at)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
                self._tmpfile = False
            else:
                try:
                    failpoint("link")
                    os.link(f"/proc/self/fd/{descriptor}", str(slot), dst_dir_fd=holding.descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                return descriptor
        descriptor = holding.create(slot)
        above = os.fstat(at)
        os.fchmod(descriptor, 0o666 & ~umask())
        if above.st_mode & stat.S_ISGID:
            with suppress(PermissionError):
                os.fchown(descriptor, -1, above.st_gid)
        return descriptor

    def _replace(
        self, place: str, found: os.stat_result, content: bytes, *, append: bool, mode: int | None = None
    ) -> None:
        """Exchange the file at `place` for a new one; ``mode`` is for one that only gets other permission bits."""
        with self._files.parent(place) as (at, name):
            self._replace_in(at, name, place, found, content, append=append, mode=mode)

    def _replace_in(
        self, at: int, name: str, place: str, found: os.stat_result, content: bytes, *, append: bool, mode: int | None
    ) -> None:
        seen = self._core.seen
        if not append:
            seen.check(place, found)
        swap = self._core.deed_log.announced("swap", place)
        if swap is None or append or mode is not None or swap.old != Identity.of(found) or not _gives(swap, content):
            swap = self._swap(at, name, place, found, content, append=append, mode=mode)
        expected = swap.old
        self._perform(swap, (at, name))
        seen.check_displaced(place, expected, swap.old)
        if not append:
            self._core.changed.keep_bytes(swap, content)
        self._core.note_own(place, swap)

    def _swap(
        self, at: int, name: str, place: str, found: os.stat_result, content: bytes, *, append: bool, mode: int | None
    ) -> Deed:
        """A file for the place of another, held until the deed is done."""
        holding = self._core.holding
        slot = holding.new_slot()
        if mode is None and not os.access(name, os.W_OK, dir_fd=at, effective_ids=True):
            raise os_error(errno.EACCES, place) if exists(at, name) else stale(place)
        # In the holding directory, and not nameless in its own as in `_new_file`: what it would get from there it gets
        # from the other file, and where ext4 has no journal such a file took three times as long.
        descriptor = holding.create(slot, stat.S_IMODE(found.st_mode) if mode is None else mode)
        try:
            if append:
                digest = copy_and_append(at, name, place, descriptor, content)
            else:
                digest = hashlib.sha256(content).hexdigest()
                write_all(descriptor, content)
            made = resemble(descriptor, at, name, found, mode)
            if mode is not None:
                os.utime(descriptor, ns=(found.st_atime_ns, found.st_mtime_ns))
                made = os.fstat(descriptor)
            identity = self.finish(descriptor, digest, made)
        finally:
            os.close(descriptor)
        return Deed("swap", place, slot=slot, new=identity, old=Identity.of(found))

    def finish(self, descriptor: int, digest: str | None, made: os.stat_result | None = None) -> Identity:
        """A new file is as it is to be: have it survive what it is to survive, and know it again. ``made`` is its
        stat, if its bytes and times are what they were then."""
        if self._core.power:
            failpoint("fsync file")
            os.fsync(descriptor)
        identity = Identity.of(made if made is not None else os.fstat(descriptor), digest)
        self._core.changed.written.note(identity)
        return identity


def _gives(deed: Deed, content: bytes) -> bool:
    return deed.new is not None and deed.new.sha256 == hashlib.sha256(content).hexdigest()
