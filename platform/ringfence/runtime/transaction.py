"""Transactions: the span of one tool call over everything that can be rolled back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Protocol, TypeAlias, TypeVar
from uuid import uuid4

from ringfence.errors import CallEndedError, RestoreFailedError, SnapshotRestoreError, TransactionError
from ringfence.participants import (
    CLEAN,
    CallInfo,
    CallLock,
    Change,
    Mark,
    RollbackReport,
    Snapshotable,
    Step,
    Transactional,
    current_call,
    set_current_call,
)
from ringfence.resources import ResourceType
from ringfence.runtime.ids import new_id
from ringfence.runtime.interrupts import Interrupts
from ringfence.runtime.limits import utc_now
from ringfence.runtime.lock_order import Participants, locks_to_keep, sort_locks
from ringfence.runtime.receipts import Outcome, Receipt
from ringfence.runtime.session import Session
from ringfence.runtime.snapshots import CompositeSnapshot, SnapshotMetadata

ResourceT = TypeVar("ResourceT")

# Of the fields of all transactions, for the few lines that look at several of them. Taken within participants' mutexes
# and never the other way round; nothing is called with it held. (Re-entrant, since Python may come to collect an
# abandoned generator, or to call a signal's handler, at any line: what that ends, or makes, has lines of its own.)
_guard = threading.RLock()


def _forked() -> None:
    global _guard  # noqa: PLW0603
    _guard = threading.RLock()  # the thread that had it is not in the child


os.register_at_fork(after_in_child=_forked)


class Transaction(CallInfo):
    """One tool call's hold on its participants, and their marks.

    `lock`, `begin`, then `commit` or `rollback`, and `release` whatever happened. A nested call takes along the
    participants of its parent, and what it meets first joins the parent too: an inner commit is a savepoint that an
    outer rollback takes along.
    """

    __slots__ = ("_begun", "_children", "_held", "_inner_receipts", "_kept", "_marks", "_superseded", "left")

    def __init__(self, call_id: str, tool: str, parent: CallInfo | None, *, opaque: bool = False) -> None:
        super().__init__(call_id, tool, parent, opaque=opaque)
        self.sealed = True
        self._held: dict[CallLock, Transactional] = {}
        self._kept: tuple[CallLock, ...] = ()
        self._marks: dict[CallLock, Mark] = {}
        self._children: set[Transaction] = set()
        self._inner_receipts: list[tuple[Session, Receipt]] = []
        """The receipts of calls within this one that have committed, each with the session that has it."""
        self._begun = False
        self._superseded = False
        self.left = False
        """Whether it has ended before a call within it, where that one runs: there nothing is within it any more."""

    def lock(self, participants: Participants) -> None:
        """Take every participant.

        Raises:
            ParticipantBusyError: another call holds one of them.
            RestoreFailedError: one of them is in a doubtful state.
            CallEndedError: the handler that makes this call has ended.
        """
        parent = self.parent if isinstance(self.parent, Transaction) else None
        if parent is not None:
            participants = sort_locks((*participants.by_lock.values(), *parent._adopt(self)))
            for participant in participants.by_lock.values():
                parent.join(participant)
        self._kept = participants.kept
        self._held.update(participants.by_lock)  # first of all, so that whatever has been taken is given back
        for lock in participants.by_lock:
            lock.take(self)

    def _adopt(self, child: Transaction) -> Collection[Transactional]:
        with _guard:
            if self.sealed:
                raise CallEndedError(f"the handler of {self!r} is not running: it makes no calls")
            self._children.add(child)
            return [*self._held.values()]

    def begin(self) -> None:
        """Mark every participant; from here on changes go through."""
        marks = self._marks
        if self.parent is None:  # so nothing can supersede it
            for lock, participant in self._held.items():
                marks[lock] = participant.begin(self)
            self.reads.clear()
            self.read_before = None
            self._begun = True
            self.sealed = False
            return
        for lock, participant in self._held.items():
            # With the mutex, which the rollback of the call around takes: after that nobody would end this mark.
            with lock.mutex:
                self._refuse_superseded()
                marks[lock] = participant.begin(self)
        self.reads.clear()
        self.read_before = None
        with _guard:
            self._refuse_superseded()
            self._begun = True
            self.sealed = False

    def _refuse_superseded(self) -> None:
        if self._superseded:
            raise CallEndedError(f"the call that made {self!r} has ended, and took it back")

    def mark_of(self, lock: CallLock) -> Mark | None:
        return self._marks.get(lock)

    def join(self, participant: Transactional) -> None:
        lock = participant.lock
        with lock.mutex:
            with _guard:
                if lock in self._held and (lock.holder is None or not lock.holder.within(self)):
                    raise CallEndedError(f"{self!r} has ended: {lock.name} can no longer be changed through it")
                if lock in self._held:
                    return
            if self.parent is not None:
                self.parent.join(participant)
            self._refuse_late(participant)
            mark = None
            try:
                lock.take(self, patience_seconds=0)
                mark = participant.begin(self) if self._begun else None
                with _guard:
                    self._refuse_late(participant)
                    self._held[lock] = participant
                    if self._begun:
                        self._marks[lock] = mark
                    self._kept = locks_to_keep(self._held)
            except BaseException:
                if mark is not None:
                    participant.rollback(mark)
                lock.give_back(self, self.parent)
                raise

    def _refuse_late(self, participant: Transactional) -> None:
        if self.ended:
            raise CallEndedError(f"{self!r} has ended: {participant.lock.name} can no longer take part in it")

    def changed(self, session: Session) -> bool:
        """Whether the handler changed a file, or a STATE slice of `session`."""
        return bool(self.changes) or session.changed(self._marks[session.lock])

    def seal(self) -> None:
        """The handler has ended: no more changes through this call, and what it changed is known."""
        with _guard:
            self.sealed = True
            kept, running = self._kept, [*self._children]
        for child in running:
            # Its changes are half of something, so they cannot be kept; they go back with this call's.
            child.supersede()
            self.problems.append(TransactionError(f"{child!r} was still running when the handler that made it ended"))
        for lock in kept:
            with lock.mutex:
                if self._superseded:  # what has changed since this mark may be of a call after the one around this one
                    break
                changes = self._held[lock].changes(self._marks[lock])
            if changes:
                self.changes[lock] = changes
        self._refuse_superseded()

    def tracks_external_writes(self) -> bool:
        """Whether what a program changes is seen, and can be taken back."""
        return any(one.tracks_external_writes for one in self._held.values())

    def reads_by_path(self) -> dict[str, str]:
        """The sha256 of what was read; where it was of several filesystems, their names stand before the paths."""
        if len(self.reads) == 1:
            [reads] = self.reads.values()
            return reads.copy()
        return {
            _named(lock, path, self.reads): sha for lock, reads in self.reads.items() for path, sha in reads.items()
        }

    def all_changes(self) -> Sequence[Change]:
        """Of all filesystems; where there are several, their names stand before the paths."""
        if not self.changes:
            return ()
        if len(self.changes) == 1:
            return next(iter(self.changes.values()))
        return [
            replace(change, path=_named(lock, change.path, self.changes))
            for lock, changes in self.changes.items()
            for change in changes
        ]

    def supersede(self) -> None:
        """A call around this one has ended, and takes this one's changes back along with its own."""
        with _guard:
            self.sealed = self.ended = self._superseded = True
            children = list(self._children)
        for child in children:
            child.supersede()

    def commit(self, receipt: Receipt) -> Step | None:
        """Keep everything. The durable participant goes first: it can fail, and then the caller rolls back.

        Raises:
            TransactionError: two participants that outlive the process were changed, or a call around has ended.
        """
        self._refuse_superseded()
        held = self._held
        if len(self.changes) > 1:
            changed = [lock.name for lock in self.changes if held[lock].durable]
            if len(changed) > 1:
                raise TransactionError(f"one call can change one workspace on disk, not several: {', '.join(changed)}")
        step = None
        for lock in self._kept:
            with lock.mutex:  # so that the call around has not gone back yet, to before this mark
                self._refuse_superseded()
                step = held[lock].commit(self._marks[lock], receipt) or step
        with _guard:
            self._marks = {}
            self.ended = True
        return step

    def rollback(self) -> RollbackReport:
        """Bring every participant back to its mark; nothing happens where nothing was begun or all was committed.

        One that cannot go back does not stop the others. It stays as it is, dooms the calls around this one, and is
        tried again before the next call gets it.

        Raises:
            RestoreFailedError: naming each participant that could not go back.
        """
        with _guard:
            self.sealed = self.ended = True
            marks, self._marks = list(self._marks.items()), {}
            running = list(self._children)
        for child in running:
            child.supersede()
        if self._superseded:
            return CLEAN
        failures: list[tuple[str, BaseException]] = []
        conflicts: list[str] = []
        notes: list[str] = []
        for lock, mark in reversed(marks):
            try:
                with lock.mutex:
                    if self._superseded:  # meanwhile: what is there now may be of a call after the one around this one
                        break
                    report = self._held[lock].rollback(mark)
                conflicts += report.conflicts
                notes += report.notes
                lock.leave(None)
            except BaseException as error:  # whatever it is, the others must still go back
                failures.append((lock.name, error))
                lock.leave(_again(self._held[lock], mark))
        if not failures:
            return RollbackReport(tuple(conflicts), tuple(notes)) if conflicts or notes else CLEAN
        failed = RestoreFailedError(failures)
        around = self.parent
        while around is not None:
            around.problems.append(failed)
            around = around.parent
        raise failed

    def merge_into_parent(self, *own: tuple[Session, Receipt]) -> ReceiptUpdates:
        """This call has committed. One around it gets the receipts, its ``own`` too, to say so when it takes the call
        back; where it has done that already, the answer is as of `taken_back`."""
        around = self.parent
        if not isinstance(around, Transaction):
            return ()
        with _guard:
            receipts, self._inner_receipts = [*self._inner_receipts, *own], []
            if not self._superseded:
                around._inner_receipts += receipts
                self._account_to(around, governed=bool(own) or self.opaque)
                return ()
        return _said_again(receipts, "rolled_back", around.call_id)

    def _account_to(self, around: Transaction, *, governed: bool) -> None:
        """A call with policies has answered for what it changed. One without is a part of the handler around it."""
        known = {lock: set(files) for lock, files in (self.answered_for or {}).items()}
        if governed:
            for lock, changes in self.changes.items():
                files = known.setdefault(lock, set())
                files.update(
                    (one.path, one.before.content_hash) for one in changes if one.before and _took_content(one)
                )
        else:
            for lock, earlier in (self.read_before or {}).items():
                for path, sha256 in earlier:
                    around.note_read(lock, path, sha256)
            for lock, reads in self.reads.items():
                for path, sha256 in reads.items():
                    around.note_read(lock, path, sha256)
        if known:
            around.answered_for = around.answered_for or {}
            for lock, files in known.items():
                around.answered_for.setdefault(lock, set()).update(files)

    def taken_back(self, *, doubtful: bool = False) -> ReceiptUpdates:
        """This call has not committed: the receipts that say so of the calls within it. They are in their sessions'
        logs, and nobody has been notified. ``doubtful`` where the rollback could not be completed."""
        with _guard:
            receipts, self._inner_receipts = self._inner_receipts, []
        return _said_again(receipts, "doubtful" if doubtful else "rolled_back", self.call_id)

    def release(self) -> None:
        """Let go of everything; the parent, if there is one, has it again."""
        if not self.ended:
            with _guard:
                self.ended = True
        # From here on nothing joins.
        for lock in self._held:
            lock.give_back(self, self.parent)
        if isinstance(self.parent, Transaction):
            with _guard:
                self.parent._children.discard(self)
                self.parent.inner.append(self.call_id)


