"""Collecting the files of a host directory for a mount. Nothing on the host is changed, and no link is read through
that leads out."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ringfence_sandbox.disk.confined import is_reserved
from ringfence_tools.contents import Contents
from ringfence_tools.host_tree import DIRECTORY, directory, is_within, read_regular, split, target_within

PERMISSION_BITS = 0o7777


def collect_file(host_path: str, name: str, contents: Contents) -> None:
    """The one file at a real path, under `name`."""
    parent, host_name = os.path.split(host_path)
    top = os.open(parent, DIRECTORY)
    try:
        _Walk(parent, top, contents, follow_symlinks=False).add_file(name, top, host_name)
    finally:
        os.close(top)


def collect_directory(host_path: str, contents: Contents, *, follow_symlinks: bool) -> None:
    """Everything below the directory at a real path."""
    top = os.open(host_path, DIRECTORY)
    try:
        _Walk(host_path, top, contents, follow_symlinks=follow_symlinks).run()
    finally:
        os.close(top)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A directory to go into: where it is in the mount, where it really is below the top, and, so that links are not
    followed in circles, which directories the way there led through."""

    path: str
    real_path: str
    through: tuple[tuple[int, int], ...]


class _Walk:
    def __init__(self, root: str, top: int, contents: Contents, *, follow_symlinks: bool) -> None:
        self._root = root
        self._top = top
        self._contents = contents
        self._follow = follow_symlinks
        self._waiting: list[_Waiting] = []

    def run(self) -> None:
        self._waiting.append(_Waiting("", "", ()))
        while self._waiting:
            here = self._waiting.pop()
            try:
                with directory(self._top, here.real_path) as at:
                    self._directory(here, at)
            except OSError as error:
                if not here.path:
                    raise
                self._contents.leave_out(here.path, _unreadable(error))

    def _directory(self, here: _Waiting, at: int) -> None:
        found = os.fstat(at)
        through = here.through
        if self._follow:
            identity = (found.st_dev, found.st_ino)
            if identity in through:
                self._contents.leave_out(here.path, "a link to a directory that it is in")
                return
            through = (*through, identity)
        with os.scandir(at) as entries:
            names = sorted(entries, key=_name)
        self._contents.add_directory(here.path, found.st_mode & PERMISSION_BITS, found.st_mtime_ns)
        for entry in names:
            if not here.path and is_reserved(entry.name):
                continue
            path = f"{here.path}/{entry.name}" if here.path else entry.name
            real_path = f"{here.real_path}/{entry.name}" if here.real_path else entry.name
            if entry.is_symlink():
                self._link(path, real_path, at, through)
            elif entry.is_dir(follow_symlinks=False):
                if self._contents.wants(path, is_directory=True):
                    self._waiting.append(_Waiting(path, real_path, through))
            elif self._contents.wants(path):
                if entry.is_file(follow_symlinks=False):
                    self.add_file(path, at, entry.name)
                else:
                    self._contents.leave_out(path, "neither a file, a directory nor a link")

    def add_file(self, path: str, at: int, name: str) -> None:
        try:
            read = read_regular(at, name, self._contents.bytes_left())
        except OSError as error:
            self._contents.leave_out(path, _unreadable(error))
            return
        if read is None:
            self._contents.leave_out(path, "no longer a file")
            return
        content, found = read
        self._contents.add_file(path, content, found.st_mode & PERMISSION_BITS, found.st_mtime_ns)

    def _link(self, path: str, real_path: str, at: int, through: tuple[tuple[int, int], ...]) -> None:
        host_path = os.path.join(self._root, real_path)
        goes_into = self._follow and os.path.isdir(host_path)
        if not self._contents.wants(path, is_directory=goes_into):
            return
        try:
            target = os.readlink(split(real_path)[1], dir_fd=at)
            mtime_ns = os.lstat(host_path).st_mtime_ns
        except OSError as error:
            self._contents.leave_out(path, _unreadable(error))
            return
        inside = target_within(self._root, real_path, target)
        if inside is None:
            self._contents.leave_out(path, f"a link that leads out of what is mounted, to {target}")
        elif not os.path.exists(host_path):
            self._contents.leave_out(path, f"a link that leads nowhere, to {target}")
        elif not self._follow:
            self._contents.add_link(path, inside, mtime_ns)
        else:
            self._follow_link(path, os.path.realpath(host_path), goes_into, through)

    def _follow_link(self, path: str, host_path: str, goes_into: bool, through: tuple[tuple[int, int], ...]) -> None:
        if not is_within(self._root, host_path):  # it was, a moment ago
            self._contents.leave_out(path, "a link that leads out of what is mounted")
            return
        real_path = os.path.relpath(host_path, self._root)
        if goes_into:
            self._waiting.append(_Waiting(path, "" if real_path == "." else real_path, through))
            return
        parent, name = split(real_path)
        try:
            with directory(self._top, parent) as at:
                if stat.S_ISREG(os.lstat(name, dir_fd=at).st_mode):
                    self.add_file(path, at, name)
                else:
                    self._contents.leave_out(path, "a link to what is neither a file nor a directory")
        except OSError as error:
            self._contents.leave_out(path, _unreadable(error))


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _unreadable(error: OSError) -> str:
    return f"cannot be read: {error.strerror or error}"
