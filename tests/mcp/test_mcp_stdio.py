"""`ringfence serve` over standard input and output: over pipes in this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_runs import owner_file
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_servers import HELLO, Bench, LineClient, PipeServer, many_files, pipe_server
from mcp_types import TextContent
from served import MAX_LINE_BYTES

from ringfence.errors import WorkspaceLockedError
from ringfence_mcp import transports
from ringfence_sandbox import Workspace

SERVE = [sys.executable, "-m", "ringfence_cli", "serve"]
BARE = Path(__file__).parents[2] / "benchmarks/bare_mcp_server.py"
ENDED = 60.0
"""Seconds that a process has to end in."""
DIGITS = b"9" * 5_000


class ServerProcess(LineClient):
    def __init__(self, command: Sequence[str]) -> None:
        # Few clients have it set, and with it Python keeps nothing in a buffer.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=env, **pipes)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        super().__init__(self.process.stdin, self.process.stdout)

    def end(self) -> tuple[int, bytes, bytes]:
        """Close its input. Return its exit code, and what was left on its two streams."""
        out, err = self.process.communicate(timeout=ENDED)
        return self.process.returncode, out, err


@contextmanager
def started(root: Path, *options: str, command: Sequence[str] = SERVE) -> Iterator[ServerProcess]:
    server = ServerProcess([*command, str(root), *options])
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def free(root: Path) -> Workspace:
    """The workspace, as soon as nobody else has it."""
    until = time.monotonic() + ENDED
    while True:
        try:
            return Workspace.open(root)
        except WorkspaceLockedError:
            assert time.monotonic() < until, "the server did not let go of the workspace"
            time.sleep(0.05)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipeServer]:
    """One server for everything malformed, which ends well."""
    with pipe_server(Bench(tmp_path_factory.mktemp("patient")).workspace) as server:
        yield server
        server.client.to_server.close()
        assert server.ends()


@pytest.mark.parametrize(
    ("line", "code", "request_id"),
    [
        (b"not json", -32700, None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": ', -32700, None),
        (b"\xff\xfe", -32700, None),
        (b"[" * 100_000, -32700, None),
        (b"[]", -32600, None),
        (b"7", -32600, None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "\\ud800"}}', -32700, 7),
        (b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "tools/call", "params": {"name": "x"}}', -32700, None),
        (b'{"jsonrpc": "2.0", "id": ' + DIGITS + b', "method": "ping"}', -32700, None),
        (b'{"jsonrpc": "1.0", "id": 7, "method": "ping"}', -32600, 7),
        (b'{"jsonrpc": "2.0", "id": 7, "method": 5}', -32600, 7),
        (b'{"jsonrpc": "2.0", "id": 7.0, "method": "ping"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "no/such"}', -32601, 7),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": 5}}', -32602, 7),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call"}', -32602, 7),
        (b'"' + b"x" * (MAX_LINE_BYTES + 100_000) + b'"', -32600, None),
    ],
)
def test_a_malformed_message_is_refused_and_the_next_one_answered(
    patient: PipeServer, line: bytes, code: int, request_id: int | None
) -> None:
    patient.client.send(line)
    refused = patient.client.answer()
    assert (refused["error"]["code"], refused["id"]) == (code, request_id), refused
    assert patient.client.result("ls")["isError"] is False


def test_a_client_that_stops_reading_and_closes_the_input_leaves_no_server_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "DRAIN_SECONDS", 0.2)
    bench.filesystem.write("long.txt", "x" * 1_000_000)
    with pipe_server(bench.workspace) as server:
        server.client.ask("resources/read", {"uri": "workspace:///long.txt"})
        server.client.from_server.read(1)
        server.client.to_server.close()
        assert server.ends()


def test_a_client_that_only_sends_what_is_no_message_and_reads_nothing_leaves_no_server_behind(bench: Bench) -> None:
    with pipe_server(bench.workspace) as server:
        for _ in range(1_000):
            server.client.send(b"no message")
        server.client.to_server.close()
        assert server.ends()


@pytest.mark.parametrize("end", ["to_server", "from_server"])
def test_a_call_whose_client_closes_one_of_the_streams_is_rolled_back(bench: Bench, end: str) -> None:
    with pipe_server(bench.workspace) as server:
        server.client.call("slow")
        assert bench.started.wait(ENDED)
        getattr(server.client, end).close()
        time.sleep(0.3)
        bench.released.set()
        assert server.ends()
    assert [receipt.outcome for receipt in server.receipts] == ["interrupted"]
    assert not bench.filesystem.exists("slow.txt")


OWN = """
import sys
from ringfence import MarkdownSection, Tool, ToolResult
def loud(params, *, context):
    print("printed")
    return ToolResult.ok(None, repr(sys.stdin.read()))
