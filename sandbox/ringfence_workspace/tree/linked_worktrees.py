"""Linked worktrees of git in a tree: each is a workspace of its own, which no workspace around it covers."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from ringfence.filesystem.paths import directories_above

GIT = ".git"
LINKED_WORKTREE = "linked worktree"
"""Why a scan leaves one out."""
_MAX_DEPTH = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_BYTES = 1 << 13
_LINK = re.compile(rb"gitdir: (?:.*/)?[^/]*\.(?:git|bare)/worktrees/[^/]+/?\s*\Z", re.DOTALL)
"""What git writes there. A submodule's leads to ``.git/modules``."""


def is_linked_worktree(directory: int | None, path: str = "") -> bool:
    """Whether what is at a path below an open directory, by default itself, is a linked worktree. None: the path is one
    of the host."""
    name = f"{path}/{GIT}" if path else GIT
    if not os.access(name, os.F_OK, dir_fd=directory, follow_symlinks=False):  # on the way of every file: no exception
        return False
    try:
        descriptor = os.open(name, _FILE, dir_fd=directory)
    except OSError:
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            return False
        return _LINK.match(os.read(descriptor, _MAX_BYTES)) is not None
    except OSError:
        return False
    finally:
        os.close(descriptor)


def is_open_workspace(directory: int) -> bool:
    """Whether somebody has the open directory, or one in it, open as a workspace: then it is locked."""
    with suppress(OSError):
        descriptor = os.open(".", _DIRECTORY, dir_fd=directory)  # a lock belongs to who opened it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of this moment has a copy
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def check_outside(root: int, path: str, *, is_directory: bool = False) -> None:
    """Raise PermissionError if a resolved path below ``root`` lies in a linked worktree, or is one."""
    for place in (path, *directories_above(path)) if is_directory and path else directories_above(path):
        if is_linked_worktree(root, place):
            raise _separate(place)


def check_none_below(root: int, path: str) -> None:
    """Raise PermissionError if a directory has a linked worktree in it, which would go along with it."""
    for place in _worktrees_below(root, path):
        raise _separate(place)


def _worktrees_below(root: int, path: str) -> Iterator[str]:
    with suppress(FileNotFoundError):
        top = os.open(path, _DIRECTORY, dir_fd=root)
        try:
            for place, folders, files, at in os.fwalk(".", dir_fd=top):
                if GIT in files and is_linked_worktree(at):
                    yield os.path.normpath(os.path.join(path, place))
                if place.count("/") >= _MAX_DEPTH:  # it is walked by recursion; no scan goes deeper either
                    folders.clear()
        finally:
            os.close(top)


def _separate(place: str) -> PermissionError:
    words = "is a linked worktree of git, and a workspace of its own: open that directory to change what is in it"
    return PermissionError(errno.EACCES, words, place)
