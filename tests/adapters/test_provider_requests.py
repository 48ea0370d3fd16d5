"""What providers are sent: tools, choices, schemas and the conversation, in each protocol."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from provider_server import Asked, ProviderServer, Reply
from provider_shapes import Claim, called

from ringfence.adapters import (
    AnthropicAdapter,
    Conversation,
    Message,
    ModelParams,
    OpenAIAdapter,
    PromptEvaluationError,
    ToolCall,
    Turn,
)
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolExample, ToolResult
from ringfence.runtime import Session

DONE = {"text": "Done."}
WIRES = ("chat", "responses", "messages")


@dataclass(frozen=True)
class Look:
    where: str = field(metadata={"description": "The place."})
    deep: int = field(default=1, metadata={"ge": 1})


def look(params: Look, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult(message="seen", value=None) if params.deep == 1 else ToolResult.error("too deep")


EXAMPLE = ToolExample(description="Look home.", input=Look("home"), output=None)
LOOK = Tool[Look, None](name="look", description="Look around.", handler=look, examples=(EXAMPLE,))


def prompt(output: Any = None) -> Prompt[Any]:
    template: Any = PromptTemplate if output is None else PromptTemplate[output]
    section = MarkdownSection(title="Task", key="task", template="Look around.", tools=[LOOK])
    return Prompt(template(ns="tests", key="sent", sections=[section]))


def adapter_of(wire: str, server: ProviderServer, **options: Any) -> Any:
    if wire == "messages":
        return AnthropicAdapter("model-1", base_url=server.url, api_key="k", **options)
    api: Any = wire
    return OpenAIAdapter("model-1", api=api, base_url=server.openai_url, api_key="k", **options)


def sent(wire: str, replies: Sequence[Reply], output: Any = None, **options: Any) -> list[Any]:
    """The bodies of the requests of one evaluation."""
    with ProviderServer(replies) as server, adapter_of(wire, server, **options) as adapter:
        adapter.evaluate(prompt(output), session=Session())
    return [asked.body for asked in server.asked]


CALLED = {
    "text": "I look.",
    "tool_calls": [
        {"name": "look", "arguments": {"where": "a"}, "id": "one"},
        {"name": "look", "arguments": {"where": "b", "deep": 2}, "id": "two"},
        {"name": "peek around!", "arguments": '{"where', "id": "three"},
    ],
}


def test_chat() -> None:
    first, second = sent("chat", [CALLED, DONE])
    assert first["model"] == "model-1"
    assert first["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert "Look around." in first["messages"][0]["content"]
    (tool,) = first["tools"]
    assert (tool["type"], first["tool_choice"]) == ("function", "auto")
    assert tool["function"]["parameters"]["properties"]["where"]["description"] == "The place."
    assistant, *answers = second["messages"][2:]
    assert (assistant["role"], assistant["content"]) == ("assistant", "I look.")
    sent_back = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in assistant["tool_calls"]
    ]
    assert sent_back == [
        ("one", "look", '{"where": "a"}'),
        ("two", "look", '{"where": "b", "deep": 2}'),
        ("three", "peek_around_", "{}"),
    ]
    assert [(answer["role"], answer["tool_call_id"]) for answer in answers] == [
        ("tool", i) for i in ("one", "two", "three")
    ]
    assert answers[0]["content"] == "seen"
    assert "no tool" in answers[2]["content"]


def test_responses() -> None:
    first, second = sent("responses", [CALLED, DONE])
    assert (first["store"], first["include"]) == (False, ["reasoning.encrypted_content"])
    assert [item["role"] for item in first["input"]] == ["system", "user"]
    (tool,) = first["tools"]
    assert (tool["type"], tool["name"], tool["strict"]) == ("function", "look", False)
    reasoning, message, *items = second["input"][2:]
    assert (reasoning["type"], reasoning["encrypted_content"]) == ("reasoning", "c2VjcmV0")
    assert message["content"][0]["text"] == "I look."
    assert [(item["type"], item["call_id"]) for item in items] == [
        *(("function_call", call_id) for call_id in ("one", "two", "three")),
        *(("function_call_output", call_id) for call_id in ("one", "two", "three")),
    ]
    assert (items[2]["name"], items[2]["arguments"]) == ("peek_around_", "{}")
    assert items[3]["output"] == "seen"


def test_messages() -> None:
    first, second = sent("messages", [CALLED, DONE])
    assert first["max_tokens"] > 1000
    assert first["cache_control"] == {"type": "ephemeral"}
    assert "Look around." in first["system"]
    assert [message["role"] for message in first["messages"]] == ["user"]
    (tool,) = first["tools"]
    assert tool["input_schema"]["required"] == ["where"]
    assert tool["input_examples"] == [{"where": "home", "deep": 1}]
    assistant, answers = second["messages"][1:]
    assert [block["type"] for block in assistant["content"]] == ["thinking", "text", *["tool_use"] * 3]
    assert assistant["content"][0]["signature"] == "c2lnbmVk"
    assert [block["input"] for block in assistant["content"][2:]] == [{"where": "a"}, {"where": "b", "deep": 2}, {}]
    assert answers["role"] == "user"
    assert [(block["type"], block["tool_use_id"]) for block in answers["content"]] == [
        ("tool_result", call_id) for call_id in ("one", "two", "three")
    ]
    assert [block.get("is_error", False) for block in answers["content"]] == [False, True, True]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("raw", [None, [{"type": "text"}], {"another": []}])
def test_a_conversation_of_another_model_is_gone_on_with(wire: str, raw: object) -> None:
    turn = Turn("I look.", (ToolCall("one", "look", {"where": "a"}),), raw=raw)
    session = Session()
    session[Conversation].seed(Conversation("tests:sent", (Message("assistant", turn.text, turn),)))
    with ProviderServer([DONE]) as server, adapter_of(wire, server) as adapter:
        assert adapter.evaluate(prompt(), session=session).text == DONE["text"]
    text = json.dumps(server.asked[0].body)
    assert (text.count('"one"'), text.count("I look."), "seen" in text) == (2, 1, True)


NAMED = {"chat": {"type": "function", "function": {"name": "look"}}, "responses": {"type": "function", "name": "look"}}
CHOICES = [
    ("chat", "required", "required", "auto"),
    ("chat", {"name": "look"}, NAMED["chat"], "auto"),
    ("chat", "none", "none", "none"),
    ("responses", "required", "required", "auto"),
    ("responses", {"name": "look"}, NAMED["responses"], "auto"),
    ("messages", "required", {"type": "any"}, {"type": "auto"}),
    ("messages", {"name": "look"}, {"type": "tool", "name": "look"}, {"type": "auto"}),
    ("messages", "none", {"type": "none"}, {"type": "none"}),
]


@pytest.mark.parametrize(("wire", "choice", "first", "then"), CHOICES)
def test_a_tool_is_forced_in_the_first_request_only(wire: str, choice: Any, first: object, then: object) -> None:
    bodies = sent(wire, [CALLED, DONE], tool_choice=choice)
    assert [body["tool_choice"] for body in bodies] == [first, then]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("choice", [{"name": "peek"}, {"type": "function"}])
def test_a_choice_that_is_none_is_refused_before_anything_is_sent(wire: str, choice: Any) -> None:
    with pytest.raises(PromptEvaluationError, match="tool choice") as caught:
        sent(wire, [DONE], tool_choice=choice)
    assert caught.value.phase == "request"


STRICT = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "certain": {"type": "boolean", "description": "(default: true)"}},
    "required": ["title", "certain"],
    "additionalProperties": False,
}
ANSWER = {"text": '{"title": "t", "certain": true}'}


def test_a_structured_output_is_said_in_the_provider_s_own_way() -> None:
    (chat,) = sent("chat", [ANSWER], Claim)
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "tests_sent_schema", "schema": STRICT, "strict": True},
    }
    (responses,) = sent("responses", [ANSWER], Claim)
    assert responses["text"]["format"]["schema"] == STRICT
    (messages,) = sent("messages", [ANSWER], Claim)
    assert messages["output_config"] == {"format": {"type": "json_schema", "schema": STRICT}}


@pytest.mark.parametrize("wire", WIRES)
def test_or_in_words_for_a_server_that_has_no_way(wire: str) -> None:
    (body,) = sent(wire, [ANSWER], Claim, native_output=False)
    assert not body.keys() & {"response_format", "text", "output_config"}
    text = json.dumps(body)
    assert "fits this JSON Schema" in text
    assert "certain" in text


def test_params_have_the_provider_s_names() -> None:
    params = ModelParams(max_tokens=9, temperature=0.0, top_p=0.5, extra={"top_k": 3})
    (chat,) = sent("chat", [DONE], params=params)
    assert (chat["max_completion_tokens"], chat["temperature"], chat["top_k"]) == (9, 0.0, 3)
    (responses,) = sent("responses", [DONE], params=params)
    assert (responses["max_output_tokens"], responses["top_p"], responses["top_k"]) == (9, 0.5, 3)
    (messages,) = sent("messages", [DONE], params=params)
    assert (messages["max_tokens"], messages["temperature"], messages["top_k"]) == (9, 0.0, 3)


@pytest.mark.parametrize(
    ("make", "given"),
    [(OpenAIAdapter, {"stop": "x"}), (OpenAIAdapter, {"seed": 3}), (AnthropicAdapter, {"presence_penalty": 0.5})],
)
def test_params_that_a_provider_has_not_are_refused_at_once(make: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        make("m", base_url="http://127.0.0.1:9", api_key="k", params=ModelParams(**given))


@pytest.mark.parametrize("stop", ["END", ["END"]])
def test_a_stop_may_be_one_text(stop: Any) -> None:
    assert sent("chat", [DONE], params=ModelParams(stop=stop))[0]["stop"] == ["END"]
    assert sent("messages", [DONE], params=ModelParams(stop=stop))[0]["stop_sequences"] == ["END"]


def test_an_anthropic_turn_without_text_has_no_empty_block() -> None:
    _, second = sent("messages", [{**called("a"), "text": ""}, DONE])
    assert [block["type"] for block in second["messages"][1]["content"]] == ["thinking", "tool_use"]


TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
ARGUMENTS = st.one_of(
    TEXTS,
    st.dictionaries(TEXTS, st.one_of(TEXTS, st.floats(), st.integers(), st.none()), max_size=3).map(json.dumps),
)


class Anything(ProviderServer):
    """Answers each first request with the ``turn`` of the moment, and the one after it with an end."""

    turn: Any = None

    def reply(self, asked: Asked) -> Reply:
        super().reply(asked)
        return self.turn if len(self.asked) % 2 else DONE


@pytest.fixture(scope="module")
def anything() -> Iterator[Anything]:
    with Anything([DONE]) as server:
        yield server


@pytest.mark.parametrize("wire", WIRES)
@given(calls=st.lists(st.tuples(TEXTS, TEXTS, ARGUMENTS), min_size=1, max_size=4), text=TEXTS)
@settings(max_examples=25)
def test_whatever_a_model_wrote_can_be_sent_back(
    anything: Anything, wire: str, calls: list[tuple[str, str, str]], text: str
) -> None:
    asked = [{"id": call_id, "name": name, "arguments": arguments} for call_id, name, arguments in calls]
    anything.turn = {"text": text, "tool_calls": asked}
    with adapter_of(wire, anything, stream=False) as adapter:
        adapter.evaluate(prompt(), session=Session())
    body = anything.asked[-1].body
    entries = body.get("messages") or body["input"]
    blocks = [block for entry in entries for block in blocks_of(entry)]
    asked_ids = [block.get("call_id", block["id"]) for block in blocks if "name" in block or "function" in block]
    assert len(set(asked_ids)) == len(calls)
    answered = [block.get("call_id") or block.get("tool_call_id") or block.get("tool_use_id") for block in blocks]
    assert [call_id for call_id in answered if call_id][-len(calls) :] == asked_ids
    names = [block.get("function", block)["name"] for block in blocks if "name" in block or "function" in block]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)


def blocks_of(entry: dict[str, Any]) -> list[dict[str, Any]]:
    content = entry.get("content")
    return [entry, *entry.get("tool_calls", ()), *(content if isinstance(content, list) else ())]


@pytest.mark.parametrize("kind", [OpenAIAdapter, AnthropicAdapter])
def test_without_a_key_it_says_what_to_set(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="_API_KEY"):
        kind("m")
    kind("m", base_url="http://127.0.0.1:9").close()  # a server of one's own may need none


def test_an_adapter_closes_its_own_client_and_no_other() -> None:
    import openai

    with openai.OpenAI(api_key="k", base_url="http://127.0.0.1:9/v1") as client:
        OpenAIAdapter("m", client=client).close()
        assert not client.is_closed()
        with pytest.raises(ValueError, match="not both"):
            OpenAIAdapter("m", client=client, api_key="k")


@pytest.mark.parametrize(("name", "extra"), [("OpenAIAdapter", "openai"), ("AnthropicAdapter", "anthropic")])
def test_without_the_package_it_says_what_to_install(name: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{extra!r}] = None\n"
        f"from ringfence.adapters import {name}\n"
        f"try: {name}('m')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.search(rf"ringfence's extra '{extra}' needs: pip install .*\[{extra}\]", done.stdout)


def test_importing_the_adapters_imports_no_sdk() -> None:
    code = (
        "import sys, ringfence.adapters as adapters\n"
        "adapters.OpenAIAdapter, adapters.AnthropicAdapter\n"
        "print([name for name in ('openai', 'anthropic', 'httpx2', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
