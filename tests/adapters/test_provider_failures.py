"""Providers that fail, over real HTTP and with the official SDKs: what is repeated, what ends the evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any

import pytest
from provider_server import Broken, Failure, ProviderServer, Reply, Slow
from provider_shapes import Note, called

from ringfence import DeadlineExceededError
from ringfence.adapters import (
    AnthropicAdapter,
    ModelRetry,
    ModelText,
    OpenAIAdapter,
    PromptEvaluationError,
    ThrottleError,
    ThrottlePolicy,
)
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Budget, Deadline, Session, ToolInvoked

FOREVER = 3600
"""Seconds that no test waits for: the run would be ended."""
DONE = {"text": "All of it is done."}
WIRES = ("responses", "chat", "messages")
WAYS = [(wire, stream) for wire in WIRES for stream in (False, True)]
every_way = pytest.mark.parametrize(("wire", "stream"), WAYS)
every_wire = pytest.mark.parametrize("wire", WIRES)


def note(params: Note, *, context: ToolContext) -> ToolResult[Note]:
    return ToolResult.ok(params, "noted")


def prompt() -> Prompt[None]:
    tool = Tool[Note, Note](name="note", description="Write a note.", handler=note)
    return Prompt(
        PromptTemplate(ns="tests", key="fail", sections=[MarkdownSection(title="T", template="T", tools=[tool])])
    )


class Trial:
    """One evaluation against a server with a script; waits are written down and not waited."""

    def __init__(self, wire: str, stream: bool, replies: Sequence[Reply], **limits: Any) -> None:
        self.waits: list[float] = []
        policy = ThrottlePolicy(sleep=self.waits.append, jitter=lambda low, high: high, **limits)
        self.server = ProviderServer(replies)
        self.session = Session()
        self.texts: list[ModelText] = []
        self.session.dispatcher.subscribe(ModelText, self.texts.append)
        self.retries: list[ModelRetry] = []
        self.session.dispatcher.subscribe(ModelRetry, self.retries.append)
        make: Callable[..., AbstractContextManager[Any]] = {
            "responses": partial(OpenAIAdapter, base_url=self.server.openai_url),
            "chat": partial(OpenAIAdapter, base_url=self.server.openai_url, api="chat"),
            "messages": partial(AnthropicAdapter, base_url=self.server.url),
        }[wire]
        self.adapter = make("m", api_key="secret", stream=stream, throttle=policy)

    def run(self, **options: Any) -> str | None:
        with self.server, self.adapter as adapter:
            return adapter.evaluate(prompt(), session=self.session, **options).text

    def error(self, **options: Any) -> PromptEvaluationError:
        with pytest.raises(PromptEvaluationError) as caught:
            self.run(**options)
        assert "secret" not in str(caught.value)
        return caught.value


def failure(status: int, message: str = "no", kind: str = "some_error", **headers: str) -> Failure:
    return Failure(status, {"type": "error", "error": {"message": message, "type": kind}}, headers)


@every_way
def test_what_passes_is_repeated_once_and_the_sdk_repeats_nothing(wire: str, stream: bool) -> None:
    trial = Trial(wire, stream, [failure(408), called("a"), failure(429), failure(500), failure(529), DONE])
    assert trial.run() == DONE["text"]
    assert (len(trial.server.asked), trial.waits) == (6, [0.5, 0.5, 1.0, 2.0])
    assert len(trial.session[ToolInvoked].all()) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3),
        ({"Retry-After": "2.5"}, 2.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "0"}, 0.5),
        ({"retry-after": "-7"}, 0.5),
        ({"retry-after": "soon"}, 0.5),
        ({"retry-after": "nan"}, 0.5),
    ],
)
def test_a_wait_is_as_long_as_the_provider_asks(headers: dict[str, str], seconds: float) -> None:
    trial = Trial("messages", False, [failure(429, **headers), DONE])
    trial.run()
    assert trial.waits == [seconds]
    [retry] = trial.retries
    assert (retry.number, retry.attempt, retry.seconds) == (1, 2, seconds)
    assert "rate limit" in retry.reason


def test_a_provider_may_name_the_time_when_to_come_back() -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    trial = Trial("chat", False, [failure(503, **{"retry-after": when}), DONE])
    trial.run()
    assert 15 < trial.waits[0] <= 20


@every_wire
def test_in_the_end_it_is_given_up(wire: str) -> None:
    trial = Trial(wire, True, [failure(429, "slow down")] * 9, max_attempts=3)
    error = trial.error()
    assert isinstance(error, ThrottleError)
    assert (error.kind, error.attempts, error.retry_safe, error.phase) == ("rate_limit", 3, False, "request")
    assert trial.waits == [0.5, 1.0]
    assert "slow down" in str(error)


def test_a_wait_that_is_too_long_or_beyond_the_deadline_is_not_begun() -> None:
    trial = Trial("chat", False, [failure(429, **{"retry-after": "3600"}), DONE])
    error = trial.error()
    assert isinstance(error, ThrottleError)
    assert (error.retry_after, trial.waits) == (3600, [])
    trial = Trial("messages", False, [failure(429, **{"retry-after": "20"}), DONE])
    assert "after the deadline" in str(trial.error(deadline=Deadline.after(10)))
    assert trial.waits == []


@every_wire
@pytest.mark.parametrize(("status", "kind"), [(429, "insufficient_quota"), (402, "billing_error")])
def test_a_quota_that_is_used_up_is_not_asked_again(wire: str, status: int, kind: str) -> None:
    trial = Trial(wire, False, [failure(status, kind=kind), DONE])
    error = trial.error()
    assert isinstance(error, ThrottleError)
    assert (error.kind, trial.waits, len(trial.server.asked)) == ("quota_exhausted", [], 1)


@every_wire
@pytest.mark.parametrize(("status", "hint"), [(400, "too long"), (401, "check the key"), (404, "the model's name")])
def test_what_does_not_pass_ends_it_and_says_what_to_do(wire: str, status: int, hint: str) -> None:
    trial = Trial(wire, True, [failure(status, "too long"), DONE])
    error = trial.error()
    assert not isinstance(error, ThrottleError)
    assert (error.phase, len(trial.server.asked)) == ("request", 1)
    assert hint in str(error)


NONSENSE = [
    Failure(200, b'{"id": "x", "cho'),
    Failure(200, b"null"),
    Failure(200, {"message": "hello"}),
    Failure(200, {"choices": [], "content": None, "output": 3, "status": "completed"}),
    Failure(200, b"<html>Sign in</html>", content_type="text/html"),
    Failure(200, b"", content_type="text/plain"),
    Failure(200, b"data: {oh\n\n", content_type="text/event-stream"),
    Failure(200, b"event: message_start\ndata: {oh\n\n", content_type="text/event-stream"),
    Failure(200, b"data: 3\n\ndata: [DONE]\n\n", content_type="text/event-stream"),
]


@every_way
def test_an_answer_in_no_known_shape_ends_it(wire: str, stream: bool) -> None:
    for reply in NONSENSE:
        assert Trial(wire, stream, [reply] * 2, max_attempts=2).error().phase in ("response", "request")


@every_wire
@pytest.mark.parametrize("politely", [False, True])
def test_a_stream_that_breaks_off_is_no_answer_and_is_asked_for_again(wire: str, politely: bool) -> None:
    for after in range(5):
        trial = Trial(wire, True, [Broken(called("a", "b"), after, politely), Broken(DONE, after, politely), DONE])
        assert trial.run() == DONE["text"]
        assert (len(trial.server.asked), trial.waits) == (3, [0.5, 1.0])
        assert trial.session[ToolInvoked].all() == ()


@every_way
def test_a_body_that_breaks_off_is_asked_for_again(wire: str, stream: bool) -> None:
    trial = Trial(wire, stream, [Broken(DONE), DONE])
    trial.server.streams = False
    assert trial.run() == DONE["text"]
    assert trial.waits == [0.5]


@every_wire
def test_text_is_published_as_it_comes_and_says_which_attempt_it_is_of(wire: str) -> None:
    long = {"text": DONE["text"] * 9}
    trial = Trial(wire, True, [Broken(long, after=10), long])
    trial.run()
    text_of = {attempt: "".join(text.text for text in trial.texts if text.attempt == attempt) for attempt in (1, 2)}
    assert text_of[2] == long["text"]
    assert 0 < len(text_of[1]) < len(long["text"])
    assert {(text.prompt_name, text.number) for text in trial.texts} == {("tests:fail", 1)}
    assert len(trial.texts) > 3


ERROR_EVENTS = {
    "responses": b'event: error\ndata: {"type": "error", "code": "server_error", "message": "busy"}\n\n',
    "chat": b'data: {"error": {"message": "busy", "type": "server_error", "code": "server_error"}}\n\n',
    "messages": b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}\n\n',
}


@every_wire
def test_an_error_in_the_middle_of_a_stream_is_one(wire: str) -> None:
    broken = Broken(DONE, after=3, politely=True, then=ERROR_EVENTS[wire])
    assert Trial(wire, True, [broken, DONE]).run() == DONE["text"]
    error = Trial(wire, True, [broken] * 2, max_attempts=2).error()
    assert isinstance(error, ThrottleError)
    assert (error.kind, "busy" in str(error)) == ("overloaded", True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_says_it_failed_has_failed(stream: bool) -> None:
    body = {"id": "r", "status": "failed", "output": [], "error": {"code": "invalid_prompt", "message": "bad words"}}
    told = {"type": "response.failed", "sequence_number": 0, "response": body}
    event = f"event: response.failed\ndata: {json.dumps(told)}\n\n".encode()
    reply = Failure(200, event, content_type="text/event-stream") if stream else Failure(200, body)
    assert "bad words" in str(Trial("responses", stream, [reply], max_attempts=1).error())


@every_way
def test_silence_lasts_no_longer_than_the_deadline(wire: str, stream: bool) -> None:
    error = Trial(wire, stream, [Slow(DONE, before=FOREVER)]).error(deadline=Deadline.after(1))
    assert isinstance(error.__cause__, DeadlineExceededError)


@every_wire
def test_a_trickle_lasts_no_longer_than_the_deadline_of_a_budget(wire: str) -> None:
    trial = Trial(wire, True, [Slow({"text": "la " * FOREVER}, between=0.3)])
    error = trial.error(budget=Budget(deadline=Deadline.after(1)))
    assert isinstance(error.__cause__, DeadlineExceededError)


def test_a_server_that_is_not_there_is_asked_a_few_times() -> None:
    trial = Trial("responses", True, [DONE], max_attempts=2)
    with trial.server:
        pass
    with pytest.raises(ThrottleError) as caught, trial.adapter as adapter:
        adapter.evaluate(prompt(), session=Session())
    assert (caught.value.kind, trial.waits) == ("connection", [0.5])


@pytest.mark.parametrize(
    "limits", [{"max_attempts": 0}, {"base_delay": 0.0}, {"max_delay": -1.0}, {"max_total_delay": 0.0}]
)
def test_limits_of_throttling_are_positive(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        ThrottlePolicy(**limits)


def events(*chunks: object) -> Failure:
    """A stream as some compatible server writes it."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return Failure(200, f"{text}data: [DONE]\n\n".encode(), content_type="text/event-stream")


