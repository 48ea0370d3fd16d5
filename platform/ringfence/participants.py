"""Participants of the transaction of a tool call, and the interface between a participant and its call.

Everything that can be rolled back is a *participant* (a resource manager): a session, a filesystem, a resource of the
user's. It has a `CallLock`, held by at most one tool call at a time. It can give a savepoint, go back to it, and make
the changes since then final. `ringfence.runtime.transaction` drives them.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeGuard, TypeVar

from ringfence.errors import CallEndedError, ParticipantBusyError

Mark: TypeAlias = Any
"""A savepoint. Only the participant that gave it looks into it."""

Contents: TypeAlias = tuple[Callable[[str], bytes], Callable[[str], bytes]]
"""Functions from the path of a changed file to its bytes: at the savepoint, and after the call. They may raise
OSError."""

LOOK_SECONDS = 1.0
"""How often who waits for a participant looks whether its holder waits for a person."""
LOCK_PATIENCE_SECONDS = 60.0
"""The default time to wait for a participant that another tool call holds."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """One path at one moment. ``content_hash`` is the sha256 of a file's bytes in hex; a symlink has a target."""

    kind: Literal["file", "directory", "symlink"]
    mode: int
    """Permission bits."""
    size: int
    """Bytes; 0 for a directory."""
    content_hash: str | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one path. ``before`` is None for a new path, and ``after`` is None for a removed one."""

    path: str
    before: FileVersion | None
    after: FileVersion | None

    @property
    def kind(self) -> Literal["created", "modified", "deleted"]:
        if self.before is None:
            return "created"
        return "modified" if self.after is not None else "deleted"


@dataclass(frozen=True, slots=True)
class Step:
    """A committed transaction in a workspace's history; ``commit`` is its git object id in hex."""

    number: int
    tool: str
    call_id: str
    session_id: str
    created_at: datetime
    paths: tuple[str, ...]
    commit: str
    client: str = ""
    """The client that called the tool, where the session has a tag `client`."""
    title: str = ""
    """The command that the call ran, on one line and shortened. Empty for other calls."""


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """The result of a rollback. ``conflicts`` are paths that were not restored because of an external change."""

    conflicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def messages(self) -> list[str]:
        """One sentence for each conflict and note."""
        return [
            *(f"{path} was changed by somebody else meanwhile, and stays as it is" for path in self.conflicts),
            *self.notes,
        ]


CLEAN = RollbackReport()


class CallState(StrEnum):
    """The state of a tool call. Its transaction goes from one to the next as `TRANSITIONS` has it."""

    PREPARING = "preparing"
    """It acquires its participants, and the policies are asked. Nothing changes through it yet."""
    RUNNING = "running"
    """Its handler runs. Only in this state do changes go through it."""
    SEALED = "sealed"
    """Its handler has ended. Its changes are known, and it can still be committed."""
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    """It is rolled back, or being rolled back."""
    SUPERSEDED = "superseded"
    """A call around it has ended, and rolls it back along with itself."""


TRANSITIONS: Mapping[CallState, Sequence[CallState]] = {
    CallState.PREPARING: (CallState.RUNNING, CallState.ROLLED_BACK, CallState.SUPERSEDED),
    CallState.RUNNING: (CallState.SEALED, CallState.ROLLED_BACK, CallState.SUPERSEDED),
    CallState.SEALED: (CallState.COMMITTED, CallState.ROLLED_BACK, CallState.SUPERSEDED),
    CallState.COMMITTED: (CallState.SUPERSEDED,),  # an inner call's commit only ends a savepoint
    CallState.ROLLED_BACK: (CallState.SUPERSEDED,),
    CallState.SUPERSEDED: (),
}
"""The states that may follow a state."""

_ENDED = (CallState.COMMITTED, CallState.ROLLED_BACK, CallState.SUPERSEDED)


