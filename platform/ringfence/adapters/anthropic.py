"""Anthropic's models, by the Messages API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

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
    package,
    schema_in_words,
    strict_schema,
)
from ringfence.adapters.retry import CutOffError, ReportedError, ThrottlePolicy
from ringfence.runtime.events import ToolSchema
from ringfence.runtime.limits import TokenUsage

if TYPE_CHECKING:
    import anthropic

MAX_TOKENS = 16_384
"""Of one turn, where nothing else is said; every model of the last years can write so much."""
CUT = frozenset({"max_tokens", "model_context_window_exceeded"})
INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class AnthropicAdapter(SdkAdapter):
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
        check_client(client, sdk.Anthropic, is_configured=base_url is not None or api_key is not None)
        options = _options(params or ModelParams())
        if cache:
            options["cache_control"] = {"type": "ephemeral"}
        owned: anthropic.Anthropic | None = None
        if client is None:
            found: anthropic.Anthropic = sdk.Anthropic(base_url=base_url, api_key=api_key)
            if found.api_key is None and found.auth_token is None and getattr(found, "credentials", None) is None:
                found.close()
                if base_url is None:
                    raise ValueError("Anthropic needs a key: set the environment variable ANTHROPIC_API_KEY")
                found = sdk.Anthropic(base_url=base_url, api_key="none")
            client = owned = found
        client = client.with_options(max_retries=0)
        self.connect(
            MessagesApi(client, model, options, strict_tools=strict_tools, native_output=native_output),
            sdk,
            owned,
            tool_choice=tool_choice,
            stream=stream,
            throttle=throttle,
            max_turns=max_turns,
        )


def _options(params: ModelParams) -> dict[str, Any]:
    names = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "stop": "stop_sequences"}
    found: dict[str, Any] = {"max_tokens": MAX_TOKENS, **params.under(names, "Messages")}
    # The SDK's method has no arguments for these.
    body = {name: found.pop(name) for name in ("temperature", "top_p") if name in found}
    body |= found.pop("extra_body", {})
    return {**found, "extra_body": body} if body else found


class MessagesApi(ProviderApi):
    """Anthropic's Messages."""

    def arguments(self, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, **self.options}
        schema = request.output_schema
        strict = strict_schema(schema) if schema is not None and self.native_output else None
        words = schema_in_words(schema) if schema is not None and strict is None else ""
        found["system"] = "\n\n".join(message.text for message in request.messages if message.role == "system") + words
        found["messages"] = _messages(request.messages)
        if request.tools:
            found["tools"] = [self._tool(tool) for tool in request.tools]
            name = chosen_tool(request)
            kind = "any" if request.tool_choice == "required" else request.tool_choice
            found["tool_choice"] = {"type": kind} if name is None else {"type": "tool", "name": name}
        if strict is not None:
            found["output_config"] = {"format": {"type": "json_schema", "schema": strict}}
        return found

    def _tool(self, tool: ToolSchema) -> dict[str, Any]:
        strict = self.strict_parameters(tool)
        found: dict[str, Any] = {"name": tool.name, "description": tool.description}
        found["input_schema"] = strict or tool.parameters
        if strict is not None:
            found["strict"] = True
        if tool.examples:
            found["input_examples"] = list(tool.examples)
        return found

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        return self.client.messages.create(**arguments, stream=stream, timeout=seconds)

    def answer(self, record: Mapping[str, Any]) -> Any:
        from anthropic.types import Message as Answer

        return Answer.construct(**record)

    def turn(self, answer: Any) -> Turn:
        blocks = [block.to_dict(mode="json", warnings=False) for block in answer.content]
        return _turn(blocks, answer.stop_reason, _usage(answer.usage, answer.usage))

    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
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
                    on_text(event.delta.text)
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
    """The counts of the end, else those of the beginning. Cached input is counted apart there."""
    at_end = [count_tokens(ended, name) for name in INPUT]
    inputs = [count_tokens(begun, name) if count is None else count for name, count in zip(INPUT, at_end, strict=True)]
    output = count_tokens(ended, "output_tokens")
    if output is None and all(count is None for count in inputs):
        return None
    return TokenUsage(sum(count or 0 for count in inputs), output, inputs[1])


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Everything between two turns, such as the answers to the calls of one, is one message of the user."""
    found: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": OPENING}]}]
    for message in messages:
        if message.role == "assistant" and message.turn is not None:
            found.append({"role": "assistant", "content": list(_blocks_to_send(message.turn))})
            found.append({"role": "user", "content": []})
        elif message.role == "tool":
            answer: dict[str, Any] = {"type": "tool_result", "tool_use_id": message.call_id, "content": message.text}
            if message.failed:
                answer["is_error"] = True
            found[-1]["content"].append(answer)
        elif message.role == "user":
            found[-1]["content"].append({"type": "text", "text": message.text})
    return found


def _blocks_to_send(turn: Turn) -> Iterable[dict[str, Any]]:
    """The blocks as they came, thinking included; of the calls, what is sure to be taken back."""
    calls = iter(turn.tool_calls)
    for block in cast("list[dict[str, Any]]", turn.raw):
        if block["type"] == "tool_use":
            call = next(calls)
            yield {**block, "id": call.call_id, "name": name_to_send(call), "input": arguments_to_send(call)}
        elif block["type"] != "text" or block["text"].strip():  # an empty text is not taken back
            yield block
