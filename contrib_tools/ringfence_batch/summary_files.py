"""What people and CI jobs see of a batch: its summary as JSON, JUnit XML, Markdown and a page."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar
from xml.etree import ElementTree

from ringfence_batch.ledger import Ledger, LedgerError
from ringfence_batch.page import render_page
from ringfence_batch.summary import NO_RESULT, Summary, summarize
from ringfence_tools.printable import one_line, plural, why

T = TypeVar("T")
MAX_LISTED = 50
_JUNIT = {"done": None, "checks-failed": "failure", "task-failed": "failure", "cancelled": "skipped"}
_NOT_IN_XML: Mapping[int, str] = {0xFFFE: "?", 0xFFFF: "?"}


def write_summary(ledger: Ledger) -> Summary:
    """Write ``summary.json``, ``summary.md``, ``junit.xml`` and ``index.html`` into the directory of a batch.

    Return what they say. Raises LedgerError.
    """
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
