"""The tree in which the filesystem in memory keeps its files: every state can be kept, and every change undone.

A state to keep is a frozen root. Files and links never change. A directory may be changed in place only in the
generation that it was made or copied in. Freezing the tree starts the next generation, so whoever holds a frozen root
has that state for ever, and the first change after it copies the directories on its way and nothing else.

A savepoint copies nothing: from the first one on, each change first appends to a log what was at its path. A rollback
puts that back, the newest first.

Changes exclude each other and freezing (the filesystem's lock). Readers do not wait for them: they copy the names of a
directory before they go through them, and keep what they derive together with the version that it was derived from.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias, final

from ringfence.filesystem.edits import count_newlines
from ringfence.filesystem.paths import os_error, outside
from ringfence.filesystem.protocol import FileEntry, FileStat, GlobMatch, ReadBytesResult, ReadResult
from ringfence.filesystem.search import Child
from ringfence.participants import Change, FileVersion

MAX_LINK_HOPS = 40
"""As in Linux."""


@final
class File:
    __slots__ = (
        "_file_version",
        "_newlines",
        "_sha256",
        "birth_ns",
        "bytes_read",
        "content",
        "mode",
        "mtime_ns",
        "stat",
        "text_read",
    )

    def __init__(self, content: bytes, mode: int, mtime_ns: int, birth_ns: int) -> None:
        self.content: Final = content
        self.mode: Final = mode
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns
        # The last answers to the usual questions, whose making takes longer than all else about a read.
        self.bytes_read: ReadBytesResult | None = None
        self.text_read: ReadResult | None = None
        self.stat: FileStat | None = None
        self._newlines: list[int] | None = None
        self._sha256: str | None = None
        self._file_version: FileVersion | None = None

    @property
    def newlines(self) -> list[int]:
        """`count_newlines` of the content."""
        if self._newlines is None:
            self._newlines = count_newlines(self.content)
        return self._newlines

    @property
    def sha256(self) -> str:
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self.content).hexdigest()
        return self._sha256

    @property
    def file_version(self) -> FileVersion:
        if self._file_version is None:
            self._file_version = FileVersion("file", self.mode, len(self.content), self.sha256)
        return self._file_version


@final
class Link:
    __slots__ = ("birth_ns", "mtime_ns", "target")

    def __init__(self, target: str, mtime_ns: int, birth_ns: int) -> None:
        self.target: Final = target
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns

    @property
    def file_version(self) -> FileVersion:
        return FileVersion("symlink", 0o777, len(self.target.encode("utf-8", "surrogateescape")), None, self.target)


@final
class Directory:
    __slots__ = (
        "birth_ns",
        "children",
        "entries",
        "generation",
        "listing",
        "mode",
        "mtime_ns",
        "version",
    )

    def __init__(self, generation: int, mode: int, mtime_ns: int, birth_ns: int) -> None:
        self.entries: dict[str, Node] = {}
        self.mode = mode
        self.mtime_ns = mtime_ns
        self.birth_ns: Final = birth_ns
        self.generation: Final = generation
        self.version = 0
        """Counts changes in place. Raised after each, so what was derived during one is not taken for current."""
        self.children: tuple[int, str, tuple[Child[Directory], ...]] | None = None
        self.listing: tuple[int, str, tuple[FileEntry, ...]] | None = None

    @property
    def file_version(self) -> FileVersion:
        return FileVersion("directory", self.mode, 0)

    def copy(self, generation: int) -> Directory:
        twin = Directory(generation, self.mode, self.mtime_ns, self.birth_ns)
        twin.entries = self.entries.copy()
        return twin

    def put(self, name: str, node: Node | None) -> None:
        """Set what a name stands for; None removes it."""
        if node is None:
            self.entries.pop(name, None)
        else:
            self.entries[name] = node
        self.version += 1


Node: TypeAlias = File | Link | Directory

Found: TypeAlias = tuple[str, Node | None, OSError | None]
"""A resolved path, what is there, and why nothing can be made there: a file in the way, or a dangling link."""

UndoRecord: TypeAlias = tuple[str, Node | int | None, str, Directory, int]
"""What was at a path; its name, the directory it is in (until that is frozen), and the directory's time. The path ""
stands for the whole tree as it was, which is frozen. A number is a directory's own permission bits."""

Savepoint: TypeAlias = tuple[list[UndoRecord], int, bool]
"""A log, how long it was, and whether it begins and ends with this savepoint."""


