"""A host directory, printed from `os.lstat` alone, to be compared byte for byte with what it was;
and `tree_of` for one that is not on disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from ringfence.testing.looking import tree_of
from ringfence_sandbox import is_reserved

__all__ = ["CapturedPath", "capture_tree", "lasting", "names_in", "shape", "tree_of"]


@dataclass(frozen=True, slots=True)
class CapturedPath:
    """One path. ``content`` is the sha256 of a file's bytes, or a link's target; ``links`` has the other names of the
    same inode below the root."""

    kind: str
    mode: int
    size: int
    mtime_ns: int
    inode: int
    owner: tuple[int, int]
    content: str
    links: tuple[str, ...] = ()

    @property
    def lasting(self) -> tuple[object, ...]:
        """What two runs of the same changes have in common."""
        return self.kind, self.mode, self.size, self.owner, self.content


def capture_tree(root: Path, *, held: bool = False) -> dict[str, CapturedPath]:
    """Every path below `root`, and the root itself as ""; names that are not UTF-8 have surrogate escapes.

    While a workspace is open there, what it holds is no part of the tree, unless it is asked for."""
    top = os.fsencode(root)
    hides = not held and _is_open(top)
    found: dict[bytes, os.stat_result] = {b"": os.lstat(top)}
    waiting = [b""]
    while waiting:
        above = waiting.pop()
        for name in os.listdir(os.path.join(top, above)):
            if hides and not above and is_reserved(os.fsdecode(name)):
                continue
            path = os.path.join(above, name)
            found[path] = os.lstat(os.path.join(top, path))
            if stat.S_ISDIR(found[path].st_mode):
                waiting.append(path)
    names: dict[int, list[str]] = {}
    for path, one in found.items():
        names.setdefault(one.st_ino, []).append(os.fsdecode(path))
    return {
        os.fsdecode(path): CapturedPath(
            kind=oct(stat.S_IFMT(one.st_mode)),
            mode=stat.S_IMODE(one.st_mode),
            size=0 if stat.S_ISDIR(one.st_mode) else one.st_size,
            mtime_ns=one.st_mtime_ns,
            inode=one.st_ino,
            owner=(one.st_uid, one.st_gid),
            content=_content(os.path.join(top, path), one),
            links=tuple(sorted(names[one.st_ino])),
        )
        for path, one in found.items()
    }


def names_in(root: Path) -> list[str]:
    """What is in a root besides the hold of an open workspace, sorted."""
    return sorted(name for name in os.listdir(root) if not is_reserved(name))


def _is_open(root: bytes) -> bool:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _content(path: bytes, found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return os.fsdecode(os.readlink(path))
    if not stat.S_ISREG(found.st_mode):
        return ""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lasting(tree: dict[str, CapturedPath]) -> dict[str, tuple[object, ...]]:
    """`tree` without what differs between two runs of the same changes: times and inodes."""
    return {path: one.lasting for path, one in tree.items()}


def shape(root: Path) -> dict[str, CapturedPath]:
    """All that a rollback brings back of what a program changed; which inode it is, is no part of that."""
    return {path: replace(one, inode=0) for path, one in capture_tree(root).items()}