def chunk(end: str | None = None, **delta: object) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}


@pytest.mark.parametrize("index", [{"index": 0}, {}])
def test_a_server_that_gives_all_calls_one_index_is_understood(index: dict[str, int]) -> None:
    calls = [
        {**index, "id": f"call_{text}", "function": {"name": "note", "arguments": json.dumps({"text": text})}}
        for text in "abc"
    ]
    stream = events(*(chunk(tool_calls=[call]) for call in calls), chunk("tool_calls"))
    trial = Trial("chat", True, [stream, DONE])
    assert trial.run() == DONE["text"]
    assert [invoked.params for invoked in trial.session[ToolInvoked].all()] == [Note("a"), Note("b"), Note("c")]


PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
    {"type": "text", "text": "All of it "},
    {"type": "output_text", "text": "is done."},
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_in_parts_is_put_together(stream: bool) -> None:
    parts = events(chunk(content=PARTS[:2]), chunk("stop", content=PARTS[2:]))
    trial = Trial("chat", stream, [parts if stream else Failure(200, chat_answer("stop", content=PARTS))])
    assert trial.run() == DONE["text"]
    assert [text.text for text in trial.texts] == (["All of it ", "is done."] if stream else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [{"content": 5}, {"content": {"text": "a"}}, {"refusal": 5}])
