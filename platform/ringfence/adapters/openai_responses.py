"""OpenAI's Responses, without anything kept at the provider: every request has the whole conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ringfence.adapters.core import Message, Request, ToolCall, Turn
from ringfence.adapters.model_params import ModelParams
from ringfence.adapters.provider import (
    OPENING,
    CutOffError,
    ReportedError,
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

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesWire:
    """A `ProviderApi`."""

    def __init__(
        self, client: openai.OpenAI, model: str, params: ModelParams, *, strict_tools: bool, native_output: bool
    ) -> None:
        self._client = client
        self._model = model
        self._options = params.of_responses()
        self._strict_tools = strict_tools
        self._native_output = native_output

    def arguments(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self._model, **self._options}
        found |= {"store": False, "include": ["reasoning.encrypted_content"]}
        schema = request.output_schema
        words = output_in_words(schema) if schema is not None and not self._native_output else ""
        found["input"] = list(_items(request.messages, words))
        if request.tools:
            found["tools"] = [self._tool(tool) for tool in request.tools]
            name = chosen_tool(request)
            found["tool_choice"] = request.tool_choice if name is None else {"type": "function", "name": name}
        if schema is not None and self._native_output:
            found["text"] = {"format": {"type": "json_schema", **named_schema(request, schema)}}
        return found

    def _tool(self, tool: ToolSchema) -> dict[str, Any]:
        strict = strict_schema(tool.parameters) if self._strict_tools else None
        return {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": strict or tool.parameters,
            "strict": strict is not None,  # left out, it would be true
        }

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        return self._client.responses.create(**arguments, stream=stream, timeout=seconds)

    def answer(self, record: Mapping[str, Any]) -> Any:
        from openai.types.responses import Response

        return Response.construct(**record)

    def turn(self, answer: Any) -> Turn:
        if answer.error is not None or answer.status == "failed":
            raise ReportedError(
                getattr(answer.error, "message", "the response failed"), getattr(answer.error, "code", None)
            )
        cut = getattr(answer.incomplete_details, "reason", None)
        if answer.status not in ("completed", "incomplete"):
            raise CutOffError(f"the answer is {answer.status}")
        text: list[str] = []
        refused: list[str] = []
        calls: list[ToolCall] = []
        for item in answer.output:
            if item.type == "function_call":
                calls.append(ToolCall(item.call_id, item.name, item.arguments or ""))
            elif item.type == "message":
                text += [part.text for part in item.content if part.type == "output_text"]
                refused += [part.refusal for part in item.content if part.type == "refusal"]
        usage = _usage(answer.usage)
        if refused or cut == "content_filter":
            return Turn("".join(refused) or "its answer was withheld", (), usage, ended="refused")
        raw = [item.to_dict(mode="json", warnings=False) for item in answer.output]
        ended = "cut" if answer.status == "incomplete" else "whole"
        return Turn("".join(text), tuple(calls), usage, raw=raw, ended=ended)

    def turn_of_events(self, events: Iterable[Any], say: Callable[[str], None]) -> Turn:
        for event in events:
            if event.type == "response.output_text.delta":
                say(event.delta)
            elif event.type in ENDS:
                return self.turn(event.response)
            elif event.type == "error":
                raise ReportedError(event.message, event.code)
        raise CutOffError("the answer broke off")


def _usage(found: Any) -> TokenUsage | None:
    if found is None:
        return None
    cached = tokens(found, "input_tokens_details.cached_tokens")
    return TokenUsage(tokens(found, "input_tokens"), tokens(found, "output_tokens"), cached)


def _items(messages: Iterable[Message], words: str) -> Iterable[dict[str, Any]]:
    for message in messages:
        if message.role == "system":
            yield {"role": "system", "content": message.text + words}
            yield {"role": "user", "content": OPENING}
        elif message.role == "user":
            yield {"role": "user", "content": message.text}
        elif message.role == "tool":
            yield {"type": "function_call_output", "call_id": message.call_id, "output": message.text}
        elif message.turn is not None:
            yield from _sent_back(message.turn)


def _sent_back(turn: Turn) -> Iterable[dict[str, Any]]:
    """The items as they came, reasoning included; of the calls, what is sure to be taken back."""
    calls = iter(turn.tool_calls)
    for item in cast("list[dict[str, Any]]", turn.raw):
        if item.get("type") != "function_call":
            yield item
            continue
        call = next(calls)
        arguments = json.dumps(arguments_to_send(call))
        said = {"call_id": call.call_id, "name": name_to_send(call), "arguments": arguments, "status": "completed"}
        yield {**item, **said}
