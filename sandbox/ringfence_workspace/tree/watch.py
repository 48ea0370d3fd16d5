"""Which names of a tree have had an event: inotify, with one watch a directory.

A watch says where to look, and never what is there. The kernel has queued the event of a change when the system call
that made it returns; of a shared mapping, when the mapping goes. So what is read of the queue behind an event of our
own is all that happened before that.

Inotify names the directory through which a file was reached. That leaves changes of which no event tells, and each of
them is a doubt: what a new directory had in it before it was watched may have been another name of any file of the
tree, and so may a file that came and went.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from ringfence_workspace.tree.kernel import libc, raised

_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF = 0x400, 0x800
_UNMOUNT, _OVERFLOW, _IGNORED = 0x2000, 0x4000, 0x8000
_ONLY_DIRECTORY, _IS_DIRECTORY = 0x01000000, 0x40000000
_TOUCHES = _MODIFY | _ATTRIB | _CLOSE_WRITE
_MOVES = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_MASK = _TOUCHES | _MOVES | _DELETE_SELF | _MOVE_SELF | _ONLY_DIRECTORY
_EVENT = struct.Struct("=iIII")
_READ_BYTES, _MOST_READS = 1 << 18, 64
"""Of a queue that goes on growing while it is read, the end is not waited for."""
_USER_WATCHES = "/proc/sys/fs/inotify/max_user_watches"
MORE_WATCHES = "sysctl fs.inotify.max_user_watches=524288"
"""What gives every user more watches."""
REPORTING = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0x01021994,  # tmpfs
        0xF2F52010,  # f2fs
        0x2FC12FC1,  # zfs
        0xCA451A4E,  # bcachefs
    }
)
"""The filesystems that only this kernel changes, and that tell of all that it does. Not among them are those of a
network, FUSE, and overlays, the lower layers of which tell of nothing."""

Name: TypeAlias = tuple[str, str]
"""The path of a directory, and a name in it. An empty one is the directory itself."""


@dataclass(slots=True)
class Events:
    """What has had events since the last time: ``names`` by the path of their directory.

    ``strangers`` are names that were written to and had not come there since the last time. One that nobody knew
    before is the former name of a file that a program has open still, and that file may have any name now.
    """

    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    strangers: set[Name] = field(default_factory=set[Name])


def most_watches() -> int:
    """Half of the watches that this user may have: the others are for other programs. 0 without inotify."""
    try:
        with open(_USER_WATCHES, encoding="ascii") as file:
            return int(file.read()) // 2
    except (OSError, ValueError):
        return 0


_free = threading.Lock()
"""A process has one instance of inotify at most: a user has 128 of them, for all programs."""


class Watch:
    """The watches of one tree.

    A scan of the whole tree sets them between `begin` and `end`: each directory is watched (`enter`) before it is
    listed. So a change is seen by the scan, or has an event, or both.
    """

    def __init__(self, cookie: str, is_reserved: Callable[[str], bool], *, most: int) -> None:
        """``cookie`` is the path of a file outside of the tree, made here, the times of which are set to have an event.
        ``is_reserved`` tells the names in the root that are none of the tree's, and ``most`` bounds the watches.

        Raises:
            OSError: there is no inotify, no instance of it is left, the process has one already, or the cookie cannot
                be made.
        """
        self._is_reserved = is_reserved
        self._most = most
        self.failure: OSError | None = None
        """Why a directory could not be watched, or a queue be read: nothing is watched then."""
        self.doubt = ""
        """Why `drain` gave nothing, the last time that it did."""
        self._paths: dict[int, str] = {}
        """By watch, the path of its directory."""
        self._round: dict[int, str] | None = None
        """The same of the round that runs."""
        self._guarded: set[int] = set()
        """The watches of holds."""
        if not _free.acquire(blocking=False):
            raise OSError(errno.EBUSY, "this process watches another workspace")
        descriptors: list[int] = []
        self._finalizer = weakref.finalize(self, _close, descriptors, _free)
        try:
            instance: int = libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if instance < 0:
                raise raised("inotify")
            descriptors.append(instance)
            self._instance = instance
            self._cookie = os.open(cookie, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            descriptors.append(self._cookie)
            self._cookie_watch = self._add(self._cookie, _ATTRIB)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Watch nothing any more. Once is enough."""
        self._finalizer()

    def __len__(self) -> int:
        """How many directories are watched."""
        return len(self._paths)

    def begin(self) -> None:
        """A scan of the whole tree begins: what has happened until now is nothing that it would not see."""
        self.drain(calling=False)
        self._round = {}

    def enter(self, descriptor: int, path: str) -> None:
        """Watch an open directory, which is listed after that."""
        watched = self._paths if self._round is None else self._round
        if self.failure is not None:
            return
        try:
            if len(watched) >= self._most:
                raise OSError(errno.ENOSPC, "more directories than half of the watches of a user", path)
            watched[self._add(descriptor, _MASK)] = path
        except OSError as error:
            self.failure = error

    def end(self) -> None:
        """The scan of the whole tree is done: what it did not enter is watched no more."""
        assert self._round is not None, "it has begun"
        for watch in self._paths.keys() - self._round.keys() - self._guarded:
            libc().inotify_rm_watch(self._instance, watch)  # what is gone has lost its own
        self._paths, self._round = self._round, None

    def guard(self, descriptor: int) -> None:
        """Watch an open directory that only this process uses, for whatever a call of programs does there."""
        try:
            self._guarded.add(self._add(descriptor, _MASK))
        except OSError as error:
            self.failure = error

    def _add(self, descriptor: int, mask: int) -> int:
        watch: int = libc().inotify_add_watch(self._instance, b"/proc/self/fd/%d" % descriptor, ctypes.c_uint32(mask))
        if watch < 0:
            raise raised("inotify")
        return watch

    def drain(self, *, calling: bool) -> Events | None:
        """Take all events of what happened until now. None: only a scan of the whole tree can tell what did.

        ``calling`` says that programs may have been in the hold.
        """
        batch = _EventBatch(self._paths, self._guarded, self._is_reserved, calling)
        seen, is_read = False, False
        try:
            os.utime(self._cookie)
            for _ in range(_MOST_READS):
                seen |= self._take(os.read(self._instance, _READ_BYTES), batch)
        except BlockingIOError:
            is_read = seen
        except OSError as error:
            self.failure = error
        self.doubt = batch.doubt() or ("" if is_read else "the queue was not read to its end")
        return None if self.doubt or self.failure is not None else batch.events

    def _take(self, events: bytes, batch: _EventBatch) -> bool:
        """Have the batch take what was read. Whether the cookie is among it."""
        seen, at = False, 0
        while at < len(events):
            watch, mask, cookie, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            if watch == self._cookie_watch:
                seen = True
            else:
                batch.take(watch, mask, cookie, os.fsdecode(events[at - length : at].rstrip(b"\0")))
        return seen


