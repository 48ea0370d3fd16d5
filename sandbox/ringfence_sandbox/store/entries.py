"""What a commit holds of one path: its object id, and as a line what git cannot hold of it."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

COMMIT, TREE, BLOB = 1, 2, 3
"""Git's numbers for the types of objects."""
_TYPES = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob"}
OID_BYTES = 20
Kind: TypeAlias = Literal["file", "directory", "symlink"]
_BACKSLASH, _NEWLINE = b"\\\n"
"""As numbers: to ask whether bytes are in bytes takes ten times as long."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What git does not keep of a path.

    ``mode`` has the permission bits (up to 0o7777). Paths with the same ``link`` number, if it is not 0, are names of
    one file: the number itself says nothing (a scan gives the inode's).
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    link: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a step; ``oid`` is the git object id of a file's bytes, or of a symlink's target, in hex."""

    kind: Kind
    meta: Meta
    oid: str | None = None

    def same_content(self, other: Entry | None) -> bool:
        """Whether kind, bytes and permissions are the same; times, owners and links may differ."""
        return (
            other is not None
            and (self.kind, self.oid) == (other.kind, other.oid)
            and (self.kind == "symlink" or self.meta.mode == other.meta.mode)
        )


class Difference(NamedTuple):
    """A path whose states differ between two trees; None where it is not there."""

    path: str
    before: Entry | None
    after: Entry | None

    @property
    def changes_content(self) -> bool:
        """Whether kind, bytes or permissions differ, and not only times, owners or links."""
        return self.before is None or not self.before.same_content(self.after)


def is_directory(state: Entry | None) -> bool:
    return state is not None and state.kind == "directory"


def link_number(found: os.stat_result, device: int) -> int:
    """What the names of one file have in common, in a tree whose root is on a device; 0 for what has one name. In a
    subvolume inodes are numbered anew."""
    if found.st_nlink == 1 or stat.S_ISDIR(found.st_mode):
        return 0
    return found.st_ino if found.st_dev == device else found.st_dev << 64 | found.st_ino


def encode_line(name: bytes, meta: Meta) -> bytes:
    """One line for a path; ``name`` is its true name in its directory, "." the directory itself."""
    if _BACKSLASH in name or _NEWLINE in name:
        name = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
    return b"%o %d %d %d %d %b\n" % (meta.mode, meta.uid, meta.gid, meta.mtime_ns, meta.link, name)


def decode_line(line: bytes) -> tuple[bytes, Meta]:
    """One of these lines, without its end."""
    mode, uid, gid, mtime, link, name = line.split(b" ", 5)
    if _BACKSLASH in name:
        parts = name.split(b"\\\\")
        name = b"\\".join(part.replace(b"\\n", b"\n") for part in parts)
    return name, Meta(int(mode, 8), int(uid), int(gid), int(mtime), int(link))


def object_id(type_number: int, raw: bytes) -> bytes:
    """Git's id of an object."""
    digest = hashlib.sha1(b"%b %d\0" % (_TYPES[type_number], len(raw)), usedforsecurity=False)
    digest.update(raw)
    return digest.digest()


def blob_id(content: bytes) -> str:
    """Git's id of the bytes of a file, in hex."""
    return object_id(BLOB, content).hex()
