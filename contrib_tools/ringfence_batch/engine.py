"""The port of an engine: where the attempts at tasks run. The driver decides what runs, and the ledger what has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class AttemptRequest:
    """What a worker is asked for: an attempt at a task.

    ``is_last`` says that a failure of the infrastructure is to be the task's result. ``deadline`` is the most seconds
    that the run may take, and ``grace_seconds`` how long after that it may end by itself. ``source`` is a pack of the
    workspace, for a node that does not have the workspace itself.
    """

    id: str
    is_last: bool
    deadline: float | None = None
    source: str | None = None
    grace_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt that has ended, as its worker says; ``is_lost`` is True if the worker died without a word."""

    id: str
    outcome: str = ""
    cause: str = ""
    is_published: bool = False
    is_lost: bool = False


class Engine(Protocol):
    """Runs attempts. It may lose all that it knows with its process: the ledger is the truth."""

    slots: int
    """How many attempts run at once. A `poll` may change it."""

    def start(self, request: AttemptRequest) -> None:
        """Begin an attempt in a free slot."""
        ...

    def poll(self, seconds: float) -> Sequence[AttemptEnded]:
        """Wait for at most this time. Return what has ended."""
        ...

    def cancel(self, task_id: str) -> None:
        """End an attempt with all of its processes. `poll` tells of it as lost."""
        ...

    def close(self) -> None:
        """End all attempts. Once is enough."""
        ...
