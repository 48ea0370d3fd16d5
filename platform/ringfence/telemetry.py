"""Evaluations, model calls and tool calls as OpenTelemetry spans and metrics: the extra ``otel``.

Nothing else of this package imports OpenTelemetry. The attributes are named as in its GenAI conventions. Those are in
development, and the package that has them breaks between versions, so the names stand here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from ringfence import serde
from ringfence.adapters.model import EvaluationEnded, EvaluationStarted, ModelAnswered, ModelRequested, Turn
from ringfence.extras import missing
from ringfence.runtime.events import RejectedToolParams, ToolCallStarted, ToolInvoked
from ringfence.runtime.limits import TokenUsage
from ringfence.runtime.receipts import Receipt
from ringfence.runtime.session import Session
from ringfence.runtime.tool_result import sendable

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("opentelemetry"):
        raise
    raise ModuleNotFoundError(missing(error.name, "otel"), name=error.name) from None

__all__ = ["Telemetry"]

MAX_NAME_CHARACTERS = 128
MAX_CONTENT_CHARACTERS = 32_768
"""Of one attribute with content."""
CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CAPTURING = frozenset({"true", "1", "span_only", "span_and_event"})
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Boundaries of the histograms of durations."""
TOKENS = tuple(4**power for power in range(14))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
INTERRUPTED = "interrupted"
OTHER = "_OTHER"
"""In the place of a name that a model has made up."""
ERROR_TYPE = "error.type"
OUTCOME_ERRORS = {
    "failed": "tool_error",
    "interrupted": INTERRUPTED,
    "doubtful": "rollback_failed",
    "rolled_back": "rolled_back",
}

Attributes = dict[str, str | int | Sequence[str]]


@dataclass(slots=True, eq=False)
class _OpenSpan:
    """A span that has begun in this context, within that of ``outer``."""

    key: object
    span: Span
    token: Token[Context]
    outer: _OpenSpan | None
    labels: Attributes
    """The attributes of its measurements."""
    began: datetime
    captured: Attributes = field(default_factory=dict[str, Any])


_innermost: ContextVar[_OpenSpan | None] = ContextVar("ringfence_open_span", default=None)


