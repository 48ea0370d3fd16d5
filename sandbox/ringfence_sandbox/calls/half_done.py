"""What a tool call has half done in a directory, for who copies it and does not open it as a workspace."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress

from ringfence_sandbox.disk.places import StateDirectoryError, state_directory, store_of


def killed_call(root: str) -> tuple[str, str] | None:
    """The call, by its id and tool, that was killed in a workspace with this real path, and left it half done."""
    store = store_of(root)
    if not os.path.exists(os.path.join(store, "journal")):
        return None  # without a look at what reads journals: most directories are no workspaces
    from ringfence_sandbox.calls.recovery import waiting

    return waiting(root, store)


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
                fcntl.flock(holder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                from ringfence_sandbox.calls.recovery import begun

                if (call := begun(above, store)) is not None:
                    other = f"the tool call {call[0]} ({call[1]}) of another process"
                    return f"{other} is at work there: the copy has its changes"
            else:
                fcntl.flock(holder, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
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
