"""Anthropic's models, by the Messages API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from ringfence.adapters.core import Message, Request, ToolCall, ToolChoice, Turn
from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.model_params import ModelParams
from ringfence.adapters.provider import (
    OPENING,
    CutOffError,
    ProviderApi,
    ReportedError,
    arguments_to_send,
    ask,
    check_client,
    chosen_tool,
    name_to_send,
    output_in_words,
    package,
    tokens,
)
from ringfence.adapters.strict_schema import strict_schema
from ringfence.adapters.throttling import ThrottlePolicy
from ringfence.runtime.events import ToolSchema
from ringfence.runtime.limits import TokenUsage

if TYPE_CHECKING:
    import anthropic

MAX_TOKENS = 16_384
"""Of one turn, where nothing else is said; every model of the last years can write so much."""
CUT = frozenset({"max_tokens", "model_context_window_exceeded"})


class AnthropicAdapter(LoopAdapter):
    """Evaluates prompts with Anthropic's SDK. It owns the client that it makes: `close` it, or use it by ``with``."""

    provider = "anthropic"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        client: anthropic.Anthropic | None = None,
        params: ModelParams | None = None,
        tool_choice: ToolChoice = "auto",
        strict_tools: bool = False,
        native_output: bool = True,
        cache: bool = True,
        stream: bool = True,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """
        Args:
            base_url: such as ``http://127.0.0.1:8080``, without a version; left out, ``ANTHROPIC_BASE_URL``.
            api_key: left out, ``ANTHROPIC_API_KEY`` and whatever else the SDK knows; a server at ``base_url`` may need
                none.
            client: one that is yours, in place of the two. Its own retries are not used.
            strict_tools, native_output: as of `OpenAIAdapter`.
            cache: let the provider remember the conversation so far, which makes the next turn cheaper.

        Raises:
            ImportError: the SDK is not installed.
            ValueError: no key, or parameters that do not go together.
        """
        sdk: Any = package("anthropic", extra="anthropic")
        check_client(client, sdk.Anthropic)
        if client is not None and (base_url is not None or api_key is not None):
            raise ValueError("give a client, or a base_url and an api_key, not both")
        self._owned: anthropic.Anthropic | None = None
        if client is None:
            found: anthropic.Anthropic = sdk.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)
            if found.api_key is None and found.auth_token is None and getattr(found, "credentials", None) is None:
                found.close()
                if base_url is None:
                    raise ValueError("Anthropic needs a key: set the environment variable ANTHROPIC_API_KEY")
                found = sdk.Anthropic(base_url=base_url, api_key="none", max_retries=0)
            client = self._owned = found
        self.model = model
        self.tool_choice = tool_choice
        self.max_turns = max_turns
        self._sdk = sdk
        self._stream = stream
        self._throttle = throttle or ThrottlePolicy()
        options = (params or ModelParams()).of_messages(MAX_TOKENS)
        if cache:
            options["cache_control"] = {"type": "ephemeral"}
        self._wire: ProviderApi = MessagesWire(
            client.with_options(max_retries=0),
            model,
            options,
            strict_tools=strict_tools,
            native_output=native_output,
        )

    def respond(self, request: Request) -> Turn:
        return ask(self._wire, request, sdk=self._sdk, policy=self._throttle, stream=self._stream)

    def close(self) -> None:
        """Close the connections of a client of its own."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MessagesWire:
    """A `ProviderApi`."""

    def __init__(
        self,
        client: anthropic.Anthropic,
        model: str,
        options: Mapping[str, Any],
        *,
        strict_tools: bool,
        native_output: bool,
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._strict_tools = strict_tools
        self._native_output = native_output

    def arguments(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self._model, **self._options}
        schema = request.output_schema
        strict = strict_schema(schema) if schema is not None and self._native_output else None
        words = output_in_words(schema) if schema is not None and strict is None else ""
        found["system"] = "\n\n".join(message.text for message in request.messages if message.role == "system") + words
        found["messages"] = _messages(request.messages)
        if request.tools:
            found["tools"] = [self._tool(tool) for tool in request.tools]
            name = chosen_tool(request)
            kind = {"required": "any"}.get(str(request.tool_choice), request.tool_choice)
            found["tool_choice"] = {"type": kind} if name is None else {"type": "tool", "name": name}
        if strict is not None:
            found["output_config"] = {"format": {"type": "json_schema", "schema": strict}}
        return found

    def _tool(self, tool: ToolSchema) -> dict[str, Any]:
        strict = strict_schema(tool.parameters) if self._strict_tools else None
        said: dict[str, Any] = {"name": tool.name, "description": tool.description}
        said["input_schema"] = strict or tool.parameters
        if strict is not None:
            said["strict"] = True
        if tool.examples:
            said["input_examples"] = list(tool.examples)
        return said

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        return self._client.messages.create(**arguments, stream=stream, timeout=seconds)

    def answer(self, record: Mapping[str, Any]) -> Any:
        from anthropic.types import Message as Answer

        return Answer.construct(**record)

    def turn(self, answer: Any) -> Turn:
        blocks = [block.to_dict(mode="json", warnings=False) for block in answer.content]
        return _turn(blocks, answer.stop_reason, _usage(answer.usage, answer.usage))

    def turn_of_events(self, events: Iterable[Any], say: Callable[[str], None]) -> Turn:
        blocks: dict[int, dict[str, Any]] = {}
        begun: Any = None
        stopped: str | None = None
        usage: TokenUsage | None = None
        for event in events:
            if event.type == "message_start":
                begun = event.message.usage
            elif event.type == "content_block_start":
                blocks[event.index] = event.content_block.to_dict(mode="json", warnings=False)
            elif event.type == "content_block_delta":
                _add(blocks[event.index], event.delta)
                if event.delta.type == "text_delta":
                    say(event.delta.text)
            elif event.type == "message_delta":
                stopped = event.delta.stop_reason or stopped
                usage = _usage(begun, event.usage)
        return _turn([blocks[index] for index in sorted(blocks)], stopped, usage)


def _add(block: dict[str, Any], delta: Any) -> None:
    """A piece of a block. The SDK's own parser makes ``{}`` of arguments that broke off; here they stay text."""
    match delta.type:
        case "text_delta":
            block["text"] = block.get("text", "") + delta.text
        case "input_json_delta":
            before = block.get("input")  # an object at the beginning, which is all where no text follows
            block["input"] = (before if isinstance(before, str) else "") + delta.partial_json
        case "thinking_delta":
            block["thinking"] = block.get("thinking", "") + delta.thinking
        case "signature_delta":
            block["signature"] = delta.signature
        case _:
            return


