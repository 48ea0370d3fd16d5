"""OpenAI's Chat Completions, which most compatible servers speak as well."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from ringfence.adapters.core import Message, Request, ToolCall, Turn
from ringfence.adapters.model_params import ModelParams
from ringfence.adapters.provider import (
    OPENING,
    CutOffError,
    arguments_to_send,
    chosen_tool,
    name_to_send,
    named_schema,
    output_in_words,
    tokens,
)
from ringfence.adapters.strict_schema import strict_schema
from ringfence.runtime.events import ToolSchema
from ringfence.runtime.limits import TokenUsage

if TYPE_CHECKING:
    import openai


@dataclass(slots=True)
class _Call:
    """One tool call, put together from the pieces of a stream."""

    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])


class ChatWire:
    """A `ProviderApi`."""

    def __init__(
        self, client: openai.OpenAI, model: str, params: ModelParams, *, strict_tools: bool, native_output: bool
    ) -> None:
        self._client = client
        self._model = model
        self._options = params.of_chat()
        self._strict_tools = strict_tools
        self._native_output = native_output

    def arguments(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self._model, **self._options}
        schema = request.output_schema
        words = output_in_words(schema) if schema is not None and not self._native_output else ""
        found["messages"] = _messages(request.messages, words)
        if request.tools:
            found["tools"] = [self._tool(tool) for tool in request.tools]
            name = chosen_tool(request)
            found["tool_choice"] = (
                request.tool_choice if name is None else {"type": "function", "function": {"name": name}}
            )
        if schema is not None and self._native_output:
            found["response_format"] = {"type": "json_schema", "json_schema": named_schema(request, schema)}
        return found

    def _tool(self, tool: ToolSchema) -> dict[str, Any]:
        strict = strict_schema(tool.parameters) if self._strict_tools else None
        function = {"name": tool.name, "description": tool.description, "parameters": strict or tool.parameters}
        return {"type": "function", "function": {**function, **({"strict": True} if strict else {})}}

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        if stream:
            arguments = {**arguments, "stream": True, "stream_options": {"include_usage": True}}
        create: Any = self._client.chat.completions.create  # whose overloads tell answers and streams apart
        return create(**arguments, timeout=seconds)

    def answer(self, record: Mapping[str, Any]) -> Any:
        from openai.types.chat import ChatCompletion

        return ChatCompletion.construct(**record)

    def turn(self, answer: Any) -> Turn:
        choice = answer.choices[0]
        message = choice.message
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments or "") for call in message.tool_calls or ()
        )
        return _turn(_text(message.content), message.refusal, calls, choice.finish_reason, _usage(answer.usage))

    def turn_of_events(self, events: Iterable[Any], say: Callable[[str], None]) -> Turn:
        text: list[str] = []
        refusal: list[str] = []
        calls: list[_Call] = []
        at: dict[int | None, _Call] = {}
        finished: str | None = None
        usage: TokenUsage | None = None
        for chunk in events:
            usage = _usage(chunk.usage) or usage
            for choice in chunk.choices[:1]:
                finished = choice.finish_reason or finished
                delta = choice.delta
                text.append(_text(delta.content))
                refusal.append(delta.refusal or "")
                say(text[-1])
                for piece in delta.tool_calls or ():
                    call = at.get(piece.index)
                    if call is None or (piece.id and call.call_id and piece.id != call.call_id):
                        call = at[piece.index] = _Call()  # some servers give all calls one index, or none
                        calls.append(call)
                    call.call_id = piece.id or call.call_id
                    if piece.function is not None:
                        call.name += piece.function.name or ""
                        call.arguments.append(piece.function.arguments or "")
        asked = tuple(ToolCall(call.call_id, call.name, "".join(call.arguments)) for call in calls)
        return _turn("".join(text), "".join(refusal), asked, finished, usage)


def _text(content: Any) -> str:
    """What an answer says. Some servers send a list of parts, with the text in some of them."""
    if not isinstance(content, list):
        return content or ""
    parts = cast("list[Mapping[str, Any]]", content)
    return "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))


def _turn(
    text: str, refusal: str | None, calls: tuple[ToolCall, ...], finished: str | None, usage: TokenUsage | None
) -> Turn:
    if finished is None:
        raise CutOffError("the answer broke off")
    if refusal or finished == "content_filter":
        return Turn(refusal or text or "its answer was withheld", (), usage, ended="refused")
    return Turn(text, calls, usage, ended="cut" if finished == "length" else "whole")


def _usage(found: Any) -> TokenUsage | None:
    if found is None:
        return None
    cached = tokens(found, "prompt_tokens_details.cached_tokens")
    return TokenUsage(tokens(found, "prompt_tokens"), tokens(found, "completion_tokens"), cached)


def _messages(messages: Iterable[Message], words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "system":
            found.append({"role": "system", "content": message.text + words})
            found.append({"role": "user", "content": OPENING})
        elif message.role == "user" and found and found[-1]["role"] == "user":
            found[-1]["content"] += f"\n\n{message.text}"  # templates of many models take no two in a row
        elif message.role == "user":
            found.append({"role": "user", "content": message.text})
        elif message.role == "tool":
            found.append({"role": "tool", "tool_call_id": message.call_id, "content": message.text})
        else:
            calls = message.turn.tool_calls if message.turn is not None else ()
            said: dict[str, Any] = {"role": "assistant", "content": message.text}
            if calls:
                said["tool_calls"] = [_sent_back(call) for call in calls]
            found.append(said)
    return found


def _sent_back(call: ToolCall) -> dict[str, Any]:
    function = {"name": name_to_send(call), "arguments": json.dumps(arguments_to_send(call))}
    return {"id": call.call_id, "type": "function", "function": function}
