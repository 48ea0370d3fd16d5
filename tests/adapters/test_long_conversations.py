"""Conversations that become longer than their model takes, over real HTTP and with the official SDKs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from provider_server import Asked, Failure, ProviderServer, Reply
from provider_shapes import Note, called

from ringfence.adapters import (
    AnthropicAdapter,
    ContextWindowExceededError,
    Message,
    ModelRetry,
    OpenAIAdapter,
    ToolCall,
    Turn,
)
from ringfence.adapters.loop import shorten
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Session, ToolInvoked

DONE = {"text": "All of it is done."}
WIRES = ("responses", "chat", "messages")
every_wire = pytest.mark.parametrize("wire", WIRES)
SAYINGS = {
    "messages": (
        400,
        {"type": "invalid_request_error", "message": "prompt is too long: 208310 tokens > 200000 maximum"},
    ),
    "responses": (
        400,
        {
            "code": "context_length_exceeded",
            "type": "invalid_request_error",
            "message": "Your input exceeds the context window of this model.",
        },
    ),
    "chat": (500, {"type": "server_error", "message": "the request exceeds the available context size"}),
}


class SmallModel(ProviderServer):
    """Refuses what is longer than so many characters, in the words of the provider; it has no end of turns."""

    def __init__(self, window: int, replies: Sequence[Reply], saying: tuple[int, dict[str, str]]) -> None:
        super().__init__(replies)
        self.refused = 0
        self.taken: list[Any] = []
        self._window = window
        self._refusal = Failure(saying[0], {"type": "error", "error": saying[1]})

    def reply(self, asked: Asked) -> Reply:
        if len(json.dumps(asked.body)) > self._window:
            self.refused += 1
            return self._refusal
        self.taken.append(asked.body)
        return super().reply(asked)


def echo(params: Note, *, context: ToolContext) -> ToolResult[Note]:
    return ToolResult.ok(Note(params.text * params.times), "here it is")


def called_for(text: str, times: int) -> dict[str, Any]:
    return {"text": "so be it", "tool_calls": [{"name": "note", "arguments": {"text": text, "times": times}}]}


def evaluated(
    wire: str, window: int, replies: Sequence[Reply], saying: tuple[int, dict[str, str]] | None = None
) -> tuple[SmallModel, Session, list[ModelRetry], Any]:
    server, session = SmallModel(window, replies, saying or SAYINGS[wire]), Session()
    retries = list[ModelRetry]()
    session.dispatcher.subscribe(ModelRetry, retries.append)
    tool = Tool[Note, Note](name="note", description="Says a text so many times.", handler=echo)
    section = MarkdownSection(title="Task", key="task", template="Do as you are told.", tools=[tool])
    prompt = Prompt(PromptTemplate(ns="tests", key="long", sections=[section]))
    with server:
        adapter = (
            AnthropicAdapter("m", base_url=server.url, api_key="k")
            if wire == "messages"
            else OpenAIAdapter("m", base_url=server.openai_url, api_key="k", api=wire)  # pyright: ignore[reportArgumentType]
        )
        with adapter:
            try:
                ended: Any = adapter.evaluate(prompt, session=session).text
            except ContextWindowExceededError as error:
                ended = error
    return server, session, retries, ended


@every_wire
def test_older_answers_go_where_the_model_has_no_room_and_the_work_goes_on(wire: str) -> None:
    replies = [*(called_for(letter, 3_000) for letter in "abcdefgh"), DONE]
    server, session, retries, ended = evaluated(wire, 14_000, replies)
    assert ended == DONE["text"]
    assert len(session[ToolInvoked].all()) == 8
    assert 0 < server.refused == len(retries) < 8
    last = json.dumps(server.taken[-1])
    assert "a" * 3_000 not in last
    assert "h" * 3_000 in last
    assert "ask for it again" in last
    assert all("too long for the model" in retry.reason for retry in retries)


@pytest.mark.parametrize(
    "saying",
    [
        (429, {"code": "rate_limit_exceeded", "type": "tokens", "message": "Request too large for m: Limit 30000"}),
        (413, {"code": "rate_limit_exceeded", "type": "tokens", "message": "Request too large for model `m`"}),
        (
            413,
            {"code": "tokens_limit_reached", "message": "Request body too large for m model. Max size: 8000 tokens."},
        ),
        (413, {"message": "Payload Too Large"}),
    ],
)
def test_so_it_does_where_one_request_alone_is_above_a_limit_of_tokens_a_minute_or_of_bytes(saying: Any) -> None:
    server, session, _, ended = evaluated("chat", 14_000, [*(called_for(e, 3_000) for e in "abcdefgh"), DONE], saying)
    assert ended == DONE["text"]
    assert len(session[ToolInvoked].all()) == 8
    assert 0 < server.refused < 8


@every_wire
def test_older_turns_go_where_all_answers_are_short(wire: str) -> None:
    replies = [*(called(f"{number:04}" + "x" * 300) for number in range(40)), DONE]
    server, session, retries, ended = evaluated(wire, 14_000, replies)
    assert ended == DONE["text"]
    assert len(session[ToolInvoked].all()) == 40
    assert "oldest turns" in retries[-1].reason
    last = json.dumps(server.taken[-1])
    assert "0000x" not in last
    assert "0039x" in last
    assert "Do as you are told." in last
    assert "earlier turns" in last


@every_wire
def test_a_prompt_that_is_too_long_by_itself_is_told_as_the_provider_says_it(wire: str) -> None:
    server, _, retries, ended = evaluated(wire, 10, [DONE])
    assert isinstance(ended, ContextWindowExceededError)
    assert ended.phase == "request"
    assert SAYINGS[wire][1]["message"] in str(ended)
    assert (server.refused, retries) == (1, [])


@every_wire
def test_an_answer_that_can_never_fit_ends_it_after_few_requests(wire: str) -> None:
    server, _, _, ended = evaluated(wire, 1_500, [called("x" * 3_000), DONE])
    assert isinstance(ended, ContextWindowExceededError)
    assert server.refused < 5


TURNS = st.lists(st.lists(st.integers(0, 2_000), max_size=3), max_size=8)


def conversation_of(turns: list[list[int]]) -> list[Message]:
    found: list[Message] = []
    for number, sizes in enumerate(turns):
        calls = tuple(ToolCall(f"{number}-{place}", "note", "{}") for place in range(len(sizes)))
        found.append(Message("assistant", "so be it", Turn("so be it", calls)))
        found.extend(Message("tool", "x" * size, call_id=call.call_id) for call, size in zip(calls, sizes, strict=True))
        if not sizes:
            found.append(Message("user", "go on"))
    return found


@given(TURNS)
def test_each_shortening_is_shorter_ends_and_keeps_the_newest_turn_with_every_call_answered(
    turns: list[list[int]],
) -> None:
    conversation = conversation_of(turns)
    newest = next((each for each in reversed(conversation) if each.turn), None)
    for _ in range(40):
        found = shorten(conversation)
        if found is None:
            break
        shorter, left_out = found
        assert left_out
        assert sum(len(each.text) for each in shorter if each.role == "tool") <= sum(
            len(each.text) for each in conversation if each.role == "tool"
        )
        assert newest is None or newest in shorter
        asked = [call.call_id for each in shorter if each.turn for call in each.turn.tool_calls]
        assert [each.call_id for each in shorter if each.role == "tool"] == asked
        conversation = shorter
    else:
        pytest.fail("it does not end")
    assert sum(1 for each in conversation if each.turn) <= 1
