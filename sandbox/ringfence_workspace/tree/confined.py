"""Reaching what is below a root by descriptors, so that no spelling, link or race leads out of it.

A path is walked without links by one `openat2`, or component by component with O_NOFOLLOW where that is missing. Only
where a link is in the way, the links are followed here, one by one, and each step starts again below the root.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from ringfence.filesystem.paths import os_error, outside
from ringfence_workspace.tree.kernel import PATH_ONLY, Abilities, lstat, open_within

MAX_LINK_HOPS = 40
"""As in Linux."""
HOLDING_PREFIX = ".ringfence-hold-"
_HOLDING = re.compile(re.escape(HOLDING_PREFIX) + r"[0-9a-f]{16}\Z")
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PATH_ONLY = PATH_ONLY | _DIRECTORY
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SHORT = 1000
"""So many characters, however they are encoded, are a path that one system call takes."""
CHUNK_BYTES = 1 << 26
STREAMED_BYTES = 1 << 20
"""A longer file is read in pieces where a part of it is asked for, or its hash."""
PIECE_BYTES = 1 << 18
UNREACHABLE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""What says that a path leads to nothing, or along a link."""


def is_reserved(path: str) -> bool:
    """Whether a path of a workspace is, or is in, something that has the form of a hold's name.

    Who has the workspace open knows the names of its own holds. For everybody else each such name may be one.
    """
    return path.startswith(HOLDING_PREFIX) and _HOLDING.match(path.partition("/")[0]) is not None


@dataclass(frozen=True, slots=True)
class Found:
    """A resolved path, what is there, and why nothing can be made there: a file in the way, or a dangling link."""

    place: str
    stat: os.stat_result | None
    obstacle: OSError | None = None

    @property
    def is_directory(self) -> bool:
        return self.stat is not None and stat.S_ISDIR(self.stat.st_mode)

    @property
    def is_file(self) -> bool:
        return self.stat is not None and stat.S_ISREG(self.stat.st_mode)

    @property
    def is_link(self) -> bool:
        return self.stat is not None and stat.S_ISLNK(self.stat.st_mode)