class _EventBatch:
    """What the events of one time come to."""

    def __init__(
        self, paths: dict[int, str], guarded: set[int], is_reserved: Callable[[str], bool], calling: bool
    ) -> None:
        self.events = Events()
        self._paths = paths
        self._guarded = guarded
        self._is_reserved = is_reserved
        self._calling = calling
        self._doubt = ""
        self._born: set[Name] = set()
        """What has come there, and was not in the tree before: it may be another name of a file of the tree."""
        self._came: set[Name] = set()
        self._lost: set[Name] = set()
        """What was born, and is not there any more."""
        self._touched: set[Name] = set()
        self._moving: dict[int, tuple[Name, bool]] = {}
        """By the number of a rename, the old name, and whether what had it was born."""

    def doubt(self) -> str:
        """Why only a scan can tell. Empty: the events do."""
        lost = self._lost | {name for name, was_born in self._moving.values() if was_born}
        if not self._doubt and not lost.isdisjoint(self._touched):
            return "a file came, was written and went"
        return self._doubt

    def take(self, watch: int, mask: int, cookie: int, name: str) -> None:
        path = self._paths.get(watch)
        if mask & (_OVERFLOW | _UNMOUNT):
            self._doubt = "the queue ran over" if mask & _OVERFLOW else "the filesystem was unmounted"
        elif watch in self._guarded:
            if mask & _IGNORED:
                self._guarded.discard(watch)
            if self._calling:
                self._doubt = "something happened in the hold"
        elif path is not None:
            self._take(path, mask, cookie, name)

    def _take(self, path: str, mask: int, cookie: int, name: str) -> None:
        if not path and name and self._is_reserved(name):
            if self._calling and mask & _MOVES:
                self._doubt = "the hold came or went"
            return
        if mask & (_DELETE_SELF | _MOVE_SELF | _IGNORED) or (mask & _IS_DIRECTORY and mask & _MOVES):
            self._doubt = "a directory came, went or moved"
            return
        self.events.names.setdefault(path, set()).add("" if mask & _IS_DIRECTORY else name)
        if mask & _IS_DIRECTORY:  # itself: it is watched, and has had the same event under no name
            return
        key = (path, name)
        if mask & _TOUCHES:
            self._touched.add(key)
            if key not in self._came:
                self.events.strangers.add(key)
        if mask & (_MOVED_FROM | _DELETE | _CREATE | _MOVED_TO):
            self._move(key, mask, cookie)

    def _move(self, key: Name, mask: int, cookie: int) -> None:
        was_born = key in self._born
        self._born.discard(key)
        if mask & _MOVED_FROM:
            self._moving[cookie] = key, was_born
            return
        if was_born:
            self._lost.add(key)
        if mask & _DELETE:
            return
        self._came.add(key)
        old, is_born = self._moving.pop(cookie, (None, True)) if mask & _MOVED_TO else (None, True)
        if is_born:
            self._born.add(key)
        if old in self._touched:
            self._touched.add(key)


def _close(descriptors: list[int], free: threading.Lock) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
    free.release()


def _after_fork() -> None:
    global _free  # noqa: PLW0603
    _free = threading.Lock()  # the child watches nothing


os.register_at_fork(after_in_child=_after_fork)
