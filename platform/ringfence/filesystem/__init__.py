"""Filesystems: the protocol, the values that its methods return, and the filesystem in memory."""

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
