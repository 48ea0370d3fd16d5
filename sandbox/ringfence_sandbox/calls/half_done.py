"""What a tool call has half done in a directory, for who only looks there. Nothing is changed."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import IO

from ringfence_sandbox.disk.places import StateDirectoryError, state_directory, store_of


def killed_call(root: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that was killed in a workspace with this real path, and left it half done."""
    return waiting(root, store_of(root))


def waiting(root: str, store: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that a killed process left half done, for the next opening to take back. None where
    there is none, or somebody has the workspace open."""
    with suppress(OSError, ValueError), open(os.path.join(store, "holder"), "rb") as holder:
        _check_free(holder)
        found = _begun(root, store)
        _check_free(holder)  # nobody has come meanwhile
        return found
    return None


def _check_free(holder: IO[bytes]) -> None:
    """BlockingIOError where an opener has the lock. It is tried for no longer than an opener has patience with, and let
    go of by name: a child that was forked meanwhile has it open, too."""
    fcntl.flock(holder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(holder, fcntl.LOCK_UN)


def _begun(root: str, store: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that has begun to change the tree, and is not committed."""
    # Imported here: most directories that somebody asks about are no workspaces.
    from ringfence_sandbox.calls.journal import Journal
    from ringfence_sandbox.calls.journal_replay import Replay

    with suppress(OSError, ValueError), closing(Journal(os.path.join(store, "journal"), only_read=True)) as journal:
        replay = Replay.of(journal.records)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return replay.call if replay.is_of(descriptor) and not replay.committed else None
        finally:
            os.close(descriptor)
    return None


def killed_in(path: str) -> str | None:
    """What to say where a call that was killed has left a directory half done, or one above it."""
    for above in _with_those_above(path):
        if (call := killed_call(above)) is not None:
            recover = f"`ringfence recover {shlex.quote(above)}` takes it back"
            return f"the tool call {call[0]} ({call[1]}) was killed, and what it had done is still there: {recover}"
    return None


def running_in(path: str) -> str | None:
    """What to say where a call of another process runs in a directory, or in one above it."""
    for above in _with_those_above(path):
        store = store_of(above)
        with suppress(OSError), open(os.path.join(store, "holder"), "rb") as holder:
            try:
                _check_free(holder)
            except BlockingIOError:
                if (call := _begun(above, store)) is not None:
                    other = f"the tool call {call[0]} ({call[1]}) of another process"
                    return f"{other} is at work there: the copy has its changes"
    return None


def _with_those_above(path: str) -> Iterator[str]:
    """The real path of a directory, and those of the directories that it is in; none where no call can have begun."""
    try:
        state_directory()
    except StateDirectoryError:
        return
    above, below = os.path.realpath(path), ""
    while above != below:
        yield above
        above, below = os.path.dirname(above), above
