"""Listing and walking a tree on disk. What cannot be read is passed over: one bad entry spoils nothing else."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing

from ringfence.filesystem.encodings import BEGINNING_BYTES, wide_encoding
from ringfence.filesystem.paths import os_error
from ringfence.filesystem.protocol import MAX_TEXT_BYTES, FileEntry, GlobMatch
from ringfence.filesystem.search import Child
from ringfence_workspace.tree.confined import CHUNK_BYTES, Confined, PathLooks, open_file
from ringfence_workspace.tree.hidden_tree import HiddenTree


class TreeListing:
    """`ringfence.filesystem.search.Directories` over the files below a root; a directory is its resolved path."""

    def __init__(self, files: Confined, hidden: HiddenTree | None = None) -> None:
        """What is ``hidden`` is in `entries`, without its size, and in nothing else."""
        self._files = files
        self._hidden = hidden

    def entries(self, place: str, prefix: str) -> list[FileEntry]:
        """The names in the directory at `place`, sorted, with paths that begin with `prefix`."""
        descriptor = self._files.open_directory(place)
        entries: list[FileEntry] = []
        try:
            for name in sorted(os.listdir(descriptor)):
                if not place and self._files.is_reserved(name):
                    continue
                try:
                    found = os.lstat(name, dir_fd=descriptor)
                except PermissionError:  # it may be listed and not searched: that is not to be taken for empty
                    raise os_error(errno.EACCES, prefix.removesuffix("/")) from None
                except OSError:
                    continue
                is_link = stat.S_ISLNK(found.st_mode)
                led_to = self._target(_below(place, name)) if is_link else found
                mode = 0 if led_to is None else led_to.st_mode
                size = led_to.st_size if led_to is not None and stat.S_ISREG(mode) else 0
                kind = stat.S_IFMT(found.st_mode)
                if self._hidden is not None and self._hidden.hides_entry(_below(place, name), kind, found.st_ino):
                    size = 0
                entries.append(FileEntry(name, prefix + name, stat.S_ISREG(mode), stat.S_ISDIR(mode), size, is_link))
        finally:
            os.close(descriptor)
        return entries

    def children(self, directory: str, prefix: str) -> list[Child[str]]:
        return [
            self._child(_below(directory, name), prefix, name, kind)
            for name, kind in _kinds(self._files, directory, self._hidden)
        ]

    def child(self, directory: str, prefix: str, name: str) -> Child[str] | None:
        place = _below(directory, name)
        try:
            found = None if self._files.is_reserved(place) else self._files.look(place)
        except OSError:
            return None
        if found is None or (self._hidden is not None and self._hidden.hides(place)):
            return None
        return self._child(place, prefix, name, stat.S_IFMT(found.st_mode))

    def _child(self, place: str, prefix: str, name: str, kind: int) -> Child[str]:
        path = prefix + name
        if kind == stat.S_IFDIR:
            return name, GlobMatch(path, False), place
        return name, GlobMatch(path, self._leads_to_file(place, kind)), None

    def _leads_to_file(self, place: str, mode: int) -> bool:
        if not stat.S_ISLNK(mode):
            return stat.S_ISREG(mode)
        led_to = self._target(place)
        return led_to is not None and stat.S_ISREG(led_to.st_mode)

    def _target(self, place: str) -> os.stat_result | None:
        try:
            return self._files.find(place).stat
        except OSError:
            return None

    def contents(
        self, place: str, prefix: str, wanted: Callable[[str], object] | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """The text files below a directory in the order of their paths, links passed over; only those ``wanted`` by
        their paths below it."""
        waiting = [(place, prefix, stat.S_IFDIR)]
        with closing(PathLooks(self._files)) as looks:
            while waiting:
                at, path, kind = waiting.pop()
                if kind == stat.S_IFDIR:
                    found = sorted(_kinds(self._files, at, self._hidden), key=_walk_key, reverse=True)
                    waiting += [
                        (_below(at, name), f"{path}{name}/" if kind == stat.S_IFDIR else path + name, kind)
                        for name, kind in found
                    ]
                elif kind == stat.S_IFREG and (wanted is None or wanted(path[len(prefix) :])):
                    try:
                        content = read_text(*looks.parent(at), at)
                    except OSError:
                        continue
                    if content is not None:
                        yield path, content


def read_text(directory: int, name: str, place: str) -> bytes | None:
    """The bytes of a regular file; None for a binary one, of which no more than the beginning is read, and for one of
    more than MAX_TEXT_BYTES."""
    descriptor, found = open_file(directory, name, place)
    try:
        if found.st_size > MAX_TEXT_BYTES:
            return None
        first = os.read(descriptor, BEGINNING_BYTES)
        is_whole = len(first) == found.st_size
        if b"\0" in first and wide_encoding(first, whole=is_whole) is None:
            return None
        if is_whole:
            return first
        chunks = [first]
        while content := os.read(descriptor, min(max(found.st_size, 1 << 16), CHUNK_BYTES)):
            chunks.append(content)
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def _kinds(files: Confined, place: str, hidden: HiddenTree | None) -> list[tuple[str, int]]:
    """The names in a directory and the file types of what they name; nothing where it cannot be read.

    What is hidden is left out.
    """
    try:
        descriptor = files.open_directory(place)
    except OSError:
        return []
    found: list[tuple[str, int]] = []
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if not place and files.is_reserved(entry.name):
                    continue
                try:
                    if entry.is_file(follow_symlinks=False):
                        kind = stat.S_IFREG
                    elif entry.is_dir(follow_symlinks=False):
                        kind = stat.S_IFDIR
                    else:
                        kind = stat.S_IFLNK if entry.is_symlink() else 0
                except OSError:
                    continue
                if hidden is not None and hidden.hides_entry(_below(place, entry.name), kind, entry.inode()):
                    continue
                found.append((entry.name, kind))
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return found


def _walk_key(found: tuple[str, int]) -> str:
    # "a.txt" comes before "a/b": compare a directory as what its paths begin with.
    return f"{found[0]}/" if found[1] == stat.S_IFDIR else found[0]


def _below(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
