"""Collect the files of a host directory for a mount. Nothing is changed, and no link that leads out is followed.

Everything below the directory is reached by descriptors, so that no link swapped in on the way can lead out either.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from ringfence_sandbox import is_reserved
from ringfence_tools.contents import Contents

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
BENEATH = DIRECTORY | os.O_NOFOLLOW
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a fifo swapped in must not block
CHUNK_BYTES = 1 << 26
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


@contextmanager
def directory(root: int, path: str) -> Generator[int]:
    """A descriptor of the directory at `path` ("" for the root itself) below the directory that `root` describes.

    Raises:
        NotADirectoryError, FileNotFoundError: a component is missing, or is no directory; a link is none.
    """
    current = os.open(".", DIRECTORY, dir_fd=root)
    try:
        for name in path.split("/") if path else ():
            below = os.open(name, BENEATH, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


def split(path: str) -> tuple[str, str]:
    """A path's directory and name."""
    parent, _, name = path.rpartition("/")
    return parent, name


def read_regular(directory: int, name: str, most: int | None = None) -> tuple[bytes, os.stat_result] | None:
    """All bytes of a regular file and its stat, taken when it was opened; None if it is anything else.

    A file that changes while it is read gives what was read; of one with more than `most` bytes, it is a few more.
    """
    descriptor = os.open(name, READ, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        first = min(found.st_size, CHUNK_BYTES) if most is None else min(found.st_size, CHUNK_BYTES, most)
        content = os.read(descriptor, first + 1)
        if len(content) == found.st_size or (most is not None and len(content) > most):
            return content, found
        chunks, total = [content], len(content)
        while content and (most is None or total <= most) and (content := os.read(descriptor, CHUNK_BYTES)):
            chunks.append(content)
            total += len(content)
        return b"".join(chunks), found
    finally:
        os.close(descriptor)


def target_within(root: str, path: str, target: str) -> str | None:
    """What a link at `path` that says `target` has to say in a workspace made of `root` (a real path), to lead to
    the same place; None where that is not within `root`.

    That is `target` itself, except where it is absolute, or leaves `root` on the way and comes back.
    """
    parent = split(path)[0]
    start = os.path.join(root, parent)
    led_to = os.path.realpath(os.path.join(start, target))
    if not is_within(root, led_to):
        return None
    if not os.path.isabs(target):
        parts = target.split("/")
        if all(is_within(root, os.path.realpath(os.path.join(start, *parts[:n]))) for n in range(1, len(parts))):
            return target
    return os.path.relpath(led_to, os.path.realpath(start))


def is_within(root: str, path: str) -> bool:
    """Whether the real path `path` is `root`, or below it."""
    return path == root or path.startswith(root.rstrip("/") + "/")
