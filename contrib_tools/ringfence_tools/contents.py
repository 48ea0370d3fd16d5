"""The entries of a mount while they are collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringfence.errors import ToolValidationError
from ringfence.filesystem.paths import normalise
from ringfence.filesystem.search import GlobPattern, compiled_glob

MAX_ENTRIES = 1_000_000
"""The most entries of one mount. More are a sign of links in a circle or of a wrong host path."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A path that is missing in the workspace for another reason than a glob."""

    path: str
    """Relative to the mounted path."""
    reason: str


@dataclass(frozen=True, slots=True)
class MountedEntry:
    """A file with its bytes, a link with its target, or a directory."""

    content: bytes | str | None
    mode: int | None = None
    """The permission bits. None: the default of its kind."""
    mtime_ns: int | None = None

    @property
    def is_directory(self) -> bool:
        return self.content is None


class Contents:
    """The entries of a mount by path. "" is the mounted directory itself.

    A mount takes the files that match an include pattern. Without include patterns it takes all files. It takes no
    path that matches an exclude pattern, and nothing below such a path.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = (), max_bytes: int | None = None) -> None:
        """Raises ValueError for an invalid pattern."""
        self._include = [compiled_glob(pattern) for pattern in include]
        self._exclude = [compiled_glob(pattern) for pattern in exclude]
        self._max_bytes = max_bytes
        self.entries: dict[str, MountedEntry] = {}
        self.left_out: list[LeftOut] = []
        self.excluded = 0
        self.size = 0

    def wants(self, path: str, *, is_directory: bool = False) -> bool:
        """Whether the patterns want a path or, for a directory, may want a path in it. Unwanted paths are counted."""
        included = is_directory or not self._include or _any_matches(self._include, path, is_directory=False)
        if not included or _any_matches(self._exclude, path, is_directory=is_directory):
            self.excluded += 1
            return False
        try:
            if normalise(path) == path:
                return True
        except (ValueError, PermissionError):
            pass
        self.leave_out(path, "cannot be a path of a workspace")
        return False

    def leave_out(self, path: str, reason: str) -> None:
        self.left_out.append(LeftOut(path, reason))

    def add(self, path: str, entry: MountedEntry) -> None:
        self.entries[path] = entry
        if isinstance(entry.content, bytes):
            self.size += len(entry.content)
            self.expect(0)
        if len(self.entries) > MAX_ENTRIES:
            raise ToolValidationError(f"it has more than {MAX_ENTRIES} files and directories: mount a part of it")

    def expect(self, size: int) -> None:
        """Raise ToolValidationError if ``size`` more bytes would exceed the limit."""
        if self._max_bytes is not None and self.size + size > self._max_bytes:
            raise ToolValidationError(
                f"it has more than the {self._max_bytes} bytes of max_bytes: raise that, or take less by include_glob "
                "or exclude_glob"
            )

    def drop_unwanted_directories(self) -> None:
        """Drop the empty directories that no include pattern matches."""
        wanted = {""}
        for path, entry in self.entries.items():
            if not entry.is_directory:
                wanted.update(directories_above(path))
            elif not self._include or (path and _any_matches(self._include, path, is_directory=True)):
                wanted.update((path, *directories_above(path)))
        kept = {path: entry for path, entry in self.entries.items() if not entry.is_directory or path in wanted}
        self.entries = dict.fromkeys(wanted, MountedEntry(None)) | kept


def _any_matches(globs: Sequence[GlobPattern], path: str, *, is_directory: bool) -> bool:
    return any((is_directory or not glob.directories_only) and glob.matches(path) for glob in globs)


def directories_above(path: str) -> Iterator[str]:
    """Yield the directories above a path, the nearest first and the root "" last."""
    while path:
        path = path.rpartition("/")[0]
        yield path
