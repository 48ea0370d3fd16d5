"""The changes of a run that a reviewer looks at first, and moves for a reader."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringfence.escapes import display_path
from ringfence.filesystem.diff import moved
from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.participants import Change, FileVersion
from ringfence_tools.printable import files_of, line_counts, plural

HUGE_LINES = 400
"""A diff of one file with more changed lines is huge."""
SPECIAL_BITS = 0o7000
"""Permission bits with which a program gets the rights of another user."""


@dataclass(frozen=True, slots=True)
class Attention:
    path: str
    reason: str


def attention(
    changes: Sequence[Change], ignored: Sequence[Change], patch: bytes, paths: IgnoredPaths
) -> Sequence[Attention]:
    """Return what to look at first: new directories that ignore themselves, ignore files, links that lead out of the
    tree, changed modes and huge diffs.

    ``ignored`` are the changes of ignored paths; of these, ignore files and such directories count alone.
    """
    lines = {path: sum(line_counts(part)) for _, path, part in files_of(patch)}
    caches = Counter(cache for change in ignored if (cache := paths.new_cache(change.path)) is not None)
    rules = [
        change
        for change in (*changes, *ignored)
        if paths.has_rules_at(change.path) and not paths.new_cache(change.path)
    ]
    found = [
        Attention(path, f"a new directory that ignores itself, {plural(count, 'path')}")
        for path, count in caches.items()
    ]
    found += [Attention(change.path, f"an ignore file, {change.kind}") for change in rules]
    found += [Attention(change.path, reason) for change in changes for reason in _reasons(change, lines)]
    return found


def _reasons(change: Change, lines: Mapping[str, int]) -> Iterator[str]:
    before, after = change.before, change.after
    if after is None:
        return
    if after.kind == "symlink" and _leads_out(change.path, after.target or ""):
        yield f"a link out of the tree, to {display_path(after.target or '')}"
    if before is not None and (before.kind, after.kind) != ("symlink", "symlink") and before.mode != after.mode:
        yield f"mode {before.mode:o} -> {after.mode:o}"
    elif before is None and after.kind == "file" and after.mode & SPECIAL_BITS:
        yield f"made with mode {after.mode:o}"
    if (count := lines.get(change.path, 0)) > HUGE_LINES:
        yield f"a huge diff of {plural(count, 'line')}"


def _leads_out(path: str, target: str) -> bool:
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return place.startswith("/") or place.split("/")[0] == ".."


@dataclass(frozen=True, slots=True)
class Moved:
    """A file or link that is at another path. It has the fields that a reader sees of a `Change`."""

    source: str
    path: str
    before: FileVersion | None
    after: FileVersion | None
    kind: str = "moved"


def with_moves(changes: Sequence[Change]) -> Sequence[Change | Moved]:
    """Return the changes, with one `Moved` instead of a deleted and an equal created file."""
    sources = moved(changes)
    gone = {source.path for source in sources.values()}
    return [
        Moved(sources[one.path].path, one.path, sources[one.path].before, one.after) if one.path in sources else one
        for one in changes
        if one.path not in gone
    ]
