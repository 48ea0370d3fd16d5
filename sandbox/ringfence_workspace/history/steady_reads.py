"""Reading what a scan found, so that what it takes in is what was there at one moment."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress

from ringfence_workspace.history.stat_cache import stamp_of
from ringfence_workspace.tree.extended_attributes import Attributes, attributes_of
from ringfence_workspace.tree.new_files import data_ranges

_NOATIME = getattr(os, "O_NOATIME", 0)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ATTEMPTS = 3


def hole_bytes(parent: int, name: str, size: int) -> int:
    """The bytes of a file that are in no block. (Fewer blocks than bytes may also be a filesystem that compresses.)"""
    with suppress(OSError), closing(open_at(name, parent, _FILE)) as descriptor:
        return max(0, size - sum(end - start for start, end in data_ranges(descriptor)))
    return 0  # what cannot be opened is reported where it is read


@contextmanager
def closing(descriptor: int) -> Generator[int]:
    """The descriptor, which is closed at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_at(name: str, parent: int, flags: int) -> int:
    try:
        # Looking is no use of a file; only its owner may look so.
        return os.open(name, flags | _NOATIME, dir_fd=parent)
    except PermissionError:
        return os.open(name, flags, dir_fd=parent)


def _read(descriptor: int, size: int) -> bytes:
    content = os.read(descriptor, size)
    while len(content) < size and (part := os.read(descriptor, size - len(content))):  # no call gives more than 2 GiB
        content += part
    return content


def read_steadily(
    parent: int, name: str, status: os.stat_result, most: int
) -> tuple[bytes, Attributes, os.stat_result, bool]:
    """The bytes and extended attributes of a file, or the target of a link, which had this status just now; its status
    when they were read; and whether it was left alone meanwhile. OSError where it grows to more than `most` bytes."""
    if stat.S_ISLNK(status.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=parent))
        return target, {}, status, stamp_of(os.lstat(name, dir_fd=parent)) == stamp_of(status)
    descriptor = open_at(name, parent, _FILE)
    try:
        attempts = 0
        while True:
            content, attributes = _read(descriptor, status.st_size), attributes_of(descriptor)
            now = os.fstat(descriptor)
            attempts += 1
            if stamp_of(now) == stamp_of(status) or attempts == _ATTEMPTS:
                return content, attributes, status, stamp_of(now) == stamp_of(status)
            if now.st_size > most:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            status = now
            os.lseek(descriptor, 0, os.SEEK_SET)
    finally:
        os.close(descriptor)
