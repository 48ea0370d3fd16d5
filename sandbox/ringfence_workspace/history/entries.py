"""What a commit holds of one path: its object id, and as a line what git cannot hold of it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ringfence_workspace.tree.state import State

COMMIT, TREE, BLOB = 1, 2, 3
"""Git's numbers for the types of objects."""
_TYPES = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob"}
OID_BYTES = 20
Kind: TypeAlias = Literal["file", "directory", "symlink"]
_BACKSLASH, _NEWLINE = b"\\\n"
"""As numbers: to ask whether bytes are in bytes takes ten times as long."""


class Meta(NamedTuple):
    """What git does not keep of a path.

    ``mode`` has the permission bits (up to 0o7777). Paths with the same ``link`` number, if it is not 0, are names of
    one file: the number itself says nothing (a scan gives the inode's).
    """

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    link: int = 0

    @classmethod
    def of(cls, found: os.stat_result, link: int = 0) -> Meta:
        return cls(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, link)


class Entry(NamedTuple):
    """One path of a step; ``oid`` is the git object id of a file's bytes, or of a symlink's target, in hex."""

    kind: Kind
    meta: Meta
    oid: str | None = None

    def as_state(self, size: int, inode: int) -> State:
        """As an undo record has it. ``inode`` 0: it is a file that is to be made."""
        meta = self.meta
        return State(self.kind, meta.mode, meta.uid, meta.gid, meta.mtime_ns, size, inode)

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


MOST_NAMED = 10_000
"""Of more, no names are kept, and of nothing that a state does not have can be said that it was not there."""
_TOO_MANY = "too many to name"
_ALL_BELOW = frozenset({"unreadable", "mounted", "linked worktree", "too deep", "hidden"})
"""Reasons why a directory is unknown: with all that is in it, whatever becomes known of itself."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why each path is not known, by path; the reason holds for everything below it. The nearest one above counts: an
    empty one says that the path is known again, below a directory that is not."""

    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of_scan(cls, excluded: Mapping[str, str]) -> Unknown:
        """What a scan has left out, by path, with the reasons."""
        if len(excluded) <= MOST_NAMED:
            return cls(dict(sorted(excluded.items()))) if excluded else NOTHING
        return cls({"": _TOO_MANY})

    def why(self, path: str, *, there: bool = True) -> str | None:
        """Why a path is not known, None if it is. ``there``: the commit has a state of it."""
        reasons = self.reasons
        if not reasons:
            return None
        for at in _up(path):
            if at in reasons:
                return reasons[at] or None
        return None if there else reasons.get("")

    def knowing(self, kinds: Mapping[str, str | None]) -> Unknown:
        """After these paths were found to be of these kinds, or (None) not to be there, with all that is below."""
        if not self.reasons:
            return NOTHING
        gone = {path for path, kind in kinds.items() if kind is None}
        reasons = {
            path: reason
            for path, reason in self.reasons.items()
            if not (path in kinds and not (kinds[path] == "directory" and reason in _ALL_BELOW))
            and gone.isdisjoint(_up(path))
        }
        left = Unknown(reasons)
        reasons |= {path: "" for path, kind in kinds.items() if kind != "directory" and left.why(path) is not None}
        return Unknown(reasons)

    def new_since(self, before: Unknown) -> Iterator[str]:
        """The paths that this has to say of, and that were known before."""
        return (path for path, reason in self.reasons.items() if path and reason and before.why(path) is None)

    def to_bytes(self) -> bytes:
        return json.dumps({"unknown": dict(sorted(self.reasons.items()))}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Unknown:
        return cls(json.loads(data)["unknown"])


NOTHING = Unknown()


def _up(path: str) -> Iterator[str]:
    """A path and those that it is in, but not the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
