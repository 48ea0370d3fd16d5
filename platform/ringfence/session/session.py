"""The state of an agent: slices of values, changed by events, snapshotted, and rolled back with a failed tool call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from uuid import UUID, uuid4

from ringfence.limits import require_aware, utc_now
from ringfence.participants import CLEAN, CallInfo, CallLock, Change, Mark, RollbackReport, Step, Transactional
from ringfence.receipts import Receipt
from ringfence.secrets import Secrets
from ringfence.session.events import (
    Dispatcher,
    DispatchResult,
    HandlerFailure,
    InProcessDispatcher,
    PromptExecuted,
    PromptRendered,
    RenderedTools,
    ToolInvoked,
)
from ringfence.session.reducers import ReducerContext
from ringfence.session.slices import LOG, STATE, SliceAccessor, SlicePolicy, Slices, is_slice_value
from ringfence.session.snapshots import Snapshot, SnapshotSlices
from ringfence.session.views import SessionView, require_slice_type
from ringfence.session.visibility import VisibilityOverrides
from ringfence.tagged import register_type

T = TypeVar("T")

READ_BY_SESSIONS = (ToolInvoked, PromptRendered, PromptExecuted, RenderedTools)
"""The events that a session applies also when somebody else publishes them on its dispatcher."""
LOGS_BY_DEFAULT = (*READ_BY_SESSIONS, Receipt)
for _kind in LOGS_BY_DEFAULT:
    register_type(_kind)
STATE_ONLY = frozenset({STATE})


class Session(Transactional):
    """Typed state. ``session[Plan].latest()`` reads, ``session.dispatch(AddStep(...))`` changes it through reducers.

    Any thread may use it. Every change to a slice is atomic, and so is what an event does to one slice. Changes made
    while a tool call runs, from wherever, roll back with the call, except for those of LOG slices.
    """

    durable = False
    rollback_only = True

    def __init__(
        self,
        *,
        dispatcher: Dispatcher | None = None,
        session_id: UUID | None = None,
        created_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        secrets: Secrets | None = None,
    ) -> None:
        """``tags`` are extended by ``session_id``. ``secrets`` are masked in the results of tool calls, in receipts and
        in events.

        Raises ValueError for a ``created_at`` without a timezone.
        """
        self.session_id = uuid4() if session_id is None else session_id
        self.created_at = utc_now() if created_at is None else require_aware("created_at", created_at)
        self.tags: Mapping[str, str] = MappingProxyType({**(tags or {}), "session_id": str(self.session_id)})
        self.secrets = secrets
        self.lock = CallLock(f"session {self.session_id}")
        self._slices = Slices(self.lock, LOGS_BY_DEFAULT)
        self.view = SessionView(self.session_id, self.created_at, self.tags, self._slices)
        """The read-only view of the session, for reducers."""
        self._accessors: dict[type[Any], SliceAccessor[Any]] = {}
        self._context = ReducerContext(self.view)
        self.install(VisibilityOverrides, initial=VisibilityOverrides)

        self.dispatcher: Dispatcher = InProcessDispatcher() if dispatcher is None else dispatcher
        self.dispatcher.attach(self)

    def __repr__(self) -> str:
        return f"the session {self.session_id}"

    @property
    def slice_types(self) -> frozenset[type[Any]]:
        """Every slice that this session knows, and every type that these hold: the types for `Snapshot.from_json`."""
        return self._slices.types()

    def __getitem__(self, slice_type: type[T]) -> SliceAccessor[T]:
        accessor = self._accessors.get(slice_type)
        if accessor is None:
            accessor = self._accessors[slice_type] = SliceAccessor(self._slices, require_slice_type(slice_type))
        return accessor

    def locked(self) -> AbstractContextManager[bool]:
        """Return a re-entrant context manager that excludes other threads from reading and changing slices."""
        return self._slices.locked()

    def install(self, slice_type: type[T], *, initial: Callable[[], T] | None = None) -> None:
        """Register the methods of a frozen dataclass that are marked with `reducer`. A second time does nothing.

        A method is called on the slice's latest value or, while the slice is empty, on what `initial` makes; without
        `initial`, an event leaves an empty slice empty.

        Raises:
            TypeError: it is no frozen dataclass, or `initial` cannot be called.
            ValueError: no method is marked, or two are for one event type.
        """
        self._slices.install(slice_type, initial)

    def dispatch(self, event: object) -> DispatchResult:
        """Apply an event to the slices, then publish it to the dispatcher's handlers.

        The event goes to the reducers of its exact type. Where there are none, it is appended to the slice of its own
        type. A reducer that raises leaves its slice as it is. The error is in the result, and dooms the tool call that
        holds this session, if there is one.
        """
        failures = self.apply(event)
        result = self.notify(event)
        return DispatchResult(event, result.handlers_invoked, failures + result.errors) if failures else result

    def apply(self, event: object, *, to: Literal["state", "log", "both"] = "both") -> tuple[HandlerFailure, ...]:
        """`dispatch` without publishing, to the slices of one policy or of both; returns the reducers that failed.

        A `ToolInvoked` of a successful call, and a `PromptExecuted`, first apply their value to its own type, the
        values of a sequence one by one.
        """
        kind = type(event)
        events = (event,)
        if kind is ToolInvoked or kind is PromptExecuted:
            events = event_payloads(event) + events
        return self._slices.apply(events, state=to != "log", logs=to != "state", context=self._context)

    def log(self, invoked: ToolInvoked, receipt: Receipt) -> None:
        """`apply` both to the LOG slices, without the value of the call."""
        self._slices.apply((receipt, invoked), state=False, logs=True, context=self._context)

    def log_values(self, invoked: ToolInvoked) -> None:
        """Apply the value of the call to LOG slices. Its own code, and that of its reducers, may do anything."""
        value = invoked.result.value
        if value is not None and self._slices.may_log(type(value)):  # as a list may, for what is in it
            for one in event_payloads(invoked):
                if self._slices.may_log(type(one)):
                    self._slices.apply((one,), state=False, logs=True, context=self._context)

    def notify(self, event: object) -> DispatchResult:
        """Publish an event that this session has applied. Other sessions of the dispatcher apply it now."""
        return self.dispatcher.dispatch(event, applied_by=self)

    def read(self, event: object) -> tuple[HandlerFailure, ...]:
        """Apply what somebody else published on the dispatcher, unless it is another session's."""
        if isinstance(event, READ_BY_SESSIONS) and event.session_id in (None, self.session_id):
            return self.apply(event)
        return ()

    def snapshot(
        self, *, tag: str | None = None, policies: Iterable[SlicePolicy] = STATE_ONLY, include_all: bool = False
    ) -> Snapshot:
        """Return a snapshot of the STATE slices, of slices of other ``policies``, or of all. No item is copied."""
        covered = frozenset(SlicePolicy if include_all else policies)
        if covered is not policies and not all(isinstance(one, SlicePolicy) for one in covered):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"policies are each a SlicePolicy, such as SlicePolicy.LOG, not {policies!r}")
        return Snapshot(
            created_at=utc_now(),
            slices=SnapshotSlices(self._slices.capture(covered)),
            tags=self.tags,
            policies=covered,
            tag=tag,
        )

    def restore(self, snapshot: Snapshot, *, preserve_logs: bool = True) -> None:
        """Go back to a snapshot, of this session or of one that knows the same slices: what the snapshot does not have
        is emptied. Slices of a policy that it does not cover stay, and so do logs unless ``preserve_logs`` is false.

        Raises:
            SnapshotRestoreError: the snapshot has slices that this session does not know. Nothing has changed.
            RuntimeError: logs are to go back while a tool call runs.
        """
        policies = snapshot.policies - {LOG} if preserve_logs else snapshot.policies
        if LOG in policies:
            self._slices.refuse_in_a_call()
        self._slices.restore(snapshot.slices.held, policies)

    def reset(self) -> None:
        """Empty every slice, logs too. Reducers and policies stay. RuntimeError while a tool call runs."""
        self._slices.refuse_in_a_call()
        self._slices.restore({}, SlicePolicy)

    def clone(
        self,
        *,
        dispatcher: Dispatcher | None = None,
        session_id: UUID | None = None,
        created_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Session:
        """A session of its own with the same values, reducers and policies, and the same identity where nothing else is
        given. Without a dispatcher it gets a new one: it never publishes on this session's.
        """
        clone = Session(
            dispatcher=dispatcher,
            session_id=self.session_id if session_id is None else session_id,
            created_at=self.created_at if created_at is None else created_at,
            tags=self.tags if tags is None else tags,
            secrets=self.secrets,
        )
        self._slices.copy_to(clone._slices)
        return clone

    def begin(self, call: CallInfo) -> Mark:
        return self._slices.mark()

    def changes(self, mark: Mark) -> Sequence[Change]:
        return ()

    def changed(self, mark: Mark) -> bool:
        """Whether a STATE slice holds other objects than at `mark`."""
        return self._slices.changed(mark)

    def held_at(self, mark: Mark, slice_type: type[T]) -> tuple[T, ...]:
        """The items of a STATE slice at the savepoint `mark`."""
        return self._slices.held_at(mark, slice_type)

    def commit(self, mark: Mark, receipt: Receipt) -> Step | None:
        return None

    def rollback(self, mark: Mark) -> RollbackReport:
        self._slices.roll_back(mark)
        return CLEAN


def event_payloads(event: object) -> tuple[object, ...]:
    """The dataclass values that an event brings along for the slices of their own types."""
    value: object = None
    if type(event) is ToolInvoked:
        value = event.result.value if event.result.success else None
    elif type(event) is PromptExecuted:
        value = event.result.output
    if value is None:
        return ()
    if hasattr(type(value), "__dataclass_fields__"):  # `is_slice_value`, once less called
        return (value,)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return tuple(filter(is_slice_value, value))  # pyright: ignore[reportUnknownArgumentType]  # it may hold anything
    return ()
