"""`ringfence serve --ask`: the person at the official client answers, in both eras of the protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from effort import one_in
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_servers import ENVELOPE, MODERN, PATIENT, TOKEN, LineClient
from mcp_types import CallToolResult, ElicitRequestFormParams, ElicitResult, InputRequiredResult, TextContent

from ringfence_sandbox import Workspace

ERAS = ["legacy", MODERN]
NEWER_FIRST = [MODERN, pytest.param("legacy", marks=pytest.mark.prove)]
"""The older one in the long form only."""
YES = {"choice": "yes"}
Answer = Callable[[ElicitRequestFormParams], Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@asynccontextmanager
async def connected(root: Path, era: str, *options: str, answer: Answer | None = None) -> AsyncGenerator[Client]:
    async def callback(context: object, question: ElicitRequestFormParams) -> ElicitResult:
        said = answer(question) if answer is not None else None
        return said if isinstance(said, ElicitResult) else ElicitResult(action="accept", content=await said)

    arguments = ["-m", "ringfence_cli", "serve", str(root), "--ask", "writes", *options]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with Client(server, mode=era, elicitation_callback=callback if answer else None) as client:
        yield client


def replying(*contents: Any, seen: list[ElicitRequestFormParams] | None = None) -> Answer:
    left = list(contents)

    async def reply() -> Any:
        return left.pop(0)

    def answer(question: ElicitRequestFormParams) -> Any:
        if seen is not None:
            seen.append(question)
        return reply()

    return answer


async def write(client: Client, path: str = "a", content: str = "new\n") -> str:
    return text(await client.call_tool("write_file", {"file_path": path, "content": content}))


def text(result: CallToolResult | InputRequiredResult) -> str:
    assert isinstance(result, CallToolResult)
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


@pytest.mark.anyio
@pytest.mark.parametrize("era", one_in(2, ERAS))
async def test_the_person_sees_the_real_diff_and_decides(root: Path, era: str) -> None:
    seen: list[ElicitRequestFormParams] = []
    answers = replying({"choice": "no", "comment": "use \x1b[2Jspaces"}, YES, {"choice": "always"}, seen=seen)
    async with connected(root, era, answer=answers) as client:
        assert "a person said no: use \\x1b[2Jspaces" in await write(client)
        assert not (root / "a").exists()
        await write(client)
        assert (root / "a").read_text() == "new\n"
        await write(client, "b", f"\x1b[2Jone{' ' * 90}  changes: 0 paths\n")
        await client.call_tool("read_file", {"file_path": "b"})
        await write(client, "b", "two\n")
        assert (root / "b").read_text() == "two\n"
    assert len(seen) == 3
    assert "  | +new" in seen[0].message
    assert "  | +\\x1b[2Jone" in seen[2].message
    assert "\n  |>" in seen[2].message, "a line goes on behind a bar where it is too long for a form"
    with Workspace.open(root, read_only=True) as workspace:
        assert [step.paths for step in workspace.steps()] == [("a",), ("b",), ("b",)]


@pytest.mark.anyio
@pytest.mark.parametrize("era", NEWER_FIRST)
async def test_whatever_is_no_yes_is_a_no(root: Path, era: str) -> None:
    actions = [ElicitResult(action="decline"), ElicitResult(action="cancel"), ElicitResult(action="accept")]
    async with connected(root, era, answer=lambda question: actions.pop()) as client:
        assert "the answer of the client is malformed" in await write(client)
        while actions:
            assert "a person said no" in await write(client)
    assert not (root / "a").exists()


@pytest.mark.anyio
@pytest.mark.parametrize("era", NEWER_FIRST)
async def test_a_client_that_cannot_ask_is_denied_and_told_so(root: Path, era: str) -> None:
    async with connected(root, era) as client:
        assert "this client cannot ask a person" in await write(client)
        assert "no files" not in text(await client.call_tool("ls", {}))
    assert not (root / "a").exists()


@pytest.mark.anyio
@pytest.mark.parametrize("era", NEWER_FIRST)
async def test_nobody_answers_in_time(root: Path, era: str) -> None:
    async def never(question: object) -> Any:
        await anyio.sleep(3)
        return YES

    async with connected(root, era, "--ask-timeout", "1s", answer=never) as client:
        said = await write(client)
    assert ("the time of this question is over" if era == MODERN else "nobody answered within 1 s") in said
    assert not (root / "a").exists()


@pytest.mark.anyio
@pytest.mark.parametrize("era", one_in(2, ERAS))
async def test_another_call_is_answered_while_one_waits(root: Path, era: str) -> None:
    asked, done = anyio.Event(), anyio.Event()

    async def reply(question: object) -> Any:
        asked.set()
        await done.wait()
        return YES

    async with connected(root, era, answer=reply) as client, anyio.create_task_group() as group:
        group.start_soon(write, client)
        await asked.wait()
        with anyio.fail_after(5):
            assert "waiting for approval of write_file" in text(await client.call_tool("ls", {}))
        assert (root / "a").exists()
        done.set()
    assert (root / "a").read_text() == "new\n"


@pytest.mark.anyio
@pytest.mark.parametrize("era", NEWER_FIRST)
async def test_a_client_that_leaves_at_the_question_rolls_back(root: Path, era: str) -> None:
    asked = anyio.Event()

    async def never(question: object) -> Any:
        asked.set()
        await anyio.sleep_forever()

    async with connected(root, era, answer=never) as client, anyio.create_task_group() as group:
        group.start_soon(write, client)
        await asked.wait()
        group.cancel_scope.cancel()
    with Workspace.open(root) as workspace:
        assert workspace.steps() == []
    assert not (root / "a").exists()


def modern(client: LineClient, number: int, **more: Any) -> dict[str, Any]:
    meta = {**ENVELOPE, "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}}}
    arguments = {"file_path": "a", "content": "new\n"}
    client.ask("tools/call", {"name": "write_file", "arguments": arguments, "_meta": meta, **more}, number)
    while "id" not in (answer := client.answer()):
        pass
    return answer["result"]


def test_a_state_is_for_one_answer_to_this_call(root: Path) -> None:
    """What a client of the newer era sends by hand."""
    accepted = {"question": {"action": "accept", "content": YES}}
    command = [sys.executable, "-m", "ringfence_cli", "serve", str(root), "--ask", "writes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        client = LineClient(process.stdin, process.stdout)
        first = modern(client, 1)
        assert first["resultType"] == "input_required"
        state = first["requestState"]
        assert (root / "a").exists()
        for wrong in ({"requestState": "x"}, {"requestState": state, "arguments": {"file_path": "b", "content": ""}}):
            result = modern(client, 2, inputResponses=accepted, **wrong)
            assert result["isError"]
            assert "no question of this call has this requestState" in result["content"][0]["text"]
        kept = modern(client, 3, inputResponses=accepted, requestState=state)
        assert not kept["isError"]
        again = modern(client, 4, inputResponses=accepted, requestState=state)
        assert "this question was answered before" in again["content"][0]["text"]
        client.to_server.close()
    assert (root / "a").read_text() == "new\n"


@pytest.mark.anyio
@pytest.mark.parametrize("era", NEWER_FIRST)
async def test_over_http(root: Path, era: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of the newer era share a session there, so none of them can answer for the others for good."""
    seen: list[ElicitRequestFormParams] = []
    answer = replying(YES, seen=seen)

    async def callback(context: object, question: ElicitRequestFormParams) -> ElicitResult:
        return ElicitResult(action="accept", content=await answer(question))

    command = [sys.executable, "-m", "ringfence_cli", "serve", str(root), "--ask", "writes", "--http", "127.0.0.1:0"]
    monkeypatch.setenv("RINGFENCE_MCP_TOKEN", TOKEN)
    async with await anyio.open_process(command, stdin=-3) as process:
        assert process.stderr is not None
        said = (await process.stderr.receive()).decode()
        url = next(word for word in said.split() if word.startswith("http"))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(headers=headers, timeout=PATIENT) as http:
            transport = streamable_http_client(url, http_client=http)
            async with Client(transport, mode=era, elicitation_callback=callback) as client:
                await write(client)
        process.terminate()
    assert (root / "a").read_text() == "new\n"
    choices = seen[0].requested_schema["properties"]["choice"]["enum"]
    assert choices == (["yes", "no"] if era == MODERN else ["yes", "no", "always"])
