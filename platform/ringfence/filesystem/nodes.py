"""What the tree of a filesystem in memory is made of."""

from __future__ import annotations

import hashlib
import itertools
from typing import Final, TypeAlias, final

from ringfence.filesystem.protocol import FileEntry, ReadBytesResult, ReadResult
from ringfence.filesystem.search import Child
from ringfence.participants import FileVersion


@final
class File:
    __slots__ = ("_file_version", "_sha256", "birth_ns", "bytes_read", "content", "mode", "mtime_ns", "text_read")

    def __init__(self, content: bytes, mode: int, mtime_ns: int, birth_ns: int) -> None:
        self.content: Final = content
        self.mode: Final = mode
        self.mtime_ns: Final = mtime_ns
        self.birth_ns: Final = birth_ns
        # The last answers to the usual questions, whose making takes longer than all else about a read.
        self.bytes_read: ReadBytesResult | None = None
        self.text_read: ReadResult | None = None
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
