"""The question of a run that waits, and its answer from the page."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Condition
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringfence_view.guarded import Live

TAKE_SECONDS = 10.0
"""How long the run may take to say whether an answer counts."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question. Each of its lines has a style."""

    number: int
    lines: Sequence[tuple[str, str]]
    left: int
    verb: str
    always: str
    until: datetime


class Questions:
    """The questions of a run, of which one waits at most. Each is answered once."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor`` is where the answers are written, a line of JSON each."""
        self.waiting: Question | None = None
        self._descriptor = descriptor
        self._ended: dict[int, str] = {}
        self._given: set[int] = set()
        self._changed = Condition()

    def take(self, line: bytes) -> None:
        """Take a line of the run: a question, or the end of one."""
        told: Mapping[str, Any] = json.loads(line)
        with self._changed:
            if (one := told.get("question")) is not None:
                until = datetime.now(UTC).astimezone() + timedelta(seconds=one["seconds"])
                lines = [(str(text), str(style)) for text, style in one["lines"]]
                self.waiting = Question(one["number"], lines, one["left"], one["verb"], one["always"], until)
            else:
                self.waiting = None
                self._ended[told["ended"]] = told["why"]
            self._changed.notify_all()

    def answer(self, given: Mapping[str, str]) -> str:
        """Answer a question, and return what came of it.

        Raises ValueError if there is no such answer, or the question does not wait any more.
        """
        number, choice = int(given.get("number", "")), given.get("choice", "")
        if choice not in ("yes", "no", "always"):
            raise ValueError("the answer is yes, no or always")
        with self._changed:
            if number in self._given or self.waiting is None or self.waiting.number != number:
                raise ValueError(self._ended.get(number) or "this question was answered already")
            self._given.add(number)
            line = {"number": number, "allowed": choice != "no", "always": choice == "always"}
            os.write(self._descriptor, json.dumps({**line, "reason": given.get("reason", "")}).encode() + b"\n")
            if not self._changed.wait_for(lambda: number in self._ended, TAKE_SECONDS):
                raise ValueError("the run has not taken the answer yet")
            if self._ended[number]:
                raise ValueError(self._ended[number])
        return f"answered: {choice}"


@dataclass(frozen=True, slots=True)
class WithQuestions:
    """What a page follows, and the question that waits."""

    live: Live
    questions: Questions

    @property
    def version(self) -> str:
        waiting = self.questions.waiting
        return f"{self.live.version} {waiting.number if waiting is not None else ''}"

    def refresh(self) -> bool:
        return self.live.refresh()
