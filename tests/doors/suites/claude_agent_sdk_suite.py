"""The Claude Agent SDK with the Claude Code that it brings, whose model is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, query
from provider_server import Asked, ProviderServer, Reply

from ringfence.prompt import PathPolicy
from ringfence_doors.claude_agent_sdk import RingfenceHooks, ringfence_hooks
from ringfence_sandbox import Workspace


class Model(ProviderServer):
    """Answers the conversation that offers the tool for commands, and gives a title to whatever is asked besides."""

    def reply(self, asked: Asked) -> Reply:
        return super().reply(asked) if '"Bash"' in json.dumps(asked.body.get("tools")) else {"text": "A title"}


def bash(*commands: str) -> list[Reply]:
    calls = [
        {"id": f"call_{number}", "name": "Bash", "arguments": {"command": command, "description": "run"}}
        for number, command in enumerate(commands)
    ]
    return [*({"tool_calls": [call]} for call in calls), {"text": "Done."}]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    nowhere = "http://127.0.0.1:9"
    for name, value in {
        "HOME": tmp_path / "home",
        "TMPDIR": tmp_path / "tmp",
        "RINGFENCE_STATE_DIR": tmp_path / "state",
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HTTPS_PROXY": nowhere,
        "HTTP_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, str(value))
    made = tmp_path / "root"
    made.mkdir()
    (made / "a.txt").write_text("one\n")
    return made


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root) as opened:
        yield opened


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sequence[Reply]], Model]]:
    started: list[Model] = []

    def start(replies: Sequence[Reply]) -> Model:
        made = Model(replies)
        started.append(made.__enter__())
        monkeypatch.setenv("ANTHROPIC_BASE_URL", made.url)
        return made

    yield start
    for one in started:
        one.__exit__(None, None, None)


def options(root: Path, hooks: RingfenceHooks) -> ClaudeAgentOptions:
    return ClaudeAgentOptions(cwd=str(root), hooks=hooks, allowed_tools=["Bash", "Write"])


async def work(root: Path, hooks: RingfenceHooks) -> None:
    async for _ in query(prompt="Work.", options=options(root, hooks)):
        pass


def files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if ".ringfence" not in str(path.relative_to(root)))
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else b"" for path in found}


async def test_what_a_policy_denies_or_a_failed_command_changed_goes_back_and_the_model_reads_why(
    root: Path, workspace: Workspace, model: Callable[[Sequence[Reply]], Model]
) -> None:
    before = files(root)
    script = model(
        bash("mkdir secrets; echo s > side.txt", "mv a.txt b.txt; exit 3", "echo two > a.txt; echo c > c.txt")
    )
    hooks = ringfence_hooks(workspace, policies=[PathPolicy(deny=["secrets"])], rollback_on_error=True)
    await work(root, hooks)
    denied, failed = (json.dumps(script.asked[number].body) for number in (1, 2))
    assert "secrets must not be created" in denied
    assert "side.txt" in denied
    assert "exit code 3" in failed
    assert "b.txt" in failed
    assert [step.paths for step in workspace.steps()] == [("a.txt", "c.txt")]
    assert files(root) == {**before, "a.txt": b"two\n", "c.txt": b"c\n"}
    assert "c.txt" in hooks.undo()
    assert files(root) == before


async def test_a_call_of_a_file_tool_is_a_step(
    root: Path, workspace: Workspace, model: Callable[[Sequence[Reply]], Model]
) -> None:
    arguments = {"file_path": str(root / "d/new.txt"), "content": "new\n"}
    model([{"tool_calls": [{"id": "call_0", "name": "Write", "arguments": arguments}]}, {"text": "Done."}])
    await work(root, ringfence_hooks(workspace))
    assert [(step.tool, step.paths) for step in workspace.steps()] == [("Write", ("d", "d/new.txt"))]


async def test_a_failed_command_is_kept_unless_that_is_asked_for(
    root: Path, workspace: Workspace, model: Callable[[Sequence[Reply]], Model]
) -> None:
    model(bash("echo b > b.txt; exit 1"))
    await work(root, ringfence_hooks(workspace))
    assert [step.paths for step in workspace.steps()] == [("b.txt",)]


async def test_two_clients_of_one_directory_share_their_hooks(
    root: Path, workspace: Workspace, model: Callable[[Sequence[Reply]], Model]
) -> None:
    hooks = ringfence_hooks(workspace)

    # Each conversation asks for the command of its own prompt.
    class Both(Model):
        def reply(self, asked: Asked) -> Reply:
            said = json.dumps(asked.body)
            if '"Bash"' not in json.dumps(asked.body.get("tools")):
                return {"text": "A title"}
            if "tool_result" in said:
                return {"text": "Done."}
            name = "x" if "Make x." in said else "y"
            arguments = {"command": f"echo {name} > {name}; sleep 0.5", "description": "run"}
            return {"tool_calls": [{"id": f"call_{name}", "name": "Bash", "arguments": arguments}]}

    async def make(name: str) -> None:
        async with ClaudeSDKClient(options(root, hooks)) as client:
            await client.query(f"Make {name}.")
            async for _ in client.receive_response():
                pass

    with Both([]) as both, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_BASE_URL", both.url)
        await asyncio.gather(make("x"), make("y"))
    paths = sorted(path for step in workspace.steps() for path in step.paths)
    assert paths == ["x", "y"]
    hooks.undo(len(workspace.steps()))
    assert {*files(root)} == {"a.txt"}


async def test_a_call_whose_client_was_closed_can_be_undone(
    root: Path, workspace: Workspace, model: Callable[[Sequence[Reply]], Model]
) -> None:
    model(bash("echo b > b.txt; sleep 60"))
    hooks = ringfence_hooks(workspace)
    async with ClaudeSDKClient(options(root, hooks)) as client:
        await client.query("Work.")
        while not (root / "b.txt").exists():
            await asyncio.sleep(0.05)
    hooks.undo()
    assert files(root) == {"a.txt": b"one\n"}


def test_the_programs_of_the_page_run(
    root: Path, run_page: Callable[[str], int], model: Callable[[Sequence[Reply]], Any]
) -> None:
    model(bash("echo made > a.txt"))
    assert run_page("claude-agent-sdk") == 1
