"""What differs between an earlier state of the tree and now, told from the deeds in between; nothing is scanned.

The deeds are undone on a sketch: a tree of names that only has what some deed touched, where every node knows at
which place on disk, in the workspace or held, its content lies today.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from ringfence.participants import Change, FileVersion
from ringfence_sandbox.calls.holding import Holding
from ringfence_sandbox.disk.confined import CHUNK_BYTES, Confined, Looks, is_reserved, open_file
from ringfence_sandbox.disk.records import Deed

Where: TypeAlias = tuple[int, str]
"""A slot and a path in it; slot -1 is the workspace itself."""
IN_TREE = -1
HASHED_BYTES = 1 << 28
"""What is larger has no content hash in a change, unless it was written in the call."""
STAMP = "stamp "
"""How what stands for a hash begins."""
_KEPT_BYTES, _KEPT_IN_ALL = 1 << 16, 1 << 24
"""How much of what was read to be hashed is kept, for the history: of a file, and of all."""


@dataclass(slots=True)
class _Node:
    where: Where | None
    """None: there was nothing here, or a directory that no longer is."""
    below: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    mode: int | None = None
    """The permission bits it had, where they are others today."""
    was_directory: bool = False
    made_since: bool = False
    """A directory that a deed made: what somebody else put into it is no change of ours."""


class Differences:
    """One comparison."""

    def __init__(self, files: Confined, holding: Holding | None, known: Callable[[os.stat_result], str | None]) -> None:
        self._files = files
        self._holding = holding
        self._known = known
        """The sha256 of a file that was written lately, found again by its stat."""
        self._top = _Node((IN_TREE, ""))
        self._slots: dict[int, _Node] = {}
        self._last: tuple[str, _Node] = ("", self._top)
        """The directory of the last deed."""
        self._found: list[Change] = []
        self._contents: dict[Where, bytes] = {}
        self._room = _KEPT_IN_ALL
        self._looks = Looks(files)
        self.looked: dict[str, os.stat_result] = {}
        """What was found at the paths of the workspace that were compared."""
        self.made_again: list[str] = []
        """Where there is another file or link now that is as the one was, but for its time and its other names."""

    def undo(self, deeds: Iterable[Deed]) -> None:
        """Go back over `deeds`, given latest first."""
        for deed in deeds:
            match deed.kind:
                case "put":
                    self._slots[deed.slot] = self._replace(deed.path, _Node(None))
                case "take":
                    held = self._slot(deed.slot)
                    if deed.mode and held.where == (deed.slot, "") and self.version((deed.slot, "")) is None:
                        held = _Node(None, mode=deed.mode, was_directory=True)
                    self._replace(deed.path, held)
                    self._slots[deed.slot] = _Node(None)
                case "swap":
                    self._slots[deed.slot] = self._replace(deed.path, self._slot(deed.slot))
                case "move":
                    self._replace(deed.path, self._replace(deed.to, _Node(None)))
                case "mkdir":
                    node = self._node(deed.path)
                    # What is there today may be another one, after this one had gone.
                    node.made_since = node.where == (IN_TREE, deed.path)
                    node.where, node.was_directory, node.mode = None, False, None
                case "rmdir":
                    node = self._node(deed.path)
                    node.where, node.was_directory, node.mode = None, True, deed.mode
                case "mode":
                    self._node(deed.path).mode = deed.mode_before
                case "times" | "opaque":
                    pass

    def changes(self) -> list[Change]:
        """What differs, by path. Bytes, kinds, permission bits and link targets count, times do not."""
        try:
            self._compare("", self._top)
        finally:
            self._looks.close()
        self._found.sort(key=attrgetter("path"))
        return self._found

    def where(self, path: str) -> Where | None:
        """Where the earlier version of a path lies today."""
        return self._node(path).where

    def found(self, path: str) -> os.stat_result | None:
        """What was at a path of the workspace when it was compared, or is there now if it was not."""
        known = self.looked.get(path)
        if known is not None:
            return known
        try:
            return self._look((IN_TREE, path))
        finally:
            self._looks.close()

    def displaced(self, slots: Iterable[int]) -> Iterator[tuple[Where, os.stat_result]]:
        """The regular files held today that are of no earlier version: those that deeds made, and what came between
        two of them. ``slots`` are the ones that deeds held something in."""
        earlier: set[Where] = set()
        waiting: list[Where] = [(slot, "") for slot in slots]
        for node in self._nodes():
            if node.where is not None and node.where[0] != IN_TREE:
                earlier.add(node.where)
                # Another thing, or nothing, was then where this is today in a directory of that time.
                waiting += [
                    below for name in node.below if (below := _within(node.where, name)) != node.below[name].where
                ]
        while waiting:
            where = waiting.pop()
            found = None if where in earlier else self._look(where)
            if found is not None and stat.S_ISREG(found.st_mode):
                yield where, found
            elif found is not None and stat.S_ISDIR(found.st_mode):
                with suppress(PermissionError):
                    waiting += [_within(where, name) for name in self._names(where, "")]

    # -- the sketch

    def _nodes(self) -> Iterator[_Node]:
        waiting = [self._top]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.below.values()

    def _slot(self, slot: int) -> _Node:
        node = self._slots.get(slot)
        if node is None:
            node = self._slots[slot] = _Node((slot, ""))
        return node

    def _node(self, path: str) -> _Node:
        node = self._top
        for name in path.split("/") if path else ():
            node = _child(node, name)
        return node

    def _replace(self, path: str, new: _Node) -> _Node:
        above, _, name = path.rpartition("/")
        if self._last[0] != above:
            self._last = above, self._node(above)
        parent = self._last[1]
        old = _child(parent, name)
        parent.below[name] = new
        _touch(new, old)
        if old.below:  # what is known as the last directory may be in it, or be it
            self._last = "", self._top
        return old

    # -- comparing

    def _compare(self, top: str, node: _Node) -> None:
        waiting = [(top, node)]
        while waiting:
            path, node = waiting.pop()
            unmoved = node.where == (IN_TREE, path)
            names: Collection[str] = node.below
            if not unmoved or node.mode is not None:
                before, after = self._before(node), self.version((IN_TREE, path))
                if before is not None or after is not None:
                    self._note(path, before, after, node)
                if not unmoved:
                    if before is not None and before.kind == "directory" and node.where is not None:
                        names = {*names, *self._names(node.where, path)}
                    if after is not None and after.kind == "directory" and not node.made_since:
                        names = {*names, *self._names((IN_TREE, path), path)}
            if names:
                prefix = f"{path}/" if path else ""
                waiting += [(prefix + name, _child(node, name)) for name in names]

    def _note(self, path: str, before: FileVersion | None, after: FileVersion | None, node: _Node) -> None:
        unhashed = before is not None and before.kind == "file" and before.content_hash is None
        if before != after or (unhashed and node.where != (IN_TREE, path)):
            self._found.append(Change(path, before, after))
        elif before is not None and before.kind != "directory":
            self.made_again.append(path)

    def _before(self, node: _Node) -> FileVersion | None:
        if node.where is None:
            return FileVersion("directory", node.mode or 0, 0) if node.was_directory else None
        version = self.version(node.where)
        if version is None or node.mode is None:
            return version
        return FileVersion(version.kind, node.mode, version.size, version.content_hash, version.target)

    def _names(self, where: Where, said: str) -> set[str]:
        place = self._place(where)
        try:
            names = self._files.names(place)
        except PermissionError:
            # What is in it would go, or move, and nobody could say what it was.
            words = "is a directory that cannot be read, so it stays where and as it is: change its permissions first"
            raise PermissionError(errno.EACCES, words, said) from None
        except OSError:
            return set()
        return {name for name in names if place or not is_reserved(name)}

    def _place(self, where: Where) -> str:
        """Below the root, in which the holding directory is, too."""
        slot, path = where
        if slot == IN_TREE:
            return path
        assert self._holding is not None, "what is held has a holding directory"
        return "/".join(filter(None, (self._holding.name, str(slot), path)))

    def read(self, where: Where) -> bytes:
        content = self._contents.get(where)
        if content is None:
            content, _ = self._files.read_file(self._place(where))
        return content

    def known_content(self, path: str) -> bytes | None:
        """The bytes that were at a path before, if they were read to be compared and are few."""
        where = self.where(path)
        return None if where is None else self._contents.get(where)

    def version(self, where: Where) -> FileVersion | None:
        """What is at a place on disk today."""
        found = self._look(where)
        if found is None:
            return None
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISREG(found.st_mode):
            known = self._known(found)
            return FileVersion("file", mode, found.st_size, known or self._hash(where, found))
        if stat.S_ISDIR(found.st_mode):
            return FileVersion("directory", mode, 0)
        if stat.S_ISLNK(found.st_mode):
            target = self._files.read_link(self._place(where))
            return FileVersion("symlink", 0o777, len(os.fsencode(target)), None, target)
        return FileVersion("file", mode, 0)

    def _look(self, where: Where) -> os.stat_result | None:
        slot, path = where
        if slot == IN_TREE:
            found = self._looks.look(path)
            if found is not None:
                self.looked[path] = found
            return found
        if not path and self._holding is not None:
            return self._holding.look(slot)
        return self._files.look(self._place(where))

    def _hash(self, where: Where, found: os.stat_result) -> str | None:
        if found.st_size > HASHED_BYTES:
            return None
        slot, path = where
        try:
            if slot != IN_TREE and not path and self._holding is not None:
                descriptor, found = open_file(self._holding.descriptor, str(slot), path, found)
            else:
                place = self._place(where)
                with self._files.parent(place) as (at, name):
                    descriptor, found = open_file(at, name, place)
        except OSError:
            return None
        try:
            return self._read_hash(where, descriptor, found.st_size)
        finally:
            os.close(descriptor)

    def _read_hash(self, where: Where, descriptor: int, size: int) -> str:
        content = os.read(descriptor, min(size, CHUNK_BYTES) + 1)
        digest = hashlib.sha256(content)
        if len(content) != size:
            while content and (content := os.read(descriptor, CHUNK_BYTES)):
                digest.update(content)
        elif size <= min(_KEPT_BYTES, self._room):
            self._room -= size
            self._contents[where] = content
        return digest.hexdigest()


def _child(node: _Node, name: str) -> _Node:
    child = node.below.get(name)
    if child is None:
        child = node.below[name] = _Node(None if node.where is None else _within(node.where, name))
    return child


def _within(where: Where, name: str) -> Where:
    slot, path = where
    return slot, f"{path}/{name}" if path else name


def _touch(new: _Node, old: _Node) -> None:
    """What deeds did below the path of `old` is to be compared there also when `new` has taken its place."""
    for name, child in old.below.items():
        _touch(_child(new, name), child)
