"""The MCP server of a workspace: its tools, its resources, and the queue of calls to them."""

from __future__ import annotations

import base64
import mimetypes
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from itertools import islice
from operator import attrgetter
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

import anyio
import mcp_types as types
from anyio import to_thread
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from ringfence.failures import describe_error
from ringfence.filesystem.paths import escape_path
from ringfence.filesystem.protocol import FileEntry, Filesystem
from ringfence.prompt.tool import Tool
from ringfence.runtime.limits import Cancellation
from ringfence_cli.serve.answers import client_name, shown_characters
from ringfence_cli.serve.clients import Client, Clients, Observe, error_result
from ringfence_cli.serve.descriptions import describe_tool, with_hints
from ringfence_cli.serve.workspaces import ServedWorkspace
from ringfence_tools.run_workspace import is_git_data

QUEUE_SECONDS = 60.0
"""How long a call waits for the calls before it."""
BUSY = f"another call has been running for {QUEUE_SECONDS:g} s: try again when it has ended"
PROGRESS_SECONDS = 1.0
"""The time between two progress notifications of a call."""
INSTRUCTIONS = """\
Tools for the files of a workspace: {directory}. Paths are relative to its root. Every call is a transaction: one that
fails, is denied or is cancelled has changed nothing, and says how to get it right. Read a file before you change or
move it, and all of it before you replace or remove it."""

SCHEME = "workspace:///"
PAGE_SIZE = 200
"""Resources on one page."""
MAX_RESOURCE_BYTES = 1 << 20
"""The limit of one resource. `read_file` reads a larger file in parts."""
TEMPLATE = types.ResourceTemplate(
    uri_template=f"{SCHEME}{{+path}}", name="file", description="A file of the workspace, by its path from the root."
)

Context = ServerRequestContext[Clients, Any]
Page = types.PaginatedRequestParams | None
ResultT = TypeVar("ResultT")


