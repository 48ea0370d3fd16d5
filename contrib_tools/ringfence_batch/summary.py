"""The results of a batch in one object."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ringfence_batch.ledger import CandidateResult, DamagedFileError, Ledger
from ringfence_tools.printable import one_line

OUTCOMES = ("done", "checks-failed", "task-failed", "infra-failed", "cancelled", "damaged")
NO_RESULT, RUNNING = "no result", "running"
FILES = {"report.html": "page", "patch.diff": "patch", "receipts.jsonl": "calls"}
"""The files of an attempt that people look at, and what they are. Its ``*.log`` come after them."""
MAX_CAUSE_CHARACTERS, MAX_TASK_CHARACTERS = 500, 160
DAMAGED, PROVIDER_FAILED, INFRASTRUCTURE_FAILED = 2, 3, 4
_DIFFERS = re.compile(r"\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b|\d+\.\d+|\d{4,}")
"""What makes two messages of one cause differ: addresses, hashes, durations, sizes."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task with what is known of it. ``outcome`` is None as long as it has no result."""

    id: str
    task: str
    outcome: str | None
    cause: str
    kind: str
    """The cause without what differs from task to task."""
    attempts: int
    seconds: float
    tokens: int | None
    turns: int
    directory: str
    """The attempt that gave the result, from the directory of the batch; empty without one."""
    files: Mapping[str, str]
    """What an attempt has left in its directory, by what it is."""
    cost_usd: float | None = None
    candidate: int | None = None
    """The number of the best candidate, whose result it is."""
    candidates: Sequence[CandidateResult] = ()
    is_provider: bool = False
    """Whether the infrastructure that failed is the model's provider."""

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("kind", "is_provider")}


@dataclass(frozen=True)
class Summary:
    """The results of a batch, at one moment."""

    out: str
    rows: Sequence[TaskRow]
    running: Sequence[str] = ()
    """The ids of tasks without a result that a driver runs just now."""

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
    def counts(self) -> Sequence[tuple[str, int]]:
        """The outcomes, and the tasks without a result: those that run, and the others."""
        running = len(self.running)
        missing = {RUNNING: running, NO_RESULT: self.without_result - running}
        return [*self.outcomes.items(), *((name, count) for name, count in missing.items() if count)]

    @property
    def damaged(self) -> Sequence[str]:
        """A line for each task with a damaged file, which names the file."""
        return [row.cause for row in self.rows if row.outcome == "damaged"]

    @property
    def cost_usd(self) -> float | None:
        """What the tasks whose cost is known have cost. None if it is known of none."""
        known = [row.cost_usd for row in self.rows if row.cost_usd is not None]
        return sum(known) if known else None

    @property
    def without_result(self) -> int:
        return len(self.rows) - sum(self.outcomes.values())

    @property
    def exit_code(self) -> int:
        """0 all done, 1 some task or check failed, 2 a file is damaged, 3 a model's provider failed, 4 other
        infrastructure failed.

        A failure of the infrastructure says nothing of a task, so it comes before the failures of tasks.
        """
        if self.damaged:
            return DAMAGED
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
            "running": list(self.running),
            "causes": [{"outcome": outcome, "cause": cause, "count": count} for outcome, cause, count in self.causes],
            "seconds": round(sum(row.seconds for row in self.rows), 3),
            "tokens": sum(row.tokens or 0 for row in self.rows),
            "cost_usd": self.cost_usd,
            "exit_code": self.exit_code,
            "tasks": [row.to_json() for row in self.rows],
        }


def summarize(ledger: Ledger) -> Summary:
    """Read all results. Raises LedgerError."""
    running = {*ledger.running()}  # before the results, so that none is there that has one
    rows = [_row(ledger, task_id) for task_id in ledger.ids()]
    return Summary(str(ledger.out), rows, [row.id for row in rows if row.outcome is None and row.id in running])


def _row(ledger: Ledger, task_id: str) -> TaskRow:
    try:
        return _read_row(ledger, task_id)
    except DamagedFileError as error:
        cause = one_line(str(error), MAX_CAUSE_CHARACTERS)
        return TaskRow(task_id, "", "damaged", cause, cause, ledger.attempts(task_id), 0.0, None, 0, "", {})


def _read_row(ledger: Ledger, task_id: str) -> TaskRow:
    text = one_line(ledger.task(task_id).task, MAX_TASK_CHARACTERS)
    result, attempts = ledger.result(task_id), ledger.attempts(task_id)
    if result is None:
        return TaskRow(task_id, text, None, "", "", attempts, 0.0, None, 0, "", {})
    cause = one_line(result.cause, MAX_CAUSE_CHARACTERS)
    directory = ledger.directory(task_id) / "attempts" / str(result.attempt)
    return TaskRow(
        task_id,
        text,
        result.outcome,
        cause,
        _kind(task_id, cause),
        attempts,
        result.seconds,
        result.tokens,
        result.turns,
        str(directory.relative_to(ledger.out)),
        _files(directory),
        result.cost_usd,
        result.candidate,
        result.candidates,
        result.details.get("outcome") == "provider_failed",
    )


def _kind(task_id: str, cause: str) -> str:
    if task_id in cause and any(char.isdigit() for char in task_id):  # others are words of the cause itself
        cause = re.sub(rf"(?<![\w.-]){re.escape(task_id)}(?![\w-])", "ID", cause)
    return _DIFFERS.sub("…", cause)


def _files(directory: Path) -> Mapping[str, str]:
    try:
        found = sorted(entry.name for entry in os.scandir(directory) if entry.is_file() and entry.stat().st_size)
    except OSError:  # the result is there, and somebody has made room
        return {}
    named = {label: name for name, label in FILES.items() if name in found}
    return named | {name.removesuffix(".log"): name for name in found if name.endswith(".log")}
