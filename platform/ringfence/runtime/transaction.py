"""Transactions: the span of one tool call over everything that can be rolled back."""

from __future__ import annotations

import itertools
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
from ringfence.failures import describe_error
from ringfence.limits import utc_now
from ringfence.participants import (
    CLEAN,
    TRANSITIONS,
    CallInfo,
    CallLock,
    CallState,
    Change,
    Contents,
    Detection,
    Mark,
    RollbackReport,
    Snapshotable,
    SortedParticipants,
    Step,
    Transactional,
    current_call,
    set_current_call,
    sort_participants,
)
from ringfence.receipts import Outcome, Receipt
from ringfence.resources import ResourceType
from ringfence.runtime.interrupts import Interrupts
from ringfence.session.session import Session
from ringfence.session.snapshots import CompositeSnapshot, SnapshotMetadata

ResourceT = TypeVar("ResourceT")

# Of the fields of all transactions, for the few lines that look at several of them. It is acquired within
# participants' mutexes, never the other way round, and nothing is called while it is held. (Re-entrant, since a signal
# handler or the collection of an abandoned generator may run such lines at any other line.)
_guard = threading.RLock()

_id_format = os.urandom(12).hex() + "%08x"  # drawn once a process
_numbers = itertools.count(1)


def _forked() -> None:
    global _guard, _id_format  # noqa: PLW0603
    _guard = threading.RLock()  # the thread that held it is not in the child
    _id_format = os.urandom(12).hex() + "%08x"


os.register_at_fork(after_in_child=_forked)


def new_id() -> str:
    """An id for a call or a receipt that no other process has."""
    return _id_format % next(_numbers)


ReceiptUpdates: TypeAlias = Sequence[tuple[Session, Receipt]]
"""Receipts, each with the session whose observers are to be notified of it."""


