"""Who has a workspace open: at most one process, and it can be named.

The root itself is locked, and every readable directory above it shared, so that other spellings of the root, other
state directories and workspaces inside of one another collide. The kernel lets go when the last descriptor is closed,
however the process ended.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from ringfence.errors import WorkspaceLockedError
from ringfence.filesystem.paths import escape_path
from ringfence_sandbox.disk.forks import FORKS
from ringfence_sandbox.disk.state_files import not_written

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})


_LOCAL_LOCKS = {
    0x6969: "NFS",
    0x01021997: "9p",
    0x65735546: "FUSE or virtiofs",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
}
"""Kinds of filesystems where what one host locks another one may not see, by the number that `statfs` gives."""


def check_locks(root: int, path: str, store: str, filesystem_type: Callable[[int], int]) -> None:
    """Raises OSError (ENOLCK) where another host could have the workspace open and nobody would see it."""
    there = os.open(store, _OPEN)
    try:
        kinds = {path: filesystem_type(root), store: filesystem_type(there)}
    finally:
        os.close(there)
    for place, kind in kinds.items():
        if kind in _LOCAL_LOCKS:
            raise OSError(
                errno.ENOLCK,
                f"is on {_LOCAL_LOCKS[kind]}, where other hosts may not see our locks: if no other host opens this "
                "workspace, say so with RINGFENCE_ONLY_THIS_HOST=1 in the environment (a program: only_this_host=True)",
                place,
            )


class RootLock:
    """The lock of one opened workspace, from construction to `close`."""

    def __init__(self, root: int, path: str, store: str) -> None:
        """``root`` describes the root, whose real path is ``path``.

        Raises:
            WorkspaceLockedError: another opener has it, or a directory above or below; it is named.
        """
        self._descriptors: list[int] = []
        self._owner = os.getpid()
        self.forked = False
        _open_locks.add(self)
        try:
            self._take_root(root, path, store)
            self._take_above(path)
            self._take_store(path, store)
        except BaseException:
            self.close()
            raise

    def _take_root(self, root: int, path: str, store: str) -> None:
        # A descriptor of its own: locks of one open file are shared by all of its descriptors.
        self._take(self._open(".", _OPEN, at=root), fcntl.LOCK_EX, path, store)

    def _take_above(self, path: str) -> None:
        names = path.split("/")[1:-1] if path != "/" else []
        for depth in range(len(names), -1 if path != "/" else 0, -1):
            above = "/" + "/".join(names[:depth])
            try:
                descriptor = self._open(above, _OPEN)
            except OSError:  # what we may not read, we cannot lock
                continue
            self._take(descriptor, fcntl.LOCK_SH, above, None)

    def _take_store(self, path: str, store: str) -> None:
        place = os.path.join(store, "holder")
        holder = self._open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._take(holder, fcntl.LOCK_EX, path, store)
        said = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "root": path,
        }
        try:
            os.ftruncate(holder, os.pwrite(holder, json.dumps(said).encode(), 0))
        except OSError as error:
            raise not_written(error, place) from error

    def _open(self, path: str, flags: int, *, at: int | None = None) -> int:
        with FORKS:
            descriptor = os.open(path, flags, 0o600, dir_fd=at)
            self._descriptors.append(descriptor)
        return descriptor

    def _take(self, descriptor: int, kind: int, path: str, store: str | None) -> None:
        for patience in (0, 0.002, 0.02):  # an opener that is just giving up may hold it for a moment
            if patience:
                time.sleep(patience)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _BUSY:
                    raise
            else:
                return
        raise WorkspaceLockedError(path, describe_holder(store))

    def close(self) -> None:
        with FORKS:
            _open_locks.discard(self)
            while self._descriptors:
                descriptor = self._descriptors.pop()
                if os.getpid() == self._owner:  # a child of this moment may not have come to close its copy
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def in_child(self) -> None:
        """In a forked child: let go of the copies, so that the lock ends with the parent."""
        self.forked = True
        self.close()


_open_locks: weakref.WeakSet[RootLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_open_locks):
        lock.in_child()


os.register_at_fork(after_in_child=_after_fork)


def describe_holder(store: str | None) -> str:
    """Who holds a lock, in words, by what the holder wrote into its store."""
    if store is not None:
        with suppress(OSError, ValueError, KeyError, TypeError), open(os.path.join(store, "holder")) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = json.load(file)
            else:  # nobody has the store, so its file is of one who has ended, and the root is open with another store
                return "another process"
            program = _program(said["pid"]) if said["host"] == socket.gethostname() else ""
            return f"process {said['pid']}{program} on {said['host']} since {said['since']}"
    return "another process"


def _program(pid: int) -> str:
    """What a process of this host runs: the command of ringfence, or else the name of its program."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="surrogateescape") as file:
        names = [os.path.basename(word) for word in file.read().split("\0")]
        for name, command in itertools.pairwise(names):
            if name in ("ringfence", "ringfence_cli"):
                return f" (`ringfence {escape_path(command)}`)"
        return f" ({escape_path(names[0])})"
    return ""
