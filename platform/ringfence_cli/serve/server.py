"""An MCP server over one workspace: what clients ask, and the way of their tool calls to the executor and back."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from importlib.metadata import version
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio import to_thread
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
)
from mcp_types import Tool as ToolDescription

from ringfence.filesystem.paths import escape_path
from ringfence.runtime.limits import Cancellation
from ringfence.runtime.receipts import Receipt
from ringfence_cli.serve import resources
from ringfence_cli.serve.clients import Client, Clients
from ringfence_cli.serve.results import described, failed
from ringfence_cli.serve.workspaces import ServedWorkspace
from ringfence_tools.agent_run import MakeSection

if TYPE_CHECKING:
    from ringfence.telemetry import Telemetry

PATIENCE_SECONDS = 60.0
"""How long a call waits for those before it."""
PROGRESS_SECONDS = 1.0
"""Between two signs of life of a call that takes long."""
INSTRUCTIONS = """\
Tools for the files of a workspace: {directory}. Paths are relative to its root. Every call is a transaction: one that
fails, is denied or is cancelled has changed nothing, and says how to get it right. Read a file before you change, move
or remove it."""

Context = ServerRequestContext[Clients, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
ReportProgress = Callable[[float, float | None, str | None], Awaitable[None]]
FoundT = TypeVar("FoundT")


class WorkspaceServer:
    """Serves a workspace to any number of clients. One call runs at a time, in the order they came, on a thread; a
    call whose client cancels it, or vanishes, is rolled back."""

    def __init__(
        self,
        workspace: ServedWorkspace,
        hear: Callable[[Receipt], None],
        telemetry: Telemetry | None = None,
        added: Sequence[MakeSection] = (),
    ) -> None:
        """``hear`` is told the receipt of every call, on the thread of the call. The protocol's SDK makes spans of
        requests itself; those of ``telemetry`` are within them."""
        self._workspace = workspace
        self._make = partial(Client, workspace, hear, telemetry, added)
        self._turn = anyio.Lock()
        self._working = threading.Lock()
        self._running: set[Cancellation] = set()
        self._stopped = False

    def protocol(self) -> Server[Clients]:
        """The server as the SDK runs it, over any transport."""
        return Server(
            "ringfence",
            version=version("ringfence"),
            instructions=INSTRUCTIONS.format(directory=escape_path(os.path.realpath(self._workspace.directory))),
            lifespan=self._clients,
            get_tool_input_schema=self._schema,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )

    def stop(self) -> None:
        """Cancel what runs, so that it rolls back, and refuse what comes."""
        self._stopped = True
        for cancellation in self._running:
            cancellation.cancel()

    def wait(self) -> None:
        """Until no handler runs. From here on the workspace can be closed."""
        with self._working:
            pass

    @asynccontextmanager
    async def _clients(self, _: Server[Clients]) -> AsyncGenerator[Clients]:
        clients = Clients(self._make)
        try:
            yield clients
        finally:
            clients.close()

    @cached_property
    def _tools(self) -> Sequence[ToolDescription]:
        """Those of every client."""
        client = self._make()
        client.close()
        return [described(tool) for tool in client.tools.values()]

    def _schema(self, name: str) -> Mapping[str, Any] | None:
        return next((tool.input_schema for tool in self._tools if tool.name == name), None)

    async def _list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=list(self._tools))

    async def _call_tool(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        client = context.lifespan_context.of(context)
        cancellation = Cancellation()
        call = partial(client.call, params.name, params.arguments, cancellation)
        result: CallToolResult | None = None
        self._running.add(cancellation)
        client.calls += 1
        if self._stopped:
            cancellation.cancel()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_watch, params.name, cancellation, context.session.report_progress)
                if context.request is not None:
                    group.start_soon(_cancel_on_disconnect, context.request.receive, cancellation)
                result = await self._in_turn(call)
                group.cancel_scope.cancel()
        finally:
            client.calls -= 1
            self._running.discard(cancellation)
        if result is None:
            return failed(f"another call has been running for {PATIENCE_SECONDS:g} s: try again when it has ended")
        return result

    async def _list_resources(self, context: Context, params: PaginatedRequestParams | None) -> ListResourcesResult:
        cursor = params.cursor if params is not None else None
        return await self._looking(partial(resources.listed, self._workspace.filesystem, cursor))

    async def _list_templates(
        self, context: Context, params: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=[resources.TEMPLATE])

    async def _read_resource(self, context: Context, params: ReadResourceRequestParams) -> ReadResourceResult:
        return await self._looking(partial(resources.read, self._workspace.filesystem, str(params.uri)))

    async def _looking(self, look: Callable[[], FoundT]) -> FoundT:
        """Between calls, so that nothing is seen that may be rolled back."""
        found = await self._in_turn(look)
        if found is None:
            raise MCPError(code=INTERNAL_ERROR, message=f"a call has been running for {PATIENCE_SECONDS:g} s")
        return found

    async def _in_turn(self, work: Callable[[], FoundT]) -> FoundT | None:
        """Run it on a thread, after what came before; None if that takes too long. When this is cancelled it still
        waits for the thread, which nothing can interrupt."""
        with anyio.move_on_after(PATIENCE_SECONDS) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            return None
        try:
            return await to_thread.run_sync(self._work, work)
        finally:
            self._turn.release()

    def _work(self, work: Callable[[], FoundT]) -> FoundT:
        with self._working:
            return work()


async def _watch(name: str, cancellation: Cancellation, report: ReportProgress) -> None:
    """Tells who asked that the call goes on, and the call when nobody asks any more."""
    started = monotonic()
    try:
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            seconds = monotonic() - started
            await report(seconds, None, f"{name} has been running for {seconds:.0f} s")
    finally:
        cancellation.cancel()


async def _cancel_on_disconnect(receive: Receive, cancellation: Cancellation) -> None:
    """Cancels the call when the connection that waits for its answer is gone. Until 2025-11-25 the protocol has calls
    go on after that; but the answer is lost, so who asked would take for undone what was done."""
    while (await receive())["type"] != "http.disconnect":
        pass
    cancellation.cancel()
