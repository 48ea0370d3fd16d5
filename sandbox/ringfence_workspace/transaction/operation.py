"""One operation on a workspace: all of its changes, or none."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, TypeGuard

from ringfence.runtime.interrupts import Interrupts

if TYPE_CHECKING:
    from types import TracebackType

    from ringfence_workspace.transaction.transactions import Transactions

_ELSEWHERE = (
    "cannot be changed, since that could not be rolled back: it is on another filesystem than the workspace's root "
    "(mounted in it, or a layer of an overlay)"
)
_FULL = "the workspace's filesystem is full, and what a call replaces stays there until it ends: make room"

NOT_ROLLED_BACK = (
    "the workspace's filesystem is full, so what a call replaced cannot be brought back: make room, and open the "
    "workspace again, which completes it"
)
_GONE = (
    "the directory in the root in which displaced files wait ({}) was removed during the call, which cannot be taken "
    "back without it: let the call fail, and find what has removed it"
)


def is_full(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether a disk is full, and nobody has said more than that: of the store it is said what to do."""
    return (
        isinstance(error, OSError)
        and error.errno in (errno.ENOSPC, errno.EDQUOT)
        and error.strerror == os.strerror(error.errno)
    )


class Operation:
    """One operation on a workspace. (On the way of every file: no generator.)"""

    __slots__ = ("_began", "_held", "_transactions")

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def __enter__(self) -> None:
        self._held = Interrupts()
        try:
            self._began = self._transactions.begin_operation()
        except BaseException:
            self._held.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._transactions.end_operation(self._began, failed=error is not None)
            if isinstance(error, OSError) and error.errno == errno.EXDEV:
                raise OSError(errno.EXDEV, _ELSEWHERE, error.filename) from error
            if isinstance(error, FileNotFoundError) and (hold := self._transactions.undo.held) and not hold.is_in_place:
                raise OSError(errno.ESTALE, _GONE.format(hold.name)) from error
            if is_full(error):
                raise OSError(error.errno, f"{error.strerror}: {_FULL}") from error
        finally:
            self._held.remove()
