"""One slice of a session, to look at and to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from ringfence.runtime.reducers import Append, Clear, Reducer, Replace

if TYPE_CHECKING:
    from ringfence.runtime.slices import SlicePolicy, Slices

T = TypeVar("T")
EventT = TypeVar("EventT")


class SliceView(Generic[T]):
    """One slice, to look at. It shows what the slice holds now, also when it is kept for later."""

    __slots__ = ("_slice_type", "_slices")

    def __init__(self, slices: Slices, slice_type: type[T]) -> None:
        self._slices = slices
        self._slice_type = slice_type

    def all(self) -> tuple[T, ...]:
        """Every item, oldest first."""
        return self._slices.all(self._slice_type)

    def latest(self) -> T | None:
        """The last item, in constant time."""
        with self._slices.locked():
            return self._slices.read(self._slice_type).latest()

    def where(self, predicate: Callable[[T], bool]) -> tuple[T, ...]:
        return tuple(item for item in self.all() if predicate(item))

    @property
    def is_empty(self) -> bool:
        return len(self) == 0

    def __len__(self) -> int:
        with self._slices.locked():
            return self._slices.read(self._slice_type).length

    def __iter__(self) -> Iterator[T]:
        return iter(self.all())


class SliceAccessor(SliceView[T]):
    """One slice of a session, to look at and to change. These changes pass no reducers."""

    __slots__ = ()

    def seed(self, values: T | Iterable[T]) -> None:
        """Make the slice hold exactly one value, or the values of an iterable that is no dataclass itself."""
        self._slices.write(self._slice_type, Replace(_several(values)))

    def exchange(self, old: T, new: T) -> None:
        """Put `new` in the place of the very object `old`, or at the end where that is not in the slice."""
        self._slices.exchange(self._slice_type, old, _value(new))

    def clear(self, predicate: Callable[[T], bool] | None = None) -> None:
        """Drop the items that `predicate` is true of, or all."""
        self._slices.write(self._slice_type, Clear(predicate))

    def append(self, value: T) -> None:
        self._slices.write(self._slice_type, Append(_value(value)))

    def register(
        self, event_type: type[EventT], reducer: Reducer[EventT, T], *, policy: SlicePolicy | None = None
    ) -> None:
        """Let `reducer` say what events of exactly this type do to this slice; several run in the order of their
        registration, and registering the same one again does nothing.

        ``policy`` None leaves the slice's policy as it is, which is STATE unless the type is one of the runtime's own
        events. RuntimeError when the policy would change in the middle of a tool call.
        """
        self._slices.register(self._slice_type, event_type, reducer, policy)


def _value(value: T) -> T:
    if not is_slice_value(value):
        raise TypeError(f"a slice holds values of dataclasses; {value!r} is none")
    return value


def _several(values: T | Iterable[T]) -> tuple[T, ...]:
    if type(values) is not list and (
        is_slice_value(values) or not isinstance(values, Iterable) or isinstance(values, str | bytes)
    ):
        return (_value(values),)  # pyright: ignore[reportReturnType]  # a dataclass that can be iterated is one value
    items = tuple(values)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # narrowing a type variable
    for item in items:  # pyright: ignore[reportUnknownVariableType]
        _value(item)  # pyright: ignore[reportUnknownArgumentType]
    return items  # pyright: ignore[reportUnknownVariableType]


def is_slice_value(value: object) -> bool:
    # What `is_dataclass` looks for, in a quarter of its time; on the value itself it would be true of a class too.
    return hasattr(type(value), "__dataclass_fields__")
