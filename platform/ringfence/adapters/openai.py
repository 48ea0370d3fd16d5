"""OpenAI's models, and those of every server that speaks like them (llama.cpp, Ollama, vLLM ...)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from ringfence.adapters.loop import MAX_TURNS
from ringfence.adapters.model import Message, Request, ToolCall, ToolChoice, Turn
from ringfence.adapters.provider import (
    OPENING,
    ModelParams,
    ProviderApi,
    SdkAdapter,
    arguments_to_send,
    check_client,
    chosen_tool,
    count_tokens,
    name_to_send,
    named_schema,
    package,
)
from ringfence.adapters.retry import CutOffError, ReportedError, ThrottlePolicy
from ringfence.runtime.events import ToolSchema
from ringfence.runtime.limits import TokenUsage

if TYPE_CHECKING:
    import openai

WITHHELD = "its answer was withheld"


class OpenAIAdapter(SdkAdapter):
    """Evaluates prompts with OpenAI's SDK. It owns the client that it makes: `close` it, or use it by ``with``."""

    provider = "openai"

    def __init__(
        self,
        model: str,
        *,
        api: Literal["responses", "chat"] = "responses",
        base_url: str | None = None,
        api_key: str | None = None,
        client: openai.OpenAI | None = None,
        params: ModelParams | None = None,
        tool_choice: ToolChoice = "auto",
        strict_tools: bool = False,
        native_output: bool = True,
        stream: bool = True,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """
        Args:
            api: "chat" for servers that are compatible, but have no Responses.
            base_url: such as ``http://127.0.0.1:8080/v1``; left out, ``OPENAI_BASE_URL``, else OpenAI itself.
            api_key: left out, ``OPENAI_API_KEY``; a server at ``base_url`` may need none.
            client: one that is yours, in place of the two. Its own retries are not used.
            strict_tools: ask for arguments that are sure to fit, of every tool whose schema allows it. A model has to
                give every argument then, also those with a default.
            native_output: say a structured output by the provider's own means; else in words, for servers that cannot.

        Raises:
            ImportError: the SDK is not installed.
            ValueError: no key, or parameters that do not go together.
        """
        sdk: Any = package("openai", extra="openai")
        check_client(client, sdk.OpenAI, is_configured=base_url is not None or api_key is not None)
        make = {"responses": ResponsesApi, "chat": ChatApi}[api]
        options = (params or ModelParams()).under(make.PARAMS, make.__name__.removesuffix("Api"))
        owned: openai.OpenAI | None = None
        if client is None:
            try:
                client = owned = sdk.OpenAI(base_url=base_url, api_key=api_key)
            except sdk.OpenAIError as error:
                if base_url is None:
                    raise ValueError("OpenAI needs a key: set the environment variable OPENAI_API_KEY") from error
                client = owned = sdk.OpenAI(base_url=base_url, api_key="none")
        assert client is not None
        client = client.with_options(max_retries=0)
        self.connect(
            make(client, model, options, strict_tools=strict_tools, native_output=native_output),
            sdk,
            owned,
            tool_choice=tool_choice,
            stream=stream,
            throttle=throttle,
            max_turns=max_turns,
        )


class ResponsesApi(ProviderApi):
    """OpenAI's Responses, without anything kept at the provider: every request has the whole conversation."""

    PARAMS = {"max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}  # noqa: RUF012
    ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})

    def arguments(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, **self.options}
        found |= {"store": False, "include": ["reasoning.encrypted_content"]}
        found["input"] = list(_items(request.messages, self.output_in_words(request)))
        if request.tools:
            found["tools"] = [self._tool(tool) for tool in request.tools]
            name = chosen_tool(request)
            found["tool_choice"] = request.tool_choice if name is None else {"type": "function", "name": name}
        if request.output_schema is not None and self.native_output:
            found["text"] = {"format": {"type": "json_schema", **named_schema(request, request.output_schema)}}
        return found

    def _tool(self, tool: ToolSchema) -> dict[str, Any]:
        strict = self.strict_parameters(tool)
        return {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": strict or tool.parameters,
            "strict": strict is not None,  # left out, it would be true
        }

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        return self.client.responses.create(**arguments, stream=stream, timeout=seconds)

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
        refusal: list[str] = []
        calls: list[ToolCall] = []
        for item in answer.output:
            if item.type == "function_call":
                calls.append(ToolCall(item.call_id, item.name, item.arguments or ""))
            elif item.type == "message":
                text += [part.text for part in item.content if part.type == "output_text"]
                refusal += [part.refusal for part in item.content if part.type == "refusal"]
        usage = _usage(answer.usage, "input_tokens", "output_tokens")
        if refusal or cut == "content_filter":
            return Turn("".join(refusal) or WITHHELD, (), usage, ended="refused")
        raw = [item.to_dict(mode="json", warnings=False) for item in answer.output]
        ended = "cut" if answer.status == "incomplete" else "whole"
        return Turn("".join(text), tuple(calls), usage, raw=raw, ended=ended)

    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        for event in events:
            if event.type == "response.output_text.delta":
                on_text(event.delta)
            elif event.type in self.ENDS:
                return self.turn(event.response)
            elif event.type == "error":
                raise ReportedError(event.message, event.code)
        raise CutOffError("the answer broke off")


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
            yield from _items_to_send(message.turn)


