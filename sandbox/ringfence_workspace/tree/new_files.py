"""Writing a new file that is to take the place of another, or to stand beside others."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from ringfence_workspace.tree.confined import open_file, read_file

_TO_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_FOR_OTHER_BYTES = frozenset({"security.capability"})
_HASHED_BYTES = 1 << 20
"""What is longer is not read to be appended to; the kernel copies it, or shares its blocks."""


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of the bytes at the file's place."""
    written = os.write(descriptor, content)
    if written == len(content):
        return
    rest = memoryview(content)[written:]
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def copy_and_append(at: int, name: str, place: str, descriptor: int, more: bytes) -> str | None:
    """The file at a name, and `more` behind it, into a new file; the sha256 of it all, unless it is long."""
    original, found = open_file(at, name, place)
    try:
        if found.st_size <= _HASHED_BYTES:
            content, _ = read_file(at, name, place)
            write_all(descriptor, content)
            write_all(descriptor, more)
            return hashlib.sha256(content + more).hexdigest()
        rest = found.st_size
        while rest and (copied := os.copy_file_range(original, descriptor, rest)):
            rest -= copied
        write_all(descriptor, more)
        return None
    finally:
        os.close(original)


def data_ranges(descriptor: int) -> Iterator[tuple[int, int]]:
    """From where to where a file has bytes: between are holes, which are in no block."""
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # there are no more
                return
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def copy_attributes(descriptor: int, at: int, name: str, found: os.stat_result, mode: int | None) -> os.stat_result:
    """Give a new file the owner, extended attributes and permission bits of another, as far as that is permitted.

    Returns its stat from before, in which only these differ.
    """
    bits = stat.S_IMODE(found.st_mode) if mode is None else mode
    ours = os.fstat(descriptor)
    alike = stat.S_IMODE(ours.st_mode) == bits
    if (found.st_uid, found.st_gid) != (ours.st_uid, ours.st_gid):
        alike = False
        try:
            os.fchown(descriptor, found.st_uid, found.st_gid)
        except PermissionError:
            bits &= ~(stat.S_ISUID | stat.S_ISGID)
    with suppress(OSError):
        original = os.open(name, _TO_LOOK, dir_fd=at)
        try:
            wanted, has = os.listxattr(original), os.listxattr(descriptor)
            if wanted or has:
                alike = False
                for attribute in set(has).difference(wanted):  # the directory's default ACL
                    os.removexattr(descriptor, attribute)
                for attribute in wanted:
                    if attribute not in _NOT_FOR_OTHER_BYTES:
                        os.setxattr(descriptor, attribute, os.getxattr(original, attribute))
        finally:
            os.close(original)
    if not alike:
        os.fchmod(descriptor, bits)
    return ours


def umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
