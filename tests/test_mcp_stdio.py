"""`ringfence serve` in a process of its own, over standard input and output."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import TextContent

from ringfence.errors import WorkspaceLockedError
from ringfence_cli.policies import owner_file
from ringfence_cli.serve.transports import MAX_LINE_BYTES
from ringfence_sandbox import Workspace

SERVE = [sys.executable, "-m", "ringfence_cli", "serve"]
BARE = Path(__file__).parent.parent / "benchmarks/bare_mcp_server.py"
ENDED = 60.0
"""Seconds that a process has to end in."""
HELLO = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "raw", "version": "1"},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return root


DIGITS = b"9" * 5_000


class Server:
    """A server that is spoken to line by line."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, params: Mapping[str, Any], request: int) -> None:
        self.send(json.dumps({"jsonrpc": "2.0", "id": request, "method": method, "params": params}).encode())

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def hello(self) -> None:
        self.ask("initialize", HELLO, 0)
        assert self.answer()["result"]["serverInfo"]["name"] == "ringfence"
        self.send(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')

    def call(self, name: str, arguments: Mapping[str, Any], request: int) -> None:
        self.ask("tools/call", {"name": name, "arguments": arguments}, request)

    def end(self) -> tuple[int, bytes, bytes]:
        """Close its input: its exit code, and what was left on its two streams."""
        out, err = self.process.communicate(timeout=ENDED)
        return self.process.returncode, out, err


def started(root: Path, *options: str) -> AbstractContextManager[Server]:
    return talking([*SERVE, str(root), *options])


@contextmanager
def talking(command: list[str]) -> Iterator[Server]:
    server = Server(command)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all that is malformed; it says nothing of it, and ends well."""
    with started(tmp_path_factory.mktemp("patient")) as server:
        server.hello()
        yield server
        assert server.end() == (0, b"", b"")


def many_files(count: int) -> str:
    """A patch that makes many files: what of it is there, all of it is there."""
    return "".join(f"--- /dev/null\n+++ b/m/{number}\n@@ -0,0 +1 @@\n+x\n" for number in range(count))


def free(root: Path) -> Workspace:
    """The workspace, as soon as nobody else has it."""
    until = time.monotonic() + ENDED
    while True:
        try:
            return Workspace.open(root)
        except WorkspaceLockedError:
            assert time.monotonic() < until, "the server did not let go of the workspace"
            time.sleep(0.05)


@pytest.mark.anyio
@pytest.mark.parametrize("era", ["auto", "legacy"])
async def test_the_official_client_works_with_a_server_it_started(root: Path, tmp_path: Path, era: str) -> None:
    receipts = tmp_path / "receipts.jsonl"
    arguments = [*SERVE[1:], str(root), "--receipts", str(receipts)]
    parameters = StdioServerParameters(command=SERVE[0], args=arguments, env=dict(os.environ))
    async with Client(parameters, mode=era) as client:
        assert len((await client.list_tools()).tools) == 14
        denied = await client.call_tool("write_file", {"file_path": "a.txt", "content": "two\n"})
        assert denied.is_error
        assert not (await client.call_tool("read_file", {"file_path": "a.txt"})).is_error
        assert not (await client.call_tool("write_file", {"file_path": "a.txt", "content": "two\n"})).is_error
        assert (root / "a.txt").read_text() == "two\n"
        assert not (await client.call_tool("undo", {})).is_error
    assert (root / "a.txt").read_text() == "one\n"
    records = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert [record["outcome"] for record in records] == ["denied", "committed", "committed", "committed"]
    with free(root) as workspace:
        assert [step.tool for step in workspace.steps()] == ["write_file", "undo"]


@pytest.mark.anyio
async def test_a_file_of_ten_megabytes_is_read_in_bounds(root: Path) -> None:
    (root / "long.txt").write_text("x" * 10_000_000)
    parameters = StdioServerParameters(command=SERVE[0], args=[*SERVE[1:], str(root)], env=dict(os.environ))
    async with Client(parameters) as client:
        (content,) = (await client.call_tool("read_file", {"file_path": "long.txt"})).content
    assert isinstance(content, TextContent)
    assert "more characters in this line" in content.text
    assert len(content.text) < 100_000


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
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"n": ' + DIGITS + b"}}", -32700, 7),
        (b'{"jsonrpc": "2.0", "params": {"n": -' + DIGITS + b'}, "id": "x", "method": "ping"}', -32700, "x"),
        (b'{"jsonrpc": "2.0", "id": ' + DIGITS + b', "method": "ping"}', -32700, None),
        (b'{"jsonrpc": "1.0", "id": 7, "method": "ping"}', -32600, 7),
        (b'{"jsonrpc": "2.0", "id": 7, "method": 5}', -32600, 7),
        (b'{"jsonrpc": "2.0", "id": 7.0, "method": "ping"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600, None),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "no/such"}', -32601, 7),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": 5}}', -32602, 7),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call"}', -32602, 7),
    ],
)
def test_a_malformed_message_is_refused_and_the_next_one_answered(
    patient: Server, line: bytes, code: int, request_id: int | str | None
) -> None:
    patient.send(line)
    refused = patient.answer()
    assert (refused["error"]["code"], refused["id"]) == (code, request_id), refused
    patient.call("ls", {}, 8)
    assert patient.answer()["result"]["isError"] is False


def test_a_line_without_end_is_refused_before_it_fills_the_memory(root: Path) -> None:
    with started(root) as server:
        server.hello()
        server.send(b'"' + b"x" * (MAX_LINE_BYTES + 100_000) + b'"')
        assert "at most" in server.answer()["error"]["message"]
        server.call("ls", {}, 8)
        assert server.answer()["id"] == 8


def test_the_end_of_the_input_ends_the_server_and_nothing_but_the_protocol_was_said(root: Path) -> None:
    with started(root) as server:
        server.hello()
        assert server.end() == (0, b"", b"")
    with free(root) as workspace:
        assert workspace.recovered is None


def test_a_client_that_stops_reading_and_closes_the_input_leaves_no_server_behind(root: Path) -> None:
    (root / "long.txt").write_text("x" * 1_000_000)
    with started(root) as server:
        server.hello()
        server.ask("resources/read", {"uri": "workspace:///long.txt"}, 1)
        assert server.process.stdout is not None
        assert server.process.stdin is not None
        server.process.stdout.read(1)
        server.process.stdin.close()
        server.process.stdin = None
        assert server.process.wait(ENDED) == 0


def test_a_client_that_only_sends_what_is_no_message_and_reads_nothing_leaves_no_server_behind(root: Path) -> None:
    with started(root) as server:
        server.hello()
        assert server.process.stdin is not None
        for _ in range(1_000):
            server.send(b"no message")
        server.process.stdin.close()
        server.process.stdin = None
        assert server.process.wait(ENDED) == 0


def test_a_call_whose_client_closes_the_input_is_rolled_back(root: Path) -> None:
    with started(root) as server:
        server.hello()
        server.call("apply_patch", {"patch": many_files(900)}, 1)
        time.sleep(0.05)
        code, _, err = server.end()
        assert (code, err) == (0, b"")
    with free(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) in (0, 900)


def test_a_call_whose_client_closes_the_output_is_rolled_back(root: Path) -> None:
    program = (
        "import time\n"
        "from ringfence_cli import main\n"
        "from ringfence_tools import files\n"
        "class Slow(files._FileTools):\n"
        "    def write_file(self, params, *, context):\n"
        "        result = super().write_file(params, context=context)\n"
        "        time.sleep(1)\n"
        "        return result\n"
        "files._FileTools = Slow\n"
        "main.main()\n"
    )
    with talking([sys.executable, "-c", program, "serve", str(root)]) as server:
        server.hello()
        server.call("write_file", {"file_path": "b.txt", "content": "x"}, 1)
        assert server.process.stdout is not None
        server.process.stdout.close()
        assert server.process.wait(ENDED) == 0
    assert not (root / "b.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_in_the_middle_of_a_call_and_rolls_it_back(root: Path, number: int) -> None:
    with started(root) as server:
        server.hello()
        server.call("apply_patch", {"patch": many_files(900)}, 1)
        time.sleep(0.1)
        server.process.send_signal(number)
        assert server.process.wait(ENDED) == 130
    with free(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) in (0, 900)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_come_while_the_call_is_rolled_back_neither_kill_nor_hang_the_server(
    root: Path, number: int
) -> None:
    with started(root) as server:
        server.hello()
        server.call("apply_patch", {"patch": many_files(900)}, 1)
        time.sleep(0.05)
        for one in (signal.SIGTERM, number, number):
            server.process.send_signal(one)
            time.sleep(0.01)
        assert server.process.wait(ENDED) == 130
    with free(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) in (0, 900)


def test_a_signal_ends_a_server_whose_client_says_nothing(root: Path) -> None:
    with started(root) as server:
        server.hello()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDED) == 130


CLIENT = """
import json, subprocess, sys, time
server = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in json.loads(sys.argv[2]):
    server.stdin.write(json.dumps(line).encode() + b"\\n")
    server.stdin.flush()
    if "id" in line and line["id"] == 0:
        server.stdout.readline()
print("asked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.2, 0.4])
def test_a_client_that_is_killed_in_the_middle_of_a_call_leaves_all_of_it_or_nothing(root: Path, delay: float) -> None:
    lines: list[Mapping[str, Any]] = [
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": HELLO},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "apply_patch", "arguments": {"patch": many_files(900)}},
        },
    ]
    command = [sys.executable, "-c", CLIENT, json.dumps([*SERVE, str(root)]), json.dumps(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"asked\n"
        time.sleep(delay)
        client.kill()
    with free(root) as workspace:
        assert workspace.recovered is None
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


def test_a_server_that_is_killed_leaves_all_of_a_call_or_nothing(root: Path) -> None:
    with started(root) as server:
        server.hello()
        server.call("apply_patch", {"patch": many_files(900)}, 1)
        time.sleep(random.random() * 0.3)
        server.process.kill()
        server.process.wait(ENDED)
    with free(root) as workspace:
        assert len(list(root.glob("m/*"))) == (900 if workspace.steps() else 0)


def test_a_workspace_that_somebody_has_is_not_served(root: Path) -> None:
    with Workspace.open(root), started(root) as server:
        code, out, err = server.end()
    assert (code, out) == (2, b"")
    assert str(os.getpid()).encode() in err


@pytest.mark.parametrize("first", ["initialize", "server/discover"])
def test_a_client_that_is_not_served_is_told_why_in_the_protocol(root: Path, first: str) -> None:
    with Workspace.open(root), started(root) as server:
        for number, method in enumerate((first, "initialize")):
            server.ask(method, HELLO, number)
            refused = server.answer()
            assert refused["id"] == number
            assert f"is open in process {os.getpid()}" in refused["error"]["message"]
        assert server.end()[0] == 2


RAISING = """
from ringfence import MarkdownSection
class Raising(MarkdownSection):
    def resources(self):
        raise OSError(111, "Connection refused", "/run/database.sock")
section = Raising(title="Own", key="own", template="Text.")
"""


@pytest.mark.parametrize("reason", ["a relative state directory", "a section whose resources cannot be made"])
def test_it_is_told_too_what_else_keeps_a_server_from_its_start(
    root: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = root.parent / "own.py"
    own.write_text(RAISING)
    options, said = ["--section", f"{own}:section"], "/run/database.sock: Connection refused"
    if reason == "a relative state directory":
        monkeypatch.setenv("RINGFENCE_STATE_DIR", "relative")
        options, said = [], "RINGFENCE_STATE_DIR"
    with started(root, *options) as server:
        server.ask("initialize", HELLO, 0)
        assert said in server.answer()["error"]["message"]
        code, _, err = server.end()
        assert (code, b"Traceback" in err, said.encode() in err) == (2, False, True)


def test_a_signal_ends_a_server_that_waits_to_say_why_it_serves_nothing(root: Path) -> None:
    with Workspace.open(root), started(root) as server:
        server.ask("server/discover", {}, 0)
        assert "error" in server.answer()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDED) == 2


def test_a_handler_that_prints_cannot_reach_the_protocol(root: Path) -> None:
    program = (
        "import sys\n"
        "from ringfence_cli import main\n"
        "from ringfence_tools import files\n"
        "class Loud(files._FileTools):\n"
        "    def ls(self, params, *, context):\n"
        "        print('printed'); sys.stdout.flush(); assert sys.stdin.read() == ''\n"
        "        return super().ls(params, context=context)\n"
        "files._FileTools = Loud\n"
        "main.main()\n"
    )
    with talking([sys.executable, "-c", program, "serve", str(root)]) as server:
        server.hello()
        server.call("ls", {}, 1)
        assert server.answer()["id"] == 1
        assert server.end() == (0, b"", b"printed\n")


def loaded(*command: str) -> set[str]:
    """The modules of a server that has answered once."""
    telling = "import atexit, runpy, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    with talking([sys.executable, "-c", telling + command[0], *command[1:]]) as server:
        server.ask("initialize", HELLO, 0)
        assert "result" in server.answer()
        code, _, modules = server.end()
    assert code == 0
    return set(modules.decode().split())


def test_a_start_loads_little_more_than_that_of_a_bare_server_of_the_sdk(root: Path) -> None:
    # What it costs is mostly what it loads; benchmarks/mcp_call.py has the time.
    bare = loaded(f"runpy.run_path({str(BARE)!r}, run_name='__main__')")
    more = loaded("runpy.run_module('ringfence_cli', run_name='__main__')", "serve", str(root)) - bare
    others = {name.partition(".")[0] for name in more} - sys.stdlib_module_names
    assert {name for name in others if not name.startswith("ringfence")} <= {"anyio", "dulwich", "isal"}
    assert 100 < len(more) < 270


def test_the_policies_of_the_owner_and_of_the_command_line_hold_for_clients(root: Path) -> None:
    owners = owner_file(root)
    owners.parent.mkdir(parents=True, exist_ok=True)
    owners.write_text('[policies.paths]\ndeny = ["secret/**"]\n')
    with started(root, "--policy", "deletions:0") as server:
        server.hello()
        calls = [
            ("write_file", {"file_path": "secret/new.txt", "content": "x"}),
            ("read_file", {"file_path": "a.txt"}),
            ("rm", {"path": "a.txt"}),
            ("write_file", {"file_path": "b.txt", "content": "x"}),
        ]
        for number, (name, arguments) in enumerate(calls, start=1):
            server.call(name, arguments, number)
        answers = [server.answer()["result"] for _ in calls]
        assert [answer.get("isError", False) for answer in answers] == [True, False, True, False]
        assert "denied by the policy" in answers[0]["content"][0]["text"]
    assert not (root / "secret").exists()
    assert (root / "a.txt").read_text() == "one\n"
    with started(root, "--policy", "nonsense") as server:
        code, _, said = server.end()
        assert code == 2
        assert b"nonsense" in said


def test_without_its_packages_the_server_says_which_to_install(root: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from ringfence_cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve", str(root)], capture_output=True, text=True)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert "ringfence's extra 'mcp' needs: pip install 'anyio>=" in said
    assert "'mcp>=" in said