class Transaction(CallInfo):
    """One tool call's hold on its participants, and their savepoints.

    `acquire`, `begin`, then `commit` or `rollback`, and `release` whatever happened. A nested call takes the
    participants of its parent along, and a participant that joins it joins the parent too. So an inner commit only ends
    a savepoint, and an outer rollback undoes it.
    """

    __slots__ = (
        "_children",
        "_inner_receipts",
        "_marks",
        "_participants",
        "deactivated",
        "detection",
        "report",
        "step",
    )

    def __init__(self, call_id: str, tool: str, parent: CallInfo | None, *, opaque: bool = False) -> None:
        super().__init__(call_id, tool, parent, opaque=opaque)
        self.state = CallState.PREPARING
        self._participants = SortedParticipants({})
        self._marks: dict[CallLock, Mark] = {}
        self._children: set[Transaction] = set()
        self._inner_receipts: list[tuple[Session, Receipt]] = []
        """The receipts of inner calls that have committed."""
        self.deactivated = False
        """Whether this call ended while an inner one was current: then the inner one's end makes another current.

        It is no state of the call: a call can end on one thread and still be current on another."""
        self.report = CLEAN
        """What its rollback left."""
        self.step: Step | None = None
        """The step that its commit made, if it made one."""
        self.detection: Detection | None = None
        """How the changes of programs were found, once the call is sealed. None: the call runs none."""

    def _enter(self, state: CallState) -> bool:
        """Go to `state` if `TRANSITIONS` has that. Return whether it has."""
        with _guard:
            if state not in TRANSITIONS[self.state]:
                return False
            self.state = state
            return True

    @property
    def _is_superseded(self) -> bool:
        return self.state is CallState.SUPERSEDED

    def acquire(self, participants: SortedParticipants) -> None:
        """Acquire every participant.

        Raises:
            ParticipantBusyError: another call holds one of them.
            RestoreFailedError: one of them is in a doubtful state.
            CallEndedError: the handler that makes this call has ended.
        """
        if isinstance(self.parent, Transaction):
            participants = sort_participants((*participants.by_lock.values(), *self.parent._adopt(self)))
            for participant in participants.by_lock.values():
                self.parent.join(participant)
        self._participants = participants  # first, so that `release` knows whatever was acquired
        for lock in participants.by_lock:
            lock.acquire(self)

    def _adopt(self, child: Transaction) -> Collection[Transactional]:
        with _guard:
            if self.sealed:
                raise CallEndedError(f"the handler of {self!r} is not running: it makes no calls")
            self._children.add(child)
            return self._participants.by_lock.values()

    def save(self, participant: Transactional) -> Mark:
        """Take a participant's savepoint before `begin` does."""
        lock = participant.lock
        # With the mutex, which an outer rollback takes: after that nobody would end this savepoint.
        with lock.mutex:
            if self._is_superseded:
                raise self._superseded_error()
            mark = self._marks[lock] = participant.begin(self)
        return mark

    def begin(self) -> None:
        """Take the savepoints that are missing; from here on changes go through."""
        for lock, participant in self._participants.by_lock.items():
            if lock not in self._marks:
                self.save(participant)
        self.reads.clear()
        self.read_before = None
        if not self._enter(CallState.RUNNING):
            raise self._superseded_error()

    def _superseded_error(self) -> CallEndedError:
        return CallEndedError(f"the call that made {self!r} has ended, and rolled it back")

    def mark_of(self, lock: CallLock) -> Mark | None:
        return self._marks.get(lock)

    def contents(self, lock: CallLock) -> Contents | None:
        with lock.mutex:
            if self._is_superseded:
                raise self._superseded_error()
            return self._participants.by_lock[lock].contents(self._marks[lock])

    def join(self, participant: Transactional) -> None:
        lock = participant.lock
        with lock.mutex:
            with _guard:
                if lock in self._participants.by_lock and (lock.holder is None or not lock.holder.within(self)):
                    raise CallEndedError(f"{self!r} has ended: {lock.name} can no longer be changed through it")
                if lock in self._participants.by_lock:
                    return
            if self.parent is not None:
                self.parent.join(participant)
            self._refuse_late(participant)
            mark = None
            try:
                lock.acquire(self, patience_seconds=0)
                has_begun = self.state is not CallState.PREPARING
                mark = participant.begin(self) if has_begun else None
                with _guard:
                    self._refuse_late(participant)
                    self._participants = SortedParticipants({**self._participants.by_lock, lock: participant})
                    if has_begun:
                        self._marks[lock] = mark
            except BaseException:
                if mark is not None:
                    participant.rollback(mark)
                lock.release(self, self.parent)
                raise

    def _refuse_late(self, participant: Transactional) -> None:
        if self.ended:
            raise CallEndedError(f"{self!r} has ended: {participant.lock.name} can no longer take part in it")

    def changed(self, session: Session) -> bool:
        """Whether the handler changed a file, or a STATE slice of `session`."""
        return bool(self.changes) or session.changed(self._marks[session.lock])

    def seal(self) -> None:
        """End the handler's access: no more changes go through this call, and `changes` is complete."""
        with _guard:
            if not self._enter(CallState.SEALED):
                raise self._superseded_error()
            committing, running = self._participants.committing, [*self._children]
        for child in running:  # half a change cannot be committed: it rolls back with this call
            child.supersede()
            self.problems.append(TransactionError(f"{child!r} was still running when the handler that made it ended"))
        for lock in committing:
            with lock.mutex:
                if self._is_superseded:  # what changed since this savepoint may be of another call
                    break
                changes = self._participants.by_lock[lock].changes(self._marks[lock])
                self.detection = self._participants.by_lock[lock].detection(self._marks[lock]) or self.detection
            if changes:
                self.changes[lock] = changes
        if self._is_superseded:
            raise self._superseded_error()

    def check_problems(self) -> None:
        """Raise TransactionError if something dooms the call, whether or not its handler knows of it."""
        if self.problems:
            problem = self.problems[0]
            raise TransactionError(f"it cannot be kept: {describe_error(problem)}") from problem

    def tracks_external_writes(self) -> bool:
        """Whether a participant scans for the changes of programs."""
        return any(one.tracks_external_writes for one in self._participants.by_lock.values())

    def reads_by_path(self) -> dict[str, str]:
        """The sha256 of what was read. Paths of several filesystems are prefixed with the filesystem's name."""
        if len(self.reads) == 1:
            [reads] = self.reads.values()
            return reads.copy()
        return {_prefixed(lock, path): sha256 for lock, reads in self.reads.items() for path, sha256 in reads.items()}

    def all_changes(self) -> Sequence[Change]:
        """The changes in all filesystems. With several, each path is prefixed with its filesystem's name."""
        if len(self.changes) <= 1:
            return next(iter(self.changes.values()), ())
        return [
            replace(change, path=_prefixed(lock, change.path))
            for lock, changes in self.changes.items()
            for change in changes
        ]

    def supersede(self) -> None:
        """Mark this call, and all within it, as rolled back by an outer one."""
        with _guard:
            self._enter(CallState.SUPERSEDED)
            children = list(self._children)
        for child in children:
            child.supersede()

    def commit(self, receipt: Receipt) -> Step | None:
        """Commit every participant. The durable one goes first: it can fail, and then the caller rolls back.

        Raises:
            TransactionError: two durable participants were changed, or an outer call has ended.
        """
        if self._is_superseded:
            raise self._superseded_error()
        if len(self.changes) > 1:
            durable = [lock.name for lock in self.changes if self._participants.by_lock[lock].durable]
            if len(durable) > 1:
                raise TransactionError(f"one call can change one workspace on disk, not several: {', '.join(durable)}")
        step = None
        for lock in self._participants.committing:
            with lock.mutex:  # so that no outer call rolls back meanwhile, to before this savepoint
                if self._is_superseded:
                    raise self._superseded_error()
                step = self._participants.by_lock[lock].commit(self._marks[lock], receipt) or step
        with _guard:
            self._marks = {}
            self._enter(CallState.COMMITTED)
        self.step = step
        return step

    def rollback(self) -> RollbackReport:
        """Restore every participant's savepoint. Nothing happens where none was taken, or all were committed.

        A participant that cannot be restored does not stop the others. It dooms the calls around this one, and is
        restored before the next call gets it.

        Raises:
            RestoreFailedError: naming each participant that could not be restored.
        """
        with _guard:
            self._enter(CallState.ROLLED_BACK)
            marks, self._marks = self._marks, {}
            running = list(self._children)
        for child in running:
            child.supersede()
        if self._is_superseded or not marks:
            return CLEAN
        failures: list[tuple[str, BaseException]] = []
        conflicts: list[str] = []
        notes: list[str] = []
        for lock, mark in reversed(marks.items()):
            try:
                with lock.mutex:
                    if self._is_superseded:  # meanwhile: the present state may be of another call
                        break
                    report = self._participants.by_lock[lock].rollback(mark)
                conflicts += report.conflicts
                notes += report.notes
                lock.block_until_recovered(None)
            except BaseException as error:  # whatever it is, the others must still roll back
                failures.append((lock.name, error))
                lock.block_until_recovered(_recovery(self._participants.by_lock[lock], mark))
        if not failures:
            if conflicts or notes:
                self.report = RollbackReport(tuple(conflicts), tuple(notes))
            return self.report
        failed = RestoreFailedError(failures)
        outer = self.parent
        while outer is not None:
            outer.problems.append(failed)
            outer = outer.parent
        raise failed

    def merge_into_parent(self, *own: tuple[Session, Receipt]) -> ReceiptUpdates:
        """After a commit: hand the receipts of this call, ``own`` included, to the outer one.

        The outer call reissues them if it rolls back. If it has rolled back already, they are reissued now.
        """
        outer = self.parent
        if not isinstance(outer, Transaction):
            return ()
        with _guard:
            receipts, self._inner_receipts = [*self._inner_receipts, *own], []
            if self.state is not CallState.SUPERSEDED:
                outer._inner_receipts += receipts
                self._account_to(outer, governed=bool(own) or self.opaque)
                return ()
        return _reissue(receipts, "rolled_back", outer.call_id)

    def _account_to(self, outer: Transaction, *, governed: bool) -> None:
        """Add to `answered_for` and `reads` of the outer call.

        The policies of a ``governed`` call have answered for its changes. Any other is a part of the outer handler.
        """
        answered = {lock: set(files) for lock, files in (self.answered_for or {}).items()}
        if governed:
            for lock, changes in self.changes.items():
                replaced = [one for one in changes if one.before is not None and _replaced_content(one)]
                answered.setdefault(lock, set()).update((one.path, _hash(one)) for one in replaced)
        else:
            for lock, earlier in (self.read_before or {}).items():
                for path, sha256 in earlier:
                    outer.note_read(lock, path, sha256)
            for lock, reads in self.reads.items():
                for path, sha256 in reads.items():
                    outer.note_read(lock, path, sha256)
        if answered:
            outer.answered_for = outer.answered_for or {}
            for lock, files in answered.items():
                outer.answered_for.setdefault(lock, set()).update(files)

    def rolled_back_receipts(self, *, doubtful: bool = False) -> ReceiptUpdates:
        """After a rollback: the reissued receipts of inner calls. They are in their sessions' logs already.

        ``doubtful`` says that the rollback could not be completed."""
        with _guard:
            receipts, self._inner_receipts = self._inner_receipts, []
        return _reissue(receipts, "doubtful" if doubtful else "rolled_back", self.call_id)

    def finish(self, publish: Callable[[], None], *interrupts: Interrupts) -> None:
        """End the call, which is committed or rolled back: release, make the outer call current, `publish` its end.

        Each of the three is done even where the one before it raises."""
        try:
            self.release()
        finally:
            try:
                self.deactivate(*interrupts)
            finally:
                publish()

    def release(self) -> None:
        """Release every participant, to the outer call if there is one."""
        self._enter(CallState.ROLLED_BACK)  # if it has not ended: from here on nothing joins
        for lock in self._participants.by_lock:
            lock.release(self, self.parent)
        if isinstance(self.parent, Transaction):
            with _guard:
                self.parent._children.discard(self)
                self.parent.inner.append(self.call_id)

    def deactivate(self, *interrupts: Interrupts) -> None:
        """Make the outer call current again, and let Ctrl-C through."""
        try:
            # Not by a token: an abandoned generator ends in another context, and two of them end in any order.
            current = current_call()
            if current is self:
                set_current_call(_outer(self))
            elif current is not None and current.within(self):
                self.deactivated = True
        finally:
            for held in interrupts[::-1]:
                held.remove()


