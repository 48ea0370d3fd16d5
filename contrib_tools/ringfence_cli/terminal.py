"""Questions about calls to the person at the terminal of a run."""

from __future__ import annotations

import os
import select
import termios
from contextlib import AbstractContextManager, nullcontext, suppress
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.text import Text

from ringfence.policies.approval import Approval, ApprovalRequest
from ringfence_tools.runs.asking import question_lines
from ringfence_tools.runs.outputs import MAX_DIFF_LINES, ErrorStream

CHOICES = "yes, no, no REASON, always, all ({seconds:.0f} s, then no) "
MAX_OUTPUT_LINES = 40
MAX_REASON_CHARACTERS = 2_000
CHUNK_BYTES = 4096
WAIT_SECONDS = 0.5
"""The longest wait for input: a Ctrl-C that comes in the instant before it begins does not end it."""


class Screen(Protocol):
    """What shows a run on the terminal, and makes room for a question."""

    def paused(self) -> AbstractContextManager[None]: ...


class Elsewhere(Protocol):
    """Where the same question can be answered, too."""

    @property
    def is_open(self) -> bool: ...
    def fileno(self) -> int: ...
    def answer(self) -> Approval | None: ...
    def end(self, why: str) -> None: ...


class _AnsweredElsewhereError(Exception):
    def __init__(self, answer: Approval) -> None:
        self.answer = answer


def has_person() -> bool:
    """Whether somebody can answer at a terminal."""
    return os.isatty(0) and os.isatty(2)


class Terminal:
    """Asks on standard error, and reads the answer from standard input."""

    def __init__(self, errors: ErrorStream) -> None:
        self.screen: Screen | None = None
        self._console = Console(file=errors, markup=False, emoji=False, highlight=False)

    def ask(self, request: ApprovalRequest, until: float, elsewhere: Elsewhere | None = None) -> Approval | None:
        """Return the answer, wherever it comes first. None: nobody has answered in time."""
        with self.screen.paused() if self.screen is not None else nullcontext():
            try:
                return self._ask(request, until, elsewhere)
            except _AnsweredElsewhereError as error:
                self._say(f"\nanswered on the page: {'yes' if error.answer.allowed else 'no'}")
                return error.answer

    def _ask(self, request: ApprovalRequest, until: float, elsewhere: Elsewhere | None) -> Approval | None:
        with suppress(termios.error):
            termios.tcflush(0, termios.TCIFLUSH)  # what was typed before the question is no answer to it
        self._show(request, MAX_DIFF_LINES, MAX_OUTPUT_LINES)
        while True:
            seconds = max(until - monotonic(), 0)
            self._say(f"  always covers {request.always}; all shows everything", style="dim")
            verb = "run it" if request.before else "keep it"
            self._say(f"{verb}? {CHOICES.format(seconds=seconds)}", end="")
            line = _read_line(until, elsewhere)
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
                    if elsewhere is not None:
                        elsewhere.end("it was answered at the terminal")  # a yes that comes during "why?" is too late
                    return Approval.no(rest.strip()[:MAX_REASON_CHARACTERS] or self._ask_why(until))
                case "all" if not rest:
                    self._show(request, None, None)
                case _ if not line:
                    self._say("")
                    return Approval.no("they ended the input")
                case _:
                    self._say("answer with a word: yes, no, always or all")

    def _ask_why(self, until: float) -> str:
        self._say("why? The model reads it (Enter: no reason) ", end="")
        return (_read_line(until) or "").strip()[:MAX_REASON_CHARACTERS]

    def _show(self, request: ApprovalRequest, most_diff: int | None, most_output: int | None) -> None:
        width = self._console.width
        for text, style in question_lines(request, most_diff=most_diff, most_output=most_output, width=width):
            self._say(text, style=style)

    def _say(self, text: str, *, style: str = "", end: str = "\n") -> None:
        self._console.print(Text(text, style=style), end=end)
        self._console.file.flush()


def _read_line(until: float, elsewhere: Elsewhere | None = None) -> str | None:
    """Read a line. Empty: the input has ended. None: the time is over."""
    line = b""
    while not line.endswith(b"\n"):
        others = [elsewhere] if elsewhere is not None and elsewhere.is_open else []
        left = max(until - monotonic(), 0)
        ready = select.select([0, *others], [], [], min(left, WAIT_SECONDS))[0]
        if not ready and left <= WAIT_SECONDS:
            return None
        if others and others[0] in ready and (answer := others[0].answer()) is not None:
            raise _AnsweredElsewhereError(answer)
        if 0 not in ready:
            continue
        chunk = os.read(0, CHUNK_BYTES)
        if not chunk:
            break
        line += chunk
    return line.decode(errors="replace")