def test_a_text_that_is_none_ends_it(stream: bool, said: dict[str, object]) -> None:
    reply = events(chunk("stop", **said)) if stream else Failure(200, chat_answer("stop", **said))
    assert Trial("chat", stream, [reply]).error().phase == "response"


def test_a_server_that_sends_all_of_the_input_at_the_beginning_of_a_block_is_understood() -> None:
    block = {"type": "tool_use", "id": "one", "name": "note", "input": {"text": "whole"}}
    told: list[dict[str, object]] = [
        {"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in told)
    trial = Trial("messages", True, [Failure(200, text.encode(), content_type="text/event-stream"), DONE])
    assert trial.run() == DONE["text"]
    assert [invoked.params for invoked in trial.session[ToolInvoked].all()] == [Note("whole")]


def message(stopped: str, *blocks: dict[str, object]) -> dict[str, object]:
    return {"id": "m", "type": "message", "role": "assistant", "content": list(blocks), "stop_reason": stopped}


def chat_answer(finished: str, **said: object) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finished}]}


def response(status: str, why: str | None = None, *output: dict[str, object]) -> dict[str, object]:
    return {"id": "r", "status": status, "incomplete_details": why and {"reason": why}, "output": list(output)}


HALF = {"type": "text", "text": "The first half is"}
HALF_ITEM = {"id": "i", "type": "message", "role": "assistant", "content": [{**HALF, "type": "output_text"}]}
NOTE = json.dumps({"text": "never"})
CALL = {"id": "call_1", "type": "function", "function": {"name": "note", "arguments": NOTE}}
CALL_ITEM = {"id": "i", "type": "function_call", "call_id": "c", "name": "note", "arguments": NOTE}


