"""What changed in a tree of files since the newest step: one `lstat` a file, and a read of those that differ.

The tree is walked by directory descriptors, so that no link is followed, whoever exchanges what meanwhile. A nested
`.git` is data like any other.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ringfence_workspace.history.entries import Entry, Meta, link_number
from ringfence_workspace.history.stat_cache import (
    COARSE_TICK_NS,
    Stamp,
    StatCache,
    is_settled,
    stamp_of,
)
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.history.steady_reads import closing, hole_bytes, open_at, read_steadily
from ringfence_workspace.history.trees import Folder
from ringfence_workspace.history.unsure_names import FullScanNeededError, LookedAt, UnsureNames
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.extended_attributes import attributes_of
from ringfence_workspace.tree.kernel import abilities, mounts_below
from ringfence_workspace.tree.linked_worktrees import GIT, LINKED_WORKTREE, is_linked_worktree

MAX_DEPTH = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SPARSE_BYTES = 1 << 20
_REALTIME_COARSE = 5  # a name that the standard library does not have
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file."""

_TOLD_EVERY, _TOLD_BYTES = 128, 1 << 20
"""A scan says how far it is after so many files that it reads, and before one of so many bytes."""

Progress: TypeAlias = Callable[[int], None]
"""Called now and then with the number of files that a scan has looked at."""
Hides: TypeAlias = Callable[[int, str, str, os.stat_result], bool]
"""Whether something is hidden: the descriptor of its directory, its name there, its path, and its status."""
Separates: TypeAlias = Callable[[int, str, os.stat_result, bool], bool]
"""Whether a directory is left out as a linked worktree: its descriptor, its path, its status, and whether it is one."""
_Other: TypeAlias = tuple[str, os.stat_result, bool]
"""The name of something that the cache does not know, its status, and whether it is hidden."""
Exclusion: TypeAlias = Literal[
    "too large", "too many files", "too deep", "special file", "unreadable", "mounted", "linked worktree", "hidden"
]


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """What a scan takes in; what it leaves out is reported."""

    max_file_bytes: int = 256 << 20
    """Of one file; and of the holes of all files that one scan reads, which cost nothing to make."""
    max_files: int = 1_000_000


DEFAULT_LIMITS = ScanLimits()


@dataclass(slots=True)
class ScanResult:
    """``changes`` has the new state of every path that differs, in bytes or in anything else (None: it is gone).

    ``excluded`` are the paths that are there and not taken in: of none of them, or of what is below, do the changes
    say anything, except None for one that the step before had. ``stamps`` are those of all that the cache did not
    know: files that were read, directories that differ or have changed just now, and what is excluded. ``read`` counts
    the files that had to be read, ``files`` those that were looked at.
    """

    changes: dict[str, Entry | None] = field(default_factory=dict[str, "Entry | None"])
    excluded: dict[str, Exclusion] = field(default_factory=dict[str, Exclusion])
    stamps: dict[str, Stamp] = field(default_factory=dict[str, Stamp])
    files: int = 0
    read: int = 0
    closed: bool = False
    """Whether there is a directory that the scan did not enter."""

    def known(self) -> dict[str, Entry | None]:
        """The changes but those of what is left out: that is there, and nobody knows what it is."""
        return {path: state for path, state in self.changes.items() if path not in self.excluded}


def _new_file_ns(directory: int, name: str = "") -> int:
    """The ctime of a file that is made in a directory and goes at once. It has no name unless one is given."""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if name else os.O_TMPFILE)
    probe = os.open(name or ".", flags, 0o600, dir_fd=directory)
    try:
        return os.fstat(probe).st_ctime_ns
    finally:
        os.close(probe)
        if name:
            os.unlink(name, dir_fd=directory)


def filesystem_clock(root: int) -> int:
    """Now, by the clock that stamps the files of this filesystem, in nanoseconds."""
    try:
        return _new_file_ns(root)
    except OSError:  # then nothing that changed in the last seconds is trusted
        return time.time_ns() - COARSE_TICK_NS


