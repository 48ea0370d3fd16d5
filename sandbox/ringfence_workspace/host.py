"""The filesystem on disk."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from ringfence.errors import SnapshotRestoreError
from ringfence.filesystem.edits import line_window
from ringfence.filesystem.line_stream import stream_window
from ringfence.filesystem.memory import moment
from ringfence.filesystem.paths import below_root, check_link_target, normalise, os_error
from ringfence.filesystem.protocol import (
    MAX_GREP_MATCHES,
    READ_ENTIRE_FILE,
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
from ringfence.filesystem.search import compiled_glob, glob_below, grep_files, path_filter
from ringfence.participants import (
    CLEAN,
    CURRENT_CALL,
    LOCK_PATIENCE_SECONDS,
    CallInfo,
    Change,
    Contents,
    Detection,
    RollbackReport,
    Step,
    Transactional,
)
from ringfence_workspace.call_process import CallProcess
from ringfence_workspace.history.ignored_files import Repository
from ringfence_workspace.opening import Opened
from ringfence_workspace.outputs import KeptOutputs, is_output
from ringfence_workspace.transaction.detection import DEFAULT_DETECTION_LIMITS, Detect, DetectionLimits
from ringfence_workspace.transaction.edits import Edits
from ringfence_workspace.transaction.read_set import relinked
from ringfence_workspace.transaction.recovery import Recovered
from ringfence_workspace.transaction.restore import NOT_ROLLED_BACK, is_full
from ringfence_workspace.transaction.undo_log import Savepoint, SnapshotPoint
from ringfence_workspace.tree.confined import Confined, Found, Pieces, open_file, sha256_of
from ringfence_workspace.tree.kernel import Abilities, birth_ns
from ringfence_workspace.tree.listing import TreeListing, read_text
from ringfence_workspace.tree.places import is_only_host_declared

if TYPE_CHECKING:
    from typing import Self

    from ringfence.filesystem.hidden import HiddenFiles
    from ringfence.filesystem.ignored import RepositoryRules
    from ringfence.participants import HiddenContent
    from ringfence.receipts import Receipt
    from ringfence_workspace.history.scan import Progress, ScanLimits
    from ringfence_workspace.transaction.step_history import StepHistory
    from ringfence_workspace.tree.hidden_tree import HiddenTree

Durability = Literal["process", "power"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot(FilesystemSnapshot):
    opened: Opened = field(repr=False, compare=False)
    point: SnapshotPoint = field(repr=False, compare=False)


class HostFilesystem(Transactional):
    """A workspace on disk. Nothing outside of the root can be reached through it, and every call can be undone.

    Opening it recovers what a killed opener left (`recovered`) and locks the root until `close`, which ``with``
    calls. Its first call takes in the whole tree, which the history begins with. A read-only one only looks. `for_call`
    gives further objects over the same workspace, equal to this one.
    """

    durable = True
    _snapshots = itertools.count(1)

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        limits: ScanLimits | None = None,
        durability: Durability = "process",
        read_only: bool = False,
        only_this_host: bool = False,
        patience_seconds: float = LOCK_PATIENCE_SECONDS,
        hide: HiddenFiles | None = None,
        progress: Progress | None = None,
        can: Abilities | None = None,
        detect: Detect = "auto",
        detection_limits: DetectionLimits = DEFAULT_DETECTION_LIMITS,
    ) -> None:
        """``store`` is the directory that keeps the history, found from the root's real path where it is not given.

        ``limits`` bound what scans around opaque calls take in. ``only_this_host`` says that no other host opens the
        workspace, which is asked for where hosts do not see each other's locks (NFS, 9p, virtiofs, FUSE, CIFS).
        ``hide`` is the rule by which files are hidden from tools and commands, and kept out of the store. The store
        remembers it: left out, it is the last one. An empty one hides nothing.
        ``progress`` is called now and then with the number of files read so far, when the tree is taken in. ``can`` is
        what the kernel may be asked for, for tests. ``detect`` says how what programs change is found: "scan" by two
        scans of all files around each call, "watch" by scans of what inotify names, and "auto" by a watch where there
        can be one. ``detection_limits`` bound the watch.

        Raises:
            NotADirectoryError, FileNotFoundError: the root is no directory.
            OSError: the store cannot be made or written, or the tree cannot be watched, and ``detect`` is "watch".
            ValueError: the store is inside of the root, another version of ringfence wrote it, or Python does not take
                names for UTF-8.
            WorkspaceLockedError: another opener has it; it is named.
            OSError (ENOLCK): locks do not hold here, and ``only_this_host`` was not said.
            RestoreFailedError: what a killed call left cannot be undone now.
        """
        if durability not in ("process", "power"):
            raise ValueError(f"durability is one of 'process', 'power', not {durability!r}")
        if detect not in ("auto", "watch", "scan"):
            raise ValueError(f"detect is one of 'auto', 'watch', 'scan', not {detect!r}")
        opened = Opened(
            os.fspath(root),
            None if store is None else os.fspath(store),
            power=durability == "power",
            read_only=read_only,
            can=can,
            limits=limits,
            progress=progress,
            only_this_host=only_this_host or is_only_host_declared(),
            patience_seconds=patience_seconds,
            hide=hide,
            detect=detect,
            detection_limits=detection_limits,
        )
        self._work_on(opened, limits, None)

    def _work_on(self, opened: Opened, limits: ScanLimits | None, call: CallInfo | None) -> None:
        """Be a handle of an opened workspace, the one for a call if that is given."""
        self.limits = limits
        self._opened = opened
        self._call = call
        self.lock = opened.lock
        self._files: Confined = opened.files
        self._transactions = opened.transactions
        self._edits = Edits(opened.transactions, opened.can)
        self._hidden: HiddenTree | None = opened.hidden
        self._listing = TreeListing(opened.files, opened.hidden)

    def __repr__(self) -> str:
        return f"the workspace {self._opened.root}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostFilesystem) and other._opened is self._opened

    def __hash__(self) -> int:
        return hash(self._opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Roll back what is open, drop what snapshots held, and let go of the workspace. Once is enough."""
        with self.lock.mutex:
            self._opened.close()

    def check_open(self) -> None:
        """Raises ValueError once it is closed, and in a process that was forked off: the workspace is the parent's."""
        self._opened.check_open()

    @property
    def root(self) -> str:
        return self._opened.root

    @property
    def history(self) -> StepHistory | None:
        """The steps of its calls; None for a read-only one."""
        return self._opened.history

    @property
    def outputs(self) -> KeptOutputs:
        """Where what commands print is kept. ValueError for a read-only one, which no command works on."""
        if self._opened.outputs is None:
            raise ValueError(f"{self!r} is read-only: nothing is run there")
        return self._opened.outputs

    @property
    def tracks_external_writes(self) -> bool:
        return not self.read_only

    @property
    def read_only(self) -> bool:
        return self._opened.read_only

    @property
    def hidden(self) -> HiddenFiles | None:
        """The rule by which files are hidden. None: none are."""
        return None if self._hidden is None else self._hidden.rule

    @property
    def hidden_tree(self) -> HiddenTree | None:
        """What is hidden, for scans and containers."""
        return self._hidden

    @property
    def hidden_paths(self) -> Sequence[str]:
        """What is hidden and there now. A hidden directory stands for all that is below it."""
        return () if self._hidden is None else tuple(self._hidden.paths)

    @property
    def linked_worktrees(self) -> Sequence[str]:
        """The linked worktrees of git in it that the newest scan found. Each is a workspace of its own."""
        found = () if self.history is None else self.history.linked_worktrees
        return tuple(path for path in found if os.path.isdir(os.path.join(self.root, path)))

    @property
    def git_outside(self) -> str | None:
        """A directory of git's data outside of the root, which no rollback restores. None: there is none."""
        return Repository(self.root).outside

    def hidden_files(self) -> Iterator[HiddenContent]:
        """Yield each hidden file, also those below hidden directories. What cannot be read is left out."""
        if self._hidden is not None:
            yield from self._hidden.contents()

    def hides(self, path: str) -> bool:
        """Whether a normal path is hidden, or would be if it existed."""
        return self._hidden is not None and self._hidden.hides(path)

    @property
    def repository_rules(self) -> RepositoryRules | None:
        """What git ignores and tracks here, besides the ignore files of the tree. None: it is in no repository."""
        return Repository(self.root).rules

    @property
    def has_uncommitted(self) -> bool:
        """Whether a call that is running has changed anything."""
        return self._transactions.has_changes

    @property
    def recovered(self) -> Recovered | None:
        """What opening did about a call that was killed; None where there was nothing to do."""
        return self._opened.recovered

    def for_call(self, call: CallInfo) -> Self:
        other = object.__new__(type(self))
        other._work_on(self._opened, self.limits, call)
        return other

    # -- looking

    def resolve(self, path: str) -> str:
        return self._find(normalise(path)).place

    def content_hash(self, path: str) -> str:
        normal = normalise(path)
        place = self._file(normal).place
        with self._files.parent(place) as (directory, name):
            try:
                descriptor, found = open_file(directory, name, normal)
            except OSError as error:
                raise relinked(normal, error) from None
        try:
            sha256 = sha256_of(descriptor)
        finally:
            os.close(descriptor)
        call = self._current_call()
        if call is not None and not call.ended:  # a policy asks before the handler runs
            self._transactions.undo.read_set.note(call, place, found, sha256)
        return sha256

    def read(self, path: str, *, offset: int = 0, limit: int | None = None, encoding: str = "utf-8") -> ReadResult:
        normal = normalise(path)
        place, content, found = self._content(normal, whole=limit == READ_ENTIRE_FILE)
        if content is None:
            with self._streamed(place) as (pieces, found):
                text, returned, total = stream_window(pieces, offset, limit, encoding, normal)
                if text or not pieces.size:
                    self._note_read(place, pieces.sha256, found)
        else:
            text, returned, total = line_window(content, offset, limit, encoding, normal)
            if text or not content:
                self._note_read(place, content, found)
        return ReadResult(text, normal, total, offset, returned, offset + returned < total)

    def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> ReadBytesResult:
        check_bytes_asked(offset, limit)
        normal = normalise(path)
        place, content, found = self._content(normal, whole=not offset and limit is None)
        if content is None:
            with self._streamed(place) as (pieces, found):
                part = _part(pieces, offset, limit)
                size = pieces.size
                if part or not size:
                    self._note_read(place, pieces.sha256, found)
        else:
            size = len(content)
            part = content[offset : None if limit is None else offset + limit]
            if part or not content:
                self._note_read(place, content, found)
        return ReadBytesResult(part, normal, size, offset, len(part), offset + len(part) < size)

    def readlink(self, path: str) -> str:
        found = self._itself(normalise(path))
        try:
            if found.is_link:
                return self._files.read_link(found.place)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it is none any more
                raise
        raise ValueError(f"{path!r} is not a symlink")

    def exists(self, path: str) -> bool:
        try:
            return self._find(normalise(path), follow=False).stat is not None
        except (OSError, ValueError):
            return False

    def stat(self, path: str) -> FileStat:
        normal = normalise(path)
        itself = self._itself(normal)
        led_to = self._existing(normal) if itself.is_link or self._hidden is not None else itself
        found = led_to.stat
        assert found is not None
        with self._files.parent(led_to.place) as (directory, name):
            born = birth_ns(directory, name)
        return FileStat(
            normal or "/",
            led_to.is_file,
            led_to.is_directory,
            found.st_size if led_to.is_file else 0,
            moment(min(found.st_mtime_ns, found.st_ctime_ns) if born is None else born),
            moment(found.st_mtime_ns),
            stat.S_IMODE(found.st_mode),
            itself.is_link,
        )

    def list(self, path: str = "") -> Sequence[FileEntry]:
        normal = normalise(path)
        found = self._existing(normal)
        if not found.is_directory:
            raise os_error(errno.ENOTDIR, normal)
        return self._listing.entries(found.place, _prefix(normal))

    def glob(self, pattern: str, *, path: str = "") -> Sequence[GlobMatch]:
        normal = normalise(path)
        top = self._find(normal)
        if not top.is_directory:
            compiled_glob(pattern)  # a bad pattern is an error here too
            return []
        if self._hidden is not None:
            self._hidden.check(normal, top)
        return glob_below(pattern, self._listing, top.place, _prefix(normal))

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
        if (kept := self._kept_output(normal)) is not None:
            return grep_files(iter([(normal, kept[0])]), pattern, literal=literal, max_matches=max_matches)
        top = self._existing(normal)
        if top.is_directory:
            prefix = _prefix(normal)
            wanted = None if glob is None else path_filter(glob)
            files = self._listing.contents(top.place, prefix, wanted)
        else:
            files = self._one_text(normal, top)
            if glob is not None:
                wanted = path_filter(glob)
                files = files if wanted(normal.rpartition("/")[2]) else iter(())
        return grep_files(files, pattern, literal=literal, max_matches=max_matches)

    def _one_text(self, normal: str, top: Found) -> Iterator[tuple[str, bytes]]:
        with self._files.parent(top.place) as (directory, name):
            content = read_text(directory, name, normal)
        return iter(() if content is None else [(normal, content)])

    # -- changing

    def write(
        self, path: str, content: str, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        return self.write_bytes(path, encode_text(content), mode=mode, create_parents=create_parents)

    def write_bytes(
        self, path: str, content: bytes, *, mode: WriteMode = "overwrite", create_parents: bool = True
    ) -> WriteResult:
        check_write_mode(mode)
        normal = below_root(path)
        if is_output(normal):
            raise PermissionError(errno.EROFS, "is what a command printed, which is kept as it is", normal)
        if type(content) is not bytes:
            content = bytes(memoryview(content))
        with self.lock.mutex:
            self._admit()
            self._check_change(normal, content)
            self._edits.write(normal, content, mode, create_parents)
        return WriteResult(normal, len(content), mode)

    def delete(self, path: str, *, recursive: bool = False) -> None:
        normal = normalise(path)
        if not normal:
            raise PermissionError(errno.EPERM, "the root cannot be deleted", path)
        with self.lock.mutex:
            self._admit()
            self._check_change(normal, follow=False)
            self._edits.delete(normal, recursive)

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        normal = normalise(path)
        with self.lock.mutex:
            self._admit()
            self._check_change(normal, follow=False)
            self._edits.mkdir(normal, parents, exist_ok)

    def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        old, new = normalise(source), normalise(target)
        if not old or not new:
            raise PermissionError(errno.EPERM, "the root cannot be moved or replaced", "")
        with self.lock.mutex:
            self._admit()
            self._check_move(old, new)
            self._edits.move(old, new, overwrite)

    def chmod(self, path: str, mode: int) -> None:
        check_permission_bits(mode)
        normal = normalise(path)
        with self.lock.mutex:
            self._admit()
            self._check_change(normal)
            self._edits.chmod(normal, mode)

    def symlink(self, path: str, target: str) -> None:
        check_link_target(target)
        normal = normalise(path)
        with self.lock.mutex:
            self._admit()
            self._check_change(normal, follow=False)
            self._edits.symlink(normal, target)

    @contextmanager
    def restoring(self) -> Generator[Edits]:
        """For whoever brings files back from the history; one operation inside of a call."""
        with self.lock.mutex:
            self._admit()
            with self._transactions.operation():
                yield self._edits

    # -- states

    def snapshot(self, *, tag: str | None = None) -> FilesystemSnapshot:
        with self.lock.mutex:
            point = self._transactions.snapshot()
        name = f"disk-{next(self._snapshots)}"
        return HostSnapshot(name, datetime.now(UTC), name, self.root, None, tag, opened=self._opened, point=point)

    def restore(self, snapshot: FilesystemSnapshot) -> None:
        point = self._point(snapshot)
        with self.lock.mutex:
            self._admit()
            self._transactions.restore(point)

    def changes(self, since: FilesystemSnapshot | Savepoint) -> Sequence[Change]:
        self._opened.check_open()
        with self.lock.mutex:
            if isinstance(since, Savepoint):
                return self._transactions.changes_since_savepoint(since)
            return self._transactions.changes_since(self._point(since))

    def begin(self, call: CallInfo) -> Savepoint:
        self._opened.check_open()
        self._opened.check_there()
        with self.lock.mutex:
            return self._transactions.begin(call.call_id, call.tool, opaque=call.opaque and not self.read_only)

    def note_process(self, process: CallProcess) -> int:
        """Have a process on record whose end is the end of all that the running opaque call started: after a crash
        it is ended before anything is brought back.

        Returns a descriptor that is good until the call ends. What changes files more than 3 seconds after the last
        stamp on it counts as somebody else's after a crash. This process stamps it once a second; where it may be
        stopped, and then killed, who works on for it stamps it, too: writes over its first eight bytes the nanoseconds
        since 1970, little endian.

        Raises:
            TransactionError: no opaque call runs.
        """
        with self.lock.mutex:
            self._admit()
            return self._transactions.note_process(process)

    def copy_hidden(self) -> None:
        """Have a rollback of the running opaque call, and a recovery, restore hidden files: a command of this machine
        can change them. OSError: they cannot be copied."""
        with self.lock.mutex:
            self._admit()
            self._transactions.copy_hidden()

    def refuse_rollback(self) -> Sequence[str]:
        """Have the rollback of the running opaque call leave everything as it is, if it could not keep a copy of all
        that it removes. Return the paths that it could not keep. OSError: the tree cannot be read."""
        with self.lock.mutex:
            return self._transactions.refuse_rollback()

    def look(self, paths: tuple[str, ...] | None) -> bytes:
        """Have the history have the tree as it is, or these paths of it. Return what it cannot have, for `adopt`.

        Raises:
            TransactionError: the running call has changed files.
            OSError: the tree cannot be read, or the store not be written.
        """
        with self.lock.mutex:
            self._admit()
            return self._transactions.look(paths)

    def adopt(self, more: bytes, paths: tuple[str, ...] | None) -> None:
        """Have the running call be one that somebody else ran. ``more`` is what was kept of its look. Raises
        TransactionError where it is a part of another call, or has changed files itself."""
        with self.lock.mutex:
            self._admit()
            self._transactions.adopt(more, paths)

    def deny_adopted(self) -> None:
        """Have the end of the adopted call take back what it changed. OSError: that cannot begin."""
        with self.lock.mutex:
            self._transactions.deny_adopted()

    def contents(self, mark: Savepoint) -> Contents | None:
        changed = self._transactions.changed_files(mark)
        return None if changed is None else (changed.before, changed.after)

    def detection(self, mark: Savepoint) -> Detection | None:
        return None if mark.base is None else mark.base.detection

    def commit(self, mark: Savepoint, receipt: Receipt) -> Step | None:
        self._opened.check_open()
        with self.lock.mutex:
            return self._transactions.commit(mark, receipt)

    def rollback(self, mark: Savepoint) -> RollbackReport:
        if self._opened.is_forked:  # the call is the parent's, which goes on with it
            return CLEAN
        # A thread of the call that is in the middle of a change finishes it first.
        with self.lock.mutex:
            try:
                return self._transactions.rollback(mark)
            except OSError as error:
                if is_full(error):
                    raise OSError(error.errno, f"{error.strerror}: {NOT_ROLLED_BACK}") from error
                raise

    def _point(self, snapshot: FilesystemSnapshot) -> SnapshotPoint:
        if not isinstance(snapshot, HostSnapshot) or snapshot.opened is not self._opened:
            raise SnapshotRestoreError(
                f"the snapshot {snapshot.snapshot_id!r} is of another filesystem, or one that nobody holds any more"
            )
        return snapshot.point

    # -- shared by these

    def _admit(self) -> None:
        if self.read_only:
            raise PermissionError(errno.EROFS, "the filesystem is read-only")
        self._opened.check_open()
        self.lock.check_access(self, self._current_call())

    def _check_change(self, normal: str, content: bytes = b"", *, follow: bool = True) -> None:
        if self._hidden is not None:
            self._hidden.check_change(normal, self._files.find(normal, follow=follow), content)

    def _check_move(self, old: str, new: str) -> None:
        self._check_change(old, follow=False)
        self._check_change(new, follow=False)

    def _current_call(self) -> CallInfo | None:
        current = CURRENT_CALL.get()
        own = self._call
        return current if own is None or (current is not None and current.within(own)) else own

    def _find(self, normal: str, *, follow: bool = True) -> Found:
        self._opened.check_open()
        return self._files.find(normal, follow=follow)

    def _existing(self, normal: str) -> Found:
        self._opened.check_open()
        found = self._files.existing(normal)
        if self._hidden is not None:
            self._hidden.check(normal, found)
        return found

    def _itself(self, normal: str) -> Found:
        self._opened.check_open()
        return self._files.itself(normal)

    def _file(self, normal: str) -> Found:
        found = self._existing(normal)
        if found.is_directory:
            raise os_error(errno.EISDIR, normal)
        return found

    def _content(self, normal: str, *, whole: bool) -> tuple[str, bytes | None, os.stat_result]:
        """Where a path leads to, its content, and its stat from before. The content is None for a large file, unless
        the ``whole`` of it is read."""
        read: Callable[[str], tuple[bytes | None, os.stat_result]]
        read = self._files.read_file if whole else self._files.read_short
        if (kept := self._kept_output(normal)) is not None:
            return normal, *kept
        self._opened.check_open()
        if normal and not self._files.is_reserved(normal):
            try:
                content, found = read(normal)
            except OSError:  # a link is on the way, or the careful look says what is wrong
                pass
            else:
                if self._hidden is not None:
                    self._hidden.check(normal, Found(normal, found), content)
                return normal, content, found
        place = self._file(normal).place
        try:
            content, found = read(place)
        except OSError as error:
            raise relinked(place, error) from None
        return place, content, found

    @contextmanager
    def _streamed(self, place: str) -> Generator[tuple[Pieces, os.stat_result]]:
        try:
            with self._files.streamed(place) as (pieces, found):
                yield pieces, found
        except OSError as error:
            raise relinked(place, error) from None

    def _kept_output(self, normal: str) -> tuple[bytes, os.stat_result] | None:
        return None if self._opened.outputs is None else self._opened.outputs.read(normal)

    def _note_read(self, place: str, content: bytes | str, found: os.stat_result) -> None:
        """Note a read for the running call. ``content`` is what the file has, or the sha256 of it."""
        call = self._current_call()
        if call is not None and not call.sealed:
            sha256 = content if isinstance(content, str) else hashlib.sha256(content).hexdigest()
            call.note_read(self.lock, place, sha256)
            self._transactions.undo.read_set.note(call, place, found, sha256)


def _part(pieces: Iterable[bytes], offset: int, limit: int | None) -> bytes:
    """Bytes ``offset`` to ``offset + limit`` of the pieces. All of them are consumed."""
    parts: list[bytes] = []
    at, end = 0, None if limit is None else offset + limit
    for piece in pieces:
        start, stop = max(offset - at, 0), None if end is None else max(end - at, 0)
        if part := piece[start:stop]:
            parts.append(part)
        at += len(piece)
    return b"".join(parts)


def _prefix(normal: str) -> str:
    return f"{normal}/" if normal else ""
