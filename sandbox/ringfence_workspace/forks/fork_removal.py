"""Removing a fork: whatever moment a kill comes at, it is named as unfinished, and can be removed again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from ringfence.errors import WorkspaceLockedError
from ringfence_workspace.forks.fork_records import (
    FORKS,
    Fork,
    borrowing_forks,
    forks_of,
    own_fork,
    record_file,
    save_fork,
)
from ringfence_workspace.history.store import Store
from ringfence_workspace.locking import describe_holder
from ringfence_workspace.tree.kernel import failpoint
from ringfence_workspace.tree.removal import remove_tree


def discard_fork(fork: Fork) -> None:
    """Delete a fork: its files and its history. Its source may be gone. It can be repeated where it was interrupted.

    Raises:
        WorkspaceLockedError: a process has it open.
        ValueError: there are forks of it.
        OSError: something of it cannot be removed.
    """
    living = borrowing_forks(fork.store)
    if living:
        raise ValueError(
            f"the fork {fork.name!r} has forks of its own, which borrow from it: first discard these of {fork.root}: "
            f"{', '.join(living)}"
        )
    with ExitStack() as locks:
        for place in (fork.root, os.path.join(fork.store, "holder")):
            _lock(fork, place, locks)
        remove_fork(fork)


def _lock(fork: Fork, place: str, locks: ExitStack) -> None:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WorkspaceLockedError(fork.root, describe_holder(fork.store)) from None


def remove_fork(fork: Fork) -> None:
    """Remove what there is of a fork. OSError: something of it stays, and its record says so."""
    fork = fork if fork.inode else own_fork(fork.store) or fork
    if record_file(fork.source_store, fork.name).exists():
        save_fork(replace(fork, state="unfinished"))
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(fork.store, "fork.json"))
    failpoint("discard files")
    remove_tree(fork.unfinished_root)
    if fork.is_there:
        remove_tree(fork.root)
    failpoint("discard history")
    remove_tree(fork.store)
    failpoint("discard record")
    record_file(fork.source_store, fork.name).unlink(missing_ok=True)


def drop_gone(store: Store, place: str) -> Sequence[str]:
    """Forget the forks whose directory is gone, and what was kept for them. What other forks borrow stays."""
    dropped: list[str] = []
    borrowing = borrowing_forks(place)
    for fork in forks_of(place):
        if fork.state == "gone" and fork.name not in borrowing:
            with suppress(OSError):
                remove_fork(fork)
                dropped.append(fork.name)
    names = {fork.name for fork in forks_of(place)}
    for name in store.kept():
        above, _, last = name.partition("/")
        if above == FORKS and last not in names:
            store.unkeep(name)
    return dropped
