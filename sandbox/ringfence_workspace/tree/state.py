"""What is at a path: the type that undo records, scans of a call and comparisons use."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, cast

Json: TypeAlias = str | int | float | bool | list["Json"] | dict[str, "Json"] | None
Kind = Literal["file", "directory", "symlink", "special"]

_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def kind_of(mode: int) -> Kind:
    """The kind that a mode says, as `os.lstat` gives it."""
    return _KINDS.get(stat.S_IFMT(mode), "special")


def is_unchanged(found: os.stat_result, there: os.stat_result | None) -> bool:
    """Whether what is ``there`` is the very inode that was found, and nobody wrote into it since. The entries of a
    directory do not count."""
    if there is None or (there.st_ino, stat.S_IFMT(there.st_mode)) != (found.st_ino, stat.S_IFMT(found.st_mode)):
        return False
    return stat.S_ISDIR(found.st_mode) or (there.st_mtime_ns, there.st_size) == (found.st_mtime_ns, found.st_size)


class State(NamedTuple):
    """A file, directory, symlink or special file. ``mode`` has the permission bits; sizes are bytes.

    ``inode`` says where the very thing may still be. ``sha256`` is of a file's content, where that is known.
    """

    kind: Kind
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    inode: int
    sha256: str | None = None

    @classmethod
    def of(cls, found: os.stat_result, sha256: str | None = None) -> State:
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "special")
        mode = stat.S_IMODE(found.st_mode)
        mtime_ns, size = found.st_mtime_ns, 0 if kind == "directory" else found.st_size
        return cls(kind, mode, found.st_uid, found.st_gid, mtime_ns, size, found.st_ino, sha256)

    @property
    def is_directory(self) -> bool:
        return self.kind == "directory"

    def fits(self, found: os.stat_result | None) -> bool:
        """Whether `found` is the very inode, and nobody wrote into it since. Entries of a directory do not count."""
        if found is None or found.st_ino != self.inode:
            return False
        if kind_of(found.st_mode) != self.kind:
            return False
        return self.kind == "directory" or (found.st_mtime_ns, found.st_size) == (self.mtime_ns, self.size)

    def same_content(self, content: Callable[[], str | None]) -> bool:
        """Whether a file has the content of this one; ``content`` gives the sha256 of what it has."""
        return self.sha256 is not None and content() == self.sha256

    def to_json(self) -> Json:
        return [*self]

    @classmethod
    def from_json(cls, value: object) -> State | None:
        if value is None:
            return None
        kind, mode, uid, gid, mtime_ns, size, inode, sha256 = cast(
            "tuple[Kind, int, int, int, int, int, int, str | None]", value
        )
        return cls(kind, mode, uid, gid, mtime_ns, size, inode, sha256)
