"""What people and CI jobs see of a batch: its results in one object, as JSON, JUnit XML, Markdown and a page."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

from ringfence_batch.ledger import DamagedFileError, Ledger, LedgerError
from ringfence_tools.printable import one_line, plural, why

T = TypeVar("T")
OUTCOMES = ("done", "checks-failed", "task-failed", "infra-failed", "cancelled", "damaged")
NO_RESULT, RUNNING = "no result", "running"
FILES = {"report.html": "page", "patch.diff": "patch", "receipts.jsonl": "calls"}
"""The files of an attempt that people look at, and what they are. Its ``*.log`` come after them."""
MAX_CAUSE_CHARACTERS, MAX_TASK_CHARACTERS = 500, 160
MAX_LISTED = 50
DAMAGED, PROVIDER_FAILED, INFRASTRUCTURE_FAILED = 2, 3, 4
_JUNIT = {"done": None, "checks-failed": "failure", "task-failed": "failure", "cancelled": "skipped"}
_NOT_IN_XML: Mapping[int, str] = {0xFFFE: "?", 0xFFFF: "?"}
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


def write_summary(ledger: Ledger) -> Summary:
    """Write ``summary.json``, ``summary.md``, ``junit.xml`` and ``index.html`` into the directory of a batch.

    Return what they say. Raises LedgerError.
    """
    from ringfence_batch.page import render_page

    summary = summarize(ledger)
    written = {
        "summary.json": json.dumps(summary.to_json()),
        "summary.md": render_markdown(summary),
        "junit.xml": render_junit(summary),
        "index.html": render_page(summary),
    }
    for name, text in written.items():
        beside = ledger.out / f".{name}.part"  # the driver alone writes here
        try:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(beside, ledger.out / name)
        except OSError as error:
            shown = f"`ringfence batch status {shlex.quote(str(ledger.out))}` shows the results"
            raise LedgerError(f"{ledger.out / name} cannot be written ({why(error)}): {shown}") from None
    return summary


def render_junit(summary: Summary) -> str:
    """Return JUnit XML: a failed task is a failure, and what says nothing of a task is an error."""
    suite = ElementTree.Element(
        "testsuite", name=one_line(summary.out, 300), time=f"{sum(row.seconds for row in summary.rows):.3f}"
    )
    counts = Counter[str]()
    for row in summary.rows:
        case = ElementTree.SubElement(suite, "testcase", classname="batch", name=row.id, time=f"{row.seconds:.3f}")
        if (kind := _JUNIT.get(row.outcome or "", "error")) is not None:
            counts[kind] += 1
            message = f"{row.outcome or 'no result'}: {row.cause}".translate(_NOT_IN_XML)
            ElementTree.SubElement(case, kind, type=row.outcome or "no-result", message=message)
    for name, kind in (("tests", ""), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(counts[kind] if kind else len(summary.rows)))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def render_markdown(summary: Summary) -> str:
    """Return a summary in Markdown that is short enough for the page of a CI job."""
    total, done = len(summary.rows), summary.outcomes.get("done", 0)
    lines = [f"## {done:,} of {plural(total, 'task')} done", "", "| outcome | tasks |", "|---|---:|"]
    lines += [f"| {outcome} | {count:,} |" for outcome, count in summary.counts]
    if summary.causes:
        lines += ["", "| tasks | outcome | why |", "|---:|---|---|"]
        lines += [f"| {count:,} | {outcome} | {_markdown(cause)} |" for outcome, cause, count in _first(summary.causes)]
        lines += _remaining(summary.causes, "cause")
        failed = [row for row in summary.rows if row.outcome != "done"]
        lines += ["", "<details><summary>Not done</summary>", "", "| task | outcome | why |", "|---|---|---|"]
        lines += [f"| `{row.id}` | {row.outcome or NO_RESULT} | {_markdown(row.cause)} |" for row in _first(failed)]
        lines += [*_remaining(failed, "task"), "", "</details>"]
    return "\n".join(lines) + "\n"


def _first(found: Sequence[T]) -> Sequence[T]:
    return found[:MAX_LISTED]


def _remaining(found: Sequence[object], noun: str) -> list[str]:
    return ["", f"and {plural(len(found) - MAX_LISTED, f'more {noun}')}"] if len(found) > MAX_LISTED else []


def _markdown(text: str) -> str:
    """Escape all that has a meaning in Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)
