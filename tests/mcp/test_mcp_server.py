"""The MCP server as the official client sees it, in one process, in both eras of the protocol."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_servers import Bench, collecting, server_of
from mcp_types import CallToolResult, TextContent, TextResourceContents
from served import (
    MAX_ITEMS,
    MAX_RESOURCE_BYTES,
    PAGE_SIZE,
    SHOWN_BY_OTHERS,
    ServedClient,
    ServedWorkspace,
    WorkspaceServer,
    fit_structured,
    open_served,
    resource_uri,
)
from tool_values import FileListing

from ringfence.runtime import Cancellation, Receipt

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["auto", "legacy"])
def era(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "src").mkdir(parents=True)
    (root / "a.txt").write_text("one\n")
    (root / "src/b.py").write_text("two = 2\n")
    return root


@pytest.fixture
def served(root: Path) -> Iterator[ServedWorkspace]:
    served = open_served(root)
    yield served
    served.close()


@dataclass
class Serving:
    server: WorkspaceServer
    receipts: list[Receipt]
    era: str

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        async with Client(self.server.protocol(), mode=self.era) as client:
            yield client


def serving(workspace: ServedWorkspace, era: str = "auto") -> Serving:
    receipts: list[Receipt] = []
    return Serving(server_of(workspace, collecting(receipts)), receipts, era)


def text(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


def found(result: CallToolResult) -> Any:
    assert not result.is_error, text(result)
    return result.structured_content


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_tool_says_what_it_takes_does_and_changes(served: ServedWorkspace, era: str) -> None:
    async with serving(served, era).client() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools)[:3] == ["ls", "read_file", "write_file"]
    assert {"history", "diff", "undo", "restore", "checkpoint"} <= set(tools)
    for tool in tools.values():
        assert tool.input_schema["type"] == "object"
        assert tool.output_schema is None
        assert tool.description
    hints = {
        name: tool.annotations.model_dump(exclude_none=True) if tool.annotations else {} for name, tool in tools.items()
    }
    assert hints["read_file"] == hints["history"] == {"read_only_hint": True}
    assert hints["write_file"] == hints["undo"] == {}
    assert hints["checkpoint"] == {"destructive_hint": False, "open_world_hint": False}


async def test_a_result_is_text_and_says_how_its_call_ended(served: ServedWorkspace, era: str) -> None:
    async with serving(served, era).client() as client:
        read = await client.call_tool("read_file", {"file_path": "a.txt"})
        assert "1 | one" in text(read)
        assert found(read) is None
        assert read.meta is not None
        assert read.meta["ringfence/outcome"] == "committed"
        written = await client.call_tool("write_file", {"file_path": "a.txt", "content": "1\n"})
        assert text(written) == "replaced a.txt (2 bytes)"
        assert written.meta is not None
        assert len(written.meta["ringfence/commit"]) == 40


async def test_what_a_model_does_wrong_it_reads_as_a_result(served: ServedWorkspace, root: Path, era: str) -> None:
    server = serving(served, era)
    async with server.client() as client:
        unknown = await client.call_tool("write_fil", {})
        misfit = await client.call_tool("write_file", {"file_path": 3, "text": "x"})
        denied = await client.call_tool("write_file", {"file_path": "a.txt", "content": "blind\n"})
        missing = await client.call_tool("read_file", {"file_path": "c.txt"})
    assert all(result.is_error for result in (unknown, misfit, denied, missing))
    assert "did you mean write_file" in text(unknown)
    assert "content" in text(misfit)
    assert "has not been read" in text(denied)
    assert "there is no c.txt" in text(missing)
    assert (root / "a.txt").read_text() == "one\n"
    assert [receipt.outcome for receipt in server.receipts] == ["rejected", "rejected", "denied", "failed"]


async def test_calls_of_many_clients_at_once_all_come_out_whole(served: ServedWorkspace, root: Path) -> None:
    server = serving(served)

    async def write(number: int) -> None:
        async with server.client() as client:
            for turn in range(5):
                arguments = {"file_path": f"{number}/{turn}.txt", "content": f"{number}\n"}
                found(await client.call_tool("write_file", arguments))

    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(write, number)
    assert len(list(root.glob("[0-9]/*.txt"))) == 30
    assert {receipt.outcome for receipt in server.receipts} == {"committed"}


async def test_calls_of_one_client_run_in_the_order_they_came(served: ServedWorkspace, root: Path, era: str) -> None:
    async with serving(served, era).client() as client, anyio.create_task_group() as group:
        for number in range(10):
            text = f"{number}\n"
            group.start_soon(client.call_tool, "write_file", {"file_path": "n.txt", "content": text})
            await anyio.sleep(0.005)
    assert (root / "n.txt").read_text() == "9\n"


async def test_a_call_that_its_client_cancels_is_rolled_back(bench: Bench, era: str) -> None:
    server = serving(bench.workspace, era)
    async with server.client() as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "slow", {})
            await anyio.to_thread.run_sync(bench.started.wait, 20)
            group.start_soon(_release_soon, bench)
            group.cancel_scope.cancel()
        bench.released.set()
        # In the turn after it: so it has ended.
        listed = await client.call_tool("ls", {})
        assert "0 files" in text(listed)
    assert [receipt.outcome for receipt in server.receipts] == ["interrupted", "committed"]
    assert server.receipts[0].message == "the call was cancelled, so nothing of it is kept"


async def _release_soon(bench: Bench) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(0.3)
        bench.released.set()


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(bench: Bench, era: str) -> None:
    server = serving(bench.workspace, era)
    async with server.client() as client, server.client() as other, anyio.create_task_group() as group:
        group.start_soon(client.call_tool, "slow", {})
        await anyio.to_thread.run_sync(bench.started.wait, 20)
        with anyio.move_on_after(0.1):
            await other.call_tool("write_file", {"file_path": "waited.txt", "content": ""})
        bench.released.set()
    assert [(receipt.tool, receipt.outcome) for receipt in server.receipts] == [("slow", "committed")]
    assert not bench.filesystem.exists("waited.txt")


async def test_a_server_that_stops_rolls_back_what_runs_and_refuses_what_comes(bench: Bench, era: str) -> None:
    server = serving(bench.workspace, era)
    answers: list[CallToolResult] = []

    async def call(client: Client, name: str) -> None:
        answers.append(await client.call_tool(name, {}))

    async with server.client() as client:
        async with anyio.create_task_group() as group:
            group.start_soon(call, client, "slow")
            await anyio.to_thread.run_sync(bench.started.wait, 20)
            server.server.stop()
            bench.released.set()
        await call(client, "broken")
    assert [answer.is_error for answer in answers] == [True, True]
    assert [receipt.outcome for receipt in server.receipts] == ["interrupted", "interrupted"]
    assert not bench.filesystem.list()


async def test_a_long_call_tells_that_it_goes_on(bench: Bench, era: str) -> None:
    heard: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))
        bench.released.set()

    async with serving(bench.workspace, era).client() as client:
        found(await client.call_tool("slow", {}, progress_callback=hear))
    assert heard[0][0] >= 1
    assert heard[0][1] == "slow has been running for 1 s"


async def test_a_handler_that_breaks_ends_neither_the_call_nor_the_server(bench: Bench) -> None:
    async with serving(bench.workspace).client() as client:
        broken = await client.call_tool("broken", {})
        assert broken.is_error
        assert "out of order" in text(broken)
        assert "0 files" in text(await client.call_tool("ls", {}))


async def test_a_result_of_many_megabytes_is_cut_and_says_so(bench: Bench, era: str) -> None:
    async with serving(bench.workspace, era).client() as client:
        # The client checks the structured result against the schema.
        long = await client.call_tool("long", {})
    assert len(json.dumps(found(long))) <= SHOWN_BY_OTHERS
    assert "the structured result was cut" in found(long)["message"]
    assert "more characters" in found(long)["text"]
    assert len(text(long)) <= SHOWN_BY_OTHERS
    assert "characters left out" in text(long)


async def test_a_result_that_is_a_list_is_an_object_with_items(bench: Bench) -> None:
    async with serving(bench.workspace).client() as client:
        many = await client.call_tool("many", {})
    assert [item["text"] for item in found(many)["items"]] == ["a", "b"]


@pytest.mark.parametrize(
    "value",
    [
        {"text": "x" * 10_000_000},
        {"lists": [["x" * 100] * 100] * 1000},
        {"objects": {str(n): {"text": "x" * 50} for n in range(50_000)}},
    ],
)
def test_what_is_cut_is_small_enough_whatever_it_is(value: dict[str, Any]) -> None:
    small, cut = fit_structured(value, SHOWN_BY_OTHERS)
    assert cut
    assert len(json.dumps(small)) <= SHOWN_BY_OTHERS


async def test_undo_is_a_step_of_its_call_and_can_be_undone(served: ServedWorkspace, root: Path) -> None:
    server = serving(served)
    async with server.client() as client:
        found(await client.call_tool("read_file", {"file_path": "a.txt"}))
        found(await client.call_tool("write_file", {"file_path": "a.txt", "content": "1\n"}))
        (root / "theirs.txt").write_text("theirs\n")
        dry = found(await client.call_tool("undo", {"dry_run": True}))
        assert dry["paths"] == [{"path": "a.txt", "outcome": "restored", "reason": None}]
        undone = await client.call_tool("undo", {})
        assert (root / "a.txt").read_text() == "one\n"
        assert (root / "theirs.txt").exists()
        history = found(await client.call_tool("history", {}))["entries"]
        made = [(entry["step"], entry["made_by"]) for entry in history]
        assert made[:3] == [(2, "undo"), (None, "somebody else"), (1, "write_file")]
        assert "-1" in text(await client.call_tool("diff", {"since": 1, "until": 2}))
        found(await client.call_tool("undo", {}))
    assert (root / "a.txt").read_text() == "1\n"
    assert undone.meta is not None
    assert undone.meta["ringfence/commit"] is not None
    assert server.receipts[3].changes[0].path == "a.txt"


async def test_a_step_is_undone_by_its_name_as_by_its_number(served: ServedWorkspace, root: Path) -> None:
    async with serving(served).client() as client:
        for name in ("c", "d"):
            found(await client.call_tool("write_file", {"file_path": f"{name}.txt", "content": "new\n"}))
            found(await client.call_tool("checkpoint", {"name": f"with-{name}"}))
        undone = found(await client.call_tool("undo", {"step": "with-c"}))
        assert [path["path"] for path in undone["paths"]] == ["c.txt"]
        found(await client.call_tool("undo", {"step": "2"}))
        assert "no step" in text(await client.call_tool("undo", {"step": "with-e"}))
    assert not (root / "c.txt").exists()
    assert not (root / "d.txt").exists()


async def test_an_undo_of_a_step_and_of_its_undo_says_that_both_are_steps(served: ServedWorkspace) -> None:
    async with serving(served).client() as client:
        found(await client.call_tool("write_file", {"file_path": "c.txt", "content": "c\n"}))
        found(await client.call_tool("undo", {}))
        assert "an undo is a step, too" in text(await client.call_tool("undo", {"steps": 2}))


async def test_an_undo_that_undid_nothing_is_an_error_that_says_why(served: ServedWorkspace, root: Path) -> None:
    async with serving(served).client() as client:
        found(await client.call_tool("write_file", {"file_path": "c.txt", "content": "c\n"}))
        (root / "c.txt").write_text("theirs\n")
        dry = found(await client.call_tool("undo", {"dry_run": True}))
        assert dry["paths"][0]["outcome"] == "conflict"
        undone = await client.call_tool("undo", {})
        assert undone.is_error
        assert "nothing was undone: c.txt (changed since by somebody else)" in text(undone)
        (root / "c.txt").unlink()
        assert "c.txt (it is as it was before already)" in text(await client.call_tool("undo", {}))
        restored = found(await client.call_tool("restore", {"step": 1}))
        assert restored["message"].endswith("; undo reverses that")
        (root / "c.txt").write_text("theirs\n")
        restored = found(await client.call_tool("restore", {"step": 0}))
    assert restored["paths"][0]["reason"] == "changed since by somebody else"


async def test_a_number_of_steps_and_one_step_cannot_both_be_undone(served: ServedWorkspace, root: Path) -> None:
    server = serving(served)
    async with server.client() as client:
        await client.call_tool("write_file", {"file_path": "new.txt", "content": "1\n"})
        await client.call_tool("write_file", {"file_path": "other.txt", "content": "1\n"})
        for steps in (1, 2):
            refused = await client.call_tool("undo", {"steps": steps, "step": 1})
            assert refused.is_error
            assert "either steps" in text(refused)
        assert (root / "new.txt").exists()


async def test_a_checkpoint_is_a_name_to_go_back_to(served: ServedWorkspace, root: Path) -> None:
    async with serving(served).client() as client:
        found(await client.call_tool("write_file", {"file_path": "c.txt", "content": "c\n"}))
        (root / "theirs.txt").write_text("theirs\n")
        assert text(await client.call_tool("checkpoint", {"name": "good"})).startswith("step 1,")
        found(await client.call_tool("rm", {"path": "c.txt"}))
        (root / "theirs.txt").unlink()
        assert "there are: good" in text(await client.call_tool("restore", {"step": "bad"}))
        assert "already" in text(await client.call_tool("checkpoint", {"name": "good"}))
        found(await client.call_tool("restore", {"step": "good"}))
    assert (root / "c.txt").read_text() == "c\n"
    assert (root / "theirs.txt").read_text() == "theirs\n"


@pytest.mark.parametrize("path", ["../secret.txt", "out/secret.txt", "src/../../secret.txt", "/out/../../secret.txt"])
async def test_nothing_outside_of_the_workspace_is_reached(served: ServedWorkspace, root: Path, path: str) -> None:
    (root.parent / "secret.txt").write_text("secret\n")
    (root / "out").symlink_to("..")
    async with serving(served).client() as client:
        for name, more in (("read_file", {}), ("write_file", {"content": "x"})):
            result = await client.call_tool(name, {"file_path": path, **more})
            assert result.is_error
            assert "secret\n" not in text(result)
        with pytest.raises(MCPError, match="is outside of the workspace root"):
            await client.read_resource(resource_uri(path))
    assert (root.parent / "secret.txt").read_text() == "secret\n"


async def test_git_s_own_data_is_not_for_clients_to_write(served: ServedWorkspace, root: Path) -> None:
    async with serving(served).client() as client:
        denied = await client.call_tool("write_file", {"file_path": ".git/hooks/post-commit", "content": "x"})
    assert "is git's own data" in text(denied)
    assert not (root / ".git").exists()


@pytest.mark.parametrize("kind", ["disk", "memory"])
async def test_a_read_only_server_offers_and_runs_only_what_changes_nothing(root: Path, kind: Any) -> None:
    workspace = open_served(root, kind, read_only=True)
    server = serving(workspace)
    async with server.client() as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"ls", "read_file", "glob", "grep"} | ({"history", "diff"} if kind == "disk" else set())
        written = await client.call_tool("write_file", {"file_path": "new.txt", "content": "x"})
        assert "read-only" in text(written)
        assert "1 | one" in text(await client.call_tool("read_file", {"file_path": "a.txt"}))
    workspace.close()
    assert not (root / "new.txt").exists()
    assert server.receipts[0].outcome == "denied"


async def test_a_read_only_server_sees_the_steps_that_an_agent_makes_meanwhile(root: Path) -> None:
    looking = open_served(root, read_only=True)
    async with serving(looking).client() as watcher:
        assert "no history yet" in text(await watcher.call_tool("history", {}))
        working = open_served(root)
        async with serving(working).client() as client:
            found(await client.call_tool("write_file", {"file_path": "new.txt", "content": "x"}))
            history = await watcher.call_tool("history", {})
            entries = found(history)["entries"]
            assert [entry["made_by"] for entry in entries] == ["write_file", "as it was found"]
            assert text(history).endswith(f"  as it was found: {entries[1]['more_paths']} paths")
        working.close()
    looking.close()


async def test_what_is_done_to_a_copy_in_memory_nothing_on_disk_hears_of(root: Path) -> None:
    workspace = open_served(root, "memory")
    async with serving(workspace).client() as client:
        found(await client.call_tool("write_file", {"file_path": "new.txt", "content": "x"}))
        assert "new.txt" in text(await client.call_tool("ls", {}))
    assert not (root / "new.txt").exists()


async def test_files_are_resources_a_page_at_a_time(served: ServedWorkspace, root: Path) -> None:
    names = {f"many/{number:03}.txt" for number in range(450)} | {"a.txt", "src/b.py", "many/odd name%.txt"}
    (root / "many").mkdir()
    for name in names:
        (root / name).touch()
    (root / ".git").mkdir()
    (root / ".git/config").write_text("theirs")
    (root / "link").symlink_to("a.txt")
    listed: list[str] = []
    async with serving(served).client() as client:
        cursor = None
        while True:
            page = await client.list_resources(cursor=cursor)
            assert len(page.resources) <= PAGE_SIZE
            listed += [resource.name for resource in page.resources]
            cursor = page.next_cursor
            if cursor is None:
                break
        templates = (await client.list_resource_templates()).resource_templates
        odd = await client.read_resource(resource_uri("many/odd name%.txt"))
    assert len(listed) == len(set(listed))
    assert set(listed) == names
    assert [template.uri_template for template in templates] == ["workspace:///{+path}"]
    assert isinstance(odd.contents[0], TextResourceContents)


async def test_a_resource_is_whole_or_refused(served: ServedWorkspace, root: Path, era: str) -> None:
    (root / "large.bin").write_bytes(b"\xff" * (MAX_RESOURCE_BYTES + 1))
    (root / "binary").write_bytes(b"\xff\x00")
    (root / "out").symlink_to("/etc/passwd")
    (root / "etc").symlink_to("/etc")
    os.mkfifo(root / "pipe")
    async with serving(served, era).client() as client:
        (content,) = (await client.read_resource("workspace:///src/b.py")).contents
        assert isinstance(content, TextResourceContents)
        assert content.text == "two = 2\n"
        (blob,) = (await client.read_resource("workspace:///binary")).contents
        assert blob.model_dump()["blob"] == "/wA="
        for uri, why in (
            ("workspace:///large.bin", "with read_file"),
            ("workspace:///src", "Is a directory"),
            ("workspace:///none", "No such file"),
            ("file:///etc/passwd", "begins with workspace:///"),
            ("workspace://host/a.txt", "begins with workspace:///"),
            ("workspace:////etc/passwd", "outside of the workspace"),
            ("workspace:///../../etc/passwd", "outside of the workspace"),
            ("workspace:///%2e%2e/%2E%2e/etc/passwd", "outside of the workspace"),
            ("workspace:///..%2f..%2fetc%2fpasswd", "outside of the workspace"),
            ("workspace:///%252e%252e/etc/passwd", "No such file"),
            ("workspace:///out", "^out is outside of the workspace"),
            ("workspace:///etc/passwd", "outside of the workspace"),
            ("workspace:///pipe", "never opened"),
            ("workspace:///src/b.py%00", "NUL"),
            ("workspace:///" + "a" * 5000, "a path has at most 4096 bytes"),
        ):
            with pytest.raises(MCPError, match=why):
                await client.read_resource(uri)


def test_a_session_does_not_grow_with_the_calls(served: ServedWorkspace) -> None:
    client = ServedClient(served, collecting([]))
    for _ in range(250):
        assert not client.call("ls", {}, Cancellation()).is_error
    assert len(client.session[Receipt].all()) <= MAX_ITEMS
    assert len(client.session[FileListing].all()) <= MAX_ITEMS
    client.close()


def test_what_a_cut_answer_names_is_there_however_many_calls_there_were(bench: Bench) -> None:
    bench.long_characters = 200_000
    client = ServedClient(bench.workspace, collecting([]))
    for _ in range(MAX_ITEMS + 1):
        cut = text(client.call("long", {}, Cancellation()))
        (place,) = set(re.findall(r"\.ringfence/results/\w+", cut))
        assert not client.call("read_file", {"file_path": place, "limit": 1}, Cancellation()).is_error
    client.close()
