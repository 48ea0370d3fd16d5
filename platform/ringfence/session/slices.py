"""A session's slices: the values of one dataclass type each, how they are held, read, changed and marked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ringfence.errors import CallEndedError, SnapshotRestoreError, TransactionError
from ringfence.failures import describe_error
from ringfence.participants import CallInfo, CallLock, Mark, current_call
from ringfence.session.events import HandlerFailure
from ringfence.session.items import EMPTY, Append, Clear, Extend, Items, Replace, SliceOp, apply_op
from ringfence.session.reducers import MethodReducer, Reducer, ReducerContext, marked_methods, reducer_name
from ringfence.session.views import SliceView, require_slice_type
from ringfence.tagged import register_type, types_of
from ringfence.values import can_change

logger = logging.getLogger(__name__)

T = TypeVar("T")
EventT = TypeVar("EventT")


class SlicePolicy(Enum):
    """Whether a rollback restores the items of a slice."""

    STATE = "state"
    """Rolls back with a failed tool call, and is in snapshots."""
    LOG = "log"
    """Is never rolled back, and is in a snapshot only where that is asked for."""


STATE, LOG = SlicePolicy.STATE, SlicePolicy.LOG


@dataclass(frozen=True, slots=True)
class Registration:
    """`reducer` returns what an event does to the slice of `target`."""

    target: type[Any]
    reducer: Reducer[Any, Any]


class Slices:
    """All slices of one session. Changes made while a tool call holds `lock` roll back with it, except in LOG slices.

    One mutex makes every change atomic. It is not the call's lock, so a dispatch from outside does not wait for the end
    of a tool call.
    """

    def __init__(self, lock: CallLock, logs: Iterable[type[Any]] = ()) -> None:
        self._lock = lock
        self._mutex = threading.RLock()
        self._policies: dict[type[Any], SlicePolicy] = dict.fromkeys(logs, LOG)
        """Every known slice type. Each has an entry in one of the next two."""
        self._logs: dict[type[Any], Items[Any]] = dict.fromkeys(logs, EMPTY)
        self._state: dict[type[Any], Items[Any]] = {}
        self._mark: Mark | None = None
        """The mark of `_state`, once there is one. The dictionary is then copied before a change, since a mark or a
        snapshot holds it."""
        self._changes_by_calls = 0
        """How many changes of STATE slices came from code that a tool call runs."""
        self._captures = 0
        """How often slices were handed out to a possible holder: snapshots, clones."""
        self._reducers: dict[type[Any], tuple[Registration, ...]] = {}
        self._installed: set[type[Any]] = set()

    def locked(self) -> AbstractContextManager[bool]:
        """Return a re-entrant context manager that excludes other threads from reading and changing slices."""
        return self._mutex

    def read(self, slice_type: type[T]) -> Items[T]:
        """The items of a slice. The caller has to hold `locked`."""
        items = self._state.get(slice_type)
        return self._logs.get(slice_type, EMPTY) if items is None else items

    def all(self, slice_type: type[T]) -> tuple[T, ...]:
        with self._mutex:
            return self.read(slice_type).all()

    def write(self, slice_type: type[T], op: SliceOp[T]) -> None:
        """Apply `op` without reducers. An iterable or predicate that raises leaves the slice as it is."""
        with self._mutex:
            self._admit_to_write(slice_type, only_adds=isinstance(op, (Append, Extend)))
            self._put(slice_type, apply_op(op, self.read(slice_type)))

    def replace_item(self, slice_type: type[T], old: T, new: T) -> None:
        with self._mutex:
            self._admit_to_write(slice_type, only_adds=False)
            self._put(slice_type, self.read(slice_type).replace_item(old, new))

    def _admit_to_write(self, slice_type: type[Any], *, only_adds: bool) -> None:
        if slice_type not in self._policies:
            self._admit(slice_type)
        if not only_adds and self._policies[slice_type] is LOG:
            self.refuse_in_a_call()

    def types(self) -> frozenset[type[Any]]:
        """The slice types that are known here, and the types of what the slices hold, at every depth."""
        with self._mutex:
            known = frozenset(self._policies)
            held = [items.all() for items in (*self._state.values(), *self._logs.values())]
        return known | types_of(held)

    def refuse_in_a_call(self) -> None:
        """Refuse to remove from logs: they are never rolled back, so a failed call's removal would be final."""
        if self._lock.holder is not None:
            raise RuntimeError(f"while {self._lock.holder!r} runs, logs are only added to; empty them before or after")

    def _admit(self, slice_type: type[Any], policy: SlicePolicy = STATE) -> None:
        self._policies[require_slice_type(slice_type)] = policy
        register_type(slice_type)
        if policy is STATE and _is_mutable(slice_type):
            name = slice_type.__qualname__
            logger.warning(
                "%s can be changed in place, which no rollback takes back: freeze it, tuples for lists", name
            )
        if policy is LOG:
            self._logs[slice_type] = EMPTY
        else:  # changes nothing: a call that has ended may bring a new type when its event is logged
            self._state = {**self._state, slice_type: EMPTY}
            self._mark = None

    def _put(self, slice_type: type[Any], items: Items[Any]) -> None:
        if self._policies[slice_type] is LOG:
            self._logs[slice_type] = items
        else:
            self._put_state(slice_type, items)

    def _put_state(self, slice_type: type[Any], items: Items[Any]) -> None:
        if self._refuse_ended() is not None:
            self._changes_by_calls += 1  # made by code that a tool call runs
        if self._mark is not None:
            self._state = self._state.copy()
            self._mark = None
        self._state[slice_type] = items

    def _refuse_ended(self) -> CallInfo | None:
        """The current call. Nobody would roll back the change of a call that has ended, by a thread of its handler."""
        call = current_call()
        if call is not None and call.ended:
            raise CallEndedError(f"{call!r} has ended: nothing changes {self._lock.name} through it")
        return call

    def register(
        self,
        slice_type: type[T],
        event_type: type[EventT],
        reducer: Reducer[EventT, T],
        policy: SlicePolicy | None = None,
    ) -> None:
        require_slice_type(event_type)
        if not callable(reducer):
            raise TypeError(f"a reducer is a function of a view and an event; got {reducer!r}")
        if policy is not None and not isinstance(policy, SlicePolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"policy is a SlicePolicy, such as SlicePolicy.LOG, not {policy!r}")
        registration = Registration(slice_type, reducer)
        with self._mutex:
            self._set_policy(slice_type, policy)
            registered = self._reducers.get(event_type, ())
            if registration not in registered:
                self._reducers[event_type] = (*registered, registration)

    def _set_policy(self, slice_type: type[Any], policy: SlicePolicy | None) -> None:
        before = self._policies.get(slice_type)
        if before is None:
            self._admit(slice_type, policy or STATE)
        elif policy is not None and policy is not before:
            self._refuse_ended()
            # An open mark holds the STATE slices of its moment. A rollback could neither restore a slice that became a
            # log, nor know what a former log held.
            if self._lock.holder is not None:
                raise RuntimeError(
                    f"the policy of {slice_type.__qualname__} cannot become {policy.name} while {self._lock.holder!r}"
                    " runs; register its reducers before"
                )
            items = self.read(slice_type)
            self._logs.pop(slice_type, None)
            self._state = {kind: held for kind, held in self._state.items() if kind is not slice_type}
            self._mark = None
            self._policies[slice_type] = policy
            self._put(slice_type, items)

    def install(self, slice_type: type[T], initial: Callable[[], T] | None) -> None:
        methods = marked_methods(slice_type)
        if initial is not None and not callable(initial):
            name = slice_type.__qualname__
            raise TypeError(f"initial is what makes the first {name}, such as lambda: {name}(...), and not {initial!r}")
        with self._mutex:
            if slice_type not in self._installed:
                self._installed.add(slice_type)
                for event_type, method in methods:
                    self.register(slice_type, event_type, MethodReducer(method, initial))

    def may_log(self, kind: type[Any]) -> bool:
        """Whether an event of this type may change a LOG slice."""
        return kind in self._logs or kind in self._reducers or kind not in self._policies

    def apply(
        self, events: Iterable[object], *, state: bool, logs: bool, context: ReducerContext
    ) -> tuple[HandlerFailure, ...]:
        """Run the reducers of STATE slices, of LOG slices or of both; an event without any is appended to its slice.

        A reducer that raises leaves its slice as it is, and dooms the tool call that holds the session.

        Raises:
            CallEndedError: the tool call that does it has ended, and a STATE slice would change.
        """
        failures: list[HandlerFailure] = []
        with self._mutex:
            for event in events:
                kind = type(event)
                registered = self._reducers.get(kind)
                if registered is not None:
                    for one in registered:
                        if logs if self._policies[one.target] is LOG else state:
                            self._reduce(one, event, context, failures)
                elif (log := self._logs.get(kind)) is None:
                    self._append_to_state(event, state=state)
                elif logs:
                    self._logs[kind] = log.append(event)
        return tuple(failures) if failures else ()

    def _append_to_state(self, event: object, *, state: bool) -> None:
        kind = type(event)
        if kind not in self._state:
            if isinstance(event, type):
                raise TypeError(f"an event is no class: give an instance of {event.__name__}")
            self._admit(kind)
        if state:
            self._put_state(kind, self._state[kind].append(event))

    def _reduce(
        self, registration: Registration, event: object, context: ReducerContext, failures: list[HandlerFailure]
    ) -> None:
        target, reducer = registration.target, registration.reducer
        if self._policies[target] is STATE:
            self._refuse_ended()
        try:
            op = reducer(SliceView(self, target), event, context=context)
            self._admit_to_write(target, only_adds=isinstance(op, (Append, Extend)))
            self._put(target, apply_op(op, self.read(target)))
        except Exception as error:
            logger.exception("a reducer of %s failed on a %s: %r", target.__name__, type(event).__name__, reducer)
            failures.append(HandlerFailure(reducer, error))
            holder = self._lock.holder
            if holder is not None:
                name = reducer_name(reducer, target)
                problem = TransactionError(
                    f"the reducer {name} failed on a {type(event).__name__}: {describe_error(error)}"
                )
                problem.__cause__ = error
                holder.problems.append(problem)

    def mark(self) -> Mark:
        """A savepoint of the STATE slices, in constant time: the dictionary itself."""
        mark = self._mark
        if mark is None:
            with self._mutex:
                self._mark = mark = (self._state, self._captures, self._changes_by_calls)
        return mark

    def changed(self, mark: Mark) -> bool:
        """Whether code that a tool call runs has made a STATE slice hold other objects than at `mark`."""
        marked: Mapping[type[Any], Items[Any]] = mark[0]
        if self._changes_by_calls == mark[2] or self._state is marked:
            return False
        with self._mutex:
            return not all(items.is_identical(marked.get(kind, EMPTY)) for kind, items in self._state.items())

    def held_at(self, mark: Mark, slice_type: type[T]) -> tuple[T, ...]:
        """The items of a STATE slice at the savepoint `mark`."""
        with self._mutex:
            return mark[0].get(slice_type, EMPTY).all()

    def roll_back(self, mark: Mark) -> None:
        marked: Mapping[type[Any], Items[Any]] = mark[0]
        with self._mutex:
            if self._state is marked:
                return
            truncate = self._captures == mark[1]
            state: dict[type[Any], Items[Any]] = {}
            for kind, items in self._state.items():
                before = marked.get(kind, EMPTY)
                state[kind] = items if items is before else before.reopen(truncate=truncate)
            self._state, self._mark = state, None

    def capture(self, policies: Collection[SlicePolicy]) -> Mapping[type[Any], Items[Any]]:
        """Every slice of these policies, for a snapshot. No item is copied or examined."""
        with self._mutex:
            self._captures += 1
            if self._mark is not None or STATE in policies:
                self._mark = self._state, self._captures, self._changes_by_calls
            if LOG not in policies:
                return self._state if STATE in policies else {}
            return {**self._state, **self._logs} if STATE in policies else self._logs.copy()

    def restore(self, captured: Mapping[type[Any], Items[Any]], policies: Collection[SlicePolicy]) -> None:
        """Restore every slice of these policies to its captured items. Slices that were not captured become empty.

        Raises:
            SnapshotRestoreError: A captured slice is unknown here. Nothing has changed.
        """
        with self._mutex:
            unknown = sorted(kind.__qualname__ for kind in captured if kind not in self._policies)
            if unknown:
                raise SnapshotRestoreError(
                    f"this session does not know the slices {', '.join(unknown)}; register or install them first"
                )
            if STATE in policies:
                if self._refuse_ended() is not None:
                    self._changes_by_calls += 1
                self._state = {kind: captured.get(kind, EMPTY).share() for kind in self._state}
                self._mark = None
            if LOG in policies:
                self._logs = {kind: captured.get(kind, EMPTY).share() for kind in self._logs}

    def copy_to(self, other: Slices) -> None:
        """Copy all items, reducers and policies to `other`, which must not be in use yet."""
        with self._mutex:
            self._captures += 1
            other._policies = self._policies.copy()
            other._reducers = self._reducers.copy()
            other._installed = self._installed.copy()
            other._state = {kind: items.share() for kind, items in self._state.items()}
            other._logs = {kind: items.share() for kind, items in self._logs.items()}


