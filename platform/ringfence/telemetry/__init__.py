"""Evaluations, model calls and tool calls as OpenTelemetry spans and metrics: the extra ``otel``.

Nothing else of this package imports OpenTelemetry.
"""

from ringfence.adapters.provider import package

package("opentelemetry.trace", extra="otel")

from ringfence.telemetry.observer import Telemetry  # noqa: E402  # ImportError says what to install

__all__ = ["Telemetry"]
