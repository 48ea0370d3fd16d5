"""The directories that a fork has not itself: its containers show those of its source, to be read."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from ringfence.filesystem.paths import directories_above, normalise
from ringfence_workspace.forks.fork_records import own_fork
from ringfence_workspace.history.undo_plan import git_place
from ringfence_workspace.transaction.step_history import StepHistory

SHARED = "shared"
"""Why a copy leaves a directory out, of which it has an empty one."""


def directories_to_share(share: Collection[str], root: str, store: str, history: StepHistory) -> Mapping[str, str]:
    """What a fork of the workspace at ``root`` shares: the directories that it names, and those that the workspace
    itself shares as a fork. By path the root of the workspace that has it.

    Raises:
        ValueError: something cannot be shared, or is outside of the workspace.
        TypeError: ``share`` is a text.
    """
    if isinstance(share, str):
        raise TypeError(f"share is a list of directories, not a text: [{share!r}]")
    found = {**shared_by_fork(store)}
    for name in share:
        try:
            path = normalise(name)
        except PermissionError:
            raise ValueError(f"{name!r} cannot be shared: it is not in {root}") from None
        if found.get(path) is not None:
            continue
        if why := _why_not(path, found, history):
            raise ValueError(f"{name!r} cannot be shared: {why}")
        found[path] = root
    return dict(sorted(found.items()))


def _why_not(path: str, others: Collection[str], history: StepHistory) -> str:
    """Why a directory cannot be shared. Empty: it can."""
    if not path:
        return "a fork has a tree of its own"
    if git_place(path) is not None:
        return "a fork has git's data of its own"
    if history.hidden is not None and history.hidden.hides(path):
        return "it is hidden"
    if any(is_in(path, [one]) or is_in(one, [path]) for one in others):
        return "it contains another directory that is shared, or is in one"
    for above in (path, *directories_above(path)):
        if above in history.left_out:
            return f"{above} is left out of the history ({history.left_out[above][0]})"
    try:
        if history.files.is_reserved(path):
            raise NotADirectoryError
        os.close(history.files.open_directory(path))
    except OSError:
        return "it is no directory, or one that a link leads to"
    return ""


def is_in(path: str, directories: Collection[str]) -> bool:
    """Whether a path is one of some directories, or is in one."""
    return bool(directories) and any(place in directories for place in (path, *directories_above(path)))


def shared_by_fork(store: str) -> Mapping[str, str]:
    """What the fork of a store shares, by path the root of the workspace that has it. Nothing where it is no fork."""
    record = own_fork(store)
    return {} if record is None else record.shared


def shared_in(history: StepHistory | None) -> Mapping[str, str]:
    """`shared_by_fork` for a history. None: it is of a workspace without one."""
    return {} if history is None else shared_by_fork(os.fspath(history.store.folder.parent))
