"""``--ask``: the question at a terminal, and who answers where there is none."""

from __future__ import annotations

import dataclasses
import os
import select
import termios
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import monotonic
from typing import Protocol

import click
from rich.console import Console
from rich.text import Text

from ringfence.errors import PromptValidationError
from ringfence.prompt.approval import Approval, ApprovalPolicy, ApprovalRequest, Ask
from ringfence_cli.outputs import ErrorStream, diff_style
from ringfence_tools.policy_specs import refuse_path_of_host
from ringfence_tools.printable import line_counts, one_line, params_summary, plural, printable, unpatchable_changes

NOBODY = "nobody can be asked here, since there is no terminal: that counts as a no"
NOBODY_AT_START = "nobody can answer here, since there is no terminal: what --ask asks about is denied"
CHOICES = "yes, no, no REASON, always ({always}), all (show everything); a no after {seconds:.0f} s"
MAX_DIFF_LINES, MAX_OUTPUT_LINES, MAX_LINE_CHARACTERS = 400, 40, 400
MAX_REASON_CHARACTERS = 2_000
CHUNK_BYTES = 4096


class Screen(Protocol):
    """What shows a run on the terminal, and makes room for a question."""

    def paused(self) -> AbstractContextManager[None]: ...


def approval_of(specs: Sequence[str], seconds: float, ask: Ask, directory: Path) -> ApprovalPolicy:
    """Return the policy of the options. Raises click.BadParameter for a glob that matches nothing."""
    try:
        for spec in specs:
            refuse_path_of_host(spec, directory)
        return ApprovalPolicy(ask, specs, timeout_seconds=seconds)
    except (PromptValidationError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="'--ask'") from None


def can_ask() -> bool:
    """Whether somebody can answer at a terminal."""
    return os.isatty(0) and os.isatty(2)


def nobody(request: ApprovalRequest) -> Approval:
    """The answer where nobody can be asked."""
    return Approval(False, NOBODY)


class Terminal:
    """Asks on standard error, and reads the answer from standard input.

    The same result of the same call is asked about once: after a no, a model that repeats the call gets the same no.
    """

    def __init__(self, errors: ErrorStream) -> None:
        self.screen: Screen | None = None
        self._console = Console(file=errors, markup=False, emoji=False, highlight=False, soft_wrap=True)
        self._refused: dict[tuple[object, ...], Approval] = {}

    def __call__(self, request: ApprovalRequest) -> Approval | None:
        result = (request.tool, repr(request.params), tuple(request.changes))
        if request.changes and (before := self._refused.get(result)) is not None:
            return dataclasses.replace(before, reason=f"the same result was asked about before, and {before.reason}")
        with self.screen.paused() if self.screen is not None else nullcontext():
            answer = self._ask(request, monotonic() + request.timeout_seconds)
        if answer is not None and not answer.allowed:
            self._refused[result] = answer
        return answer

    def _ask(self, request: ApprovalRequest, until: float) -> Approval | None:
        with suppress(termios.error):
            termios.tcflush(0, termios.TCIFLUSH)  # what was typed before the question is no answer to it
        self._show(request, whole=False)
        while True:
            seconds = max(until - monotonic(), 0)
            self._say(f"  {CHOICES.format(always=request.always, seconds=seconds)}", style="dim")
            self._say("run it? " if request.before else "keep it? ", end="")
            line = _read_line(until)
            if line is None:
                self._say("\nnobody answered: no")
                return None
            word, _, rest = line.strip().partition(" ")
            match word.lower().rstrip(",.:;"):
                case "y" | "yes" if not rest:
                    return Approval(True)
                case "always" if not rest:
                    return Approval(True, always=True)
                case "n" | "no":
                    return Approval.no(rest.strip()[:MAX_REASON_CHARACTERS] or self._ask_why(until))
                case "all" if not rest:
                    self._show(request, whole=True)
                case _ if not line:
                    self._say("")
                    return Approval.no("they ended the input")
                case _:
                    self._say("answer with a word: yes, no, always or all")

    def _ask_why(self, until: float) -> str:
        self._say("why? The model reads it (Enter: no reason) ", end="")
        return (_read_line(until) or "").strip()[:MAX_REASON_CHARACTERS]

    def _show(self, request: ApprovalRequest, *, whole: bool) -> None:
        self._say(f"approval of {one_line(request.tool, 64)} ({one_line(request.call_id, 64)})", style="bold")
        for line in _params_lines(request):
            self._say(f"  {line}")
        if request.before:
            self._say(f"  it has not run yet: {printable(request.before)}", style="yellow")
            return
        if request.exit_code is not None:
            self._say(f"  exit code {request.exit_code}", style="" if request.exit_code == 0 else "red")
            self._block("output", request.output, MAX_OUTPUT_LINES, whole=whole, last=True)
        added, removed = line_counts(request.diff)
        self._say(f"  changes: {plural(len(request.changes), 'path')}, +{added} -{removed} lines")
        for line in unpatchable_changes(request.changes):
            self._say(f"  {printable(line)}")
        diff = request.diff.decode("utf-8", "surrogateescape")
        self._block("", diff, MAX_DIFF_LINES, whole=whole)

    def _block(self, title: str, text: str, most: int, *, whole: bool, last: bool = False) -> None:
        """Print lines behind a bar: nothing in them passes for a line of ours."""
        lines = printable(text).splitlines()
        cut = max(len(lines) - most, 0) if not whole else 0
        shown = (lines[cut:] if last else lines[: len(lines) - cut]) if cut else lines
        if title and lines:
            self._say(f"  {title}:" + (f" (the last {most} lines; all shows the others)" if cut else ""))
        for line in shown:
            is_long = len(line) > MAX_LINE_CHARACTERS and not whole
            text = f"{line[:MAX_LINE_CHARACTERS]} [and more]" if is_long else line
            self._console.print(Text("  | ").append(text, "" if title else diff_style(text)))
        if cut and not last:
            self._say(f"  {plural(cut, 'more line')}: all shows them")

    def _say(self, text: str, *, style: str = "", end: str = "\n") -> None:
        self._console.print(Text(text, style=style), end=end)
        self._console.file.flush()


def _params_lines(request: ApprovalRequest) -> Iterator[str]:
    """The params: all of them for a command and before a handler, else in short, since the diff has them."""
    if request.exit_code is None and not request.before:
        yield params_summary(request.params)
    elif dataclasses.is_dataclass(request.params):
        for field in dataclasses.fields(request.params):
            value: object = getattr(request.params, field.name)
            if value:
                text = value if isinstance(value, str) else repr(value)
                yield f"{field.name}: " + "\n  | ".join(printable(text).splitlines())


def _read_line(until: float) -> str | None:
    """Read a line. Empty: the input has ended. None: the time is over."""
    line = b""
    while not line.endswith(b"\n"):
        if not select.select([0], [], [], max(until - monotonic(), 0))[0]:
            return None
        chunk = os.read(0, CHUNK_BYTES)
        if not chunk:
            break
        line += chunk
    return line.decode(errors="replace")
