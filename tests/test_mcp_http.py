"""`ringfence serve --http` in a process of its own: who may call it, and what becomes of their calls."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx2
import pytest
from click.testing import CliRunner
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from ringfence_cli.main import ringfence
from ringfence_cli.options import Invocation
from ringfence_cli.serve.clients import CLIENT_HEADER
from ringfence_cli.serve.transports import Address, parse_address
from ringfence_cli.signals import Signals
from ringfence_sandbox import Workspace

ENDED = 60.0
TOKEN = "0123456789abcdef-token"
HELLO = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
}
ENVELOPE = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
HEADERS = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return root


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    said: str
    host: str = "127.0.0.1"

    @asynccontextmanager
    async def client(self, era: str = "auto", token: str = TOKEN, **headers: str) -> AsyncGenerator[Client]:
        sent = {"Authorization": f"Bearer {token}", **headers}
        async with httpx2.AsyncClient(headers=sent, timeout=30) as transport:
            url = f"http://127.0.0.1:{self.port}/mcp"
            async with Client(streamable_http_client(url, http_client=transport), mode=era) as client:
                yield client

    def post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request("POST", "/mcp", body, {**HEADERS, **headers})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@contextmanager
def started(root: Path, *options: str, token: str | None = TOKEN, host: str = "127.0.0.1") -> Iterator[Server]:
    environment = {**os.environ, "RINGFENCE_MCP_TOKEN": token or ""}
    if token is None:
        del environment["RINGFENCE_MCP_TOKEN"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ringfence_cli", "serve", str(root), "--http", f"{host}:0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stderr is not None
        said = (process.stderr.readline() + process.stderr.readline()).decode()
        found = re.search(r"http://(\S+):(\d+)/mcp", said)
        assert found is not None, said
        yield Server(process, int(found[2]), said, found[1].strip("[]"))
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=ENDED)
        assert out == b""
        assert process.returncode == 130


def many_files(count: int) -> str:
    return "".join(f"--- /dev/null\n+++ b/m/{number}\n@@ -0,0 +1 @@\n+x\n" for number in range(count))


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["auto", "legacy"])
async def test_clients_of_both_eras_share_the_files_and_not_what_they_have_read(root: Path, era: str) -> None:
    with started(root) as server:
        mine, theirs = ({CLIENT_HEADER: name} for name in ("mine", "theirs"))
        async with server.client(era, **mine) as one, server.client(era, **theirs) as other:
            write = {"file_path": "a.txt", "content": "two\n"}
            assert not (await one.call_tool("read_file", {"file_path": "a.txt"})).is_error
            assert (await other.call_tool("write_file", write)).is_error
            assert not (await one.call_tool("write_file", write)).is_error
            assert not (await other.call_tool("read_file", {"file_path": "a.txt"})).is_error
    assert (root / "a.txt").read_text() == "two\n"
    with Workspace.open(root) as workspace:
        assert [step.tool for step in workspace.steps()] == ["write_file"]


@pytest.mark.anyio
async def test_a_client_without_a_connection_that_lasts_is_remembered_by_its_name(root: Path) -> None:
    with started(root) as server:
        async with server.client() as client:
            assert client.protocol_version == "2026-07-28"
            assert not (await client.call_tool("read_file", {"file_path": "a.txt"})).is_error
        async with server.client() as client:
            written = await client.call_tool("write_file", {"file_path": "a.txt", "content": "two\n"})
            assert not written.is_error


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": TOKEN}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
        ({"Authorization": f"bearer {TOKEN}"}, 200),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "evil.example"}, 421),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "evil.example", "MCP-Protocol-Version": "2026-07-28"}, 421),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "https://evil.example"}, 403),
        ({"Authorization": f"Bearer {TOKEN}", "Origin": "http://localhost:3000"}, 200),
        ({"Authorization": f"Bearer {TOKEN}", "Content-Type": "text/plain"}, 400),
    ],
)
def test_only_who_has_the_token_and_comes_from_here_is_heard(
    guarded: Server, headers: dict[str, str], status: int
) -> None:
    assert guarded.post(json.dumps(HELLO).encode(), headers)[0] == status


def test_the_token_is_made_and_said_where_none_is_given_and_not_said_where_one_is(root: Path) -> None:
    with started(root, token=None) as server:
        found = re.search(r"Authorization: Bearer (\S{40,})$", server.said, re.MULTILINE)
        assert found is not None
        assert server.post(json.dumps(HELLO).encode(), {"Authorization": f"Bearer {found[1]}"})[0] == 200
    with started(root) as server:
        assert TOKEN not in server.said


BODIES = [b"", b"not json", b"[]", b"7", b'{"jsonrpc": "2.0"}', b"[" * 100_000]


@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
def test_a_malformed_message_is_refused_and_the_next_one_answered(root: Path, version: str) -> None:
    with started(root) as server:
        headers = {"Authorization": f"Bearer {TOKEN}", "MCP-Protocol-Version": version}
        for body in BODIES:
            status, said = server.post(body, headers)
            assert status == 400, body
            assert "error" in said
        assert server.post(b"x" * (5 << 20), headers)[0] == 413
        assert server.post(json.dumps(HELLO).encode(), {"Authorization": f"Bearer {TOKEN}"})[0] == 200


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["auto", "legacy"])
async def test_a_call_that_its_client_gives_up_leaves_all_or_nothing(root: Path, era: str) -> None:
    with started(root) as server:
        for delay in (0.02, 0.1, 0.2):
            async with server.client(era) as client:
                with anyio.move_on_after(delay):
                    await client.call_tool("apply_patch", {"patch": many_files(900)})
                listed = await client.call_tool("glob", {"pattern": "m/*"})
                count = len((listed.structured_content or {})["matches"])
                assert count in (0, 900)
                if count:
                    assert not (await client.call_tool("undo", {})).is_error


def test_a_client_that_vanishes_in_the_middle_of_a_call_leaves_all_or_nothing(root: Path) -> None:
    call = {"name": "apply_patch", "arguments": {"patch": many_files(900)}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {**call, "_meta": ENVELOPE}}
    headers = {**HEADERS, "Authorization": f"Bearer {TOKEN}", "MCP-Protocol-Version": "2026-07-28"}
    headers |= {"Mcp-Method": "tools/call", "Mcp-Name": "apply_patch"}
    with started(root) as server:
        for delay in (0.0, 0.05, 0.15):
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            connection.request("POST", "/mcp", json.dumps(body), headers)
            time.sleep(delay)
            connection.close()
    with Workspace.open(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


def test_a_server_ends_while_a_stream_is_open(root: Path) -> None:
    with started(root) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        authorised = {**HEADERS, "Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/mcp", json.dumps(HELLO), authorised)
        answer = connection.getresponse()
        answer.read()
        session = answer.getheader("mcp-session-id")
        assert session is not None
        listening = http.client.HTTPConnection("127.0.0.1", server.port)
        listening.request("GET", "/mcp", headers={**authorised, "mcp-session-id": session})
        assert listening.getresponse().status == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(ENDED) == 130
        listening.close()
        connection.close()
    with Workspace.open(root) as workspace:
        assert workspace.recovered is None


@pytest.mark.parametrize(
    ("options", "token", "said"),
    [
        (["--http", "0.0.0.0:0"], None, "--allow-host NAME"),
        (["--http", "[::]:0"], None, "--allow-host NAME"),
        (["--http", "example.org:80"], None, "--allow-host NAME"),
        (["--http", "127.0.0.1"], None, "write HOST:PORT"),
        (["--http", "127.0.0.1:99999"], None, "write HOST:PORT"),
        (["--http", "127.0.0.1:0"], "short", "16 or more"),
        (["--http", "127.0.0.1:0"], "with blanks in it, this one", "without blanks"),
        (["--http", "127.0.0.1:0"], "", "16 or more"),
        (["--allow-host", "example.org"], None, "is for --http"),
    ],
)
def test_what_would_be_open_to_others_or_cannot_be_is_refused(
    root: Path, options: list[str], token: str | None, said: str
) -> None:
    with Signals() as signals:
        environment = {"RINGFENCE_MCP_TOKEN": token}
        done = CliRunner().invoke(ringfence, ["serve", str(root), *options], obj=Invocation(signals), env=environment)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", Address("127.0.0.1", 80)),
        ("[::1]:80", Address("::1", 80)),
        ("localhost:0", Address("localhost", 0)),
        (":80", Address("127.0.0.1", 80)),
        ("80", Address("127.0.0.1", 80)),
    ],
)
def test_an_address_is_of_this_machine_unless_it_says_otherwise(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert address.is_loopback


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]", "localhost"])
def test_an_address_of_this_machine_is_called_by_itself(root: Path, host: str) -> None:
    with started(root, host=host) as server:
        assert server.post(json.dumps(HELLO).encode(), {"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_with_a_name_the_server_is_called_by_that_name_and_no_other(root: Path) -> None:
    names = ["--allow-host", "Build.example", "--allow-host", "FD00::1"]
    with started(root, *names) as server:
        hello, token = json.dumps(HELLO).encode(), {"Authorization": f"Bearer {TOKEN}"}
        assert server.post(hello, {**token, "Host": f"build.example:{server.port}"})[0] == 200
        assert server.post(hello, {**token, "Host": "build.example"})[0] == 200
        assert server.post(hello, {**token, "Host": "[fd00::1]:80"})[0] == 200
        assert server.post(hello, {**token, "Host": "other.example"})[0] == 421


@pytest.mark.parametrize("era", ["2025-06-18", "2026-07-28"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_call_ends_the_server_and_rolls_it_back(root: Path, number: int, era: str) -> None:
    call: dict[str, object] = {"name": "apply_patch", "arguments": {"patch": many_files(900)}}
    headers = {**HEADERS, "Authorization": f"Bearer {TOKEN}", "MCP-Protocol-Version": era}
    with started(root) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        if era == "2026-07-28":
            headers |= {"Mcp-Method": "tools/call", "Mcp-Name": "apply_patch"}
            call["_meta"] = ENVELOPE
        else:
            connection.request("POST", "/mcp", json.dumps(HELLO), headers)
            answer = connection.getresponse()
            answer.read()
            headers["mcp-session-id"] = answer.getheader("mcp-session-id") or ""
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        connection.request("POST", "/mcp", json.dumps(body), headers)
        time.sleep(0.1)
        server.process.send_signal(number)
        assert server.process.wait(ENDED) == 130
        connection.close()
    with Workspace.open(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01])
def test_a_signal_that_comes_before_the_server_runs_ends_it(root: Path, delay: float) -> None:
    with started(root) as server:
        time.sleep(delay)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDED) == 130
        assert server.process.stderr is not None
        assert server.process.stderr.read() == b""
