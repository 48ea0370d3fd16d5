"""What is shown of candidates: a live table at a terminal, plain lines elsewhere, and the table of the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from time import monotonic

from rich.table import Table
from rich.text import Text

from ringfence import serde
from ringfence.escapes import escape_path
from ringfence.limits import TokenUsage, dollars
from ringfence_cli.candidate_processes import Candidate
from ringfence_cli.live_table import live_table
from ringfence_tools.printable import one_line, plural, printable
from ringfence_tools.runs.outputs import ErrorStream


def candidates_shown(errors: ErrorStream | None) -> AbstractContextManager[Callable[[Sequence[Candidate]], None]]:
    """Give what shows candidates while they run. Without a stream, nothing does."""
    return live_table(errors, candidates_table, _StateLines)


class _StateLines:
    def __init__(self, errors: ErrorStream) -> None:
        self._errors = errors
        self._shown: dict[str, str] = {}

    def __call__(self, candidates: Sequence[Candidate]) -> None:
        for one in candidates:
            if one.state != "waits" and self._shown.get(one.fork.name) != one.state:
                self._shown[one.fork.name] = one.state
                self._errors.say(f"{one.fork.name}: {_describe(one)}")


def candidates_table(candidates: Sequence[Candidate]) -> Table:
    """Draw how far candidates are."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for one in candidates:
        style = "" if one.state != "ended" else "green" if one.outcome == "done" else "red"
        seconds = f"{monotonic() - one.began:.0f} s" if one.state in ("works", "is scored") else ""
        calls = plural(one.calls, "call") if one.state != "waits" else ""
        table.add_row(one.fork.name, Text(printable(_describe(one)), style, no_wrap=True), calls, seconds)
    return table


def _describe(one: Candidate) -> str:
    error = one.run.get("error")
    return one_line(f"{one.describe()} ({error})" if error else one.describe(), 200)


def table_lines(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Lines for the candidates in their order: name, score, changed lines, outcome of the run, directory."""
    names = max(len(one.fork.name) for one in candidates)
    scores = [printable(one.describe()) for one in candidates]
    width = min(max(map(len, scores)), 30)
    for one, score in zip(candidates, scores, strict=True):
        added, removed = one.counts
        changed = f"+{added} -{removed}"
        outcome = one.outcome.replace("_", " ")
        usage = serde.parse(TokenUsage, one.run.get("usage") or {})
        costs = f"{dollars(usage.cost_usd):8}  " if usage.cost_usd is not None else ""
        root = escape_path(one.fork.root)
        yield f"{one.fork.name:{names}}  {score:{width}}  {changed:10}  {outcome:12}  {costs}{root}"
