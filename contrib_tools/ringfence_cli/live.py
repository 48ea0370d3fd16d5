"""The live view of a run: turns, tool calls with their outcomes, the plan, the time."""

from __future__ import annotations

import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Timer
from time import monotonic

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ringfence.adapters.model import ModelRetry, ModelText, ModelTurn
from ringfence.receipts import Outcome, Receipt
from ringfence.session.events import ToolCallStarted, ToolOutput
from ringfence_tools.planning import Plan, PlanStep
from ringfence_tools.printable import MAX_REASON_CHARACTERS, one_line, outcome_words, params_summary, printable
from ringfence_tools.runs.agent_run import RunStats, RunWatcher
from ringfence_tools.runs.outputs import ErrorStream

MAX_LINES, MAX_CHARACTERS = 20, 2_000
"""The most lines of a turn's text."""
MAX_ANSWER_LINES, MAX_ANSWER_CHARACTERS = 200, 20_000
"""The most lines of the final turn's text."""
MAX_PLAN_STEPS = 12
"""The most steps of the live plan."""
MAX_WRITING_LINES, MAX_WRITING_CHARACTERS = 3, 1_000
"""The most characters of a turn that the model still writes."""
MAX_OUTPUT_LINES, MAX_OUTPUT_CHARACTERS = 5, 4_000
"""The most that is shown of the output of a running command: its end."""
SILENT_SECONDS = 1.0
"""Without a terminal, a call that takes longer has a line of its own when it has run for this time."""
TURN_COLUMNS = len("turn 100  ")
MIN_HEAD_COLUMNS = 28
"""The columns that a call needs before its outcome, if both are on one line."""

STYLES: dict[Outcome, str] = {
    "committed": "green",
    "denied": "yellow",
    "rejected": "yellow",
    "failed": "red",
    "interrupted": "red",
    "rolled_back": "red",
    "doubtful": "bold red",
}
BOXES = {"pending": "[ ]", "in_progress": "[>]", "done": "[x]"}


@dataclass(slots=True)
class _RunningCall:
    """A call that has not ended. ``timer`` prints its line where there is no terminal."""

    head: Text
    began: float
    output: str = ""
    timer: Timer | None = None


