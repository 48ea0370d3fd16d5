"""The copy-on-write tree in which the filesystem in memory keeps its files.

Files and links never change. A directory may be changed in place only in the generation that it was made or copied
in; freezing the tree starts the next generation, so whoever holds a frozen root has that state for ever, and the
first change after it copies the directories on its way and nothing else. Going back is putting a root back.

Changes exclude each other and freezing (the filesystem's lock); looking does not wait for them. So what looks at
a directory takes a copy of its names first, and what it derives is kept together with the version it was derived from.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final, TypeAlias, final

from ringfence.filesystem.paths import os_error, outside
from ringfence.filesystem.protocol import FileEntry, GlobMatch, ReadBytesResult, ReadResult
from ringfence.filesystem.search import Child
from ringfence.participants import Change, FileVersion

MAX_LINK_HOPS = 40
"""As in Linux."""


@final
class File:
    __slots__ = ("_sha256", "birth_ns", "bytes_read", "content", "mode", "mtime_ns", "text_read")

    def __init__(self, content: bytes, mode: int, mtime_ns: int, birth_ns: int) -> None:
        self.content: Final = content
        self.mode: Final = mode
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns
        # The last answers to the usual questions, whose making takes longer than all else about a read.
        self.bytes_read: ReadBytesResult | None = None
        self.text_read: ReadResult | None = None
        self._sha256: str | None = None

    @property
    def sha256(self) -> str:
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self.content).hexdigest()
        return self._sha256


@final
class Link:
    __slots__ = ("birth_ns", "mtime_ns", "target")

    def __init__(self, target: str, mtime_ns: int, birth_ns: int) -> None:
        self.target: Final = target
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns


@final
class Directory:
    __slots__ = (
        "birth_ns",
        "children",
        "copied_from",
        "entries",
        "generation",
        "listing",
        "mode",
        "mtime_ns",
        "serial",
        "touched",
        "version",
    )
    _serials = itertools.count()

    def __init__(
        self, generation: int, mode: int, mtime_ns: int, birth_ns: int, entries: dict[str, Node] | None = None
    ) -> None:
        self.entries: dict[str, Node] = {} if entries is None else entries
        self.mode = mode
        self.mtime_ns = mtime_ns
        self.birth_ns: Final = birth_ns
        self.generation: Final = generation
        self.serial: Final = next(self._serials)
        self.copied_from: int | None = None
        """The serial of the directory that this one is a changed copy of; ``touched`` has the names that may differ.

        A serial and no reference: a copy must not keep alive what nobody else holds."""
        self.touched: set[str] | None = None
        self.version = 0
        """Counts changes in place. Raised after each, so what was derived during one is not taken for current."""
        self.children: tuple[int, str, tuple[Child[Directory], ...]] | None = None
        self.listing: tuple[int, str, tuple[FileEntry, ...]] | None = None

    def copy(self, generation: int) -> Directory:
        twin = Directory(generation, self.mode, self.mtime_ns, self.birth_ns, self.entries.copy())
        twin.copied_from = self.serial
        twin.touched = set()
        return twin

    def put(self, name: str, node: Node) -> None:
        self.entries[name] = node
        self._changed(name)

    def remove(self, name: str) -> None:
        del self.entries[name]
        self._changed(name)

    def _changed(self, name: str) -> None:
        if self.touched is not None:
            self.touched.add(name)
        self.version += 1


Node: TypeAlias = File | Link | Directory
Found: TypeAlias = tuple[str, Node | None, OSError | None]
"""A resolved path, what is there, and why nothing can be made there: a file in the way, or a dangling link."""


class Tree:
    """The current root. Callers exclude each other where they change it."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        now = clock()
        self._generation = 0
        self.root = Directory(0, 0o755, now, now)

    def freeze(self) -> Directory:
        """The state now, for ever; O(1)."""
        self._generation += 1
        return self.root

    def go_back(self, root: Directory) -> None:
        """Make a frozen state the current one; O(1)."""
        self._generation += 1
        self.root = root

    def find(self, path: str, *, follow: bool = True) -> Found:
        """What a normal path leads to; without `follow`, a link at its very end is itself.

        Raises:
            PermissionError: a link leads out of the root.
            OSError: ELOOP, too many links.
        """
        node: Node | None = self.root
        if path:
            for name in path.split("/"):
                if type(node) is not Directory:
                    return _find_along_links(self.root, path, follow)
                node = node.entries.get(name)
            if type(node) is Link and follow:
                return _find_along_links(self.root, path, follow)
        return path, node, None

    def put(self, path: str, node: Node) -> None:
        """Set what is at a resolved path; directories that are missing above it are made."""
        parent, _, name = path.rpartition("/")
        directory = self.changeable(parent)
        if name not in directory.entries:
            directory.mtime_ns = self.clock()
        directory.put(name, node)

    def overwrite(self, path: str, content: bytes) -> bool:
        """Give the file at a normal path other bytes. False, and nothing is changed, where that is not all it takes.

        The commonest change, so it goes down once, copying on its way, where other changes look first and go then.
        """
        generation = self._generation
        directory = self.root
        if directory.generation != generation:
            directory = self._changeable_root()
        *above, name = path.split("/")
        for step in above:
            child = directory.entries.get(step)
            if type(child) is not Directory:
                return False
            if child.generation != generation:
                child = child.copy(generation)
                directory.put(step, child)
            directory = child
        old = directory.entries.get(name)
        if type(old) is not File:
            return False
        directory.entries[name] = File(content, old.mode, self.clock(), old.birth_ns)
        if directory.touched is not None:
            directory.touched.add(name)
        directory.version += 1
        return True

    def remove(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        directory = self.changeable(parent)
        directory.remove(name)
        directory.mtime_ns = self.clock()

    def changeable(self, path: str) -> Directory:
        """The directory at a resolved path, of this generation: made if it is missing, copied if it is older."""
        generation = self._generation
        directory = self._changeable_root()
        for name in path.split("/") if path else ():
            child = directory.entries.get(name)
            if child is None:
                child = self.new_directory()
                directory.mtime_ns = child.mtime_ns
                directory.put(name, child)
            elif type(child) is not Directory:
                raise os_error(errno.ENOTDIR, path)
            elif child.generation != generation:
                child = child.copy(generation)
                directory.put(name, child)
            directory = child
        return directory

    def _changeable_root(self) -> Directory:
        if self.root.generation != self._generation:
            self.root = self.root.copy(self._generation)
        return self.root

    def new_directory(self) -> Directory:
        now = self.clock()
        return Directory(self._generation, 0o755, now, now)

    def child(self, directory: Directory, prefix: str, name: str) -> Child[Directory] | None:
        """One of `children`."""
        node = directory.entries.get(name)
        return None if node is None else self._child(prefix, name, node)

    def children(self, directory: Directory, prefix: str) -> tuple[Child[Directory], ...]:
        """What is in a directory, in an order that makes a walk through files go by their paths."""
        known, version = directory.children, directory.version
        if known is not None and known[0] == version and known[1] == prefix:
            return known[2]
        found = [(name, node) for name, node in directory.entries.copy().items()]
        found.sort(key=_walk_key)
        children = tuple(self._child(prefix, name, node) for name, node in found)
        if not any(type(node) is Link for _, node in found):  # what a link leads to changes elsewhere
            directory.children = (version, prefix, children)
        return children

    def _child(self, prefix: str, name: str, node: Node) -> Child[Directory]:
        path = prefix + name
        if type(node) is Directory:
            return name, GlobMatch(path, False), node
        return name, GlobMatch(path, type(node) is File or type(self.target(path)) is File), None

    def list(self, directory: Directory, prefix: str) -> tuple[FileEntry, ...]:
        """The entries of a directory, sorted by name."""
        known, version = directory.listing, directory.version
        if known is not None and known[0] == version and known[1] == prefix:
            return known[2]
        entries: list[FileEntry] = []
        found = directory.entries.copy()
        linked = False
        for name in sorted(found):
            node: Node | None = found[name]
            if is_link := type(node) is Link:
                linked = True
                node = self.target(prefix + name)
            size = len(node.content) if type(node) is File else 0
            entries.append(FileEntry(name, prefix + name, type(node) is File, type(node) is Directory, size, is_link))
        listing = tuple(entries)
        if not linked:
            directory.listing = (version, prefix, listing)
        return listing

    def target(self, path: str) -> Node | None:
        """What a path leads to, None where that is nothing or out of the root."""
        try:
            return self.find(path)[1]
        except OSError:
            return None

    def contents(self, directory: Directory, prefix: str) -> Iterator[tuple[str, bytes]]:
        """The files below a directory in the order of their paths, links passed over."""
        waiting = [iter(self.children(directory, prefix))]
        above = [directory]
        while waiting:
            entries = above[-1].entries
            for name, match, subdirectory in waiting[-1]:
                if subdirectory is not None:
                    waiting.append(iter(self.children(subdirectory, f"{match.path}/")))
                    above.append(subdirectory)
                    break
                node = entries.get(name)
                if type(node) is File:
                    yield match.path, node.content
            else:
                waiting.pop()
                above.pop()


def _walk_key(found: tuple[str, Node]) -> str:
    # "a.txt" comes before "a/b": compare a directory as what its paths begin with.
    name, node = found
    return f"{name}/" if type(node) is Directory else name


def _find_along_links(root: Directory, path: str, follow: bool) -> Found:
    pending = path.split("/")[::-1]
    own = len(pending)  # below this, what is pending is the caller's; above it, it came out of a link
    names: list[str] = []
    above = [root]
    hops = 0
    while pending:
        out_of_link = len(pending) > own
        name = pending.pop()
        own = min(own, len(pending))
        if name == "..":
            if not names:
                raise outside(path)
            names.pop()
            above.pop()
            continue
        node = above[-1].entries.get(name)
        if type(node) is Directory:
            names.append(name)
            above.append(node)
        elif type(node) is Link and (pending or follow):
            hops += 1
            if hops > MAX_LINK_HOPS:
                raise os_error(errno.ELOOP, path)
            if node.target.startswith("/"):
                raise outside(path)
            pending.extend(part for part in reversed(node.target.split("/")) if part not in ("", "."))
        elif node is not None and not pending:
            return "/".join([*names, name]), node, None
        else:
            obstacle = None
            if node is not None:
                obstacle = os_error(errno.ENOTDIR, path)
            elif out_of_link:
                obstacle = FileNotFoundError(errno.ENOENT, "is a link that leads nowhere", path)
            return _as_far_as_it_goes(path, names, [name, *reversed(pending)]), None, obstacle
    return "/".join(names), above[-1], None


def _as_far_as_it_goes(path: str, names: list[str], rest: list[str]) -> str:
    for name in rest:
        if name != "..":
            names.append(name)
        elif names:
            names.pop()
        else:
            raise outside(path)
    return "/".join(names)


_NOTHING = Directory(0, 0, 0, 0)


def differences(before: Directory, after: Directory) -> list[Change]:
    """What differs between two states, sorted by path; it looks only where their nodes differ.

    Bytes, kinds, permission bits and link targets count, times do not.
    """
    changes: list[Change] = []
    if before.mode != after.mode:
        changes.append(Change("", _version(before), _version(after)))
    waiting = [("", before, after)]
    while waiting:
        prefix, old, new = waiting.pop()
        for name in _names_that_may_differ(old, new):
            was, now = old.entries.get(name), new.entries.get(name)
            if was is now:
                continue
            path = prefix + name
            if not _alike(was, now):
                changes.append(Change(path, was and _version(was), now and _version(now)))
            below_was = was if type(was) is Directory else _NOTHING
            below_now = now if type(now) is Directory else _NOTHING
            if below_was is not below_now:
                waiting.append((f"{path}/", below_was, below_now))
    changes.sort(key=attrgetter("path"))
    return changes


def _names_that_may_differ(old: Directory, new: Directory) -> set[str]:
    if new.touched is not None and new.copied_from == old.serial:
        return new.touched.copy()
    if old.touched is not None and old.copied_from == new.serial:
        return old.touched.copy()
    return {*old.entries.copy(), *new.entries.copy()} if old is not new else set()


def _alike(was: Node | None, now: Node | None) -> bool:
    if type(was) is File and type(now) is File:
        return was.mode == now.mode and was.content == now.content
    if type(was) is Directory and type(now) is Directory:
        return was.mode == now.mode
    return type(was) is Link and type(now) is Link and was.target == now.target


def _version(node: Node) -> FileVersion:
    if type(node) is File:
        return FileVersion("file", node.mode, len(node.content), node.sha256)
    if type(node) is Link:
        return FileVersion("symlink", 0o777, len(node.target.encode("utf-8", "surrogateescape")), None, node.target)
    return FileVersion("directory", node.mode, 0)
