"""Transactions: the span of one tool call over everything that can be rolled back."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import UTC, datetime
from time import perf_counter
from types import FrameType
from typing import Any, Protocol

from ringfence.errors import CallEndedError, RestoreFailedError, TransactionError
from ringfence.participants import CURRENT_CALL, CallInfo, CallLock, Mark, RollbackReport, Step, Transactional
from ringfence.runtime.receipts import Receipt
from ringfence.runtime.session import Session

# The functions in C below those of `signal`, which spend several us a call on looking handlers up in an enum.
_in_c: Any = sys.modules.get("_signal", signal)


def new_id() -> str:
    """An id for a call or a receipt: 128 random bits in hex."""
    return os.urandom(16).hex()


class Transaction(CallInfo):
    """One tool call's hold on its participants, and their marks.

    `lock`, `begin`, then `commit` or `rollback`, and `release` whatever happened. A nested call takes along the
    participants of its parent, and what it meets first joins the parent too: an inner commit is a savepoint that an
    outer rollback takes along.
    """

    __slots__ = ("_begun", "_held", "_joining", "_marks", "_over", "inner")

    def __init__(self, call_id: str, tool: str, parent: CallInfo | None) -> None:
        super().__init__(call_id, tool, parent)
        self.sealed = True
        self.inner: list[str] = []
        self._held: dict[CallLock, Transactional] = {}
        self._marks: dict[CallLock, Mark] = {}
        self._joining = threading.RLock()
        self._begun = False
        self._over = False

    def lock(self, participants: Iterable[Transactional]) -> None:
        """Take every participant, in the one order that all calls keep to.

        Raises:
            ParticipantBusyError: another call holds one of them.
            RestoreFailedError: one of them is in a doubtful state.
        """
        parent = self.parent if isinstance(self.parent, Transaction) else None
        everybody = {participant.lock: participant for participant in participants}
        if parent is not None:
            if parent.sealed:
                raise CallEndedError(f"the handler of {parent!r} has ended: it can make no more calls")
            everybody.update(parent._held)
        for lock, participant in sorted(everybody.items(), key=_serial):
            if parent is not None and lock not in parent._held:
                parent.join(participant)
            self._held[lock] = participant
            lock.take(self)

    def begin(self) -> None:
        """Mark every participant; from here on changes go through."""
        for lock, participant in self._held.items():
            self._marks[lock] = participant.begin(self)
        self.reads.clear()
        self._begun = True
        self.sealed = False

    def join(self, participant: Transactional) -> None:
        with self._joining:
            lock = participant.lock
            if lock in self._held:
                return
            if self._over:
                raise CallEndedError(f"{self!r} has ended: {participant!r} can no longer take part in it")
            if self.parent is not None:
                self.parent.join(participant)
            lock.take(self, patience_seconds=0)
            self._held[lock] = participant
            if self._begun:
                self._marks[lock] = participant.begin(self)

    def changed(self, session: Session) -> bool:
        """Whether the handler changed a file, or a STATE slice of `session`."""
        return bool(self.changes) or session.changed(self._marks[session.lock])

    def seal(self) -> None:
        """The handler has ended: no more changes through this call, and what it changed is known."""
        self.sealed = True
        self.changes = [
            change for lock, participant in self._held.items() for change in participant.changes(self._marks[lock])
        ]

    def commit(self, receipt: Receipt) -> Step | None:
        """Keep everything. The durable participant goes first: it can fail, and then the caller rolls back.

        Raises:
            TransactionError: two participants that outlive the process were changed.
        """
        everybody = list(self._held.items())
        durable = [(lock, one) for lock, one in everybody if one.durable and one.changes(self._marks[lock])]
        if len(durable) > 1:
            named = ", ".join(lock.name for lock, _ in durable)
            raise TransactionError(f"one call can change one workspace on disk, not several: {named}")
        step = None
        for lock, participant in sorted(everybody, key=_durable_first):
            step = participant.commit(self._marks[lock], receipt) or step
        self._marks = {}
        self._over = True
        return step

    def rollback(self) -> RollbackReport:
        """Bring every participant back to its mark; nothing happens where nothing was begun or all was committed.

        One that cannot go back does not stop the others. It stays as it is, and is tried again before the next call
        gets it.

        Raises:
            RestoreFailedError: naming each participant that could not go back.
        """
        self.sealed = self._over = True
        failures: list[tuple[str, BaseException]] = []
        conflicts: list[str] = []
        notes: list[str] = []
        for lock, mark in reversed(self._marks.items()):
            try:
                report = self._held[lock].rollback(mark)
            except BaseException as error:  # whatever it is, the others must still go back
                failures.append((lock.name, error))
                lock.unfinished = _again(self._held[lock], mark)
            else:
                lock.unfinished = None
                conflicts += report.conflicts
                notes += report.notes
        self._marks = {}
        if failures:
            raise RestoreFailedError(failures)
        return RollbackReport(tuple(conflicts), tuple(notes))

    def release(self) -> None:
        """Let go of everything; the parent, if there is one, has it again."""
        for lock in self._held:
            lock.give_back(self, self.parent)
        if isinstance(self.parent, Transaction):
            self.parent.inner.append(self.call_id)


def _serial(item: tuple[CallLock, Transactional]) -> int:
    return item[0].serial


def _durable_first(item: tuple[CallLock, Transactional]) -> bool:
    return not item[1].durable


def _again(participant: Transactional, mark: Mark) -> Callable[[], None]:
    def complete() -> None:
        try:
            participant.rollback(mark)
        except Exception as error:
            raise RestoreFailedError([(participant.lock.name, error)]) from error

    return complete


class Interrupts:
    """Ctrl-C held back while a transaction begins, commits or rolls back. Main thread only: others get none.

    The handler of SIGINT is swapped for the length of a call, since a signal mask does not hold where other threads
    run. `allow` lets one interrupt through; being let through holds the next ones back again, so that whatever it
    interrupted (an ``except`` clause that has not come to its first line, even) can undo its work undisturbed.
    `remove` puts the old handler back, and then delivers what was held.
    """

    _installed: Interrupts | None = None

    __slots__ = ("_holding", "_outer", "_pending", "_previous")

    def __init__(self) -> None:
        self._holding = True
        self._pending = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._outer: Interrupts | None = None
        if threading.get_ident() != threading.main_thread().ident:
            return
        if Interrupts._installed is not None:  # a nested call shares its outer call's
            self._outer = Interrupts._installed
            self._outer._holding = True
            return
        previous = _in_c.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            _in_c.signal(signal.SIGINT, self._arrived)
            Interrupts._installed = self

    def allow(self) -> None:
        """Let Ctrl-C through from here; one that came meanwhile comes now."""
        chief = self._outer or self
        chief._holding = False
        if chief._pending:
            chief._pending = False
            chief._deliver()

    def hold(self) -> None:
        (self._outer or self)._holding = True

    def remove(self) -> None:
        """End the holding back; a nested call leaves the handler in place for its outer call."""
        if self._outer is not None:
            self.allow()
        elif self._previous is not None:
            Interrupts._installed = None
            _in_c.signal(signal.SIGINT, self._previous)
            if self._pending:
                self._pending = False
                self._previous(signal.SIGINT, None)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._pending = True
        else:
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None = None) -> None:
        if self._previous is not None:
            self._holding = True
            self._previous(signal.SIGINT, frame)
            self._holding = False  # a handler of somebody's own that does not raise


class HasParticipants(Protocol):
    """A live resource context, or anything else that knows what takes part."""

    @property
    def participants(self) -> tuple[Transactional, ...]: ...


@contextmanager
def tool_transaction(
    session: Session, resources: HasParticipants | None = None, *, tag: str = "transaction"
) -> Generator[Transaction]:
    """A transaction of one's own over a session and the participants of `resources` (``prompt.resources``, say).

    Commits at the end of the block; whatever exception leaves the block, all is rolled back first. ``tag`` takes the
    place of the tool's name in receipts and messages.

    Raises:
        RestoreFailedError: the rollback could not be completed.
    """
    started, clock = datetime.now(UTC), perf_counter()
    transaction = Transaction(new_id(), tag, CURRENT_CALL.get())
    interrupts = Interrupts()
    entered = CURRENT_CALL.set(transaction)
    try:
        try:
            interrupts.allow()
            transaction.lock((session, *(resources.participants if resources is not None else ())))
            interrupts.hold()
            transaction.begin()
            interrupts.allow()
            yield transaction
            interrupts.hold()
            transaction.seal()
            if transaction.problems:
                raise TransactionError(f"a reducer failed: {transaction.problems[0]}") from transaction.problems[0]
            transaction.commit(
                Receipt(
                    receipt_id=new_id(),
                    call_id=transaction.call_id,
                    tool=tag,
                    params=None,
                    outcome="committed",
                    message="",
                    started_at=started,
                    duration_seconds=perf_counter() - clock,
                    session_id=str(session.session_id),
                    prompt_name="",
                    changes=transaction.changes,
                    inner=transaction.inner,
                )
            )
        except BaseException:
            interrupts.hold()
            transaction.rollback()
            raise
    except BaseException:  # an interrupt in the line before the one that holds them back
        transaction.rollback()
        raise
    finally:
        CURRENT_CALL.reset(entered)
        transaction.release()
        interrupts.remove()
