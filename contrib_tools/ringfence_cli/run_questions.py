"""Who is asked about the calls of a command: the person at its terminal, and on the page of ``--view``."""

from __future__ import annotations

import dataclasses
import select
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from ringfence.policies.approval import Approval, ApprovalRequest
from ringfence_cli.terminal import MAX_REASON_CHARACTERS, WAIT_SECONDS, Terminal
from ringfence_tools.runs.asking import NOBODY, nobody, question_lines

if TYPE_CHECKING:
    from ringfence_cli.page_process import PageProcess

PAGE_HAS_ENDED = "nobody can be asked here, since there is no terminal and the page has ended: that counts as a no"
MAX_CHARACTERS = 256 * 1024
"""The most of a question that the page gets."""
MAX_OUTPUT_LINES = 200
AT_THE_TERMINAL, TOO_LATE = "it was answered at the terminal", "nobody answered in time, so it was a no"


class RunQuestions:
    """Asks wherever somebody can answer. The first answer counts.

    The same result of the same call is asked about once: after a no, a model that repeats the call gets the same no.
    """

    def __init__(self, terminal: Terminal | None) -> None:
        self.terminal = terminal
        self.page: PageProcess | None = None
        self._refused: dict[tuple[object, ...], Approval] = {}
        self._asked = 0

    def __call__(self, request: ApprovalRequest) -> Approval | None:
        until = monotonic() + request.timeout_seconds
        result = (request.tool, repr(request.params), (*request.changes, *request.ignored))
        if not request.before and (before := self._refused.get(result)) is not None:
            return dataclasses.replace(before, reason=f"the same result was asked about before, and {before.reason}")
        answer = self._ask(request, until)
        if answer is not None and not answer.allowed and answer.reason not in (NOBODY, PAGE_HAS_ENDED):
            self._refused[result] = answer
        return answer

    def _ask(self, request: ApprovalRequest, until: float) -> Approval | None:
        if self.page is None:
            return self.terminal.ask(request, until) if self.terminal is not None else nobody(request)
        self._asked += 1
        question = PageQuestion(self.page, self._asked, request)
        try:
            answer = self.terminal.ask(request, until, question) if self.terminal is not None else question.wait(until)
            question.end(TOO_LATE if answer is None else AT_THE_TERMINAL)
        finally:
            question.end("the run was interrupted")
        return answer


class PageQuestion:
    """A question on a page, until it is answered there or ended."""

    def __init__(self, page: PageProcess, number: int, request: ApprovalRequest) -> None:
        self._page = page
        self._number = number
        self._has_ended = False
        page.tell({"question": {**_shown(request), "number": number}})

    @property
    def is_open(self) -> bool:
        """Whether an answer can come."""
        return not self._has_ended and self._page.is_there

    def fileno(self) -> int:
        """What can be read when there may be an answer."""
        return self._page.fileno()

    def answer(self) -> Approval | None:
        """Return the answer if it is there."""
        for given in self._page.heard():
            if given.get("number") == self._number and not self._has_ended:
                self.end("")
                if given.get("allowed") is True:
                    return Approval(True, always=given.get("always") is True)
                return Approval.no(str(given.get("reason", "")).strip()[:MAX_REASON_CHARACTERS])
        return None

    def wait(self, until: float) -> Approval | None:
        """Return the answer. None: the time is over. A page that ends is a no."""
        while self.is_open:
            left = max(until - monotonic(), 0)
            if not select.select([self], [], [], min(left, WAIT_SECONDS))[0]:
                if left <= WAIT_SECONDS:
                    return None
                continue
            if (answer := self.answer()) is not None:
                return answer
        return Approval(False, PAGE_HAS_ENDED)

    def end(self, why: str) -> None:
        """Take it from the page, which says ``why``. Empty: its own answer counts."""
        if not self._has_ended:
            self._has_ended = True
            self._page.tell({"ended": self._number, "why": why})


def _shown(request: ApprovalRequest) -> Mapping[str, object]:
    lines, left, room = list[tuple[str, str]](), 0, MAX_CHARACTERS
    for text, style in question_lines(request, most_diff=None, most_output=MAX_OUTPUT_LINES, width=2**40):
        if room > 0:
            lines.append((text[:room], style))
        left += max(len(text) - max(room, 0), 0)
        room -= len(text)
    verb = "run it" if request.before else "keep it"
    seconds = request.timeout_seconds
    return {"lines": lines, "left": left, "always": request.always, "verb": verb, "seconds": seconds}
