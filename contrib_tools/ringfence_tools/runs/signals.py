"""Ctrl-C and similar signals. They raise one KeyboardInterrupt, and only in a block that lets them through."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ALIKE = (signal.SIGTERM, signal.SIGHUP)
"""The signals that are handled like Ctrl-C."""


class Signals:
    """A context in which SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt. Main thread only.

    Outside of `let_through` they wait. After one was let through, the next ones wait again, so the interrupted code can
    clean up. A signal that was ignored before (``nohup``, a background job of a script) stays ignored. In a process
    that a tool forks, every signal has its earlier handler: a worker that is told to end must end.
    """

    def __init__(self) -> None:
        self.arrived = False
        """Whether a signal waits."""
        self.has_come = False
        """Whether a signal has ever come. Its sender waits for the end of the process."""
        self._holding = True
        self._hear: Callable[[], object] | None = None
        self._unraisable = sys.unraisablehook
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, *ALIKE):
            previous = signal.getsignal(number)
            # The handler of SIGINT is there in any case: the others call it.
            if previous is not signal.SIG_IGN or number == signal.SIGINT:
                self._previous[number] = previous
                signal.signal(number, self._interrupted if number == signal.SIGINT else self._ended)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._lost
        _entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _entered:  # else this is a child
            _entered.remove(self)
        sys.unraisablehook = self._unraisable
        self.put_back()

    def put_back(self) -> None:
        """Restore the earlier handlers, unless somebody has replaced ours."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) in (self._interrupted, self._ended):
                signal.signal(number, previous)

    @contextmanager
    def let_through(self) -> Generator[None]:
        """A block in which KeyboardInterrupt may come at any instruction, at most once."""
        self._release()
        try:
            yield
        finally:
            self._holding = True

    @contextmanager
    def notifying(self, hear: Callable[[], object]) -> Generator[None]:
        """A block outside of `let_through` in which `hear` is called when a signal comes. The call interrupts the main
        thread. If a signal waits already, it is called at once."""
        self._hear = hear
        try:
            if self.arrived:
                hear()
            yield
        finally:
            self._hear = None

    @contextmanager
    def held(self) -> Generator[None]:
        """A part of a `let_through` block in which signals wait. They are raised at its end."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            if not before:
                self._release()

    def end_at_once_with(self, exit_code: int) -> None:
        """End the process at the next signal. All work is done, and only threads of tools may still run."""
        for number in self._previous:
            signal.signal(number, lambda _number, _frame: os._exit(exit_code))

    def ignore(self) -> None:
        """Ignore all signals. While Python ends, they would change the exit code of the process."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def _release(self) -> None:
        self._holding = False
        if self.arrived:
            self._raise()

    def _raise(self) -> None:
        self._holding, self.arrived = True, False
        raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._previous[signal.SIGINT] is signal.SIG_IGN and not self.has_come:
            return
        self.has_come = True
        if not self._holding:
            self._raise()
        self.arrived = True
        if self._hear is not None:
            self._hear()

    def _ended(self, number: int, frame: FrameType | None) -> None:
        # By way of SIGINT's handler, since a tool call puts one of its own there, which holds interrupts back over its
        # commit and its rollback.
        self.has_come = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)

    def _lost(self, unraisable: UnraisableHookArgs) -> None:
        """Keep an interrupt that came in a finalizer, where no exception can be raised. The next `held` raises it."""
        if unraisable.exc_type is KeyboardInterrupt:
            self._holding, self.arrived = False, True
        else:
            self._unraisable(unraisable)


def interrupted() -> bool:
    return any(one.has_come for one in _entered)


_entered: list[Signals] = []
_masks = threading.local()


def _hold_back() -> None:
    """Block the signals during a fork. Python loses signals that come to a child too early."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ALIKE if _entered else ())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forked() -> None:
    while _entered:
        _entered.pop().put_back()
    _unblock()


os.register_at_fork(before=_hold_back, after_in_parent=_unblock, after_in_child=_forked)