class View(RunWatcher):
    """A watcher that shows what happens on standard error: on a terminal with a live plan below the lines, elsewhere
    as plain lines. A context manager around the run."""

    def __init__(self, stream: ErrorStream, stats: RunStats, directory: Path) -> None:
        """``directory`` is where the run works."""
        self._stats = stats
        self._directory = directory
        self._plan: Plan | None = None
        self._running = False
        self._writing, self._writes = "", (0, 0)
        self._calls: dict[str, _RunningCall] = {}
        terminal = stream.isatty()
        self._console = Console(file=stream, markup=False, emoji=False, highlight=False, soft_wrap=not terminal)
        self._live: Live | None = None
        if terminal and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = self._new_live()

    def _new_live(self) -> Live:
        # The two streams stay as they are: nothing else writes while this runs.
        return Live(console=self._console, get_renderable=self._region, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> View:
        self._running = True
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        for running in self._calls.values():
            if running.timer is not None:
                running.timer.cancel()
        self._calls.clear()
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """A block in which the terminal is somebody else's."""
        if self._live is None:
            yield
            return
        self._live.transient = True  # nothing of what was live is left above
        self._live.stop()
        try:
            yield
        finally:
            self._live = self._new_live()  # the old one would begin by deleting as many lines as it had
            self._live.start()

    def text(self, event: ModelText) -> None:
        """Shown below the lines while it comes; where there is no such place, the whole turn says it soon enough."""
        writes = event.number, event.attempt
        kept = self._writing if writes == self._writes else ""
        self._writing, self._writes = (kept + event.text)[-MAX_WRITING_CHARACTERS:], writes

    def retry(self, event: ModelRetry) -> None:
        reason = one_line(event.reason, MAX_REASON_CHARACTERS)
        when = f" in {event.seconds:.0f} s" if event.seconds else ""
        self._console.print(Text(f"  {reason}; attempt {event.attempt}{when}", style="yellow"))

    def turn(self, event: ModelTurn) -> None:
        self._writing = ""
        text = _bounded(event.turn.text.strip(), self._width, final=not event.turn.tool_calls)
        self._console.print(
            Text(f"turn {event.number}", style="bold").append(f"  {text}" if text else "", style="not bold")
        )

    @property
    def _width(self) -> int | None:
        """The columns of the terminal. None without one: lines are then as long as they are."""
        return self._console.width if self._live is not None else None

    def started(self, event: ToolCallStarted) -> None:
        running = self._calls[event.call_id] = _RunningCall(
            _head(event.name, event.arguments, self._width), monotonic()
        )
        if self._live is None:
            running.timer = Timer(SILENT_SECONDS, lambda: self._console.print(running.head.copy().append(" ...")))
            running.timer.daemon = True
            running.timer.start()

    def output(self, event: ToolOutput) -> None:
        if (running := self._calls.get(event.call_id)) is not None:
            running.output = (running.output + event.text)[-MAX_OUTPUT_CHARACTERS:]

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        running = self._calls.pop(receipt.call_id, None)
        if running is not None and running.timer is not None:
            running.timer.cancel()
        self._console.print(call_text(receipt, self._directory, self._width))
        before, self._plan = self._plan, plan
        if self._live is not None or plan is None:
            return
        # There is no place where the plan stands all the time: print what is new in it.
        is_new = before is None or before.objective != plan.objective
        known = () if before is None or is_new else before.steps
        if is_new:
            self._console.print(Text(f"  plan: {one_line(plan.objective, MAX_REASON_CHARACTERS)}"))
        for step in plan.steps:
            if step not in known:
                self._console.print(_step(step))

    def _region(self) -> RenderableType:
        """Return the lower part of the terminal. A thread of rich calls this several times a second."""
        written = printable(self._writing).strip().split("\n")[-MAX_WRITING_LINES:]
        parts = [Text(f"  {line}", style="italic dim") for line in written if line.strip()]
        for running in [*self._calls.values()]:
            head, time = running.head.copy(), f"  {clock(monotonic() - running.began)}"
            head.truncate(self._console.width - len(time), overflow="ellipsis")
            parts.append(head.append(time, style="not bold dim"))
            lines = Text.from_ansi(running.output.replace("\r", "\n")).plain.rstrip().split("\n")
            parts += [Text(f"    {printable(line)}", style="dim") for line in lines[-MAX_OUTPUT_LINES:] if line.strip()]
        if (plan := self._plan) is not None:
            parts.append(Text(f"plan: {one_line(plan.objective, MAX_REASON_CHARACTERS)}", style="bold"))
            open_at = next((n for n, step in enumerate(plan.steps) if step.status != "done"), len(plan.steps))
            first = max(0, min(open_at - 3, len(plan.steps) - MAX_PLAN_STEPS))
            parts += [_step(step) for step in plan.steps[first : first + MAX_PLAN_STEPS]]
            if len(plan.steps) > MAX_PLAN_STEPS:
                parts.append(Text(f"  ({len(plan.steps)} steps in all)", style="dim"))
        if self._running:
            parts.append(Text(f"{clock(self._stats.seconds)}  {self._stats.describe()}", style="dim"))
        for part in parts:
            part.no_wrap, part.overflow = True, "ellipsis"
        return Group(*parts)


def call_text(receipt: Receipt, directory: Path, width: int | None = None) -> Text:
    """Return a tool call and its outcome on one line. The call was on the files of `directory`.

    If it is longer than ``width``, the call is cut, and a long outcome has lines of its own.
    """
    head, outcome = _head(receipt.tool, receipt.params, width), outcome_words(receipt, directory)
    between = " -> "
    if width is not None and head.cell_len + len(between) + cell_len(outcome) > width:
        room = width - len(between) - cell_len(outcome)
        if room < min(head.cell_len, MIN_HEAD_COLUMNS):
            room, between = width, "\n    -> "
            outcome = "\n       ".join(textwrap.wrap(outcome, width - 7))
        head.truncate(room, overflow="ellipsis")
    return head.append(between).append(outcome, style=f"not bold {STYLES[receipt.outcome]}")


def _head(tool: str, params: object, width: int | None) -> Text:
    text = Text(f"  {one_line(tool, 64)}", style="bold")
    said = params_summary(params, (width or 0) - text.cell_len)
    return text.append(f" {said}" if said else "", style="not bold")


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _step(step: PlanStep) -> Text:
    style = {"done": "green", "in_progress": "bold"}.get(step.status, "")
    return Text(f"  {BOXES[step.status]} {step.step_id}. {one_line(step.title, MAX_REASON_CHARACTERS)}", style=style)


def _bounded(text: str, width: int | None, *, final: bool) -> str:
    """Return a turn's text, cut to a readable length and wrapped at ``width``."""
    lines, characters = (MAX_ANSWER_LINES, MAX_ANSWER_CHARACTERS) if final else (MAX_LINES, MAX_CHARACTERS)
    cut = "\n".join(text[:characters].split("\n")[:lines])
    rest = len(text) - len(cut)
    shown = printable(cut)
    if width is not None:
        room = width - TURN_COLUMNS
        lines = (textwrap.wrap(line, room, replace_whitespace=False) or [""] for line in shown.split("\n"))
        shown = "\n".join(chain.from_iterable(lines))
    return shown.replace("\n", "\n  ") + (f" ... ({rest:,} more characters)" if rest > 0 else "")
