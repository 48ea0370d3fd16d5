"""What a transaction has changed, and what it offers to whatever keeps the history of a workspace."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ringfence.participants import Change, FileVersion
from ringfence_workspace.tree.confined import CHUNK_BYTES, Confined, PathLooks, open_file
from ringfence_workspace.tree.state import State

if TYPE_CHECKING:
    from ringfence_workspace.history.commits import PreparedStep
    from ringfence_workspace.history.entries import Entry, Unknown
    from ringfence_workspace.transaction.hold import HoldDirectory


@dataclass(frozen=True, slots=True)
class ScannedFiles:
    """What two scans found to have changed, for a call that no undo records tell of."""

    changes: Sequence[Change]
    states: Mapping[str, Entry | None]
    """The new states of all that differs since a commit that is prepared."""
    since: PreparedStep | None
    """That commit; None: the newest one."""
    unknown: Unknown
    before: Callable[[str], bytes]
    """The bytes that a file had before the call. FileNotFoundError where there was none."""
    after: Callable[[str], bytes]
    """The bytes that the call left at a path."""


HASHED_BYTES = 1 << 28
"""What is larger has no content hash in a change, unless it was written in the call."""
STAMP = "stamp "
"""How what stands for the hash of a file that is not read begins."""
_KEPT_BYTES, _KEPT_IN_ALL = 1 << 16, 1 << 24
"""How much of what was read to be hashed is kept, for the history: of a file, and of all."""
_KEPT_WRITTEN_BYTES = 1 << 26


class Written:
    """What the open call has written: the hashes of its files, found again as long as nothing about a file changes,
    and the bytes by their hash, as long as they are not too many."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._hashes: OrderedDict[tuple[int, int, int], str] = OrderedDict()
        self._bytes: dict[str, bytes] = {}
        self._size = 0

    def note(self, state: State, content: bytes | None) -> None:
        if state.sha256 is None:
            return
        if len(self._hashes) >= self._most:
            self._hashes.popitem(last=False)
        self._hashes[state.inode, state.size, state.mtime_ns] = state.sha256
        if content is not None and state.sha256 not in self._bytes and self._size + len(content) <= _KEPT_WRITTEN_BYTES:
            self._bytes[state.sha256] = content
            self._size += len(content)

    def hash_of(self, found: os.stat_result) -> str | None:
        return self._hashes.get((found.st_ino, found.st_size, found.st_mtime_ns))

    def hash_of_state(self, state: State) -> str | None:
        return self._hashes.get((state.inode, state.size, state.mtime_ns))

    def content(self, sha256: str | None) -> bytes | None:
        return None if sha256 is None else self._bytes.get(sha256)

    def forget(self) -> None:
        """The call has ended, or a program runs in it: somebody may write other bytes into a file, of the same number,
        and put its time back."""
        self._hashes.clear()
        self._bytes.clear()
        self._size = 0


