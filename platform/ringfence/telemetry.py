"""Evaluations, model calls and tool calls as OpenTelemetry spans and metrics: the extra ``otel``.

Nothing else of this package imports OpenTelemetry. The attributes are named as in its GenAI conventions. Those are in
development, and the package that has them breaks between versions, so the names stand here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ringfence import __version__, serde
from ringfence.adapters.model import EvaluationEnded, EvaluationStarted, ModelAnswered, ModelRequested, Turn
from ringfence.extras import missing
from ringfence.limits import TokenUsage
from ringfence.receipts import Receipt
from ringfence.session.events import RejectedToolParams, ToolCallStarted, ToolInvoked
from ringfence.session.session import Session
from ringfence.session.tool_result import sendable

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context, attach, detach
    from opentelemetry.metrics import Histogram, MeterProvider
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
SECONDS = tuple(0.01 * 2**power for power in range(14))
TOKENS = tuple(4**power for power in range(14))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
INTERRUPTED = "interrupted"
OTHER = "_OTHER"
"""In the place of a name that a model has made up."""
ERROR_TYPE = "error.type"
OUTCOME_ERRORS = {"failed": "tool_error", "interrupted": INTERRUPTED, "doubtful": "rollback_failed"}

Attributes = dict[str, str | int | float | Sequence[str] | None]
"""Those that are None are left out."""


@dataclass(slots=True, eq=False)
class _OpenSpan:
    """A span that has begun in this context, within that of ``outer``."""

    key: object
    span: Span
    token: Token[Context]
    outer: _OpenSpan | None
    began: datetime
    labels: Attributes
    """The attributes of its measurements."""


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
                hold anything; left out, ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` decides.
        """
        if capture_content is None:
            capture_content = os.environ.get(CAPTURE_VARIABLE, "").strip().lower() in CAPTURING
        self._captures = capture_content
        self._tracer = trace.get_tracer("ringfence", __version__, tracer_provider)
        meter = metrics.get_meter("ringfence", __version__, meter_provider)

        def histogram(name: str, unit: str, description: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)

        self._tool_seconds = histogram("gen_ai.execute_tool.duration", "s", "Duration of tool calls.", SECONDS)
        self._model_seconds = histogram("gen_ai.client.operation.duration", "s", "Duration of model calls.", SECONDS)
        self._tokens = histogram("gen_ai.client.token.usage", "{token}", "Tokens of model calls.", TOKENS)

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
            session.dispatcher.unsubscribe(event_type, handler)
            session.dispatcher.subscribe(event_type, handler)

    def _start_evaluation(self, event: EvaluationStarted) -> None:
        found: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": event.provider,
            "gen_ai.request.model": event.model,
            "gen_ai.agent.name": event.prompt_name,
            "gen_ai.conversation.id": str(event.session_id),
            "ringfence.run.id": str(event.run_context.run_id) if event.run_context is not None else None,
        }
        name = f"invoke_agent {event.prompt_name}"
        self._start(event.evaluation_id, name, SpanKind.INTERNAL, found, event.created_at)

    def _end_evaluation(self, event: EvaluationEnded) -> None:
        _end(event.evaluation_id, _usage_attributes(event.usage), _exception_error(event.error), event.created_at)

    def _start_chat(self, event: ModelRequested) -> None:
        labels: Attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": event.provider,
            "gen_ai.request.model": event.model,
        }
        found = labels | {"gen_ai.conversation.id": str(event.session_id)}
        name = f"chat {event.model}" if event.model else "chat"
        self._start((event.evaluation_id, event.number), name, SpanKind.CLIENT, found, event.created_at, labels)

    def _end_chat(self, event: ModelAnswered) -> None:
        turn, error = event.turn, _exception_error(event.error)
        found: Attributes = {}
        usage = (turn.usage if turn is not None else None) or TokenUsage()
        if turn is not None:
            found = {"gen_ai.response.finish_reasons": [_finish_reason(turn)], **_usage_attributes(usage)}
            if self._captures:
                found["gen_ai.output.messages"] = _messages(turn)
        ended = _end((event.evaluation_id, event.number), found, error, event.created_at)
        if ended is None:
            return
        seconds = (event.created_at - ended.began).total_seconds()
        self._model_seconds.record(seconds, _present(ended.labels | {ERROR_TYPE: error}))
        for kind, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            if tokens is not None:
                self._tokens.record(tokens, _present(ended.labels | {"gen_ai.token.type": kind}))

    def _start_call(self, event: ToolCallStarted) -> None:
        # A name that a model has made up would make as many kinds of spans as there are such names.
        name = "execute_tool" if event.description is None else f"execute_tool {event.name}"
        found: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": sendable(event.name[:MAX_NAME_CHARACTERS]),
            "gen_ai.tool.type": "function",
            "gen_ai.tool.description": event.description,
            "gen_ai.tool.call.id": sendable(event.call_id[:MAX_NAME_CHARACTERS]),
            "gen_ai.agent.name": event.prompt_name,
            "gen_ai.conversation.id": str(event.session_id),
        }
        if self._captures:
            given = event.arguments
            found["gen_ai.tool.call.arguments"] = _bounded(given) if isinstance(given, str) else _json_text(given or {})
        self._start(event.call_id, name, SpanKind.INTERNAL, found, event.started_at)

    def _capture_result(self, event: ToolInvoked) -> None:
        running = _innermost.get()
        if running is not None and running.key == event.call_id:
            result = {"message": event.result.message, "output": _bounded(event.rendered_output)}
            running.span.set_attribute("gen_ai.tool.call.result", _json_text(result))

    def _end_call(self, receipt: Receipt) -> None:
        if receipt.rolled_back_by is not None:  # its span has ended; that of the call around it reports the rollback
            return
        denied_by = next((verdict.policy for verdict in receipt.policies if not verdict.allowed), None)
        match receipt.outcome:
            case "committed":
                error = None
            case "denied":  # the one thing besides a policy that denies is the deadline
                error = "policy_denied" if denied_by is not None else "timeout"
            case "rejected":
                error = "validation_error" if isinstance(receipt.params, RejectedToolParams) else "unknown_tool"
            case outcome:
                error = OUTCOME_ERRORS[outcome]
        files = [change.after or change.before for change in receipt.changes]
        before, after = receipt.diff_bytes
        found: Attributes = {
            "ringfence.outcome": receipt.outcome,
            "ringfence.receipt.id": receipt.receipt_id,
            "ringfence.files.read": len(receipt.read or ()),
            "ringfence.files.changed": sum(file is not None and file.kind != "directory" for file in files),
            "ringfence.files.conflicts": len(receipt.conflicts),
            "ringfence.diff.bytes_before": before,
            "ringfence.diff.bytes_after": after,
            "ringfence.policy.denied_by": denied_by,
            "ringfence.commit.id": receipt.commit,
            "process.exit.code": receipt.exit_code,
        }
        ended_at = receipt.started_at + timedelta(seconds=receipt.duration_seconds)
        _end(receipt.call_id, found, error, ended_at)
        labels: Attributes = {
            "gen_ai.tool.name": OTHER if error == "unknown_tool" else receipt.tool,
            "gen_ai.tool.type": "function",
            "gen_ai.agent.name": receipt.prompt_name,
            ERROR_TYPE: error,
        }
        self._tool_seconds.record(receipt.duration_seconds, _present(labels))

    def _start(
        self, key: object, name: str, kind: SpanKind, found: Attributes, at: datetime, labels: Attributes | None = None
    ) -> None:
        span = self._tracer.start_span(name, kind=kind, attributes=_present(found), start_time=_nanoseconds(at))
        token = attach(trace.set_span_in_context(span))
        _innermost.set(_OpenSpan(key, span, token, _innermost.get(), at, labels or {}))


def _end(key: object, found: Attributes, error: str | None, at: datetime) -> _OpenSpan | None:
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
    _finish(ending.span, found, error, at)
    return ending


def _finish(span: Span, found: Attributes, error: str | None, at: datetime) -> None:
    span.set_attributes(_present(found | {ERROR_TYPE: error}))
    if error is not None:
        span.set_status(StatusCode.ERROR)  # without a description: messages may quote arguments and files
    span.end(_nanoseconds(at))


def _nanoseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000


def _present(attributes: Attributes) -> dict[str, str | int | float | Sequence[str]]:
    return {name: value for name, value in attributes.items() if value is not None}


def _exception_error(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else type(error).__name__


def _usage_attributes(usage: TokenUsage) -> Attributes:
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "ringfence.cost.usd": usage.cost_usd,
    }


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
    return _bounded(json.dumps(serde.dump_any(value), ensure_ascii=False))


def _bounded(text: str) -> str:
    rest = len(text) - MAX_CONTENT_CHARACTERS
    return sendable(text if rest <= 0 else f"{text[:MAX_CONTENT_CHARACTERS]}[... {rest:,} more characters]")
