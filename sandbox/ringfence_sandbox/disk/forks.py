"""What a forked child must not have a copy of: the locks and streams that are to end with this process.

A fork copies every descriptor, whatever another thread is about to do with it. So who makes or closes one of these
does so ``with FORKS:``, noting in the same block what the child is to close; a fork waits for the end of the block.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

FORKS = threading.RLock()
"""Re-entrant, since a signal's handler may fork within the block. Nothing in one waits for anybody else."""


def _let_go() -> None:
    with suppress(RuntimeError):  # Ctrl-C came in its place
        FORKS.release()


def _let_go_in_child() -> None:
    try:
        FORKS.release()
    except RuntimeError:  # likewise: a thread has it that there is not in the child
        FORKS._at_fork_reinit()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


# Before those of who notes things, which go on with it in the child.
os.register_at_fork(before=FORKS.acquire, after_in_parent=_let_go, after_in_child=_let_go_in_child)
