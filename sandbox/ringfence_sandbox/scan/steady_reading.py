"""Reading files that somebody may be writing: who reads knows whether they were left alone meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Literal

from ringfence_sandbox.scan.stat_cache import Attributes, Stamp, attributes_of, stamp_of

_NOATIME = getattr(os, "O_NOATIME", 0)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ATTEMPTS = 3


def hole_bytes(parent: int, name: str, size: int) -> int:
    """The bytes of a file that are in no block. (Fewer blocks than bytes may also be a filesystem that compresses.)"""
    holes = at = 0
    try:
        descriptor = open_at(name, parent, _FILE)
    except OSError:  # found again, and said, where it is read
        return 0
    with closing(descriptor), suppress(OSError):  # the end is an error where a hole is the last
        while at < size:
            hole = os.lseek(descriptor, at, os.SEEK_HOLE)
            holes += size - hole
            at = os.lseek(descriptor, hole, os.SEEK_DATA) if hole < size else size
            holes -= size - at
    return holes


@contextmanager
def closing(descriptor: int) -> Generator[None, None, None]:
    try:
        yield
    finally:
        os.close(descriptor)


def open_at(name: str, parent: int, flags: int) -> int:
    try:
        # Looking is no use of a file; only its owner may look so.
        return os.open(name, flags | _NOATIME, dir_fd=parent)
    except PermissionError:
        return os.open(name, flags, dir_fd=parent)


def read_at_once(parent: int, name: str, stamp: Stamp) -> tuple[bytes, Attributes] | None:
    """The bytes and extended attributes of a regular file that nobody has touched between its ``stamp`` and their end;
    else None."""
    descriptor = open_at(name, parent, _FILE)
    try:
        content = os.read(descriptor, stamp[1] + 1)
        attributes = attributes_of(descriptor)
        steady = len(content) == stamp[1] and stamp_of(os.fstat(descriptor)) == stamp
        return (content, attributes) if steady else None
    except BlockingIOError:  # it has become a pipe
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int, size: int, most: int) -> bytes:
    """The whole of it, or, where it has grown beyond that meanwhile, `most` bytes."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    content = os.read(descriptor, size + 1)
    if len(content) == size:
        return content
    parts, total = [content], len(content)
    while total <= most and (part := os.read(descriptor, 1 << 20)):
        parts.append(part)
        total += len(part)
    return b"".join(parts)


def read_steadily(
    parent: int, name: str, status: os.stat_result, most: int
) -> tuple[Literal["file", "symlink"], bytes, Attributes, os.stat_result, bool]:
    """What it is, its bytes, its extended attributes, its status then, and whether it was left alone meanwhile."""
    if stat.S_ISLNK(status.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=parent))
        again = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return "symlink", target, {}, status, stamp_of(again) == stamp_of(status)
    descriptor = open_at(name, parent, _FILE)
    try:
        attempts = 0
        while True:
            attempts += 1
            status = os.fstat(descriptor)
            content = _read(descriptor, status.st_size, most)
            attributes = attributes_of(descriptor)
            steady = stamp_of(os.fstat(descriptor)) == stamp_of(status)
            if steady or attempts == _ATTEMPTS:
                return "file", content, attributes, status, steady
    finally:
        os.close(descriptor)
