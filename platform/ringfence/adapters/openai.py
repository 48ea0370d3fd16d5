"""The adapter of OpenAI's APIs, and of every server that is compatible with them (llama.cpp, Ollama, vLLM ...)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from ringfence.adapters.model import Request, ToolCall, Turn
from ringfence.adapters.provider import (
    OPENING,
    AdapterOptions,
    ModelParams,
    ProviderApi,
    SdkAdapter,
    arguments_to_send,
    count_tokens,
    name_to_send,
    named_schema,
    package,
    raw_of,
    schema_in_words,
)
from ringfence.adapters.retry import CUT_OFF, AnswerError, error_of
from ringfence.limits import TokenUsage
from ringfence.session.events import ToolSchema

if TYPE_CHECKING:
    import openai

WITHHELD = "its answer was withheld"
CUT = ("length", "max_tokens", "model_length", "MAX_TOKENS")
"""The reasons of servers for an answer that has reached the limit of tokens."""
RESPONSES_PARAMS = {"max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}
CHAT_PARAMS = {
    "max_tokens": "max_completion_tokens",
    **{each: each for each in ("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty")},
}


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
        **options: Unpack[AdapterOptions],
    ) -> None:
        """
        Args:
            api: "responses", or "chat" for compatible servers without the Responses API.
            base_url: The server, such as ``http://127.0.0.1:8080/v1``. The default is ``OPENAI_BASE_URL``, or else
                OpenAI itself.
            api_key: The default is ``OPENAI_API_KEY``. A server at ``base_url`` may need no key.
            client: A client of your own, instead of ``base_url`` and ``api_key``. Its retries are not used.
            options: See `AdapterOptions`.

        Raises:
            ImportError: The SDK is not installed.
            ValueError: There is no key, or two parameters exclude each other.
        """
        sdk: Any = package("openai", extra="openai")
        if client is not None and (base_url, api_key) != (None, None):
            raise ValueError("give a client, or a base_url and an api_key, not both")
        super().__init__(model, **options)
        params = params or ModelParams()
        if api == "responses":
            self._arguments = params.under(RESPONSES_PARAMS, "Responses")
        else:
            usage = {"stream_options": {"include_usage": True}} if self._stream else {}
            self._arguments = usage | params.under(CHAT_PARAMS, "Chat Completions")
        if client is None:
            try:
                self._owned = sdk.OpenAI(base_url=base_url, api_key=api_key)
            except sdk.OpenAIError as error:
                if base_url is None:
                    raise ValueError("OpenAI needs a key: set the environment variable OPENAI_API_KEY") from error
                self._owned = sdk.OpenAI(base_url=base_url, api_key="none")
        used: openai.OpenAI = (client or self._owned).with_options(max_retries=0)
        self._server = str(used.base_url)
        self._api = ResponsesApi() if api == "responses" else ChatApi()
        method = used.responses if api == "responses" else used.chat.completions
        self._create = method.with_raw_response.create


def _function(tool: ToolSchema) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


class ResponsesApi(ProviderApi):
    """OpenAI's Responses API. The provider stores nothing: every request has the whole conversation."""

    def arguments(self, request: Request, *, native_output: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"store": False}
        found["include"] = ["reasoning.encrypted_content"]
        items: list[dict[str, Any]] = []
        for message in request.messages:
            if message.role == "tool":
                items.append({"type": "function_call_output", "call_id": message.call_id, "output": message.text})
            elif message.turn is not None:
                items += _items_to_send(message.turn)
            else:
                items.append({"role": message.role, "content": message.text})
            if message.role == "system":
                items.append({"role": "user", "content": OPENING})
        found["input"] = items
        if request.output_schema is not None and native_output:
            found["text"] = {"format": {"type": "json_schema", **named_schema(request, request.output_schema)}}
        elif request.output_schema is not None:
            items[0]["content"] += schema_in_words(request.output_schema)
        if request.tools:
            # The API's default is strict, where a model has to give every argument, even one with a default.
            found["tools"] = [{"type": "function", **_function(tool), "strict": False} for tool in request.tools]
            choice = request.tool_choice
            found["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", **choice}
        return found

    def turn(self, answer: Any) -> Turn:
        status, details = answer.get("status"), answer.get("incomplete_details")
        if answer.get("error") or status == "failed":
            raise error_of(answer, "the response failed")
        if status not in ("completed", "incomplete"):
            raise AnswerError(f"the answer is {status}", CUT_OFF)
        output = answer["output"]
        calls = tuple(
            ToolCall(item.get("call_id") or item.get("id"), item.get("name"), item.get("arguments") or "")
            for item in output
            if item["type"] == "function_call"
        )
        parts = [part for item in output if item["type"] == "message" for part in item["content"] or ()]
        text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        refusal = "".join(part["refusal"] for part in parts if part["type"] == "refusal")
        usage = _usage(answer.get("usage"), "input_tokens", "output_tokens")
        if refusal or (details and details["reason"] == "content_filter"):
            return Turn(refusal or WITHHELD, (), usage, ended="refused")
        return Turn(text, calls, usage, raw={"responses": output}, ended="cut" if status == "incomplete" else "whole")

    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        items: list[dict[str, Any]] = []
        for event in events:
            if event.type == "response.output_text.delta":
                on_text(event.delta)
            elif event.type == "response.output_item.done":
                items.append(event.item.to_dict(mode="json", warnings=False))
            elif event.type in ("response.completed", "response.incomplete", "response.failed"):
                answer = event.response.to_dict(mode="json", warnings=False)
                return self.turn({**answer, "output": answer.get("output") or items})  # some servers leave it empty
            elif event.type == "error":
                raise AnswerError(event.message, event.code)
        raise AnswerError("the answer broke off", CUT_OFF)