ReceiptUpdates: TypeAlias = Sequence[tuple[Session, Receipt]]
"""Receipts, and the sessions whose observers are to be notified of them."""


def _said_again(receipts: ReceiptUpdates, outcome: Outcome, by: str) -> ReceiptUpdates:
    again = [(session, replace(receipt, outcome=outcome, rolled_back_by=by)) for session, receipt in receipts]
    for session, receipt in again:
        session.apply(receipt, to="log")
    return again


def _named(lock: CallLock, path: str, among: Collection[CallLock]) -> str:
    return path if len(among) == 1 else f"{lock.name} {lock.serial}:{path}"


def _took_content(change: Change) -> bool:
    """Whether what was at the path is there no more. Permissions say nothing about it."""
    was = change.before and change.before.content_hash
    return was is None or change.after is None or change.after.content_hash != was


def _again(participant: Transactional, mark: Mark) -> Callable[[], None]:
    def complete() -> None:
        try:
            participant.rollback(mark)
        except Exception as error:
            raise RestoreFailedError([(participant.lock.name, error)]) from error

    return complete


def _around(call: Transaction) -> CallInfo | None:
    """The call that is current again when this one ends. One around it that has ended elsewhere is: this is a thread of
    its handler then, whose calls are to be refused. (A function of its own, as `nearest_active` is.)"""
    around = call.parent
    while isinstance(around, Transaction) and around.left:
        around = around.parent
    return around


