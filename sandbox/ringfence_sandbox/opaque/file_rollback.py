"""Making files and directories what they were, for the way back from an opaque call: bytes from the store, extended
attributes, owners, permission bits and times."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace

from ringfence_sandbox.disk.confined import UNREACHABLE, Confined
from ringfence_sandbox.disk.kernel import failpoint, set_mode
from ringfence_sandbox.disk.new_files import write_all
from ringfence_sandbox.opaque.states import Before
from ringfence_sandbox.scan.stat_cache import attributes_of
from ringfence_sandbox.steps.metadata import apply_metadata
from ringfence_sandbox.store.entries import Difference, Entry, blob_id, is_directory
from ringfence_sandbox.store.states import States
from ringfence_sandbox.transaction.hold import Holding
from ringfence_sandbox.transaction.restore import RestoreReport

IN_THE_WAY = UNREACHABLE | {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EXDEV, errno.EPERM}
"""What the system says where somebody else's is at a path, or on the way to it, or what nobody may replace: a file that
may only be added to, say (``chattr +a``)."""


class FileRollback:
    """Acts on what a way back has chosen (``items``); what it cannot bring back it says in ``done``."""

    def __init__(
        self,
        files: Confined,
        states: States,
        before: Before,
        items: Mapping[str, Difference],
        make_holding: Callable[[], Holding],
        done: RestoreReport,
    ) -> None:
        self.times_ns: dict[str, int] = {}
        """Of directories that somebody else has changed, the time that stays."""
        self._files = files
        self._states = states
        self._before = before
        self._items = items
        self._make_holding = make_holding
        self._done = done
        self._touched: set[str] = set()

    def content(self, place: str) -> str | None:
        """The git object id of what a file has, or a link; None for what is neither, or may not be read."""
        here = self._files.look(place)
        if here is None or stat.S_ISDIR(here.st_mode):
            return None
        if stat.S_ISLNK(here.st_mode):
            content = os.fsencode(self._files.read_link(place))
        elif stat.S_ISREG(here.st_mode):
            try:
                content, _ = self._files.read_file(place)
            except PermissionError:
                return None
        else:
            return None
        return blob_id(content)

    def new(self, wanted: Entry, path: str) -> int:
        """The slot of a file or link that is made anew, for a path."""
        assert wanted.oid is not None, "a file has an object id"
        content = self._states.content(wanted.oid)
        holding = self._make_holding()
        slot = holding.new_slot()
        if wanted.kind == "symlink":
            failpoint("symlink")
            os.symlink(os.fsdecode(content), str(slot), dir_fd=holding.descriptor)
            self._dress(holding.descriptor, str(slot), wanted, path)
        else:
            descriptor = holding.create(slot)
            try:
                write_all(descriptor, content)
                self._give_attributes(descriptor, path)  # while it may be written
                self._dress(holding.descriptor, str(slot), wanted, path)
                self._give_attributes(descriptor, path)  # a new owner may have cost some
            except OSError:
                holding.discard(slot)  # there is not much room, perhaps
                raise
            finally:
                os.close(descriptor)
        return slot

    def make_alike(self, at: int, name: str, wanted: Entry, path: str) -> None:
        """Have what is there, and has its bytes, be what was at a path in all else."""
        self._attributes_at(at, name, path)  # first: what is dressed already is not looked at again
        self._dress(at, name, wanted, path)

    def _give_attributes(self, descriptor: int, path: str) -> None:
        """Give what is made anew for a path the extended attributes that the one there had, and no others."""
        has, wanted = attributes_of(descriptor), self._before.attributes.get(path, {})
        if has == wanted:
            return
        failpoint("setxattr")
        try:
            for attribute in has.keys() - wanted.keys():  # of the directory's default ACL, say
                os.removexattr(descriptor, attribute)
            for attribute, value in wanted.items():
                os.setxattr(descriptor, attribute, value)
        except OSError:  # some are only root's to give
            note = f"{path} has not all of its extended attributes, which only root can bring back"
            self._done.notes += [note] if note not in self._done.notes else []

    def _attributes_at(self, at: int, name: str, path: str) -> None:
        """`_give_attributes` to a file or directory that is there, if it was chosen: it may be another one than before
        and have its inode's number."""
        if path not in self._items or stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode):
            return
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        except PermissionError:  # the call has made it unreadable, or it was before
            return
        try:
            self._give_attributes(descriptor, path)
        finally:
            os.close(descriptor)

    def _dress(self, at: int, name: str, wanted: Entry, path: str) -> None:
        if not apply_metadata(at, name, wanted.meta):
            self._done.notes.append(f"{path} has another owner than before, which only root can bring back")

    # -- directories

    def touch(self, path: str) -> None:
        """Something at a path is about to change: the directory that it is in is made writable for the moment, and gets
        its permission bits and its time back in the end."""
        self._touched.add(path)
        if os.geteuid() != 0:
            self._open_up(path)

    def _open_up(self, path: str) -> None:
        above = path.rpartition("/")[0]
        here = self._files.look(above)
        if here is not None and stat.S_ISDIR(here.st_mode) and here.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            if above:
                self._open_up(above)
            with self._files.parent(above) as (at, name):
                failpoint("chmod")
                set_mode(at, name, stat.S_IMODE(here.st_mode) | stat.S_IRWXU)

    def finish(self) -> None:
        """Directories, from the bottom: those that were changed, and those in which something was."""
        directories = {path for path, (_, wanted, _) in self._items.items() if is_directory(wanted)}
        for path in (*self._items, *self._touched):
            above = path
            while above:
                above = above.rpartition("/")[0]
                if above in directories:
                    break
                directories.add(above)
        for path in sorted(directories, reverse=True):
            chosen = self._items.get(path)
            wanted = self._states.entry(self._before.commit, path) if chosen is None else chosen.before
            if wanted is None or not is_directory(wanted) or path in self._done.conflicts:
                continue
            if path in self.times_ns:
                wanted = replace(wanted, meta=replace(wanted.meta, mtime_ns=self.times_ns[path]))
            try:
                with self._files.parent(path) as (at, name):
                    if stat.S_ISDIR(os.lstat(name, dir_fd=at).st_mode):
                        self.make_alike(at, name, wanted, path)
            except OSError as error:
                if error.errno not in IN_THE_WAY:
                    raise
                self._done.conflicts.add(path)
