"""Anthropic's models, by the Messages API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Unpack

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
    package,
    raw_of,
    schema_in_words,
)
from ringfence.adapters.retry import CUT_OFF, AnswerError, error_of
from ringfence.adapters.strict_schema import strict_schema
from ringfence.limits import TokenUsage

if TYPE_CHECKING:
    import anthropic

MAX_TOKENS = 16_384
"""The default limit of tokens of one turn. All recent models allow as many."""
PARAMS = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "stop": "stop_sequences"}
DELTA_KEYS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""Maps the type of a stream's delta to the key of the block whose value the delta continues."""
INPUT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


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
        cache: bool = True,
        **options: Unpack[AdapterOptions],
    ) -> None:
        """
        Args:
            base_url: The server, such as ``http://127.0.0.1:8080``, without a version. The default is
                ``ANTHROPIC_BASE_URL``.
            api_key: The default is ``ANTHROPIC_API_KEY``, or another credential that the SDK finds. A server at
                ``base_url`` may need no key.
            client: A client of your own, instead of ``base_url`` and ``api_key``. Its retries are not used.
            cache: Whether the provider caches the conversation, which makes the next turn cheaper.
            options: See `AdapterOptions`.

        Raises:
            ImportError: The SDK is not installed.
            ValueError: There is no key, or two parameters exclude each other.
        """
        sdk: Any = package("anthropic", extra="anthropic")
        if client is not None and (base_url, api_key) != (None, None):
            raise ValueError("give a client, or a base_url and an api_key, not both")
        super().__init__(model, **options)
        sent: dict[str, Any] = {"max_tokens": MAX_TOKENS, **(params or ModelParams()).under(PARAMS, "Messages")}
        # The SDK's method has no arguments for these two parameters.
        body = {name: sent.pop(name) for name in ("temperature", "top_p") if name in sent}
        sent["extra_body"] = body | sent.pop("extra_body", {})
        self._arguments = {**sent, "cache_control": {"type": "ephemeral"}} if cache else sent
        if client is None:
            made: anthropic.Anthropic = sdk.Anthropic(base_url=base_url, api_key=api_key)
            if made.api_key is None and made.auth_token is None and getattr(made, "credentials", None) is None:
                made.close()
                if base_url is None:
                    raise ValueError("Anthropic needs a key: set the environment variable ANTHROPIC_API_KEY")
                made = sdk.Anthropic(base_url=base_url, api_key="none")
            client = self._owned = made
        self._server = str(client.base_url)
        self._api = MessagesApi()
        self._create = client.with_options(max_retries=0).messages.with_raw_response.create


class MessagesApi(ProviderApi):
    """Anthropic's Messages API."""

    def arguments(self, request: Request, *, native_output: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        # The API takes one user message between two turns: all answers to the calls of a turn go into it.
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": OPENING}]}]
        system: list[str] = []
        for message in request.messages:
            if message.role == "system":
                system.append(message.text)
            elif message.turn is not None:
                messages.append({"role": "assistant", "content": list(_blocks_to_send(message.turn))})
                messages.append({"role": "user", "content": []})
            elif message.role == "tool":
                answer = {"type": "tool_result", "tool_use_id": message.call_id, "content": message.text}
                messages[-1]["content"].append({**answer, "is_error": True} if message.failed else answer)
            else:
                messages[-1]["content"].append({"type": "text", "text": message.text})
        found["messages"] = messages
        found["system"] = "\n\n".join(system)
        if (schema := request.output_schema) is not None:
            strict = strict_schema(schema) if native_output else None
            if strict is not None:
                found["output_config"] = {"format": {"type": "json_schema", "schema": strict}}
            else:
                found["system"] += schema_in_words(schema)
        if request.tools:
            tools = found["tools"] = list[dict[str, Any]]()
            for tool in request.tools:
                sent = {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
                tools.append({**sent, "input_examples": list(tool.examples)} if tool.examples else sent)
            choice = request.tool_choice
            if isinstance(choice, str):
                found["tool_choice"] = {"type": "any" if choice == "required" else choice}
            else:
                found["tool_choice"] = {"type": "tool", **choice}
        return found

    def turn(self, answer: Any) -> Turn:
        if answer.get("error"):
            raise error_of(answer, "the answer is an error")
        content, stopped = answer["content"], answer.get("stop_reason")
        # Some servers send a text, or null.
        blocks: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if stopped is None:
            raise AnswerError("the answer broke off", CUT_OFF)
        if stopped == "pause_turn":  # only for tools that the provider runs itself; the request offers none
            raise AnswerError("the provider paused its answer and did not end it", stopped)
        counts, usage = _counts(answer.get("usage")), None
        if counts:
            inputs = sum(counts.get(name, 0) for name in INPUT_COUNTS)  # the API counts cached input separately
            cached, written = counts.get("cache_read_input_tokens"), counts.get("cache_creation_input_tokens")
            usage = TokenUsage(inputs, counts.get("output_tokens"), cached, written)
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        if stopped == "refusal":
            return Turn(text or "it gave no reason", (), usage, ended="refused")
        calls = tuple(
            ToolCall(block.get("id"), block.get("name"), block.get("input") or {})
            for block in blocks
            if block["type"] == "tool_use"
        )
        ended = "cut" if stopped in ("max_tokens", "model_context_window_exceeded") else "whole"
        return Turn(text, calls, usage, raw={"messages": blocks}, ended=ended)

    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        """Build the turn from the events of a stream."""
        blocks: dict[int, dict[str, Any]] = {}
        stopped: str | None = None
        usage: dict[str, Any] = {}
        for event in events:
            if event.type == "message_start":
                usage |= _counts(event.message.usage)
            elif event.type == "content_block_start":
                blocks[event.index] = event.content_block.to_dict(mode="json", warnings=False)
            elif event.type == "content_block_delta":
                block, delta = blocks[event.index], event.delta
                if delta.type == "text_delta":
                    on_text(delta.text)
                if (key := DELTA_KEYS.get(delta.type)) is not None:
                    block[key] = block.get(key, "") + getattr(delta, key)
                elif delta.type == "input_json_delta":
                    # The SDK's parser turns truncated arguments into ``{}``; here they stay text. Some servers send
                    # all arguments as an object at the start of the block, and no text after it.
                    before = block.get("input")
                    block["input"] = (before if isinstance(before, str) else "") + delta.partial_json
            elif event.type == "message_delta":
                stopped = event.delta.stop_reason or stopped
                usage |= _counts(event.usage)
        content = [blocks[index] for index in sorted(blocks)]
        return self.turn({"content": content, "stop_reason": stopped, "usage": usage})


def _counts(usage: Any) -> dict[str, int]:
    found = {name: count_tokens(usage, name) for name in (*INPUT_COUNTS, "output_tokens")}
    return {name: count for name, count in found.items() if count is not None}


def _blocks_to_send(turn: Turn) -> Iterable[dict[str, Any]]:
    """Yield the blocks of a turn for the next request: the provider's own ones unchanged, and valid calls."""
    calls = iter(turn.tool_calls)
    rebuilt = [{"type": "text", "text": turn.text}, *({"type": "tool_use"} for _ in turn.tool_calls)]
    for block in raw_of(turn, "messages") or rebuilt:
        if block["type"] == "tool_use":
            call = next(calls)
            yield {**block, "id": call.call_id, "name": name_to_send(call), "input": arguments_to_send(call)}
        elif block["type"] != "text" or block["text"].strip():  # the API rejects an empty text
            yield block
