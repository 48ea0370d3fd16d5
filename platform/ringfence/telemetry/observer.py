"""The observer of a session's events that makes spans and measurements of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider

from ringfence.adapters.model import EvaluationEnded, EvaluationStarted, ModelAnswered, ModelRequested
from ringfence.runtime.events import ToolCallStarted, ToolInvoked
from ringfence.runtime.limits import TokenUsage
from ringfence.runtime.receipts import Receipt
from ringfence.runtime.session import Session
from ringfence.telemetry import attributes, names
from ringfence.telemetry.attributes import Attributes

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CAPTURING = frozenset({"true", "1", "span_only", "span_and_event"})
INTERRUPTED = "interrupted"


@dataclass(slots=True, eq=False)
class _Open:
    """A span that has begun in this context, within that of ``outer``."""

    key: object
    span: Span
    token: Token[Context]
    outer: _Open | None
    labels: Attributes
    """What its measurements are told apart by."""
    began: datetime
    captured: Attributes = field(default_factory=dict[str, Any])


_innermost: ContextVar[_Open | None] = ContextVar("ringfence_open_span", default=None)


class Telemetry:
    """Makes spans of what happens in the sessions that it observes: ``invoke_agent``, ``chat`` and ``execute_tool``,
    nested as the evaluations, the model's answers and the tool calls are, with those of other libraries in between.

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
            capture_content = os.environ.get(names.CAPTURE_VARIABLE, "").strip().lower() in CAPTURING
        self._captures = capture_content
        self._tracer = trace.get_tracer("ringfence", version("ringfence"), tracer_provider)
        meter = metrics.get_meter("ringfence", version("ringfence"), meter_provider)
        self._tool_seconds = meter.create_histogram(
            names.TOOL_DURATION,
            "s",
            "Duration of tool calls.",
            explicit_bucket_boundaries_advisory=names.SECONDS,
        )
        self._model_seconds = meter.create_histogram(
            names.OPERATION_DURATION,
            "s",
            "Duration of model calls.",
            explicit_bucket_boundaries_advisory=names.SECONDS,
        )
        self._tokens = meter.create_histogram(
            names.TOKEN_USAGE,
            "{token}",
            "Tokens of model calls.",
            explicit_bucket_boundaries_advisory=names.TOKENS,
        )

    def observe(self, session: Session) -> None:
        """Hear of everything that goes through the session's dispatcher from now on; a second time does nothing."""
        handlers: dict[type[Any], Callable[[Any], None]] = {
            EvaluationStarted: self._evaluation_begun,
            EvaluationEnded: self._evaluation_ended,
            ModelRequested: self._model_asked,
            ModelAnswered: self._model_answered,
            ToolCallStarted: self._call_begun,
            Receipt: self._call_ended,
        }
        if self._captures:
            handlers[ToolInvoked] = self._call_answered
        for event_type, handler in handlers.items():
            while session.dispatcher.unsubscribe(event_type, handler):
                pass
            session.dispatcher.subscribe(event_type, handler)

    def _evaluation_begun(self, event: EvaluationStarted) -> None:
        about = _about("invoke_agent", event.provider, event.model)
        said: Attributes = {names.AGENT_NAME: event.prompt_name, names.CONVERSATION_ID: str(event.session_id)}
        if event.run_context is not None:
            said[names.RUN] = str(event.run_context.run_id)
        name = f"invoke_agent {event.prompt_name}"
        self._begin(event.evaluation_id, name, SpanKind.INTERNAL, about | said, event.created_at)

    def _evaluation_ended(self, event: EvaluationEnded) -> None:
        found = attributes.of_usage(event.usage)
        self._end(event.evaluation_id, found, _error_of(event.error), event.created_at)

    def _model_asked(self, event: ModelRequested) -> None:
        about = _about("chat", event.provider, event.model)
        name = f"chat {event.model}" if event.model else "chat"
        key = (event.evaluation_id, event.number)
        said = {names.CONVERSATION_ID: str(event.session_id)}
        self._begin(key, name, SpanKind.CLIENT, about | said, event.created_at, labels=about)

    def _model_answered(self, event: ModelAnswered) -> None:
        turn, error = event.turn, _error_of(event.error)
        found: Attributes = attributes.of_turn(turn) if turn is not None else {}
        if turn is not None and self._captures:
            found[names.OUTPUT_MESSAGES] = attributes.messages_of(turn)
        ended = self._end((event.evaluation_id, event.number), found, error, event.created_at)
        if ended is None:
            return
        labels = ended.labels if error is None else ended.labels | {names.ERROR_TYPE: error}
        self._model_seconds.record((event.created_at - ended.began).total_seconds(), labels)
        usage = (turn.usage if turn is not None else None) or TokenUsage()
        for kind, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
            if tokens is not None:
                self._tokens.record(tokens, ended.labels | {names.TOKEN_TYPE: kind})

    def _call_begun(self, event: ToolCallStarted) -> None:
        about = attributes.of_call(event.name, event.call_id, event.prompt_name, str(event.session_id))
        # A name that a model has made up would make as many kinds of spans as there are such names.
        name = "execute_tool" if event.description is None else f"execute_tool {event.name}"
        if event.description is not None:
            about[names.TOOL_DESCRIPTION] = event.description
        if self._captures:
            about[names.TOOL_ARGUMENTS] = attributes.arguments_of(event)
        self._begin(event.call_id, name, SpanKind.INTERNAL, about, event.started_at)

    def _call_answered(self, event: ToolInvoked) -> None:
        running = _innermost.get()
        if running is not None and running.key == event.call_id:
            running.captured[names.TOOL_RESULT] = attributes.result_of(event)

    def _call_ended(self, receipt: Receipt) -> None:
        if receipt.rolled_back_by is not None:  # its span has ended; what took it back has one that says so
            return
        error, ended_at = (
            attributes.error_type(receipt),
            receipt.started_at + timedelta(seconds=receipt.duration_seconds),
        )
        found = attributes.of_receipt(receipt)
        if self._end(receipt.call_id, found, error, ended_at) is None:
            # It had begun before anybody observed the session.
            about = attributes.of_call(receipt.tool, receipt.call_id, receipt.prompt_name, receipt.session_id)
            self._begin(receipt.call_id, "execute_tool", SpanKind.INTERNAL, about, receipt.started_at)
            self._end(receipt.call_id, found, error, ended_at)
        labels = {
            names.TOOL_NAME: names.OTHER if error == attributes.UNKNOWN_TOOL else receipt.tool,
            names.TOOL_TYPE: "function",
            names.AGENT_NAME: receipt.prompt_name,
        }
        self._tool_seconds.record(receipt.duration_seconds, labels | ({names.ERROR_TYPE: error} if error else {}))

    def _begin(
        self,
        key: object,
        name: str,
        kind: SpanKind,
        about: Attributes,
        at: datetime,
        *,
        labels: Attributes | None = None,
    ) -> None:
        span = self._tracer.start_span(name, kind=kind, attributes=about, start_time=_nanoseconds(at))
        token = attach(trace.set_span_in_context(span))
        _innermost.set(_Open(key, span, token, _innermost.get(), labels or {}, at))

    def _end(self, key: object, found: Attributes, error: str | None, at: datetime) -> _Open | None:
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


def _about(operation: str, provider: str, model: str | None) -> Attributes:
    found: Attributes = {names.OPERATION_NAME: operation, names.PROVIDER_NAME: provider}
    return found | {names.REQUEST_MODEL: model} if model else found


def _finish(span: Span, found: Attributes, error: str | None, at: datetime) -> None:
    span.set_attributes(found)
    if error is not None:
        # Without a description: messages may quote arguments and files.
        span.set_attribute(names.ERROR_TYPE, error)
        span.set_status(StatusCode.ERROR)
    span.end(_nanoseconds(at))


def _error_of(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else type(error).__name__


def _nanoseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1) * 1000
