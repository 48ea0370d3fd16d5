"""What a client gets from the MCP server: short tool lists, and answers of a size that it shows its model."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp_servers import collecting
from mcp_types import CallToolResult, Implementation, TextContent

from ringfence_cli.serve.server import WorkspaceServer
from ringfence_cli.serve.workspaces import ServedWorkspace, open_workspace
from ringfence_tools.run_workspace import Place

pytestmark = pytest.mark.anyio
MAX_TOOL_LIST = 6_000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
def era(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    line = "    line {} of a file of the usual kind\n"
    (root / "usual.py").write_text("".join(line.format(number) for number in range(1, 201)))
    (root / "long.py").write_text("".join(line.format(number) for number in range(1, 2001)))
    return root


@pytest.fixture
def served(root: Path) -> Iterator[ServedWorkspace]:
    served = open_workspace(Place("disk"), root, read_only=False)
    yield served
    served.close()


@asynccontextmanager
async def connected(served: ServedWorkspace, name: str = "unknown", era: str = "auto") -> AsyncGenerator[Client]:
    server = WorkspaceServer(served, collecting([]))
    async with Client(server.protocol(), mode=era, client_info=Implementation(name=name, version="1")) as client:
        yield client


def text(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def as_json(value: Any) -> str:
    return json.dumps(value.model_dump(mode="json", by_alias=True, exclude_none=True), separators=(",", ":"))


async def test_the_list_of_tools_costs_a_model_little(served: ServedWorkspace) -> None:
    """15,180 characters before the schemas of results went."""
    async with connected(served) as client:
        listed = await client.list_tools()
    assert len(as_json(listed)) <= MAX_TOOL_LIST


async def test_a_file_that_is_read_comes_once(served: ServedWorkspace) -> None:
    async with connected(served) as client:
        read = await client.call_tool("read_file", {"file_path": "usual.py"})
    assert read.structured_content is None
    content = Path(served.directory, "usual.py").read_text()
    assert len(as_json(read)) < 1.5 * len(content)  # the numbers of lines come to a fifth