def _outer(call: Transaction) -> CallInfo | None:
    """The call that becomes current when `call` ends.

    An outer call that ended earlier on this thread is passed over. One that ended on another thread is not: this is a
    thread of its handler, and further calls of that thread have to be refused. (A function of its own, as
    `nearest_active` is.)"""
    outer = call.parent
    while isinstance(outer, Transaction) and outer.deactivated:
        outer = outer.parent
    return outer


def _reissue(receipts: ReceiptUpdates, outcome: Outcome, by: str) -> ReceiptUpdates:
    again = [(session, replace(receipt, outcome=outcome, rolled_back_by=by)) for session, receipt in receipts]
    for session, receipt in again:
        session.apply(receipt, to="log")
    return again


def _prefixed(lock: CallLock, path: str) -> str:
    return f"{lock.name} {lock.serial}:{path}"


def _hash(change: Change) -> str | None:
    return change.before and change.before.content_hash


def _replaced_content(change: Change) -> bool:
    """Whether the content is gone from the path. A change of permissions alone keeps it."""
    before = _hash(change)
    return before is None or change.after is None or change.after.content_hash != before


def _recovery(participant: Transactional, mark: Mark) -> Callable[[], None]:
    def recover() -> None:
        try:
            participant.rollback(mark)
        except Exception as error:
            raise RestoreFailedError([(participant.lock.name, error)]) from error

    return recover


