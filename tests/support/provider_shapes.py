"""How the providers write an answer: the shapes of four protocols, whole and as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.serde import STRICT_JSON

Turn = Mapping[str, Any]
"""As of a `ScriptedAdapter`."""
Event = tuple[str | None, object]
"""The name of a server-sent event, if it has one, and its data."""

PIECE = 7
"""Characters of text or of arguments in one event, so that every stream has several."""


def chat(turn: Turn) -> dict[str, Any]:
    refused = turn.get("ended") == "refused"
    message: dict[str, Any] = {"role": "assistant", "content": None if refused else turn.get("text", "")}
    message["refusal"] = turn.get("text") if refused else None
    if calls := _calls(turn):
        message["tool_calls"] = [_chat_call(call) for call in calls]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _chat_end(turn)}],
        "usage": _chat_usage(turn),
    }


def chat_events(turn: Turn) -> Iterator[Event]:
    def chunk(delta: Mapping[str, Any], end: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": end}
        return None, {**head, "choices": [choice]}

    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": "m"}
    yield chunk({"role": "assistant", "content": ""})
    key = "refusal" if turn.get("ended") == "refused" else "content"
    for piece in _pieces(turn.get("text", "")):
        yield chunk({key: piece})
    for index, call in enumerate(_calls(turn)):
        yield chunk({"tool_calls": [{"index": index, **_chat_call({**call, "arguments": ""})}]})
        for piece in _pieces(call["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, _chat_end(turn))
    yield None, {**head, "choices": [], "usage": _chat_usage(turn)}
    yield None, "[DONE]"


def _chat_call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}


def _chat_end(turn: Turn) -> str:
    if turn.get("ended") == "cut":
        return "length"
    return "tool_calls" if turn.get("tool_calls") else "stop"


def _chat_usage(turn: Turn) -> dict[str, Any] | None:
    if (usage := turn.get("usage")) is None:
        return None
    read, written = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    details = {"cached_tokens": usage.get("cached_tokens", 0)}
    whole = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {**whole, "prompt_tokens_details": details}


def responses(turn: Turn) -> dict[str, Any]:
    ended = turn.get("ended", "whole")
    part: dict[str, Any] = {"type": "output_text", "text": turn.get("text", ""), "annotations": []}
    if ended == "refused":
        part = {"type": "refusal", "refusal": turn.get("text", "")}
    status = "incomplete" if ended == "cut" else "completed"
    output: list[dict[str, Any]] = [
        {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "c2VjcmV0"},
        *(
            [{"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": [part]}]
            if turn.get("text")
            else []
        ),
        *(_responses_call(index, call, status) for index, call in enumerate(_calls(turn))),
    ]
    usage = turn.get("usage")
    return {
        **_responses_head(status),
        "incomplete_details": {"reason": "max_output_tokens"} if ended == "cut" else None,
        "output": output,
        "usage": usage and _responses_usage(usage),
    }


def responses_events(turn: Turn) -> Iterator[Event]:
    whole = responses(turn)
    begun: dict[str, Any] = {**_responses_head("in_progress"), "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        events.append(
            {"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress"}}
        )
        events += _responses_deltas(index, item)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    end = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    events.append({"type": end, "response": whole})
    for number, event in enumerate(events):
        yield str(event["type"]), {**event, "sequence_number": number}


def _responses_deltas(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message":
        kind, text = ("refusal", "refusal") if item["content"][0]["type"] == "refusal" else ("output_text", "text")
        for piece in _pieces(item["content"][0][text]):
            yield {"type": f"response.{kind}.delta", **place, "content_index": 0, "delta": piece, "logprobs": []}
    elif item["type"] == "function_call":
        for piece in _pieces(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}


def _responses_head(status: str) -> dict[str, Any]:
    return {
        "id": "resp_1",  # the same in all events: the SDK's own helper insists
        "object": "response",
        "created_at": 1_790_000_000,
        "model": "m",
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": 1.0,
        "top_p": 1.0,
    }


def _responses_call(index: int, call: Mapping[str, Any], status: str) -> dict[str, Any]:
    call_id, name, arguments = call["id"], call["name"], call["arguments"]
    if "input" in call:  # of a tool that takes text instead of an object
        return {
            "id": f"ctc_{index}",
            "type": "custom_tool_call",
            "call_id": call_id,
            "name": name,
            "input": call["input"],
        }
    place = {"id": f"fc_{index}", "type": "function_call", "status": status}
    if "namespace" in call:
        place["namespace"] = call["namespace"]
    return {**place, "call_id": call_id, "name": name, "arguments": arguments}


def _responses_usage(usage: Mapping[str, int]) -> dict[str, Any]:
    read, written = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0)},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def messages(turn: Turn) -> dict[str, Any]:
    text = [{"type": "text", "text": turn["text"]}] if turn.get("text") else []
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": _object(call["arguments"])}
        for call in _calls(turn)
    ]
    return {**_messages_head(turn), "content": [_THINKING, *text, *calls], "stop_reason": _messages_end(turn)}


def messages_events(turn: Turn) -> Iterator[Event]:
    def event(kind: str, **data: object) -> Event:
        return kind, {"type": kind, **data}

    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        (
            {"type": "thinking", "thinking": "", "signature": ""},
            [
                {"type": "thinking_delta", "thinking": _THINKING["thinking"]},
                {"type": "signature_delta", "signature": _THINKING["signature"]},
            ],
        )
    ]
    if turn.get("text"):
        blocks.append(
            ({"type": "text", "text": ""}, [{"type": "text_delta", "text": p} for p in _pieces(turn["text"])])
        )
    for call in _calls(turn):
        begun: dict[str, Any] = {"type": "tool_use", "id": call["id"], "name": call["name"], "input": {}}
        pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *_pieces(call["arguments"]))]
        blocks.append((begun, pieces))
    head: dict[str, Any] = {**_messages_head(turn), "content": [], "stop_reason": None}
    yield event("message_start", message={**head, "usage": {**head["usage"], "output_tokens": 1}})
    yield event("ping")
    for index, (begun, deltas) in enumerate(blocks):
        yield event("content_block_start", index=index, content_block=begun)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    stop = {"stop_reason": _messages_end(turn), "stop_sequence": None}
    yield event("message_delta", delta=stop, usage={"output_tokens": head["usage"]["output_tokens"]})
    yield event("message_stop")


_THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"}


def _messages_head(turn: Turn) -> dict[str, Any]:
    usage: Mapping[str, int] = turn.get("usage") or {}
    cached, put = usage.get("cached_tokens", 0), usage.get("cache_write_tokens", 0)
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.get("input_tokens", 0) - cached - put,  # counted apart
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": put,
            "output_tokens": usage.get("output_tokens", 0),
        },
    }


def _messages_end(turn: Turn) -> str:
    ended = turn.get("ended", "whole")
    if ended != "whole":
        return {"cut": "max_tokens", "refused": "refusal"}[ended]
    return "tool_use" if turn.get("tool_calls") else "end_turn"


def contents(turn: Turn) -> dict[str, Any]:
    text = [{"text": turn["text"]}] if turn.get("text") else []
    calls = [{"functionCall": {"name": call["name"], "args": _object(call["arguments"])}} for call in _calls(turn)]
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    content = {"role": "model", "parts": [*text, *calls]}
    return {"candidates": [{"content": content, "finishReason": "STOP", "index": 0}], "usageMetadata": usage}


def contents_events(turn: Turn) -> Iterator[Event]:
    yield None, contents(turn)


def _calls(turn: Turn) -> Sequence[dict[str, Any]]:
    return [
        {"id": f"call_{index}", **call, "arguments": _text(call.get("arguments", {}))}
        for index, call in enumerate(turn.get("tool_calls") or ())
    ]


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _object(text: str) -> object:
    """What is no proper JSON stays text, which no good server sends, and an adapter has to survive."""
    try:
        return STRICT_JSON.decode(text)
    except ValueError:
        return text


def _pieces(text: str) -> Sequence[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


@dataclass(frozen=True)
class Note:
    # No docstring: it would be in the schema of the parameters.
    text: str = "x"
    times: int = 1


@dataclass(frozen=True)
class Claim:
    # No docstring: it would be in the schema of the output.
    title: str
    certain: bool = True


def called(*texts: object) -> Turn:
    """A turn that calls the tool `note` with each text."""
    calls = [{"name": "note", "arguments": {"text": text}} for text in texts]
    return {"text": "so be it", "tool_calls": calls}
