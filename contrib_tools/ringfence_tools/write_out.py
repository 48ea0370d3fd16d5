"""What a write-back does on disk, step by step, each with its way back."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

from ringfence.errors import RestoreFailedError, WorkspaceConflictError
from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import Change, FileVersion
from ringfence_sandbox.disk.kernel import exists
from ringfence_sandbox.disk.new_files import write_all
from ringfence_tools.host_tree import READ, directory, split

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
RWX = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
"""No set-user-id, set-group-id or sticky bit is ever set here, and only a new content takes them off."""
Identity = tuple[int, int, int, int]


class Plan:
    """Which paths there are to do what with; every list has parents before what is in them."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = {change.path: change for change in sorted(changes, key=lambda change: change.path)}
        self.gone: set[str] = set()
        """What is no longer there, or is of another kind now."""
        self.directories: list[str] = []
        self.placed: list[str] = []
        """New files and links."""
        self.replaced: list[str] = []
        """Files and links with other content."""
        self.modes: list[str] = []
        """Files and directories that only have other permission bits."""
        for change in self.changes.values():
            self._add(change)
        tops = [path for path in self.changes if path in self.gone and self.gone.isdisjoint(above(path))]
        self.displaced = [path for path in tops if self.changes[path].after is not None]
        self.deleted = [path for path in tops if self.changes[path].after is None]

    def _add(self, change: Change) -> None:
        path, before, after = change.path, change.before, change.after
        if path and any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError(f"{path!r} is not a path of something in a workspace")
        if before is not None and (after is None or after.kind != before.kind):
            self.gone.add(path)
        if after is None:
            return
        if before is None or before.kind != after.kind:
            (self.directories if after.kind == "directory" else self.placed).append(path)
        elif (before.content_hash, before.target) != (after.content_hash, after.target):
            self.replaced.append(path)
        elif changes_mode(change):
            self.modes.append(path)

    def makes_directory(self, path: str) -> bool:
        change = self.changes.get(path)
        return change is not None and change.after is not None and change.after.kind == "directory"


def changes_mode(change: Change) -> bool:
    """Whether something that stays has other permission bits (those of a link mean nothing)."""
    before, after = change.before, change.after
    return (
        before is not None
        and after is not None
        and before.kind == after.kind != "symlink"
        and before.mode != after.mode
    )


def above(path: str) -> Iterator[str]:
    """The directories that `path` is in, from the bottom."""
    while path := split(path)[0]:
        yield path


