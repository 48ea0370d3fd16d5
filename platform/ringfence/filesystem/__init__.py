"""Filesystems: the protocol, the values that its methods return, and the filesystem in memory."""

from typing import TYPE_CHECKING

from ringfence.lazy_names import lazy_names

if TYPE_CHECKING:
    from ringfence.filesystem.hidden import HiddenFiles, HidesFiles
    from ringfence.filesystem.memory import InMemoryFilesystem
    from ringfence.filesystem.protocol import (
        DEFAULT_READ_LIMIT,
        MAX_GREP_MATCHES,
        MAX_WRITE_LENGTH,
        READ_ENTIRE_FILE,
        FileEntry,
        FileStat,
        Filesystem,
        FilesystemSnapshot,
        GlobMatch,
        GrepMatch,
        ReadBytesResult,
        ReadResult,
        WriteResult,
    )

__all__ = [
    "DEFAULT_READ_LIMIT",
    "MAX_GREP_MATCHES",
    "MAX_WRITE_LENGTH",
    "READ_ENTIRE_FILE",
    "FileEntry",
    "FileStat",
    "Filesystem",
    "FilesystemSnapshot",
    "GlobMatch",
    "GrepMatch",
    "HiddenFiles",
    "HidesFiles",
    "InMemoryFilesystem",
    "ReadBytesResult",
    "ReadResult",
    "WriteResult",
]

# Imported when asked for: a workspace on disk needs no filesystem in memory.
_MODULES = {
    "DEFAULT_READ_LIMIT": "ringfence.filesystem.protocol",
    "FileEntry": "ringfence.filesystem.protocol",
    "FileStat": "ringfence.filesystem.protocol",
    "Filesystem": "ringfence.filesystem.protocol",
    "FilesystemSnapshot": "ringfence.filesystem.protocol",
    "GlobMatch": "ringfence.filesystem.protocol",
    "GrepMatch": "ringfence.filesystem.protocol",
    "HiddenFiles": "ringfence.filesystem.hidden",
    "HidesFiles": "ringfence.filesystem.hidden",
    "InMemoryFilesystem": "ringfence.filesystem.memory",
    "MAX_GREP_MATCHES": "ringfence.filesystem.protocol",
    "MAX_WRITE_LENGTH": "ringfence.filesystem.protocol",
    "READ_ENTIRE_FILE": "ringfence.filesystem.protocol",
    "ReadBytesResult": "ringfence.filesystem.protocol",
    "ReadResult": "ringfence.filesystem.protocol",
    "WriteResult": "ringfence.filesystem.protocol",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
