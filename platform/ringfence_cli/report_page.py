"""The page that tells of a run, for who was not there: one file of HTML, without scripts and without anything from
elsewhere."""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from ringfence.filesystem.paths import display_path
from ringfence.participants import Step
from ringfence_cli import report_html as h
from ringfence_cli.printable import plural
from ringfence_cli.report_diff import diff
from ringfence_cli.task import RunOutcome
from ringfence_cli.watch import RunStats
from ringfence_cli.workspace import RunWorkspace, line_counts
from ringfence_tools.planning import Plan

HEADINGS = {
    "done": "The task was done",
    "failed": "The task failed",
    "provider_failed": "The model's provider failed",
    "limit_reached": "A limit was reached",
    "interrupted": "The run was interrupted",
}
MARKS = {"pending": "to do", "in_progress": "begun", "done": "done"}


@dataclass(frozen=True, slots=True)
class About:
    """What was asked for. ``terms`` has policies and limits, as options; ``next_steps`` says what can be done now;
    ``record`` is HTML, turn by turn."""

    task: str
    model: str
    terms: str
    started_at: datetime
    ended_at: datetime
    next_steps: Sequence[str]
    record: str


def page(about: About, ending: RunOutcome, tally: RunStats, workspace: RunWorkspace) -> bytes:
    """The whole page, in UTF-8."""
    style = (files("ringfence_cli") / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Should anything hostile ever get through the escaping, a browser still runs and fetches nothing.
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    body = "".join(_body(about, ending, tally, workspace))
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width"><meta name="referrer" content="no-referrer">'
        f"<title>{HEADINGS[ending.outcome]}: {h.line(about.task, 80)}</title><style>{style}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'.encode()


def _body(about: About, ending: RunOutcome, tally: RunStats, workspace: RunWorkspace) -> Iterator[str]:
    yield f"<h1>{h.badge(ending.outcome)} {HEADINGS[ending.outcome]}</h1>"
    if ending.error is not None:
        yield f"<p>{h.text(ending.error)}</p>"
    yield h.table(list(_facts(about, ending, tally, workspace)), lambda fact: fact)
    yield f"<h2>Task</h2><pre>{h.text(about.task)}</pre>"
    if ending.text is not None:
        yield f"<h2>Answer</h2><pre>{h.text(ending.text)}</pre>"
    if ending.plan is not None:
        yield f"<h2>Plan</h2>{_plan(ending.plan)}"
    if ending.conflicts:
        yield "<h2>Conflicts</h2><p>Changed on disk meanwhile, so nothing was applied:</p>"
        yield h.paths(ending.conflicts)
    yield "<h2>What to do now</h2>"
    beside = workspace.left_out_since()
    nothing = "Nothing but what is named last was changed." if beside else "Nothing was changed."
    yield "".join(f"<p>{h.text(said)}</p>" for said in about.next_steps) or f"<p>{nothing}</p>"
    if steps := workspace.own_steps():
        yield _steps(steps, workspace.directory)
    if ending.changes:
        added, removed = line_counts(ending.patch)
        yield f"<h2>Changes: {plural(len(ending.changes), 'path')}, +{added:,} -{removed:,} lines</h2>"
        yield h.changes(ending.changes) + diff(ending.patch)
    yield f"<h2>What happened</h2>{about.record or '<p>The model never answered.</p>'}"
    if workspace.left_out:
        yield "<h2>Left out</h2><p>Of the directory, the agent did not have:</p>"
        yield h.table(workspace.left_out, lambda one: (h.path(one.path), h.line(one.reason)))
    if beside:
        yield "<h2>Not in the history</h2><p>Changed by the run, and no undo brings it back:</p>"
        yield h.table(beside, lambda one: (h.path(one.path), h.line(one.reason)))
    yield f'<p class="dim">ringfence {version("ringfence")}</p>'


def _facts(about: About, ending: RunOutcome, tally: RunStats, workspace: RunWorkspace) -> Iterator[tuple[str, str]]:
    yield "Directory", h.path(os.path.abspath(workspace.directory))
    yield "Exit code", str(ending.exit_code)
    yield "Model", h.line(about.model)
    if about.terms:
        yield "Policies and limits", h.line(about.terms, 1_000)
    yield "Began" if tally.parts == 1 else "Resumed", f"{about.started_at:%Y-%m-%d %H:%M:%S} UTC"
    yield "Ended", f"{about.ended_at:%Y-%m-%d %H:%M:%S} UTC, after {h.seconds(tally.seconds)} of work"
    yield "Came to", h.line(tally.said)
    usage = tally.usage
    counts = (("in", usage.input_tokens), ("of them cached", usage.cached_tokens), ("out", usage.output_tokens))
    said = [f"{count:,} {word}" for word, count in counts if count is not None]
    if said:
        yield "Tokens", ", ".join(said)


def _plan(plan: Plan) -> str:
    steps = h.table(plan.steps, lambda step: (f"{step.step_id}.", h.line(step.title, 1_000), MARKS[step.status]))
    return f"<p>{h.text(plan.objective)}</p>{steps}"


def _steps(steps: Sequence[Step], directory: Path) -> str:
    where = shlex.quote(os.path.abspath(directory))

    def row(step: Step) -> Iterable[str]:
        undo = f"ringfence undo {h.text(where)} --step {step.number}"
        paths = h.line(", ".join(map(display_path, step.paths)), 200)
        tool, commit = h.line(step.tool, 64), h.line(step.commit[:12])
        return str(step.number), f"<code>{tool}</code>", paths, f"<code>{commit}</code>", f"<code>{undo}</code>"

    return f"<details><summary>Each of the steps</summary>{h.table(steps, row)}</details>"