class Telemetry:
    """Makes spans of the events of sessions: ``invoke_agent``, ``chat`` and ``execute_tool``, nested as the
    evaluations, the model's answers and the tool calls are, with those of other libraries in between.

    Any thread may evaluate. One session, or sessions with one dispatcher, are for one `Telemetry`.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        capture_content: bool | None = None,
    ) -> None:
        """
        Args:
            tracer_provider, meter_provider: left out, the global ones of OpenTelemetry.
            capture_content: have the arguments and results of tools and the model's words in the spans, too, which may
                hold anything; left out, ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` says so.
        """
        if capture_content is None:
            capture_content = os.environ.get(CAPTURE_VARIABLE, "").strip().lower() in CAPTURING
        self._captures = capture_content
        self._tracer = trace.get_tracer("ringfence", version("ringfence"), tracer_provider)
        histogram = metrics.get_meter("ringfence", version("ringfence"), meter_provider).create_histogram
        self._tool_seconds = histogram(
            "gen_ai.execute_tool.duration", "s", "Duration of tool calls.", explicit_bucket_boundaries_advisory=SECONDS
        )
        self._model_seconds = histogram(
            "gen_ai.client.operation.duration",
            "s",
            "Duration of model calls.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._tokens = histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of model calls.",
            explicit_bucket_boundaries_advisory=TOKENS,
        )

    def observe(self, session: Session) -> None:
        """Subscribe to the events of the session's dispatcher; a second time does nothing."""
        handlers: dict[type[Any], Callable[[Any], None]] = {
            EvaluationStarted: self._start_evaluation,
            EvaluationEnded: self._end_evaluation,
            ModelRequested: self._start_chat,
            ModelAnswered: self._end_chat,
            ToolCallStarted: self._start_call,
            Receipt: self._end_call,
        }
        if self._captures:
            handlers[ToolInvoked] = self._capture_result
        for event_type, handler in handlers.items():
            while session.dispatcher.unsubscribe(event_type, handler):
                pass
            session.dispatcher.subscribe(event_type, handler)

    def _start_evaluation(self, event: EvaluationStarted) -> None:
        found = _provider_attributes("invoke_agent", event.provider, event.model)
        found |= {"gen_ai.agent.name": event.prompt_name, "gen_ai.conversation.id": str(event.session_id)}
        if event.run_context is not None:
            found["ringfence.run.id"] = str(event.run_context.run_id)
        name = f"invoke_agent {event.prompt_name}"
        self._start(event.evaluation_id, name, SpanKind.INTERNAL, found, event.created_at)

    def _end_evaluation(self, event: EvaluationEnded) -> None:
        self._end(event.evaluation_id, _usage_attributes(event.usage), _exception_error(event.error), event.created_at)

    def _start_chat(self, event: ModelRequested) -> None:
        labels = _provider_attributes("chat", event.provider, event.model)
        name = f"chat {event.model}" if event.model else "chat"
        key = (event.evaluation_id, event.number)
        found = labels | {"gen_ai.conversation.id": str(event.session_id)}
        self._start(key, name, SpanKind.CLIENT, found, event.created_at, labels=labels)

    def _end_chat(self, event: ModelAnswered) -> None:
        turn, error = event.turn, _exception_error(event.error)
        usage = (turn.usage if turn is not None else None) or TokenUsage()
        found: Attributes = {}
        if turn is not None:
            found = {"gen_ai.response.finish_reasons": [_finish_reason(turn)], **_usage_attributes(usage)}
            if self._captures:
                found["gen_ai.output.messages"] = _messages(turn)
        ended = self._end((event.evaluation_id, event.number), found, error, event.created_at)
        if ended is None:
            return
        labels = ended.labels if error is None else ended.labels | {ERROR_TYPE: error}
        self._model_seconds.record((event.created_at - ended.began).total_seconds(), labels)
        for kind, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            if tokens is not None:
                self._tokens.record(tokens, ended.labels | {"gen_ai.token.type": kind})

    def _start_call(self, event: ToolCallStarted) -> None:
        found = _call_attributes(event.name, event.call_id, event.prompt_name, str(event.session_id))
        # A name that a model has made up would make as many kinds of spans as there are such names.
        name = "execute_tool" if event.description is None else f"execute_tool {event.name}"
        if event.description is not None:
            found["gen_ai.tool.description"] = event.description
        if self._captures:
            arguments = event.arguments
            text = _bounded(arguments) if isinstance(arguments, str) else _json_text(arguments or {})
            found["gen_ai.tool.call.arguments"] = text
        self._start(event.call_id, name, SpanKind.INTERNAL, found, event.started_at)

    def _capture_result(self, event: ToolInvoked) -> None:
        running = _innermost.get()
        if running is not None and running.key == event.call_id:
            result = {"message": event.result.message, "output": _bounded(event.rendered_output)}
            running.captured["gen_ai.tool.call.result"] = _json_text(result)

    def _end_call(self, receipt: Receipt) -> None:
        if receipt.rolled_back_by is not None:  # its span has ended; that of the call around it reports the rollback
            return
        error = _receipt_error(receipt)
        ended_at = receipt.started_at + timedelta(seconds=receipt.duration_seconds)
        found = _receipt_attributes(receipt)
        if self._end(receipt.call_id, found, error, ended_at) is None:  # it had begun before the session was observed
            at_start = _call_attributes(receipt.tool, receipt.call_id, receipt.prompt_name, receipt.session_id)
            self._start(receipt.call_id, "execute_tool", SpanKind.INTERNAL, at_start, receipt.started_at)
            self._end(receipt.call_id, found, error, ended_at)
        labels: Attributes = {
            "gen_ai.tool.name": OTHER if error == "unknown_tool" else receipt.tool,
            "gen_ai.tool.type": "function",
            "gen_ai.agent.name": receipt.prompt_name,
        }
        self._tool_seconds.record(receipt.duration_seconds, labels | ({ERROR_TYPE: error} if error else {}))

    def _start(
        self,
        key: object,
        name: str,
        kind: SpanKind,
        found: Attributes,
        at: datetime,
        *,
        labels: Attributes | None = None,
    ) -> None:
        span = self._tracer.start_span(name, kind=kind, attributes=found, start_time=_nanoseconds(at))
        token = attach(trace.set_span_in_context(span))
        _innermost.set(_OpenSpan(key, span, token, _innermost.get(), labels or {}, at))

    def _end(self, key: object, found: Attributes, error: str | None, at: datetime) -> _OpenSpan | None:
        """End the span of that key; what an interrupt left open within it ends, too. None: there is no such span."""
        ending = innermost = _innermost.get()
        while ending is not None and ending.key != key:
            ending = ending.outer
        if ending is None:
            return None
        while innermost is not None and innermost is not ending:
            _finish(innermost.span, {}, INTERRUPTED, at)
            innermost = innermost.outer
        detach(ending.token)
        _innermost.set(ending.outer)
        _finish(ending.span, found | ending.captured, error, at)
        return ending


def _finish(span: Span, found: Attributes, error: str | None, at: datetime) -> None:
    span.set_attributes(found)
    if error is not None:
        # Without a description: messages may quote arguments and files.
        span.set_attribute(ERROR_TYPE, error)
        span.set_status(StatusCode.ERROR)
    span.end(_nanoseconds(at))


def _nanoseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000


def _exception_error(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else type(error).__name__


def _receipt_error(receipt: Receipt) -> str | None:
    """How a call failed, in one of few words; None for one that was committed."""
    match receipt.outcome:
        case "committed":
            return None
        case "denied":
            # The one thing besides a policy that denies is the deadline.
            return "policy_denied" if _denying_policy(receipt) is not None else "timeout"
        case "rejected":
            return "validation_error" if isinstance(receipt.params, RejectedToolParams) else "unknown_tool"
        case other:
            return OUTCOME_ERRORS[other]


def _denying_policy(receipt: Receipt) -> str | None:
    return next((verdict.policy for verdict in receipt.policies if not verdict.allowed), None)


def _provider_attributes(operation: str, provider: str, model: str | None) -> Attributes:
    found: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider}
    return found | {"gen_ai.request.model": model} if model else found


def _call_attributes(tool: str, call_id: str, prompt_name: str, session_id: str) -> Attributes:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": _short(tool),
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": _short(call_id),
        "gen_ai.agent.name": prompt_name,
        "gen_ai.conversation.id": session_id,
    }


def _receipt_attributes(receipt: Receipt) -> Attributes:
    before, after = receipt.diff_bytes
    files = [change.after or change.before for change in receipt.changes]
    found: Mapping[str, str | int | None] = {
        "ringfence.outcome": receipt.outcome,
        "ringfence.receipt.id": receipt.receipt_id,
        "ringfence.files.read": len(receipt.read or ()),
        "ringfence.files.changed": sum(file is not None and file.kind != "directory" for file in files),
        "ringfence.files.conflicts": len(receipt.conflicts),
        "ringfence.diff.bytes_before": before,
        "ringfence.diff.bytes_after": after,
        ERROR_TYPE: _receipt_error(receipt),
        "ringfence.policy.denied_by": _denying_policy(receipt),
        "ringfence.commit.id": receipt.commit,
        "process.exit.code": receipt.exit_code,
    }
    return {name: value for name, value in found.items() if value is not None}


def _usage_attributes(usage: TokenUsage) -> Attributes:
    counts = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
    }
    return {name: count for name, count in counts.items() if count is not None}


def _finish_reason(turn: Turn) -> str:
    """In the words of the conventions, which are the same for all providers."""
    if turn.ended != "whole":
        return {"cut": "length", "refused": "content_filter"}[turn.ended]
    return "tool_call" if turn.tool_calls else "stop"


def _messages(turn: Turn) -> str:
    """A turn as the conventions write messages."""
    parts: list[Mapping[str, object]] = [{"type": "text", "content": turn.text}] if turn.text else []
    parts += [
        {"type": "tool_call", "id": call.call_id, "name": call.name, "arguments": call.arguments}
        for call in turn.tool_calls
    ]
    return _json_text([{"role": "assistant", "parts": parts, "finish_reason": _finish_reason(turn)}])


def _json_text(value: object) -> str:
    try:
        return _bounded(json.dumps(serde.dump_any(value), ensure_ascii=False))
    except (ValueError, TypeError, RecursionError) as error:
        return f"[no JSON holds it: {type(error).__name__}]"


def _bounded(text: str) -> str:
    rest = len(text) - MAX_CONTENT_CHARACTERS
    return sendable(text if rest <= 0 else f"{text[:MAX_CONTENT_CHARACTERS]}[... {rest:,} more characters]")


def _short(name: str) -> str:
    """A name that a model may have made up, as text that every exporter can write."""
    return sendable(name[:MAX_NAME_CHARACTERS])