_mutable_types: WeakKeyDictionary[type[Any], bool] = WeakKeyDictionary()


def _is_mutable(slice_type: type[Any]) -> bool:
    # Cached, since evaluating its annotations takes as long as a tool call, and every session asks again.
    mutable = _mutable_types.get(slice_type)
    if mutable is None:
        mutable = _mutable_types[slice_type] = can_change(slice_type, unknown=False)
    return mutable


class SliceAccessor(SliceView[T]):
    """One slice of a session. Its changes pass no reducers."""

    __slots__ = ("_written",)

    def __init__(self, slices: Slices, slice_type: type[T]) -> None:
        super().__init__(slices, slice_type)
        self._written = slices

    def seed(self, values: T | Iterable[T]) -> None:
        """Make the slice hold exactly one value, or the values of an iterable that is no dataclass itself."""
        self._written.write(self._slice_type, Replace(_require_values(values)))

    def replace_item(self, old: T, new: T) -> None:
        """Replace the very object `old` by `new`. Where the slice does not hold it, `new` is appended."""
        self._written.replace_item(self._slice_type, old, _require_value(new))

    def clear(self, predicate: Callable[[T], bool] | None = None) -> None:
        """Remove the items that `predicate` is true of, or all."""
        self._written.write(self._slice_type, Clear(predicate))

    def append(self, value: T) -> None:
        self._written.write(self._slice_type, Append(_require_value(value)))

    def register(
        self, event_type: type[EventT], reducer: Reducer[EventT, T], *, policy: SlicePolicy | None = None
    ) -> None:
        """Run `reducer` for events of exactly this type. Several run in the order of their registration; the same one
        is registered once.

        ``policy`` None keeps the slice's policy. That is STATE unless the type is one of the runtime's own events.
        Raises RuntimeError when the policy would change during a tool call.
        """
        self._written.register(self._slice_type, event_type, reducer, policy)


def _require_value(value: T) -> T:
    if not is_slice_value(value):
        raise TypeError(f"a slice holds values of dataclasses; {value!r} is none")
    return value


def _require_values(values: T | Iterable[T]) -> tuple[T, ...]:
    if type(values) is not list and (
        is_slice_value(values) or not isinstance(values, Iterable) or isinstance(values, str | bytes)
    ):
        return (_require_value(values),)  # pyright: ignore[reportReturnType]  # a dataclass that can be iterated is one value
    items = tuple(values)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # narrowing a type variable
    for item in items:  # pyright: ignore[reportUnknownVariableType]
        _require_value(item)  # pyright: ignore[reportUnknownArgumentType]
    return items  # pyright: ignore[reportUnknownVariableType]


def is_slice_value(value: object) -> bool:
    # What `is_dataclass` looks for, in a quarter of its time; on the value itself it would be true of a class too.
    return hasattr(type(value), "__dataclass_fields__")
