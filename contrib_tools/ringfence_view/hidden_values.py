"""The values of hidden files as they are now, for a page to mask."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from contextlib import suppress
from pathlib import Path

from ringfence.secrets import Secrets
from ringfence_sandbox import HostFilesystem

_Mark = tuple[int, int, int, int]


class HiddenValues:
    """Reads hidden files, and tells when one of those that it knows has changed."""

    def __init__(self, directory: Path) -> None:
        self.secrets = Secrets()
        """All values so far."""
        self._directory = directory
        self._marks: Mapping[str, _Mark | None] = {}

    def read(self, filesystem: HostFilesystem) -> None:
        """Take in the values of all hidden files. Raises OSError."""
        known = {*filesystem.hidden_paths, *(file.path for file in filesystem.hidden_files())}
        self._marks = self._marks_of(known)  # before their contents are read: a later change is seen later
        self.secrets.add_hidden(filesystem)

    @property
    def mark(self) -> int:
        """Changes with what is known of the files."""
        return hash(tuple(self._marks.items()))

    @property
    def have_changed(self) -> bool:
        """Whether a known file is another one than when it was read. New files are found by `read`."""
        return self._marks_of(self._marks.keys()) != self._marks

    def _marks_of(self, paths: Set[str]) -> Mapping[str, _Mark | None]:
        found: dict[str, _Mark | None] = {}
        for path in sorted(paths):
            found[path] = None
            with suppress(OSError):
                now = os.lstat(self._directory / path)
                found[path] = (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        return found
