"""What changed in a tree of files since the newest step: one `lstat` a file, and a read of those that differ.

The tree is walked by directory descriptors, so that no link is followed, whoever exchanges what meanwhile. A nested
`.git` is data like any other.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ringfence_sandbox.disk.kernel import mounts_below
from ringfence_sandbox.scan.stat_cache import (
    FINE_TICK_NS,
    Stamp,
    StatCache,
    attributes_of,
    is_settled,
    stamp_of,
)
from ringfence_sandbox.scan.steady_reading import hole_bytes, open_at, read_at_once, read_steadily
from ringfence_sandbox.store.entries import Entry, Meta, link_number
from ringfence_sandbox.store.folders import Folder
from ringfence_sandbox.store.history_states import States

MAX_DEPTH = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SPARSE_BYTES = 1 << 20
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file."""

_TOLD_EVERY, _TOLD_BYTES = 128, 1 << 20
"""A scan says how far it is after so many files that it reads, and before one of so many bytes."""

Progress: TypeAlias = Callable[[int], None]
"""Is told now and then how many files a scan has looked at."""
Hides: TypeAlias = Callable[[int, str, str, os.stat_result], bool]
"""Whether something is hidden: the descriptor of its directory, its name there, its path, and its status."""
Exclusion: TypeAlias = Literal[
    "too large", "too many files", "too deep", "special file", "unreadable", "mounted", "hidden"
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
    say anything, except None for one that the step before had. ``unsettled`` were being written while they were read:
    what was taken in may be a mixture. ``stamps`` are those of all that the cache did not know: files that were read,
    directories that differ, and what is excluded. ``read`` counts the files that had to be read, ``files`` all.
    """

    changes: dict[str, Entry | None] = field(default_factory=dict[str, "Entry | None"])
    excluded: dict[str, Exclusion] = field(default_factory=dict[str, Exclusion])
    unsettled: list[str] = field(default_factory=list[str])
    stamps: dict[str, Stamp] = field(default_factory=dict[str, Stamp])
    files: int = 0
    read: int = 0

    def known(self) -> dict[str, Entry | None]:
        """The changes but those of what is left out: that is there, and nobody knows what it is."""
        return {path: state for path, state in self.changes.items() if path not in self.excluded}


def filesystem_clock(root: int) -> int:
    """Now, by the clock that stamps the files of this filesystem, in nanoseconds; leaves no trace."""
    try:
        probe = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=root)
    except OSError:
        # It cannot be asked: then nothing that changed in the last seconds is trusted.
        return time.time_ns() - 2_000_000_000
    try:
        return os.fstat(probe).st_ctime_ns
    finally:
        os.close(probe)


def clock_ahead_ns(directory: int, name: str = "") -> int:
    """By how many nanoseconds the clock of a filesystem is ahead of the system's.

    A new file tells it, which goes at once. It has no name; NFS and 9p know no such files, so there it needs one.
    Raises OSError where no such file can be made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if name else os.O_TMPFILE)
    now = time.time_ns()
    probe = os.open(name or ".", flags, 0o600, dir_fd=directory)
    try:
        return os.fstat(probe).st_ctime_ns - now
    finally:
        os.close(probe)
        if name:
            os.unlink(name, dir_fd=directory)


def follow(cache: StatCache, states: States, commit: str | None) -> None:
    """Have a cache stand for `commit`: what differs from the commit that it stood for is read at the next scan."""
    if commit is not None and cache.commit == commit:
        return
    try:
        differences = states.differences(cache.commit, commit) if cache.commit is not None and commit else None
    except LookupError:
        differences = None
    if differences is None:
        cache.folders.clear()
    else:
        for path, before, after in differences:
            cache.differ(path, before, after)
    cache.commit = commit


def told_nothing(files: int) -> None:
    """The progress that nobody wants to hear of."""


