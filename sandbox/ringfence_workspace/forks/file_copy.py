"""The copy of the bytes of a file, which somebody may be writing to."""

from __future__ import annotations

import errno
import os

from ringfence_workspace.history.stat_cache import stamp_of
from ringfence_workspace.tree.new_files import data_ranges, write_all

_READ_BYTES = 1 << 16
"""What is shorter is read and written; of the rest the kernel shares the blocks, or copies them."""
_SPARSE_BYTES = 1 << 20
_TRIES = 5
"""So often a file is copied that somebody writes to meanwhile."""
_ELSEWHERE = frozenset({errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM})


def copy_steadily(original: int, descriptor: int, found: os.stat_result) -> os.stat_result:
    """Copy the bytes, and again where somebody writes to the file meanwhile; what it was like."""
    for _ in range(_TRIES):
        copy_bytes(original, descriptor, found)
        again = os.fstat(original)
        if stamp_of(again) == stamp_of(found):
            break
        found = again
        os.ftruncate(descriptor, 0)
        os.lseek(original, 0, os.SEEK_SET)
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        copy_bytes(original, descriptor, found)
    return found


def copy_bytes(original: int, descriptor: int, found: os.stat_result) -> None:
    """Copy the bytes of a file into an empty one: shared blocks where the filesystem has them, holes where there are
    some. OSError."""
    size = found.st_size
    if size < _READ_BYTES:
        write_all(descriptor, os.read(original, _READ_BYTES))
        return
    is_sparse = size >= _SPARSE_BYTES and found.st_blocks * 512 < size
    try:
        ranges = [*data_ranges(original)] if is_sparse else [(0, size)]
        os.ftruncate(descriptor, size if is_sparse else 0)
        for start, end in ranges:
            _copy_range(original, descriptor, start, end)
    except OSError as error:
        if error.errno not in _ELSEWHERE:
            raise
        os.lseek(original, 0, os.SEEK_SET)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.ftruncate(descriptor, 0)
        while content := os.read(original, 1 << 20):
            write_all(descriptor, content)


def _copy_range(original: int, descriptor: int, start: int, end: int) -> None:
    while start < end:
        copied = os.copy_file_range(original, descriptor, end - start, start, start)
        if not copied:
            return
        start += copied


def has_same_owner_and_mode(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether kind, permission bits, owner and group are the same."""
    return (one.st_uid, one.st_gid, one.st_mode) == (other.st_uid, other.st_gid, other.st_mode)
