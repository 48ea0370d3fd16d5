"""OpenTelemetry for a command, where OpenTelemetry's own environment variables ask for it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

from ringfence.extras import install_command
from ringfence_tools.printable import one_line
from ringfence_tools.runs.outputs import ErrorStream

if TYPE_CHECKING:
    from ringfence.telemetry import Telemetry

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT, METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
PROTOCOL = "http/protobuf"
PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
SHUTDOWN_SECONDS = 5.0
"""That the command waits at its end for a collector to take what is left."""


def telemetry_of(errors: ErrorStream, files: ExitStack) -> Telemetry | None:
    """The observer of sessions, if the environment asks for it; ``files`` sends at the end what is left to send.

    An OTLP endpoint asks for it, or ``opentelemetry-instrument``, which has set everything up when we run. What is
    traced belongs to the ``TRACEPARENT`` of the environment, if there is one.
    """
    is_asked = any(map(_variable, (ENDPOINT, TRACES_ENDPOINT, METRICS_ENDPOINT)))
    if _variable("OTEL_SDK_DISABLED").lower() == "true" or not (is_asked or "opentelemetry" in sys.modules):
        return None
    try:
        from opentelemetry import propagate, trace
        from opentelemetry.context import attach

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            if not is_asked:
                return None
            _set_up(errors, files)
        from ringfence.telemetry import Telemetry
    except ImportError as error:
        command = install_command(Path(sys.prefix), packages=PACKAGES)
        errors.say(f"ringfence: no telemetry: {error.name} is not installed: {command}")
        return None
    except Exception as error:  # a broken exporter does not stop the command
        errors.say(f"ringfence: no telemetry: {one_line(str(error), 300)}")
        return None
    attach(propagate.extract({name.lower(): _variable(name) for name in ("TRACEPARENT", "TRACESTATE")}))
    return Telemetry()


def _set_up(errors: ErrorStream, files: ExitStack) -> None:
    """Set the global providers: libraries of MCP and of model providers use them, too."""
    protocol = _variable("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOL
    if protocol != PROTOCOL:
        raise ValueError(f"ringfence speaks {PROTOCOL}; `opentelemetry-instrument ringfence ...` speaks {protocol}")
    from opentelemetry import metrics, trace
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    log = _LastMessage()
    logging.getLogger("opentelemetry").addHandler(log)
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "ringfence"}))
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    if _is_exported("OTEL_TRACES_EXPORTER", TRACES_ENDPOINT):
        tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    exported = _is_exported("OTEL_METRICS_EXPORTER", METRICS_ENDPOINT)
    readers = [PeriodicExportingMetricReader(OTLPMetricExporter())] if exported else []
    meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(meters)
    files.callback(_shut_down, (tracers.shutdown, meters.shutdown), log, errors)


def _is_exported(variable: str, endpoint: str) -> bool:
    return bool(_variable(ENDPOINT) or _variable(endpoint)) and _variable(variable).lower() != "none"


def _shut_down(shutdowns: tuple[Callable[[], None], ...], log: _LastMessage, errors: ErrorStream) -> None:
    """Send what is left. The SDK's own time limits are too long to wait for, and not all of them are kept."""
    until = monotonic() + SHUTDOWN_SECONDS
    threads = [Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until - monotonic(), 0))
    if log.has_error or any(thread.is_alive() for thread in threads):
        why = log.text or f"the collector took more than {SHUTDOWN_SECONDS:g} s"
        errors.say(f"ringfence: telemetry is not complete: {one_line(why, 300)}")


class _LastMessage(logging.Handler):
    """The last message of the SDK, which reports failures in no other way."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.has_error = False
        """Whether the SDK gave up, and did not only retry."""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.has_error = self.has_error or record.levelno >= logging.ERROR


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