def leave(call: Transaction, *interrupts: Interrupts) -> None:
    """The end of a call: the context variable names the one around it again, and Ctrl-C is free."""
    try:
        # Not by a token: an abandoned generator ends in another context, and two of them end in any order.
        current = current_call()
        if current is call:
            set_current_call(_around(call))
        elif current is not None and current.within(call):
            call.left = True
    finally:
        for held in interrupts[::-1]:
            held.remove()


class HasParticipants(Protocol):
    """A live resource context, or anything else that knows what takes part."""

    @property
    def participants(self) -> tuple[Transactional, ...]: ...


@contextmanager
def tool_transaction(
    session: Session, resources: HasParticipants | None = None, *, tag: str = "transaction", opaque: bool = False
) -> Generator[Transaction]:
    """A transaction of one's own over a session and the participants of `resources` (``prompt.resources``, say).

    Commits at the end of the block; whatever exception leaves the block, all is rolled back first, and what that has
    to say (what somebody else had changed, say) is in the exception's notes. ``tag`` takes the
    place of the tool's name in receipts and messages. ``opaque`` is for a block that changes files other than through
    a filesystem, by a command, say.

    Raises:
        RestoreFailedError: the rollback could not be completed.
        TypeError: no session, or resources that know of no participants, such as a prompt.
    """
    if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]  # `checked` would cost as much as all else
        raise TypeError(f"tool_transaction: session is a Session (Session()), not {session!r}")
    try:
        participants = resources.participants if resources is not None else ()
    except AttributeError as error:
        raise TypeError(
            f"tool_transaction: resources are prompt.resources, within its block, not {resources!r}"
        ) from error
    started, clock = datetime.now(UTC), perf_counter()
    transaction = Transaction(new_id(), tag, current_call(), opaque=opaque)
    # Not over the block: who knows which loop runs it, or when. What slips through between two lines here meets the
    # outer clause.
    held: list[Interrupts] = []
    told: ReceiptUpdates = ()
    try:
        try:
            set_current_call(transaction)
            transaction.lock(sort_locks((session, *participants)))
            held.append(Interrupts())
            transaction.begin()
            held.pop().remove()
            yield transaction
            held.append(Interrupts())
            transaction.seal()
            if transaction.problems:
                raise TransactionError(f"it cannot be kept: {transaction.problems[0]}") from transaction.problems[0]
            transaction.commit(_receipt(transaction, session, started, perf_counter() - clock))
            told = transaction.merge_into_parent()
        except BaseException as error:
            held.append(Interrupts())
            for words in transaction.rollback().said():
                error.add_note(words)
            raise
    except BaseException as error:
        held.append(Interrupts())
        try:
            transaction.rollback()
        finally:
            told = transaction.taken_back(doubtful=isinstance(error, RestoreFailedError))
        raise
    finally:
        try:
            transaction.release()
        finally:
            try:
                leave(transaction, *held)
            finally:
                for of, receipt in told:
                    of.notify(receipt)


