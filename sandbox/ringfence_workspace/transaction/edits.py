"""The operations of a filesystem on disk: everything is checked first, and logged before it is done."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ringfence.filesystem.paths import os_error
from ringfence.filesystem.protocol import WriteMode
from ringfence_workspace.transaction.changes import states_inside
from ringfence_workspace.transaction.hold import ChangedDirectory
from ringfence_workspace.transaction.read_set import stale
from ringfence_workspace.transaction.transactions import Transactions
from ringfence_workspace.tree.confined import Confined, Found
from ringfence_workspace.tree.kernel import OVERLAY, Abilities, exists, failpoint, mounts_below, set_mode
from ringfence_workspace.tree.linked_worktrees import check_none_below, check_outside
from ringfence_workspace.tree.new_files import (
    copy_and_append,
    copy_metadata,
    create,
    create_for,
    create_nameless,
    make_directory,
    make_symlink,
    sync_file,
    write_all,
)
from ringfence_workspace.tree.state import State, is_unchanged

if TYPE_CHECKING:
    from types import TracebackType


class Edits:
    """Every method is one operation: it happens as a whole, or an OSError says why not and nothing has changed."""

    def __init__(self, transactions: Transactions, can: Abilities) -> None:
        self.transactions = transactions
        self._files: Confined = transactions.files
        self._undo = transactions.undo
        self._read_set = self._undo.read_set
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
        with self.transactions.operation():
            if found.stat is None:
                self._make_parents(found.place)
                self._create(found.place, content)
            else:
                with self._files.parent(found.place) as (at, name):
                    self._replace(at, name, found.place, found.stat, content, append=mode == "append")

    def _overwrite(self, normal: str, content: bytes) -> bool:
        """`write` to a file that is there, with no link on the way to it: its directory is opened once. False where
        that is not so, and nothing is done."""
        if self._files.is_reserved(normal):
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
            check_outside(self._files.root, normal)
            with self.transactions.operation():
                self._replace(at, name, normal, found, content)
        return True

    def delete(self, normal: str, recursive: bool) -> None:
        found = self._files.itself(normal)
        if found.is_directory and not recursive and self._has_names(found.place):
            raise IsADirectoryError(errno.ENOTEMPTY, "the directory is not empty, it takes recursive=True", normal)
        with self.transactions.operation():
            slot = self._displace(found)
            if found.is_directory and not recursive and self._files.names(self._undo.holding.place(slot)):
                raise stale(found.place)  # somebody has come between

    def mkdir(self, normal: str, parents: bool, exist_ok: bool) -> None:
        if self._files.find(normal, follow=False).stat is not None:
            if not exist_ok or not self._leads_to_directory(normal):
                raise os_error(errno.EEXIST, normal)
            return
        found = self.place(normal, follow=False, parents=parents)
        with self.transactions.operation():
            self._make_parents(found.place)
            self._make_directory(found.place)

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
        with self.transactions.operation():
            self._make_parents(new)
            if target.stat is None:
                self._rename(source, new)
            else:  # by way of a slot, so that at any time one of the two is at the new path
                slot = self._displace(source)
                self.put(new, slot, target.stat)

    def chmod(self, normal: str, mode: int) -> None:
        found = self._files.existing(normal)
        assert found.stat is not None
        if stat.S_IMODE(found.stat.st_mode) == mode:
            return
        check_outside(self._files.root, found.place, is_directory=found.is_directory)
        with self.transactions.operation():
            if found.is_file and found.stat.st_nlink > 1:
                # The bits belong to the inode, and its other names may lie outside of the workspace.
                with self._files.parent(found.place) as (at, name):
                    self._replace(at, name, found.place, found.stat, b"", append=True, mode=mode)
                return
            self._read_set.check(found.place, found.stat, read=False)
            after = State.of(found.stat, self._undo.written.hash_of(found.stat))._replace(mode=mode)
            self._undo.touch(found.place, found.stat, after)
            with self._files.parent(found.place) as (at, name):
                if os.lstat(name, dir_fd=at).st_ino != found.stat.st_ino:
                    raise FileNotFoundError(errno.ENOENT, "was replaced meanwhile", normal)
                failpoint("chmod")
                set_mode(at, name, mode)

    def symlink(self, normal: str, target: str) -> None:
        found = self.place(normal, follow=False)
        if found.stat is not None:
            raise os_error(errno.EEXIST, normal)
        with self.transactions.operation():
            self._make_parents(found.place)
            slot = self._undo.holding.new_slot()
            make_symlink(self._undo.holding.descriptor, str(slot), os.fsencode(target))
            self.put(found.place, slot, None)

    # -- what is there

    def place(self, normal: str, *, follow: bool = True, parents: bool = True) -> Found:
        """Where something is to be made or replaced. Raises what stands against it, before anything is changed."""
        found = self._files.find(normal, follow=follow)
        if found.obstacle is not None:
            raise found.obstacle
        check_outside(self._files.root, found.place, is_directory=found.is_directory)
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

    # -- one system call each, logged before

    def _make_parents(self, place: str) -> None:
        missing: list[str] = []
        above = place.rpartition("/")[0]
        while above and self._files.look(above) is None:
            missing.append(above)
            above = above.rpartition("/")[0]
        for directory in reversed(missing):
            self._make_directory(directory)

    def _make_directory(self, place: str) -> None:
        self._read_set.check(place, None)
        made = State("directory", 0, 0, 0, 0, 0, 0)  # its inode is known when it is there
        self._undo.touch(place, None, made)
        with ChangedDirectory(self._undo.times, place) as (at, name):
            make_directory(at, name, 0o777)
            made = State.of(os.lstat(name, dir_fd=at))
        self._undo.made_directory(place, made)
        self._read_set.wrote(place, made)

    def _displace(self, found: Found) -> int:
        """Take a file, or a directory with all that is in it, out of the tree; the slot to which it comes."""
        assert found.stat is not None
        path, holding = found.place, self._undo.holding
        self._check_separate(found)
        self._read_set.check(path, found.stat)
        slot = holding.new_slot()
        with _Renaming(path, partial(os_error, errno.ENOENT)), self._files.parent(path) as (above, name):
            there = self._copied_up(above, name, found.stat)
            inside: Mapping[str, State] = {}
            if found.is_directory:
                inside = self._undo.touch_directory(path, holding.place(slot), there)
            else:
                self._undo.touch(path, there, None, slot)
            with ChangedDirectory(self._undo.times, path) as (at, name):
                self._undo.renames.rename(at, name, holding.descriptor, str(slot))
                if not is_unchanged(there, holding.look(slot)) or (
                    found.is_directory and states_inside(self._files, holding.place(slot)) != inside
                ):
                    self._undo.renames.rename(holding.descriptor, str(slot), at, name)
                    raise stale(path)
        if not found.is_directory:
            self._undo.displaced(path, there, holding.place(slot))
        self._read_set.wrote(path, None)
        return slot

    def _rename(self, source: Found, new: str) -> None:
        assert source.stat is not None
        old = source.place
        self._check_separate(source)
        self._read_set.check(old, source.stat, read=False)  # what is moved is not lost
        self._read_set.check(new, None)
        with self._files.parent(old) as (at, name):
            found = self._copied_up(at, name, source.stat)
        with _Renaming(old):
            if source.is_directory:
                self._undo.touch_directory(old, new, found)
            else:
                self._undo.touch_move(old, new, found)
            with (
                ChangedDirectory(self._undo.times, old) as (at, name),
                ChangedDirectory(self._undo.times, new) as (to, new_name),
            ):
                self._undo.renames.rename(at, name, to, new_name)
        self._read_set.wrote(old, None)
        self._read_set.wrote(new, State.of(found, self._undo.written.hash_of(found)))

    def _check_separate(self, found: Found) -> None:
        """A linked worktree or a mount in a directory would go along, and in the end be removed."""
        check_outside(self._files.root, found.place, is_directory=found.is_directory)
        if found.is_directory:
            check_none_below(self._files.root, found.place)
            path = os.path.realpath(f"/proc/self/fd/{self._files.root}")
            for mounted in mounts_below(os.path.join(path, found.place)):
                place = os.path.relpath(mounted, path)
                raise OSError(errno.EBUSY, "has something mounted on it, so it stays: unmount it first", place)

    def _copied_up(self, at: int, name: str, found: os.stat_result) -> os.stat_result:
        """What is there, as it will be known after a rename: one of several names of a file in a lower layer of an
        overlay gets an inode of its own with its first change."""
        several = stat.S_ISREG(found.st_mode) and found.st_nlink > 1
        if several and self._filesystem_type(self._files.root) == OVERLAY:
            with suppress(PermissionError):
                times = (found.st_atime_ns, found.st_mtime_ns)
                os.utime(name, ns=times, dir_fd=at, follow_symlinks=False)
                return os.lstat(name, dir_fd=at)
        return found

    def put(self, place: str, slot: int, found: os.stat_result | None, made: State | None = None) -> None:
        """Give a new file, symlink or name from a slot its path, or exchange it with what is `found` there."""
        holding, undo = self._undo.holding, self._undo
        there = holding.look(slot)
        assert there is not None, "it was made just now"
        state = made or State.of(there)
        self._read_set.check(place, found)
        with _Renaming(place):
            undo.touch(place, found, state, slot)
            with ChangedDirectory(undo.times, place) as (at, name):
                if found is None:
                    undo.renames.rename(holding.descriptor, str(slot), at, name)
                else:
                    self._exchange(at, name, place, slot, found)
        self._read_set.wrote(place, state)

    def _exchange(self, at: int, name: str, place: str, slot: int, found: os.stat_result) -> None:
        holding, renames = self._undo.holding, self._undo.renames
        renames.exchange(at, name, holding.descriptor, str(slot))
        if not is_unchanged(found, holding.look(slot)):
            renames.exchange(at, name, holding.descriptor, str(slot))
            raise stale(place)
        self._undo.displaced(place, found, holding.place(slot))

    # -- new files

    def _create(self, place: str, content: bytes) -> None:
        slot = self._undo.holding.new_slot()
        with self._files.parent(place) as (at, _):
            descriptor = self._new_file(at, slot)
        try:
            write_all(descriptor, content)
            made = self._finished(descriptor, os.fstat(descriptor), hashlib.sha256(content).hexdigest(), content)
        finally:
            os.close(descriptor)
        self.put(place, slot, None, made)

    def _new_file(self, at: int, slot: int) -> int:
        """A new file, in a slot, as if it were made in the directory `at`: its group, and its default ACL."""
        holding, name = self._undo.holding.descriptor, str(slot)
        descriptor = create_nameless(at, holding, name) if self._tmpfile else None
        if descriptor is None:
            self._tmpfile = False
            descriptor = create_for(at, holding, name)
        return descriptor

    def _replace(
        self,
        at: int,
        name: str,
        place: str,
        found: os.stat_result,
        content: bytes,
        *,
        append: bool = False,
        mode: int | None = None,
    ) -> None:
        """Exchange the file at `place`, which is `name` in the open directory `at`, for a new one; ``mode`` is for one
        that only gets other permission bits."""
        undo, holding = self._undo, self._undo.holding
        self._read_set.check(place, found, read=not append)
        found = self._copied_up(at, name, found)
        if mode is None and not os.access(name, os.W_OK, dir_fd=at, effective_ids=True):
            raise os_error(errno.EACCES, place) if exists(at, name) else stale(place)
        slot = holding.new_slot()
        # In the holding directory, and not nameless in its own as in `_new_file`: what it would get from there it gets
        # from the other file, and where ext4 has no journal such a file took three times as long.
        descriptor = create(holding.descriptor, str(slot), stat.S_IMODE(found.st_mode) if mode is None else mode)
        try:
            if append:
                sha256 = copy_and_append(at, name, place, descriptor, content)
            else:
                sha256 = hashlib.sha256(content).hexdigest()
                write_all(descriptor, content)
            new = copy_metadata(descriptor, at, name, found, mode)
            if mode is not None:
                os.utime(descriptor, ns=(found.st_atime_ns, found.st_mtime_ns))
                new = os.fstat(descriptor)
            made = self._finished(descriptor, new, sha256, None if append else content)
        finally:
            os.close(descriptor)
        with _Renaming(place):
            undo.touch(place, found, made, slot, at)  # which looks at the directory, too
            self._exchange(at, name, place, slot, found)
            undo.times.after(at)
        self._read_set.wrote(place, made)

    def _finished(self, descriptor: int, new: os.stat_result, sha256: str | None, content: bytes | None) -> State:
        """A new file is as it is to be: have it survive what it is to survive, and know it again."""
        if self.transactions.power:
            sync_file(descriptor)
        state = State.of(new, sha256)
        self._undo.written.note(state, content)
        return state


class _Renaming:
    """Around a rename of what was there a moment ago: if somebody has removed it meanwhile, or it must not be renamed
    (what can only be appended to, or is another's in a sticky directory), an error names its path."""

    __slots__ = ("_gone", "_path")

    def __init__(self, path: str, gone: Callable[[str], OSError] = stale) -> None:
        self._path = path
        self._gone = gone

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, FileNotFoundError):
            raise self._gone(self._path) from error
        if isinstance(error, PermissionError) and error.errno == errno.EPERM:
            see = "see `lsattr`, and whether its directory is sticky"
            words = f"may not be replaced, moved or removed ({error.strerror}): {see}"
            raise PermissionError(error.errno, words, self._path) from error