@pytest.mark.parametrize(
    ("wire", "answer", "why"),
    [
        ("messages", message("model_context_window_exceeded", HALF), "cut off"),
        ("messages", message("pause_turn", HALF), "paused"),
        ("messages", message("refusal"), "refused"),
        ("messages", message("end_turn"), "nothing"),
        ("messages", message("end_turn", {"type": "thinking", "thinking": "Hm.", "signature": "s"}), "nothing"),
        ("chat", chat_answer("content_filter", content="The first half is"), "refused"),
        ("chat", chat_answer("content_filter", content=None, tool_calls=[CALL]), "refused"),
        ("chat", chat_answer("stop", content=None), "nothing"),
        ("responses", response("incomplete", "content_filter", HALF_ITEM), "refused"),
        ("responses", response("incomplete", "content_filter", CALL_ITEM), "refused"),
        ("responses", response("incomplete", None, HALF_ITEM), "cut off"),
        ("responses", response("completed"), "nothing"),
        ("responses", response("cancelled", None, HALF_ITEM), "cancelled"),
        ("responses", response("in_progress", None, CALL_ITEM), "in_progress"),
        ("responses", response("queued"), "queued"),
    ],
)
def test_what_is_no_whole_answer_is_none_and_runs_nothing(wire: str, answer: dict[str, object], why: str) -> None:
    trial = Trial(wire, False, [Failure(200, answer)] * 3, max_attempts=2)
    assert why in str(trial.error())
    assert trial.session[ToolInvoked].all() == ()
