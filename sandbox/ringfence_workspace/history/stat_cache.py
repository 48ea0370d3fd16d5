"""What a scan knew of every file, so that the next one need not read it.

An entry says: when the file's inode, size, mtime and ctime were these, the newest step held it just so. The kernel
changes the ctime at every change, and nobody can set it; but its clock moves in ticks, and a file can change twice in
one. So an entry is only made for a file that had been left alone for longer than a tick when it was looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from ringfence_workspace.history.entries import Entry
from ringfence_workspace.tree.extended_attributes import Attributes
from ringfence_workspace.tree.places import replacing
from ringfence_workspace.tree.state import Json

_VERSION = b"ringfence stat cache 3\n"
FINE_TICK_NS = 20_000_000
COARSE_TICK_NS = 2_000_000_000

Stamp: TypeAlias = tuple[int, int, int, int]
"""Inode, size, mtime and ctime in nanoseconds."""


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_settled(status: os.stat_result, clock_ns: int) -> bool:
    """Whether a later change would show, if the filesystem's clock was `clock_ns` when the file was looked at."""
    # A clock without anything below a hundredth of a second is one of whole seconds, or of two.
    tick = COARSE_TICK_NS if status.st_ctime_ns % 10_000_000 == 0 else FINE_TICK_NS
    return status.st_ctime_ns < clock_ns - tick


def attributes_json(found: Mapping[str, Attributes]) -> dict[str, Json]:
    """Extended attributes by path, for JSON."""
    return {path: {name: value.hex() for name, value in one.items()} for path, one in found.items()}


def attributes_from_json(value: object) -> dict[str, Attributes]:
    """What `attributes_json` gave."""
    found = cast("dict[str, dict[str, str]]", value)
    return {path: {name: bytes.fromhex(text) for name, text in one.items()} for path, one in found.items()}


@dataclass(slots=True)
class StatCache:
    """Stamps by directory and name ("" is the directory itself); ``commit`` is the step whose state they stand for.
    ``attributes`` has those of all that have any and a stamp, by path.

    Whoever publishes a step moves it on: `forget` every path of the step, then set ``commit``.

    A scan of the whole tree leaves it ``complete``: what is not among the ``unsure`` names was then as ``commit`` has
    it. From then on each name that may be another is to be added to these, and a scan need only look at them.
    """

    commit: str | None = None
    folders: dict[str, dict[str, Stamp]] = field(default_factory=dict[str, dict[str, Stamp]])
    attributes: dict[str, Attributes] = field(default_factory=dict[str, Attributes])
    complete: bool = False
    unsure: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By directory, the names of which the next scan has to see what is there; "" is the directory itself."""
    linked: set[int] = field(default_factory=set[int])
    """The inodes of files of more than one name, all of which in the tree are unsure: they may change by another."""
    files: int = 0
    """About how many there are, and no fewer."""
    _own: set[str] = field(default_factory=set[str])
    """The directories of which `snapshot` has not given the names to anybody."""

    def snapshot(self) -> Mapping[str, Mapping[str, Stamp]]:
        """The stamps as they are now. What becomes known later changes nothing of it."""
        self._own = set()
        return self.folders.copy()

    def names(self, folder: str) -> dict[str, Stamp] | None:
        """The stamps of a directory, to be changed; None where it is not known."""
        found = self.folders.get(folder)
        if found is not None and folder not in self._own:
            found = self.folders[folder] = found.copy()
            self._own.add(folder)
        return found

    def replace(self, folder: str, stamps: dict[str, Stamp]) -> None:
        """Have a directory that was listed have these stamps, which may be changed later."""
        self.folders[folder] = stamps
        self._own.add(folder)

    def clear(self) -> None:
        """Know nothing."""
        self.folders.clear()
        self.complete = False

    def doubt(self, path: str) -> None:
        """Have the next scan look at a path."""
        folder, _, name = path.rpartition("/")
        self.unsure.setdefault(folder, set()).add(name)

    def note(self, path: str, attributes: Attributes) -> None:
        """Remember the extended attributes of what was looked at."""
        if attributes:
            self.attributes[path] = attributes
        elif self.attributes:
            self.attributes.pop(path, None)

    def forget(self, path: str) -> None:
        """Have the next scan read this path, and all below it if it was a directory."""
        folder, _, name = path.rpartition("/")
        if (names := self.names(folder)) is not None:
            names.pop(name, None)
        self.doubt(path)
        self.forget_itself(path)
        self.attributes.pop(path, None)
        if path in self.folders and path:
            below = f"{path}/"
            for known in [known for known in self.folders if known == path or known.startswith(below)]:
                del self.folders[known]
                self.unsure.pop(known, None)
            for known in [known for known in self.attributes if known.startswith(below)]:
                del self.attributes[known]

    def forget_itself(self, path: str) -> None:
        """Have the next scan look at what a directory itself is; what is in it is as it was."""
        if (names := self.names(path)) is not None:
            names.pop("", None)
            self.unsure.setdefault(path, set()).add("")

    def differ(self, path: str, one: Entry | None, other: Entry | None) -> None:
        """Have the next scan look at a path that is in two states of the tree, of which one is what was seen."""
        if one is not None and other is not None and one.kind == other.kind == "directory":
            self.forget_itself(path)
            return
        self.forget(path)
        if path and (one is None or other is None):
            # The directory that it is in may have one time in both, and has another list of names.
            self.forget_itself(path.rpartition("/")[0])

    def save(self, path: Path) -> None:
        """Write it, with a checksum; a crash leaves the old one or the new one, a loss of power maybe neither."""
        body = json.dumps([self.commit, self.folders, attributes_json(self.attributes)]).encode()
        with replacing(path, sync=False) as file:
            file.write(_VERSION + hashlib.sha256(body).digest() + body)

    @classmethod
    def load(cls, path: Path) -> StatCache:
        """Read what `save` wrote; an empty cache if it is not there, or not whole."""
        try:
            data = path.read_bytes()
        except OSError:
            return cls()
        start = len(_VERSION) + 32
        body = data[start:]
        if data[:start] != _VERSION + hashlib.sha256(body).digest():
            return cls()
        commit, saved, attributes = json.loads(body)
        folders: dict[str, dict[str, Stamp]] = {
            folder: {name: (inode, size, mtime, ctime) for name, (inode, size, mtime, ctime) in names.items()}
            for folder, names in saved.items()
        }
        return cls(commit, folders, attributes_from_json(attributes))