def _receipt(transaction: Transaction, session: Session, started: datetime, seconds: float) -> Receipt:
    return Receipt(
        receipt_id=new_id(),
        call_id=transaction.call_id,
        tool=transaction.tool,
        params=None,
        outcome="committed",
        message="",
        started_at=started,
        duration_seconds=seconds,
        session_id=str(session.session_id),
        prompt_name="",
        changes=transaction.all_changes(),
        inner=transaction.inner,
    )


class LiveResources(HasParticipants, Protocol):
    """`Prompt.resources` within its block, or the `ResourceContext` that it opens."""

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]: ...

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None: ...


def create_snapshot(
    session: Session, resources: LiveResources | None = None, *, tag: str | None = None
) -> CompositeSnapshot:
    """Snapshot the STATE slices of a session, and the living resources that can be snapshotted.

    All of it is of one moment: a running tool call ends first. In a handler it has what the call has done so far.

    Raises:
        ParticipantBusyError: a tool call did not end in time.
        RuntimeError: resources outside of their block.
    """
    call = current_call()
    metadata = SnapshotMetadata(tag) if call is None else SnapshotMetadata(tag, call.call_id, call.tool)
    with tool_transaction(session, resources, tag="create_snapshot"):
        living: Mapping[type[Any], Snapshotable[Any]] = resources.snapshotable() if resources is not None else {}
        snapshots: dict[type[Any], object] = {kind: one.snapshot(tag=tag) for kind, one in living.items()}
        return CompositeSnapshot(uuid4(), utc_now(), session.snapshot(tag=tag), snapshots, metadata)


def restore_snapshot(session: Session, resources: LiveResources | None, snapshot: CompositeSnapshot) -> None:
    """Restore all of a snapshot, or nothing.

    It is a transaction: a step in the history of a workspace on disk, and part of the call in a handler. Logs stay, and
    so do external changes on disk.

    Raises:
        SnapshotRestoreError: the session lacks a slice, a resource is not bound here or the snapshot is not its own, or
            an opaque call has changed files on disk since, ran when it was made, or runs. Nothing has changed, as
            after any other error of a resource's ``restore``.
        RestoreFailedError: the rollback could not be completed.
    """
    with tool_transaction(session, resources, tag="restore_snapshot"):
        session.restore(snapshot.session)
        for protocol, held in snapshot.resources.items():
            resource = resources.get_optional(protocol) if resources is not None else None
            if resource is None:
                raise SnapshotRestoreError(f"the snapshot has a {protocol.__qualname__}, and nothing is bound to that")
            resource.restore(held)
