"""The MCP server of a workspace: its tools, its resources, and the queue of calls to them.

A client waits for the list of tools, which needs little of what their calls need. That is imported when it is needed.
"""

from __future__ import annotations

import base64
import mimetypes
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote, unquote_to_bytes

import anyio
import click
import mcp_types as types
from anyio import to_thread
from anyio.abc import TaskGroup
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError

from ringfence import __version__
from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence_mcp.first_answer import NAME, instructions_of
from ringfence_mcp.identity import client_name, identity_of
from ringfence_mcp.progress import cancel_on_disconnect, report_progress
from ringfence_mcp.questions import Elicitation, elicitation_of

if TYPE_CHECKING:
    from ringfence.filesystem.protocol import FileEntry, Filesystem
    from ringfence.limits import Cancellation
    from ringfence.runtime.tool import Tool
    from ringfence.secrets import Secrets
    from ringfence.session.session import Session
    from ringfence_mcp.approvals import Approvals
    from ringfence_mcp.clients import ServedClients
    from ringfence_mcp.workspaces import ServedWorkspace

QUEUE_SECONDS = 60.0
"""How long a call waits for the calls before it."""
LIST_SECONDS = 10.0
"""How long a list of resources waits for them. Many clients wait a minute for an answer, and then drop the server."""
BUSY = f"another call has been running for {QUEUE_SECONDS:g} s: try again when it has ended"
SCHEME = "workspace:///"
PAGE_SIZE = 200
"""Resources on one page."""
MAX_RESOURCE_BYTES = 1 << 20
"""The limit of one resource. `read_file` reads a larger file in parts."""
TEMPLATE = types.ResourceTemplate(
    uri_template=f"{SCHEME}{{+path}}", name="file", description="A file of the workspace, by its path from the root."
)

NOT_OPEN = "{reason}\nNothing was changed. The next call tries again to open the workspace."

Context: TypeAlias = "ServerRequestContext[Connected, Any]"
Page = types.PaginatedRequestParams | None
ResultT = TypeVar("ResultT")


class Openable(Protocol):
    """A workspace that is opened when it is needed. Its methods raise click.ClickException: it cannot be opened."""

    def list_tools(self, *, shared: bool, extra: bool = True) -> Iterable[Tool[Any, Any]]:
        """Return the tools that clients will have, without opening it; ``shared`` for clients without an identity.

        Without ``extra``, those of the user's own sections are left out.
        """
        ...

    def open(self, cancellation: Cancellation) -> ServedWorkspace:
        """Open it, unless it is open."""
        ...

    def observe(self, session: Session, /) -> None:
        """Subscribe to the events of a client's session, which are published on the threads of its calls."""
        ...


@dataclass(slots=True)
class Connected:
    """The clients of one run of a transport, after the first call."""

    clients: ServedClients | None = None
    group: TaskGroup | None = None
    """For calls that outlast their first request, if calls are asked about."""


