"""The tree of files of the filesystem in memory. It has O(1) snapshots and an undo log.

A snapshot is a frozen root. Files and links are immutable. A directory may change in place only in the generation in
which it was made or copied. Freezing the tree starts the next generation: a frozen root never changes. The first change
after a freeze copies only the directories on its path.

A savepoint copies nothing. While there is a savepoint, each change first appends an undo record to a log. A rollback
restores the records, the newest first.

The filesystem's lock excludes concurrent changes and freezes. Readers do not take it. They copy a directory's names
before iterating over them, and store derived values with the version of the directory.
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
"""The limit of links that one resolution follows, as in Linux."""


@final
class MemoryFile:
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
        # A cache of the last results of the usual reads. Making them is the most expensive part of a read.
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
class MemoryDirectory:
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
        """The number of changes in place. It rises after each change: values derived during a change are outdated."""
        self.children: tuple[int, str, tuple[Child[MemoryDirectory], ...]] | None = None
        self.listing: tuple[int, str, tuple[FileEntry, ...]] | None = None

    @property
    def file_version(self) -> FileVersion:
        return FileVersion("directory", self.mode, 0)

    def copy(self, generation: int) -> MemoryDirectory:
        twin = MemoryDirectory(generation, self.mode, self.mtime_ns, self.birth_ns)
        twin.entries = self.entries.copy()
        return twin

    def put(self, name: str, node: Node | None) -> None:
        """Set the node of a name. None removes the name."""
        if node is None:
            self.entries.pop(name, None)
        else:
            self.entries[name] = node
        self.version += 1


Node: TypeAlias = MemoryFile | Link | MemoryDirectory

Found: TypeAlias = tuple[str, Node | None, OSError | None]
"""A resolved path, its node, and the error for creating it: a file is in the way, or a link dangles."""

UndoRecord: TypeAlias = tuple[str, Node | int | None, str, MemoryDirectory, int]
"""A path, its node before the change, its name, its directory (valid until it is frozen), and the directory's time.