class TypedChanges:
    """What differs between the states that paths had and those that they have; bytes are read from where they lie."""

    def __init__(
        self,
        files: Confined,
        before: Mapping[str, State | None],
        held: HoldDirectory | None,
        written: Written,
        *,
        read: bool = True,
    ) -> None:
        """``before`` are the first states, by path. What is no longer at its path is at another of these, or ``held``.
        Unless `read`, no file is read to be hashed.

        Raises:
            PermissionError: a directory or file cannot be read.
        """
        self.looked: dict[str, os.stat_result] = {}
        """What is at the paths now."""
        self._files = files
        self._before = before
        self._held = held
        self._written = written
        self._read = read
        self._contents: dict[str, bytes] = {}
        self._room = _KEPT_IN_ALL
        self.changes: list[Change] = []
        self._made_again: list[str] = []
        self._after_hashes: dict[str, str | None] = {}
        with closing(PathLooks(files)) as self._tree, closing(PathLooks(files)) as self._displaced:
            for path in sorted(before):
                if (found := self._tree.look(path)) is not None:
                    self.looked[path] = found
            for path in sorted(before):
                self._compare(path, before[path], self.looked.get(path))

    @cached_property
    def _elsewhere(self) -> Mapping[int, tuple[str, os.stat_result]]:
        """By inode, what is at the paths now, and what is held."""
        found = {one.st_ino: (path, one) for path, one in self.looked.items()}
        if self._held is not None:
            found |= {one.st_ino: (place, one) for place, one in self._held.entries()}
        return found

    def _compare(self, path: str, before: State | None, found: os.stat_result | None) -> None:
        if before is None and found is None:
            return
        was = None if before is None else self._version_before(path, before, found)
        now = None if found is None else self._version(path, found)
        if now is not None:
            self._after_hashes[path] = now.content_hash
        is_another = _is_another_file(before, found)
        is_unread = was is not None and was.kind == "file" and was.content_hash is None
        if was != now or (is_unread and is_another):
            self.changes.append(Change(path, was, now))
        elif is_another:
            self._made_again.append(path)

    def _version_before(self, path: str, before: State, found: os.stat_result | None) -> FileVersion:
        if before.kind == "directory":
            return FileVersion("directory", before.mode, 0)
        place, here = self._place(path, before, found)
        if before.kind == "symlink":
            target = "" if here is None else self._files.read_link(place)
            return FileVersion("symlink", 0o777, len(os.fsencode(target)), None, target)
        if before.kind == "special":
            return FileVersion("file", before.mode, 0)
        if here is None:
            return FileVersion("file", before.mode, before.size, before.sha256)
        return FileVersion("file", before.mode, here.st_size, self._hash(place, here))

    def _place(self, path: str, before: State, found: os.stat_result | None) -> tuple[str, os.stat_result | None]:
        """Where what was at a path is now, and what it is like; None: nobody knows."""
        if found is not None and found.st_ino == before.inode:
            return path, found
        return self._elsewhere.get(before.inode, (path, None))

    def _looks(self, place: str) -> PathLooks:
        return self._displaced if self._files.is_reserved(place) else self._tree

    def _version(self, place: str, found: os.stat_result) -> FileVersion:
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISREG(found.st_mode):
            return FileVersion("file", mode, found.st_size, self._hash(place, found))
        if stat.S_ISDIR(found.st_mode):
            return FileVersion("directory", mode, 0)
        if stat.S_ISLNK(found.st_mode):
            target = self._files.read_link(place)
            return FileVersion("symlink", 0o777, len(os.fsencode(target)), None, target)
        return FileVersion("file", mode, 0)

    def _hash(self, place: str, found: os.stat_result) -> str | None:
        known = self._written.hash_of(found)
        if known is not None or not self._read:
            return known or f"{STAMP}{found.st_ino} {found.st_size} {found.st_mtime_ns}"
        if found.st_size > HASHED_BYTES:
            return None
        try:
            descriptor, found = open_file(*self._looks(place).parent(place), place, found)
        except OSError:
            return None
        try:
            return self._read_hash(place, descriptor, found.st_size)
        finally:
            os.close(descriptor)

    def _read_hash(self, place: str, descriptor: int, size: int) -> str:
        content = os.read(descriptor, min(size, CHUNK_BYTES) + 1)
        digest = hashlib.sha256(content)
        if len(content) != size:
            while content and (content := os.read(descriptor, CHUNK_BYTES)):
                digest.update(content)
        elif size <= min(_KEPT_BYTES, self._room):
            self._room -= size
            self._contents[place] = content
        return digest.hexdigest()

    # -- for the history

    @property
    def made_again(self) -> Sequence[str]:
        """The paths that have what they had before the call, in another file with another time."""
        return self._made_again

    def moved(self, path: str) -> str | None:
        """Where what was at `path` before the call is now, if it is in the tree and elsewhere."""
        state = self._before.get(path)
        place = path if state is None else self._place(path, state, self.looked.get(path))[0]
        return None if place == path or self._files.is_reserved(place) else place

    def before(self, path: str) -> bytes:
        """The bytes that a file had before the call. FileNotFoundError where there was none."""
        state = self._before.get(path)
        place, here = path, None
        if state is not None:
            place, here = self._place(path, state, self.looked.get(path))
        if here is None:
            raise FileNotFoundError(path)
        try:
            return self._bytes(place)
        except PermissionError:
            words = "cannot be read, so its content could not be kept: it stays as it is"
            raise PermissionError(errno.EACCES, words, path) from None

    def known_before(self, path: str) -> bytes | None:
        """The bytes before the call, if they need not be read for it."""
        state = self._before.get(path)
        return None if state is None else self._contents.get(self._place(path, state, self.looked.get(path))[0])

    def after(self, path: str) -> bytes:
        """The bytes that the call left at a path."""
        content = self._written.content(self._after_hashes.get(path))
        return self._bytes(path) if content is None else content

    def found(self, path: str) -> os.stat_result | None:
        """What `changes` found at `path`, if that is known, and so are the bytes."""
        known = self._written.content(self._after_hashes.get(path))
        return None if known is None else self.looked.get(path)

    def _bytes(self, place: str) -> bytes:
        known = self._contents.get(place)
        return self._files.read_file(place)[0] if known is None else known


def _is_another_file(before: State | None, found: os.stat_result | None) -> bool:
    """Whether there was something and is something, and it is another inode. Directories are known by their paths."""
    if before is None or found is None or before.inode == found.st_ino:
        return False
    return not (before.is_directory and stat.S_ISDIR(found.st_mode))


def states_inside(files: Confined, directory: str) -> dict[str, State]:
    """The states of all that is below a directory, by path from there; of directories, what changes of entries do not.

    Raises:
        PermissionError: something there cannot be read, so that nobody could say what goes with it.
    """
    found: dict[str, State] = {}
    waiting = [directory]
    while waiting:
        place = waiting.pop()
        try:
            descriptor = files.open_directory(place)
        except PermissionError:
            words = "is a directory that cannot be read, so it stays where and as it is: change its permissions first"
            raise PermissionError(errno.EACCES, words, place) from None
        try:
            for name in os.listdir(descriptor):
                path = f"{place}/{name}"
                state = State.of(os.lstat(name, dir_fd=descriptor))
                found[path[len(directory) + 1 :]] = state
                if state.is_directory:
                    waiting.append(path)
        finally:
            os.close(descriptor)
    return found
