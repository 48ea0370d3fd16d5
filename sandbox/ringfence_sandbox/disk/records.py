"""What is done to a tree on disk, one change at a time: each can be written down before it is made, and undone."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Literal, TypeAlias

Json: TypeAlias = str | int | float | bool | list["Json"] | dict[str, "Json"] | None

_REGULAR, _DIRECTORY = oct(stat.S_IFREG), oct(stat.S_IFDIR)

Kind = Literal["put", "take", "swap", "move", "mkdir", "rmdir", "mode", "times", "opaque"]
"""put: what is held gets a name. take: what has the name is held. swap: both at once. times: of a directory, noted
before the first change in it; nothing is done but at the undoing. opaque: from here on the tree changes unseen, and
``commit`` has it as it was."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Enough of a file, link or directory to know it again: a directory by its inode, a file by its content too."""

    kind: str
    """The file type bits of its mode, in octal."""
    inode: int
    size: int = 0
    mtime_ns: int = 0
    sha256: str | None = None
    """Of a file that was written here."""

    @classmethod
    def of(cls, found: os.stat_result, sha256: str | None = None) -> Identity:
        mode = found.st_mode
        if stat.S_ISREG(mode):
            return Identity(_REGULAR, found.st_ino, found.st_size, found.st_mtime_ns, sha256)
        kind = oct(stat.S_IFMT(mode))
        if stat.S_ISDIR(mode):
            return cls(kind, found.st_ino)
        return cls(kind, found.st_ino, found.st_size, found.st_mtime_ns, sha256)

    @property
    def is_directory(self) -> bool:
        return self.kind == _DIRECTORY

    def fits(self, found: os.stat_result | None) -> bool:
        if found is None:
            return False
        if self.kind != _REGULAR:
            return Identity.of(found, self.sha256) == self
        return (
            found.st_ino == self.inode
            and found.st_mtime_ns == self.mtime_ns
            and found.st_size == self.size
            and stat.S_ISREG(found.st_mode)
        )

    def to_json(self) -> str:
        """As JSON text."""
        sha256 = "null" if self.sha256 is None else encode_basestring_ascii(self.sha256)
        return f"[{encode_basestring_ascii(self.kind)},{self.inode},{self.size},{self.mtime_ns},{sha256}]"

    @classmethod
    def from_json(cls, value: object) -> Identity | None:
        match value:
            case [str(kind), int(inode), int(size), int(mtime_ns), (str() | None) as sha256]:
                return cls(kind, inode, size, mtime_ns, sha256)
            case _:
                return None


@dataclass(slots=True)
class Deed:
    """One change to the tree. ``seq`` numbers the deeds within a journal."""

    kind: Kind
    path: str
    to: str = ""
    """Where a move leads."""
    slot: int = -1
    """The number under which something is held."""
    new: Identity | None = None
    """What a put or a swap gives the path; what a take, a move, new permission bits or times are about."""
    old: Identity | None = None
    """What a swap takes from the path."""
    mode: int = 0
    """The permission bits that it gives. Of a put or a take: of a directory that may be made anew, with these."""
    mode_before: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    seq: int = -1
    commit: str = ""

    def become(self, others: Mapping[int, int]) -> None:
        """Know files and directories again whose inodes had to become others."""
        if self.new is not None and self.new.inode in others:
            self.new = replace(self.new, inode=others[self.new.inode])
        if self.old is not None and self.old.inode in others:
            self.old = replace(self.old, inode=others[self.old.inode])

    def inverse(self) -> Deed:
        """The deed that takes this one back, as a deed of its own."""
        match self.kind:
            case "put":
                return Deed("take", self.path, slot=self.slot, new=self.new, mode=self.mode)
            case "take":
                return Deed("put", self.path, slot=self.slot, new=self.new, mode=self.mode)
            case "swap":
                return Deed("swap", self.path, slot=self.slot, new=self.old, old=self.new)
            case "move":
                return Deed("move", self.to, to=self.path, new=self.new)
            case "mkdir":
                return Deed("rmdir", self.path, new=self.new, mode=self.mode)
            case "rmdir":
                return Deed("mkdir", self.path, new=self.new, mode=self.mode)
            case "mode":
                return Deed("mode", self.path, new=self.new, mode=self.mode_before, mode_before=self.mode)
            case "times" | "opaque":
                return self

    def places(self) -> tuple[str, ...]:
        """The paths whose directories change with it."""
        if self.kind in ("mode", "times", "opaque"):
            return ()
        return (self.path, self.to) if self.kind == "move" else (self.path,)

    def to_json(self) -> str:
        """As JSON text, put together by hand: there are one or two of them for every file of a call."""
        text = f'{{"do":"{self.kind}","seq":{self.seq},"path":{encode_basestring_ascii(self.path)}'
        if self.to:
            text += f',"to":{encode_basestring_ascii(self.to)}'
        if self.mode or self.mode_before:
            text += f',"mode":{self.mode},"mode_before":{self.mode_before}'
        if self.atime_ns or self.mtime_ns:
            text += f',"atime_ns":{self.atime_ns},"mtime_ns":{self.mtime_ns}'
        if self.commit:
            text += f',"commit":{encode_basestring_ascii(self.commit)}'
        if self.slot != -1:
            text += f',"slot":{self.slot}'
        if self.new is not None:
            text += f',"new":{self.new.to_json()}'
        if self.old is not None:
            text += f',"old":{self.old.to_json()}'
        return f"{text}}}"

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> Deed:
        """The deed that `to_json` wrote, by its values. KeyError or ValueError for anything else."""
        kind = record["do"]
        if kind not in ("put", "take", "swap", "move", "mkdir", "rmdir", "mode", "times", "opaque"):
            raise ValueError(f"no kind of change: {kind!r}")
        return cls(
            kind,
            _text(record, "path"),
            _text(record, "to"),
            _number(record, "slot", -1),
            Identity.from_json(record.get("new")),
            Identity.from_json(record.get("old")),
            _number(record, "mode", 0),
            _number(record, "mode_before", 0),
            _number(record, "atime_ns", 0),
            _number(record, "mtime_ns", 0),
            _number(record, "seq", -1),
            _text(record, "commit"),
        )


def undone_json(deeds: Sequence[Deed], conflict: str | None = None) -> str:
    """What says of deeds that they were taken back, as JSON text; of one that was not, at which path somebody else's
    was in the way."""
    seqs = ",".join([str(deed.seq) for deed in deeds])
    met = "" if conflict is None else f',"conflict":{encode_basestring_ascii(conflict)}'
    return f'{{"undone":{seqs if len(deeds) == 1 else f"[{seqs}]"}{met}}}'


def _text(record: Mapping[str, object], name: str) -> str:
    value = record.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is a text, not {value!r}")
    return value


def _number(record: Mapping[str, object], name: str, default: int) -> int:
    value = record.get(name, default)
    if not isinstance(value, int):
        raise ValueError(f"{name} is a number, not {value!r}")
    return value
