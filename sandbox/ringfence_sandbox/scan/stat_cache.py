"""What a scan knew of every file, so that the next one need not read it.

An entry says: when the file's inode, size, mtime and ctime were these, the newest step held it just so. The kernel
changes the ctime at every change, and nobody can set it; but its clock moves in ticks, and a file can change twice in
one. So an entry is only made for a file that had been left alone for longer than a tick when it was looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias, cast

from ringfence_sandbox.disk.records import Json
from ringfence_sandbox.disk.state_files import replacing
from ringfence_sandbox.store.entries import Entry

MAGIC = b"ringfence stat cache 2\n"
FINE_TICK_NS = 20_000_000
COARSE_TICK_NS = 2_000_000_000

_LATEST_NS = 2**63 - 1
"""In the year 2262; a file with a later time is read anew by who opens the workspace again."""

Stamp: TypeAlias = tuple[int, int, int, int]
"""Inode, size, mtime and ctime in nanoseconds."""
_STAMP_FORMAT = "QqqQ"
_STAMP = struct.Struct("<" + _STAMP_FORMAT)
_FOLDER = struct.Struct("<II")
_SIZE = struct.Struct("<I")
_OF_THE_SYSTEM = frozenset({"security.selinux", "system.nfs4_acl"})
"""Extended attributes that everything may have, of which a new file gets its own."""

Attributes: TypeAlias = dict[str, bytes]
"""Extended attributes."""


def _packed(names: Mapping[str, Stamp]) -> bytes:
    """struct.error where a time is too late for it, or too early."""
    return struct.pack("<" + _STAMP_FORMAT * len(names), *chain.from_iterable(names.values()))


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_settled(status: os.stat_result, clock_ns: int) -> bool:
    """Whether a later change would show, if the filesystem's clock was `clock_ns` when the file was looked at."""
    # A clock without anything below a hundredth of a second is one of whole seconds, or of two.
    tick = COARSE_TICK_NS if status.st_ctime_ns % 10_000_000 == 0 else FINE_TICK_NS
    return status.st_ctime_ns < clock_ns - tick


def attributes_of(descriptor: int) -> Attributes:
    """The extended attributes of an open file or directory; none where its filesystem has none."""
    try:
        names = os.listxattr(descriptor)
        return {name: os.getxattr(descriptor, name) for name in names if name not in _OF_THE_SYSTEM} if names else {}
    except OSError:
        return {}


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

    Whoever publishes a step moves it on: `forget` (or `set`) every path of the step, then set ``commit``.
    """

    commit: str | None = None
    folders: dict[str, dict[str, Stamp]] = field(default_factory=dict[str, dict[str, Stamp]])
    attributes: dict[str, Attributes] = field(default_factory=dict[str, Attributes])

    def note(self, path: str, attributes: Attributes) -> None:
        """Remember the extended attributes of what was looked at."""
        if attributes:
            self.attributes[path] = attributes
        elif self.attributes:
            self.attributes.pop(path, None)

    def get(self, path: str) -> Stamp | None:
        folder, _, name = path.rpartition("/")
        names = self.folders.get(folder)
        return names.get(name) if names is not None else None

    def set(self, path: str, status: os.stat_result, clock_ns: int) -> None:
        """Record a file that the newest step holds as it is now, if `clock_ns` lets it be trusted."""
        folder, _, name = path.rpartition("/")
        if is_settled(status, clock_ns):
            self.folders.setdefault(folder, {})[name] = stamp_of(status)
        else:
            self.forget(path)

    def forget(self, path: str) -> None:
        """Have the next scan read this path, and all below it if it was a directory."""
        folder, _, name = path.rpartition("/")
        for known in (folder, path):
            names = self.folders.get(known)
            if names is not None:
                names.pop(name if known != path else "", None)
        self.attributes.pop(path, None)
        if path in self.folders and path:
            below = f"{path}/"
            for known in [known for known in self.folders if known == path or known.startswith(below)]:
                del self.folders[known]
            for known in [known for known in self.attributes if known.startswith(below)]:
                del self.attributes[known]

    def forget_itself(self, path: str) -> None:
        """Have the next scan look at what a directory itself is; what is in it is as it was."""
        names = self.folders.get(path)
        if names is not None:
            names.pop("", None)

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
        known = {
            path: one for path, one in self.attributes.items() if self.get(path) or self.get(f"{path}/".lstrip("/"))
        }
        attributes = json.dumps(attributes_json(known)).encode()
        parts = [(self.commit or "").encode().ljust(40, b" "), _SIZE.pack(len(attributes)), attributes]
        for folder, names in self.folders.items():
            try:
                stamps = _packed(names)
            except struct.error:
                names = {name: stamp for name, stamp in names.items() if abs(stamp[2]) <= _LATEST_NS}
                stamps = _packed(names)
            raw = os.fsencode("\0".join([folder, *names]))
            parts += (_FOLDER.pack(len(raw), len(names)), raw, stamps)
        body = b"".join(parts)
        with replacing(path, sync=False) as file:
            file.write(MAGIC + hashlib.sha256(body).digest() + body)

    @classmethod
    def load(cls, path: Path) -> StatCache:
        """Read what `save` wrote; an empty cache if it is not there, or not whole."""
        try:
            data = path.read_bytes()
        except OSError:
            return cls()
        start = len(MAGIC) + 32
        if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
            return cls()
        cache = cls(data[start : start + 40].decode().strip() or None)
        (length,) = _SIZE.unpack_from(data, start + 40)
        at = start + 40 + _SIZE.size + length
        cache.attributes = attributes_from_json(json.loads(data[at - length : at]))
        while at < len(data):
            length, count = _FOLDER.unpack_from(data, at)
            at += _FOLDER.size
            folder, *names = map(os.fsdecode, data[at : at + length].split(b"\0"))
            at += length
            end = at + count * _STAMP.size
            cache.folders[folder] = dict(zip(names, _STAMP.iter_unpack(data[at:end]), strict=True))
            at = end
        return cache
