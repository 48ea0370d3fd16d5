"""Who watches a run, and how they hear of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol, get_args

from ringfence import serde
from ringfence.adapters.model import ModelRetry, ModelText, ModelTurn
from ringfence.runtime.events import ToolInvoked
from ringfence.runtime.limits import TokenUsage
from ringfence.runtime.receipts import Outcome, Receipt
from ringfence.runtime.session import Session
from ringfence_cli.printable import plural
from ringfence_cli.signals import Signals
from ringfence_tools.planning import Plan

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


class Watcher(Protocol):
    """Told of every turn and every tool call as they happen. What it raises fails the task, when that has ended."""

    def text(self, event: ModelText) -> None:
        """A piece of a turn that the model still writes; `turn` has the whole of it."""

    def retry(self, event: ModelRetry) -> None: ...

    def turn(self, event: ModelTurn) -> None: ...

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        """``plan`` is the one after the call, and ``answer`` what its tool answered besides the receipt's message. Told
        again of a call that one around it has taken back."""


@dataclass(slots=True)
class RunStats:
    """What a run has come to so far."""

    started: float = field(default_factory=monotonic)
    turns: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter[Outcome])
    usage: TokenUsage = TokenUsage()
    parts: int = 1
    """A run that was resumed has one more each time."""

    def to_json(self) -> dict[str, object]:
        """For `of_json`, which goes on from there."""
        usage = serde.dump(self.usage)
        outcomes = dict(self.outcomes)
        return {"parts": self.parts, "seconds": self.seconds, "turns": self.turns, "outcomes": outcomes, "usage": usage}

    @staticmethod
    def of_json(record: Mapping[str, Any]) -> RunStats:
        """Raises KeyError, TypeError and ValueError for what is none."""
        usage = serde.parse(TokenUsage, record["usage"])
        started = monotonic() - float(record["seconds"])
        return RunStats(started, int(record["turns"]), Counter(record["outcomes"]), usage, int(record["parts"]))

    @property
    def seconds(self) -> float:
        return monotonic() - self.started

    @property
    def calls(self) -> int:
        return self.outcomes.total()

    @property
    def said(self) -> str:
        """In words, without what there is none of."""
        counts = ((self.outcomes[outcome], outcome.replace("_", " ")) for outcome in OUTCOMES)
        ended = ", ".join(f"{count} {word}" for count, word in counts if count)
        tokens = self.usage.total_tokens
        return (
            f"{plural(self.turns, 'turn')}, {plural(self.calls, 'tool call')}"
            + (f" ({ended})" if ended else "")
            + (f", {tokens:,} tokens" if tokens is not None else "")
            + (f", in {self.parts} parts" if self.parts > 1 else "")
        )


class RunObserver:
    """Tells watchers of the events of a session, each once; nothing interrupts them."""

    def __init__(self, session: Session, signals: Signals, tally: RunStats, watchers: Sequence[Watcher]) -> None:
        self.problems: list[Exception] = []
        """What kept watchers from writing down what they heard."""
        self._session = session
        self._signals = signals
        self._tally = tally
        self._watchers = watchers
        self._told: dict[str, Outcome] = {}
        session.dispatcher.subscribe(ModelText, self._text)
        session.dispatcher.subscribe(ModelRetry, self._retry)
        session.dispatcher.subscribe(ModelTurn, self._turn)
        session.dispatcher.subscribe(Receipt, self._call)

    def catch_up(self) -> None:
        """Tell of the calls that an interrupt kept from being told when they ended."""
        for receipt in self._session[Receipt].all():
            self._call(receipt)

    def _text(self, event: ModelText) -> None:
        for watcher in self._watchers:
            self._writing(lambda watcher=watcher: watcher.text(event))

    def _retry(self, event: ModelRetry) -> None:
        for watcher in self._watchers:
            self._writing(lambda watcher=watcher: watcher.retry(event))

    def _turn(self, event: ModelTurn) -> None:
        with self._signals.held():
            self._tally.turns += 1
            if event.turn.usage is not None:
                self._tally.usage += event.turn.usage
            for watcher in self._watchers:
                self._writing(lambda watcher=watcher: watcher.turn(event))

    def _call(self, receipt: Receipt) -> None:
        with self._signals.held():
            before = self._told.get(receipt.receipt_id)
            if before is not None:
                if receipt.rolled_back_by is None or receipt.outcome == before:
                    return
                self._tally.outcomes[before] -= 1
            self._told[receipt.receipt_id] = receipt.outcome
            self._tally.outcomes[receipt.outcome] += 1
            plan, answer = self._session[Plan].latest(), self._answer_of(receipt)
            for watcher in self._watchers:
                self._writing(lambda watcher=watcher: watcher.call(receipt, plan, answer))

    def _answer_of(self, receipt: Receipt) -> str:
        last = self._session[ToolInvoked].latest()
        if last is not None and last.call_id == receipt.call_id:
            return last.rendered_output
        found = self._session[ToolInvoked].where(lambda invoked: invoked.call_id == receipt.call_id)
        return found[-1].rendered_output if found else ""

    def _writing(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # whatever it is, the other watchers are told
            self.problems.append(error)
