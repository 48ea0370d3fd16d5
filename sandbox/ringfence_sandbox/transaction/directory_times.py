"""The times of directories: a rollback restores one only where the last change of the directory was the call's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringfence_sandbox.disk.confined import Confined

if TYPE_CHECKING:
    from types import TracebackType


def _nobody(_: os.stat_result) -> None: ...


class DirectoryTimes:
    """The times that the call's own changes have left directories with, by inode. A directory with another one was
    changed by somebody else, and ``changed`` is called. (On the way of every file: one look before, and one after.)"""

    def __init__(self, files: Confined) -> None:
        self.files = files
        self.changed: Callable[[os.stat_result], None] = _nobody
        self._left: dict[int, int] = {}

    def before(self, directory: int) -> None:
        """The call is about to change an open directory."""
        self.observe(os.fstat(directory))

    def observe(self, found: os.stat_result) -> None:
        """Compare a directory, as it was found, with what the call has left."""
        if self._left.setdefault(found.st_ino, found.st_mtime_ns) != found.st_mtime_ns:
            self._left[found.st_ino] = found.st_mtime_ns
            self.changed(found)

    def after(self, directory: int) -> None:
        """The call has changed an open directory."""
        found = os.fstat(directory)
        self._left[found.st_ino] = found.st_mtime_ns

    def gave(self, inode: int, mtime_ns: int) -> None:
        """The call has given a directory a time."""
        self._left[inode] = mtime_ns

    def forget(self) -> None:
        """From here on nobody knows whose change is whose."""
        self._left.clear()


class ChangedDirectory:
    """For a ``with``: the directory that a path is in, open and about to change, and the name there."""

    __slots__ = ("_at", "_parent", "_times")

    def __init__(self, times: DirectoryTimes, path: str) -> None:
        self._parent = times.files.parent(path)
        self._times = times

    def __enter__(self) -> tuple[int, str]:
        self._at, name = self._parent.__enter__()
        self._times.before(self._at)
        return self._at, name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._times.after(self._at)
        self._parent.__exit__(kind, error, trace)
