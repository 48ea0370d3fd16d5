"""The filesystem in memory."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ringfence.errors import SnapshotRestoreError
from ringfence.filesystem.edits import line_window
from ringfence.filesystem.hidden import HiddenFiles, hidden_error
from ringfence.filesystem.ignored import RepositoryRules
from ringfence.filesystem.paths import (
    below_root,
    check_link_target,
    directories_above,
    normalise,
    one_encoding,
    os_error,
)
from ringfence.filesystem.protocol import (
    MAX_GREP_MATCHES,
    FileEntry,
    FileStat,
    FilesystemSnapshot,
    GlobMatch,
    GrepMatch,
    ReadBytesResult,
    ReadResult,
    WriteMode,
    WriteResult,
    check_bytes_asked,
    check_permission_bits,
    check_write_mode,
    encode_text,
)
from ringfence.filesystem.search import glob_below, grep_files, path_filter
from ringfence.filesystem.tree import Link, MemoryDirectory, MemoryFile, Node, Savepoint, Tree, content_at, differences
from ringfence.participants import (
    CLEAN,
    LOCK_PATIENCE_SECONDS,
    CallInfo,
    CallLock,
    Change,
    Contents,
    HiddenContent,
    RollbackReport,
    Step,
    Transactional,
    current_call,
)

if TYPE_CHECKING:
    from typing import Self


_KEPT_TEXT_BYTES = 1 << 18
"""The largest file that caches the results of its reads. Agents read most files more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot(FilesystemSnapshot):
    tree: Tree = field(repr=False, compare=False)
    state: MemoryDirectory = field(repr=False, compare=False)