class Tree:
    """The current root. Callers exclude each other where they change it. Paths are resolved, unless stated."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        now = clock()
        self._generation = 0
        self.root = Directory(0, 0o755, now, now)
        self._log: list[UndoRecord] | None = None
        """Of each record the change comes after it, so that an interrupt in between does no harm."""
        self._logged: set[str] | None = None
        """Paths of files that need no second record, so one that is overwritten a thousand times is kept once. Begun
        anew with each savepoint, and whenever something happens to a whole directory."""

    def freeze(self) -> Directory:
        """The state now, for ever; O(1)."""
        self._generation += 1
        return self.root

    def go_back(self, root: Directory) -> None:
        """Make a frozen state the current one; O(1)."""
        self._log_all()
        self._generation += 1
        self.root = root

    def savepoint(self, *, outermost: bool) -> Savepoint:
        """A place to go back to; O(1). Nested ones are ended before the outermost, or together with it."""
        log = self._log
        self._logged = None
        if outermost or log is None:
            begun: list[UndoRecord] = []
            self._log = begun
            return begun, 0, True
        return log, len(log), False

    def release(self, savepoint: Savepoint) -> None:
        """End a savepoint. What was changed since an inner one can still be undone by the one around it."""
        if savepoint[2]:
            self._log = None

    def roll_back(self, savepoint: Savepoint) -> None:
        """Undo every change since a savepoint, and end it. May be called again where it was interrupted."""
        log, length, outermost = savepoint
        if self._log is not None and self._log is not log:
            return  # it has ended long since
        self._logged = None
        while len(log) > length:
            self._undo(log[-1])
            log.pop()
        if outermost:
            self._log = None

    def changes(self, savepoint: Savepoint) -> Sequence[Change]:
        """What has changed since, sorted by path: from the log alone, unless whole directories came or went."""
        log, length, _ = savepoint
        first: dict[str, Node | None] = {}
        for path, node, *_ in log[length:]:
            if isinstance(node, int) or (type(node) is Directory and (node.entries or not path)):
                return differences(self._state_at(savepoint), self.root)
            first.setdefault(path, node)
        changes: list[Change] = []
        for path in sorted(first):
            was, now = first[path], self.find(path, follow=False)[1]
            if not _alike(was, now):
                changes.append(Change(path, was and was.file_version, now and now.file_version))
        return changes

    def _state_at(self, savepoint: Savepoint) -> Directory:
        before = Tree(self.clock)
        before.root = self.freeze()
        before._generation = self._generation
        for record in reversed(savepoint[0][savepoint[1] :]):
            before._undo(record)
        return before.root

    def _undo(self, record: UndoRecord) -> None:
        path, node, name, directory, mtime_ns = record
        if isinstance(node, int):
            directory = self.changeable(path)
            directory.mode = node
        elif not path:
            self._generation += 1
            self.root = directory
            return
        else:
            if directory.generation != self._generation:
                directory = self.changeable(path.rpartition("/")[0])
            directory.put(name, node)
        directory.mtime_ns = mtime_ns

    def _log_node(self, path: str, node: Node | None, name: str, directory: Directory) -> None:
        log, logged = self._log, self._logged
        if log is None:
            return
        if logged is None or (type(node) is Directory and node.entries):
            self._logged = logged = _no_paths()
        elif path in logged and type(node) is File:
            return
        log.append((path, node, name, directory, directory.mtime_ns))
        logged.add(path)

    def _log_all(self) -> None:
        """Log the whole tree, before a change to more than one path. It is frozen, so the log stays true."""
        if self._log is not None:
            root = self.freeze()
            self._log.append(("", root, "", root, 0))
            self._logged = None

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
                return self._find_along_links(path, follow)
            if type(node) is Link and follow:
                return self._find_along_links(path, follow)
        return path, node, None

    def _find_along_links(self, path: str, follow: bool) -> Found:
        pending = path.split("/")[::-1]
        own = len(pending)  # below this, what is pending is the caller's; above it, it came out of a link
        names: list[str] = []
        above = [self.root]
        hops = 0
        missing = False
        obstacle: OSError | None = None
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
            node = None if missing else above[-1].entries.get(name)
            if type(node) is Link and (pending or follow):
                hops += 1
                if hops > MAX_LINK_HOPS:
                    raise os_error(errno.ELOOP, path)
                if node.target.startswith("/"):
                    raise outside(path)
                pending.extend(part for part in reversed(node.target.split("/")) if part not in ("", "."))
                continue
            names.append(name)
            if type(node) is Directory:
                above.append(node)
                continue
            if node is not None and not pending:
                return "/".join(names), node, None
            if not missing:
                missing = True
                if node is not None:
                    obstacle = os_error(errno.ENOTDIR, path)
                elif out_of_link:
                    obstacle = FileNotFoundError(errno.ENOENT, "is a link that leads nowhere", path)
            above.append(self.root)  # in its place: nothing is looked up any more
        return "/".join(names), None if missing else above[-1], obstacle

    def target(self, path: str) -> Node | None:
        """What a path leads to, None where that is nothing or out of the root."""
        try:
            return self.find(path)[1]
        except OSError:
            return None

    def put(self, path: str, node: Node | None) -> None:
        """Set what is at a path, None to remove it. Directories that are missing above it are made."""
        parent, _, name = path.rpartition("/")
        directory = self.changeable(parent)
        old = directory.entries.get(name)
        self._log_node(path, old, name, directory)
        if old is None or node is None:
            directory.mtime_ns = self.clock()
        directory.put(name, node)

    def move(self, source: str, target: str) -> None:
        """Rename what is at a path. Directories that are missing above the new one are made."""
        node = self.find(source, follow=False)[1]
        if type(node) is Directory:
            self._log_all()
        self.put(target, node)
        self.put(source, None)

    def set_directory(self, path: str, *, mode: int, mtime_ns: int | None = None) -> None:
        """Give a directory these bits, and this time. It is made if it is missing."""
        directory = self.changeable(path)
        if self._log is not None:
            self._log.append((path, directory.mode, "", directory, directory.mtime_ns))
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
            directory = self.root = directory.copy(generation)
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
        log, logged = self._log, self._logged
        if log is not None and (logged is None or path not in logged):  # `_log_node`, of a file
            log.append((path, old, name, directory, directory.mtime_ns))
            if logged is None:
                self._logged = logged = _no_paths()
            logged.add(path)
        directory.entries[name] = File(content, old.mode, self.clock(), old.birth_ns)
        directory.version += 1
        return True

    def changeable(self, path: str) -> Directory:
        """The directory at a path, of this generation: made if it is missing, copied if it is older."""
        generation = self._generation
        directory = self.root
        if directory.generation != generation:
            directory = self.root = directory.copy(generation)
        names = path.split("/") if path else ()
        for depth, name in enumerate(names, 1):
            child = directory.entries.get(name)
            if child is None:
                child = self.new_directory()
                self._log_node("/".join(names[:depth]), None, name, directory)
                directory.mtime_ns = child.mtime_ns
                directory.put(name, child)
            elif type(child) is not Directory:
                raise os_error(errno.ENOTDIR, path)
            elif child.generation != generation:
                child = child.copy(generation)
                directory.put(name, child)
            directory = child
        return directory

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
        found = sorted(directory.entries.copy().items(), key=_walk_key)
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
        found = sorted(directory.entries.copy().items())
        listing = tuple(self._entry(prefix, name, node) for name, node in found)
        if not any(type(node) is Link for _, node in found):
            directory.listing = (version, prefix, listing)
        return listing

    def _entry(self, prefix: str, name: str, node: Node) -> FileEntry:
        path = prefix + name
        there = self.target(path) if type(node) is Link else node
        size = len(there.content) if type(there) is File else 0
        return FileEntry(name, path, type(there) is File, type(there) is Directory, size, type(node) is Link)

    def contents(self, directory: Directory, prefix: str) -> Iterator[tuple[str, bytes]]:
        """The files below a directory in the order of their paths, links passed over."""
        waiting = [(directory, iter(self.children(directory, prefix)))]
        while waiting:
            directory, children = waiting[-1]
            for name, match, subdirectory in children:
                if subdirectory is not None:
                    waiting.append((subdirectory, iter(self.children(subdirectory, f"{match.path}/"))))
                    break
                node = directory.entries.get(name)
                if type(node) is File:
                    yield match.path, node.content
            else:
                waiting.pop()


def _no_paths() -> set[str]:
    return set()  # where `set[str]()` takes twenty times as long


def _walk_key(found: tuple[str, Node]) -> str:
    # "a.txt" comes before "a/b": compare a directory as what its paths begin with.
    name, node = found
    return f"{name}/" if type(node) is Directory else name


_NOTHING = Directory(0, 0, 0, 0)


def differences(before: Directory, after: Directory) -> list[Change]:
    """What differs between two states, sorted by path; it looks only where their nodes differ.

    Bytes, kinds, permission bits and link targets count, times do not.
    """
    changes: list[Change] = []
    if before.mode != after.mode:
        changes.append(Change("", before.file_version, after.file_version))
    waiting = [("", before, after)] if before is not after else []
    while waiting:
        prefix, old, new = waiting.pop()
        for name in {*old.entries.copy(), *new.entries.copy()}:
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


def _alike(was: Node | None, now: Node | None) -> bool:
    if was is now:
        return True
    if type(was) is File and type(now) is File:
        return was.mode == now.mode and was.content == now.content
    if type(was) is Directory and type(now) is Directory:
        return was.mode == now.mode
    return type(was) is Link and type(now) is Link and was.target == now.target
