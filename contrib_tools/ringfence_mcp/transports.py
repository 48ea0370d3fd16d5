"""The transports of the MCP server: standard input and output, and streamable HTTP.

The stdio transport of the SDK reads on a thread that nothing can interrupt, so a server would outlive its Ctrl-C. It
also drops invalid messages silently and reads lines of any length.

HTTP serves this machine alone by default, requires a token and rejects DNS rebinding. Its packages are slow to load, so
the functions that need them import them.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import select
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import Server
from mcp.shared.dispatcher import as_request_id
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from ringfence_mcp.first_answer import Begun

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.h11_impl import H11Protocol

    from ringfence_mcp.server import Connected

MAX_LINE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
ATOMIC_BYTES = 4096
"""What a pipe that is ready for writing accepts without blocking."""
MAX_UNREAD = 100
"""Messages that wait for a client to read them. Further refusals of invalid messages are dropped."""
DRAIN_SECONDS = 5.0
"""The time a client has to read the last results."""

PATH = "/mcp"
BACKLOG = 64
"""Connections accepted at a time, before those over the limit are closed."""
REFUSAL = b"'Authorization: Bearer TOKEN' is missing or wrong; the server said its token when it started\n"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

NOTHING = Begun()
ToClient = MemoryObjectSendStream[SessionMessage]
FromClient = MemoryObjectReceiveStream[SessionMessage | Exception]
App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""


async def serve_stdio(server: Server[Connected], source: int, target: int, begun: Begun = NOTHING) -> None:
    """Serve one client over two descriptors, until it closes the first or no longer reads the second.

    ``begun`` has what was read of the first, and answered, before.
    """
    async with _messages(source, target, begun) as (read, write):
        await server.run(read, write, server.create_initialization_options())


@asynccontextmanager
async def _messages(source: int, target: int, begun: Begun) -> AsyncGenerator[tuple[FromClient, ToClient]]:
    """Yield the stream of the client's messages and the stream for ours. The caller closes both."""
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception]()
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](MAX_UNREAD)
    async with anyio.create_task_group() as group:
        group.start_soon(_read, source, begun.received, incoming, write.clone())
        group.start_soon(_write, target, outgoing, begun.answered, group.cancel_scope)
        yield read, write
        # The client has closed our input. It may not read the remaining results.
        group.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS


async def _read(
    source: int, received: bytes, incoming: MemoryObjectSendStream[SessionMessage | Exception], answers: ToClient
) -> None:
    line = bytearray()
    async with incoming, answers:
        while chunk := received or await _read_chunk(source):
            received = b""
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                await _receive(bytes(line + end), incoming, answers)
                line.clear()
            line += rest
            del line[MAX_LINE_BYTES + 1 :]  # enough to see that it is too long


async def _receive(
    line: bytes, incoming: MemoryObjectSendStream[SessionMessage | Exception], answers: ToClient
) -> None:
    if not line.strip():
        return
    try:
        message = _parse(line)
    except MCPError as error:
        _refuse(answers, error.error, _request_id(line))
    else:
        await incoming.send(SessionMessage(message))


def _parse(line: bytes) -> types.JSONRPCMessage:
    """Parse a message. Raise MCPError for anything else."""
    if len(line) > MAX_LINE_BYTES:
        raise MCPError(code=types.INVALID_REQUEST, message=f"a message has at most {MAX_LINE_BYTES:,} bytes")
    try:
        message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError as error:
        details = error.errors()[0]
        if details["type"] == "json_invalid":
            raise MCPError(code=types.PARSE_ERROR, message=f"this line cannot be read: {details['msg']}") from None
        raise MCPError(code=types.INVALID_REQUEST, message="this line is no JSON-RPC message") from None
    # A message with an id is a request. Its client would wait for ever if it passed for a notification.
    if isinstance(message, types.JSONRPCNotification) and b'"id"' in line and "id" in json.loads(line):
        raise MCPError(code=types.INVALID_REQUEST, message="the id of a request is a text or a whole number")
    return message


def _request_id(line: bytes) -> str | int | None:
    """Return the id of an invalid request, if it has one. Its client waits for an answer to that id."""
    try:
        request = as_request_id(json.loads(line)["id"])
        str(request).encode()  # half of a surrogate pair could not be sent back
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return request


