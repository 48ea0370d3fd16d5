"""Agents of pydantic-ai on a workspace of ringfence."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturn, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import WorkspaceOutputLimitError, WorkspaceRef, WorkspaceTimeoutError

from ringfence.prompt import PathPolicy
from ringfence_doors.pydantic_ai import RingfenceBackend, RingfenceWorkspace, WorkspaceDeniedError
from ringfence_sandbox import Workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    (made / "a.txt").write_text("one\n")
    return made


@pytest.fixture
def workspace(root: Path, tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=tmp_path / "store") as opened:
        yield opened


def test_a_failed_command_leaves_no_trace_where_that_is_asked_for(root: Path, workspace: Workspace) -> None:
    backend = RingfenceBackend(workspace, rollback_on_error=True)
    before = capture_tree(root)
    result = asyncio.run(backend.run("echo out; mkdir d; mv a.txt d; chmod 700 d; exit 3", shell=True))
    assert capture_tree(root) == before
    assert (result.exit_code, result.stdout) == (3, "out\n")
    assert "rolled back: a.txt, d, d/a.txt" in result.stderr
    assert [receipt.outcome for receipt in backend.calls.receipts] == ["failed"]


def test_else_its_changes_stay_and_an_undo_takes_them_back(root: Path, workspace: Workspace) -> None:
    backend = RingfenceBackend(workspace)
    before = capture_tree(root)

    async def change() -> None:
        result = await backend.run("echo two > a.txt; exit 1", shell=True)
        assert (result.exit_code, result.stderr) == (1, "")
        await backend.write_bytes(str(root / "d/b.txt"), b"b")
        assert (root / "a.txt").read_text() == "two\n"

    asyncio.run(change())
    assert [step.tool for step in workspace.steps()] == ["run", "write_file"]
    backend.undo(2)
    assert {path: one.lasting for path, one in capture_tree(root).items()} == {
        path: one.lasting for path, one in before.items()
    }


def test_two_backends_on_one_directory_take_turns(root: Path, workspace: Workspace) -> None:
    async def both() -> None:
        backends = [RingfenceBackend(workspace), RingfenceBackend(workspace)]
        commands = [
            backend.run(f"test ! -e busy && touch busy && echo {name} > {name} && rm busy", shell=True)
            for name, backend in zip("bc", backends, strict=True)
        ]
        assert [result.exit_code for result in await asyncio.gather(*commands)] == [0, 0]

    asyncio.run(both())
    assert sorted(step.paths for step in workspace.steps()) == [("b",), ("c",)]


def test_what_a_policy_denies_is_a_permission_error_and_leaves_nothing(root: Path, workspace: Workspace) -> None:
    backend = RingfenceBackend(workspace, policies=[PathPolicy(deny=["secrets"])])
    before = capture_tree(root)
    with pytest.raises(WorkspaceDeniedError, match="secrets must not be created"):
        asyncio.run(backend.run(["mkdir", "secrets"]))
    with pytest.raises(WorkspaceDeniedError):
        asyncio.run(backend.write_bytes(str(root / "secrets/key"), b"k"))
    with pytest.raises(PermissionError, match="outside"):
        asyncio.run(backend.write_bytes(str(root.parent / "b.txt"), b"b"))
    assert capture_tree(root) == before
    assert not (root.parent / "b.txt").exists()


def test_a_command_that_takes_too_long_is_rolled_back(root: Path, workspace: Workspace) -> None:
    with pytest.raises(WorkspaceTimeoutError):
        asyncio.run(RingfenceBackend(workspace).run("echo > b.txt; sleep 60", shell=True, timeout=0.1))
    assert not (root / "b.txt").exists()


def test_output_is_complete_or_an_error(workspace: Workspace) -> None:
    backend = RingfenceBackend(workspace)
    result = asyncio.run(backend.run("seq 20000; head -c 300000 /dev/zero | tr '\\0' '\\377' >&2", shell=True))
    assert result.stdout.split() == [*map(str, range(1, 20_001))]
    assert result.stderr == "\ufffd" * 300_000
    with pytest.raises(WorkspaceOutputLimitError):
        asyncio.run(backend.run("head -c 11000000 /dev/zero | tr '\\0' a", shell=True))


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    if len(messages) > 1:
        return ModelResponse(parts=[TextPart("Done.")])
    return ModelResponse(parts=[ToolCallPart(tool.name, {}) for tool in info.function_tools])


def test_what_a_tool_returns_has_the_receipts_of_its_changes_as_metadata(root: Path, workspace: Workspace) -> None:
    capability = RingfenceWorkspace[None](workspace)
    agent = Agent(FunctionModel(scripted), capabilities=[capability])

    @agent.tool
    async def change(ctx: RunContext[None]) -> ToolReturn:
        await ctx.workspace.write_text("b.txt", "b")
        return ToolReturn("changed", metadata={"own": 1})

    @agent.tool
    async def look(ctx: RunContext[None]) -> str:
        return await ctx.workspace.read_text("a.txt")

    messages = asyncio.run(agent.run("Go.")).all_messages()
    parts = {part.tool_name: part for one in messages for part in one.parts if isinstance(part, ToolReturnPart)}
    assert (parts["look"].content, parts["look"].metadata) == ("one\n", None)
    assert parts["change"].content == "changed"
    assert parts["change"].metadata["own"] == 1
    [receipt] = parts["change"].metadata["ringfence_receipts"]
    assert (receipt["tool"], receipt["outcome"]) == ("write_file", "committed")
    assert [change["path"] for change in receipt["changes"]] == ["b.txt"]
    capability.undo()
    assert not (root / "b.txt").exists()


def test_a_run_does_not_go_on_in_a_directory_that_is_not_the_one_that_was_opened(workspace: Workspace) -> None:
    agent = Agent(FunctionModel(scripted), capabilities=[RingfenceWorkspace[None](workspace)])

    @agent.tool
    async def look(ctx: RunContext[None]) -> str:
        return await ctx.workspace.working_dir()

    result = asyncio.run(agent.run("Go.", workspace=WorkspaceRef(provider="ringfence", id=workspace.root)))
    assert result.output == "Done."
    with pytest.raises(Exception, match="workspace"):
        asyncio.run(agent.run("Go.", workspace=WorkspaceRef(provider="ringfence", id="/elsewhere")))


def test_ringfence_imports_no_framework_unless_its_door_is() -> None:
    code = "import sys, ringfence, ringfence_sandbox, ringfence_tools, ringfence_doors, ringfence_cli.main\n"
    frameworks = "agents claude_agent_sdk deepagents inspect_ai langchain_core minisweagent pydantic_ai".split()
    code += f"print({{*{frameworks}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
