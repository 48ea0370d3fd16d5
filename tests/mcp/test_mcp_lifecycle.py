"""The life of `ringfence serve` in the hands of real clients: what they see of a directory that another process has, of
a server that cannot start, and of an environment that is not the user's. Every server is a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_runs import owner_file
from command_line import ringfence_text
from effort import one_in
from mcp_servers import HELLO, LineClient
from served import open_served

from ringfence.errors import CallCancelledError
from ringfence.runtime import Cancellation
from ringfence_sandbox import Workspace, store_directory

PATIENT = 60.0
SLOW = """
import time
from pathlib import Path
from ringfence import MarkdownSection, Tool, ToolResult
def slow(params, *, context):
    Path("{started}").touch()
    while not Path("{released}").exists():
        time.sleep(0.01)
    return ToolResult.ok(None, "done")
tool = Tool[None, None](name="slow", description="Waits.", handler=slow, read_only=True)
section = MarkdownSection(title="Slow", key="slow", template="", tools=[tool])
"""


class Server(LineClient):
    """A client with a server of its own."""

    def __init__(self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ringfence_cli", "serve", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        super().__init__(self.process.stdin, self.process.stdout)

    def tools(self) -> Any:
        self.ask("tools/list", {})
        return self.answer()["result"]["tools"]

    def text(self, name: str, **arguments: Any) -> str:
        return "\n".join(content["text"] for content in self.result(name, **arguments)["content"])

    def write(self, path: str) -> str:
        return self.text("write_file", file_path=path, content="x\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENT)


@pytest.fixture
def serve() -> Generator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*words: str, hello: bool = True, **more: Any) -> Server:
        server = Server(*words, **more)
        servers.append(server)
        if hello:
            server.hello()
        return server

    yield start
    for server in servers:
        server.process.kill()
        with server.process:
            pass


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def slow(tmp_path: Path) -> tuple[str, Path, Path]:
    """A section with a tool that waits; the files that say that it has begun, and that it may end."""
    section, started, released = tmp_path / "slow.py", tmp_path / "started", tmp_path / "released"
    section.write_text(SLOW.format(started=started, released=released))
    return f"{section}:section", started, released


# Another process has the directory


@pytest.mark.parametrize("stopped", [False, True], ids=["working", "stopped"])
def test_a_second_server_stays_up_says_who_has_the_directory_and_works_when_that_one_is_killed(
    root: Path, serve: Callable[..., Server], stopped: bool
) -> None:
    first = serve(str(root))
    assert "a.txt" in first.text("ls")
    if stopped:
        first.process.send_signal(signal.SIGSTOP)
    second = serve(str(root))
    tools = second.tools()
    for _ in range(2):
        busy = second.result("write_file", file_path="b.txt", content="x\n")
        assert busy["isError"] is True
        (content,) = busy["content"]
        said = content["text"]
        assert f"{root} is open in process {first.process.pid} (`ringfence serve`)" in said
        assert "--http" in said
        assert "--read-only" in said
        assert "Nothing was changed. The next call tries again" in said
    second.ask("resources/list", {})
    assert second.answer()["result"]["resources"] == []
    second.ask("resources/read", {"uri": "workspace:///a.txt"})
    assert f"process {first.process.pid}" in second.answer()["error"]["message"]
    if not stopped:
        assert tools == first.tools()
    first.kill()
    assert "b.txt" in second.write("b.txt")
    assert (root / "b.txt").exists()


def test_a_read_only_server_works_beside_the_one_that_has_the_directory(
    root: Path, serve: Callable[..., Server]
) -> None:
    assert "a.txt" in serve(str(root)).text("ls")
    assert "1 | one" in serve(str(root), "--read-only").text("read_file", file_path="a.txt")


def test_a_server_whose_client_has_vanished_is_named_until_its_handler_has_ended(
    root: Path, serve: Callable[..., Server], slow: tuple[str, Path, Path]
) -> None:
    section, started, released = slow
    first = serve(str(root), "--section", section)
    first.call("slow")
    wait_for(started.exists)
    first.to_server.close()
    first.from_server.close()
    second = serve(str(root))
    assert f"process {first.process.pid} (`ringfence serve`)" in second.write("b.txt")
    assert first.process.poll() is None
    released.touch()
    assert first.process.wait(PATIENT) == 0
    assert "b.txt" in second.write("b.txt")
    assert (root / "b.txt").exists()


def test_a_run_that_has_the_directory_is_named(
    root: Path, serve: Callable[..., Server], slow: tuple[str, Path, Path]
) -> None:
    section, started, released = slow
    script = root.parent / "script.jsonl"
    script.write_text('{"tool_calls": [{"name": "slow", "arguments": {}}]}\n{"text": "done"}\n')
    command = [sys.executable, "-m", "ringfence_cli", "run", str(root), "--task", "Wait.", "--section", section]
    with subprocess.Popen([*command, "--model", f"script:{script}", "--quiet"], stdout=subprocess.DEVNULL) as run:
        wait_for(lambda: started.exists() or run.poll() is not None)
        server = serve(str(root))
        assert f"is open in process {run.pid} (`ringfence run`)" in server.write("b.txt")
        released.touch()
        assert run.wait(PATIENT) == 0
    assert "b.txt" in server.write("b.txt")


def test_a_program_that_has_the_directory_is_named(root: Path, serve: Callable[..., Server]) -> None:
    with Workspace.open(root):
        program = os.path.basename(Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode())
        server = serve(str(root))
        assert f"is open in process {os.getpid()} ({program})" in server.write("b.txt")
    assert "b.txt" in server.write("b.txt")


def test_a_directory_is_not_held_before_a_client_asks_for_the_tools(root: Path, serve: Callable[..., Server]) -> None:
    server = serve(str(root))
    with Workspace.open(root):
        server.ask("ping", {})
        assert server.answer()["result"] == {}
    server.tools()
    # Only a look: a command that takes the directory first would keep it from the server.
    holder = store_directory(root) / "holder"
    wait_for(lambda: str(server.process.pid) in holder.read_text())
    assert "`ringfence serve`" in ringfence_text("checkpoint", str(root), "name").stderr


def test_a_client_that_goes_while_the_tree_is_recorded_is_not_waited_for(root: Path) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(CallCancelledError):
        open_served(root, cancellation=cancellation)
    Workspace.open(root).close()


# What keeps a server from working


def refused(server: Server) -> str:
    """The reason that answers each request alike."""
    answers: list[Any] = []
    for number, method in enumerate(("server/discover", "initialize", "tools/list")):
        server.ask(method, HELLO, number)
        answers.append(server.answer())
    assert [answer["id"] for answer in answers] == [0, 1, 2]
    (reason,) = {answer["error"]["message"] for answer in answers}
    return reason


def test_a_client_that_starts_the_server_elsewhere_sees_where(
    root: Path, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    reason = refused(serve("no-such-directory", cwd=tmp_path, hello=False))
    assert "no-such-directory" in reason
    assert f"started in {tmp_path}" in reason
    server = serve(cwd=root)
    assert "a.txt" in server.text("ls")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--image", "x"], "--workspace podman"),
        (["--no-such-option"], "--no-such-option"),
        (["--allow-host", "x"], "--http"),
    ],
)
def test_a_wrong_command_line_answers_every_request(
    root: Path, serve: Callable[..., Server], words: list[str], reason: str
) -> None:
    server = serve(str(root), *words, hello=False)
    assert reason in refused(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENT) == 2


def test_a_missing_package_answers_every_request(root: Path) -> None:
    code = "import sys; sys.modules['mcp'] = None; from ringfence_cli.main import main; main()"
    asked = '{"jsonrpc": "2.0", "id": "x", "method": "initialize"}\nno message\n[]\n7\n'
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", str(root)], input=asked, capture_output=True, text=True, timeout=PATIENT
    )
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert '"id": "x"' in line
    assert "pip install" in line


@contextmanager
def broken_policies(root: Path) -> Generator[None]:
    file = owner_file(root)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[policies]\nno_such_policy = 1\n")
    yield
    file.unlink()


@contextmanager
def no_directory(root: Path) -> Generator[None]:
    root.rename(root.with_name("away"))
    yield
    root.with_name("away").rename(root)


@contextmanager
def unusable_store(root: Path) -> Generator[None]:
    store = owner_file(root).parent
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text("no directory")
    yield
    store.unlink()


@pytest.mark.parametrize(
    ("broken", "reason"),
    one_in(
        2,
        [
            (broken_policies, "no_such_policy"),
            (no_directory, "there is no directory"),
            (unusable_store, "the store cannot be there"),
        ],
    ),
)
def test_what_keeps_the_workspace_from_opening_is_in_each_answer_until_it_is_mended(
    root: Path, serve: Callable[..., Server], broken: Any, reason: str
) -> None:
    server = serve(str(root))
    with broken(root):
        assert {"read_file", "undo"} < {tool["name"] for tool in server.tools()}
        for _ in range(2):
            assert reason in server.text("ls")
    assert "a.txt" in server.text("ls")


def test_a_read_only_server_without_its_directory_says_so_in_each_answer(
    root: Path, serve: Callable[..., Server]
) -> None:
    server = serve(str(root), "--read-only")
    with no_directory(root):
        assert {tool["name"] for tool in server.tools()} >= {"read_file", "history"}
        assert "No such file" in server.text("ls")
    assert "a.txt" in server.text("ls")


def test_a_missing_sandbox_is_in_each_answer(root: Path, serve: Callable[..., Server], tmp_path: Path) -> None:
    env = {"CONTAINER_HOST": f"unix://{tmp_path}/none.sock", "PATH": "/nowhere"}
    server = serve(str(root), "--workspace", "podman", env=env)
    assert "shell_execute" in {tool["name"] for tool in server.tools()}
    for _ in range(2):
        assert "no Podman service answers" in server.text("shell_execute", command="true")


RAISING = """
from ringfence import MarkdownSection
class Raising(MarkdownSection):
    def resources(self):
        raise OSError(111, "Connection refused", "/run/database.sock")
