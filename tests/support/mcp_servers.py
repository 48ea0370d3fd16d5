"""MCP servers in this process, each on a thread of its own: over pipes, and over HTTP on a free port."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from served import ServedClient, ServedWorkspace, WorkspaceServer, listen, serve_http, serve_stdio

from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Section, Tool, ToolContext, ToolResult
from ringfence.runtime import Cancellation, Receipt, Session
from ringfence_tools import VfsToolsSection

PATIENT = 30.0
TOKEN = "0123456789abcdef-token"
LEGACY, MODERN = "2025-06-18", "2026-07-28"
ERAS = [LEGACY, MODERN]
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
    "Authorization": f"Bearer {TOKEN}",
}
HELLO = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
ENVELOPE = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}


def message(method: str, params: Mapping[str, Any], number: int = 1) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params}).encode()


def many_files(count: int) -> str:
    """A patch that makes many files: if one of them is there, all are."""
    return "".join(f"--- /dev/null\n+++ b/m/{number}\n@@ -0,0 +1 @@\n+x\n" for number in range(count))


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class Long:
    text: str
    lines: tuple[str, ...] = ()


class Bench:
    """A workspace in memory with tools that wait, that have a long result, and that raise."""

    def __init__(self, directory: Path) -> None:
        self.filesystem = InMemoryFilesystem()
        self.started, self.released = threading.Event(), threading.Event()
        self.long_characters = 10_000_000
        self.workspace = ServedWorkspace(directory, self.filesystem, self._sections, (), self.released.set)

    def _sections(self, session: Session, shared: bool) -> list[Section[Any]]:
        tools: list[Tool[Any, Any]] = [
            Tool[Nothing, Nothing](name="slow", description="Writes, and waits.", handler=self._slow),
            Tool[Nothing, Long](name="long", description="Says much.", handler=self._long, read_only=True),
            Tool[Nothing, list[Long]](name="many", description="Says many things.", handler=self._many, read_only=True),
            Tool[Nothing, Nothing](name="broken", description="Breaks.", handler=self._broken),
        ]
        files = VfsToolsSection(session=session, filesystem=self.filesystem, shared_session=shared)
        return [files, MarkdownSection(title="Bench", template="", tools=tools)]

    def _slow(self, params: Nothing, *, context: ToolContext) -> ToolResult[Nothing]:
        self.filesystem.write("slow.txt", "half\n")
        self.started.set()
        assert self.released.wait(PATIENT)
        self.filesystem.write("slow.txt", "whole\n")
        return ToolResult.ok(Nothing())

    def _long(self, params: Nothing, *, context: ToolContext) -> ToolResult[Long]:
        return ToolResult.ok(Long("x" * self.long_characters, ("y" * 1000,) * (self.long_characters // 1000)), "much")

    def _many(self, params: Nothing, *, context: ToolContext) -> ToolResult[list[Long]]:
        return ToolResult.ok([Long("a"), Long("b")], "two")

    def _broken(self, params: Nothing, *, context: ToolContext) -> ToolResult[Nothing]:
        self.filesystem.write("broken.txt", "half\n")
        raise RuntimeError("out of order")


def collecting(receipts: list[Receipt]) -> Callable[[Session], None]:
    return lambda session: session.dispatcher.subscribe(Receipt, receipts.append)


@dataclass
class Opened:
    """A workspace that is open already."""

    workspace: ServedWorkspace
    observe: Callable[[Session], None]

    def list_tools(self, *, shared: bool, extra: bool = True) -> Iterable[Tool[Any, Any]]:
        client = ServedClient(self.workspace, lambda session: None, shared=shared)
        client.close()
        return client.tools.values()

    def open(self, cancellation: Cancellation) -> ServedWorkspace:
        return self.workspace


def server_of(workspace: ServedWorkspace, observe: Callable[[Session], None]) -> WorkspaceServer:
    return WorkspaceServer(workspace.directory, lambda: Opened(workspace, observe))


@contextmanager
def in_background(server: WorkspaceServer, serve: Callable[[], Awaitable[None]]) -> Iterator[Callable[[], bool]]:
    """Run a transport on a thread, until the end of the block. Yield whether it ends by itself, which is waited for."""

    async def serving(*, task_status: anyio.abc.TaskStatus[anyio.CancelScope]) -> None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            await serve()

    with start_blocking_portal() as portal:
        running, scope = portal.start_task(serving)
        try:
            yield lambda: bool(wait([running], PATIENT).done)
        finally:
            portal.call(server.stop)
            portal.call(scope.cancel)
            running.result(PATIENT)
            server.wait()


class LineClient:
    """A client that speaks line by line, to a process or to a server over pipes."""

    def __init__(self, to_server: IO[bytes], from_server: IO[bytes]) -> None:
        self.to_server, self.from_server = to_server, from_server

    def send(self, data: bytes) -> None:
        self.to_server.write(data + b"\n")
        self.to_server.flush()

    def ask(self, method: str, params: Mapping[str, Any], number: int = 1) -> None:
        self.send(message(method, params, number))

    def answer(self) -> Any:
        return json.loads(self.from_server.readline())

    def hello(self) -> None:
        self.ask("initialize", HELLO, 0)
        assert self.answer()["result"]["serverInfo"]["name"] == "ringfence"
        self.send(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')

    def call(self, name: str, number: int = 1, **arguments: Any) -> None:
        self.ask("tools/call", {"name": name, "arguments": arguments}, number)

    def result(self, name: str, **arguments: Any) -> Any:
        self.call(name, **arguments)
        return self.answer()["result"]


@dataclass
class PipeServer:
    client: LineClient
    receipts: list[Receipt]
    ends: Callable[[], bool]
    """Whether the server ends by itself."""


@contextmanager
def pipe_server(workspace: ServedWorkspace) -> Iterator[PipeServer]:
    receipts: list[Receipt] = []
    server = server_of(workspace, collecting(receipts))
    (source, to_server), (from_server, target) = os.pipe(), os.pipe()
    with open(to_server, "wb") as writing, open(from_server, "rb") as reading:

        async def serve() -> None:
            try:
                await serve_stdio(server.protocol(), source, target)
            finally:
                os.close(source)
                os.close(target)

        with in_background(server, serve) as ends:
            client = LineClient(writing, reading)
            client.hello()
            yield PipeServer(client, receipts, ends)


@dataclass
class HttpServer:
    port: int
    host: str = "127.0.0.1"
    receipts: list[Receipt] = field(default_factory=list[Receipt])
    connections: list[http.client.HTTPConnection] = field(default_factory=list[http.client.HTTPConnection])

    @asynccontextmanager
    async def client(self, era: str = "auto", **headers: str | bytes) -> AsyncGenerator[Client]:
        given: dict[str, str | bytes] = {"Authorization": f"Bearer {TOKEN}", **headers}
        sent = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in given.items()]
        async with httpx2.AsyncClient(headers=sent, timeout=PATIENT) as transport:
            url = f"http://{self.host}:{self.port}/mcp"
            async with Client(streamable_http_client(url, http_client=transport), mode=era) as client:
                yield client

    def connection(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENT)
        self.connections.append(connection)
        return connection

    def post(self, body: bytes, **headers: str) -> tuple[int, str]:
        """The status and text of the answer. Underscores in names of headers stand for hyphens."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(self.connection()) as connection:
            connection.request("POST", "/mcp", body, {**HEADERS, **given})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def asked(self, method: str, params: Mapping[str, Any], session: str | None) -> http.client.HTTPConnection:
        """A connection on which a request was made, and is not answered yet. Without a session it is of the newer
        protocol, which has none."""
        headers = dict(HEADERS)
        if session is not None:
            headers["mcp-session-id"] = session
        elif method != "initialize":
            params = {**params, "_meta": ENVELOPE}
            headers |= {"MCP-Protocol-Version": MODERN, "Mcp-Method": method, "Mcp-Name": str(params.get("name"))}
        connection = self.connection()
        connection.request("POST", "/mcp", message(method, params), headers)
        return connection

    def session(self) -> str:
        with closing(self.asked("initialize", HELLO, None)) as connection:
            answer = connection.getresponse()
            answer.read()
        session = answer.getheader("mcp-session-id")
        assert session is not None, answer.status
        return session

    def session_of(self, era: str) -> str | None:
        return None if era == MODERN else self.session()

    def calling(self, name: str, session: str | None, **arguments: Any) -> http.client.HTTPConnection:
        return self.asked("tools/call", {"name": name, "arguments": arguments}, session)

    def call(self, name: str, session: str | None, **arguments: Any) -> dict[str, Any]:
        with closing(self.calling(name, session, **arguments)) as connection:
            return result(connection)

    def status(self, data: bytes) -> bytes:
        """The first line of the answer to raw bytes."""
        with socket.create_connection((self.host, self.port), timeout=PATIENT) as connection:
            connection.sendall(data)
            return connection.makefile("rb").readline().strip()

    def wait_for_receipt(self) -> None:
        until = time.monotonic() + PATIENT
        while not self.receipts:
            assert time.monotonic() < until, "no call has ended"
            time.sleep(0.01)


def result(connection: http.client.HTTPConnection) -> dict[str, Any]:
    said = connection.getresponse().read().decode()
    return json.loads(said[said.index("{") : said.rindex("}") + 1])["result"]


@contextmanager
def http_server(
    workspace: ServedWorkspace, *, host: str = "127.0.0.1", names: tuple[str, ...] = (), **limits: Any
) -> Iterator[HttpServer]:
    listening = listen(host, 0)
    http_server = HttpServer(listening.getsockname()[1], host)
    server = server_of(workspace, collecting(http_server.receipts))

    async def serve() -> None:
        await serve_http(server.protocol(), listening, TOKEN, names, **limits)

    with in_background(server, serve):
        try:
            yield http_server
        finally:
            for connection in http_server.connections:
                connection.close()
