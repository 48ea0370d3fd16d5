"""The nodes of the tree in memory, and links followed among them."""

from __future__ import annotations

import errno
import hashlib
import itertools
from typing import Final, TypeAlias, final

from ringfence.filesystem.paths import os_error, outside
from ringfence.filesystem.protocol import FileEntry, FileStat, ReadBytesResult, ReadResult
from ringfence.filesystem.search import Child
from ringfence.participants import FileVersion


@final
class File:
    __slots__ = (
        "_file_version",
        "_sha256",
        "birth_ns",
        "bytes_read",
        "content",
        "mode",
        "mtime_ns",
        "stat",
        "text_read",
    )

    def __init__(self, content: bytes, mode: int, mtime_ns: int, birth_ns: int) -> None:
        self.content: Final = content
        self.mode: Final = mode
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns
        # The last answers to the usual questions, whose making takes longer than all else about a read.
        self.bytes_read: ReadBytesResult | None = None
        self.text_read: ReadResult | None = None
        self.stat: FileStat | None = None
        self._sha256: str | None = None
        self._file_version: FileVersion | None = None

    @property
    def sha256(self) -> str:
        if self._sha256 is None:
            self._sha256 = hashlib.sha256(self.content).hexdigest()
        return self._sha256

    @property
    def file_version(self) -> FileVersion:
        if self._file_version is None:
            self._file_version = FileVersion("file", self.mode, len(self.content), self.sha256)
        return self._file_version


@final
class Link:
    __slots__ = ("birth_ns", "mtime_ns", "target")

    def __init__(self, target: str, mtime_ns: int, birth_ns: int) -> None:
        self.target: Final = target
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns

    @property
    def file_version(self) -> FileVersion:
        return FileVersion("symlink", 0o777, len(self.target.encode("utf-8", "surrogateescape")), None, self.target)


@final
class Directory:
    __slots__ = (
        "birth_ns",
        "children",
        "copied_from",
        "entries",
        "generation",
        "listing",
        "mode",
        "mtime_ns",
        "serial",
        "touched",
        "version",
    )
    _serials = itertools.count()

    def __init__(
        self, generation: int, mode: int, mtime_ns: int, birth_ns: int, entries: dict[str, Node] | None = None
    ) -> None:
        self.entries: dict[str, Node] = {} if entries is None else entries
        self.mode = mode
        self.mtime_ns = mtime_ns
        self.birth_ns: Final = birth_ns
        self.generation: Final = generation
        self.serial: Final = next(self._serials)
        self.copied_from: int | None = None
        """The serial of the directory that this one is a changed copy of; ``touched`` has the names that may differ.

        A serial and no reference: a copy must not keep alive what nobody else holds."""
        self.touched: set[str] | None = None
        self.version = 0
        """Counts changes in place. Raised after each, so what was derived during one is not taken for current."""
        self.children: tuple[int, str, tuple[Child[Directory], ...]] | None = None
        self.listing: tuple[int, str, tuple[FileEntry, ...]] | None = None

    @property
    def file_version(self) -> FileVersion:
        return FileVersion("directory", self.mode, 0)

    def copy(self, generation: int) -> Directory:
        twin = Directory(generation, self.mode, self.mtime_ns, self.birth_ns, self.entries.copy())
        twin.copied_from = self.serial
        twin.touched = set()
        return twin

    def put(self, name: str, node: Node) -> None:
        self.entries[name] = node
        if self.touched is not None:
            self.touched.add(name)
        self.version += 1

    def remove(self, name: str) -> None:
        self.entries.pop(name, None)
        if self.touched is not None:
            self.touched.add(name)
        self.version += 1


Node: TypeAlias = File | Link | Directory


MAX_LINK_HOPS = 40
"""As in Linux."""

Found: TypeAlias = tuple[str, Node | None, OSError | None]
"""A resolved path, what is there, and why nothing can be made there: a file in the way, or a dangling link."""


def find_along_links(root: Directory, path: str, follow: bool) -> Found:
    pending = path.split("/")[::-1]
    own = len(pending)  # below this, what is pending is the caller's; above it, it came out of a link
    names: list[str] = []
    above = [root]
    hops = 0
    while pending:
        out_of_link = len(pending) > own
        name = pending.pop()
        own = min(own, len(pending))
        if name == "..":
            if not names:
                raise outside(path)
            names.pop()
            above.pop()
            continue
        node = above[-1].entries.get(name)
        if type(node) is Directory:
            names.append(name)
            above.append(node)
        elif type(node) is Link and (pending or follow):
            hops += 1
            if hops > MAX_LINK_HOPS:
                raise os_error(errno.ELOOP, path)
            if node.target.startswith("/"):
                raise outside(path)
            pending.extend(part for part in reversed(node.target.split("/")) if part not in ("", "."))
        elif node is not None and not pending:
            return "/".join([*names, name]), node, None
        else:
            obstacle = None
            if node is not None:
                obstacle = os_error(errno.ENOTDIR, path)
            elif out_of_link:
                obstacle = FileNotFoundError(errno.ENOENT, "is a link that leads nowhere", path)
            return _as_far_as_it_goes(path, names, [name, *reversed(pending)]), None, obstacle
    return "/".join(names), above[-1], None


def _as_far_as_it_goes(path: str, names: list[str], rest: list[str]) -> str:
    for name in rest:
        if name != "..":
            names.append(name)
        elif names:
            names.pop()
        else:
            raise outside(path)
    return "/".join(names)
