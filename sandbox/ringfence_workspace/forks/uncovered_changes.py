"""What of a fork's changes no history covers, so that a promotion leaves it out and has to name it."""

from __future__ import annotations

import filecmp
import os
import stat
from collections.abc import Iterator

from ringfence_workspace.forks.fork_records import Fork
from ringfence_workspace.history.undo_plan import git_place
from ringfence_workspace.transaction.step_history import StepHistory
from ringfence_workspace.tree.linked_worktrees import LINKED_WORKTREE

_WORDS = {
    "hidden": "hidden files are never promoted",
    "too large": "it is too large for a history: copy it yourself",
    LINKED_WORKTREE: "a linked worktree of git stays in the fork: push its branch, or fetch it from there",
}
_DELETED = "the fork has deleted it, and no history has it"


def uncovered_changes(fork: Fork, own: StepHistory) -> dict[str, str]:
    """The paths that a fork has changed and its history does not cover, and why they are not promoted. ``own`` has just
    scanned the tree."""
    found: dict[str, str] = {}
    for path, (reason, _) in own.left_out.items():
        if git_place(path) is None and (reason == LINKED_WORKTREE or _is_changed(fork, path)):
            found[path] = _WORDS.get(reason, f"the history does not have it ({reason})")
    states = own.store.states
    for path in states.unknown(fork.base).reasons:
        is_gone = path not in found and path not in own.left_out and not os.path.lexists(os.path.join(fork.root, path))
        if is_gone and git_place(path) is None and os.path.lexists(os.path.join(fork.source, path)):
            found[path] = _DELETED
    return found


def _is_changed(fork: Fork, path: str) -> bool:
    """Whether something was changed after the fork was made, and is not as in the source. Of a directory, whether
    anything below it was."""
    return any(_differs(os.path.join(fork.root, one), os.path.join(fork.source, one)) for one in _touched(fork, path))


def _touched(fork: Fork, path: str) -> Iterator[str]:
    """The files at a path and below it that were changed after the fork was made, if only in their permissions."""
    place = os.path.join(fork.root, path)
    try:
        status = os.lstat(place)
        names = os.listdir(place) if stat.S_ISDIR(status.st_mode) else None
    except OSError:
        return
    if names is None and status.st_ctime_ns > fork.copied_ns:
        yield path
    for name in names or ():
        yield from _touched(fork, f"{path}/{name}")


def _differs(one: str, other: str) -> bool:
    try:
        here, there = os.lstat(one), os.lstat(other)
        if stat.S_IFMT(here.st_mode) != stat.S_IFMT(there.st_mode):
            return True
        if stat.S_ISLNK(here.st_mode):
            return os.readlink(one) != os.readlink(other)
        return stat.S_ISREG(here.st_mode) and not filecmp.cmp(one, other, shallow=False)
    except OSError:
        return True