def _turn(blocks: list[dict[str, Any]], stopped: str | None, usage: TokenUsage | None) -> Turn:
    if stopped is None:
        raise CutOffError("the answer broke off")
    if stopped == "pause_turn":  # of a provider that runs tools of its own, which it was not offered
        raise ReportedError("the provider paused its answer and did not end it", stopped)
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    if stopped == "refusal":
        return Turn(text or "it gave no reason", (), usage, ended="refused")
    calls = tuple(
        ToolCall(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"
    )
    return Turn(text, calls, usage, raw=blocks, ended="cut" if stopped in CUT else "whole")


def _usage(begun: Any, ended: Any) -> TokenUsage | None:
    """What is told at the end counts, else what was told at the beginning. Cached input is counted apart there."""
    told = [tokens(ended, name) if tokens(ended, name) is not None else tokens(begun, name) for name in INPUT]
    output = tokens(ended, "output_tokens")
    if output is None and all(count is None for count in told):
        return None
    return TokenUsage(sum(count or 0 for count in told), output, told[1])


INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """What comes between two turns, such as the answers to the calls of one, goes into one message of the user."""
    found: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": OPENING}]}]
    for message in messages:
        if message.role == "assistant" and message.turn is not None:
            found.append({"role": "assistant", "content": list(_sent_back(message.turn))})
            found.append({"role": "user", "content": []})
        elif message.role == "tool":
            answer: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.call_id, "content": message.text}
            if message.failed:
                answer["is_error"] = True
            found[-1]["content"].append(answer)
        elif message.role == "user":
            found[-1]["content"].append({"type": "text", "text": message.text})
    return found


def _sent_back(turn: Turn) -> Iterable[dict[str, Any]]:
    """The blocks as they came, thinking included; of the calls, what is sure to be taken back."""
    calls = iter(turn.tool_calls)
    for block in cast("list[dict[str, Any]]", turn.raw):
        if block["type"] == "tool_use":
            call = next(calls)
            yield {**block, "id": call.call_id, "name": name_to_send(call), "input": arguments_to_send(call)}
        elif block["type"] != "text" or block["text"].strip():  # an empty text is not taken back
            yield block