class HasParticipants(Protocol):
    """A live resource context, or anything else with participants."""

    @property
    def participants(self) -> tuple[Transactional, ...]: ...


@contextmanager
def tool_transaction(
    session: Session,
    resources: HasParticipants | None = None,
    *,
    tag: str = "transaction",
    opaque: bool = False,
    call_id: str | None = None,
    settle: Callable[[Transaction, Receipt], Receipt] | None = None,
) -> Generator[Transaction]:
    """A transaction of one's own over a session and the participants of `resources` (``prompt.resources``, say).

    Commits at the end of the block. On any exception everything is rolled back before it propagates, and conflicts are
    added to it as notes. ``tag`` is the tool's name in receipts and messages. ``opaque`` is for a block that changes
    files other than through a filesystem, by a command, say. ``settle`` is called when the block has ended and its
    changes are known. It gets the receipt of the commit and returns it, with additions, or raises to roll all back.

    Raises:
        RestoreFailedError: the rollback could not be completed.
    """
    participants = sort_participants((session, *(resources.participants if resources is not None else ())))
    started, clock = datetime.now(UTC), perf_counter()
    transaction = Transaction(call_id or new_id(), tag, current_call(), opaque=opaque)
    # The order is that of `ToolExecutor.execute`. But Ctrl-C is not held back over the block, since nobody knows which
    # loop runs it, or when. One that arrives between two lines here reaches the outer clause.
    held: list[Interrupts] = []
    updates: ReceiptUpdates = ()
    try:
        try:
            set_current_call(transaction)
            transaction.acquire(participants)
            held.append(Interrupts())
            transaction.begin()
            held.pop().remove()
            yield transaction
            held.append(Interrupts())
            transaction.seal()
            transaction.check_problems()
            receipt = draft_receipt(transaction, session, started, perf_counter() - clock)
            transaction.commit(receipt if settle is None else settle(transaction, receipt))
            updates = transaction.merge_into_parent()
        except BaseException:
            held.append(Interrupts())
            raise
    except BaseException as error:
        held.append(Interrupts())  # for an interrupt just before the line above
        try:
            for message in transaction.rollback().messages():
                error.add_note(message)
            updates = transaction.rolled_back_receipts()
        except RestoreFailedError:
            updates = transaction.rolled_back_receipts(doubtful=True)
            raise
        raise
    finally:
        transaction.finish(lambda: _notify(updates), *held)


def _notify(updates: ReceiptUpdates) -> None:
    for session, receipt in updates:
        session.notify(receipt)


def draft_receipt(transaction: Transaction, session: Session, started: datetime, seconds: float) -> Receipt:
    """The receipt of a transaction without a tool, as it is when it commits."""
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
        client=session.tags.get("client", ""),
        parent_call="" if transaction.parent is None else transaction.parent.call_id,
        detection=transaction.detection,
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
