"""Who has a workspace open: at most one process, and it can be named.

The root itself is locked, and every readable directory above it shared, so that other spellings of the root, other
state directories and workspaces inside of one another collide. Above a linked worktree of git nothing is locked: a
workspace around it leaves it alone. The kernel lets go when the last descriptor is closed, however the process ended.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import PurePath

from ringfence.errors import WorkspaceLockedError
from ringfence.escapes import escape_path
from ringfence_workspace.call_process import CALL_VARIABLE
from ringfence_workspace.handover import released
from ringfence_workspace.tree.kernel import FORKS
from ringfence_workspace.tree.linked_worktrees import is_linked_worktree
from ringfence_workspace.tree.places import not_written, store_of

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

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
            # A descriptor of its own: locks of one open file are shared by all of its descriptors.
            self._take(self._open(".", _OPEN, at=root), fcntl.LOCK_EX, path, store)
            self._take_above(root, path)
            self._take_store(path, store)
        except BaseException:
            self.close()
            raise

    def _take_above(self, root: int, path: str) -> None:
        if is_linked_worktree(root):
            return
        for above in PurePath(path).parents:
            with suppress(OSError):  # what we may not read, we cannot lock
                descriptor = self._open(str(above), _OPEN)
                self._take(descriptor, fcntl.LOCK_SH, str(above))
                if is_linked_worktree(descriptor):
                    return

    def _take_store(self, path: str, store: str) -> None:
        place = os.path.join(store, "holder")
        holder = self._open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._take(holder, fcntl.LOCK_EX, path, store)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        words = f"process {os.getpid()} ({_program()}) on {socket.gethostname()} since {since}"
        try:
            os.ftruncate(holder, os.pwrite(holder, words.encode(), 0))
        except OSError as error:
            raise not_written(error, place) from error

    def _open(self, path: str, flags: int, *, at: int | None = None) -> int:
        with FORKS:
            descriptor = os.open(path, flags, 0o600, dir_fd=at)
            self._descriptors.append(descriptor)
        return descriptor

    def _take(self, descriptor: int, kind: int, path: str, store: str | None = None) -> None:
        for patience in (0, 0.002, 0.02):  # an opener that is just giving up may hold it for a moment
            if patience:  # to sleep for no time at all takes longer than all else here
                time.sleep(patience)
            with suppress(BlockingIOError, PermissionError):
                return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        holder = describe_holder(store or store_of(path))
        raise WorkspaceLockedError(path, holder, is_around=_is_around(holder))

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


def lock_root(root: int, path: str, store: str) -> RootLock:
    """Lock a root. A holder that needs it now and then only hands it over. Raises as `RootLock` does."""
    try:
        return RootLock(root, path, store)
    except WorkspaceLockedError:
        with released(path, store) as is_handed_over:
            if not is_handed_over:
                raise
            return RootLock(root, path, store)


_open_locks: weakref.WeakSet[RootLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_open_locks):
        lock.in_child()


os.register_at_fork(after_in_child=_after_fork)


def describe_holder(store: str | None) -> str:
    """Who holds a lock, in words, by what the holder wrote into its store."""
    if store is not None:
        with suppress(OSError), open(os.path.join(store, "holder"), encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = file.read() or "another process"
                return f"{said}, this very process" if f"process {os.getpid()} " in said else said
            # Nobody has the store, so what is written there is of one who has ended: the root is open with another.
    return "another process"


def _is_around(holder: str) -> bool:
    """Whether this process is a part of a command that the described holder runs, by way of a supervisor."""
    found = re.match(r"process (\d+) ", holder)
    if found is None or CALL_VARIABLE not in os.environ:
        return False
    from ringfence_workspace.supervisor import parent_of

    process, parent = os.getpid(), os.getppid()
    while parent:
        above = parent_of(parent)
        if above == int(found[1]):
            return _call_of(process) not in (None, _call_of(parent))
        process, parent = parent, above
    return False


def _call_of(process: int) -> bytes | None:
    """The call that a process is a part of, by its environment."""
    with suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
        name = f"{CALL_VARIABLE}=".encode()
        return next((one for one in file.read().split(b"\0") if one.startswith(name)), None)
    return None


def _program() -> str:
    """What this process runs: the command of ringfence, or else the name of its program."""
    names = [os.path.basename(word) for word in sys.orig_argv]
    if "ringfence_guard" in names:
        return "`ringfence guard`, which `ringfence guard stop` ends"
    for name, command in itertools.pairwise(names):
        if name in ("ringfence", "ringfence_cli"):
            return f"`ringfence {escape_path(command)}`"
    return escape_path(next(iter(names), "python"))
