"""The hidden files of a tree on disk: where they are, and by which other names somebody reaches them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from functools import partial

from ringfence.filesystem.hidden import HEAD_BYTES, SAMPLES, HiddenFiles, hidden_error
from ringfence.filesystem.paths import directories_above
from ringfence.participants import HiddenContent
from ringfence_workspace.tree.confined import Confined, Found, open_file

_MAX_DEPTH = 256
MANY = 500
"""Of more than so many covers some runtimes start no container: runc 1.1 has 64 KiB for their sources."""

Inode = tuple[int, int]
"""A device and an inode on it."""


class HiddenTree:
    """The hidden files below a root.

    A file is hidden by its path, and by its inode: another hard link of it, its new path after somebody moved it, and
    the target of a link with a hidden name are hidden, too. A link itself is not: its target is.
    """

    def __init__(self, files: Confined, rule: HiddenFiles, top: str = "") -> None:
        """``top`` is the directory that alone is searched; all of the tree without it."""
        self.rule = rule
        self._top = top
        self._files = files
        self._paths: dict[str, Inode] = {}
        self._inodes: dict[Inode, tuple[str, int, int]] = {}
        """The path, the time of change in nanoseconds, and the file type of each hidden inode when it was seen last."""
        self._numbers: set[int] = set()
        self._links: set[str] = set()
        """The paths of links with hidden names."""
        known = -1
        while known < len(self._paths):  # another hard link may come before the name that hides it
            known = len(self._paths)
            self._walk()

    @property
    def paths(self) -> dict[str, Inode]:
        """What is hidden and there now, by path. What is below a hidden directory is not named."""
        found: dict[str, Inode] = {}
        for path, inode in self._paths.items():
            now = self._look(path)
            if now is not None and (self._is_named(path, now) or _inode(now) == inode):
                found[path] = _inode(now)
        return {
            path: inode for path, inode in sorted(found.items()) if found.keys().isdisjoint(directories_above(path))
        }

    def covers(self) -> dict[str, Inode]:
        """What has to be covered in a container: `paths`. Where these are `MANY`, a directory in which everything is
        hidden stands for all that is in it."""
        found = self.paths
        if len(found) <= MANY:
            return found
        above = {directory for path in found for directory in directories_above(path)}
        for directory in sorted(above, key=lambda path: path.count("/"), reverse=True):  # the inner ones first
            now = self._look(directory)
            below = [f"{directory}/{name}" for name in self._names(directory)]
            if now is not None and below and found.keys() >= set(below):
                for path in below:
                    del found[path]
                found[directory] = _inode(now)
        return dict(sorted(found.items()))

    def contents(self) -> Iterator[HiddenContent]:
        """Each hidden file with its beginning. What cannot be read is left out."""
        for path in self.paths:
            now = self._look(path)
            if now is None or not stat.S_ISDIR(now.st_mode):
                files = [path]
            else:
                files = [f"{at}/{name}" for at, _, names in self._directories(path) for name in names]
            for file in files:
                if head := self._head(file):
                    beside = file.rpartition("/")[0]
                    samples = (self._head(f"{beside}/{name}".lstrip("/")) for name in SAMPLES)
                    yield HiddenContent(file, head, b"\n".join(samples))

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Each path of `paths`, and all that is below hidden directories, with its status."""
        for path in self.paths:
            now = self._look(path)
            if now is None:
                continue
            yield path, now
            for at, directory, names in self._directories(path) if stat.S_ISDIR(now.st_mode) else ():
                for name in names:
                    with suppress(OSError):
                        yield f"{at}/{name}", os.lstat(name, dir_fd=directory)

    def forget_paths(self) -> None:
        """A scan begins, which calls `sees` for all that there is, or for what is `looked_at`."""
        self._paths = {}
        self._links = set()

    @property
    def looked_at(self) -> Set[str]:
        """The paths that every scan looks at: what is hidden, and links with hidden names."""
        return self._paths.keys() | self._links

    def find_below(self, directories: Iterable[str]) -> None:
        """Find what is hidden in directories that no scan enters."""
        for directory in directories:
            with suppress(OSError):
                for _ in self._below(directory):
                    pass

    def sees(
        self,
        directory: int,
        name: str,
        path: str,
        found: os.stat_result,
        is_spared: Callable[[os.stat_result], bool] = lambda found: False,
    ) -> bool:
        """Whether the path, which is in no hidden directory, is hidden; if it is, it is remembered. What ``is_spared``
        is not hidden, whatever its path."""
        if stat.S_ISLNK(found.st_mode):
            if self.rule.hides(path):
                self._links.add(path)
                with suppress(OSError):
                    led_to = self._files.find(path)
                    if led_to.stat is None or is_spared(led_to.stat):
                        return False
                    if led_to.is_file or (led_to.place and led_to.is_directory and self.rule.globs):
                        self._note(led_to.place, led_to.stat)
            return False
        is_directory = stat.S_ISDIR(found.st_mode)
        head = partial(_head, directory, name, path)
        if not self.rule.hides(path, head, is_directory=is_directory) and not self._is_known(found):
            return False
        if is_spared(found):
            return False
        self._note(path, found)
        return True

    def hides(self, path: str) -> bool:
        """Whether a normal path, its links not followed, is hidden or would be hidden if it existed."""
        now = self._look(path)
        return (
            self._is_named(path, now)
            or (now is not None and self._is_known(now))
            or not self._paths.keys().isdisjoint((path, *directories_above(path)))
        )

    def hides_itself(self, path: str) -> bool:
        """Whether what is at a path is hidden by its own name, and its content where the name alone does not tell.

        A file that only another hard link or a link with a hidden name hides is not."""
        return self._is_named(path, self._look(path))

    def hides_entry(self, path: str, kind: int, number: int) -> bool:
        """`hides` for an entry of a directory, of this file type and inode number, without a look at the file."""
        if self.rule.hides(path, partial(self._head, path), is_directory=kind == stat.S_IFDIR):
            return True
        return number in self._numbers and self.hides(path)

    def check(self, path: str, found: Found, content: bytes | None = None) -> None:
        """Raise PermissionError if a path, or what it was resolved to, is hidden. ``content`` is that of the file."""
        place, now = found.place, found.stat
        if now is None:
            return
        head = None if content is None else partial(bytes, content)
        if self._is_named(place, now, head) or self._is_known(now):
            raise hidden_error(path)

    def check_change(self, path: str, found: Found, content: bytes = b"") -> None:
        """Raise PermissionError if a path is hidden, has something hidden below it, or would be with this content."""
        now, place = found.stat, found.place
        is_directory = now is not None and stat.S_ISDIR(now.st_mode)
        new = partial(bytes, content)
        for one in (path, place):
            if self.rule.hides(one, new, is_directory=is_directory):
                raise hidden_error(path) if now is not None else _new_hidden(path)
        self.check(path, found)
        if is_directory:
            for below in self._below(place):
                raise hidden_error(below)

    def _is_named(self, path: str, now: os.stat_result | None, head: Callable[[], bytes] | None = None) -> bool:
        is_directory = now is not None and stat.S_ISDIR(now.st_mode)
        return self.rule.hides(path, head or partial(self._head, path), is_directory=is_directory)

    def _is_known(self, found: os.stat_result) -> bool:
        """Whether this inode was seen under a hidden path, and is not a later file of the same number."""
        known = self._inodes.get(_inode(found))
        if known is None:
            return False
        path, mtime_ns, kind = known
        if kind != stat.S_IFMT(found.st_mode):
            return False
        now = self._look(path)
        return found.st_mtime_ns == mtime_ns or (now is not None and _inode(now) == _inode(found))

    def _note(self, path: str, found: os.stat_result | None) -> None:
        if found is not None:
            self._paths[path] = _inode(found)
            self._remember(path, found)

    def _remember(self, path: str, found: os.stat_result) -> None:
        self._inodes[_inode(found)] = path, found.st_mtime_ns, stat.S_IFMT(found.st_mode)
        self._numbers.add(found.st_ino)

    def _walk(self) -> None:
        """Find what is hidden, and the inodes of all that is below hidden directories."""
        for path, at, names in self._directories(self._top):
            for name in names:
                below = f"{path}/{name}" if path else name
                with suppress(OSError):
                    found = os.lstat(name, dir_fd=at)
                    if not self._paths.keys().isdisjoint(directories_above(below)):
                        self._remember(below, found)
                    else:
                        self.sees(at, name, below, found)

    def _below(self, directory: str) -> Iterator[str]:
        """What is hidden below a directory that is not hidden itself."""
        for path, at, names in self._directories(directory):
            for name in names:
                below = f"{path}/{name}"
                with suppress(OSError):
                    if self.sees(at, name, below, os.lstat(name, dir_fd=at)):
                        yield below

    def _directories(self, top: str) -> Iterator[tuple[str, int, list[str]]]:
        """Each directory from the top: its path, a descriptor, and the names in it."""
        root = self._files.open_directory(top)
        try:
            for place, folders, files, at in os.fwalk(".", dir_fd=root):
                path = f"{top}{place[1:]}".lstrip("/")
                folders[:] = [name for name in folders if path or not self._files.is_reserved(name)]
                yield path, at, [*folders, *files]
                if place.count("/") >= _MAX_DEPTH:  # it is walked by recursion; no scan goes deeper either
                    folders.clear()
        finally:
            os.close(root)

    def _names(self, directory: str) -> list[str]:
        try:
            descriptor = self._files.open_directory(directory)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def _look(self, path: str) -> os.stat_result | None:
        try:
            return self._files.look(path)
        except OSError:
            return None

    def _head(self, path: str) -> bytes:
        try:
            with self._files.parent(path) as (at, name):
                return _head(at, name, path)
        except OSError:
            return b""


def _head(directory: int, name: str, path: str) -> bytes:
    """The beginning of a regular file; nothing of anything else, or of what cannot be read."""
    try:
        descriptor, _ = open_file(directory, name, path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, HEAD_BYTES, 0)
    finally:
        os.close(descriptor)


def _inode(found: os.stat_result) -> Inode:
    return found.st_dev, found.st_ino


def _new_hidden(path: str) -> PermissionError:
    error = hidden_error(path)
    error.strerror = "would be hidden, as files with secrets are: use another name"
    return error
