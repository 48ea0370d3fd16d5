"""Words for the model that come along with a tool's answer."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from ringfence.adapters import ScriptedAdapter
from ringfence.prompt import (
    Feedback,
    FeedbackContext,
    FeedbackProviderConfig,
    FeedbackTrigger,
    MarkdownSection,
    Prompt,
    PromptValidationError,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.prompt.feedback import Feedbacks
from ringfence.runtime import Session


class Says:
    def __init__(self, name: str, text: str = "", ready: Any = True, error: Exception | None = None) -> None:
        self.name, self.text, self.ready, self.error = name, text or name, ready, error

    def should_run(self, *, context: FeedbackContext) -> bool:
        return self.ready if isinstance(self.ready, bool) else self.ready(context)

    def provide(self, *, context: FeedbackContext) -> str:
        if self.error is not None:
            raise self.error
        return f"{self.text} {context.call_index}"


def every(calls: int, provider: Says) -> FeedbackProviderConfig:
    return FeedbackProviderConfig(provider, FeedbackTrigger(every_n_calls=calls))


numbers = count(1)


def ping(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult(f"pong {next(numbers)}")  # an equal answer would be counted


def answers(calls: int, *providers: FeedbackProviderConfig, session: Session | None = None) -> list[str]:
    tool = Tool[None, None](name="ping", description="Ping.", handler=ping)
    section = MarkdownSection(title="T", template="x", tools=[tool])
    prompt = Prompt(ns="n", key="k", sections=[section], feedback_providers=providers)
    adapter = ScriptedAdapter([{"tool_calls": [{"name": "ping"}] * calls}, {"text": "done"}])
    adapter.evaluate(prompt, session=session or Session())
    return [re.sub("^pong [0-9]+", "pong", message["content"]) for message in adapter.requests[-1]["messages"][2:]]


def test_a_provider_speaks_every_so_many_calls_and_is_kept_in_the_session() -> None:
    session = Session()
    assert answers(5, every(2, Says("a")), session=session) == ["pong", "pong\n\na 2", "pong", "pong\n\na 4", "pong"]
    kept = session[Feedback].all()
    assert [(one.provider, one.call_index, one.prompt_name) for one in kept] == [("a", 2, "n:k"), ("a", 4, "n:k")]


def test_the_first_that_is_due_and_has_something_to_say_speaks_alone() -> None:
    said = answers(3, every(1, Says("a", ready=lambda context: context.call_index == 2)), every(1, Says("b")))
    assert said == ["pong\n\nb 1", "pong\n\na 2", "pong\n\nb 3"]


def test_a_provider_that_raises_stops_nobody() -> None:
    broken = every(1, Says("a", error=LookupError("x")))
    asking = every(1, Says("c", ready=lambda context: 1 // 0))
    assert answers(1, broken, asking, every(1, Says("b"))) == ["pong\n\nb 1"]


def test_a_provider_speaks_after_so_many_seconds() -> None:
    times = [datetime(2026, 1, 1, tzinfo=UTC)]
    config = FeedbackProviderConfig(Says("a"), FeedbackTrigger(every_n_seconds=10))
    feedbacks = Feedbacks([config], "n:k", clock=lambda: times[0])
    prompt: Any = Prompt(ns="n", key="k")
    said: list[str] = []
    for index, passed in enumerate((0, 9, 1, 9, 1), 1):
        times[0] += timedelta(seconds=passed)
        said.append(feedbacks.after(FeedbackContext(prompt, Session(), index)))
    assert said == ["", "", "a 3", "", "a 5"]


@pytest.mark.parametrize("trigger", [{}, {"every_n_calls": 0}, {"every_n_seconds": -1.0}])
def test_a_trigger_that_never_or_always_fires_is_refused(trigger: dict[str, Any]) -> None:
    with pytest.raises(PromptValidationError):
        FeedbackTrigger(**trigger)


def test_two_providers_of_one_name_count_for_themselves() -> None:
    said = answers(4, every(3, Says("a", "third")), every(2, Says("a", "second")))
    assert said == ["pong", "pong\n\nsecond 2", "pong\n\nthird 3", "pong\n\nsecond 4"]
