"""Filesystems: the protocol, what its methods answer with, and the one in memory."""

from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.protocol import (
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
    "FileEntry",
    "FileStat",
    "Filesystem",
    "FilesystemSnapshot",
    "GlobMatch",
    "GrepMatch",
    "InMemoryFilesystem",
    "ReadBytesResult",
    "ReadResult",
    "WriteResult",
]
