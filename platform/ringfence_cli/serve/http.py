"""MCP over streamable HTTP: for this machine alone unless told otherwise, with a token, and safe from DNS rebinding."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringfence_cli.serve.clients import Clients

PATH = "/mcp"
GRACE_SECONDS = 1
"""That open requests have to end in when the server ends; what they run has been cancelled by then."""
BACKLOG = 64
"""Connections taken at a time, before those that are too many are closed."""
REFUSAL = b"'Authorization: Bearer TOKEN' is missing or wrong; the server said its token when it started\n"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a server whoever reaches it may take."""

    connections: int = 256
    """At once. The files of the workspace need descriptors, too."""
    sessions: int = 1000
    """Of clients up to 2025-11-25, some 40 kB each; one that is not used for half an hour ends."""
    request_seconds: float = 10.0
    """In which a connection says what it wants."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def written_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def address_of(text: str) -> Address:
    """``HOST:PORT``, ``[::1]:PORT`` or ``PORT``; port 0 is any that is free. ValueError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:8765")
    return Address(host, int(port))


def listen(address: Address) -> socket.socket:
    """A socket that listens there. OSError where it cannot."""
    family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


DEFAULT_LIMITS = Limits()


async def serve(
    server: Server[Clients], listening: socket.socket, token: str, hosts: Sequence[str], limits: Limits = DEFAULT_LIMITS
) -> None:
    """Until cancelled. ``hosts`` are the names, besides those of this machine, by which clients may call it."""
    own = Address(*listening.getsockname()[:2])
    names = [*LOOPBACK_NAMES, *([own.written_host] if own.is_loopback else []), *map(_as_called, hosts)]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=[*names, *(f"{name}:*" for name in names)],
        allowed_origins=[
            f"{scheme}://{name}{port}" for scheme in ("http", "https") for name in names for port in ("", ":*")
        ],
    )
    app = server.streamable_http_app(
        streamable_http_path=PATH, transport_security=security, max_sessions=limits.sessions
    )
    config = uvicorn.Config(
        guarded(app, token),
        http=_connection_type(limits),
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    web = _WebServer(config)
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_when_cancelled, web)
        with anyio.CancelScope(shield=True):
            await web.serve(sockets=[listening])
        group.cancel_scope.cancel()


def _as_called(host: str) -> str:
    """A name or address as it is in the header ``Host``."""
    try:
        return Address(str(ipaddress.ip_address(host)), 0).written_host
    except ValueError:
        return host.lower()


async def _stop_when_cancelled(web: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        web.should_exit = True


class _WebServer(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _connection_type(limits: Limits) -> type[H11Protocol]:
    class Connection(H11Protocol):
        """One of few, and none that stays without asking for anything, or goes on with what has been refused. (The
        server's own time limit is for the pause between two requests alone, and a byte ends it.)"""

        _asked: object = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as its base has it
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            else:
                self.loop.call_later(limits.request_seconds, self._look)

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is self._asked and (self._asked is None or self.cycle.response_complete):
                self.transport.abort()
                return
            self._asked = self.cycle
            self.loop.call_later(limits.request_seconds, self._look)

    return Connection


def guarded(app: App, token: str) -> App:
    """`app` for those who know the token."""
    expected = token.encode()

    async def guard(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _knows(dict(scope["headers"]), expected):
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
            return
        await app(scope, receive, send)

    return guard


def _knows(headers: Mapping[bytes, bytes], expected: bytes) -> bool:
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), expected)