class InMemoryFilesystem(Transactional):
    """A workspace in memory. It ends with the process. A snapshot costs O(1).

    Permission bits are stored and not enforced. ``clock`` returns nanoseconds since 1970, for the times of files.
    `for_call` returns further objects over the same files, which are equal to this one.
    """

    durable = False
    _snapshots = itertools.count(1)

    def __init__(
        self,
        *,
        read_only: bool = False,
        patience_seconds: float = LOCK_PATIENCE_SECONDS,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._tree = Tree(clock)
        self.lock = CallLock("the filesystem in memory", patience_seconds=patience_seconds)
        self._read_only = read_only
        self._call: CallInfo | None = None
        self.hidden: HiddenFiles | None = None
        """The rule by which files were left out of a copy. None: none were."""
        self.hidden_paths: Sequence[str] = ()
        """The paths that were left out."""
        self.repository_rules: RepositoryRules | None = None
        """Those of the repository that it is a copy of. None: it is no copy of one."""

    def __repr__(self) -> str:
        return "the filesystem in memory"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemoryFilesystem) and other._tree is self._tree

    def __hash__(self) -> int:
        return hash(self._tree)

    @property
    def root(self) -> str:
        return "/"

    @property
    def read_only(self) -> bool:
        return self._read_only

    def for_call(self, call: CallInfo) -> Self:
        other = object.__new__(type(self))
        other._tree = self._tree
        other.lock = self.lock
        other._read_only = self._read_only
        other._call = call
        other.hidden, other.hidden_paths = self.hidden, self.hidden_paths
        other.repository_rules = self.repository_rules
        return other

    def fork(self) -> Self:
        """Return a filesystem of its own that begins with these files as they are now. It costs O(1): both share what
        neither has changed since. Neither sees a later change of the other, nor takes part in its calls."""
        with self.lock.mutex:
            tree = self._tree.fork()
        other = object.__new__(type(self))
        other._tree = tree
        other.lock = CallLock("the filesystem in memory", patience_seconds=self.lock.patience_seconds)
        other._read_only = self._read_only
        other._call = None
        other.hidden, other.hidden_paths = self.hidden, self.hidden_paths
        other.repository_rules = self.repository_rules
        return other

    def hide(self, rule: HiddenFiles, paths: Iterable[str]) -> None:
        """Say by which rule files were left out of this copy, and which. An operation on one raises PermissionError."""
        self.hidden, self.hidden_paths = rule, tuple(sorted(paths))

    def hides(self, path: str) -> bool:
        """Whether a normal path is hidden, or would be if it existed."""
        if self.hidden is None:
            return False
        return self._left_out(path) or self.hidden.hides(path, lambda: self._content(path))

    def hidden_files(self) -> Iterable[HiddenContent]:
        """Return nothing: a copy lacks what is hidden."""
        return ()

    def _left_out(self, path: str) -> bool:
        return not {*self.hidden_paths}.isdisjoint((path, *directories_above(path)))

    def _content(self, path: str) -> bytes:
        node = self._tree.find(path, follow=False)[1]
        return node.content if isinstance(node, MemoryFile) else b""

    def resolve(self, path: str) -> str:
        return self._tree.find(normalise(path))[0]

    def content_hash(self, path: str) -> str:
        return self._file(normalise(path))[1].sha256

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        normal = normalise(path)
        place, file = self._file(normal)
        usual = offset == 0 and limit is None and encoding == "utf-8"
        if usual and file.text_read is not None and file.text_read.path == normal:
            result = file.text_read
        else:
            text, returned, total = line_window(file.content, offset, limit, encoding, normal, file.newlines)
            result = ReadResult(text, normal, total, offset, returned, offset + returned < total)
            if usual and len(file.content) <= _KEPT_TEXT_BYTES:
                file.text_read = result
        if self._call or current_call():
            self._note_read(place, file, result.content)
        return result

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        whole = offset == 0 and limit is None
        if not whole:
            check_bytes_asked(offset, limit)
        normal = normalise(path)
        place, file = self._file(normal)
        if whole and file.bytes_read is not None and file.bytes_read.path == normal:
            result = file.bytes_read
        else:
            size = len(file.content)
            content = file.content if whole else file.content[offset : None if limit is None else offset + limit]
            result = ReadBytesResult(content, normal, size, offset, len(content), offset + len(content) < size)
            if whole:
                file.bytes_read = result
        if self._call or current_call():
            self._note_read(place, file, result.content)
        return result

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        return self.write_bytes(path, encode_text(content), mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        if mode != "overwrite":
            check_write_mode(mode)
        normal = normalise(path) or below_root(path)
        if type(content) is not bytes:
            content = bytes(memoryview(content))
        with self.lock.mutex:
            self._admit()
            if mode != "overwrite" or not self._tree.overwrite(normal, content):
                self._write(normal, content, mode, create_parents)
        return WriteResult(normal, len(content), mode)

    def _write(self, normal: str, content: bytes, mode: WriteMode, create_parents: bool) -> None:
        place, node = self._place(normal, follow=mode != "create", parents=create_parents)
        now = self._tree.clock()
        if node is None:
            file = MemoryFile(content, 0o644, now, now)
        elif mode == "create":
            raise os_error(errno.EEXIST, normal)
        elif isinstance(node, MemoryFile):
            file = MemoryFile(node.content + content if mode == "append" else content, node.mode, now, node.birth_ns)
        else:
            raise os_error(errno.EISDIR, normal)
        self._tree.put(place, file)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        normal = normalise(path)
        if not normal:
            raise PermissionError(errno.EPERM, "the root cannot be deleted", path)
        with self.lock.mutex:
            self._admit()
            place, node = self._itself(normal)
            if isinstance(node, MemoryDirectory) and node.entries and not recursive:
                raise IsADirectoryError(errno.ENOTEMPTY, "the directory is not empty, it takes recursive=True", normal)
            self._tree.put(place, None)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        normal = normalise(path)
        with self.lock.mutex:
            self._admit()
            if self._tree.find(normal, follow=False)[1] is not None:
                if not exist_ok or not isinstance(self._tree.target(normal), MemoryDirectory):
                    raise os_error(errno.EEXIST, normal)
                return
            place, _ = self._place(normal, follow=False, parents=parents)
            self._tree.put(place, self._tree.new_directory())

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = normalise(source), normalise(target)
        if not old or not new:
            raise PermissionError(errno.EPERM, "the root cannot be moved or replaced", "")
        with self.lock.mutex:
            self._admit()
            old, node = self._itself(old)
            new, there = self._place(new, follow=False)
            if there is not None and not overwrite:
                raise os_error(errno.EEXIST, new)
            if old == new:
                return
            if f"{new}/".startswith(f"{old}/"):
                raise ValueError(f"a directory cannot be moved into itself: {source!r} to {target!r}")
            if isinstance(there, MemoryDirectory):
                raise IsADirectoryError(errno.EISDIR, "is a directory, which a move does not replace", new)
            if there is not None and isinstance(node, MemoryDirectory):
                raise NotADirectoryError(errno.ENOTDIR, "is no directory, so a directory cannot replace it", new)
            self._tree.move(old, new)

    def chmod(self, path: str, mode: int) -> None:
        check_permission_bits(mode)
        normal = normalise(path)
        with self.lock.mutex:
            self._admit()
            place, node = self._existing(normal)
            if isinstance(node, MemoryFile):
                self._tree.put(place, MemoryFile(node.content, mode, node.mtime_ns, node.birth_ns))
            else:
                self._tree.set_directory(place, mode=mode)

    def symlink(self, path: str, target: str) -> None:
        check_link_target(target)
        normal = normalise(path)
        with self.lock.mutex:
            self._admit()
            place, node = self._place(normal, follow=False)
            if node is not None:
                raise os_error(errno.EEXIST, normal)
            now = self._tree.clock()
            self._tree.put(place, Link(one_encoding(target, "link's target"), now, now))

    def readlink(self, path: str) -> str:
        node = self._itself(normalise(path))[1]
        if not isinstance(node, Link):
            raise ValueError(f"{path!r} is not a symlink")
        return node.target

    def exists(self, path: str) -> bool:
        try:
            return self._tree.find(normalise(path), follow=False)[1] is not None
        except (OSError, ValueError):
            return False

    def stat(self, path: str) -> FileStat:
        normal = normalise(path)
        node = self._itself(normal)[1]
        if isinstance(node, Link):
            return _stat(normal, self._existing(normal)[1], is_link=True)
        if not isinstance(node, MemoryFile):
            return _stat(normal, node)
        if node.stat is None or node.stat.path != normal:
            node.stat = _stat(normal, node)
        return node.stat

    def list(self, path: str = "") -> Sequence[FileEntry]:
        normal = normalise(path)
        node = self._existing(normal)[1]
        if not isinstance(node, MemoryDirectory):
            raise os_error(errno.ENOTDIR, normal)
        return self._tree.list(node, _prefix(normal))

    def glob(self, pattern: str, *, path: str = "") -> Sequence[GlobMatch]:
        normal = normalise(path)
        top = self._tree.find(normal)[1]
        if not isinstance(top, MemoryDirectory):
            top = MemoryDirectory(0, 0, 0, 0)  # an empty tree: a bad pattern is an error here too
        return glob_below(pattern, self._tree, top, _prefix(normal))

    def grep(
        self,
        pattern: str,
        *,
        path: str = "",
        glob: str | None = None,
        max_matches: int = MAX_GREP_MATCHES,
        literal: bool = False,
    ) -> Sequence[GrepMatch]:
        normal = normalise(path)
        top = self._existing(normal)[1]
        if isinstance(top, MemoryDirectory):
            prefix = _prefix(normal)
            files = self._tree.contents(top, prefix)
        else:
            prefix = _prefix(normal.rpartition("/")[0])
            files = iter([(normal, top.content)])
        if glob is not None:
            wanted, skip = path_filter(glob), len(prefix)
            files = ((file, content) for file, content in files if wanted(file[skip:]))
        return grep_files(files, pattern, literal=literal, max_matches=max_matches)

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        with self.lock.mutex:
            state = self._tree.freeze()
        name = f"memory-{next(self._snapshots)}"
        return MemorySnapshot(
            name, moment(self._tree.clock()), name, self.root, None, tag, tree=self._tree, state=state
        )

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        state = self._state(snapshot)
        with self.lock.mutex:
            self._admit()
            self._tree.go_back(state)

    def changes(self, since: FilesystemSnapshot | Savepoint) -> Sequence[Change]:
        if isinstance(since, tuple):
            with self.lock.mutex:
                return self._tree.changes(since)
        return differences(self._state(since), self._tree.root)

    def begin(self, call: CallInfo) -> Savepoint:
        # No mutex is needed: every change has finished before `call` acquires the lock.
        return self._tree.savepoint(outermost=call.parent is None)

    def contents(self, mark: Savepoint) -> Contents:
        return partial(content_at, self._tree.state_at(mark)), partial(content_at, self._tree.freeze())

    def commit(self, mark: Savepoint, receipt: object) -> Step | None:
        self._tree.release(mark)
        return None

    def rollback(self, mark: Savepoint) -> RollbackReport:
        # A change that a thread of the call has begun finishes first. Otherwise it would come after the end.
        with self.lock.mutex:
            self._tree.roll_back(mark)
        return CLEAN

    def load(self, path: str, content: bytes, *, mode: int = 0o644, mtime_ns: int | None = None) -> None:
        """Store a file with its permission bits and time. This also fills a read-only filesystem."""
        with self.lock.mutex:
            place, now = self._loading(below_root(path), MemoryFile, os_error(errno.EISDIR, path))
            self._tree.put(place, MemoryFile(content, mode, now if mtime_ns is None else mtime_ns, now))

    def load_directory(self, path: str, *, mode: int = 0o755, mtime_ns: int | None = None) -> None:
        """Set a directory's permission bits and time. Loading a file into it afterwards changes the time again."""
        with self.lock.mutex:
            place, _ = self._loading(normalise(path), MemoryDirectory, os_error(errno.EEXIST, path))
            self._tree.set_directory(place, mode=mode, mtime_ns=mtime_ns)

    def load_symlink(self, path: str, target: str, *, mtime_ns: int | None = None) -> None:
        """Store a symlink with its time."""
        check_link_target(target)
        with self.lock.mutex:
            place, now = self._loading(below_root(path), Link, os_error(errno.EEXIST, path))
            modified = now if mtime_ns is None else mtime_ns
            self._tree.put(place, Link(one_encoding(target, "link's target"), modified, now))

    def _loading(self, normal: str, kind: type[Node], otherwise: OSError) -> tuple[str, int]:
        """Return the path at which a node is loaded, and the time. Raises ``otherwise`` if another kind is there."""
        self._admit(loading=True)
        place, node = self._place(normal, follow=kind is not Link)
        if node is not None and type(node) is not kind:
            raise otherwise
        return place, self._tree.clock()

    def _admit(self, *, loading: bool = False) -> None:
        if self._read_only and not loading:
            raise PermissionError(errno.EROFS, "the filesystem is read-only")
        call = self._innermost_call()
        if call is not None or self.lock.holder is not None:
            self.lock.check_access(self, call)

    def _innermost_call(self) -> CallInfo | None:
        """The inner one of two calls: the call of this object, and the call that runs in this thread."""
        call, own = current_call(), self._call
        if call is None or call is own:
            return own
        return call if own is None or call.within(own) else own

    def _note_read(self, place: str, file: MemoryFile, content: str | bytes) -> None:
        call = self._innermost_call()
        if call is not None and not call.sealed and (content or not file.content):
            call.note_read(self.lock, place, file.sha256)

    def _state(self, snapshot: FilesystemSnapshot) -> MemoryDirectory:
        if not isinstance(snapshot, MemorySnapshot) or snapshot.tree is not self._tree:
            raise SnapshotRestoreError(
                f"the snapshot {snapshot.snapshot_id!r} is of another filesystem, or one that nobody holds any more"
            )
        return snapshot.state

    def _existing(self, normal: str) -> tuple[str, MemoryFile | MemoryDirectory]:
        place, node = self._itself(normal, follow=True)
        assert not isinstance(node, Link)  # a followed path never ends at a link
        return place, node

    def _itself(self, normal: str, *, follow: bool = False) -> tuple[str, Node]:
        place, node, obstacle = self._tree.find(normal, follow=follow)
        if node is None:
            if self.hidden_paths and self._left_out(place):
                raise hidden_error(normal)
            raise obstacle or os_error(errno.ENOENT, normal)
        return place, node

    def _file(self, normal: str) -> tuple[str, MemoryFile]:
        node: Any = self._tree.root
        try:
            for name in normal.split("/"):  # the common case, without links, in one loop
                node = node.entries[name]
        except (KeyError, AttributeError):
            node = None
        if type(node) is MemoryFile:
            return normal, node
        place, node, _ = self._tree.find(normal)
        if type(node) is MemoryFile:
            return place, node
        self._existing(normal)
        raise os_error(errno.EISDIR, normal)

    def _place(self, normal: str, *, follow: bool = True, parents: bool = True) -> tuple[str, Node | None]:
        """Return the resolved path to create or replace, and its node. Raises before a change that is not possible."""
        place, node, obstacle = self._tree.find(normal, follow=follow)
        if obstacle is not None:
            raise obstacle
        if node is None and not parents and self._tree.find(place.rpartition("/")[0])[1] is None:
            raise FileNotFoundError(errno.ENOENT, "has no parent directory", normal)
        return place, node


def moment(ns: int) -> datetime:
    """Convert nanoseconds since 1970 to a datetime in UTC, clamped to the range of datetime."""
    try:
        return datetime.fromtimestamp(ns // 1000 / 1e6, UTC)
    except (ValueError, OverflowError):
        return datetime.max.replace(tzinfo=UTC) if ns > 0 else datetime.min.replace(tzinfo=UTC)


def _prefix(normal: str) -> str:
    return f"{normal}/" if normal else ""


def _stat(path: str, node: MemoryFile | MemoryDirectory, *, is_link: bool = False) -> FileStat:
    is_file = isinstance(node, MemoryFile)
    return FileStat(
        path or "/",
        is_file,
        not is_file,
        len(node.content) if is_file else 0,
        moment(node.birth_ns),
        moment(node.mtime_ns),
        node.mode,
        is_link,
    )