def _items_to_send(turn: Turn) -> Iterable[dict[str, Any]]:
    """The items as they came, reasoning included; of the calls, what is sure to be taken back."""
    calls = iter(turn.tool_calls)
    for item in cast("list[dict[str, Any]]", turn.raw):
        if item.get("type") != "function_call":
            yield item
            continue
        call = next(calls)
        arguments = json.dumps(arguments_to_send(call))
        sent = {"call_id": call.call_id, "name": name_to_send(call), "arguments": arguments, "status": "completed"}
        yield {**item, **sent}


@dataclass(slots=True)
class _CallPieces:
    """One tool call, put together from the pieces of a stream."""

    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])


class ChatApi(ProviderApi):
    """OpenAI's Chat Completions, which most compatible servers speak as well."""

    PARAMS = {  # noqa: RUF012
        "max_tokens": "max_completion_tokens",
        **{each: each for each in ("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty")},
    }

    def arguments(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, **self.options}
        found["messages"] = _messages(request.messages, self.output_in_words(request))
        if request.tools:
            found["tools"] = [self._tool(tool) for tool in request.tools]
            name = chosen_tool(request)
            found["tool_choice"] = (
                request.tool_choice if name is None else {"type": "function", "function": {"name": name}}
            )
        if request.output_schema is not None and self.native_output:
            schema = named_schema(request, request.output_schema)
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found

    def _tool(self, tool: ToolSchema) -> dict[str, Any]:
        strict = self.strict_parameters(tool)
        function = {"name": tool.name, "description": tool.description, "parameters": strict or tool.parameters}
        return {"type": "function", "function": {**function, **({"strict": True} if strict else {})}}

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        if stream:
            arguments = {**arguments, "stream": True, "stream_options": {"include_usage": True}}
        return self.client.chat.completions.create(**arguments, timeout=seconds)

    def answer(self, record: Mapping[str, Any]) -> Any:
        from openai.types.chat import ChatCompletion

        return ChatCompletion.construct(**record)

    def turn(self, answer: Any) -> Turn:
        choice = answer.choices[0]
        message = choice.message
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments or "") for call in message.tool_calls or ()
        )
        return _chat_turn(_text(message.content), message.refusal, calls, choice.finish_reason, _chat_usage(answer))

    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        text: list[str] = []
        refusal: list[str] = []
        calls: list[_CallPieces] = []
        by_index: dict[int | None, _CallPieces] = {}
        finished: str | None = None
        usage: TokenUsage | None = None
        for chunk in events:
            usage = _chat_usage(chunk) or usage
            for choice in chunk.choices[:1]:
                finished = choice.finish_reason or finished
                delta = choice.delta
                text.append(_text(delta.content))
                refusal.append(delta.refusal or "")
                on_text(text[-1])
                for piece in delta.tool_calls or ():
                    call = by_index.get(piece.index)
                    if call is None or (piece.id and call.call_id and piece.id != call.call_id):
                        call = by_index[piece.index] = _CallPieces()  # some servers give all calls one index, or none
                        calls.append(call)
                    call.call_id = piece.id or call.call_id
                    if piece.function is not None:
                        call.name += piece.function.name or ""
                        call.arguments.append(piece.function.arguments or "")
        whole = tuple(ToolCall(call.call_id, call.name, "".join(call.arguments)) for call in calls)
        return _chat_turn("".join(text), "".join(refusal), whole, finished, usage)


def _text(content: Any) -> str:
    """The text of an answer. Some servers send a list of parts, with the text in some of them."""
    if not isinstance(content, list):
        return content or ""
    parts = cast("list[Mapping[str, Any]]", content)
    return "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))


def _chat_turn(
    text: str, refusal: str | None, calls: tuple[ToolCall, ...], finished: str | None, usage: TokenUsage | None
) -> Turn:
    if finished is None:
        raise CutOffError("the answer broke off")
    if refusal or finished == "content_filter":
        return Turn(refusal or text or WITHHELD, (), usage, ended="refused")
    return Turn(text, calls, usage, ended="cut" if finished == "length" else "whole")


def _chat_usage(answer: Any) -> TokenUsage | None:
    return _usage(answer.usage, "prompt_tokens", "completion_tokens")


def _usage(found: Any, inputs: str, outputs: str) -> TokenUsage | None:
    if found is None:
        return None
    cached = count_tokens(found, f"{inputs}_details.cached_tokens")
    return TokenUsage(count_tokens(found, inputs), count_tokens(found, outputs), cached)


def _messages(messages: Iterable[Message], words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "system":
            found.append({"role": "system", "content": message.text + words})
            found.append({"role": "user", "content": OPENING})
        elif message.role == "user" and found and found[-1]["role"] == "user":
            found[-1]["content"] += f"\n\n{message.text}"  # templates of many models take no two in a row
        elif message.role == "tool":
            found.append({"role": "tool", "tool_call_id": message.call_id, "content": message.text})
        else:
            calls = [_call_to_send(call) for call in (message.turn.tool_calls if message.turn is not None else ())]
            sent: dict[str, Any] = {"role": message.role, "content": message.text}
            found.append({**sent, "tool_calls": calls} if calls else sent)
    return found


def _call_to_send(call: ToolCall) -> dict[str, Any]:
    function = {"name": name_to_send(call), "arguments": json.dumps(arguments_to_send(call))}
    return {"id": call.call_id, "type": "function", "function": function}
