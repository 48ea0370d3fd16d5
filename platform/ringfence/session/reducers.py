"""Reducers, as functions or as methods of a slice's own type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from ringfence.session.views import SessionView, SliceView

from ringfence.session.items import Append, Extend, Replace, SliceOp

T = TypeVar("T")
EventT = TypeVar("EventT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
SliceT = TypeVar("SliceT")
OpT = TypeVar("OpT")


@dataclass(frozen=True, slots=True)
class ReducerContext:
    """The read-only context of a reducer: its session."""

    session: SessionView


class Reducer(Protocol[EventT_contra, T]):
    """Returns the operation of an event on a slice. A reducer is a pure function: it runs under the session's lock."""

    def __call__(self, view: SliceView[T], event: EventT_contra, /, *, context: ReducerContext) -> SliceOp[T]: ...


def append_all(view: SliceView[T], event: T, /, *, context: ReducerContext) -> Append[T]:
    """Keep every event, equal ones too."""
    return Append(event)


def replace_latest(view: SliceView[T], event: T, /, *, context: ReducerContext) -> Replace[T]:
    """Keep the last event only."""
    return Replace((event,))


@dataclass(frozen=True)
class KeepOnePerKey(Generic[T]):
    """A value and not a closure: two reducers with one key function are equal, and so are registered only once."""

    key: Callable[[T], object]

    def __call__(self, view: SliceView[T], event: T, /, *, context: ReducerContext) -> Replace[T]:
        key = self.key(event)
        return Replace((*(item for item in view if self.key(item) != key), event))


def upsert_by(key: Callable[[T], object]) -> Reducer[T, T]:
    """Return a reducer that removes the items with the event's key and appends the event."""
    return KeepOnePerKey(key)


def replace_latest_by(key: Callable[[T], object]) -> Reducer[T, T]:
    """Return the reducer of `upsert_by`, which keeps the last event of each key."""
    return KeepOnePerKey(key)


REDUCES = "__ringfence_reduces__"
"""The attribute of a function that `reducer` has marked: the event type."""


def reducer(on: type[EventT]) -> Callable[[Callable[[SliceT, EventT], OpT]], Callable[[SliceT, EventT], OpT]]:
    """Mark a method `(self, event) -> SliceOp` of a frozen dataclass as what an event does to it.

    ``self`` is the slice's latest value. `Session.install` registers all marked methods of a class.
    """

    def mark(method: Callable[[SliceT, EventT], OpT]) -> Callable[[SliceT, EventT], OpT]:
        setattr(method, REDUCES, on)
        return method

    return mark


@dataclass(frozen=True)
class MethodReducer(Generic[T]):
    """The reducer that a marked method is."""

    method: str
    initial: Callable[[], T] | None

    def __call__(self, view: SliceView[T], event: object, /, *, context: ReducerContext) -> SliceOp[T]:
        current = view.latest()
        if current is None:
            if self.initial is None:
                return Extend(())
            current = self.initial()
        return getattr(current, self.method)(event)


def reducer_name(reducer: Reducer[Any, Any], slice_type: type[object]) -> str:
    """The name of a reducer in its author's code."""
    if isinstance(reducer, MethodReducer):
        return f"{slice_type.__name__}.{reducer.method}"
    return f"{getattr(reducer, '__name__', type(reducer).__name__)} of {slice_type.__name__}"


def marked_methods(slice_type: type[object]) -> Sequence[tuple[type[object], str]]:
    """The (event type, method name) pairs of a class whose methods are marked with `reducer`.

    Raises:
        TypeError: it is no frozen dataclass.
        ValueError: no method is marked, or two are for one event type.
    """
    if not is_dataclass(slice_type):
        raise TypeError(f"{slice_type!r} has to be a frozen dataclass")
    if not slice_type.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # typeshed hides it
        raise TypeError(f"{slice_type.__qualname__} has to be frozen: declare it with @dataclass(frozen=True)")
    methods: dict[type[object], str] = {}
    for name in dir(slice_type):
        event_type = getattr(getattr(slice_type, name, None), REDUCES, None)
        if event_type is None:
            continue
        if event_type in methods:
            both = f"{methods[event_type]} and {name}"
            raise ValueError(f"{slice_type.__qualname__} has two reducers for {event_type.__qualname__}: {both}")
        methods[event_type] = name
    if not methods:
        raise ValueError(f"{slice_type.__qualname__} has no reducer: mark its methods with @reducer(on=...)")
    return tuple(methods.items())