class WorkspaceServer:
    """Serve one workspace to any number of clients.

    Calls run on a thread, one at a time, in the order of their arrival. A call is rolled back when its client cancels
    it or disconnects.
    """

    def __init__(self, workspace: ServedWorkspace, observe: Observe, *, max_answer: int | None = None) -> None:
        """``max_answer`` is the most characters of an answer; None is what a client is known to show.

        Raise what the sections of the workspace raise, for instance PromptValidationError."""
        self._workspace = workspace
        self._max_answer = max_answer
        self._make_client = partial(Client, workspace, observe)
        self._tools = self._make_tools(shared=False)
        self._descriptions: dict[bool, Mapping[str, types.Tool]] = {}
        """By whether the clients that have these tools share a session."""
        self._turn = anyio.Lock()
        self._working = threading.Lock()
        self._running: set[Cancellation] = set()
        self._stopped = False

    def protocol(self) -> Server[Clients]:
        """The server object of the SDK, for any transport."""
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
        """Cancel the running calls, so that they roll back, and every later call."""
        self._stopped = True
        for cancellation in self._running:
            cancellation.cancel()

    def wait(self) -> None:
        """Wait until no call runs. The workspace can be closed after that."""
        with self._working:
            pass

    @asynccontextmanager
    async def _clients(self, _: Server[Clients]) -> AsyncGenerator[Clients]:
        clients = Clients(self._make_client)
        try:
            yield clients
        finally:
            clients.close()

    def _make_tools(self, *, shared: bool) -> Mapping[str, Tool[Any, Any]]:
        client = self._make_client(shared=shared)
        client.close()
        return client.tools

    def _describe(self, shared: bool) -> Mapping[str, types.Tool]:
        if shared not in self._descriptions:
            tools = self._make_tools(shared=True) if shared else self._tools
            self._descriptions[shared] = {name: describe_tool(tool) for name, tool in tools.items()}
        return self._descriptions[shared]

    def _schema(self, name: str) -> Mapping[str, Any] | None:
        """The transport asks for it where clients have no sessions."""
        description = self._describe(True).get(name)
        return description.input_schema if description is not None else None

    def _answer_limit(self, name: str) -> int:
        return self._max_answer or shown_characters(name)

    async def _list_tools(self, context: Context, params: Page) -> types.ListToolsResult:
        name = client_name(context)
        tools = self._describe(context.lifespan_context.of(context).shared).values()
        return types.ListToolsResult(tools=with_hints(tools, name, self._answer_limit(name)))

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        client = context.lifespan_context.of(context)
        limit = self._answer_limit(client_name(context))
        cancellation = Cancellation()
        self._running.add(cancellation)
        client.calls += 1
        if self._stopped:
            cancellation.cancel()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_report_progress, params.name, cancellation, context)
                if context.request is not None:
                    group.start_soon(_cancel_on_disconnect, context.request.receive, cancellation)
                result = await self._run_in_turn(
                    partial(client.call, params.name, params.arguments, cancellation, limit)
                )
                group.cancel_scope.cancel()
                return result
        except* MCPError:
            pass
        finally:
            client.calls -= 1
            self._running.discard(cancellation)
        return error_result(BUSY)

    # Resources are read between two calls. During a call the files hold changes that may be rolled back.

    async def _list_resources(self, context: Context, params: Page) -> types.ListResourcesResult:
        cursor = params.cursor if params is not None else None
        return await self._run_in_turn(partial(list_resources, self._workspace.filesystem, cursor))

    async def _list_templates(self, context: Context, params: Page) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[TEMPLATE])

    async def _read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return await self._run_in_turn(partial(read_resource, self._workspace.filesystem, str(params.uri)))

    async def _run_in_turn(self, work: Callable[[], ResultT]) -> ResultT:
        """Run ``work`` on a thread after the calls before it. Raise MCPError if those take too long.

        A cancellation still waits for the thread, because nothing can interrupt a thread.
        """
        try:
            with anyio.fail_after(QUEUE_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise MCPError(code=types.INTERNAL_ERROR, message=BUSY) from None
        try:
            return await to_thread.run_sync(self._work, work)
        finally:
            self._turn.release()

    def _work(self, work: Callable[[], ResultT]) -> ResultT:
        with self._working:
            return work()


async def _report_progress(name: str, cancellation: Cancellation, context: Context) -> None:
    """Send progress notifications of a call. Cancel the call when its request is cancelled."""
    started = monotonic()
    try:
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            seconds = monotonic() - started
            await context.session.report_progress(seconds, None, f"{name} has been running for {seconds:.0f} s")
    finally:
        cancellation.cancel()


async def _cancel_on_disconnect(
    receive: Callable[[], Awaitable[Mapping[str, Any]]], cancellation: Cancellation
) -> None:
    """Cancel the call when the connection of its request is closed.

    The protocol up to 2025-11-25 lets the call continue. But its result is lost, and the client would assume that
    nothing was changed.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    cancellation.cancel()


def list_resources(filesystem: Filesystem, cursor: str | None) -> types.ListResourcesResult:
    """List one page of files. The cursor is the URI of the last file of the page before."""
    after = resource_path(cursor) if cursor else ""
    files = list(islice(iterate_files(filesystem, after), PAGE_SIZE + 1))
    page = [
        types.Resource(
            uri=resource_uri(file.path),
            name=escape_path(file.path),
            size=file.size_bytes,
            mime_type=_mime_type(file.path),
        )
        for file in files[:PAGE_SIZE]
    ]
    return types.ListResourcesResult(resources=page, next_cursor=page[-1].uri if len(files) > PAGE_SIZE else None)


def read_resource(filesystem: Filesystem, uri: str) -> types.ReadResourceResult:
    """Read one whole file. Raise MCPError if it is missing or too large."""
    path = resource_path(uri)
    try:
        size = filesystem.stat(path).size_bytes
        if size > MAX_RESOURCE_BYTES:
            raise ValueError(f"a resource has at most {MAX_RESOURCE_BYTES:,} bytes: read this one with read_file")
        content = filesystem.read_bytes(path, limit=MAX_RESOURCE_BYTES).content
    except (OSError, ValueError) as error:
        raise MCPError(code=types.INVALID_PARAMS, message=describe_error(error)) from None
    contents: types.TextResourceContents | types.BlobResourceContents
    try:
        contents = types.TextResourceContents(uri=uri, mime_type=_mime_type(path), text=content.decode())
    except UnicodeDecodeError:
        data = base64.b64encode(content).decode()
        contents = types.BlobResourceContents(uri=uri, mime_type=_mime_type(path), blob=data)
    return types.ReadResourceResult(contents=[contents])


def resource_uri(path: str) -> str:
    return SCHEME + quote(path.encode("utf-8", "surrogateescape"))


def resource_path(uri: str) -> str:
    """Return the path of a resource. Raise MCPError for a URI of another scheme."""
    if not uri.startswith(SCHEME):
        raise MCPError(code=types.INVALID_PARAMS, message=f"the address of a file begins with {SCHEME}")
    return unquote_to_bytes(uri[len(SCHEME) :]).decode("utf-8", "surrogateescape")


def iterate_files(filesystem: Filesystem, after: str) -> Iterator[FileEntry]:
    """Yield the regular files after the path `after`, in the order of their paths, without git's own data.

    Directories whose files are all before `after` are not listed.
    """
    pending: list[tuple[FileEntry | None, list[str]]] = [(None, after.split("/"))]
    while pending:
        entry, (first, *rest) = pending.pop()
        if entry is not None and not entry.is_directory:
            yield entry
            continue
        try:
            entries = filesystem.list("" if entry is None else entry.path)
        except OSError:  # removed meanwhile, or not readable
            continue
        for child in sorted(entries, key=attrgetter("name"), reverse=True):
            if child.is_symlink or is_git_data(child.name) or child.name < first:
                continue
            if child.name > first:
                pending.append((child, [""]))
            elif child.is_directory:
                pending.append((child, rest or [""]))


def _mime_type(path: str) -> str:
    return mimetypes.guess_type(path)[0] or "text/plain"