class WriteOut:
    """Carries out a plan. After `run` either `drop` makes it final, or `undo` puts everything back.

    A way back is noted before its step is taken, and does nothing where the step was not, so that an interrupt may come
    at any time.
    """

    def __init__(self, top: int, filesystem: Filesystem, plan: Plan) -> None:
        self._top = top
        self._filesystem = filesystem
        self._plan = plan
        self._token = f".ringfence-{secrets.token_hex(6)}"
        self._count = 0
        self._ways_back: list[tuple[str, Callable[[], None]]] = []
        self._times: dict[str, tuple[int, int]] = {}
        self._aside: dict[str, str] = {}
        self._made: dict[str, int] = {}

    def run(self) -> None:
        """Everything but the removal of what was displaced.

        Raises:
            WorkspaceConflictError: something was put in the way meanwhile.
            ValueError, OSError
        """
        plan = self._plan
        for path in plan.displaced:
            self._set_aside(path)
        for path in plan.directories:
            self._make_directory(path)
        staged = {path: self._stage(path, replaces=False) for path in plan.placed}
        staged |= {path: self._stage(path, replaces=True) for path in plan.replaced}
        for path in plan.placed:
            self._place(path, *staged[path])
        for path in plan.replaced:
            self._replace(path, *staged[path])
        for path in plan.deleted:
            self._set_aside(path)
        for path, mode in self._final_modes():
            before = plan.changes[path].before
            if before is not None:
                self._later(path, lambda path=path, mode=before.mode: self._set_mode(path, mode))
            self._set_mode(path, mode | self._needed(path))

    def where(self, path: str) -> str:
        """The path at which the original of a displaced `path` is now."""
        top = path
        while top not in self._aside:
            top = split(top)[0]
        return self._aside[top] + path[len(top) :]

    def drop(self) -> list[str]:
        """Remove the displaced originals; the paths of those that would not go."""
        displaced: dict[str, list[str]] = {path: [path] for path in self._aside}
        for path in sorted(self._plan.gone - displaced.keys()):
            displaced[next(up for up in above(path) if up in displaced)].append(path)
        left = [self._aside[path] for path, inside in displaced.items() if not self._removed(inside)]
        for path, mode in self._final_modes():
            if mode & self._needed(path) != self._needed(path):
                with suppress(OSError, WorkspaceConflictError):  # only if somebody took it away meanwhile
                    self._set_mode(path, mode)
        return left

    def undo(self, cause: BaseException) -> None:
        """Put everything back, as far as permitted also the times of the directories that were written in.

        Raises:
            RestoreFailedError: not everything could be put back.
        """
        failures: list[tuple[str, BaseException]] = []
        for path, way_back in reversed(self._ways_back):
            try:
                way_back()
            except OSError as error:
                failures.append((path, error))
            except WorkspaceConflictError:
                left = f"somebody took its directory away, with what is named {self._token}-* in it"
                failures.append((path, FileNotFoundError(errno.ENOENT, left, path)))
        for path, times in self._times.items():
            with suppress(OSError), directory(self._top, path) as at:
                os.utime(at, ns=times)
        if failures:
            raise RestoreFailedError(failures) from cause

    @contextmanager
    def _at(self, path: str) -> Generator[tuple[int, str]]:
        """The directory that `path` is in, and its name. Whatever turns out to be missing there, or to be something
        else, was taken away by somebody: a conflict."""
        parent, name = split(path)
        try:
            with directory(self._top, parent) as at:
                if parent not in self._times:
                    found = os.fstat(at)
                    self._times[parent] = (found.st_atime_ns, found.st_mtime_ns)
                yield at, name or "."
        except OSError as error:
            if error.errno not in GONE:
                raise
            raise WorkspaceConflictError([path]) from error

    def _later(self, path: str, way_back: Callable[[], None]) -> None:
        self._ways_back.append((path, way_back))

    def _hidden(self) -> str:
        self._count += 1
        return f"{self._token}-{self._count}"

    def _after(self, path: str) -> FileVersion:
        after = self._plan.changes[path].after
        assert after is not None
        return after

    # -- making what is new

    def _make_directory(self, path: str) -> None:
        with self._at(path) as (at, name):
            self._later(path, lambda: self._unmake_directory(path))
            try:
                os.mkdir(name, self._after(path).mode & RWX | stat.S_IRWXU, dir_fd=at)
            except FileExistsError:
                self._ways_back.pop()  # it is somebody else's
                raise WorkspaceConflictError([path]) from None
            self._made[path] = os.lstat(name, dir_fd=at).st_mode & RWX

    def _unmake_directory(self, path: str) -> None:
        with self._at(path) as (at, name), suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=at)

    def _stage(self, path: str, *, replaces: bool) -> tuple[str, Identity]:
        """The new file or link under a hidden name beside `path`; that name, and what is there."""
        hidden = self._hidden()
        self._later(path, lambda: self._unlink_hidden(path, hidden))
        after = self._after(path)
        content = b"" if after.kind == "symlink" else self._content(path, after)
        with self._at(path) as (at, name):
            if after.target is not None:
                os.symlink(after.target, hidden, dir_fd=at)
            elif replaces:
                mode = after.mode if changes_mode(self._plan.changes[path]) else None
                _write_file(at, hidden, content, 0o600, lambda new: _resemble(new, at, name, mode))
            else:
                _write_file(at, hidden, content, after.mode & RWX, None)
            return hidden, _identity(at, hidden)

    def _content(self, path: str, after: FileVersion) -> bytes:
        content = self._filesystem.read_bytes(path).content
        if hashlib.sha256(content).hexdigest() != after.content_hash:
            raise ValueError(f"{path} is not what the changes say: take them again, nothing was written")
        return content

    def _unlink_hidden(self, path: str, hidden: str) -> None:
        with self._at(path) as (at, _), suppress(FileNotFoundError):
            os.unlink(hidden, dir_fd=at)

    def _place(self, path: str, hidden: str, ours: Identity) -> None:
        self._later(path, lambda: self._unplace(path, ours))
        with self._at(path) as (at, name):
            try:  # a rename would take the place of whatever came there meanwhile
                os.link(hidden, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
            except FileExistsError:
                raise WorkspaceConflictError([path]) from None
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                if exists(at, name):
                    raise WorkspaceConflictError([path]) from None
                os.rename(hidden, name, src_dir_fd=at, dst_dir_fd=at)
            else:
                os.unlink(hidden, dir_fd=at)

    def _unplace(self, path: str, ours: Identity) -> None:
        with self._at(path) as (at, name), suppress(FileNotFoundError):
            if _identity(at, name) == ours:
                os.unlink(name, dir_fd=at)

    # -- displacing what was there

    def _replace(self, path: str, hidden: str, ours: Identity) -> None:
        """The new one takes the name over, so that there is always one of the two under it; the old one has another
        name by then. (Between these two calls somebody else's rename would be lost: a few microseconds.)"""
        self._aside[path], aside = self._aside_of(path)
        self._later(path, lambda: self._put_back(path, aside, ours))
        with self._at(path) as (at, name):
            try:
                os.link(name, aside, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
            except OSError as error:
                if error.errno not in NO_HARD_LINKS:
                    raise
                os.rename(name, aside, src_dir_fd=at, dst_dir_fd=at)
            os.rename(hidden, name, src_dir_fd=at, dst_dir_fd=at)

    def _set_aside(self, path: str) -> None:
        self._aside[path], aside = self._aside_of(path)
        self._later(path, lambda: self._put_back(path, aside, None))
        with self._at(path) as (at, name):
            os.rename(name, aside, src_dir_fd=at, dst_dir_fd=at)

    def _aside_of(self, path: str) -> tuple[str, str]:
        aside = self._hidden()
        parent = split(path)[0]
        return f"{parent}/{aside}" if parent else aside, aside

    def _put_back(self, path: str, aside: str, ours: Identity | None) -> None:
        with self._at(path) as (at, name):
            if not exists(at, aside):
                return
            if not exists(at, name) or _identity(at, name) == ours:
                os.rename(aside, name, src_dir_fd=at, dst_dir_fd=at)
            elif os.path.samestat(os.lstat(name, dir_fd=at), os.lstat(aside, dir_fd=at)):
                os.unlink(aside, dir_fd=at)  # a rename between two names of one file does nothing
            else:
                raise FileExistsError(errno.EEXIST, f"changed meanwhile; the original is {self._aside[path]}", path)

    def _removed(self, paths: Sequence[str]) -> bool:
        """Remove a displaced original, the first of `paths`, with what the workspace knew to be in it, the rest."""
        directories = {path for path in paths if self._was_directory(path)}
        try:
            for path in paths:
                if path in directories:
                    with directory(self._top, self.where(path)) as at:
                        os.fchmod(at, stat.S_IRWXU)
            for path in reversed(paths):
                with self._at(self.where(path)) as (at, name):
                    (os.rmdir if path in directories else os.unlink)(name, dir_fd=at)
        except (OSError, WorkspaceConflictError):
            return False
        return True

    def _was_directory(self, path: str) -> bool:
        """Whether it was a directory, and is none any more."""
        before = self._plan.changes[path].before
        return path in self._plan.gone and before is not None and before.kind == "directory"

    # -- permission bits

    def _final_modes(self) -> list[tuple[str, int]]:
        """The bits that paths are to end with, what is in a directory before it."""
        modes = {path: self._after(path).mode & RWX for path in self._plan.modes}
        modes |= {path: made & self._after(path).mode for path, made in self._made.items()}
        return sorted(modes.items(), reverse=True)

    def _needed(self, path: str) -> int:
        """The bits without which `drop` and `undo` could not get at something."""
        return stat.S_IRWXU if self._after(path).kind == "directory" else stat.S_IRUSR

    def _set_mode(self, path: str, mode: int) -> None:
        with self._at(path) as (at, name):
            descriptor = os.open(name, READ, dir_fd=at)
            try:
                special = stat.S_IMODE(os.fstat(descriptor).st_mode) & ~RWX
                os.fchmod(descriptor, special | mode & RWX)
            finally:
                os.close(descriptor)


def _identity(at: int, name: str) -> Identity:
    found = os.lstat(name, dir_fd=at)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _write_file(at: int, name: str, content: bytes, mode: int, finish: Callable[[int], None] | None) -> None:
    descriptor = os.open(name, NEW, mode, dir_fd=at)
    try:
        write_all(descriptor, content)
        if finish is not None:
            finish(descriptor)
    finally:
        os.close(descriptor)


def _resemble(descriptor: int, at: int, replaced: str, mode: int | None) -> None:
    """Give a new file the owner, extended attributes and permission bits of another, as far as that is permitted."""
    original = os.open(replaced, READ, dir_fd=at)
    try:
        found = os.fstat(original)
        ours = os.fstat(descriptor)
        if (found.st_uid, found.st_gid) != (ours.st_uid, ours.st_gid):
            with suppress(PermissionError):
                os.fchown(descriptor, found.st_uid, found.st_gid)
        if sys.platform == "linux":
            with suppress(OSError):
                for name in os.listxattr(original):
                    if name != "security.capability":  # like the set-user-id bit: not for other bytes
                        os.setxattr(descriptor, name, os.getxattr(original, name))
        os.fchmod(descriptor, (found.st_mode if mode is None else mode) & RWX)
    finally:
        os.close(original)
