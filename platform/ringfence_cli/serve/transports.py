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
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server.lowlevel import Server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from ringfence_cli.serve.clients import Clients

if TYPE_CHECKING:
    import asyncio

    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_LINE_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
ATOMIC_BYTES = 4096
"""What a pipe that is ready for writing accepts without blocking."""
DRAIN_SECONDS = 5.0
"""The time a client has to read the last results."""
REFUSAL_SECONDS = 5.0
"""The time a refused client has to send its requests and disconnect."""

PATH = "/mcp"
GRACE_SECONDS = 1
"""The time open requests have to end when the server stops. Their calls are already cancelled."""
BACKLOG = 64
"""Connections accepted at a time, before those over the limit are closed."""
REFUSAL = b"'Authorization: Bearer TOKEN' is missing or wrong; the server said its token when it started\n"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")

Outgoing = MemoryObjectSendStream[SessionMessage]
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Read = MemoryObjectReceiveStream[SessionMessage | Exception]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


async def serve_stdio(server: Server[Clients]) -> None:
    """Serve until the client closes our standard input or disconnects."""
    async with _messages() as (read, write):
        await server.run(read, write, server.create_initialization_options())


async def refuse_stdio(reason: str) -> None:
    """Answer every request with the reason of the refusal, since few clients show standard error."""
    with anyio.move_on_after(REFUSAL_SECONDS):
        async with _messages() as (read, write), read, write:
            refusals = _Refusals(write)
            async for item in read:
                if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCRequest):
                    await refusals.send(INTERNAL_ERROR, reason, item.message.id)


@asynccontextmanager
async def _messages() -> AsyncGenerator[tuple[Read, Outgoing]]:
    """Yield the stream of the client's messages and the stream for ours. The caller closes both."""
    with _reserve_streams() as (source, target):
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception]()
        write, outgoing = anyio.create_memory_object_stream[SessionMessage]()
        async with anyio.create_task_group() as group:
            group.start_soon(_read, source, incoming, write.clone())
            group.start_soon(_write, target, outgoing, group.cancel_scope)
            yield read, write
            # The client has closed our standard input. It may not read the remaining results.
            group.cancel_scope.deadline = anyio.current_time() + DRAIN_SECONDS


@contextmanager
def _reserve_streams() -> Generator[tuple[int, int]]:
    """Reserve standard input and output for the protocol. Other code reads nothing and writes to standard error."""
    source, target = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    try:
        yield source, target
    finally:
        os.dup2(source, 0)
        os.dup2(target, 1)
        os.close(source)
        os.close(target)


class _Refusals:
    """Send errors for invalid messages. A client that reads none of them does not stop the reading of its input."""

    def __init__(self, answers: Outgoing) -> None:
        self._answers = answers
        self._wait_seconds = DRAIN_SECONDS

    async def send(self, code: int, message: str, request: str | int | None = None) -> None:
        error = JSONRPCError(jsonrpc="2.0", id=request, error=ErrorData(code=code, message=message))
        with anyio.move_on_after(self._wait_seconds) as waiting:
            await self._answers.send(SessionMessage(error))
        self._wait_seconds = 0.001 if waiting.cancelled_caught else DRAIN_SECONDS


async def _read(source: int, incoming: Incoming, answers: Outgoing) -> None:
    buffer = bytearray()
    skipping = False
    refusals = _Refusals(answers)
    async with incoming, answers:
        while data := await _read_chunk(source):
            buffer += data
            *lines, rest = buffer.split(b"\n") if b"\n" in data else (buffer,)
            for line in lines:
                if not skipping and line.strip():
                    await _receive_line(bytes(line), incoming, refusals)
                skipping = False
            if len(rest) > MAX_LINE_BYTES:
                if not skipping:
                    await refusals.send(INVALID_REQUEST, f"a message has at most {MAX_LINE_BYTES:,} bytes")
                skipping, rest = True, bytearray()
            buffer = rest


async def _receive_line(line: bytes, incoming: Incoming, refusals: _Refusals) -> None:
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError as error:
        details = error.errors()[0]
        # Some clients write half of a surrogate pair, or a number of thousands of digits. They wait for an answer to
        # the id of the request.
        request = _request_id(line)
        if details["type"] == "json_invalid":
            await refusals.send(PARSE_ERROR, f"this line cannot be read: {details['msg']}", request)
        else:
            await refusals.send(INVALID_REQUEST, "this line is no JSON-RPC message", request)
        return
    # A message with an id is a request. Its client would wait for ever if it passed for a notification.
    if isinstance(message, JSONRPCNotification) and b'"id"' in line and "id" in _load_json(line):
        await refusals.send(INVALID_REQUEST, "the id of a request is a text or a whole number")
        return
    await incoming.send(SessionMessage(message))