class CallInfo:
    """One tool call, as participants and policies see it.

    Attributes:
        parent: the call whose handler made this one.
        opaque: it changes files other than through a filesystem, so a filesystem scans for changes.
        limits: the `RunOptions` that hold for what its handler evaluates.
        awaits_approval: whether a policy waits for a person's answer about it.
        state: how far it has come.
        reads: per participant, the paths that the call read, each with the sha256 of the last bytes.
        read_before: per participant, (path, sha256) of earlier reads of such a path.
        changes: per participant; known when the handler has ended.
        problems: errors that doom the call, whether or not its handler knows of them.
        inner: ids of the ended calls that its handler made.
        answered_for: per participant, (path, sha256 before) of changes that policies of inner calls have allowed.
    """

    __slots__ = (
        "answered_for",
        "awaits_approval",
        "call_id",
        "changes",
        "inner",
        "limits",
        "opaque",
        "parent",
        "problems",
        "read_before",
        "reads",
        "state",
        "tool",
    )

    def __init__(self, call_id: str, tool: str, parent: CallInfo | None = None, *, opaque: bool = False) -> None:
        self.call_id = call_id
        self.tool = tool
        self.parent = parent
        self.opaque = opaque
        self.state = CallState.RUNNING
        self.awaits_approval = False
        self.reads: dict[CallLock, dict[str, str]] = {}
        self.read_before: dict[CallLock, set[tuple[str, str]]] | None = None
        self.changes: dict[CallLock, Sequence[Change]] = {}
        self.problems: list[BaseException] = []
        self.inner: list[str] = []
        self.answered_for: dict[CallLock, set[tuple[str, str | None]]] | None = None
        self.limits: object = None

    def __repr__(self) -> str:
        return f"tool call {self.call_id!r} ({self.tool})"

    def note_read(self, lock: CallLock, path: str, sha256: str) -> None:
        reads = self.reads.setdefault(lock, {})
        before = reads.get(path)
        if before is not None and before != sha256:
            if self.read_before is None:
                self.read_before = {}
            self.read_before.setdefault(lock, set()).add((path, before))
        reads[path] = sha256

    def within(self, other: CallInfo) -> bool:
        """Whether this call is `other`, or was made by its handler, at any depth."""
        call: CallInfo | None = self
        while call is not None and call is not other:
            call = call.parent
        return call is not None

    @property
    def sealed(self) -> bool:
        """Whether the handler is not running. No change goes through a sealed call."""
        return self.state is not CallState.RUNNING

    @property
    def ended(self) -> bool:
        """Whether the call can be neither committed nor rolled back any more: it, or a call around it, has ended."""
        return self.state in _ENDED

    @property
    def closed(self) -> bool:
        """Whether this call, or one around it, is sealed."""
        call: CallInfo | None = self
        while call is not None and not call.sealed:
            call = call.parent
        return call is not None

    def mark_of(self, lock: CallLock) -> Mark | None:
        """The savepoint that a rollback restores; None where the participant does not take part."""
        return None

    def contents(self, lock: CallLock) -> Contents | None:
        """The bytes of changed files of a participant. None if it cannot tell, or takes no part."""
        return None

    def join(self, participant: Transactional) -> None:
        """Let a late participant take part: at once, or not at all (ParticipantBusyError)."""
        raise CallEndedError(f"{self!r} has no transaction that {participant!r} could take part in")


def nearest_active(call: CallInfo | None) -> CallInfo | None:
    """The call, or the innermost one around it that has not ended.

    (A function of its own: from Python 3.12 on, an interrupt at the jump back of a ``while`` loop in a ``with`` or
    ``try`` block skips the end of that block.)
    """
    while call is not None and call.ended:
        call = call.parent
    return call


CURRENT_CALL: ContextVar[CallInfo | None] = ContextVar("ringfence_current_call", default=None)
"""The innermost tool call of this thread of control. A new thread has none: it gets handles from its `ToolContext`."""

current_call = CURRENT_CALL.get
set_current_call = CURRENT_CALL.set


@contextmanager
def outside_of_calls() -> Generator[None]:
    """In this block no call is current: a transaction that begins in it is part of none."""
    token = CURRENT_CALL.set(None)
    try:
        yield
    finally:
        CURRENT_CALL.reset(token)


