"""What of a fork still names its source: environments of Python, build caches, worktrees of git."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ringfence_workspace.tree.linked_worktrees import GIT

_NAMED = frozenset({"pyvenv.cfg", "direct_url.json", "CMakeCache.txt"})
_PROGRAMS = frozenset({"bin", "Scripts"})
_MOST_BYTES = 4 << 20
_FIRST_LINE_BYTES = 4096


def points_back(root: str, paths: Iterable[str], source: str) -> list[str]:
    """Those of these paths below a root whose bytes name the source, sorted. Only files are read that tools write
    such paths into."""
    wanted = re.compile(re.escape(os.fsencode(source)) + rb"(?![\w.-])")  # and no directory beside it
    found: list[str] = []
    for path in paths:
        limit = _looked_at(path)
        if not limit:
            continue
        with suppress(OSError):
            content = _beginning(os.path.join(root, path), limit)
            if wanted.search(content) and (limit > _FIRST_LINE_BYTES or content.startswith(b"#!")):
                found.append(path)
    return sorted(found)


def _looked_at(path: str) -> int:
    """How many bytes of a file are looked at; 0: it is none of these."""
    above, _, name = path.rpartition("/")
    if name in _NAMED or name.endswith(".pth") or (name == "gitdir" and "/worktrees/" in above):
        return _MOST_BYTES
    return _FIRST_LINE_BYTES if above.rpartition("/")[2] in _PROGRAMS else 0


def _beginning(path: str, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def git_file_target(root: str) -> str | None:
    """Where the `.git` of a root leads, if it is a file, as of a linked worktree and of a submodule; else None."""
    place = Path(root, GIT)
    if place.is_symlink():
        return os.readlink(place)
    try:
        text = place.read_bytes()[: 1 << 13]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return os.fsdecode(text).removeprefix("gitdir:").strip()
