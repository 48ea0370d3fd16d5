"""A history as people and programs look at it: its entries, and steps with what they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.participants import Change, Step
from ringfence_sandbox.store.commits import REPLACED, CommitKind, CommitRecord
from ringfence_sandbox.store.exports import unified
from ringfence_sandbox.store.finding_steps import parent_of
from ringfence_sandbox.store.store import Store


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One commit of the history. ``number`` is that of a step, 0 that of the baseline, None somebody else's change."""

    number: int | None
    kind: CommitKind
    tool: str
    call_id: str
    session_id: str
    receipt_id: str
    created_at: datetime
    paths: tuple[str, ...]
    commit: str
    names: tuple[str, ...] = ()
    apart: bool = False
    """Whether `gc` has left it for its name alone, and dropped what was between it and the rest of the history."""
    client: str = ""
    ignored: int = 0
    """The number of ignored paths that are left out of ``paths``."""

    @property
    def is_replacement(self) -> bool:
        """Whether another directory has come in the place of the workspace's root."""
        return self.kind == "external" and self.tool == REPLACED


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One step; ``patch`` is what ``git apply`` takes. ``left_out`` has the paths of which the history lacks what the
    step made of them, and why."""

    step: Step
    changes: Sequence[Change]
    patch: bytes
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: Sequence[str] = ()
    """The changed paths that are left out since git ignores them."""


def log_entry(store: Store, record: CommitRecord, names: Sequence[str], *, apart: bool = False) -> LogEntry:
    info, step = record.message.info, store.step_of(record)
    return LogEntry(
        record.number,
        info.kind,
        info.tool,
        info.call_id,
        info.session_id,
        info.receipt_id,
        info.created_at,
        step.paths,
        record.commit,
        tuple(names),
        apart,
        info.client,
    )


def shown_step(store: Store, record: CommitRecord, ignored: IgnoredPaths | None = None) -> ShownStep:
    parent = parent_of(record)
    patch = unified(store, parent, record.commit, ignored=ignored).text
    changes, hidden = store.states.changes(parent, record.commit), list[Change]()
    if ignored is not None:
        changes, hidden = ignored.split(changes)
    made = store.states.unknown(record.commit)
    new = sorted(made.new_since(store.states.unknown(parent)))
    return ShownStep(
        store.step_of(record),
        changes,
        patch,
        {path: made.reasons[path] for path in new},
        [change.path for change in hidden],
    )
