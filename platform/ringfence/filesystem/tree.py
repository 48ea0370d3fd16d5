"""The tree in which the filesystem in memory keeps its files: every state can be kept, and every change taken back.

A state to keep is a frozen root. Files and links never change. A directory may be changed in place only in the
generation that it was made or copied in; freezing the tree starts the next generation, so whoever holds a frozen root
has that state for ever, and the first change after it copies the directories on its way and nothing else.

A mark, to which a tool call goes back if it fails, copies nothing: from the first mark on, each change first notes in
a log what was there, by path, and going back puts that back, the newest first.

Changes exclude each other and freezing (the filesystem's lock); looking does not wait for them. So what looks at
a directory takes a copy of its names first, and what it derives is kept together with the version it was derived from.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias, final

from ringfence.filesystem.nodes import Directory, File, Found, Link, Node, find_along_links
from ringfence.filesystem.paths import os_error
from ringfence.filesystem.protocol import FileEntry, GlobMatch
from ringfence.filesystem.search import Child
from ringfence.participants import Change

UndoEntry: TypeAlias = tuple[str, Node | None, str, Directory, int]
"""What was at a path; its name in the directory above it, that directory, while it is not frozen, and its time."""


@final
@dataclass(frozen=True, slots=True)
class DirectoryUndo:
    """A directory's own bits and time."""

    path: str
    mode: int
    mtime_ns: int


@final
@dataclass(frozen=True, slots=True)
class DirectoryMoved:
    """A directory has gone elsewhere, with all that is in it; and the times of those above both places."""

    source: str
    target: str
    source_mtime_ns: int
    target_mtime_ns: int


@final
@dataclass(frozen=True, slots=True)
class RootWas:
    """All of the tree."""

    root: Directory


Log: TypeAlias = list[UndoEntry | DirectoryUndo | DirectoryMoved | RootWas]
"""What takes back the changes since a mark, oldest first. It is noted before the change itself, so that an interrupt in
between does no harm."""
TreeMark: TypeAlias = tuple[Log, int, bool]
"""A log, how long it was, and whether it begins and ends with this mark."""