def _items_to_send(turn: Turn) -> Iterable[dict[str, Any]]:
    """Yield the items of a turn for the next request: the provider's own ones unchanged, and valid calls."""
    calls = iter(turn.tool_calls)
    text = [{"role": "assistant", "content": turn.text}] if turn.text.strip() else []
    rebuilt: list[dict[str, Any]] = [*text, *({"type": "function_call"} for _ in turn.tool_calls)]
    for item in raw_of(turn, "responses") or rebuilt:
        if item.get("type") == "function_call":
            call = next(calls)
            arguments = json.dumps(arguments_to_send(call))
            sent = {"call_id": call.call_id, "name": name_to_send(call), "arguments": arguments, "status": "completed"}
            yield {**item, **sent}
        else:
            yield item


class ChatApi(ProviderApi):
    """OpenAI's Chat Completions API, which most compatible servers have too."""

    def arguments(self, request: Request, *, native_output: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        messages = found["messages"] = list[dict[str, Any]]()
        for message in request.messages:
            if message.role == "user" and messages[-1]["role"] == "user":
                messages[-1]["content"] += f"\n\n{message.text}"  # many chat templates reject two in a row
                continue
            sent: dict[str, Any] = {"role": message.role, "content": message.text}
            if message.role == "tool":
                sent["tool_call_id"] = message.call_id
            if message.turn is not None and message.turn.tool_calls:
                sent["tool_calls"] = [_call_to_send(call) for call in message.turn.tool_calls]
            messages.append(sent)
            if message.role == "system":
                messages.append({"role": "user", "content": OPENING})
        if request.output_schema is not None and native_output:
            schema = named_schema(request, request.output_schema)
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif request.output_schema is not None:
            messages[0]["content"] += schema_in_words(request.output_schema)
        if request.tools:
            found["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools]
            choice = request.tool_choice
            found["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": {**choice}}
        return found

    def turn(self, answer: Any) -> Turn:
        if answer.get("error") or not answer.get("choices"):
            raise error_of(answer, "the answer has no choices")
        choice = answer["choices"][0]
        finished: Any = choice.get("finish_reason")
        message: dict[str, Any] = choice.get("message") or {}
        if choice.get("error") or finished == "error":
            raise error_of({"error": choice.get("error")}, "the answer ended with an error")
        if finished is None:
            raise AnswerError("the answer broke off", CUT_OFF)
        usage = _usage(answer.get("usage"), "prompt_tokens", "completion_tokens")
        text, refusal = _text(message.get("content")), message.get("refusal")
        if refusal or finished == "content_filter":
            return Turn(refusal or text or WITHHELD, (), usage, ended="refused")
        asked: list[dict[str, Any]] = message.get("tool_calls") or []
        calls = tuple(_call_of(call.get("id"), call.get("function") or {}) for call in asked)
        return Turn(text, calls, usage, ended="cut" if finished in CUT else "whole")

    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        """Build the turn from the events of a stream."""
        text, refusal = "", ""
        calls = _StreamedCalls()
        finished: str | None = None
        usage: Any = None
        for chunk in events:
            usage = chunk.usage or usage
            for choice in (chunk.choices or ())[:1]:
                finished = choice.finish_reason or finished
                if (delta := getattr(choice, "delta", None)) is None:
                    continue
                piece = _text(delta.content)
                on_text(piece)
                text += piece
                refusal += delta.refusal or ""
                for part in delta.tool_calls or ():
                    calls.add(part)
        message = {"content": text, "refusal": refusal, "tool_calls": calls.whole}
        return self.turn({"choices": [{"message": message, "finish_reason": finished}], "usage": usage})


def _call_of(call_id: Any, function: Mapping[str, Any]) -> ToolCall:
    return ToolCall(call_id, cast("Any", function.get("name")), function.get("arguments") or "")


class _StreamedCalls:
    """The tool calls of a stream, put together from their parts."""

    def __init__(self) -> None:
        self.whole: list[dict[str, Any]] = []
        self._by_index: dict[object, dict[str, Any]] = {}

    def add(self, part: Any) -> None:
        name = getattr(part.function, "name", None) or ""
        arguments = getattr(part.function, "arguments", None) or ""
        call = self._by_index.get(part.index)
        if call is None or (name and self._is_another(call, part.id)):
            call = self._by_index[part.index] = {"id": "", "function": {"name": "", "arguments": ""}}
            self.whole.append(call)
        call["id"] = call["id"] or part.id
        function = call["function"]
        if not function["arguments"] and name != function["name"]:  # some servers repeat the name in each part
            function["name"] += name
        if isinstance(arguments, str) and isinstance(function["arguments"], str):
            function["arguments"] += arguments
        elif arguments:  # some servers send an object, in one piece
            function["arguments"] = arguments

    @staticmethod
    def _is_another(call: Mapping[str, Any], call_id: object) -> bool:
        """Whether a part with a name begins another call. Some servers send one index for all, or none, and no ids."""
        if call_id and call["id"]:
            return call_id != call["id"]
        return bool(call["function"]["arguments"]) and not isinstance(_json(call["function"]["arguments"]), str)


def _json(arguments: Any) -> object:
    """The value of arguments that are whole; the text of others."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _call_to_send(call: ToolCall) -> dict[str, Any]:
    function = {"name": name_to_send(call), "arguments": json.dumps(arguments_to_send(call))}
    return {"id": call.call_id, "type": "function", "function": function}


def _text(content: Any) -> str:
    """The text of an answer. Some servers send a list of parts of which some are text."""
    if not isinstance(content, list):
        return content or ""
    parts: list[Any] = [{"text": part} if isinstance(part, str) else part for part in cast("list[Any]", content)]
    return "".join(part["text"] for part in parts if part.get("type", "text") in ("text", "output_text"))


def _usage(found: Any, inputs: str, outputs: str) -> TokenUsage | None:
    if found is None:
        return None
    cached = count_tokens(found, f"{inputs}_details", "cached_tokens")
    return TokenUsage(count_tokens(found, inputs), count_tokens(found, outputs), cached)
