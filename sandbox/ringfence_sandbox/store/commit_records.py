"""A commit of the history, and one whose objects are written before it is part of the history."""

from __future__ import annotations

from dataclasses import dataclass

from ringfence_sandbox.store.commit_messages import ParsedMessage
from ringfence_sandbox.store.folders import Folder
from ringfence_sandbox.store.unknown import NOTHING, Unknown


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One commit of the history."""

    commit: str
    parent: str | None
    message: ParsedMessage

    @property
    def number(self) -> int | None:
        return self.message.number


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A commit whose objects are written, and that is not part of the history yet."""

    commit: str
    parent: str | None
    number: int | None
    newest: int
    """The number of the newest step with this commit."""
    root: Folder
    changed: tuple[str, ...]
    """The paths whose kind, bytes or permissions changed, sorted; of a step also those that are unknown since it."""
    unknown: Unknown = NOTHING