def kernel_clock(root: int) -> int:
    """Now, by the clock of this kernel that stamps the files of local filesystems, or a little before, in nanoseconds.
    Nothing is made for it."""
    return time.clock_gettime_ns(_REALTIME_COARSE)


def clock_ahead_ns(directory: int, name: str = "") -> int:
    """By how many nanoseconds the clock of a filesystem is ahead of the system's.

    NFS and 9p know no files without a name, so there it needs one. Raises OSError where no file can be made.
    """
    now = time.time_ns()
    return _new_file_ns(directory, name) - now


def follow(cache: StatCache, states: CommitStates, commit: str | None) -> None:
    """Have a cache stand for `commit`: what differs from the commit that it stood for is read at the next scan."""
    if commit is not None and cache.commit == commit:
        return
    try:
        differences = states.differences(cache.commit, commit) if cache.commit is not None and commit else None
    except LookupError:
        differences = None
    if differences is None:
        cache.clear()
    else:
        for path, before, after in differences:
            cache.differ(path, before, after)
    cache.commit = commit


def separates_all(directory: int, path: str, status: os.stat_result, is_linked: bool) -> bool:
    """Leave out every linked worktree: it is a workspace of its own, which may be open."""
    return is_linked


def no_progress(files: int) -> None:
    """Report no progress."""


def watches_nothing(descriptor: int, path: str) -> None:
    """Have nobody watch a directory that a scan enters."""


@dataclass(slots=True)
class _Directory:
    """A directory that a scan is to enter: what the step before had at its path, and its stamp."""

    path: str
    before: Folder | Entry | None
    stamp: Stamp