class CallLock:
    """The lock of a participant. While a tool call holds it, only this call may change the participant.

    Every change and every step of a transaction runs ``with lock.mutex:``, and a change calls `check_access` first.
    (The mutex is entered and left in C. An ``__enter__`` in Python could be interrupted between acquiring and being
    sure to release.) A nested call acquires from its parent and releases to it, so a second nested call, or a thread
    of the parent, waits until it has ended.
    """

    _serials = itertools.count()
    _doubtful: ClassVar[set[CallLock]] = set()  # may be all that keeps a participant in a doubtful state alive

    def __init__(self, name: str, *, patience_seconds: float = LOCK_PATIENCE_SECONDS) -> None:
        self.name = name
        self.serial = next(self._serials)
        """Locks are acquired in the order of their serials, so two calls cannot wait for each other."""
        self.holder: CallInfo | None = None
        self._recover: Callable[[], None] | None = None
        self.patience_seconds = patience_seconds
        self._waiting = 0
        self.free_mutex()

    def free_mutex(self) -> None:
        """Make a new mutex: at first, and in a forked child, where the thread that held the old one is gone."""
        self.mutex = threading.RLock()
        self._condition = threading.Condition(self.mutex)

    def acquire(self, call: CallInfo, patience_seconds: float | None = None) -> None:
        """Make `call` the holder; waits while another holds it. 0 seconds: at once or not at all.

        Raises:
            ParticipantBusyError: it was not free in time.
            RestoreFailedError: an earlier rollback of it is not complete, and cannot be completed now.
        """
        with self.mutex:
            parent = call.parent
            if self.holder is not parent:
                self._wait(parent, patience_seconds)
            if parent is not None and (call.ended or parent.closed):
                raise CallEndedError(f"the handler that made {call!r} has ended")
            if self._recover is not None:
                self._recover()
                self.block_until_recovered(None)
            self.holder = call

    def release(self, call: CallInfo, to: CallInfo | None) -> None:
        """Return the lock that `call`, or an inner call that outlived it, holds to ``to``, the previous holder.

        ``to`` may already be rolling back. Nobody else gets the lock until it is done."""
        with self.mutex:
            if self.holder is call or (self.holder is not None and self.holder.within(call)):
                self.holder = to
                if self._waiting:
                    self._condition.notify_all()

    def block_until_recovered(self, recover: Callable[[], None] | None) -> None:
        """After a failed rollback: no call gets the lock before ``recover`` has completed it."""
        self._recover = recover
        (self._doubtful.discard if recover is None else self._doubtful.add)(self)

    def check_access(self, participant: Transactional, call: CallInfo | None) -> None:
        """Let a change through that belongs to `call` (None: to no call). The mutex has to be held.

        A participant that does not take part in the call yet joins it. A change from outside waits for the holder.

        Raises:
            CallEndedError: `call` has ended.
            ParticipantBusyError: another call held it for too long.
        """
        if call is None and self.holder is None:
            return
        if call is not None and (call.closed if call.parent is not None else call.sealed):
            raise CallEndedError(f"the handler of {call!r} is not running: nothing changes {self.name} through it")
        if self.holder is call:
            return
        if call is None or self.holder is None or not call.within(self.holder):
            self._wait(call, None)
            if call is not None and call.closed:
                raise CallEndedError(f"{call!r} has ended: nothing changes {self.name} through it")
        if call is not None and self.holder is not call:
            call.join(participant)

    def _free_for(self, call: CallInfo | None) -> bool:
        return self.holder is None or self.holder is call

    def _wait(self, call: CallInfo | None, patience_seconds: float | None) -> None:
        """Wait until nobody, or `call`, is the holder."""
        until = time.monotonic() + (self.patience_seconds if patience_seconds is None else patience_seconds)
        self._waiting += 1
        try:
            self._wait_until(call, until)
        finally:
            self._waiting -= 1

    def _wait_until(self, call: CallInfo | None, until: float) -> None:
        while not self._free_for(call):
            if self.holder is not None and self.holder.awaits_approval:
                raise ParticipantBusyError(
                    f"{self.name}: waiting for approval of {self.holder!r}; try again after that"
                )
            left = until - time.monotonic()
            if left <= 0:
                raise ParticipantBusyError(f"{self.name} is held by {self.holder!r}; try again when it has ended")
            self._condition.wait(min(left, LOOK_SECONDS))


Detection = Literal["watch", "scan", "audit-failed"]
"""How the changes of programs were found.

- "watch": by looks at the names that the kernel told of.
- "scan": by at least one scan of all files.
- "audit-failed": by scans, since one of them has found a change that the kernel had not told of.
"""


class Transactional(Protocol):
    """A participant. To be one is declared, by inheriting from this protocol.

    `begin` and `commit` of a participant that is not ``durable`` cannot fail for reasons of its own. Marks of nested
    calls are savepoints: the inner one is ended before the outer one.
    """

    durable: bool
    """Whether `commit` writes durable state. At most one durable participant changes in a call."""
    rollback_only: bool = False
    """Whether the participant only rolls back. Its `changes` and `commit` are never called."""
    lock: CallLock
    """The same object as long as the participant lives."""

    @property
    def tracks_external_writes(self) -> bool:
        """Whether the participant scans for changes of programs and can undo them. An opaque call needs one."""
        return False

    # Abstract, since a method that is forgotten or misspelt would do nothing, and nobody would notice.
    @abstractmethod
    def begin(self, call: CallInfo) -> Mark:
        """Give a savepoint of the state now, in O(1). (Before an opaque call a filesystem on disk scans all files.)"""
        ...

    @abstractmethod
    def changes(self, mark: Mark, /) -> Sequence[Change]:
        """The paths changed since `mark`, sorted; empty for what holds no files.

        The call is sealed, and the mutex is held: a change that was let through before that is complete."""
        ...

    def contents(self, mark: Mark, /) -> Contents | None:
        """The bytes of files that changed since `mark`. None: there are none, or they cannot be told.

        The call is sealed, and the mutex is held."""
        return None

    def detection(self, mark: Mark, /) -> Detection | None:
        """How the changes since `mark` were found. None: no programs made them, or the call holds no files."""
        return None

    @abstractmethod
    def commit(self, mark: Mark, receipt: Any) -> Step | None:
        """Keep everything since `mark`; ``receipt`` is the call's `Receipt`. In a nested call this only ends the
        savepoint."""
        ...

    @abstractmethod
    def rollback(self, mark: Mark) -> RollbackReport:
        """Restore the state at `mark` exactly; may be called again where it raised."""
        ...


