"""Snapshots: the slices of a session at one moment, also as JSON, and with the resources of a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar, cast
from uuid import UUID

from ringfence.errors import SnapshotRestoreError
from ringfence.limits import require_aware
from ringfence.session.items import EMPTY, Items
from ringfence.session.slices import SlicePolicy, is_slice_value
from ringfence.tagged import decode, encode, known_type, registered_types, type_id, types_within

T = TypeVar("T")

VERSION = "1"


class SnapshotSlices(Mapping[type[Any], tuple[Any, ...]]):
    """The items of every slice that a snapshot covers. The tuple of a slice is made at its first use."""

    __slots__ = ("held",)

    def __init__(self, held: Mapping[type[Any], Items[Any]]) -> None:
        self.held = held

    def __getitem__(self, slice_type: type[T]) -> tuple[T, ...]:
        return self.held[slice_type].all()

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{kind.__qualname__}: {items.length} items' for kind, items in self.held.items())}}}"

    def lengths(self) -> frozenset[tuple[type[Any], int]]:
        """Type and number of items of each non-empty slice. A restore treats an empty slice as a missing one."""
        return frozenset((kind, items.length) for kind, items in self.held.items() if items.length)

    def equals(self, other: SnapshotSlices) -> bool:
        return self.lengths() == other.lengths() and all(
            items.equals(other.held.get(kind, EMPTY)) for kind, items in self.held.items()
        )


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The slices of a session at one moment, for `Session.restore`. Taking a snapshot copies no item.

    Snapshots with equal items are equal, regardless of their times. ``policies`` are the kinds of slices that the
    snapshot covers. ``tag`` is a name for people.
    """

    created_at: datetime
    slices: SnapshotSlices
    tags: Mapping[str, str]
    policies: frozenset[SlicePolicy]
    tag: str | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return self.policies == other.policies and self.tags == other.tags and self.slices.equals(other.slices)

    def __hash__(self) -> int:
        # The items are not hashed, since they need not be hashable.
        return hash((self.policies, self.slices.lengths()))

    def to_json(self) -> str:
        """One JSON object, the same for the same content; ``from_json`` takes it back.

        Raises:
            TypeError: a slice holds something without a JSON form.
            ValueError: a slice holds something that contains itself.
        """
        slices: list[dict[str, object]] = []
        for kind, items in self.slices.items():
            kinds = {type_id(item.__class__) for item in items}
            try:
                held = encode(list(items))
            except (TypeError, ValueError) as error:
                raise type(error)(f"the slice {kind.__qualname__} cannot be JSON: {error}") from error
            item_type = next(iter(kinds)) if len(kinds) == 1 else None
            slices.append({"slice_type": type_id(kind), "item_type": item_type, "items": held})
        return json.dumps(
            {
                "version": VERSION,
                "created_at": self.created_at.isoformat(),
                "slices": sorted(slices, key=lambda one: str(one["slice_type"])),
                "tags": dict(self.tags),
                "policies": sorted(policy.value for policy in self.policies),
                "tag": self.tag,
            },
            sort_keys=True,
        )

    @staticmethod
    def from_json(text: str | bytes, *, types: Iterable[type[Any]] | None = None) -> Snapshot:
        """A snapshot from what `to_json` made. ``types`` are the dataclasses and enums that may be in it, with those
        that their fields declare: `Session.slice_types` of a session that knows them. Where they are not given, they
        are the slices that any session of this process has had. Nothing is imported.

        Raises:
            SnapshotRestoreError: it is of another version or form, or has a type that is not among these.
        """
        known = types_within(registered_types().values() if types is None else types)
        try:
            data: dict[str, Any] = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"it is of version {data['version']!r}, not {VERSION!r}")
            held = {
                _slice_type(one["slice_type"], known): Items.of(_values(decode(one["items"], known)))
                for one in data["slices"]
            }
            return Snapshot(
                created_at=require_aware("created_at", datetime.fromisoformat(data["created_at"])),
                slices=SnapshotSlices(held),
                tags={str(name): str(value) for name, value in data["tags"].items()},
                policies=frozenset(SlicePolicy(policy) for policy in data["policies"]),
                tag=data["tag"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise SnapshotRestoreError(f"this is no snapshot that can be restored here: {reason}") from error


def _values(items: object) -> list[Any]:
    if not isinstance(items, list):
        raise ValueError("the items of a slice are no list")
    values = cast("list[Any]", items)
    if not all(map(is_slice_value, values)):
        raise ValueError("a slice has an item that is no dataclass")
    return values


def _slice_type(name: str, known: Mapping[str, type[Any]]) -> type[Any]:
    kind = known_type(name, known)
    if kind is None:
        raise ValueError(f"the slice {name} is not known here; register or install it first")
    return kind


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """The name of a snapshot for people, and the tool call in which it was made, if any."""

    tag: str | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


@dataclass(frozen=True, slots=True)
class CompositeSnapshot:
    """The state of a session and its resources at one moment, for `restore_snapshot` in the same process."""

    snapshot_id: UUID
    created_at: datetime
    session: Snapshot
    resources: Mapping[type[Any], object] = field(default_factory=dict[type[Any], object], hash=False)
    """The snapshots of the resources, by the protocols that these are bound to."""
    metadata: SnapshotMetadata = field(default_factory=SnapshotMetadata)
