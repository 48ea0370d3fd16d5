"""What people and CI jobs see of a batch: its results in one object, as JSON, JUnit XML, Markdown and a page."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ringfence_batch.ledger import Ledger
from ringfence_tools.printable import one_line

OUTCOMES = ("done", "checks-failed", "task-failed", "infra-failed", "cancelled")
MAX_CAUSE_CHARACTERS = 500
PROVIDER_FAILED, INFRASTRUCTURE_FAILED = 3, 4
_DIFFERS = re.compile(r"\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b|\d+\.\d+|\d{4,}")
"""What makes two messages of one cause differ: addresses, hashes, durations, sizes."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task with what is known of it. ``outcome`` is None as long as it has no result."""

    id: str
    outcome: str | None
    cause: str
    attempts: int
    seconds: float
    tokens: int | None
    turns: int
    directory: str
    """The attempt that gave the result, from the directory of the batch; empty without one."""
    is_provider: bool = False
    """Whether the infrastructure that failed is the model's provider."""

    @property
    def kind(self) -> str:
        """The cause without what differs from task to task."""
        return _DIFFERS.sub("…", self.cause.replace(self.id, "ID"))

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "is_provider"}


@dataclass(frozen=True)
class Summary:
    """The results of a batch, at one moment."""

    out: str
    rows: Sequence[TaskRow]

    @cached_property
    def outcomes(self) -> Mapping[str, int]:
        """How many tasks have each outcome. Those without a result are in none."""
        found = Counter(row.outcome for row in self.rows)
        return {outcome: found[outcome] for outcome in OUTCOMES if found[outcome]}

    @cached_property
    def causes(self) -> Sequence[tuple[str, str, int]]:
        """Outcome, cause and number of what is not done, the most frequent first."""
        found = Counter((row.outcome, row.kind) for row in self.rows if row.outcome not in (None, "done"))
        return [(outcome or "", cause, count) for (outcome, cause), count in found.most_common()]

    @property
    def without_result(self) -> int:
        return len(self.rows) - sum(self.outcomes.values())

    @property
    def exit_code(self) -> int:
        """0 all done, 1 some task or check failed, 3 a model's provider failed, 4 other infrastructure failed.

        A failure of the infrastructure says nothing of a task, so it comes before the failures of tasks.
        """
        failed = [row for row in self.rows if row.outcome == "infra-failed"]
        if failed:
            return PROVIDER_FAILED if all(row.is_provider for row in failed) else INFRASTRUCTURE_FAILED
        return 0 if self.outcomes.get("done", 0) == len(self.rows) else 1

    def to_json(self) -> dict[str, Any]:
        return {
            "out": self.out,
            "total": len(self.rows),
            "outcomes": dict(self.outcomes),
            "without_result": self.without_result,
            "causes": [{"outcome": outcome, "cause": cause, "count": count} for outcome, cause, count in self.causes],
            "seconds": round(sum(row.seconds for row in self.rows), 3),
            "tokens": sum(row.tokens or 0 for row in self.rows),
            "exit_code": self.exit_code,
            "tasks": [row.to_json() for row in self.rows],
        }


def summarize(ledger: Ledger) -> Summary:
    """Read all results. Raises OSError."""
    return Summary(str(ledger.out), [_row(ledger, task_id) for task_id in ledger.ids()])


def _row(ledger: Ledger, task_id: str) -> TaskRow:
    result, attempts = ledger.result(task_id), ledger.attempts(task_id)
    if result is None:
        return TaskRow(task_id, None, "", attempts, 0.0, None, 0, "")
    return TaskRow(
        task_id,
        result.outcome,
        one_line(result.cause, MAX_CAUSE_CHARACTERS),
        attempts,
        result.seconds,
        result.tokens,
        result.turns,
        str((ledger.directory(task_id) / "attempts" / str(result.attempt)).relative_to(ledger.out)),
        result.details.get("outcome") == "provider_failed",
    )


def write_summary(ledger: Ledger) -> Summary:
    """Write ``summary.json`` into the directory of a batch, and return what it says. Raises OSError."""
    summary = summarize(ledger)
    _save(ledger.out / "summary.json", json.dumps(summary.to_json()))
    return summary


def _save(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")  # the driver alone writes here
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(beside, path)