class _Before:
    """A directory as the step before had it, read from the store only if it is asked for."""

    __slots__ = ("_above", "_commit", "_known", "_name", "_states", "_value")

    def __init__(self, states: States, commit: str | None, above: _Before | None = None, name: str = "") -> None:
        self._states = states
        self._commit = commit
        self._above = above
        self._name = name
        self._known = False
        self._value: Folder | None = None

    def below(self, name: str) -> _Before:
        return _Before(self._states, self._commit, self, name)

    def get(self) -> Folder | None:
        if self._known:
            return self._value
        # Not by recursion: a scan of a deep tree is that already, and a caller's stack may be deep as well.
        line: list[_Before] = []
        one: _Before | None = self
        while one is not None and not one._known:
            line.append(one)
            one = one._above
        for one in reversed(line):
            one._value = one._loaded()
            one._known = True
        return self._value

    def _loaded(self) -> Folder | None:
        if self._above is None:
            return self._states.root(self._commit) if self._commit is not None else None
        folder = self._above._value
        return folder.directory(os.fsencode(self._name), self._states.objects) if folder is not None else None

    def file(self, name: str) -> Entry | None:
        folder = self.get()
        return folder.file(os.fsencode(name)) if folder is not None else None


class _UnsearchableError(PermissionError):
    """A directory may be listed, and nothing in it be looked at."""


