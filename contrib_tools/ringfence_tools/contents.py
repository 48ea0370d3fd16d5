"""What a mount is made of, while it is being collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringfence.errors import ToolValidationError
from ringfence.filesystem.paths import normalise
from ringfence.filesystem.search import Glob, compiled_glob

MAX_ENTRIES = 1_000_000
"""Of one mount. Only links that are followed in circles, or a host path that was not meant, have more."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A path that is not in the workspace although no glob excluded it, and why."""

    path: str
    """Relative to what was mounted."""
    reason: str


@dataclass(frozen=True, slots=True)
class MountedFile:
    content: bytes
    mode: int
    mtime_ns: int | None


@dataclass(frozen=True, slots=True)
class MountedDirectory:
    mode: int
    mtime_ns: int | None


@dataclass(frozen=True, slots=True)
class MountedLink:
    target: str
    mtime_ns: int | None


Mounted = MountedFile | MountedDirectory | MountedLink


class Selection:
    """Which paths a mount takes: those that match an include pattern, or all where there is none; of these, those that
    match no exclude pattern and are in no directory that does."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        """ValueError for a pattern that is none."""
        self._include = [compiled_glob(pattern) for pattern in include]
        self._exclude = [compiled_glob(pattern) for pattern in exclude]

    @property
    def includes_all(self) -> bool:
        return not self._include

    def excludes(self, path: str, *, is_directory: bool) -> bool:
        """Whether an exclude pattern matches the path itself."""
        return any(_matches(glob, path, is_directory) for glob in self._exclude)

    def includes(self, path: str, *, is_directory: bool = False) -> bool:
        return not self._include or any(_matches(glob, path, is_directory) for glob in self._include)


def _matches(glob: Glob, path: str, is_directory: bool) -> bool:
    return (is_directory or not glob.directories_only) and glob.matches(path)


@dataclass(slots=True)
class Contents:
    """Paths below a mount and what is there; "" is the mounted directory itself."""

    selection: Selection
    max_bytes: int | None = None
    entries: dict[str, Mounted] = field(default_factory=dict[str, Mounted])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    excluded: int = 0
    size: int = 0
    _directories: dict[str, MountedDirectory] = field(default_factory=dict[str, MountedDirectory])

    def wants(self, path: str, *, is_directory: bool = False) -> bool:
        """Whether to go on with a path: into it, if it is a directory. What is not wanted is counted."""
        if self.selection.excludes(path, is_directory=is_directory) or not (
            is_directory or self.selection.includes(path)
        ):
            self.excluded += 1
            return False
        try:
            fits = normalise(path) == path
        except (ValueError, PermissionError):
            fits = False
        if not fits:
            self.leave_out(path, "cannot be a path of a workspace")
        return fits

    def leave_out(self, path: str, reason: str) -> None:
        self.left_out.append(LeftOut(path, reason))

    def add_file(self, path: str, content: bytes, mode: int, mtime_ns: int | None) -> None:
        self.size += len(content)
        self.entries[path] = MountedFile(content, mode, mtime_ns)
        self._check_bounds()

    def add_link(self, path: str, target: str, mtime_ns: int | None) -> None:
        self.entries[path] = MountedLink(target, mtime_ns)
        self._check_bounds()

    def add_directory(self, path: str, mode: int = 0o755, mtime_ns: int | None = None) -> None:
        """Whether it becomes part of the mount is decided at the end: `take_directories`."""
        self._directories[path] = MountedDirectory(mode, mtime_ns)
        self._check_bounds()

    def bytes_left(self) -> int | None:
        return None if self.max_bytes is None else self.max_bytes - self.size

    def expect(self, size: int) -> None:
        """ToolValidationError if so many bytes more would be too many."""
        if self.max_bytes is not None and self.size + size > self.max_bytes:
            raise ToolValidationError(
                f"it has more than the {self.max_bytes} bytes of max_bytes: raise that, or take less by include_glob "
                "or exclude_glob"
            )

    def take_directories(self) -> None:
        """Take in the directories that hold something, and of the empty ones those that the include patterns match."""
        wanted = {"", *(above for path in self.entries for above in directories_above(path))}
        for path in self._directories:
            if self.selection.includes_all or (path and self.selection.includes(path, is_directory=True)):
                wanted.update((path, *directories_above(path)))
        for path in wanted:
            self.entries[path] = self._directories.get(path, MountedDirectory(0o755, None))

    def _check_bounds(self) -> None:
        self.expect(0)
        if len(self.entries) + len(self._directories) > MAX_ENTRIES:
            raise ToolValidationError(f"it has more than {MAX_ENTRIES} files and directories: mount a part of it")


def directories_above(path: str) -> Iterator[str]:
    """The directories on the way to a path, from the bottom; the mounted one, "", is the last."""
    while path:
        path = path.rpartition("/")[0]
        yield path