section = Raising(title="Own", key="own", template="Text.")
"""


@pytest.mark.parametrize(
    ("options", "reason"),
    one_in(
        2,
        [
            (["--section", "own.py:section"], "/run/database.sock: Connection refused"),
            (["--section", "none.py:section"], "none.py"),
            (["--policy", "nonsense"], "nonsense"),
            (["--policy", "tests:no_such_tool:*"], "no_such_tool"),
            (["--receipts", "."], "cannot be written"),
        ],
    ),
)
def test_an_option_that_cannot_be_used_is_in_each_answer_and_ends_the_server_of_a_person(
    root: Path, serve: Callable[..., Server], options: list[str], reason: str
) -> None:
    (root.parent / "own.py").write_text(RAISING)
    server = serve(str(root), *options, cwd=root.parent)
    assert {"read_file", "undo"} < {tool["name"] for tool in server.tools()}
    assert reason in server.text("ls")
    ended = ringfence_text("serve", str(root), *options, "--http", "127.0.0.1:0", cwd=root.parent)
    assert ended.returncode == 2
    assert reason in " ".join(ended.stderr.split())


def test_files_of_a_call_under_another_state_directory_are_explained_in_the_first_answer(
    root: Path, serve: Callable[..., Server]
) -> None:
    held = root / ".ringfence-hold-0123456789abcdef"
    held.mkdir()
    (held / "0").write_text("displaced")
    server = serve(str(root))
    said = server.text("ls")
    assert held.name in said
    assert "another RINGFENCE_STATE_DIR" in said
    assert "another RINGFENCE_STATE_DIR" not in server.text("ls")
    assert (held / "0").read_text() == "displaced"


def test_the_state_directory_of_a_killed_server_is_named_and_brings_the_files_back(
    root: Path, serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, started, state = tmp_path / "half.py", tmp_path / "started", str(tmp_path / "its state")
    half = 'context.filesystem.write("a.txt", "half\\n")\n    Path('
    section.write_text(
        SLOW.format(started=started, released=tmp_path / "never")
        .replace("Path(", half, 1)
        .replace("read_only=True", "")
    )
    killed = serve(str(root), "--section", f"{section}:section", env={"RINGFENCE_STATE_DIR": state})
    killed.call("slow")
    wait_for(started.exists)
    killed.kill()
    assert (root / "a.txt").read_text() == "half\n"
    (held,) = root.glob(".ringfence-hold-*")
    server = serve(str(root))
    said = server.text("ls")
    assert held.name in said
    assert f"`RINGFENCE_STATE_DIR='{state}' ringfence recover {root}` takes it back" in said
    server.kill()
    monkeypatch.setenv("RINGFENCE_STATE_DIR", state)
    assert ringfence_text("recover", root).returncode == 0
    assert (root / "a.txt").read_text() == "one\n"
    assert list(root.iterdir()) == [root / "a.txt"]


def test_a_holding_directory_names_only_a_state_directory_that_has_its_store(
    root: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    held = root / ".ringfence-hold-0123456789abcdef"
    held.mkdir()
    (held / "0").write_text("displaced")
    (tmp_path / "other/stores/0").mkdir(parents=True)
    for number, store in enumerate(
        [b"/nowhere", b"x\nrun this", os.fsencode(tmp_path / "other/stores/0"), b"\xff/\xff/"]
    ):
        os.setxattr(held, "user.ringfence.store", store)
        server = serve(str(root), env={"RINGFENCE_STATE_DIR": str(tmp_path / f"state {number}")})
        said = server.text("ls")
        server.kill()
        assert "If it ran with another RINGFENCE_STATE_DIR, `ringfence recover`" in said
        assert "run this" not in said


def test_a_relative_state_directory_is_in_each_answer(root: Path, serve: Callable[..., Server]) -> None:
    server = serve(str(root), env={"RINGFENCE_STATE_DIR": "relative"})
    assert "RINGFENCE_STATE_DIR" in server.text("ls")
    assert server.tools()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENT) == 130