class Scanner:
    """One scan of the tree at the descriptor ``root`` against its state at ``commit`` (None: nothing) and its cache.

    ``keep`` puts the bytes of a file into the store and gives their object id. ``hidden`` tells the names in the root
    that are none of the workspace's, and ``hides`` what is to be left out as hidden. ``progress`` is told of it for
    every directory, and in a large one now and then.
    """

    def __init__(
        self,
        root: int,
        states: States,
        commit: str | None,
        keep: Callable[[bytes], str],
        cache: StatCache,
        *,
        limits: ScanLimits = DEFAULT_LIMITS,
        hidden: Callable[[str], bool] = lambda name: False,
        progress: Progress = told_nothing,
        hides: Hides | None = None,
    ) -> None:
        self._root = root
        self._states = states
        self._commit = commit
        self._keep = keep
        self._cache = cache
        self._limits = limits
        self._hidden = hidden
        self._progress = progress
        self._hides = hides
        self._clock = filesystem_clock(root)
        self._settled = self._clock - FINE_TICK_NS
        """Nothing with a later ctime is settled."""
        place = os.path.realpath(f"/proc/self/fd/{root}")
        self._mounted = {os.path.relpath(path, place) for path in mounts_below(place)}
        self._found = ScanResult()
        self._holes = 0
        self._device = os.fstat(root).st_dev
        self._links: list[tuple[str, Entry | None, Entry]] = []

    def scan(self) -> ScanResult:
        """Walk the whole tree, and bring the cache up to it.

        If there are changes, the cache stands for no step until its ``commit`` is set to one that has them.

        Raises:
            OSError: the root itself cannot be read, or the store cannot be written.
        """
        follow(self._cache, self._states, self._commit)
        self._cache.commit = None
        descriptor = open_at(".", self._root, _DIRECTORY)
        try:
            self._folder(descriptor, "", _Before(self._states, self._commit), 0)
        finally:
            os.close(descriptor)
        self._drop_renumbered_links()
        if not self._found.changes:
            self._cache.commit = self._commit
        return self._found

    def _folder(self, descriptor: int, path: str, before: _Before, depth: int) -> None:
        self._progress(self._found.files)
        status = os.fstat(descriptor)
        stamp = stamp_of(status)
        folders, others = _listed(descriptor)
        if depth == 0:
            folders = [name for name in folders if not self._hidden(name)]
            others = [name for name in others if not self._hidden(name)]
        prefix = f"{path}/" if path else ""
        known = self._cache.folders.get(path, {})
        fresh: dict[str, Stamp] = {}
        to_read: list[tuple[str, os.stat_result]] = []
        concealed: list[tuple[str, os.stat_result]] = []
        room = self._limits.max_files - self._found.files
        for name in others:
            try:
                now = os.lstat(name, dir_fd=descriptor)
            except FileNotFoundError:
                continue
            except PermissionError as error:
                raise _UnsearchableError(*error.args) from error
            was = known.get(name)
            hidden = self._hides is not None and self._hides(descriptor, name, prefix + name, now)
            if (
                was is not None
                and was[3] == now.st_ctime_ns
                and was[0] == now.st_ino
                and was[1] == now.st_size
                and was[2] == now.st_mtime_ns
                and len(fresh) < room
                and not hidden
            ):
                fresh[name] = was
            elif stat.S_ISDIR(now.st_mode):  # it has become one since it was listed
                folders = (*folders, name)
            elif hidden:
                concealed.append((name, now))
            else:
                to_read.append((name, now))
        self._cache.folders[path] = fresh
        self._found.files += len(fresh)
        for name, now in concealed:
            self._exclude(prefix + name, "hidden", before.file(name), stamp_of(now))
        gone = [name for name, now in to_read if not self._file(descriptor, prefix, fresh, name, now, before)]
        if known.get("") != stamp:
            self._cache.note(path, attributes_of(descriptor))
        # Not every filesystem gives a directory another stamp when a name in it comes or goes.
        there = (fresh.keys() | {name for name, _ in (*to_read, *concealed)}).difference(gone)
        self._directory(path, status, before.get(), there, set(folders))
        if is_settled(status, self._clock):
            fresh[""] = stamp
        for name in folders:
            self._below(descriptor, name, prefix + name, before, depth)

    def _directory(
        self, path: str, status: os.stat_result, before: Folder | None, files: Set[str], folders: Set[str]
    ) -> None:
        meta = _meta(status, link=0)
        if before is None or before.meta != meta:
            self._found.changes[path] = Entry("directory", meta)
            self._found.stamps[path] = stamp_of(status)
        if before is None:
            return
        prefix = f"{path}/" if path else ""
        for raw in before.names():
            name = os.fsdecode(raw)
            if name not in files and name not in folders:
                self._found.changes[prefix + name] = None
        for raw in before.directories():
            name = os.fsdecode(raw)
            if name not in folders:
                # A file in its place is a change of its own, unless it is one that was not taken in.
                if name not in files or prefix + name in self._found.excluded:
                    self._found.changes[prefix + name] = None
                self._cache.forget(prefix + name)

    def _below(self, parent: int, name: str, path: str, before: _Before, depth: int) -> None:
        old = before.below(name)
        if self._hides is not None and self._is_hidden_directory(parent, name, path):
            self._exclude(path, "hidden", old.get() or before.file(name), _stamp_at(parent, name))
            return
        if path in self._mounted or depth + 1 >= MAX_DEPTH:
            # What is in a mount could not be brought back by renaming, so no call may change it.
            reason = "mounted" if path in self._mounted else "too deep"
            self._exclude(path, reason, old.get() or before.file(name), _stamp_at(parent, name))
            return
        try:
            descriptor = open_at(name, parent, _DIRECTORY)
        except FileNotFoundError:
            self._gone(path, old.get())
            return
        except OSError as error:
            if error.errno in _OURS:
                raise
            # It may not be read, or became something else just now, which the next scan will find.
            self._exclude(path, "unreadable", old.get() or before.file(name), _stamp_at(parent, name))
            return
        try:
            self._folder(descriptor, path, old, depth + 1)
        except _UnsearchableError:
            changes = self._found.changes
            for known in [known for known in changes if known == path or known.startswith(f"{path}/")]:
                del changes[known]
            self._exclude(path, "unreadable", old.get() or before.file(name), _stamp_at(parent, name))
        finally:
            os.close(descriptor)

    def _is_hidden_directory(self, parent: int, name: str, path: str) -> bool:
        assert self._hides is not None
        try:
            return self._hides(parent, name, path, os.lstat(name, dir_fd=parent))
        except FileNotFoundError:
            return False
        except PermissionError as error:
            raise _UnsearchableError(*error.args) from error

    def _file(
        self,
        parent: int,
        prefix: str,
        fresh: dict[str, Stamp],
        name: str,
        status: os.stat_result,
        before: _Before,
    ) -> bool:
        """Whether it is (still) there. What may be trusted from now on comes into ``fresh``."""
        path, old = prefix + name, before.file(name)
        self._found.files += 1
        if not self._found.files % _TOLD_EVERY or status.st_size >= _TOLD_BYTES:
            self._progress(self._found.files)
        reason = "mounted" if path in self._mounted else self._refused(parent, name, status)
        if reason is None:
            kind, steady, stamp = "file", True, stamp_of(status)
            try:
                once = read_at_once(parent, name, stamp) if stat.S_ISREG(status.st_mode) else None
                if once is None:
                    most = self._limits.max_file_bytes
                    kind, content, attributes, status, steady = read_steadily(parent, name, status, most)
                    stamp = stamp_of(status)
                else:
                    content, attributes = once
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno in _OURS:
                    raise
                reason = "unreadable"
            else:
                self._found.read += 1
                self._cache.note(path, attributes)
                self._found.stamps[path] = stamp
                self._take(
                    path,
                    old,
                    Entry(kind, _meta(status, link=link_number(status, self._device)), self._keep(content)),
                )
                if not steady:
                    self._found.unsettled.append(path)
                elif stamp[3] < self._settled and is_settled(status, self._clock):
                    fresh[name] = stamp
                return True
        self._exclude(path, reason, old, stamp_of(status))
        return True

    def _take(self, path: str, old: Entry | None, new: Entry) -> None:
        if old != new:
            self._found.changes[path] = new
        if new.meta.link or (old is not None and old.meta.link):
            self._links.append((path, old, new))

    def _refused(self, parent: int, name: str, status: os.stat_result) -> Exclusion | None:
        if self._found.files > self._limits.max_files:
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

    def _exclude(self, path: str, reason: Exclusion, old: Entry | Folder | None, stamp: Stamp | None) -> None:
        self._found.excluded[path] = reason
        if stamp is not None:
            self._found.stamps[path] = stamp
        self._gone(path, old)

    def _gone(self, path: str, old: Entry | Folder | None) -> None:
        if old is not None:
            self._found.changes[path] = None
            self._cache.forget(path)

    def _drop_renumbered_links(self) -> None:
        """A group of hard links that was restored has a new number, and is the same group: that is no change.

        Whatever joined or left a group has a new ctime, as all others of the group have: all of them were read.
        """
        became: dict[int, set[int]] = {}
        came: dict[int, set[int]] = {}
        for _, old, new in self._links:
            number = old.meta.link if old is not None else 0
            became.setdefault(number, set()).add(new.meta.link)
            came.setdefault(new.meta.link, set()).add(number)
        for path, old, new in self._links:
            if old is None or not (old.meta.link and new.meta.link) or old.meta.link == new.meta.link:
                continue
            alone = len(became[old.meta.link]) == 1 and len(came[new.meta.link]) == 1
            if alone and old == replace(new, meta=replace(new.meta, link=old.meta.link)):
                del self._found.changes[path]


def _listed(descriptor: int) -> tuple[Sequence[str], Sequence[str]]:
    """The names of the directories in a directory, and all others."""
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(descriptor) as listed:
        for entry in listed:
            try:
                is_folder = entry.is_dir(follow_symlinks=False)
            except PermissionError as error:  # where a filesystem lists no kinds, it is looked at for that
                raise _UnsearchableError(*error.args) from error
            (folders if is_folder else others).append(entry.name)
    return folders, others


def _meta(status: os.stat_result, *, link: int) -> Meta:
    return Meta(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, link)


def _stamp_at(parent: int, name: str) -> Stamp | None:
    try:
        return stamp_of(os.lstat(name, dir_fd=parent))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _UnsearchableError(*error.args) from error