For the path "" the node is the frozen root of the whole tree. A number instead of a node is a directory's permission
bits.
"""

Savepoint: TypeAlias = tuple[list[UndoRecord], int, bool]
"""A log, its length at the savepoint, and whether this savepoint is the outermost one, which owns the log."""


class Tree:
    """The current tree. Callers hold a lock for changes. Path arguments are resolved paths unless a docstring says
    otherwise."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        now = clock()
        self._generation = 0
        self.root = MemoryDirectory(0, 0o755, now, now)
        self._log: list[UndoRecord] | None = None
        """The undo records. Each record precedes its change: an interrupt between them does no harm."""
        self._logged: set[str] | None = None
        """Paths of files that need no second record: repeated overwrites of a file log only its first state.

        The set is cleared by each savepoint, and by each change to a whole directory.
        """

    def freeze(self) -> MemoryDirectory:
        """Freeze the current state and return its root, in O(1)."""
        self._generation += 1
        return self.root

    def fork(self) -> Tree:
        """Return a tree of its own with the current state, in O(1). What either changes from here on, it copies."""
        twin = Tree(self.clock)
        twin.root = self.freeze()
        twin._generation = self._generation
        return twin

    def go_back(self, root: MemoryDirectory) -> None:
        """Make a frozen root the current one, in O(1)."""
        self._log_all()
        self._generation += 1
        self.root = root

    def savepoint(self, *, outermost: bool) -> Savepoint:
        """Create a savepoint, in O(1). Nested savepoints end before the outermost one, or together with it."""
        log = self._log
        self._logged = None
        if outermost or log is None:
            begun: list[UndoRecord] = []
            self._log = begun
            return begun, 0, True
        return log, len(log), False

    def release(self, savepoint: Savepoint) -> None:
        """End a savepoint and keep its changes. An outer savepoint can still undo them."""
        if savepoint[2]:
            self._log = None

    def roll_back(self, savepoint: Savepoint) -> None:
        """Undo every change since a savepoint, and end it. An interrupted call can be repeated."""
        log, length, outermost = savepoint
        if self._log is not None and self._log is not log:
            return  # the savepoint has already ended
        self._logged = None
        while len(log) > length:
            self._undo(log[-1])
            log.pop()
        if outermost:
            self._log = None

    def changes(self, savepoint: Savepoint) -> Sequence[Change]:
        """The changes since a savepoint, sorted by path. Only changes of whole directories need more than the log."""
        log, length, _ = savepoint
        first: dict[str, Node | None] = {}
        for path, node, *_ in log[length:]:
            if isinstance(node, int) or (type(node) is MemoryDirectory and (node.entries or not path)):
                return differences(self.state_at(savepoint), self.root)
            first.setdefault(path, node)
        changes: list[Change] = []
        for path in sorted(first):
            was, now = first[path], self.find(path, follow=False)[1]
            if not _alike(was, now):
                changes.append(Change(path, was and was.file_version, now and now.file_version))
        return changes

    def state_at(self, savepoint: Savepoint) -> MemoryDirectory:
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

    def _log_node(self, path: str, node: Node | None, name: str, directory: MemoryDirectory) -> None:
        log, logged = self._log, self._logged
        if log is None:
            return
        if logged is None or (type(node) is MemoryDirectory and node.entries):
            self._logged = logged = _no_paths()
        elif path in logged and type(node) is MemoryFile:
            return
        log.append((path, node, name, directory, directory.mtime_ns))
        logged.add(path)

    def _log_all(self) -> None:
        """Freeze the whole tree and log its root, before a change to more than one path."""
        if self._log is not None:
            root = self.freeze()
            self._log.append(("", root, "", root, 0))
            self._logged = None

    def find(self, path: str, *, follow: bool = True) -> Found:
        """Find the node of a normal path. Without `follow`, a link at the end of the path is not followed.

        Raises:
            PermissionError: A link leads out of the root.
            OSError: There are too many links (ELOOP).
        """
        node: Any = self.root
        if path:
            try:
                for name in path.split("/"):
                    node = node.entries.get(name)
            except AttributeError:  # the node is no directory
                return self._find_along_links(path, follow)
            if type(node) is Link and follow:
                return self._find_along_links(path, follow)
        return path, node, None

    def _find_along_links(self, path: str, follow: bool) -> Found:
        pending = path.split("/")[::-1]
        own = len(pending)  # names below this index are the path's own, names above come from a link
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
                pending += _names_of_target(node, path, hops)
                continue
            names.append(name)
            if type(node) is MemoryDirectory:
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
            above.append(self.root)  # a placeholder: no more names are looked up
        return "/".join(names), None if missing else above[-1], obstacle

    def target(self, path: str) -> Node | None:
        """The node that a path leads to. None if it does not exist or is outside of the root."""
        try:
            return self.find(path)[1]
        except OSError:
            return None

    def put(self, path: str, node: Node | None) -> None:
        """Set the node of a path, or remove it with None. Missing directories above the path are made."""
        parent, _, name = path.rpartition("/")
        directory = self.changeable(parent)
        old = directory.entries.get(name)
        self._log_node(path, old, name, directory)
        if old is None or node is None:
            directory.mtime_ns = self.clock()
        directory.put(name, node)

    def move(self, source: str, target: str) -> None:
        """Rename a node. Missing directories above the new path are made."""
        node = self.find(source, follow=False)[1]
        if type(node) is MemoryDirectory:
            self._log_all()
        self.put(target, node)
        self.put(source, None)

    def set_directory(self, path: str, *, mode: int, mtime_ns: int | None = None) -> None:
        """Set the permission bits and the time of a directory. A missing directory is made."""
        directory = self.changeable(path)
        if self._log is not None:
            self._log.append((path, directory.mode, "", directory, directory.mtime_ns))
        directory.mode = mode
        if mtime_ns is not None:
            directory.mtime_ns = mtime_ns

    def overwrite(self, path: str, content: bytes) -> bool:
        """Replace the bytes of the file at a normal path. Return False, without a change, if the slow way is needed.

        This is the most frequent change. It looks up and copies directories in one pass, and other changes in two.
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
        except (KeyError, AttributeError):  # the path is missing, or has a file in the way
            return False
        if type(old) is not MemoryFile:
            return False
        log, logged = self._log, self._logged
        if log is not None and (logged is None or path not in logged):  # `_log_node`, inlined for a file
            log.append((path, old, name, directory, directory.mtime_ns))
            if logged is None:
                self._logged = logged = _no_paths()
            logged.add(path)
        directory.entries[name] = MemoryFile(content, old.mode, self.clock(), old.birth_ns)
        directory.version += 1
        return True

    def changeable(self, path: str) -> MemoryDirectory:
        """Return the directory at a path for a change. It is made if it is missing, and copied if it is frozen."""
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
            elif type(child) is not MemoryDirectory:
                raise os_error(errno.ENOTDIR, path)
            elif child.generation != generation:
                child = child.copy(generation)
                directory.put(name, child)
            directory = child
        return directory

    def new_directory(self) -> MemoryDirectory:
        now = self.clock()
        return MemoryDirectory(self._generation, 0o755, now, now)

    def child(self, directory: MemoryDirectory, prefix: str, name: str) -> Child[MemoryDirectory] | None:
        """The item of `children` for one name. None if the name is missing."""
        node = directory.entries.get(name)
        return None if node is None else self._child(prefix, name, node)

    def children(self, directory: MemoryDirectory, prefix: str) -> tuple[Child[MemoryDirectory], ...]:
        """The children of a directory, in the order of the paths of all files below them."""
        known, version = directory.children, directory.version
        if known is not None and known[0] == version and known[1] == prefix:
            return known[2]
        found = sorted(directory.entries.copy().items(), key=_walk_key)
        children = tuple(self._child(prefix, name, node) for name, node in found)
        if not any(type(node) is Link for _, node in found):  # a link's target can change without this directory
            directory.children = (version, prefix, children)
        return children

    def _child(self, prefix: str, name: str, node: Node) -> Child[MemoryDirectory]:
        path = prefix + name
        if type(node) is MemoryDirectory:
            return name, GlobMatch(path, False), node
        return name, GlobMatch(path, type(node) is MemoryFile or type(self.target(path)) is MemoryFile), None

    def list(self, directory: MemoryDirectory, prefix: str) -> tuple[FileEntry, ...]:
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
        size = len(there.content) if type(there) is MemoryFile else 0
        return FileEntry(
            name, path, type(there) is MemoryFile, type(there) is MemoryDirectory, size, type(node) is Link
        )

    def contents(self, directory: MemoryDirectory, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the path and bytes of each file below a directory, in the order of paths. Links are skipped."""
        waiting = [(directory, iter(self.children(directory, prefix)))]
        while waiting:
            directory, children = waiting[-1]
            for name, match, subdirectory in children:
                if subdirectory is not None:
                    waiting.append((subdirectory, iter(self.children(subdirectory, f"{match.path}/"))))
                    break
                node = directory.entries.get(name)
                if type(node) is MemoryFile:
                    yield match.path, node.content
            else:
                waiting.pop()