class Tree:
    """The current root. Callers exclude each other where they change it."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        now = clock()
        self._generation = 0
        self.root = Directory(0, 0o755, now, now)
        self._log: Log | None = None
        self._noted: set[str] | None = None
        """The paths whose files the next change need not note again: so one that is overwritten a thousand times is
        kept once a mark. Begun anew whenever something happens to a whole directory."""

    def freeze(self) -> Directory:
        """The state now, for ever; O(1)."""
        self._generation += 1
        return self.root

    def go_back(self, root: Directory) -> None:
        """Make a frozen state the current one; O(1)."""
        if self._log is not None:
            self._log.append(RootWas(self.freeze()))
            self._noted = None
        self._generation += 1
        self.root = root

    def mark(self, *, outermost: bool) -> TreeMark:
        """A place to go back to; O(1). Nested marks are ended before the outermost one, or together with it."""
        log = self._log
        self._noted = None
        if outermost or log is None:
            begun: Log = []
            self._log = begun
            return begun, 0, True
        return log, len(log), False

    def keep(self, mark: TreeMark) -> None:
        """End a mark. What was changed since an inner one can still go back with the one around it."""
        if mark[2]:
            self._log = None

    def roll_back(self, mark: TreeMark) -> None:
        """Undo every change since a mark, and end it. May be called again where it was interrupted."""
        log, length, outermost = mark
        if self._log is not None and self._log is not log:
            return  # it has ended long since
        self._noted = None
        while len(log) > length:
            self._undo(log[-1])
            log.pop()
        if outermost:
            self._log = None

    def as_it_was(self, mark: TreeMark) -> Directory:
        """The frozen state at a mark; the current one stays, and is frozen too."""
        before = Tree(self.clock)
        before.root = self.freeze()
        before._generation = self._generation
        for entry in reversed(mark[0][mark[1] :]):
            before._undo(entry)
        return before.freeze()

    def _undo(self, entry: UndoEntry | DirectoryUndo | DirectoryMoved | RootWas) -> None:
        if isinstance(entry, tuple):
            path, node, name, directory, mtime_ns = entry
            if directory.generation != self._generation:
                directory = self.changeable(path.rpartition("/")[0])
            if node is None:
                directory.remove(name)
            else:
                directory.put(name, node)
            directory.mtime_ns = mtime_ns
        elif isinstance(entry, DirectoryUndo):
            directory = self.changeable(entry.path)
            directory.mode, directory.mtime_ns = entry.mode, entry.mtime_ns
        elif isinstance(entry, RootWas):
            self._generation += 1
            self.root = entry.root
        else:
            source, _, old = entry.source.rpartition("/")
            target, _, new = entry.target.rpartition("/")
            node = self.changeable(target).entries.get(new)
            if node is not None:
                self.changeable(source).put(old, node)
                self.changeable(target).remove(new)
            self.changeable(source).mtime_ns = entry.source_mtime_ns
            self.changeable(target).mtime_ns = entry.target_mtime_ns

    def _note(self, path: str, node: Node | None, name: str, above: Directory) -> None:
        log, noted = self._log, self._noted
        if log is None:
            return
        if noted is None or (type(node) is Directory and node.entries):
            self._noted = noted = _no_paths()
        elif path in noted and type(node) is File:
            return
        log.append((path, node, name, above, above.mtime_ns))
        noted.add(path)

    def find(self, path: str, *, follow: bool = True) -> Found:
        """What a normal path leads to; without `follow`, a link at its very end is itself.

        Raises:
            PermissionError: a link leads out of the root.
            OSError: ELOOP, too many links.
        """
        node: Any = self.root
        if path:
            try:
                for name in path.split("/"):
                    node = node.entries.get(name)
            except AttributeError:  # what is no directory has no entries
                return find_along_links(self.root, path, follow)
            if type(node) is Link and follow:
                return find_along_links(self.root, path, follow)
        return path, node, None

    def put(self, path: str, node: Node) -> None:
        """Set what is at a resolved path; directories that are missing above it are made."""
        parent, _, name = path.rpartition("/")
        directory = self.changeable(parent)
        old = directory.entries.get(name)
        self._note(path, old, name, directory)
        if old is None:
            directory.mtime_ns = self.clock()
        directory.put(name, node)

    def move(self, source: str, target: str) -> None:
        """Rename what is at a resolved path; directories that are missing above the new one are made."""
        above, _, name = source.rpartition("/")
        to, _, new = target.rpartition("/")
        node = self.changeable(above).entries[name]
        if type(node) is not Directory:
            self.put(target, node)
            self.remove(source)
            return
        there, here = self.changeable(to), self.changeable(above)
        if self._log is not None:
            self._log.append(DirectoryMoved(source, target, here.mtime_ns, there.mtime_ns))
            self._noted = None
        there.put(new, node)
        here.remove(name)
        here.mtime_ns = there.mtime_ns = self.clock()

    def set_directory(self, path: str, *, mode: int, mtime_ns: int | None = None) -> None:
        """Give the directory at a resolved path these bits, and this time; it is made if it is missing."""
        directory = self.changeable(path)
        if self._log is not None:
            self._log.append(DirectoryUndo(path, directory.mode, directory.mtime_ns))
        directory.mode = mode
        if mtime_ns is not None:
            directory.mtime_ns = mtime_ns

    def overwrite(self, path: str, content: bytes) -> bool:
        """Give the file at a normal path other bytes. False, and nothing is changed, where that is not all it takes.

        The commonest change, so it goes down once, copying on its way, where other changes look first and go then.
        """
        generation = self._generation
        directory = self.root
        if directory.generation != generation:
            directory = self._changeable_root()
        names = path.split("/")
        name = names.pop()
        try:
            for step in names:
                child: Any = directory.entries[step]
                if child.generation != generation:
                    child = child.copy(generation)
                    directory.put(step, child)
                directory = child
            old = directory.entries[name]
        except (KeyError, AttributeError):  # nothing, or no directory
            return False
        if type(old) is not File:
            return False
        log, noted = self._log, self._noted
        if log is not None and (noted is None or path not in noted):  # `_note`, of a file
            log.append((path, old, name, directory, directory.mtime_ns))
            if noted is None:
                self._noted = noted = _no_paths()
            noted.add(path)
        directory.entries[name] = File(content, old.mode, self.clock(), old.birth_ns)
        if directory.touched is not None:
            directory.touched.add(name)
        directory.version += 1
        return True

    def remove(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        directory = self.changeable(parent)
        self._note(path, directory.entries[name], name, directory)
        directory.remove(name)
        directory.mtime_ns = self.clock()

    def changeable(self, path: str) -> Directory:
        """The directory at a resolved path, of this generation: made if it is missing, copied if it is older."""
        generation = self._generation
        directory = self._changeable_root()
        names = path.split("/") if path else ()
        for depth, name in enumerate(names, 1):
            child = directory.entries.get(name)
            if child is None:
                child = self.new_directory()
                self._note("/".join(names[:depth]), None, name, directory)
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


def _no_paths() -> set[str]:
    return set()  # where `set[str]()` takes twenty times as long


def _walk_key(found: tuple[str, Node]) -> str:
    # "a.txt" comes before "a/b": compare a directory as what its paths begin with.
    name, node = found
    return f"{name}/" if type(node) is Directory else name


_NOTHING = Directory(0, 0, 0, 0)


def changes_since(tree: Tree, mark: TreeMark) -> Sequence[Change]:
    """What has changed since a mark, sorted by path: from the log alone, unless whole directories came or went."""
    log, length, _ = mark
    if len(log) == length:
        return []
    first: dict[str, Node | None] = {}
    for entry in log[length:]:
        if not isinstance(entry, tuple) or (type(entry[1]) is Directory and entry[1].entries):
            return differences(tree.as_it_was(mark), tree.root)
        first.setdefault(entry[0], entry[1])
    changes: list[Change] = []
    for path in sorted(first):
        was, now = first[path], tree.find(path, follow=False)[1]
        if not _alike(was, now):
            changes.append(Change(path, was and was.file_version, now and now.file_version))
    return changes


def differences(before: Directory, after: Directory) -> list[Change]:
    """What differs between two states, sorted by path; it looks only where their nodes differ.

    Bytes, kinds, permission bits and link targets count, times do not.
    """
    changes: list[Change] = []
    if before.mode != after.mode:
        changes.append(Change("", before.file_version, after.file_version))
    waiting = [("", before, after)]
    while waiting:
        prefix, old, new = waiting.pop()
        for name in _names_that_may_differ(old, new):
            was, now = old.entries.get(name), new.entries.get(name)
            if was is now:
                continue
            path = prefix + name
            if not _alike(was, now):
                changes.append(Change(path, was and was.file_version, now and now.file_version))
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
    if was is now:
        return True
    if type(was) is File and type(now) is File:
        return was.mode == now.mode and was.content == now.content
    if type(was) is Directory and type(now) is Directory:
        return was.mode == now.mode
    return type(was) is Link and type(now) is Link and was.target == now.target
