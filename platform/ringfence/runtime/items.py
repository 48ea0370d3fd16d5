"""What a slice holds at one moment."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from ringfence.runtime.reducers import Append, Clear, Extend, Replace, SliceOp

T = TypeVar("T")
V = TypeVar("V")


class Items(Generic[T]):
    """What a slice holds at one moment: the first `length` items of a list that only grows. The value never changes.

    So keeping a value costs nothing, and neither does going back to it. A value that owns its list and ends where the
    list ends appends in place, behind itself; any other value appends to a copy of its own. To be used while the slices
    are locked, except for reading what `Slices.capture` gave out: only that is never cut off by a rollback.
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
        items, length = self._items, self.length
        if len(items) != length or not self._owns_list:
            items = items[:length]
        items.append(item)
        return Items(items, length + 1)

    def extend(self, more: Sequence[T]) -> Items[T]:
        items, length = self._items, self.length
        if len(items) != length or not self._owns_list:
            items = items[:length]
        items.extend(more)
        return Items(items, length + len(more))

    def exchange(self, old: T, new: T) -> Items[T]:
        items = self._items[: self.length]
        for place, item in enumerate(items):
            if item is old:
                items[place] = new
                break
        else:
            items.append(new)
        return Items(items, len(items))

    def reopened(self, *, cut: bool) -> Items[T]:
        """The same items, for going on from a mark: the next append is in place again.

        ``cut`` says that nobody can hold more of the list than this value; then what was appended since is cut off.
        Without that, a call that fails again and again would copy the whole slice every time.
        """
        in_place = self._owns_list and (cut or len(self._items) == self.length)
        if not in_place:
            return Items(self._items[: self.length], self.length)
        del self._items[self.length :]
        return self

    def shared(self) -> Items[T]:
        """The same items, for somebody who leaves the list as it is."""
        return Items(self._items, self.length, owns_list=False)

    def begins_with(self, other: Items[T]) -> bool:
        """Whether these are the objects of `other`, and maybe more behind them."""
        if self._items is other._items:
            return self.length >= other.length
        mine = self._items[: min(self.length, other.length)]
        return len(mine) == other.length and all(map(operator.is_, mine, other.all()))

    def equals(self, other: Items[T]) -> bool:
        if self.length != other.length:
            return False
        return self._items is other._items or self.all() == other.all()

    def holds_the_objects_of(self, other: Items[T]) -> bool:
        """`equals` for values that may not be comparable: by identity."""
        if self is other or self.length != other.length:
            return self is other
        return all(mine is theirs for mine, theirs in zip(self.all(), other.all(), strict=True))


EMPTY: Items[Any] = Items([], 0, owns_list=False)


def applied(op: SliceOp[T], items: Items[T]) -> Items[T]:
    """What `items` become. Whatever raises (an iterable, a predicate) does so before anything has changed."""
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