def _request_id(line: bytes) -> str | int | None:
    """Return the id of an invalid request, if it has one."""
    try:
        match _load_json(line):
            case {"id": str() | int() as request} if not isinstance(request, bool):
                str(request).encode()  # half of a surrogate pair could not be sent back
                return request
            case _:
                return None
    except (ValueError, RecursionError):
        return None


def _load_json(line: bytes) -> Any:
    return json.loads(line, parse_int=_parse_int)


def _parse_int(digits: str) -> int | None:
    """Return None for a number with more digits than Python converts."""
    try:
        return int(digits)
    except ValueError:
        return None


async def _read_chunk(source: int) -> bytes:
    """Read what is available. Return nothing at the end, or when the writer is gone."""
    with suppress(PermissionError):  # a file, which can always be read
        await anyio.wait_readable(source)
    try:
        return os.read(source, CHUNK_BYTES)
    except OSError:
        return b""


async def _write(target: int, outgoing: MemoryObjectReceiveStream[SessionMessage], scope: anyio.CancelScope) -> None:
    async with outgoing, anyio.create_task_group() as group:
        group.start_soon(_cancel_on_disconnect, target, scope)
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                await _write_all(target, text.encode() + b"\n")
            except OSError:  # the reader is gone
                scope.cancel()
        group.cancel_scope.cancel()


async def _cancel_on_disconnect(target: int, scope: anyio.CancelScope) -> None:
    """Cancel all work when the client stops reading. It would assume that a later call changed nothing."""
    with suppress(PermissionError):  # a file
        await anyio.wait_readable(target)  # a disconnect is readable; so is the input of a terminal or a socket
        waiting = select.poll()
        waiting.register(target, 0)
        if waiting.poll(0):
            scope.cancel()


async def _write_all(target: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        with suppress(PermissionError):  # a file, which can always be written to
            await anyio.wait_writable(target)
        rest = rest[os.write(target, rest[:ATOMIC_BYTES]) :]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the clients of an HTTP server may use of it."""

    connections: int = 256
    """Open at once. The files of the workspace need descriptors too."""
    sessions: int = 1000
    """Sessions of the protocol up to 2025-11-25, about 40 kB each. A session ends after half an hour without use."""
    request_seconds: float = 10.0
    """The time a connection has to send a request."""


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
    def url_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``, ``[::1]:PORT`` or ``PORT``; port 0 is any free port. Raise ValueError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:8765")
    return Address(host, int(port))


def listen(address: Address) -> socket.socket:
    """Open a listening socket. Raise OSError if that is impossible."""
    family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(target)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


async def serve_http(
    server: Server[Clients], listening: socket.socket, token: str, hosts: Sequence[str], limits: Limits | None = None
) -> None:
    """Serve until cancelled. ``hosts`` are the names that clients may use, besides those of this machine."""
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    class WebServer(uvicorn.Server):
        """A server that leaves signals to the command."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    limits = limits or Limits()
    own = Address(*listening.getsockname()[:2])
    names = [*LOOPBACK_NAMES, *([own.url_host] if own.is_loopback else []), *map(_host_header, hosts)]
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
        require_token(app, token),
        http=_connection_type(limits),
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    web = WebServer(config)
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_when_cancelled, web)
        with anyio.CancelScope(shield=True):
            await web.serve(sockets=[listening])
        group.cancel_scope.cancel()


def _host_header(host: str) -> str:
    """Return a name or address in the form of the header ``Host``."""
    try:
        return Address(str(ipaddress.ip_address(host)), 0).url_host
    except ValueError:
        return host.lower()


async def _stop_when_cancelled(web: uvicorn.Server) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        web.should_exit = True


def _connection_type(limits: Limits) -> type[H11Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """A connection that counts against the limit, and is closed when it sends no request or goes on sending one
        that was refused. The keep-alive limit of uvicorn covers only pauses between requests, and one byte ends it."""

        _last_cycle: object = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # as its base has it
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            else:
                self.loop.call_later(limits.request_seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.transport.is_closing():
                return
            if self.cycle is self._last_cycle and (self._last_cycle is None or self.cycle.response_complete):
                self.transport.abort()
                return
            self._last_cycle = self.cycle
            self.loop.call_later(limits.request_seconds, self._close_if_idle)

    return Connection


def require_token(app: App, token: str) -> App:
    """Wrap `app` so that it serves only requests with the token."""
    expected = token.encode()

    async def guard(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _has_token(dict(scope["headers"]), expected):
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
            return
        await app(scope, receive, send)

    return guard


def _has_token(headers: Mapping[bytes, bytes], expected: bytes) -> bool:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), expected)
