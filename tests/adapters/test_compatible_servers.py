"""Servers that are compatible with a provider's API, but for something: they are understood, or asked again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from provider_server import Failure, ProviderServer, Reply

from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, PromptEvaluationError
from ringfence.adapters.retry import ThrottlePolicy
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Session, ToolInvoked

DONE = {"text": "All of it is done."}


@dataclass(frozen=True)
class Note:
    text: str = "x"


def note(params: Note, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult("noted")


NOTE = Tool[Note, None](name="note", description="Note.", handler=note)


def evaluated(wire: str, replies: Sequence[Reply], *, stream: bool) -> tuple[str | None, list[str], int]:
    """Return the answer, the notes, and the number of requests."""
    section = MarkdownSection(title="T", key="t", template="Note things.", tools=[NOTE])
    prompt = Prompt(PromptTemplate(ns="tests", key="servers", sections=[section]))
    session = Session()
    throttle = ThrottlePolicy(sleep=lambda seconds: None, max_attempts=2)
    with ProviderServer(replies, stream=stream) as server:
        options: Any = {"stream": stream, "throttle": throttle, "api_key": "k"}
        api: Any = wire
        made = (
            AnthropicAdapter("m", base_url=server.url, **options)
            if wire == "messages"
            else OpenAIAdapter("m", api=api, base_url=server.openai_url, **options)
        )
        with made as adapter:
            text = adapter.evaluate(prompt, session=session).text
    params: list[Any] = [invoked.params for invoked in session[ToolInvoked].all()]
    return text, [getattr(each, "text", repr(each)) for each in params], len(server.asked)


def sse(*chunks: object) -> Failure:
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return Failure(200, f"{text}data: [DONE]\n\n".encode(), content_type="text/event-stream")


def chunk(end: str | None = None, **delta: object) -> dict[str, object]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}


def whole(end: str | None = "tool_calls", **message: object) -> Failure:
    return Failure(200, {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": end}]})


def call(text: str = "a", **more: object) -> dict[str, object]:
    return {"id": f"id_{text}", "function": {"name": "note", "arguments": json.dumps({"text": text})}, **more}


def part(arguments: object, **more: object) -> dict[str, object]:
    return {"function": {"arguments": arguments, **more}}


OBJECT = {"name": "note", "arguments": {"text": "a"}}
A, AB = ["a"], ["a", "b"]
WHOLE = {
    "arguments as an object": (whole(tool_calls=[{"id": "1", "function": OBJECT}]), A),
    "no arguments": (whole(tool_calls=[{"id": "1", "function": {"name": "note"}}]), ["x"]),
    "empty arguments": (whole(tool_calls=[{"id": "1", "function": {"name": "note", "arguments": ""}}]), ["x"]),
    "null for arguments": (whole(tool_calls=[{"id": "1", "function": {"name": "note", "arguments": None}}]), ["x"]),
    "no id": (whole(tool_calls=[{"function": OBJECT}]), A),
    "null for an id": (whole(tool_calls=[call("a", id=None), call("b", id=None)]), AB),
    "a number for an id": (whole(tool_calls=[call("a", id=7)]), A),
    "one id for all": (whole(tool_calls=[call("a", id="1"), call("b", id="1")]), AB),
    "stop with calls": (whole("stop", tool_calls=[call()]), A),
    "null for content": (whole(content=None, tool_calls=[call()]), A),
    "a list for content": (whole(content=[{"text": "a"}, "b"], tool_calls=[call()]), A),
    "null for calls": (whole("stop", content="Hm.", tool_calls=None), None),
    "a role and a type": (whole(role="assistant", tool_calls=[call(type="function", index=0)]), A),
}
STREAMED = {
    "arguments as an object": ([chunk(tool_calls=[{"index": 0, "id": "1", "function": OBJECT}])], A),
    "an object and then nothing": (
        [chunk(tool_calls=[{"index": 0, "id": "1", "function": OBJECT}]), chunk(tool_calls=[{"index": 0, **part("")}])],
        A,
    ),
    "no arguments": ([chunk(tool_calls=[{"index": 0, "id": "1", "function": {"name": "note"}}])], ["x"]),
    "empty arguments": ([chunk(tool_calls=[{"index": 0, "id": "1", **part("", name="note")}])], ["x"]),
    "no id": ([chunk(tool_calls=[{"index": 0, "function": OBJECT}])], A),
    "no index": ([chunk(tool_calls=[call("a")]), chunk(tool_calls=[call("b")])], AB),
    "neither index nor id": ([chunk(tool_calls=[call("a", id=None)]), chunk(tool_calls=[call("b", id=None)])], AB),
    "neither, with objects": ([chunk(tool_calls=[{"function": OBJECT}]), chunk(tool_calls=[call("b", id=None)])], AB),
    "one index for all": ([chunk(tool_calls=[call("a", index=0)]), chunk(tool_calls=[call("b", index=0)])], AB),
    "one index and one id for all": ([chunk(tool_calls=[call(n, index=i, id="1") for i, n in enumerate("ab")])], AB),
    "the index as text": ([chunk(tool_calls=[call("a", index="0"), call("b", index="1")])], AB),
    "an empty name later": (
        [
            chunk(tool_calls=[{"index": 0, "id": "1", **part("", name="note")}]),
            chunk(tool_calls=[{"index": 0, "id": "", **part('{"text": ', name="")}]),
            chunk(tool_calls=[{"index": 0, "id": None, **part('"a"}', name=None)}]),
        ],
        A,
    ),
    "the name and the id in each part": (
        [
            chunk(tool_calls=[{"index": 0, "id": "1", **part("", name="note")}]),
            chunk(tool_calls=[{"index": 0, "id": "1", **part('{"text": ', name="note")}]),
            chunk(tool_calls=[{"index": 0, "id": "1", **part('"a"}', name="note")}]),
        ],
        A,
    ),
    "another id in each part": (
        [
            chunk(tool_calls=[{"index": 0, "id": "1", **part('{"text": ', name="note")}]),
            chunk(tool_calls=[{"index": 0, "id": "2", **part('"a"}')}]),
        ],
        A,
    ),
    "a name in pieces": (
        [
            chunk(tool_calls=[{"index": 0, "id": "1", **part("", name="no")}]),
            chunk(tool_calls=[{"index": 0, **part('{"text": "a"}', name="te")}]),
        ],
        A,
    ),
    "null for what is not there": (
        [
            {**chunk(role=None, content=None, tool_calls=None, refusal=None), "usage": None},
            {"id": "x", "choices": None, "usage": None},
            {"id": "x", "choices": []},
            {"id": "x", "choices": [{"index": 0, "delta": None, "finish_reason": None}]},
            {"id": "x", "choices": [{"index": 0}]},
            chunk(tool_calls=[call(index=0)]),
        ],
        A,
    ),
}


@pytest.mark.parametrize(("reply", "notes"), WHOLE.values(), ids=WHOLE)
def test_a_whole_answer_of_a_chat_is_understood(reply: Reply, notes: list[str] | None) -> None:
    expected = ("Hm.", [], 1) if notes is None else (DONE["text"], notes, 2)
    assert evaluated("chat", [reply, DONE], stream=False) == expected


@pytest.mark.parametrize("end", ["tool_calls", "stop"])
@pytest.mark.parametrize(("chunks", "notes"), STREAMED.values(), ids=STREAMED)
def test_a_streamed_answer_of_a_chat_is_understood(chunks: list[object], notes: list[str], end: str) -> None:
    assert evaluated("chat", [sse(*chunks, chunk(end)), DONE], stream=True) == (DONE["text"], notes, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["length", "max_tokens", "model_length", "MAX_TOKENS"])
def test_the_limit_of_tokens_has_several_names(stream: bool, end: str) -> None:
    reply = sse(chunk(tool_calls=[call(index=0)]), chunk(end)) if stream else whole(end, tool_calls=[call()])
    text, notes, _ = evaluated("chat", [reply, DONE], stream=stream)
    assert text == DONE["text"]
    assert all("RejectedToolParams" in each for each in notes)
    assert notes


AGAIN: list[Any] = [
    {},
    {"choices": []},
    {"choices": None},
    {"error": {"message": "busy", "code": 502}},
    {"error": {"message": "busy", "code": "server_error"}},
    {"error": {"message": "slow down", "code": 429}},
    {"choices": [{"message": {"content": "Hm"}, "finish_reason": "error", "error": {"message": "busy", "code": 502}}]},
    {"choices": [{"message": {"content": "Hm"}, "finish_reason": "error"}]},
    {"choices": [{"message": {"content": "Hm"}, "finish_reason": None}]},
    {"choices": [{"message": None, "finish_reason": "stop"}]},
    {"choices": [{"finish_reason": "stop"}]},
]


@pytest.mark.parametrize("answer", AGAIN, ids=json.dumps)
def test_what_is_no_answer_of_a_chat_is_asked_for_again(answer: dict[str, Any]) -> None:
    assert evaluated("chat", [Failure(200, answer), DONE], stream=False) == (DONE["text"], [], 2)
    if "error" not in json.dumps(answer) or "choices" not in answer:
        assert evaluated("chat", [sse({"id": "x", **answer}), DONE], stream=True) == (DONE["text"], [], 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [{"message": "no such model", "code": 404}, {"message": "no such model"}])
def test_an_error_that_does_not_pass_is_told(error: dict[str, object], stream: bool) -> None:
    reply = sse({"error": error}) if stream else Failure(200, {"error": error})
    with pytest.raises(PromptEvaluationError, match="no such model"):
        evaluated("chat", [reply, DONE], stream=stream)


def item(**more: object) -> dict[str, object]:
    return {"type": "function_call", "name": "note", "arguments": '{"text": "a"}', **more}


def response(*items: object, **more: object) -> dict[str, object]:
    return {"id": "r", "object": "response", "status": "completed", "output": list(items), **more}


@pytest.mark.parametrize(
    "answer",
    [
        response(item(call_id="1", arguments={"text": "a"})),
        response(item(id="1")),
        response(item()),
        response({"type": "message", "content": None}, item(call_id="1"), usage=None, error=None),
    ],
)
def test_a_deviating_response_is_understood(answer: dict[str, Any]) -> None:
    assert evaluated("responses", [Failure(200, answer), DONE], stream=False) == (DONE["text"], A, 2)
    done = [{"type": "response.output_item.done", "output_index": 0, "item": each} for each in answer["output"]]
    for last in (answer, {**answer, "output": []}):
        events = [*done, {"type": "response.completed", "response": last}]
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        reply = Failure(200, text.encode(), content_type="text/event-stream")
        assert evaluated("responses", [reply, DONE], stream=True) == (DONE["text"], A, 2)


def message(content: object, **more: object) -> Failure:
    return Failure(200, {"id": "m", "type": "message", "content": content, "stop_reason": "end_turn", **more})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (message("All done."), ("All done.", [], 1)),
        (message(None), (DONE["text"], [], 2)),
        (message([{"type": "tool_use", "name": "note", "input": {"text": "a"}}], usage=None), (DONE["text"], A, 2)),
        (message([{"type": "tool_use", "id": "1", "name": "note", "input": None}]), (DONE["text"], ["x"], 2)),
        (message([{"type": "tool_use", "id": "1", "name": "note", "input": '{"text": "a"}'}]), (DONE["text"], A, 2)),
        (
            Failure(200, {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}),
            (DONE["text"], [], 2),
        ),
    ],
)
def test_a_deviating_message_is_understood(reply: Reply, expected: tuple[str, list[str], int]) -> None:
    assert evaluated("messages", [reply, DONE], stream=False) == expected
