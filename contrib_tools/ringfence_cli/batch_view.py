"""The live table of a batch on standard error: counts, causes, rate, stragglers. Plain lines where no terminal is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from time import monotonic

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ringfence.limits import dollars
from ringfence_batch import Progress
from ringfence_cli.live_table import live_table
from ringfence_tools.printable import one_line
from ringfence_tools.runs.outputs import ErrorStream

LINE_SECONDS = 30.0
"""How often there is a line where no terminal is."""
MAX_CAUSES = MAX_STRAGGLERS = 6
SURE_AFTER = 5
"""The number of results after which a rate is told."""
STYLES = {"done": "green", "checks-failed": "yellow", "task-failed": "red", "infra-failed": "bold red"}


def shown(errors: ErrorStream | None) -> AbstractContextManager[Callable[[Progress], None]]:
    """Give what shows the progress of a batch. Without a stream, nothing does."""
    return live_table(errors, table, _Lines)


class _Lines:
    def __init__(self, errors: ErrorStream) -> None:
        self._errors, self._next, self._paused = errors, 0.0, ""

    def __call__(self, progress: Progress) -> None:
        if progress.paused and not self._paused:
            self._errors.say(f"paused: {progress.paused}")
        self._paused = progress.paused
        if monotonic() >= self._next:
            self._next = monotonic() + LINE_SECONDS
            self._errors.say("; ".join(part for part in (_counts(progress).plain, _rate(progress)) if part))


def table(progress: Progress) -> RenderableType:
    """Draw how far a batch is."""
    bar = Table.grid(expand=True)  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=max(progress.total, 1), completed=progress.ended, complete_style="green"))
    parts: list[RenderableType] = [bar, _counts(progress)]
    if rate := _rate(progress):
        parts.append(Text(rate))
    if progress.paused:
        parts.append(Text(one_line(f"paused: {progress.paused}", 300), "bold yellow"))
    if progress.causes:
        causes = Table.grid(padding=(0, 2, 0, 0))
        causes.add_column(justify="right")
        for cause, count in progress.causes.most_common(MAX_CAUSES):
            outcome = cause.partition(":")[0]
            causes.add_row(f"{count:,}", Text(one_line(cause, 200), STYLES.get(outcome, ""), no_wrap=True))
        if len(progress.causes) > MAX_CAUSES:
            causes.add_row("", f"and {len(progress.causes) - MAX_CAUSES:,} more causes")
        parts.append(causes)
    if progress.stragglers:
        parts.append(Text(f"much longer than the others: {', '.join(_stragglers(progress))}", "dim"))
    return Group(*parts)


def _counts(progress: Progress) -> Text:
    said = Text(f"{progress.ended:,} of {progress.total:,} have a result")
    for outcome, count in progress.outcomes.most_common():
        said.append(", ").append(f"{count:,} {outcome}", STYLES.get(outcome, ""))
    said.append(f"; {len(progress.running):,} running")
    if progress.cost_usd:
        said.append(f", {dollars(progress.cost_usd)}")
    return said.append(f", {progress.retries:,} retries") if progress.retries else said


def _rate(progress: Progress) -> str:
    left = progress.seconds_left
    if left is None or progress.ended - progress.at_start < SURE_AFTER or not progress.running:
        return ""
    end = datetime.now().astimezone() + timedelta(seconds=left)
    when = f"{end:%H:%M}" if left < 20 * 3600 else f"{end:%a %d %b %H:%M}"
    return f"{progress.per_hour:,.0f} an hour, ends about {when}, in {_duration(left)}"


def _stragglers(progress: Progress) -> Iterator[str]:
    for task_id in progress.stragglers[:MAX_STRAGGLERS]:
        yield f"{task_id} ({_duration(monotonic() - progress.running[task_id])})"
    if len(progress.stragglers) > MAX_STRAGGLERS:
        yield f"{len(progress.stragglers) - MAX_STRAGGLERS:,} more"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min"
        if minutes >= 10
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )
