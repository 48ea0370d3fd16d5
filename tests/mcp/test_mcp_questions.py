"""How an MCP server asks the person at its client, in both eras of the protocol."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import TaskStatus
from asking_server import CHOICES, asking_server
from effort import one_in
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_servers import ENVELOPE, HELLO, MODERN, PATIENT, TOKEN, HttpServer, LineClient
from mcp_types import ElicitRequestFormParams, ElicitResult, ErrorData, TextContent
from served import Answer, listen, serve_http

ERAS = ["legacy", MODERN]
SERVER = str(Path(__file__).parents[1] / "support/asking_server.py")


@asynccontextmanager
async def http_server() -> AsyncGenerator[HttpServer]:
    listening = listen("127.0.0.1", 0)

    async def serve(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        await serve_http(asking_server(), listening, TOKEN, ())

    async with anyio.create_task_group() as group:
        await group.start(serve)
        yield HttpServer(listening.getsockname()[1])
        group.cancel_scope.cancel()


@asynccontextmanager
async def connected(transport: str, era: str, **callbacks: Any) -> AsyncGenerator[Client]:
    """The official client of a server that asks: a process, or one over HTTP."""
    if transport == "stdio":
        command = StdioServerParameters(command=sys.executable, args=[SERVER])
        async with Client(command, mode=era, **callbacks) as client:
            yield client
        return
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with http_server() as server, httpx2.AsyncClient(headers=headers, timeout=PATIENT) as http:
        url = f"http://127.0.0.1:{server.port}/mcp"
        async with Client(streamable_http_client(url, http_client=http), mode=era, **callbacks) as client:
            yield client


async def said(client: Client) -> str:
    """What the tool has heard."""
    (content,) = (await client.call_tool("asks", {})).content
    assert isinstance(content, TextContent)
    return content.text


@pytest.mark.anyio
@pytest.mark.parametrize(("transport", "era"), one_in(2, product(["stdio", "http"], ERAS)))
async def test_a_client_that_shows_forms_is_asked(transport: str, era: str) -> None:
    seen: list[ElicitRequestFormParams] = []

    async def answer(context: object, question: ElicitRequestFormParams) -> ElicitResult:
        seen.append(question)
        return ElicitResult(action="accept", content={"choice": "no", "comment": "not today"})

    async with connected(transport, era, elicitation_callback=answer) as client:
        assert await said(client) == str(Answer("no", "not today"))
    (question,) = seen
    assert question.message == "go on?"
    assert question.requested_schema["properties"]["choice"]["enum"] == list(CHOICES)
    assert question.requested_schema["required"] == ["choice"]


@pytest.mark.anyio
@pytest.mark.parametrize(("transport", "era"), one_in(2, product(["stdio", "http"], ERAS)))
async def test_a_client_without_forms_is_not_asked(transport: str, era: str) -> None:
    async with connected(transport, era) as client:
        assert await said(client) == "cannot ask"


@pytest.mark.anyio
@pytest.mark.parametrize("era", ERAS)
async def test_whatever_is_no_choice_chooses_nothing(era: str) -> None:
    answers = [
        ElicitResult(action="decline"),
        ElicitResult(action="cancel"),
        ElicitResult(action="decline", content={"choice": "yes"}),
        ElicitResult(action="accept"),
        ElicitResult(action="accept", content={"choice": "always"}),
        ElicitResult(action="accept", content={"choice": ["yes"]}),
        ElicitResult(action="accept", content={"comment": "yes"}),
    ]
    left = list(answers)

    async def answer(context: object, question: object) -> ElicitResult:
        return left.pop()

    async with connected("http", era, elicitation_callback=answer) as client:
        found = [await said(client) for _ in answers]
    assert found[::-1] == [str(Answer(None, is_malformed=answer.action == "accept")) for answer in answers]


@pytest.mark.anyio
async def test_a_client_that_cannot_answer_says_so() -> None:
    async def callback(context: object, question: object) -> ErrorData:
        return ErrorData(code=-32603, message="nobody is there")

    async with connected("http", "legacy", elicitation_callback=callback) as client:
        assert await said(client) == "not asked: nobody is there"


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(("capability", "asked"), [({}, True), ({"url": {}}, False)])
def test_a_client_that_only_opens_addresses_has_no_forms(era: str, capability: dict[str, Any], asked: bool) -> None:
    """The SDK's client has both or none. The older era sends what it has once, the newer one with each call."""
    capabilities = {"elicitation": capability}
    meta = {**ENVELOPE, "io.modelcontextprotocol/clientCapabilities": capabilities}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, SERVER], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        client = LineClient(process.stdin, process.stdout)
        if era != MODERN:
            client.ask("initialize", {**HELLO, "capabilities": capabilities})
            client.answer()
        client.ask("tools/call", {"name": "asks", "arguments": {}, **({"_meta": meta} if era == MODERN else {})}, 2)
        answer = client.answer()
        process.kill()
    assert ("go on?" in json.dumps(answer)) == asked, answer
    assert ("cannot ask" in json.dumps(answer)) != asked, answer
