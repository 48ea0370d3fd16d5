"""The items of a slice, and the operations that change them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True)
class Append(Generic[T]):
    """Add one item at the end."""

    item: T


@dataclass(frozen=True)
class Extend(Generic[T]):
    """Add items at the end."""

    items: Iterable[T]


@dataclass(frozen=True)
class Replace(Generic[T]):
    """Hold exactly these items."""

    items: Iterable[T]


@dataclass(frozen=True)
class Clear(Generic[T]):
    """Drop the items that the predicate is true of, or all."""

    predicate: Callable[[T], bool] | None = None


SliceOp: TypeAlias = Append[T] | Extend[T] | Replace[T] | Clear[T]
"""The operation on its slice that a reducer returns."""


class Items(Generic[T]):
    """An immutable sequence: the first `length` items of a list that only grows.

    Keeping one costs nothing, and neither does a rollback to it. Items that own their list and end where the list ends
    append in place, behind themselves. Others append to a copy. The slices have to be locked, except for reading what
    `Slices.capture` returned: a rollback never truncates that.
    """

    __slots__ = ("_items", "_owns_list", "length")

    def __init__(self, items: list[T], length: int, owns_list: bool = True) -> None:
        self._items = items
        self.length = length
        self._owns_list = owns_list

    @staticmethod
    def of(items: Iterable[V]) -> Items[V]:
        held = list(items)
        return Items(held, len(held))

    def all(self) -> tuple[T, ...]:
        return tuple(self._items[: self.length])

    def latest(self) -> T | None:
        return self._items[self.length - 1] if self.length else None

    def append(self, item: T) -> Items[T]:
        items, length = self._items, self.length  # in place: every call appends to logs
        if not self._owns_list or len(items) != length:
            items = items[:length]
        items.append(item)
        return Items(items, length + 1)

    def extend(self, more: Sequence[T]) -> Items[T]:
        items = self._items if self._owns_list and len(self._items) == self.length else self._items[: self.length]
        items.extend(more)
        return Items(items, self.length + len(more))

    def replace_item(self, old: T, new: T) -> Items[T]:
        items = self._items[: self.length]
        for index, item in enumerate(items):
            if item is old:
                items[index] = new
                break
        else:
            items.append(new)
        return Items(items, len(items))

    def reopen(self, *, truncate: bool) -> Items[T]:
        """The same items after a rollback; the next append is in place again.

        ``truncate`` says that nobody holds more of the list, so later items are removed from it. Without that each
        failed call would copy the whole slice.
        """
        if not self._owns_list or not (truncate or len(self._items) == self.length):
            return Items(self._items[: self.length], self.length)
        del self._items[self.length :]
        return self

    def share(self) -> Items[T]:
        """The same items, for a holder that appends to a copy."""
        return Items(self._items, self.length, owns_list=False)

    def equals(self, other: Items[T]) -> bool:
        if self.length != other.length:
            return False
        return self._items is other._items or self.all() == other.all()

    def is_identical(self, other: Items[T]) -> bool:
        """Whether both hold the same objects."""
        return self is other or (self.length == other.length and all(map(operator.is_, self.all(), other.all())))


EMPTY: Items[Any] = Items([], 0, owns_list=False)


def apply_op(op: SliceOp[T], items: Items[T]) -> Items[T]:
    """The items after `op`. An iterable or predicate that raises does so before anything has changed."""
    if isinstance(op, Append):
        return items.append(op.item)
    if isinstance(op, Extend):
        return items.extend(tuple(op.items))
    if isinstance(op, Replace):
        return Items.of(op.items)
    if isinstance(op, Clear):  # pyright: ignore[reportUnnecessaryIsInstance]  # reducers are not all type-checked
        drop = op.predicate
        return EMPTY if drop is None else Items.of(item for item in items.all() if not drop(item))
    raise TypeError(f"a reducer returns Append, Extend, Replace or Clear; this one returned {op!r}")