class WorkspaceServer:
    """Serve one workspace to any number of clients.

    Calls run on a thread, one at a time, in the order of their arrival. A call is rolled back when its client cancels
    it or disconnects. While the workspace cannot be opened, each call says why and tries again.
    """

    def __init__(
        self,
        directory: Path,
        load: Callable[[], Openable],
        *,
        max_answer: int | None = None,
        approvals: Approvals | None = None,
    ) -> None:
        """``max_answer`` is the most characters of an answer; None is what a client is known to show.

        ``approvals`` asks about calls, if the workspace has a policy that does.
        """
        self._directory = directory
        self._load = load
        self._loading = threading.Lock()
        self._loaded: Openable | None = None
        self._max_answer = max_answer
        self._turn = anyio.Lock(fast_acquire=True)
        self._listing = anyio.Lock()
        self._approvals = approvals
        self._working = threading.Lock()
        self._running: set[Cancellation] = set()
        self._stopped = False
        self._tools: dict[bool, Mapping[str, types.Tool]] = {}
        """By whether the clients that have these tools share a session."""
        self._listed = anyio.Event()

    def protocol(self) -> Server[Connected]:
        """The server object of the SDK, for any transport."""
        return Server(
            NAME,
            version=__version__,
            instructions=instructions_of(self._directory),
            lifespan=self._connected,
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
        for cancellation in tuple(self._running):
            cancellation.cancel()

    def wait(self) -> None:
        """Wait until no call runs. The workspace can be closed after that."""
        with self._working:
            pass

    def open(self) -> None:
        """Open the workspace now. Raise click.ClickException: it cannot be opened."""
        for shared in (False, True):
            self._list(shared=shared)
        self._filesystem()

    async def open_early(self) -> None:
        """Open the workspace as soon as a client has the tools, since its first call may be long in coming."""
        await self._listed.wait()
        with suppress(Exception):  # the first call says it
            await self._run_in_turn(self._filesystem)

    @asynccontextmanager
    async def _connected(self, _: Server[Connected]) -> AsyncGenerator[Connected]:
        connected = Connected()
        try:
            if self._approvals is None:
                yield connected
                return
            async with self._approvals.tasks() as connected.group:
                yield connected
        finally:
            if connected.clients is not None:
                connected.clients.close()

    @property
    def _workspace(self) -> Openable:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def _list(self, *, shared: bool) -> Mapping[str, types.Tool]:
        """List the tools: for now without those of sections that cannot be used, which is what each call says then.

        Raise click.ClickException: the directory cannot be read, and the tools depend on it.
        """
        from ringfence_mcp.descriptions import describe_tool

        if shared not in self._tools:
            try:
                tools = self._workspace.list_tools(shared=shared)
            except click.ClickException:
                return {
                    tool.name: describe_tool(tool) for tool in self._workspace.list_tools(shared=shared, extra=False)
                }
            self._tools[shared] = {tool.name: describe_tool(tool) for tool in tools}
        return self._tools[shared]

    def _schema(self, name: str) -> Mapping[str, Any] | None:
        """The transport asks for it where clients have no sessions."""
        description = self._tools.get(True, {}).get(name)
        return description.input_schema if description is not None else None

    def _answer_limit(self, name: str) -> int:
        from ringfence_mcp.known_clients import shown_characters

        return self._max_answer or shown_characters(name, self._directory)

    async def _list_tools(self, context: Context, params: Page) -> types.ListToolsResult:
        shared = identity_of(context) is None
        async with self._listing:  # not after the calls: a client drops a server whose tools do not come
            try:
                tools = await to_thread.run_sync(partial(self._list, shared=shared))
            except click.ClickException as error:
                raise _not_open(error) from error
        self._listed.set()
        from ringfence_mcp.descriptions import with_hints

        name = client_name(context)
        return types.ListToolsResult(tools=with_hints(tools.values(), name, self._answer_limit(name)))

    async def _call_tool(
        self, context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult | types.InputRequiredResult:
        approvals, answer = self._approvals, self._answer
        if approvals is not None:
            answer = partial(approvals.answer, handle=answer)
            if elicitation_of(context) is Elicitation.RESULT:
                return await approvals.answer_in_rounds(context, params, self._cancellation, answer)
        with self._cancellation() as cancellation:
            async with anyio.create_task_group() as group:
                group.start_soon(report_progress, params.name, cancellation, context)
                if context.request is not None:
                    group.start_soon(cancel_on_disconnect, context.request.receive, cancellation)
                result = await answer(context, params, cancellation)
                group.cancel_scope.cancel()
            return result  # pyright: ignore[reportPossiblyUnboundVariable]  # the group swallows no error

    async def _answer(
        self, context: Context, params: types.CallToolRequestParams, cancellation: Cancellation
    ) -> types.CallToolResult:
        try:
            return await self._run_in_turn(partial(self._call, context, params, cancellation))
        except MCPError as error:  # a model reads results
            from ringfence_mcp.clients import error_result

            return error_result(error.error.message)

    def _call(
        self, context: Context, params: types.CallToolRequestParams, cancellation: Cancellation
    ) -> types.CallToolResult:
        from ringfence_mcp.clients import ServedClient, ServedClients

        workspace, connected = self._workspace.open(cancellation), context.lifespan_context
        is_first = connected.clients is None
        if connected.clients is None:
            connected.clients = ServedClients(partial(ServedClient, workspace, self._workspace.observe))
        limit = self._answer_limit(client_name(context))
        result = connected.clients.of(context).call(params.name, params.arguments, cancellation, limit)
        if is_first and workspace.recovered:  # few clients show standard error
            result.content.insert(0, types.TextContent(type="text", text=workspace.recovered))
        if said := self._said_by_person():
            result.content.append(types.TextContent(type="text", text=said))
        return result

    def _said_by_person(self) -> str:
        """What a person has said meanwhile on the page of `ringfence view`. It is told once."""
        from ringfence_tools.runs.person_notes import PersonNotes

        with suppress(OSError):
            return PersonNotes(self._directory).take("told by an MCP server")
        return ""

    def _filesystem(self) -> Filesystem:
        with self._cancellation() as cancellation:
            return self._workspace.open(cancellation).filesystem

    @contextmanager
    def _cancellation(self, cancellation: Cancellation | None = None) -> Generator[Cancellation]:
        """Yield the cancellation of what the block does. `stop` cancels it."""
        from ringfence.limits import Cancellation

        cancellation = cancellation or Cancellation()
        self._running.add(cancellation)
        if self._stopped:
            cancellation.cancel()
        try:
            yield cancellation
        finally:
            self._running.discard(cancellation)

    # Resources are read between two calls. During a call the files hold changes that may be rolled back.

    async def _list_resources(self, context: Context, params: Page) -> types.ListResourcesResult:
        """List one page of files. It is empty while there is no workspace: some clients drop a server whose lists fail,
        and the calls say why.
        """
        after = resource_path(params.cursor) if params is not None and params.cursor else ""
        try:
            return await self._run_in_turn(lambda: list_resources(self._filesystem(), after), LIST_SECONDS)
        except Exception:
            return types.ListResourcesResult(resources=[])

    async def _list_templates(self, context: Context, params: Page) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=[TEMPLATE])

    async def _read_resource(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        return await self._run_in_turn(partial(self._read, str(params.uri)))

    def _read(self, uri: str) -> types.ReadResourceResult:
        with self._cancellation() as cancellation:
            workspace = self._workspace.open(cancellation)
        return read_resource(workspace.filesystem, uri, workspace.secrets)

    async def _run_in_turn(self, work: Callable[[], ResultT], seconds: float = QUEUE_SECONDS) -> ResultT:
        """Run ``work`` on a thread after the calls before it. Raise MCPError if those take too long, or if the
        workspace cannot be opened.

        A cancellation still waits for the thread, because nothing can interrupt a thread.
        """
        try:
            with anyio.fail_after(seconds):
                await (self._turn.acquire() if self._approvals is None else self._approvals.acquire(self._turn))
        except TimeoutError:
            raise MCPError(code=types.INTERNAL_ERROR, message=BUSY) from None
        try:
            return await to_thread.run_sync(self._work, work)
        except click.ClickException as error:
            raise _not_open(error) from error
        finally:
            self._turn.release()

    def _work(self, work: Callable[[], ResultT]) -> ResultT:
        with self._working:
            return work()


def _not_open(error: click.ClickException) -> MCPError:
    return MCPError(code=types.INTERNAL_ERROR, message=NOT_OPEN.format(reason=error.format_message()))


def list_resources(filesystem: Filesystem, after: str) -> types.ListResourcesResult:
    """List one page of files, those after the path ``after``. The cursor of the next page is the URI of its last."""
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


def read_resource(filesystem: Filesystem, uri: str, secrets: Secrets) -> types.ReadResourceResult:
    """Read one whole file, with the secrets in it masked. Raise MCPError if it is missing or too large."""
    path = resource_path(uri)
    try:
        size = filesystem.stat(path).size_bytes
        if size > MAX_RESOURCE_BYTES:
            raise ValueError(f"a resource has at most {MAX_RESOURCE_BYTES:,} bytes: read this one with read_file")
        content = secrets.mask(filesystem.read_bytes(path, limit=MAX_RESOURCE_BYTES).content)
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
    from ringfence_tools.runs.run_workspace import is_git_data

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
