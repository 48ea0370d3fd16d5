"""What a client gets from the MCP server: short tool lists, and answers of a size that it shows its model."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_servers import collecting, server_of
from mcp_types import CallToolResult, Implementation, TextContent
from served import ServedWorkspace, open_served

from ringfence.prompt import Section
from ringfence.runtime import Session
from ringfence_sandbox import HostFilesystem, PodmanSandbox
from ringfence_tools import PodmanSandboxSection, VfsToolsSection

pytestmark = pytest.mark.anyio
MAX_TOOL_LIST = 6_000


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
    served = open_served(root)
    yield served
    served.close()


@asynccontextmanager
async def connected(served: ServedWorkspace, name: str = "unknown", era: str = "auto") -> AsyncGenerator[Client]:
    server = server_of(served, collecting([]))
    async with Client(server.protocol(), mode=era, client_info=Implementation(name=name, version="1")) as client:
        yield client


def text(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def as_json(value: Any) -> str:
    return json.dumps(value.model_dump(mode="json", by_alias=True, exclude_none=True), separators=(",", ":"))


@pytest.mark.parametrize("name", ["claude-code", "somebody"])
async def test_the_list_of_tools_costs_a_model_little(served: ServedWorkspace, name: str) -> None:
    """15,180 characters before the schemas of results went."""
    async with connected(served, name) as client:
        listed = await client.list_tools()
    assert sum(map(len, map(as_json, listed.tools))) <= MAX_TOOL_LIST


async def test_the_tools_of_a_container_fit_in_too(served: ServedWorkspace, root: Path) -> None:
    def sections(session: Session, shared: bool) -> Iterable[Section[Any]]:
        own = [section for section in served.sections(session, shared) if not isinstance(section, VfsToolsSection)]
        return [PodmanSandboxSection(session=session, sandbox=sandbox, shared_session=shared), *own]

    assert isinstance(served.filesystem, HostFilesystem)
    with PodmanSandbox(root, filesystem=served.filesystem) as sandbox:
        async with connected(replace(served, sections=sections)) as client:
            listed = await client.list_tools()
    assert "shell_execute" in {tool.name for tool in listed.tools}
    assert sum(map(len, map(as_json, listed.tools))) <= MAX_TOOL_LIST


async def test_a_file_that_is_read_comes_once(served: ServedWorkspace) -> None:
    async with connected(served) as client:
        read = await client.call_tool("read_file", {"file_path": "usual.py"})
    assert read.structured_content is None
    content = Path(served.directory, "usual.py").read_text()
    assert len(as_json(read)) < 1.5 * len(content)  # the numbers of lines come to a fifth


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("claude-code", 48_000),
        ("codex-mcp-client", 10_000),
        ("gemini-cli-mcp-client", 40_000),
        ("opencode", 48_000),
        ("qwen-cli-mcp-client-ringfence", 25_000),
        ("somebody", 10_000),
    ],
)
async def test_an_answer_is_no_longer_than_what_the_client_shows(
    served: ServedWorkspace, name: str, shown: int, era: str
) -> None:
    async with connected(served, name, era) as client:
        for tool, arguments in (("read_file", {"file_path": "long.py"}), ("grep", {"pattern": "line"})):
            answer = text(await client.call_tool(tool, arguments))
            assert 0.8 * shown <= len(answer) <= shown
        hints = {tool.name: tool.meta for tool in (await client.list_tools()).tools}["read_file"]
    claude = {"anthropic/alwaysLoad": True, "anthropic/maxResultSizeChars": shown}
    assert hints == (claude if name == "claude-code" else None)


async def test_the_owner_of_a_server_says_how_long_answers_are(root: Path) -> None:
    arguments = ["-m", "ringfence_cli", "serve", str(root), "--max-answer", "4000", "--read-only"]
    command = StdioServerParameters(command=sys.executable, args=arguments)
    async with Client(command, client_info=Implementation(name="claude-code", version="1")) as client:
        assert len(text(await client.call_tool("read_file", {"file_path": "long.py"}))) <= 4_000


async def test_a_cut_answer_says_how_to_read_on(served: ServedWorkspace) -> None:
    lines: list[str] = []
    async with connected(served) as client:
        while True:
            answer = text(await client.call_tool("read_file", {"file_path": "long.py", "offset": len(lines)}))
            lines += re.findall(r"^ *\d+ \| (.*)$", answer, re.MULTILINE)
            if (left := re.search(r"(\d[\d,]*) lines? left: read on with offset=(\d+)", answer)) is None:
                break
            assert int(left[2]) == len(lines) == 2000 - int(left[1].replace(",", ""))
    assert "\n".join(lines) + "\n" == Path(served.directory, "long.py").read_text()


async def test_characters_of_many_bytes_count_as_their_bytes(served: ServedWorkspace, root: Path) -> None:
    (root / "wide.txt").write_text("語" * 100 + "\n" + ("語" * 60 + "\n") * 400)
    for number in range(200):
        (root / f"語語語語語語語語語{number}").touch()
    async with connected(served) as client:
        for name, arguments in (("read_file", {"file_path": "wide.txt"}), ("ls", {})):
            assert 8_000 < len(text(await client.call_tool(name, arguments)).encode()) <= 10_000


async def test_a_long_answer_of_another_tool_is_cut_and_kept(served: ServedWorkspace, root: Path) -> None:
    for number in range(900):
        (root / f"a_file_of_a_usual_name_{number}").touch()
    async with connected(served) as client:
        listed = text(await client.call_tool("ls", {}))
        assert len(listed) <= 10_000
        place = re.search(r"\.ringfence/results/\w+", listed)
        assert place is not None
        kept = text(await client.call_tool("read_file", {"file_path": place[0], "offset": 400, "limit": 10}))
    assert "a_file_of_a_usual_name" in kept


async def test_history_and_diff_show_what_others_changed_meanwhile(served: ServedWorkspace, root: Path) -> None:
    async with connected(served) as client:
        await client.call_tool("write_file", {"file_path": "own.txt", "content": "own\n"})
        (root / "theirs.txt").write_text("theirs\n")
        with anyio.fail_after(30):
            while "theirs.txt" not in text(await client.call_tool("diff", {"since": 1})):
                await anyio.sleep(0.2)
        history = await client.call_tool("history", {})
        looked = re.search(r"changes by others are those of ([\d.]+) s ago", text(history))
        assert looked is not None
        (root / "later.txt").write_text("later\n")
        with anyio.fail_after(30):
            while "later.txt" not in text(await client.call_tool("history", {})):
                await anyio.sleep(0.2)
        found: Any = (await client.call_tool("history", {})).structured_content
    made = [(entry["step"], entry["made_by"], entry["paths"]) for entry in found["entries"]]
    others = [(None, "somebody else", [f"{name}.txt"]) for name in ("later", "theirs")]
    assert made[:3] == [*others, (1, "write_file", ["own.txt"])]


async def test_a_look_is_used_for_two_seconds(served: ServedWorkspace, root: Path) -> None:
    ages: list[float] = []
    async with connected(served) as client:
        for _ in range(5):
            looked = re.search(r"those of ([\d.]+) s ago", text(await client.call_tool("history", {})))
            assert looked is not None
            ages.append(float(looked[1]))
            await anyio.sleep(0.7)
    assert max(ages) > 0.5
    assert min(b - a for a, b in itertools.pairwise(ages)) < 0  # it was taken anew
