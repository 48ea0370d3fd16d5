"""The state of an agent: slices of values, changed by events, snapshotted, and rolled back with a failed tool call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from threading import get_ident
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from uuid import UUID, uuid4

from ringfence.participants import CLEAN, CallInfo, CallLock, Change, Mark, RollbackReport, Step, Transactional
from ringfence.runtime.events import (
    Dispatcher,
    DispatchResult,
    HandlerFailure,
    InProcessDispatcher,
    PromptExecuted,
    PromptRendered,
    RenderedTools,
    ToolInvoked,
)
from ringfence.runtime.json_lines import JsonLines, SliceConfig
from ringfence.runtime.limits import require_aware, utc_now
from ringfence.runtime.receipts import Receipt
from ringfence.runtime.reducers import ReducerContext
from ringfence.runtime.slice_views import SliceAccessor, SliceView, is_slice_value
from ringfence.runtime.slices import LOG, STATE, SlicePolicy, Slices, require_slice_type
from ringfence.runtime.snapshots import Snapshot, SnapshotSlices
from ringfence.runtime.visibility import VisibilityOverrides
from ringfence.tagged import register_type

T = TypeVar("T")

HEARD_BY_SESSIONS: Sequence[type[Any]] = (ToolInvoked, PromptRendered, PromptExecuted, RenderedTools)
"""The events that a session applies also when somebody else publishes them on its dispatcher."""
LOGS_BY_DEFAULT = (*HEARD_BY_SESSIONS, Receipt)
for _kind in LOGS_BY_DEFAULT:
    register_type(_kind)
STATE_ONLY = frozenset({STATE})


class SessionView:
    """A session to look at, for reducers and whoever else must not change it."""

    __slots__ = ("_slices", "created_at", "session_id", "tags")

    def __init__(self, session_id: UUID, created_at: datetime, tags: Mapping[str, str], slices: Slices) -> None:
        self.session_id = session_id
        self.created_at = created_at
        self.tags = tags
        self._slices = slices

    def __getitem__(self, slice_type: type[T]) -> SliceView[T]:
        return SliceView(self._slices, require_slice_type(slice_type))


class OwnSubscription:
    """How a session hears of what others publish, without being kept alive by a dispatcher that outlives it."""

    def __init__(self, session: Session, dispatcher: Dispatcher) -> None:
        self._session = weakref.ref(session)
        self._dispatcher = dispatcher
        for event_type in HEARD_BY_SESSIONS:
            dispatcher.subscribe(event_type, self)

    def __call__(self, event: ToolInvoked | PromptRendered | PromptExecuted | RenderedTools) -> None:
        session = self._session()
        if session is None:
            self._dispatcher.unsubscribe(type(event), self)
        else:
            session.hear(event)


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
        parent: Session | None = None,
        session_id: UUID | None = None,
        created_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        slice_config: SliceConfig | None = None,
    ) -> None:
        """``tags`` are extended by ``session_id`` and, with a parent, by ``parent_session_id``. ``slice_config`` can
        have LOG slices written to files as well (`read_log` reads them).

        Raises:
            ValueError: ``created_at`` has no timezone, or the session would be its own parent.
            TypeError: an argument of another type, such as a tag that is no text.
        """
        if parent is self:
            raise ValueError("a session cannot be its own parent")
        self.session_id = uuid4() if session_id is None else session_id
        self.created_at = utc_now() if created_at is None else require_aware("created_at", created_at)
        self.parent = parent
        self._given_tags = dict(tags or {})
        self.tags: Mapping[str, str] = MappingProxyType(self._all_tags())
        self._lock = CallLock(f"session {self.session_id}")
        logs = None if slice_config is None else slice_config.logs
        self._files = None if logs is None else JsonLines(logs, self.session_id)
        self._slices = Slices(self._lock, LOGS_BY_DEFAULT, self._files)
        self.view = SessionView(self.session_id, self.created_at, self.tags, self._slices)
        """The session to look at."""
        self._accessors: dict[type[Any], SliceAccessor[Any]] = {}
        self._context = ReducerContext(self.view)
        self.install(VisibilityOverrides, initial=VisibilityOverrides)

        self._children: list[weakref.ref[Session]] = []
        if parent is not None:
            parent._children.append(weakref.ref(self, parent._children.remove))
        # With the events themselves: while one is here, and be it because an interrupt left it, no other has its id.
        self._publishing: dict[tuple[int, int], object] = {}
        """(thread, id of the event) of what this session is telling observers of, and so has applied already."""
        self.dispatcher: Dispatcher = InProcessDispatcher() if dispatcher is None else dispatcher
        OwnSubscription(self, self.dispatcher)

    def __repr__(self) -> str:
        return f"the session {self.session_id}"

    def _all_tags(self) -> dict[str, str]:
        tags = {**self._given_tags, "session_id": str(self.session_id)}
        if self.parent is not None:
            tags["parent_session_id"] = str(self.parent.session_id)
        return tags

    @property
    def children(self) -> tuple[Session, ...]:
        """In the order in which they were made. A parent does not keep its children alive."""
        return tuple(child for reference in tuple(self._children) if (child := reference()) is not None)

    @property
    def slice_types(self) -> frozenset[type[Any]]:
        """Every slice that this session knows: what a snapshot may hold that is read for it (`Snapshot.from_json`)."""
        return self._slices.types()

    def __getitem__(self, slice_type: type[T]) -> SliceAccessor[T]:
        accessor = self._accessors.get(slice_type)
        if accessor is None:
            accessor = self._accessors[slice_type] = SliceAccessor(self._slices, require_slice_type(slice_type))
        return accessor

    def locked(self) -> AbstractContextManager[bool]:
        """While it is entered, no other thread changes a slice or looks into one. Re-entrant."""
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
        """Apply an event to the slices, then tell the dispatcher's handlers of it.

        The event goes to the reducers of its exact type; where there are none, it is appended to the slice of its own
        type. A reducer that raises leaves its slice as it is; the error is in the result, and the tool call that holds
        this session, if there is one, is going to fail and roll back.
        """
        if (get_ident(), id(event)) in self._publishing:
            return DispatchResult(event)  # it came back by way of our own dispatcher
        failures = self.apply(event)
        result = self.notify(event)
        return DispatchResult(event, result.handlers_invoked, failures + result.errors) if failures else result

    def apply(self, event: object, *, to: Literal["state", "log", "both"] = "both") -> tuple[HandlerFailure, ...]:
        """`dispatch` without telling anybody, to the slices of one policy or of both; returns the reducers that failed.

        A `ToolInvoked` of a successful call, and a `PromptExecuted`, first apply their value to its own type, the
        values of a sequence one by one.
        """
        kind = type(event)
        events = (event,)
        if kind is ToolInvoked or kind is PromptExecuted:
            events = event_payloads(event) + events
        return self._slices.apply(events, state=to != "log", logs=to != "state", context=self._context)

    def log(self, invoked: ToolInvoked, receipt: Receipt) -> None:
        """What `apply` does to the LOG slices, for both, but for the value that the call brought along."""
        self._slices.apply((receipt, invoked), state=False, logs=True, context=self._context)

    def log_values(self, invoked: ToolInvoked) -> None:
        """The rest of it: that value, whose own code (and that of its reducers) may do anything."""
        value = invoked.result.value
        if value is not None and self._slices.may_log(type(value)):  # as a list may, for what is in it
            for one in event_payloads(invoked):
                if self._slices.may_log(type(one)):
                    self._slices.apply((one,), state=False, logs=True, context=self._context)

    def heard(self, event_type: type[Any]) -> bool:
        """Whether telling of such an event reaches anybody. A dispatcher that cannot say so is taken at yes."""
        hears: Callable[[type[Any]], bool] | None = getattr(self.dispatcher, "hears", None)
        return hears is None or hears(event_type)

    def notify(self, event: object) -> DispatchResult:
        """Tell the dispatcher's handlers of an event that this session has applied: it will not apply it again."""
        if self._files is not None and isinstance(event, Receipt):
            with self._slices.locked():
                self._files.flush(event.receipt_id)
        dispatcher = self.dispatcher
        if type(dispatcher) is InProcessDispatcher and not dispatcher.hears(type(event)):
            return DispatchResult(event)
        key = (get_ident(), id(event))
        if key in self._publishing:
            return dispatcher.dispatch(event)
        try:
            self._publishing[key] = event  # in here, or an interrupt before the first line of the block would leave it
            return dispatcher.dispatch(event)
        finally:
            self._publishing.pop(key, None)

    def hear(self, event: ToolInvoked | PromptRendered | PromptExecuted | RenderedTools) -> None:
        """Apply what somebody published on the dispatcher, unless it is another session's or was applied already.

        Raises:
            ExceptionGroup: of what reducers raised.
        """
        if (get_ident(), id(event)) in self._publishing:
            return
        if event.session_id is None or event.session_id == self.session_id:
            DispatchResult(event, errors=self.apply(event)).raise_if_errors()

    def snapshot(
        self, *, tag: str | None = None, policies: Iterable[SlicePolicy] = STATE_ONLY, include_all: bool = False
    ) -> Snapshot:
        """What the STATE slices hold now, or those of other policies, or all. Copies and examines no item."""
        covered = frozenset(SlicePolicy if include_all else policies)
        if covered is not policies and not all(isinstance(one, SlicePolicy) for one in covered):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"policies are each a SlicePolicy, such as SlicePolicy.LOG, not {policies!r}")
        return Snapshot(
            created_at=utc_now(),
            parent_id=None if self.parent is None else self.parent.session_id,
            children_ids=tuple(child.session_id for child in self.children) if self._children else (),
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
        parent: Session | None = None,
        session_id: UUID | None = None,
        created_at: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        slice_config: SliceConfig | None = None,
    ) -> Session:
        """A session of its own with the same values, reducers and policies, and the same identity where nothing else is
        given. Without a dispatcher it gets a new one: it never publishes on this session's.

        Raises:
            ValueError: its logs would be in the files of this session's.
        """
        clone = Session(
            dispatcher=dispatcher,
            parent=self.parent if parent is None else parent,
            session_id=self.session_id if session_id is None else session_id,
            created_at=self.created_at if created_at is None else created_at,
            tags=self._given_tags if tags is None else tags,
            slice_config=slice_config,
        )
        if self._files is not None and clone._files is not None and self._files.directory == clone._files.directory:
            raise ValueError("a clone writes no logs into the files of its original: give it a session_id")
        self._slices.copy_to(clone._slices)
        return clone

    @property
    def lock(self) -> CallLock:
        return self._lock

    def begin(self, call: CallInfo) -> Mark:
        return self._slices.mark()

    def changes(self, mark: Mark) -> Sequence[Change]:
        return ()

    def changed(self, mark: Mark) -> bool:
        """Whether a STATE slice holds other objects than at `mark`."""
        return self._slices.changed(mark)

    def held_at(self, mark: Mark, slice_type: type[T]) -> tuple[T, ...]:
        """What a STATE slice held at `mark`."""
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


def iter_sessions_bottom_up(root: Session) -> Iterator[Session]:
    """`root` and all below it, children before their parents and in their order."""
    for child in root.children:
        yield from iter_sessions_bottom_up(child)
    yield root
