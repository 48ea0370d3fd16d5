"""What goes on beside a tool call while its request is open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.context import ServerRequestContext

if TYPE_CHECKING:
    from ringfence.limits import Cancellation

PROGRESS_SECONDS = 1.0
"""The time between two progress notifications of a call."""


async def report_progress(name: str, cancellation: Cancellation, context: ServerRequestContext[Any, Any]) -> None:
    """Send progress notifications of a call. Cancel the call when its request is cancelled."""
    started = monotonic()
    try:
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            seconds = monotonic() - started
            await context.session.report_progress(seconds, None, f"{name} has been running for {seconds:.0f} s")
    finally:
        cancellation.cancel()


async def cancel_on_disconnect(receive: Callable[[], Awaitable[Mapping[str, Any]]], cancellation: Cancellation) -> None:
    """Cancel the call when the connection of its request is closed.

    The protocol up to 2025-11-25 lets the call continue. But its result is lost, and the client would assume that
    nothing was changed.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    cancellation.cancel()
