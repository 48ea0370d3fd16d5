"""What became of paths that no patch can say: git knows no directories, and of permission bits one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringfence.filesystem.paths import directories_above, display_path
from ringfence.participants import Change, FileVersion

MAX_LINES = 20
IN_A_PATCH = {0o644, 0o755}


def beside_patch(changes: Sequence[Change]) -> Iterator[str]:
    """A line a path. A directory that a patch makes or removes with what is in it is none."""
    made = {change.path for change in changes if _is_directory(change.after) and not _is_directory(change.before)}
    gone = {change.path for change in changes if change.after is None and _is_directory(change.before)}
    for change in changes:
        above = {*directories_above(change.path)}
        if change.after is not None:
            made -= above
        if change.before is not None and not _is_directory(change.before):
            gone -= above
    said = [line for change in changes for line in _lines(change, made, gone)]
    yield from said[:MAX_LINES]
    if len(said) > MAX_LINES:
        yield f"{len(said) - MAX_LINES} more of these; --json lists all"


def _lines(change: Change, made: set[str], gone: set[str]) -> Iterator[str]:
    path, before, after = change.path, change.before, change.after
    if path in made:
        yield f"{display_path(path)} (directory made)"
    elif path in gone and gone.isdisjoint(directories_above(path)):
        yield f"{display_path(path)} (directory removed)"
    elif before is not None and after is not None and _has_other_bits(before, after):
        yield f"{display_path(path)} (permissions {before.mode:o} -> {after.mode:o})"


def _has_other_bits(before: FileVersion, after: FileVersion) -> bool:
    """Whether its permission bits are others, and a patch does not say so."""
    if before.kind != after.kind or before.mode == after.mode:
        return False
    return after.kind != "file" or not {before.mode, after.mode} <= IN_A_PATCH


def _is_directory(version: FileVersion | None) -> bool:
    return version is not None and version.kind == "directory"
