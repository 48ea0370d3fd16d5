"""A session and its resources at one moment: to go back to together, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable
from uuid import UUID, uuid4

from ringfence.errors import SnapshotRestoreError, SnapshotSerializationError
from ringfence.filesystem.protocol import FilesystemSnapshot
from ringfence.participants import Snapshotable, Transactional, current_call
from ringfence.resources.binding import ResourceType
from ringfence.runtime.limits import require_aware, utc_now
from ringfence.runtime.session import Session
from ringfence.runtime.snapshots import Snapshot
from ringfence.runtime.transaction import tool_transaction
from ringfence.tagged import decode, encode, register_type, registered_types, type_id, types_within

ResourceT = TypeVar("ResourceT")

VERSION = "1"
Phase = Literal["pre_tool", "post_tool", "manual"]


@runtime_checkable
class LiveResources(Protocol):
    """`Prompt.resources` within its block, or the `ResourceContext` that it opens."""

    @property
    def participants(self) -> tuple[Transactional, ...]: ...

    def snapshotable(self) -> Mapping[type[Any], Snapshotable[Any]]: ...

    def get_optional(self, protocol: ResourceType[ResourceT]) -> ResourceT | None: ...


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """Why a snapshot was taken, and in which tool call, if it was in one."""

    tag: str | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    phase: Phase = "manual"
    """For hooks around tools of somebody else's, before the tool or after it."""


@dataclass(frozen=True, slots=True)
class CompositeSnapshot:
    """What a session and its resources held at one moment; `restore_snapshot` goes back to it."""

    snapshot_id: UUID
    created_at: datetime
    session: Snapshot
    resources: Mapping[type[Any], object] = field(default_factory=dict[type[Any], object], hash=False)
    """The snapshots of the resources, by the protocols that these are bound to."""
    metadata: SnapshotMetadata = field(default_factory=SnapshotMetadata)

    def to_json(self) -> str:
        """One JSON object; ``from_json`` takes it back. The files of a filesystem are not in it, only what their
        snapshot is known by: that stands for this snapshot in this process, for as long as this snapshot is held.

        Raises:
            SnapshotSerializationError: a slice, or the snapshot of a resource, holds something without a JSON form.
        """
        resources: list[dict[str, object]] = []
        for protocol, held in self.resources.items():
            snapshot = held.reference() if isinstance(held, FilesystemSnapshot) else held
            try:
                encoded = encode(snapshot)
            except (TypeError, ValueError) as error:
                raise SnapshotSerializationError(
                    f"the snapshot of the resource {protocol.__qualname__} cannot be JSON: {error}"
                ) from error
            resources.append({"resource_type": type_id(protocol), "snapshot": encoded})
        return json.dumps(
            {
                "version": VERSION,
                "snapshot_id": str(self.snapshot_id),
                "created_at": self.created_at.isoformat(),
                "session": json.loads(self.session.to_json()),
                "resources": sorted(resources, key=lambda one: str(one["resource_type"])),
                "metadata": asdict(self.metadata),
            },
            sort_keys=True,
        )

    @staticmethod
    def from_json(text: str | bytes, *, types: Iterable[type[Any]] | None = None) -> CompositeSnapshot:
        """A snapshot from what `to_json` made. ``types`` are as in `Snapshot.from_json`, with those of the resources'
        snapshots; where they are not given, both are what this process has had of them. Of the resources themselves
        it has what was bound here. Nothing is imported.

        Raises:
            SnapshotRestoreError: it is of another version or form, or has a type that is not among these.
        """
        types = types if types is None else tuple(types)
        met = registered_types()
        known = types_within((FilesystemSnapshot, *(met.values() if types is None else types)))
        try:
            data: dict[str, Any] = json.loads(text)
            if data["version"] != VERSION:
                raise ValueError(f"it is of version {data['version']!r}, not {VERSION!r}")
            return CompositeSnapshot(
                snapshot_id=UUID(data["snapshot_id"]),
                created_at=require_aware("created_at", datetime.fromisoformat(data["created_at"])),
                session=Snapshot.from_json(json.dumps(data["session"]), types=types),
                resources={
                    _protocol(one["resource_type"], met): decode(one["snapshot"], known) for one in data["resources"]
                },
                metadata=SnapshotMetadata(**data["metadata"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise SnapshotRestoreError(f"this is no snapshot that can be restored here: {reason}") from error


def create_snapshot(
    session: Session, resources: LiveResources | None = None, *, tag: str | None = None, phase: Phase = "manual"
) -> CompositeSnapshot:
    """What the STATE slices of a session hold now, and the resources that can be snapshotted and have been built.

    All of it is of one moment: while a tool call runs, others wait. In a handler it has what the call has done so far.

    Raises:
        ParticipantBusyError: a tool call took too long to wait for.
        RuntimeError: resources outside of their block.
    """
    call = current_call()
    ids = (None, None) if call is None else (call.call_id, call.tool)
    with tool_transaction(session, resources, tag="create_snapshot"):
        living: Mapping[type[Any], Snapshotable[Any]] = resources.snapshotable() if resources is not None else {}
        snapshots: dict[type[Any], object] = {kind: one.snapshot(tag=tag) for kind, one in living.items()}
        of_session = session.snapshot(tag=tag)
    for snapshot in snapshots.values():
        register_type(type(snapshot))
    return CompositeSnapshot(uuid4(), utc_now(), of_session, snapshots, SnapshotMetadata(tag, *ids, phase))


def restore_snapshot(session: Session, resources: LiveResources | None, snapshot: CompositeSnapshot) -> None:
    """Go back to a snapshot with all of it, or with nothing. It is a transaction: a workspace on disk has it in its
    history, and in a handler it is part of the call and is taken back with it. Logs stay, and so does what somebody
    else has changed on disk meanwhile.

    Raises:
        SnapshotRestoreError: it has slices that the session does not know, a resource that is not bound here, or a
            snapshot that is not of the resource that is; or an opaque call has changed files on disk since, or ran when
            it was taken, or runs. Nothing has changed; nor has it after anything else that the ``restore`` of a
            resource raises.
        RestoreFailedError: what had changed could not be taken back.
    """
    with tool_transaction(session, resources, tag="restore_snapshot"):
        session.restore(snapshot.session)
        for protocol, held in snapshot.resources.items():
            resource = resources.get_optional(protocol) if resources is not None else None
            if resource is None:
                raise SnapshotRestoreError(f"the snapshot has a {protocol.__qualname__}, and nothing is bound to that")
            resource.restore(held)


def _protocol(name: str, met: Mapping[str, type[Any]]) -> type[Any]:
    if name not in met:
        raise ValueError(f"nothing is bound to {name} here; bind it first")
    return met[name]
