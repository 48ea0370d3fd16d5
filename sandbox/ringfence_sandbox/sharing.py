"""One opened workspace for all in a process who ask to share it; it is closed when the last of them has let go."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence_sandbox.opening import Opened


class Share:
    """What one opener has of an opened workspace. Closing it twice is once."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self._closed = False
        with sharing():
            opened.shares += 1
            if opened not in _open:
                _open.append(opened)

    def check_open(self) -> None:
        """Raises ValueError once this share or the workspace is closed, and in a process that was forked off."""
        if self._closed:
            raise ValueError(f"the workspace {self.opened.root} is closed")
        self.opened.check_open()

    def close(self, end: Callable[[], None]) -> None:
        """Let go of it; ``end`` closes the workspace where nobody else has it. Where that fails it can be repeated."""
        with sharing():
            if self._closed:
                return
            if self.opened.shares == 1:
                end()
                _open.remove(self.opened)
            self.opened.shares -= 1
            self._closed = True


@contextmanager
def sharing() -> Generator[None]:
    """While it lasts, nobody else in this process comes to share a workspace, or lets go of one."""
    with _locks[0]:
        yield


def opened_here(root: str, *, store: str | None, power: bool) -> Opened | None:
    """The workspace that this process has open at a root and may change, if it has.

    Raises:
        ValueError: it is open with another store, or with less durability.
    """
    found = os.stat(root)
    for opened in _open:
        if not opened.is_open or opened.read_only or not os.path.samestat(os.fstat(opened.files.root), found):
            continue
        if store is not None and os.path.realpath(store) != opened.store:
            raise ValueError(f"the workspace {root} is open already, with the store {opened.store}")
        if power and not opened.core.power:
            raise ValueError(f'the workspace {root} is open already, with durability="process"')
        return opened
    return None


_locks = [threading.RLock()]
_open: list[Opened] = []


def _after_fork() -> None:
    # Whoever had one of these is not in the child.
    _locks[0] = threading.RLock()
    for opened in _open:
        opened.lock.free_mutex()


os.register_at_fork(after_in_child=_after_fork)
