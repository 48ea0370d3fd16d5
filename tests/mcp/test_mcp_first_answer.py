"""The first answer of a server on standard input, which comes before the packages of the protocol are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp_servers import HELLO, Bench, LineClient, collecting, in_background, message, server_of
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from served import serve_stdio

from ringfence.runtime import Receipt
from ringfence_mcp.first_answer import VERSIONS, Begun, answer_first

HEAVY = {"mcp", "mcp_types", "pydantic", "anyio", "asyncio", "httpx2", "starlette", "uvicorn", "opentelemetry"}
IMPORTS = """
import os, sys
sys.addaudithook(lambda event, found: event == "import" and os.write(2, f"import {found[0]}\\n".encode()))
from ringfence_cli.main import main
main()
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class Ends:
    """Both ends of two pipes, without a server."""

    def __init__(self) -> None:
        (self.source, to_server), (from_server, self.target) = os.pipe(), os.pipe()
        self.client = LineClient(os.fdopen(to_server, "wb"), os.fdopen(from_server, "rb"))

    def close(self) -> None:
        os.close(self.source)
        os.close(self.target)
        self.client.to_server.close()
        self.client.from_server.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as ends:
        yield ends


@contextmanager
def serving(bench: Bench, ends: Ends, begun: Begun) -> Iterator[LineClient]:
    receipts: list[Receipt] = []
    server = server_of(bench.workspace, collecting(receipts))
    with in_background(server, lambda: serve_stdio(server.protocol(), ends.source, ends.target, begun)):
        yield ends.client


def test_nothing_of_the_protocol_is_loaded_before_the_first_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, "serve", str(tmp_path)]
    # One stream for both, so that their order is known.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(message("initialize", HELLO) + b"\n")
        server.stdin.flush()
        before: set[str] = set()
        for line in server.stdout:
            if line.startswith(b"{"):
                break
            before.add(line.decode().split()[-1].partition(".")[0])
        else:
            pytest.fail("no answer")
        server.kill()
    assert json.loads(line)["result"]["serverInfo"]["name"] == "ringfence"
    assert "click" in before
    assert before & HEAVY == set()


@pytest.mark.parametrize("version", HANDSHAKE_PROTOCOL_VERSIONS)
def test_the_first_answer_is_that_of_the_sdk(bench: Bench, ends: Ends, version: str) -> None:
    request = message("initialize", {**HELLO, "protocolVersion": version})
    with serving(bench, ends, Begun(request + b"\n")) as client:
        expected = client.answer()
    with closing(Ends()) as early:
        early.client.send(request)
        begun = answer_first(early.source, early.target, bench.workspace.directory)
        assert early.client.answer() == expected
    assert begun == Begun(request + b"\n", 1)
    assert set(HANDSHAKE_PROTOCOL_VERSIONS) == VERSIONS


@pytest.mark.parametrize("request_id", [0, 7, "7", ""])
def test_a_client_gets_one_answer_to_each_request_however_many_it_has_sent_at_once(
    bench: Bench, ends: Ends, request_id: int | str
) -> None:
    first = json.dumps({"jsonrpc": "2.0", "id": request_id, "method": "initialize", "params": HELLO}).encode()
    ready = b'{"jsonrpc": "2.0", "method": "notifications/initialized"}'
    ends.client.send(first + b"\n" + ready + b"\n" + message("tools/list", {}, 2))
    begun = answer_first(ends.source, ends.target, bench.workspace.directory)
    with serving(bench, ends, begun) as client:
        client.send(json.dumps({"jsonrpc": "2.0", "id": request_id, "method": "ping"}).encode())
        answers = [client.answer() for _ in range(3)]
    first_id, *ids = (answer["id"] for answer in answers)
    assert first_id == request_id
    assert {str(one) for one in ids} == {str(request_id), "2"}
    assert all("result" in answer for answer in answers)


def request(**changed: Any) -> bytes:
    whole: Mapping[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
    return json.dumps({key: value for key, value in {**whole, **changed}.items() if value is not None}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json",
        b"[" * 100_000,
        b"[]",
        b"\xff\xfe",
        request(method="server/discover"),
        request(method="tools/list"),
        request(id=None),
        request(id=True),
        request(id=1.0),
        request(id=[1]),
        request(id=1 << 60),
        request(id="\ud800"),
        request(jsonrpc="1.0"),
        request(params=None),
        request(params={}),
        request(params={**HELLO, "protocolVersion": "2026-07-28"}),
        request(params={**HELLO, "protocolVersion": 5}),
        request(params={**HELLO, "capabilities": None}),
        request(params={**HELLO, "capabilities": {"elicitation": 5}}),
        request(params={**HELLO, "clientInfo": {"name": "x"}}),
        request(params={**HELLO, "padding": "x" * (1 << 17)}),
    ],
)
def test_whatever_else_comes_first_is_left_to_the_server(ends: Ends, bench: Bench, line: bytes) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=ends.client.to_server) as cat:  # longer than a pipe
        assert cat.stdin is not None
        ends.client.to_server.close()
        cat.stdin.write(line[:60_000] + b"\n" if len(line) < 60_000 else line[:60_000])
        cat.stdin.close()
        begun = answer_first(ends.source, ends.target, bench.workspace.directory)
    assert begun.answered is None
    assert line.startswith(begun.received.rstrip(b"\n"))
    os.set_blocking(ends.client.from_server.fileno(), False)
    assert ends.client.from_server.read() is None