tool = Tool[None, None](name="loud", description="Prints.", handler=loud, read_only=True)
section = MarkdownSection(title="Own", key="own", template="", tools=[tool])
"""


def test_policies_sections_and_receipts_are_for_clients_too_and_only_the_protocol_is_on_the_output(root: Path) -> None:
    owner_file(root).parent.mkdir(parents=True, exist_ok=True)
    owner_file(root).write_text('[policies.paths]\ndeny = ["secret/**"]\n')
    own, receipts = root.parent / "own.py", root.parent / "receipts.jsonl"
    own.write_text(OWN)
    options = ("--policy", "deletions:0", "--section", f"{own}:section", "--receipts", str(receipts))
    with started(root, *options) as server:
        server.hello()
        denied = server.result("write_file", file_path="secret/new.txt", content="x")
        assert "denied by the policy" in denied["content"][0]["text"]
        assert not server.result("read_file", file_path="a.txt")["isError"]
        assert server.result("rm", path="a.txt")["isError"]
        assert not server.result("write_file", file_path="b.txt", content="x")["isError"]
        assert server.result("loud")["content"][0]["text"] == "''"
        code, printed, said = server.end()
        assert (code, printed) == (0, b"")
        assert said.endswith(b"printed\n")
    assert not (root / "secret").exists()
    assert (root / "a.txt").read_text() == "one\n"
    records = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [record["outcome"] for record in records] == ["denied", "committed", "denied", "committed", "committed"]
    with free(root) as workspace:
        assert workspace.recovered is None
        assert [step.tool for step in workspace.steps()] == ["write_file"]


LOUD = """
import ctypes, os, subprocess, sys
from ringfence import MarkdownSection, Tool, ToolResult
early, libc = sys.stdout, ctypes.CDLL(None)
print("by the module")
def loud(params, *, context):
    print("by print", end=";")
    early.write("by a stream kept from the start;")
    sys.__stdout__.write("by the stream that Python began with;")
    os.write(1, b"by the descriptor;")
    libc.printf(b"by C;")
    subprocess.run(["echo", "by a program"])
    if (child := os.fork()) == 0:
        os.write(1, b"by a fork;")
        os._exit(0)
    os.waitpid(child, 0)
    with open("/dev/stdout", "a") as file:
        file.write("by its name;")
    return ToolResult.ok(None, "done")
tool = Tool[None, None](name="loud", description="Prints.", handler=loud, read_only=True)
section = MarkdownSection(title="Own", key="own", template="", tools=[tool])
"""
LOUD_WAYS = re.findall(r"by [a-zA-Z ]+(?=[;\"])", LOUD)


def test_nothing_that_a_tool_writes_to_standard_output_comes_between_the_messages(root: Path) -> None:
    own = root.parent / "own.py"
    own.write_text(LOUD)
    with started(root, "--section", f"{own}:section") as server:
        server.hello()
        assert server.result("loud")["content"][0]["text"] == "done"
        code, out, err = server.end()
    assert (code, out) == (0, b"")
    assert len(LOUD_WAYS) == 9
    assert [way for way in LOUD_WAYS if way not in err.decode()] == []


@pytest.mark.anyio
async def test_the_official_client_works_with_a_server_it_started(root: Path) -> None:
    (root / "long.txt").write_text("x" * 10_000_000)
    parameters = StdioServerParameters(command=SERVE[0], args=[*SERVE[1:], str(root)], env=dict(os.environ))
    async with Client(parameters) as client:
        assert len((await client.list_tools()).tools) == 14
        assert (await client.call_tool("write_file", {"file_path": "a.txt", "content": "two\n"})).is_error
        assert not (await client.call_tool("read_file", {"file_path": "a.txt"})).is_error
        assert not (await client.call_tool("write_file", {"file_path": "a.txt", "content": "two\n"})).is_error
        assert (root / "a.txt").read_text() == "two\n"
        assert not (await client.call_tool("undo", {})).is_error
        (content,) = (await client.call_tool("read_file", {"file_path": "long.txt"})).content
    assert isinstance(content, TextContent)
    assert "more characters in this line" in content.text
    assert len(content.text) < 100_000
    assert (root / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_in_the_middle_of_a_call_roll_it_back_and_end_the_server(root: Path, number: int) -> None:
    with started(root) as server:
        server.hello()
        server.call("apply_patch", patch=many_files(900))
        time.sleep(0.05 + random.random() / 10)
        for one in (number, signal.SIGTERM, number):  # the later ones come while the call is rolled back
            server.process.send_signal(one)
            time.sleep(0.01)
        assert server.process.wait(ENDED) == 130
    with free(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


def test_a_server_that_is_killed_leaves_all_of_a_call_or_nothing(root: Path) -> None:
    with started(root) as server:
        server.hello()
        server.call("apply_patch", patch=many_files(900))
        time.sleep(random.random() * 0.3)
        server.process.kill()
        server.process.wait(ENDED)
    with free(root) as workspace:
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


def loaded(*command: str) -> set[str]:
    """The modules of a server that has answered once."""
    telling = "import atexit, runpy, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    server = ServerProcess([sys.executable, "-c", telling + command[0], *command[1:]])
    server.ask("initialize", HELLO)
    assert "result" in server.answer()
    code, _, modules = server.end()
    assert code == 0
    return set(modules.decode().split())


def test_a_start_loads_little_more_than_that_of_a_bare_server_of_the_sdk(root: Path) -> None:
    # What it costs is mostly what it loads; benchmarks/mcp_call.py has the time.
    bare = loaded(f"runpy.run_path({str(BARE)!r}, run_name='__main__')")
    more = loaded("runpy.run_module('ringfence_cli', run_name='__main__')", "serve", str(root)) - bare
    others = {name.partition(".")[0] for name in more} - sys.stdlib_module_names
    assert {name for name in others if not name.startswith("ringfence")} <= {"anyio"}
    assert 10 < len(more) < 60
