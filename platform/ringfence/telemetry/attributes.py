"""What events and receipts say, as attributes of spans."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ringfence import serde
from ringfence.adapters.model import Turn
from ringfence.runtime.events import RejectedToolParams, ToolCallStarted, ToolInvoked
from ringfence.runtime.limits import TokenUsage
from ringfence.runtime.receipts import Receipt
from ringfence.runtime.tool_result import sendable
from ringfence.telemetry import names

MAX_NAME_CHARACTERS = 128
MAX_CONTENT_CHARACTERS = 32_768
"""Of one attribute with content."""

Attributes = dict[str, str | int | Sequence[str]]

POLICY_DENIED, TIMEOUT, VALIDATION_ERROR, UNKNOWN_TOOL = "policy_denied", "timeout", "validation_error", "unknown_tool"
OTHER_OUTCOMES = {
    "failed": "tool_error",
    "interrupted": "interrupted",
    "doubtful": "rollback_failed",
    "rolled_back": "rolled_back",
}


def error_type(receipt: Receipt) -> str | None:
    """How a call failed, in one of few words; None for one that was committed."""
    match receipt.outcome:
        case "committed":
            return None
        case "denied":
            # The one thing besides a policy that denies is the deadline.
            return POLICY_DENIED if denied_by(receipt) is not None else TIMEOUT
        case "rejected":
            return VALIDATION_ERROR if isinstance(receipt.params, RejectedToolParams) else UNKNOWN_TOOL
        case other:
            return OTHER_OUTCOMES[other]


def denied_by(receipt: Receipt) -> str | None:
    """The policy that denied the call, if one did."""
    return next((verdict.policy for verdict in receipt.policies if not verdict.allowed), None)


def of_receipt(receipt: Receipt) -> Attributes:
    before, after = receipt.diff_bytes
    files = [change.after or change.before for change in receipt.changes]
    found: Attributes = {
        names.OUTCOME: receipt.outcome,
        names.RECEIPT: receipt.receipt_id,
        names.FILES_READ: len(receipt.read or ()),
        names.FILES_CHANGED: sum(file is not None and file.kind != "directory" for file in files),
        names.CONFLICTS: len(receipt.conflicts),
        names.BYTES_BEFORE: before,
        names.BYTES_AFTER: after,
    }
    for name, value in {
        names.ERROR_TYPE: error_type(receipt),
        names.DENIED_BY: denied_by(receipt),
        names.COMMIT: receipt.commit,
        names.EXIT_CODE: receipt.exit_code,
    }.items():
        if value is not None:
            found[name] = value
    return found


def of_call(tool: str, call_id: str, prompt_name: str, session_id: str) -> Attributes:
    return {
        names.OPERATION_NAME: "execute_tool",
        names.TOOL_NAME: short(tool),
        names.TOOL_TYPE: "function",
        names.TOOL_CALL_ID: short(call_id),
        names.AGENT_NAME: prompt_name,
        names.CONVERSATION_ID: session_id,
    }


def of_turn(turn: Turn) -> Attributes:
    return {names.FINISH_REASONS: [finish_reason(turn)], **of_usage(turn.usage or TokenUsage())}


def of_usage(usage: TokenUsage) -> Attributes:
    counts = {
        names.INPUT_TOKENS: usage.input_tokens,
        names.OUTPUT_TOKENS: usage.output_tokens,
        names.CACHED_TOKENS: usage.cached_tokens,
    }
    return {name: count for name, count in counts.items() if count is not None}


def finish_reason(turn: Turn) -> str:
    """In the words of the conventions, which are the same for all providers."""
    if turn.ended != "whole":
        return {"cut": "length", "refused": "content_filter"}[turn.ended]
    return "tool_call" if turn.tool_calls else "stop"


def arguments_of(call: ToolCallStarted) -> str:
    if isinstance(call.arguments, str):
        return bounded(call.arguments)
    return as_json(call.arguments or {})


def result_of(invoked: ToolInvoked) -> str:
    return as_json({"message": invoked.result.message, "output": bounded(invoked.rendered_output)})


def messages_of(turn: Turn) -> str:
    """A turn as the conventions write messages."""
    parts: list[Mapping[str, object]] = [{"type": "text", "content": turn.text}] if turn.text else []
    parts += [
        {"type": "tool_call", "id": call.call_id, "name": call.name, "arguments": call.arguments}
        for call in turn.tool_calls
    ]
    return as_json([{"role": "assistant", "parts": parts, "finish_reason": finish_reason(turn)}])


def as_json(value: object) -> str:
    try:
        return bounded(json.dumps(serde.dump_any(value), ensure_ascii=False))
    except (ValueError, TypeError, RecursionError) as error:
        return f"[no JSON holds it: {type(error).__name__}]"


def bounded(text: str) -> str:
    rest = len(text) - MAX_CONTENT_CHARACTERS
    return sendable(text if rest <= 0 else f"{text[:MAX_CONTENT_CHARACTERS]}[... {rest:,} more characters]")


def short(name: str) -> str:
    """What a model may have made up: as text that every exporter can write, and not of any length."""
    return sendable(name[:MAX_NAME_CHARACTERS])
