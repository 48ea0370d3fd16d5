"""Ctrl-C, held back where a transaction must not be torn."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

# `signal` itself looks its arguments up in enums. That would be a fifth of a whole call in memory.
_in_c: Any = sys.modules.get("_signal", signal)

_main_thread = threading.main_thread().ident


def _forked() -> None:
    global _main_thread  # noqa: PLW0603
    _main_thread = threading.main_thread().ident


os.register_at_fork(after_in_child=_forked)


class Interrupts:
    """Ctrl-C held back while a transaction begins, commits or rolls back. Main thread only: others get none.

    The handler of SIGINT is swapped for the length of a call, since a signal mask does not hold where other threads
    run. `allow` lets one interrupt through. Further ones are held back again, so that the code that it interrupted can
    undo its work undisturbed, even if that is still on its way to an ``except`` clause. After a second they are let
    through, too: a tool's handler that swallows interrupts can still be ended. `remove` puts the old handler back, and
    then delivers what was held.
    """

    __slots__ = ("_delivered", "_holding", "_outer", "_pending", "_previous")

    def __init__(self) -> None:
        global _installed  # noqa: PLW0603
        self._holding = True
        self._pending = False
        self._delivered = 0.0  # when one was let through that may still be on its way; 0: none
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._outer: Interrupts | None = None
        if threading.get_ident() != _main_thread:
            return
        outer = _installed
        if outer is not None:  # a nested call shares its outer call's
            self._outer = outer
            self._holding = outer._holding
            outer._holding = True
            return
        previous = _in_c.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            _in_c.signal(signal.SIGINT, self)
            _installed = self

    def allow(self) -> None:
        """Let Ctrl-C through from here; one that came meanwhile comes now."""
        chief = self._outer or self
        chief._holding = False
        if chief._pending:
            chief._pending = False
            chief._deliver()

    def hold(self) -> None:
        chief = self._outer or self
        chief._holding = True
        chief._delivered = 0.0

    def remove(self) -> None:
        """End the holding back; a nested call leaves the handler in place for its outer call."""
        global _installed  # noqa: PLW0603
        if self._outer is not None:
            if not self._holding:  # else the outer call is rolling back, and this one was made by what it closes
                self.allow()
        elif self._previous is not None:
            _installed = None
            if _in_c.getsignal(signal.SIGINT) is self:  # else the handler of the tool has set one of its own
                _in_c.signal(signal.SIGINT, self._previous)
            if self._pending:
                self._pending = False
                self._previous(signal.SIGINT, None)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler itself: one has arrived."""
        unheeded = self._delivered and monotonic() - self._delivered > 1.0
        if self._holding and not unheeded:
            self._pending = True
        else:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None = None) -> None:
        if self._previous is not None:
            self._holding, self._delivered = True, monotonic()
            self._previous(signal.SIGINT, frame)
            self._holding, self._delivered = False, 0.0  # a handler of somebody's own that does not raise


_installed: Interrupts | None = None
"""What holds Ctrl-C back now. (Of the module: what changes a class makes the interpreter forget where its attributes
are.)"""
