"""A session's slices: the values of one dataclass type each, how they are held, read, changed and marked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from ringfence.errors import CallEndedError, SnapshotRestoreError, TransactionError
from ringfence.failures import describe_error
from ringfence.participants import CallInfo, CallLock, Mark, current_call
from ringfence.runtime.events import HandlerFailure
from ringfence.runtime.items import EMPTY, Items, applied
from ringfence.runtime.reducers import (
    Clear,
    MethodReducer,
    Reducer,
    ReducerContext,
    Replace,
    SliceOp,
    marked_methods,
    name_of,
)
from ringfence.runtime.slice_views import EventT, SliceView, T
from ringfence.tagged import register_type
from ringfence.values import can_change

logger = logging.getLogger(__name__)

V = TypeVar("V")


class SlicePolicy(Enum):
    """Whether a rollback takes along what is in a slice."""

    STATE = "state"
    """Rolls back with a failed tool call, and is in snapshots."""
    LOG = "log"
    """Is never rolled back, and is in a snapshot only where that is asked for."""


STATE, LOG = SlicePolicy.STATE, SlicePolicy.LOG


@dataclass(frozen=True, slots=True)
class Registration:
    """`reducer` says what an event does to the slice of `target`."""

    target: type[Any]
    reducer: Reducer[Any, Any]


class LogFiles(Protocol):
    """What hears of every change of a LOG slice, with the slices locked."""

    def put(self, slice_type: type[Any], before: Items[Any], after: Items[Any], *, in_a_call: bool) -> None: ...

    def appended(self, slice_type: type[Any], item: object, *, in_a_call: bool) -> None: ...


class Slices:
    """All slices of one session. Changes made while a tool call holds `lock` roll back with it, except in LOG slices.

    One mutex makes every change atomic; the call's lock plays no part in that, so that whoever dispatches from
    outside does not wait for the end of a tool call.
    """

    def __init__(self, lock: CallLock, logs: Iterable[type[Any]] = (), files: LogFiles | None = None) -> None:
        self._lock = lock
        self._files = files
        self._mutex = threading.RLock()
        self._policies: dict[type[Any], SlicePolicy] = dict.fromkeys(logs, LOG)
        """Every slice type that is known here. Each has an entry in one of the next two."""
        self._logs: dict[type[Any], Items[Any]] = dict.fromkeys(logs, EMPTY)
        self._state: dict[type[Any], Items[Any]] = {}
        self._mark: Mark | None = None
        """The mark of `_state`, once there is one. Who has it, or a snapshot, has the dictionary: it is replaced then
        and no longer changed."""
        self._by_calls = 0
        """How many changes of STATE slices came from code that a tool call runs."""
        self._captures = 0
        """How often slices were handed out to somebody who may hold on to them: snapshots, clones."""
        self._reducers: dict[type[Any], tuple[Registration, ...]] = {}
        self._installed: set[type[Any]] = set()

    def locked(self) -> AbstractContextManager[bool]:
        """While it is entered, no other thread changes a slice or looks into one. Re-entrant."""
        return self._mutex

    def read(self, slice_type: type[T]) -> Items[T]:
        """What a slice holds; only to be used while `locked`."""
        items = self._state.get(slice_type)
        return self._logs.get(slice_type, EMPTY) if items is None else items

    def all(self, slice_type: type[T]) -> tuple[T, ...]:
        with self._mutex:
            items = self._state.get(slice_type)
            return (self._logs.get(slice_type, EMPTY) if items is None else items).all()

    def write(self, slice_type: type[T], op: SliceOp[T]) -> None:
        """Do `op` past the reducers. What its iterable or predicate raises leaves the slice as it is."""
        with self._mutex:
            if slice_type not in self._policies:
                self._admit(slice_type)
            if isinstance(op, (Replace, Clear)) and self._policies[slice_type] is LOG:
                self.refuse_in_a_call()
            self._put(slice_type, applied(op, self.read(slice_type)))

    def exchange(self, slice_type: type[T], old: T, new: T) -> None:
        with self._mutex:
            if slice_type not in self._policies:
                self._admit(slice_type)
            if self._policies[slice_type] is LOG:
                self.refuse_in_a_call()
            self._put(slice_type, self.read(slice_type).exchange(old, new))

    def types(self) -> frozenset[type[Any]]:
        with self._mutex:
            return frozenset(self._policies)

    def refuse_in_a_call(self) -> None:
        """Logs are never rolled back, so what a call that fails took out of them would be lost."""
        if self._lock.holder is not None:
            raise RuntimeError(f"while {self._lock.holder!r} runs, logs are only added to; empty them before or after")

    def _admit(self, slice_type: type[Any], policy: SlicePolicy = STATE) -> None:
        self._policies[require_slice_type(slice_type)] = policy
        register_type(slice_type)
        if policy is STATE and _changeable(slice_type):
            name = slice_type.__qualname__
            logger.warning(
                "%s can be changed in place, which no rollback takes back: freeze it, tuples for lists", name
            )
        if policy is LOG:
            self._put(slice_type, EMPTY)
        else:  # which changes nothing: a call that has ended may meet a type when its event is logged
            self._state = {**self._state, slice_type: EMPTY}
            self._mark = None

    def _put(self, slice_type: type[Any], items: Items[Any]) -> None:
        if self._policies[slice_type] is LOG:
            if self._files is not None:
                before = self._logs.get(slice_type, EMPTY)
                self._files.put(slice_type, before, items, in_a_call=self._lock.holder is not None)
            self._logs[slice_type] = items
        else:
            self._put_state(slice_type, items)

    def _put_state(self, slice_type: type[Any], items: Items[Any]) -> None:
        call = current_call()
        if call is not None:
            if call.ended:
                raise self._ended(call)
            self._by_calls += 1
        if self._mark is not None:
            self._state = self._state.copy()
            self._mark = None
        self._state[slice_type] = items

    def _ended(self, call: CallInfo) -> CallEndedError:
        return CallEndedError(f"{call!r} has ended: nothing changes {self._lock.name} through it")

    def _refuse_ended(self) -> None:
        """For what more is done with a change than to put it: nobody takes back what a thread does when its call is
        over, and it may be another's by then."""
        call = current_call()
        if call is not None and call.ended:
            raise self._ended(call)

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
            # An open mark holds the STATE slices of its moment. Were a slice to change sides, a rollback could neither
            # bring back what became a log, nor know what a former log held.
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
                if registered is None:
                    log = self._logs.get(kind)
                    if log is not None:
                        if logs:
                            self._logs[kind] = log.append(event)
                            if self._files is not None:
                                self._files.appended(kind, event, in_a_call=self._lock.holder is not None)
                        continue
                    if kind not in self._state:
                        if isinstance(event, type):
                            raise TypeError(f"an event is no class: give an instance of {event.__name__}")
                        self._admit(kind)
                    if state:
                        self._put_state(kind, self._state[kind].append(event))
                    continue
                for one in registered:
                    if logs if self._policies[one.target] is LOG else state:
                        self._reduce(one, event, context, failures)
        return tuple(failures) if failures else ()

    def _reduce(
        self, registration: Registration, event: object, context: ReducerContext, failures: list[HandlerFailure]
    ) -> None:
        target, reducer = registration.target, registration.reducer
        if self._policies[target] is STATE:
            self._refuse_ended()
        try:
            op = reducer(SliceView(self, target), event, context=context)
            if isinstance(op, (Replace, Clear)) and self._policies[target] is LOG:
                self.refuse_in_a_call()
            self._put(target, applied(op, self.read(target)))
        except Exception as error:
            logger.exception("a reducer of %s failed on a %s: %r", target.__name__, type(event).__name__, reducer)
            failures.append(HandlerFailure(reducer, error))
            holder = self._lock.holder
            if holder is not None:
                name = name_of(reducer, target)
                said = f"the reducer {name} failed on a {type(event).__name__}: {describe_error(error)}"
                problem = TransactionError(said)
                problem.__cause__ = error
                holder.problems.append(problem)

    def mark(self) -> Mark:
        """The STATE slices now, for `roll_back`; in constant time, since it is the dictionary itself."""
        mark = self._mark
        if mark is None:
            with self._mutex:
                self._mark = mark = (self._state, self._captures, self._by_calls)
        return mark

    def changed(self, mark: Mark) -> bool:
        """Whether code that a tool call runs has made a STATE slice hold other objects than at `mark`."""
        marked: Mapping[type[Any], Items[Any]] = mark[0]
        if self._by_calls == mark[2] or self._state is marked:
            return False
        with self._mutex:
            return not all(items.holds_the_objects_of(marked.get(kind, EMPTY)) for kind, items in self._state.items())

    def held_at(self, mark: Mark, slice_type: type[T]) -> tuple[T, ...]:
        """What a STATE slice held at `mark`."""
        marked: Mapping[type[Any], Items[Any]] = mark[0]
        with self._mutex:
            return marked.get(slice_type, EMPTY).all()

    def roll_back(self, mark: Mark) -> None:
        marked: Mapping[type[Any], Items[Any]] = mark[0]
        with self._mutex:
            current = self._state
            if current is marked:
                return
            cut = self._captures == mark[1]
            state: dict[type[Any], Items[Any]] = {}
            for kind, items in current.items():
                before = marked.get(kind, EMPTY)
                state[kind] = items if items is before else before.reopened(cut=cut)
            self._state, self._mark = state, None

    def capture(self, policies: Collection[SlicePolicy]) -> Mapping[type[Any], Items[Any]]:
        """Every slice of these policies, for a snapshot; no item is copied or looked at."""
        with self._mutex:
            self._captures += 1
            if self._mark is not None or STATE in policies:
                self._mark = self._state, self._captures, self._by_calls
            if LOG not in policies:
                return self._state if STATE in policies else {}
            return {**self._state, **self._logs} if STATE in policies else self._logs.copy()

    def restore(self, captured: Mapping[type[Any], Items[Any]], policies: Collection[SlicePolicy]) -> None:
        """Set every slice of these policies to what was captured, or to nothing.

        Raises:
            SnapshotRestoreError: slices that are not known here. Nothing has changed.
        """
        with self._mutex:
            unknown = sorted(kind.__qualname__ for kind in captured if kind not in self._policies)
            if unknown:
                raise SnapshotRestoreError(
                    f"this session does not know the slices {', '.join(unknown)}; register or install them first"
                )
            if STATE in policies:
                self._refuse_ended()
                if current_call() is not None:
                    self._by_calls += 1
                self._state = {kind: captured.get(kind, EMPTY).shared() for kind in self._state}
                self._mark = None
            if LOG in policies:
                for kind in self._logs:
                    self._put(kind, captured.get(kind, EMPTY).shared())

    def copy_to(self, other: Slices) -> None:
        """Make `other`, which nobody uses yet, hold and know what these do."""
        with self._mutex:
            self._captures += 1
            other._policies = self._policies.copy()
            other._reducers = self._reducers.copy()
            other._installed = self._installed.copy()
            other._state = {kind: items.shared() for kind, items in self._state.items()}
            other._logs = {kind: items.shared() for kind, items in self._logs.items()}


@lru_cache(maxsize=1024)
def _changeable(slice_type: type[Any]) -> bool:
    # Kept, since evaluating its annotations takes as long as a tool call, and every session meets the same types anew.
    return can_change(slice_type, unknown=False)


def require_slice_type(slice_type: type[T]) -> type[T]:
    if not (isinstance(slice_type, type) and is_dataclass(slice_type)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all type-checked
        raise TypeError(f"slices hold, and reducers take, values of dataclass types; {slice_type!r} is none")
    return slice_type