class Scanner:
    """One scan of the tree at the descriptor ``root`` against its state at ``commit`` (None: nothing) and its cache.

    ``keep`` puts the bytes of a file into the store and gives their object id. ``hidden`` gives the names in the root
    that are none of the workspace's, ``hides`` what is to be left out as hidden, and ``separates`` which directories as
    linked worktrees. ``progress`` is called for every directory, and in a large one now and then; ``entered`` with the
    descriptor and the path of each directory that is about to be listed. ``clock`` stamps the files.
    """

    def __init__(
        self,
        root: int,
        states: CommitStates,
        commit: str | None,
        keep: Callable[[bytes], str],
        cache: StatCache,
        *,
        limits: ScanLimits = DEFAULT_LIMITS,
        hidden: Callable[[str], bool] = lambda name: False,
        progress: Progress = no_progress,
        hides: Hides | None = None,
        separates: Separates = separates_all,
        entered: Callable[[int, str], None] = watches_nothing,
        clock: Callable[[int], int] = filesystem_clock,
    ) -> None:
        self._files = Confined(root, abilities())
        self._states = states
        self._commit = commit
        self._keep = keep
        self._cache = cache
        self._limits = limits
        self._hidden = hidden
        self._progress = progress
        self._hides = hides
        self._separates = separates
        self._entered = entered
        self._clock = clock(root)
        place = os.readlink(f"/proc/self/fd/{root}")
        self._mounted = {os.path.relpath(path, place) for path in mounts_below(place)}
        self._found = ScanResult()
        self._holes = 0
        self._device = os.fstat(root).st_dev

    def scan(self) -> ScanResult:
        """Walk the whole tree, and bring the cache up to it.

        If there are changes, the cache stands for no step until its ``commit`` is set to one that has them.

        Raises:
            OSError: the root itself cannot be read, or the store cannot be written.
        """
        cache = self._cache
        follow(cache, self._states, self._commit)
        cache.commit, cache.complete, cache.unsure, cache.linked = None, False, {}, set()
        before = self._states.root(self._commit) if self._commit is not None else None
        self._enter_all([_Directory("", before, stamp_of(os.fstat(self._files.root)))])
        cache.complete, cache.files = True, self._found.files
        return self._found

    def scan_unsure(self) -> ScanResult:
        """Look at what the cache is unsure of, and bring it up to that. It finds what `scan` would, if nothing else has
        changed since the scan before.

        Raises:
            FullScanNeededError: it does not tell. The cache follows the commit, or stands for none.
            OSError: the store cannot be written.
        """
        follow(self._cache, self._states, self._commit)
        found = UnsureNames(self._files, self._states, self._commit, self._cache, self._hidden).found()
        looked = sum(len(one.names) for one in found.values())
        if self._mounted - {os.curdir} or self._cache.files + looked > self._limits.max_files:
            raise FullScanNeededError
        self._cache.commit, self._cache.unsure = None, {}
        below = [directory for path, one in found.items() for directory in self._look_again(path, one)]
        self._enter_all(below)
        self._cache.files += self._found.files
        return self._found

    def _enter_all(self, waiting: list[_Directory]) -> None:
        while waiting:
            waiting += self._enter(waiting.pop())[::-1]
        if not self._found.changes:
            self._cache.commit = self._commit

    def _enter(self, directory: _Directory) -> Sequence[_Directory]:
        """Look at what is in a directory. Return the directories in it, which are to be entered next."""
        try:
            with self._files.parent(directory.path) as (above, name):
                descriptor = open_at(name, above, _DIRECTORY)
        except OSError as error:
            return self._not_entered(directory, error)
        with closing(descriptor):
            self._entered(descriptor, directory.path)
            status = os.fstat(descriptor)  # of before it is listed: what changes it meanwhile is found next time
            try:
                fresh, others = self._listed(descriptor, directory.path)
            except OSError as error:
                return self._not_entered(directory, error)
            has_git_file = GIT in fresh or any(name == GIT and stat.S_ISREG(now.st_mode) for name, now, _ in others)
            is_linked = has_git_file and is_linked_worktree(descriptor)
            if directory.path and self._separates(descriptor, directory.path, status, is_linked):
                self._exclude(directory.path, LINKED_WORKTREE, directory.before, directory.stamp)
                self._found.closed = True
                return ()
            return self._compare(descriptor, directory, status, fresh, others)

    def _not_entered(self, directory: _Directory, error: OSError) -> Sequence[_Directory]:
        if not directory.path or error.errno in _OURS:
            raise error
        if error.errno == errno.ENOENT:
            self._gone(directory.path, directory.before)
        else:  # it may not be read, or became something else just now, which the next scan will find
            self._exclude(directory.path, "unreadable", directory.before, directory.stamp)
            self._found.closed = True
        return ()

    def _listed(self, descriptor: int, path: str) -> tuple[dict[str, Stamp], list[_Other]]:
        """The files in a directory that are as the cache knows them, and all else that is in it.

        PermissionError where names may be listed, and nothing be looked at.
        """
        prefix = f"{path}/" if path else ""
        known, hides = self._cache.folders.get(path, {}), self._hides
        room = self._limits.max_files - self._found.files
        fresh: dict[str, Stamp] = {}
        others: list[_Other] = []
        linked: list[str] = []
        for name in os.listdir(descriptor):
            if not path and self._hidden(name):
                continue
            try:
                now = os.lstat(name, dir_fd=descriptor)
            except FileNotFoundError:
                continue
            hidden = hides is not None and hides(descriptor, name, prefix + name, now)
            was = known.get(name)
            if was is not None and was == stamp_of(now) and len(fresh) < room and not hidden:
                fresh[name] = was
                if now.st_nlink > 1:
                    linked.append(name)
            else:
                others.append((name, now, hidden))
        if linked:  # as `_note_linked`, for all that a package manager has linked to its cache
            self._cache.unsure.setdefault(path, set()).update(linked)
            self._cache.linked.update([fresh[name][0] for name in linked])
        return fresh, others

    def _compare(
        self,
        descriptor: int,
        directory: _Directory,
        status: os.stat_result,
        fresh: dict[str, Stamp],
        others: Sequence[_Other],
    ) -> Sequence[_Directory]:
        """Find what of a directory differs from the step before. Return the directories in it."""
        self._progress(self._found.files)
        path, prefix = directory.path, f"{directory.path}/" if directory.path else ""
        before = directory.before if isinstance(directory.before, Folder) else None
        itself = self._cache.folders.get(path, {}).get("")
        self._cache.replace(path, fresh)
        self._found.files += len(fresh)
        there = set(fresh)
        below: dict[str, _Directory] = {}
        folders = _decoded(before.directories()) if before is not None else set[str]()
        replaced = folders & {name for name, now, _ in others if not stat.S_ISDIR(now.st_mode)} if folders else folders
        for name in replaced:  # before anything is known of what is there now
            self._cache.forget(prefix + name)
        for name, now, hidden in others:
            old = self._before(before, name)
            if not self._take_in(descriptor, name, prefix + name, now, old, hidden=hidden):
                continue
            if stat.S_ISDIR(now.st_mode) and prefix + name not in self._found.excluded:
                below[name] = _Directory(prefix + name, old, stamp_of(now))
            there.add(name)
        self._directory_itself(descriptor, path, before, status, itself)
        if before is not None:
            # Not every filesystem gives a directory another stamp when a name in it comes or goes.
            gone = (folders | _decoded(before.names())) - there
            self._found.changes.update(dict.fromkeys((prefix + name for name in gone), None))
            for name in gone | folders - below.keys() - replaced:
                self._cache.forget(prefix + name)
        return list(below.values())

    def _look_again(self, path: str, unsure: LookedAt) -> Sequence[_Directory]:
        """Find what differs at some names of a directory that was looked at. Return those of new directories."""
        prefix, below = f"{path}/" if path else "", list[_Directory]()
        known = self._cache.names(path)
        assert known is not None, "it was looked for among what is known"
        with closing(self._open_again(path)) as descriptor:
            for name, now in unsure.names.items():
                place, old = prefix + name, self._before(unsure.before, name)
                is_file = now is not None and not stat.S_ISDIR(now.st_mode)
                if isinstance(old, Folder) and is_file:
                    self._cache.forget(place)  # before anything is known of what is there now
                was = known.pop(name, None)
                if now is None:
                    self._gone(place, old)
                    continue
                hidden = self._hides is not None and self._hides(descriptor, name, place, now)
                if was is not None and was == stamp_of(now) and not hidden:
                    known[name] = was
                    self._note_linked(place, now)
                elif not self._take_in(descriptor, name, place, now, old, hidden=hidden):
                    self._gone(place, old)
                elif not is_file and place not in self._found.excluded and not self._is_known(place, now, old):
                    below.append(_Directory(place, old, stamp_of(now)))
            self._directory_itself(descriptor, path, unsure.before, unsure.status, known.get(""))
        return below

    def _open_again(self, path: str) -> int:
        try:
            return self._files.open_directory(path)
        except OSError as error:
            if error.errno in _OURS:
                raise
            raise FullScanNeededError from None  # it has gone since it was looked at

    def _is_known(self, path: str, status: os.stat_result, old: Folder | Entry | None) -> bool:
        """Whether a directory is the one of which the cache knows what is in it."""
        itself = self._cache.folders.get(path, {}).get("")
        return isinstance(old, Folder) and itself is not None and itself[0] == status.st_ino

    def _take_in(
        self,
        descriptor: int,
        name: str,
        path: str,
        now: os.stat_result,
        old: Folder | Entry | None,
        *,
        hidden: bool,
    ) -> bool:
        """Take in what is at a name and the cache does not know; a directory is entered later. False: it has gone."""
        reason = self._refused(descriptor, name, path, now, hidden=hidden)
        if reason is not None:
            self._exclude(path, reason, old, stamp_of(now))
            self._found.closed |= stat.S_ISDIR(now.st_mode)
            return True
        return stat.S_ISDIR(now.st_mode) or self._file(descriptor, name, path, now, old)

    def _directory_itself(
        self, descriptor: int, path: str, before: Folder | None, status: os.stat_result, known: Stamp | None
    ) -> None:
        """Compare what a directory itself is, and what the cache knew of that."""
        stamp = stamp_of(status)
        if known != stamp:
            self._cache.note(path, attributes_of(descriptor))
        if is_settled(status, self._clock):
            self._cache.folders[path][""] = stamp
        else:
            self._cache.forget_itself(path)
            self._found.stamps[path] = stamp
        meta = Meta.of(status)
        if before is None or before.meta != meta:
            self._found.changes[path] = Entry("directory", meta)
            self._found.stamps[path] = stamp

    def _note_linked(self, path: str, status: os.stat_result) -> None:
        """Have the next scan look at a file of several names: an event would name only the one that was used."""
        if stat.S_ISDIR(status.st_mode):
            return
        if status.st_nlink > 1:
            self._cache.linked.add(status.st_ino)
            self._cache.doubt(path)
        else:
            self._cache.linked.discard(status.st_ino)

    def _before(self, folder: Folder | None, name: str) -> Folder | Entry | None:
        """What the step before had at a name of a directory."""
        if folder is None:
            return None
        raw = os.fsencode(name)
        return folder.directory(raw, self._states.objects) or folder.file(raw)

    def _refused(self, parent: int, name: str, path: str, status: os.stat_result, *, hidden: bool) -> Exclusion | None:
        if hidden:
            return "hidden"
        if path in self._mounted:
            return "mounted"  # what is in a mount could not be brought back by renaming, so no call may change it
        if stat.S_ISDIR(status.st_mode):
            return "too deep" if path.count("/") + 1 >= MAX_DEPTH else None
        if self._found.files >= self._limits.max_files:
            return "too many files"
        if not stat.S_ISREG(status.st_mode):
            return None if stat.S_ISLNK(status.st_mode) else "special file"
        if status.st_size > self._limits.max_file_bytes:
            return "too large"
        if status.st_size >= _SPARSE_BYTES and status.st_blocks * 512 < status.st_size:
            self._holes += hole_bytes(parent, name, status.st_size)
            if self._holes > self._limits.max_file_bytes:
                return "too large"
        return None

    def _file(self, parent: int, name: str, path: str, status: os.stat_result, old: Folder | Entry | None) -> bool:
        """Take in a file or link that the cache does not know. False: it has gone."""
        self._found.files += 1
        if not self._found.files % _TOLD_EVERY or status.st_size >= _TOLD_BYTES:
            self._progress(self._found.files)
        try:
            content, attributes, status, steady = read_steadily(parent, name, status, self._limits.max_file_bytes)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in _OURS:
                raise
            self._exclude(path, "unreadable", old, stamp_of(status))
            return True
        stamp = self._found.stamps[path] = stamp_of(status)
        self._found.read += 1
        self._cache.note(path, attributes)
        kind = "symlink" if stat.S_ISLNK(status.st_mode) else "file"
        new = Entry(kind, Meta.of(status, link_number(status, self._device)), self._keep(content))
        before = old if isinstance(old, Entry) else None
        if before != new:
            self._found.changes[path] = new
        if steady and is_settled(status, self._clock):
            self._cache.folders[path.rpartition("/")[0]][name] = stamp
        else:
            self._cache.doubt(path)
        self._note_linked(path, status)
        return True

    def _exclude(self, path: str, reason: Exclusion, old: Folder | Entry | None, stamp: Stamp) -> None:
        self._found.excluded[path] = reason
        self._found.stamps[path] = stamp
        self._cache.doubt(path)
        self._gone(path, old)

    def _gone(self, path: str, old: Folder | Entry | None) -> None:
        if old is not None:
            self._found.changes[path] = None
            self._cache.forget(path)


def _decoded(names: Iterable[bytes]) -> set[str]:
    """File names as text: all at once, which is faster than one by one."""
    return set(os.fsdecode(b"\0".join(names)).split("\0")) - {""}