_serial = attrgetter("serial")


@dataclass(slots=True)
class SortedParticipants:
    """The participants of a call by their locks, in the one order in which all calls acquire them."""

    by_lock: dict[CallLock, Transactional]
    committing: Sequence[CallLock] = ()
    """All but those that only roll back. The durable come first: their commit can fail, and then all roll back."""

    def __post_init__(self) -> None:
        held = self.by_lock
        kept = [lock for lock, participant in held.items() if not participant.rollback_only]
        self.committing = sorted(kept, key=lambda lock: not held[lock].durable)


def sort_participants(participants: Iterable[Transactional]) -> SortedParticipants:
    found = {participant.lock: participant for participant in participants}
    return SortedParticipants({lock: found[lock] for lock in sorted(found, key=_serial)})


SnapshotT = TypeVar("SnapshotT")


class Snapshotable(Protocol[SnapshotT]):
    """A resource whose state a failed tool call rolls back. To be one is declared, by inheriting from this protocol."""

    # Abstract, since a method that is forgotten or misspelt would do nothing, and roll nothing back.
    @abstractmethod
    def snapshot(self, *, tag: str | None = None) -> SnapshotT:
        """Return the current state as a value that later changes do not affect."""
        ...

    @abstractmethod
    def restore(self, snapshot: SnapshotT) -> None:
        """Restore the state of a snapshot. May raise SnapshotRestoreError without any change."""
        ...


class SnapshotParticipant(Transactional):
    """A user's `Snapshotable` as a participant."""

    durable = False
    rollback_only = True

    def __init__(self, resource: Snapshotable[Any]) -> None:
        self._resource = resource
        self.lock = CallLock(type(resource).__name__)

    def __repr__(self) -> str:
        return f"the resource {type(self._resource).__name__}"

    def begin(self, call: CallInfo) -> Mark:
        return self._resource.snapshot(tag=call.call_id)

    def changes(self, mark: Mark) -> Sequence[Change]:
        return ()

    def commit(self, mark: Mark, receipt: Any) -> Step | None:
        return None

    def rollback(self, mark: Mark) -> RollbackReport:
        self._resource.restore(mark)
        return CLEAN


def is_snapshotable(value: object) -> TypeGuard[Snapshotable[Any]]:
    """Whether `value` is a declared `Snapshotable`, or a participant with the same methods, as filesystems are."""
    kinds = type(value).__mro__
    return Snapshotable in kinds or (
        Transactional in kinds and hasattr(value, "snapshot") and hasattr(value, "restore")
    )


_of_resource: weakref.WeakValueDictionary[int, SnapshotParticipant] = weakref.WeakValueDictionary()
_of_resource_lock = threading.Lock()


def _forked() -> None:
    global _of_resource_lock  # noqa: PLW0603
    _of_resource_lock = threading.Lock()  # the thread that had it is not in the child


os.register_at_fork(after_in_child=_forked)


def participant_of(value: object) -> Transactional | None:
    """The participant that `value` is or, for a declared `Snapshotable`, has; None for anything else.

    One resource has one participant in the whole process, so that two prompts over it share its lock. (The
    dictionary may be keyed by id: a participant keeps its resource alive, and is gone before its id is used again.)
    """
    kinds = type(value).__mro__
    if Transactional in kinds:
        return value  # pyright: ignore[reportReturnType]  # declared by inheritance, which pyright cannot follow here
    if Snapshotable not in kinds:
        return None
    with _of_resource_lock:
        participant = _of_resource.get(id(value))
        if participant is None:
            participant = _of_resource[id(value)] = SnapshotParticipant(value)  # pyright: ignore[reportArgumentType]
        return participant


@dataclass(frozen=True, slots=True)
class HiddenContent:
    """A hidden file of a filesystem, for a host that masks what it contains.

    ``head`` is no more than its first bytes. ``public`` is the content of published samples beside it.
    """

    path: str
    head: bytes
    public: bytes = b""
