"""Evaluations, model calls and tool calls as OpenTelemetry spans and metrics: the extra ``otel``.

Nothing else of this package imports OpenTelemetry.
"""

from ringfence.extras import missing

try:
    from ringfence.telemetry.observer import Telemetry
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("opentelemetry"):
        raise
    raise ModuleNotFoundError(missing(error.name, "otel"), name=error.name) from None

__all__ = ["Telemetry"]