class Confined:
    """The files below the directory that ``root`` describes. The descriptor stays the caller's."""

    def __init__(self, root: int, can: Abilities) -> None:
        self.root = root
        self.holds: set[str] | None = None
        """The names of the own holds in the root. None: somebody else may have it open, and theirs are not known."""
        self._openat2 = can.openat2

    def is_reserved(self, path: str) -> bool:
        """Whether a path is, or is in, a hold, which no path of the workspace can be in."""
        if not path.startswith(HOLDING_PREFIX):
            return False
        return is_reserved(path) if self.holds is None else path.partition("/")[0] in self.holds

    def reserve(self, name: str, *, ends: bool = False) -> None:
        """Have a name in the root be that of a hold, or no more, where it ``ends``."""
        if self.holds is not None:
            (self.holds.discard if ends else self.holds.add)(name)

    def parent(self, place: str) -> _Parent:
        """The directory that a resolved path is in, and its name there; "." for the root itself. OSError where there
        is none, or a link on the way."""
        above, _, name = place.rpartition("/")
        return _Parent(self.open_directory(above, readable=False), name or ".")

    def open_directory(self, place: str, *, readable: bool = True) -> int:
        """A descriptor of the directory at a resolved path; a readable one lists its names."""
        flags = os.O_RDONLY | _DIRECTORY if readable else _PATH_ONLY
        if self._openat2 and place and len(place) < _SHORT:
            return open_within(self.root, place, flags)
        *above, last = place.split("/")
        current = self.root
        try:
            for name in above:
                below = os.open(name, _PATH_ONLY, dir_fd=current)
                if current != self.root:
                    os.close(current)
                current = below
            return os.open(last or ".", flags, dir_fd=current)
        except OSError as error:
            raise os_error(error.errno or errno.EIO, place) from None
        finally:
            if current != self.root:
                os.close(current)

    def find(self, path: str, *, follow: bool = True) -> Found:
        """What a normal path leads to; without `follow`, a link at its very end is itself.

        Raises:
            PermissionError: a link leads out of the root, or a directory on the way may not be searched.
            OSError: ELOOP, too many links.
        """
        if not path:
            return Found("", os.fstat(self.root))
        if self.is_reserved(path):
            return Found(path, None, _reserved(path))
        try:
            found = self._lstat(path)
            along_link = found is not None and follow and stat.S_ISLNK(found.st_mode)
        except OSError as error:
            if error.errno not in UNREACHABLE:
                raise
            found, along_link = None, True
        if along_link:
            with closing(_LinkWalk(self, path)) as walk:
                return walk.find(follow)
        return Found(path, found)

    def existing(self, path: str) -> Found:
        """`find`, where there is something. OSError where there is not."""
        found = self.find(path)
        if found.stat is None:
            raise found.obstacle or os_error(errno.ENOENT, path)
        return found

    def itself(self, path: str) -> Found:
        """The same of what is at the path itself, be it a link."""
        found = self.find(path, follow=False)
        if found.stat is None:
            raise found.obstacle or os_error(errno.ENOENT, path)
        return found

    def look(self, place: str) -> os.stat_result | None:
        """What is at a resolved path; None for nothing, and for what cannot be reached without a link."""
        if not place:
            return os.fstat(self.root)
        try:
            return self._lstat(place)
        except OSError as error:
            if error.errno in UNREACHABLE:
                return None
            raise

    def _lstat(self, place: str) -> os.stat_result | None:
        above, _, name = place.rpartition("/")
        if not above:
            return lstat(self.root, name)
        directory = self.open_directory(above, readable=False)
        try:
            return lstat(directory, name)
        finally:
            os.close(directory)

    def names(self, place: str) -> list[str]:
        """What is in the directory at a resolved path. OSError where there is none, or none that can be read."""
        descriptor = self.open_directory(place)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def read_link(self, place: str) -> str:
        with self.parent(place) as (directory, name):
            return os.readlink(name, dir_fd=directory)

    def read_content(self, place: str) -> bytes:
        """All bytes of the regular file at a resolved path, or the target of the symlink. OSError for anything else."""
        with self.parent(place) as (directory, name):
            try:
                return os.fsencode(os.readlink(name, dir_fd=directory))
            except OSError as error:
                if error.errno != errno.EINVAL:  # no link
                    raise
            return read_file(directory, name, place)[0]

    def read_file(self, place: str) -> tuple[bytes, os.stat_result]:
        """All bytes of the regular file at a resolved path, and its stat. OSError for anything else there."""
        with self.parent(place) as (directory, name):
            return read_file(directory, name, place)

    def read_short(self, place: str) -> tuple[bytes | None, os.stat_result]:
        """The same, but None in the place of more than `STREAMED_BYTES`."""
        with self.parent(place) as (directory, name):
            found = os.lstat(name, dir_fd=directory)
            if stat.S_ISREG(found.st_mode) and found.st_size > STREAMED_BYTES:
                return None, found
            return read_file(directory, name, place, found)

    def hash_file(self, place: str) -> str:
        """The sha256 of the regular file at a resolved path. OSError for anything else there."""
        with self.parent(place) as (directory, name):
            descriptor, _ = open_file(directory, name, place)
        try:
            return sha256_of(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def streamed(self, place: str) -> Generator[tuple[Pieces, os.stat_result]]:
        """The bytes of the regular file at a resolved path in pieces, and its stat. OSError for anything else there."""
        with self.parent(place) as (directory, name):
            descriptor, found = open_file(directory, name, place)
        try:
            yield Pieces(descriptor), found
        finally:
            os.close(descriptor)


class Pieces:
    """Iterates over the bytes from a descriptor's place on, and then has their number and their sha256."""

    def __init__(self, descriptor: int) -> None:
        self.size = 0
        self._descriptor = descriptor
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        while piece := os.read(self._descriptor, PIECE_BYTES):
            self.size += len(piece)
            self._digest.update(piece)
            yield piece

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class PathLooks:
    """`Confined.look` for many places, each directory opened once for all that are asked for in a row.

    It may be that nobody sees another directory come to its path meanwhile: it is for one look at what there is.
    """

    def __init__(self, files: Confined) -> None:
        self._files = files
        self._above = ""
        self._directory = -1

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def parent(self, place: str) -> tuple[int, str]:
        """The directory that a resolved path is in, open until the next call, and its name there. OSError as for
        `Confined.parent`."""
        above, _, name = place.rpartition("/")
        if self._directory < 0 or self._above != above:
            self.close()
            self._above, self._directory = above, self._files.open_directory(above, readable=False)
        return self._directory, name or "."

    def look(self, place: str) -> os.stat_result | None:
        try:
            return lstat(*self.parent(place))
        except OSError as error:
            if error.errno in UNREACHABLE:
                return None
            raise


class _Parent:
    """An open directory and a name in it, for a ``with``. (On the way of every file: no generator.)"""

    __slots__ = ("_descriptor", "_name")

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def __enter__(self) -> tuple[int, str]:
        return self._descriptor, self._name

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def open_file(directory: int, name: str, place: str, found: os.stat_result | None = None) -> tuple[int, os.stat_result]:
    """A descriptor to read a regular file with; nothing else is ever opened, unless it comes there this instant.
    ``found`` is what was there just now, if that is known."""
    if found is None:
        found = os.lstat(name, dir_fd=directory)
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(found, place)
    try:
        descriptor = os.open(name, _READ, dir_fd=directory)
    except OSError as error:
        raise os_error(error.errno or errno.EIO, place) from None
    opened = os.fstat(descriptor)
    if not stat.S_ISREG(opened.st_mode):
        os.close(descriptor)
        raise _no_file(opened, place)
    return descriptor, opened


def read_file(
    directory: int, name: str, place: str, found: os.stat_result | None = None
) -> tuple[bytes, os.stat_result]:
    """All bytes of a regular file, and its stat from before they were read; ``found`` is as for `open_file`."""
    descriptor, found = open_file(directory, name, place, found)
    try:
        content = os.read(descriptor, min(found.st_size, CHUNK_BYTES) + 1)
        if len(content) == found.st_size:
            return content, found
        chunks = [content]
        while content and (content := os.read(descriptor, CHUNK_BYTES)):
            chunks.append(content)
        return b"".join(chunks), found
    finally:
        os.close(descriptor)


def sha256_of(descriptor: int) -> str:
    """Of the bytes from a descriptor's place on; not all of them are in memory at once."""
    pieces = Pieces(descriptor)
    for _ in pieces:
        pass
    return pieces.sha256


def _no_file(found: os.stat_result, place: str) -> OSError:
    if stat.S_ISDIR(found.st_mode):
        return os_error(errno.EISDIR, place)
    if stat.S_ISLNK(found.st_mode):
        return os_error(errno.ELOOP, place)
    return PermissionError(errno.EACCES, "is a socket, a pipe or a device, which is never opened", place)


def _reserved(path: str) -> PermissionError:
    return PermissionError(errno.EACCES, "is a name that displaced files wait under, and no path", path)


class _LinkWalk:
    """One walk along links. Directories are opened below the one before, and anew from the root after a ".."."""

    def __init__(self, files: Confined, path: str) -> None:
        self._files = files
        self._path = path
        self._names: list[str] = []
        self._at = os.dup(files.root)

    def close(self) -> None:
        os.close(self._at)

    def find(self, follow: bool) -> Found:
        pending = self._path.split("/")[::-1]
        own = len(pending)  # below this, what is pending is the caller's; above it, it came out of a link
        hops = 0
        while pending:
            was, out_of_link = own, len(pending) > own
            name = pending.pop()
            own = min(own, len(pending))
            if name == "..":
                self._up()
                continue
            if not self._names and self._files.is_reserved(name):
                return Found("/".join([name, *reversed(pending)]), None, _reserved(self._path))
            found = self._lstat(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                self._down(name)
            elif found is not None and stat.S_ISLNK(found.st_mode) and (pending or follow):
                hops += 1
                if hops > MAX_LINK_HOPS:
                    raise os_error(errno.ELOOP, self._path)
                target = self._target(name)
                if target is None:  # it is no link any more: what is it now?
                    pending.append(name)
                    own = was
                    continue
                if target.startswith("/"):
                    raise outside(self._path)
                pending.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
            elif found is not None and not pending:
                return Found("/".join([*self._names, name]), found)
            else:
                return self._nothing(found is not None, out_of_link, [name, *reversed(pending)])
        return Found("/".join(self._names), os.fstat(self._at))

    def _lstat(self, name: str) -> os.stat_result | None:
        try:
            return lstat(self._at, name)
        except OSError as error:
            raise os_error(error.errno or errno.EIO, self._path) from None

    def _target(self, name: str) -> str | None:
        try:
            return os.readlink(name, dir_fd=self._at)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise os_error(error.errno or errno.EIO, self._path) from None

    def _nothing(self, in_the_way: bool, out_of_link: bool, rest: list[str]) -> Found:
        obstacle = None
        if in_the_way:
            obstacle = os_error(errno.ENOTDIR, self._path)
        elif out_of_link:
            obstacle = FileNotFoundError(errno.ENOENT, "is a link that leads nowhere", self._path)
        for name in rest:
            if name != "..":
                self._names.append(name)
            elif self._names:
                self._names.pop()
            else:
                raise outside(self._path)
        return Found("/".join(self._names), None, obstacle)

    def _down(self, name: str) -> None:
        below = os.open(name, _PATH_ONLY, dir_fd=self._at)
        os.close(self._at)
        self._at = below
        self._names.append(name)

    def _up(self) -> None:
        if not self._names:
            raise outside(self._path)
        self._names.pop()
        above = self._files.open_directory("/".join(self._names), readable=False)
        os.close(self._at)
        self._at = above
