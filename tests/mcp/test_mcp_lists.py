"""What an MCP server offers while its workspace cannot be opened. Some clients drop a server if one list fails."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import click
import httpx2
import pytest
from agent_runs import owner_file
from anyio import to_thread
from anyio.abc import TaskStatus
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_servers import MODERN, PATIENT, TOKEN, Bench, Opened
from mcp_types import METHOD_NOT_FOUND, TextContent
from served import ServedWorkspace, WorkspaceServer, listen, resource_uri, serve_http

from ringfence.errors import RestoreFailedError
from ringfence.prompt import Tool
from ringfence.runtime import Cancellation
from ringfence_sandbox import Workspace

pytestmark = pytest.mark.anyio
SERVE = ["-m", "ringfence_cli", "serve"]
FILE_TOOLS = {"ls", "read_file", "write_file", "edit_file", "apply_patch", "glob", "grep", "move", "rm"}


@pytest.fixture(params=["legacy", MODERN])
def era(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Openable(Opened):
    """A workspace that cannot be opened while there is a reason, and tools of the user's own that cannot be listed."""

    reason: Exception | None = click.ClickException("it is open in process 7")
    tools_reason: click.ClickException | None = None

    def list_tools(self, *, shared: bool, extra: bool = True) -> Iterable[Tool[Any, Any]]:
        if extra and self.tools_reason is not None:
            raise self.tools_reason
        return super().list_tools(shared=shared, extra=extra)

    def open(self, cancellation: Cancellation) -> ServedWorkspace:
        if self.reason is not None:
            raise self.reason
        return super().open(cancellation)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def openable(bench: Bench) -> Openable:
    bench.filesystem.write("a.txt", "one\n")
    return Openable(bench.workspace, lambda session: None)


@asynccontextmanager
async def connected(transport: str, era: str, server: WorkspaceServer) -> AsyncGenerator[Client]:
    if transport == "memory":
        async with Client(server.protocol(), mode=era) as client:
            yield client
        return
    listening = listen("127.0.0.1", 0)

    async def serve(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await serve_http(server.protocol(), listening, TOKEN, ())

    headers, url = {"Authorization": f"Bearer {TOKEN}"}, f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    async with anyio.create_task_group() as group, httpx2.AsyncClient(headers=headers, timeout=PATIENT) as http:
        await group.start(serve)
        async with Client(streamable_http_client(url, http_client=http), mode=era) as client:
            yield client
        group.cancel_scope.cancel()


async def files_of(client: Client) -> list[str]:
    """Ask for every list. Return the names of the resources."""
    assert {tool.name for tool in (await client.list_tools()).tools} >= FILE_TOOLS
    assert [one.name for one in (await client.list_resource_templates()).resource_templates] == ["file"]
    with pytest.raises(MCPError) as error:  # it offers none, with a workspace or without
        await client.list_prompts()
    assert error.value.error.code == METHOD_NOT_FOUND
    page = await client.list_resources()
    assert page.next_cursor is None
    return [resource.name for resource in page.resources]


async def refusal(client: Client) -> str:
    result = await client.call_tool("ls", {})
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text if result.is_error else ""


@pytest.mark.parametrize("transport", ["memory", "http"])
async def test_every_list_is_there_without_a_workspace_and_full_as_soon_as_there_is_one(
    openable: Openable, transport: str, era: str
) -> None:
    server = WorkspaceServer(openable.workspace.directory, lambda: openable)
    async with connected(transport, era, server) as client:
        assert await files_of(client) == []
        assert (await client.list_resources(cursor=resource_uri("a.txt"))).resources == []
        assert "process 7" in await refusal(client)
        with pytest.raises(MCPError, match="process 7"):
            await client.read_resource(resource_uri("a.txt"))
        openable.reason = None
        assert await files_of(client) == ["a.txt"]
        assert await refusal(client) == ""


async def test_whatever_keeps_a_workspace_from_opening_leaves_the_lists(openable: Openable) -> None:
    server = WorkspaceServer(openable.workspace.directory, lambda: openable)
    async with connected("memory", MODERN, server) as client:
        for reason in (
            click.UsageError("a policy"),
            OSError(5, "a disk"),
            RuntimeError("a bug"),
            RestoreFailedError(""),
        ):
            openable.reason = reason
            assert await files_of(client) == []
        with pytest.raises(MCPError, match="begins with workspace:///"):
            await client.list_resources(cursor="file:///etc/passwd")


async def test_the_file_tools_are_there_while_those_of_the_user_s_own_cannot_be_listed(
    openable: Openable, era: str
) -> None:
    openable.tools_reason = click.ClickException("--section: no such file")
    server = WorkspaceServer(openable.workspace.directory, lambda: openable)
    async with connected("memory", era, server) as client:
        assert await files_of(client) == []
        openable.tools_reason = None
        assert "slow" in {tool.name for tool in (await client.list_tools()).tools}


async def test_the_tools_are_listed_while_a_call_runs(bench: Bench, openable: Openable, era: str) -> None:
    openable.reason = None
    server = WorkspaceServer(openable.workspace.directory, lambda: openable)
    async with connected("memory", era, server) as client, anyio.create_task_group() as group:
        group.start_soon(client.call_tool, "slow", {})
        assert await to_thread.run_sync(bench.started.wait, PATIENT)
        assert {tool.name for tool in (await client.list_tools()).tools} >= FILE_TOOLS
        bench.released.set()


@pytest.mark.parametrize(("spoiled", "mode"), [("busy", "legacy"), ("policy", MODERN)])
async def test_a_server_process_answers_every_list(tmp_path: Path, spoiled: str, mode: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with ExitStack() as stack:
        if spoiled == "busy":
            stack.enter_context(Workspace.open(root))
            reason = f"process {os.getpid()}"
        else:
            owner_file(root).parent.mkdir(parents=True, exist_ok=True)
            owner_file(root).write_text("[policies.no_such_policy]\n")
            reason = "no_such_policy"
        parameters = StdioServerParameters(command=sys.executable, args=[*SERVE, str(root)], env=dict(os.environ))
        async with Client(parameters, mode=mode) as client:
            assert await files_of(client) == []
            assert reason in await refusal(client)
