"""Read-only views of slices and of sessions, for reducers and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from datetime import datetime
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from ringfence.session.items import Items

T = TypeVar("T")


class ReadableSlices(Protocol):
    """The slices that a view shows."""

    def locked(self) -> AbstractContextManager[bool]: ...
    def read(self, slice_type: type[T]) -> Items[T]: ...
    def all(self, slice_type: type[T]) -> tuple[T, ...]: ...


class SliceView(Generic[T]):
    """A read-only slice. It always shows what the slice holds now."""

    __slots__ = ("_slice_type", "_slices")

    def __init__(self, slices: ReadableSlices, slice_type: type[T]) -> None:
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


class SessionView:
    """A read-only session, for reducers."""

    __slots__ = ("_slices", "created_at", "session_id", "tags")

    def __init__(self, session_id: UUID, created_at: datetime, tags: Mapping[str, str], slices: ReadableSlices) -> None:
        self.session_id = session_id
        self.created_at = created_at
        self.tags = tags
        self._slices = slices

    def __getitem__(self, slice_type: type[T]) -> SliceView[T]:
        return SliceView(self._slices, require_slice_type(slice_type))


def require_slice_type(slice_type: type[T]) -> type[T]:
    if not (isinstance(slice_type, type) and is_dataclass(slice_type)):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers are not all type-checked
        raise TypeError(f"slices hold, and reducers take, values of dataclass types; {slice_type!r} is none")
    return slice_type
