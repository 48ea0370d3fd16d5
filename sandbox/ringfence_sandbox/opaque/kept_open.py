"""Files that are too large for the store, open while an opaque call runs: what it removes is still there then, without
a second name that the call could see. What it writes into them is not held off, and a kill of this process lets go."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.kernel import failpoint
from ringfence_sandbox.disk.new_files import data_ranges
from ringfence_sandbox.opaque.states import ExcludedFile
from ringfence_sandbox.scan.stat_cache import attributes_of
from ringfence_sandbox.steps.metadata import apply_metadata
from ringfence_sandbox.store.entries import Meta
from ringfence_sandbox.transaction.hold import Holding

MOST_OPEN = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class KeptOpen:
    """Of one call, by inode."""

    def __init__(self) -> None:
        self.became: dict[int, int] = {}
        """The inodes of copies that were made."""
        self._files: dict[int, int] = {}

    def open(self, files: Confined, left: Mapping[str, ExcludedFile]) -> None:
        """Open those among what a scan has left out. Never fails: what cannot be opened is not kept."""
        for path, one in left.items():
            if one.reason != "too large" or one.inode in self._files or len(self._files) == MOST_OPEN:
                continue
            with suppress(OSError), files.parent(path) as (at, name):
                descriptor = os.open(name, _READ, dir_fd=at)
                if one.fits(os.fstat(descriptor)):
                    self._files[one.inode] = descriptor
                else:
                    os.close(descriptor)

    def release(self, inodes: Iterable[int]) -> None:
        for inode in self._files.keys() & {*inodes}:
            os.close(self._files.pop(inode))

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def has(self, left: ExcludedFile) -> bool:
        """Whether the file is open, and as it was; of one that was copied, the copy."""
        now = replace(left, inode=self.became.get(left.inode, left.inode))
        return left.inode in self._files and now.fits(os.fstat(self._files[left.inode]))

    def brought_back(self, left: ExcludedFile, holding: Holding) -> int:
        """A slot that has the file again: by a name, where it has another one still, or a copy. OSError: there is no
        space for that, say."""
        descriptor = self._files[left.inode]
        found = os.fstat(descriptor)
        slot = holding.new_slot()
        if found.st_nlink:
            failpoint("link")
            os.link(f"/proc/self/fd/{descriptor}", str(slot), dst_dir_fd=holding.descriptor, follow_symlinks=True)
            return slot
        copy = holding.create(slot)
        try:
            for start, end in data_ranges(descriptor):
                at = start
                while at < end and (count := os.copy_file_range(descriptor, copy, end - at, at, at)):
                    at += count
            os.ftruncate(copy, found.st_size)
            for attribute, value in attributes_of(descriptor).items():
                with suppress(OSError):  # some are only root's to give
                    os.setxattr(copy, attribute, value)
            meta = Meta(stat.S_IMODE(left.mode), found.st_uid, found.st_gid, found.st_mtime_ns)
            apply_metadata(holding.descriptor, str(slot), meta)
        except OSError:
            os.close(copy)
            failpoint("unlink")
            os.unlink(str(slot), dir_fd=holding.descriptor)
            raise
        # From here on the copy is the file: another name of it is to be a name of this one.
        self._files[left.inode] = copy
        self.became[left.inode] = os.fstat(copy).st_ino
        os.close(descriptor)
        return slot