def _refuse(answers: ToClient, error: types.ErrorData, request: str | int | None) -> None:
    """Answer with an error, unless the client has left too many messages unread."""
    with suppress(anyio.WouldBlock):
        answers.send_nowait(SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=request, error=error)))


async def _read_chunk(source: int) -> bytes:
    """Read what is available. Return nothing at the end, or when the writer is gone."""
    with suppress(PermissionError):  # a file, which can always be read
        await anyio.wait_readable(source)
    try:
        return os.read(source, CHUNK_BYTES)
    except OSError:
        return b""


async def _write(
    target: int,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    answered: str | int | None,
    scope: anyio.CancelScope,
) -> None:
    async with outgoing, anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, target, scope)
        async for message in outgoing:
            if answered is not None and _is_answer(message, answered):
                answered = None
                continue
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await _write_all(target, text.encode() + b"\n")
            except OSError:  # the reader is gone
                scope.cancel()
        group.cancel_scope.cancel()


def _is_answer(message: SessionMessage, request: str | int) -> bool:
    return isinstance(message.message, (types.JSONRPCResponse, types.JSONRPCError)) and message.message.id == request


async def _cancel_on_disconnect(target: int, scope: anyio.CancelScope) -> None:
    """Cancel all work when the client stops reading. It would assume that a later call changed nothing."""
    with suppress(PermissionError):  # a file
        await anyio.wait_readable(target)  # a disconnect is readable; so is the input of a terminal or a socket
        waiting = select.poll()
        waiting.register(target, 0)
        if waiting.poll(0):
            scope.cancel()


async def _write_all(target: int, data: bytes) -> None:
    rest, writable = memoryview(data), select.poll()
    writable.register(target, select.POLLOUT)
    while rest:
        if not writable.poll(0):  # a file can always be written to
            await anyio.wait_writable(target)
        rest = rest[os.write(target, rest[:ATOMIC_BYTES]) :]


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, ``[::1]:PORT`` or ``PORT``; port 0 is any free port. Raise ValueError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:8765")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_header(host: str) -> str:
    """Return a name or address in the form of URLs and of the header ``Host``."""
    return f"[{host.lower()}]" if ":" in host else host.lower()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raise OSError if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


async def serve_http(
    server: Server[Connected],
    listening: socket.socket,
    token: str,
    hosts: Sequence[str],
    *,
    max_connections: int = 256,
    max_sessions: int = 1000,
    request_seconds: float = 10.0,
) -> None:
    """Serve until cancelled.

    ``hosts`` are the names that clients may use, besides those of this machine. A connection has ``request_seconds`` to
    send a request. A session of the protocol up to 2025-11-25 ends after half an hour without use.
    """
    from mcp.server.transport_security import TransportSecuritySettings

    from ringfence_tools.web_server import serve_until_cancelled

    own = listening.getsockname()[0]
    names = [*LOOPBACK_NAMES, *map(host_header, (*([own] if is_loopback(own) else []), *hosts))]
    origins = [f"{scheme}://{name}" for scheme in ("http", "https") for name in names]
    security = TransportSecuritySettings(
        allowed_hosts=[form for name in names for form in (name, f"{name}:*")],
        allowed_origins=[form for origin in origins for form in (origin, f"{origin}:*")],
    )
    app = server.streamable_http_app(streamable_http_path=PATH, transport_security=security, max_sessions=max_sessions)
    await serve_until_cancelled(
        _require_token(app, token),
        listening,
        http=_connection_type(max_connections, request_seconds),
        backlog=BACKLOG,
        lifespan="on",
    )


def _connection_type(max_connections: int, request_seconds: float) -> type[H11Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """A connection that counts against the limit, and is closed when it sends no request or goes on sending one
        that was refused. The keep-alive limit of uvicorn covers only pauses between requests, and one byte ends it."""

        _last_cycle: object = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as its base has it
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.abort()
            else:
                self.loop.call_later(request_seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.transport.is_closing():
                return
            # A request of which the body has not come, too: nothing else ends it.
            if self.cycle is self._last_cycle and (
                self._last_cycle is None or self.cycle.response_complete or self.cycle.more_body
            ):
                self.transport.abort()
                return
            self._last_cycle = self.cycle
            self.loop.call_later(request_seconds, self._close_if_idle)

    return Connection


def _require_token(app: App, token: str) -> App:
    """Wrap `app` so that it serves only requests with the token."""
    expected = token.encode()

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), expected):
                headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": REFUSAL})
                return
        await app(scope, receive, send)

    return guard