def _no_paths() -> set[str]:
    return set()  # `set[str]()` takes twenty times as long


def _walk_key(found: tuple[str, Node]) -> str:
    # "a.txt" comes before "a/b": the key of a directory is its name with a "/".
    name, node = found
    return f"{name}/" if type(node) is MemoryDirectory else name


_NOTHING = MemoryDirectory(0, 0, 0, 0)


def differences(before: MemoryDirectory, after: MemoryDirectory) -> list[Change]:
    """Return the changes between two states, sorted by path. Shared subtrees are skipped.

    Bytes, kinds, permission bits and link targets are compared. Times are not.
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
            below_was = was if type(was) is MemoryDirectory else _NOTHING
            below_now = now if type(now) is MemoryDirectory else _NOTHING
            if below_was is not below_now:
                waiting.append((f"{path}/", below_was, below_now))
    changes.sort(key=attrgetter("path"))
    return changes


def _names_of_target(link: Link, path: str, hops: int) -> Sequence[str]:
    """The names in the target of a link on the way of `path`, the last one first. ``hops`` counts the links."""
    if hops > MAX_LINK_HOPS:
        raise os_error(errno.ELOOP, path)
    if link.target.startswith("/"):
        raise outside(path)
    return [part for part in reversed(link.target.split("/")) if part not in ("", ".")]


def content_at(root: MemoryDirectory, path: str) -> bytes:
    """Return the bytes of the file at a resolved path in a frozen state. Raises FileNotFoundError."""
    node: Any = root
    for name in path.split("/"):
        node = node.entries.get(name) if type(node) is MemoryDirectory else None
    if type(node) is not MemoryFile:
        raise os_error(errno.ENOENT, path)
    return node.content


def _alike(was: Node | None, now: Node | None) -> bool:
    if was is now:
        return True
    if type(was) is MemoryFile and type(now) is MemoryFile:
        return was.mode == now.mode and was.content == now.content
    if type(was) is MemoryDirectory and type(now) is MemoryDirectory:
        return was.mode == now.mode
    return type(was) is Link and type(now) is Link and was.target == now.target
