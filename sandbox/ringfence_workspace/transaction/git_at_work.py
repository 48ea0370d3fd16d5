"""Git's own data in the root, in which somebody else may be at work."""

from __future__ import annotations

import os
import time

from ringfence_workspace.history.entries import Difference
from ringfence_workspace.tree.confined import Confined

PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_OBJECTS = ".git/objects/"


def is_in_git(path: str) -> bool:
    """Whether a path is the repository in the root, or in it."""
    return path == ".git" or path.startswith(".git/")


def is_new_object(item: Difference) -> bool:
    """Whether it is an object or a pack that has come: git needs it where a commit of somebody else names it."""
    return item.before is None and item.path.startswith(_OBJECTS)


def wait_for_git(files: Confined, seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait until no git command holds a lock in the repository of the root. Return whether none does."""
    until = time.monotonic() + seconds
    while _is_locked(files):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _is_locked(files: Confined) -> bool:
    try:
        descriptor = files.open_directory(".git")
    except OSError:
        return False
    try:
        for place, directories, names, _ in os.fwalk(dir_fd=descriptor):
            if place == ".":
                directories[:] = [name for name in directories if name not in ("objects", "hooks", "modules")]
            if any(name.endswith(".lock") or name == "gc.pid" for name in names):
                return True
        return False
    finally:
        os.close(descriptor)
