"""Collect the files of a host directory for a mount. Links that lead out are not followed.

Everything below the directory is opened through descriptors. A link that is swapped in meanwhile cannot lead out.
"""

from __future__ import annotations

import os
import stat
from operator import attrgetter

from ringfence_sandbox import is_reserved
from ringfence_tools.contents import Contents, MountedEntry

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a fifo swapped in must not block
PERMISSION_BITS = 0o7777
MAX_DEPTH = 200
"""The deepest directory in a mount. Each directory on the way keeps a descriptor open."""


def collect_file(host_path: str, name: str, contents: Contents) -> None:
    """Collect one file under `name`. `host_path` is a real path. Raises OSError if it cannot be read."""
    parent, host_name = os.path.split(host_path)
    top = os.open(parent, DIRECTORY)
    try:
        _add_file(contents, name, top, host_name)
    finally:
        os.close(top)


def collect_directory(host_path: str, contents: Contents, *, follow_symlinks: bool) -> None:
    """Collect a directory. `host_path` is a real path. Raises OSError if the directory itself cannot be read."""
    top = os.open(host_path, DIRECTORY)
    try:
        _HostWalk(host_path, top, contents, follow_symlinks=follow_symlinks).collect(top, "", "", ())
    finally:
        os.close(top)


class _HostWalk:
    def __init__(self, root: str, top: int, contents: Contents, *, follow_symlinks: bool) -> None:
        """``top`` is a descriptor of ``root``."""
        self._root = root
        self._top = top
        self._contents = contents
        self._follow = follow_symlinks

    def collect(self, at: int, path: str, real_path: str, through: tuple[tuple[int, int], ...]) -> None:
        """Collect the directory of a descriptor, which is ``path`` in the mount and ``real_path`` below the root.

        ``through`` are the directories on the way, by device and inode, so that links are not followed in circles.
        """
        found = os.fstat(at)
        if (identity := (found.st_dev, found.st_ino)) in through:
            self._contents.leave_out(path, "a link to a directory that it is in")
            return
        if len(through) > MAX_DEPTH:
            self._contents.leave_out(path, f"more than {MAX_DEPTH} directories deep")
            return
        with os.scandir(at) as scanned:
            entries = sorted(scanned, key=attrgetter("name"))
        self._contents.add(path, MountedEntry(None, found.st_mode & PERMISSION_BITS, found.st_mtime_ns))
        for entry in entries:
            if path or not is_reserved(entry.name):
                below = f"{path}/{entry.name}" if path else entry.name
                real_below = f"{real_path}/{entry.name}" if real_path else entry.name
                try:
                    self._add(entry, at, below, real_below, (*through, identity))
                except OSError as error:
                    self._contents.leave_out(below, f"cannot be read: {error.strerror or error}")

    def _add(
        self, entry: os.DirEntry[str], at: int, path: str, real_path: str, through: tuple[tuple[int, int], ...]
    ) -> None:
        if entry.is_symlink():
            self._add_link(at, path, real_path, through)
        elif not self._contents.wants(path, is_directory=entry.is_dir(follow_symlinks=False)):
            return
        elif entry.is_dir(follow_symlinks=False):
            self._enter(entry.name, at, path, real_path, through)
        elif entry.is_file(follow_symlinks=False):
            _add_file(self._contents, path, at, entry.name)
        else:
            self._contents.leave_out(path, "neither a file, a directory nor a link")

    def _enter(self, name: str, at: int, path: str, real_path: str, through: tuple[tuple[int, int], ...]) -> None:
        below = os.open(name, DIRECTORY, dir_fd=at)
        try:
            self.collect(below, path, real_path, through)
        finally:
            os.close(below)

    def _add_link(self, at: int, path: str, real_path: str, through: tuple[tuple[int, int], ...]) -> None:
        host_path = os.path.join(self._root, real_path)
        is_directory = self._follow and os.path.isdir(host_path)
        if not self._contents.wants(path, is_directory=is_directory):
            return
        name = os.path.basename(real_path)
        target = os.readlink(name, dir_fd=at)
        inside = target_within(self._root, real_path, target)
        if inside is None:
            self._contents.leave_out(path, f"a link that leads out of what is mounted, to {target}")
        elif not os.path.exists(host_path):
            self._contents.leave_out(path, f"a link that leads nowhere, to {target}")
        elif not self._follow:
            self._contents.add(path, MountedEntry(inside, mtime_ns=os.lstat(name, dir_fd=at).st_mtime_ns))
        else:
            self._follow_link(path, os.path.relpath(os.path.realpath(host_path), self._root), is_directory, through)

    def _follow_link(self, path: str, real_path: str, is_directory: bool, through: tuple[tuple[int, int], ...]) -> None:
        """Collect the target of a link, a real path below the root, under the path of the link."""
        *above, name = real_path.split("/")
        at = os.dup(self._top)
        try:
            for directory in above:  # each is opened without following links, should the tree have changed meanwhile
                below = os.open(directory, DIRECTORY, dir_fd=at)
                os.close(at)
                at = below
            if is_directory:
                self._enter(name, at, path, "" if real_path == "." else real_path, through)
            else:
                _add_file(self._contents, path, at, name)
        finally:
            os.close(at)


def _add_file(contents: Contents, path: str, at: int, name: str) -> None:
    with open(os.open(name, FILE, dir_fd=at), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            contents.leave_out(path, "not a file")
            return
        contents.expect(found.st_size)
        contents.add(path, MountedEntry(file.readall(), found.st_mode & PERMISSION_BITS, found.st_mtime_ns))


def target_within(root: str, path: str, target: str) -> str | None:
    """Return the target that a link at `path` needs in a workspace made of `root`; None if it leads out of `root`.

    `root` is a real path. The result is `target` itself, unless `target` is absolute or leaves `root` on the way.
    """
    start = os.path.join(root, os.path.dirname(path))
    led_to = os.path.realpath(os.path.join(start, target))
    if not is_within(root, led_to):
        return None
    parts = target.split("/")
    if parts[0] and all(
        is_within(root, os.path.realpath(os.path.join(start, *parts[:n]))) for n in range(1, len(parts))
    ):
        return target
    return os.path.relpath(led_to, os.path.realpath(start))


def is_within(root: str, path: str) -> bool:
    """Whether the real path `path` is `root`, or below it."""
    return path == root or path.startswith(root.rstrip("/") + "/")
