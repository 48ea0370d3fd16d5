"""A web server on a socket that is open already, until it is cancelled. It needs an extra that has uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    import uvicorn

GRACE_SECONDS = 1
"""The time that open requests have to end when the server stops."""


async def serve_until_cancelled(app: Any, listening: socket.socket, **options: Any) -> None:
    """Serve an ASGI application. ``options`` are those of `uvicorn.Config`."""
    import uvicorn

    class WebServer(uvicorn.Server):
        """A server that leaves signals to the command."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        **options,
    )
    web = WebServer(config)
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_when_cancelled, web)
        with anyio.CancelScope(shield=True):
            await web.serve(sockets=[listening])
        group.cancel_scope.cancel()


async def _stop_when_cancelled(web: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        web.should_exit = True
