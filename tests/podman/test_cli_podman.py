"""`ringfence run` and `ringfence demo` with a container."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captured_tree import CapturedPath, capture_tree

from ringfence_sandbox import Workspace
from ringfence_sandbox.container.podman_connection import Connection

pytestmark = pytest.mark.usefixtures("podman", "limits_hold")
SECONDS = 120
DONE: Mapping[str, Any] = {"text": "Done."}


def call(name: str, **arguments: object) -> Mapping[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    return tmp_path / "tree"


def shape(root: Path) -> dict[str, CapturedPath]:
    """All that a rollback brings back; which inode it is, is no part of that."""
    return {path: replace(one, inode=0) for path, one in capture_tree(root).items()}


def ringfence(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringfence_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS, **options)


def command_of(tree: Path, *turns: Mapping[str, Any]) -> list[str | Path]:
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return ["run", tree, "--workspace", "podman", "--task", "Do it.", "--model", f"script:{script}"]


def test_a_run_ends_with_a_diff_of_what_files_and_commands_became_and_can_be_undone(tree: Path) -> None:
    turns = (
        call("shell_execute", command="echo two > a.txt; echo new > b.txt"),
        call("read_file", file_path="/workspace/a.txt"),
        call("write_file", file_path="a.txt", content="three\n"),
        call("shell_execute", command="rm a.txt; exit 7", rollback_on_error=True),
        call("shell_execute", argv=["cat", "a.txt"]),
    )
    receipts = tree.parent / "receipts.jsonl"
    ended = ringfence(*command_of(tree, *turns, DONE), "--receipts", receipts)
    assert ended.returncode == 0, ended.stderr
    assert "-one\n+three\n" in ended.stdout
    assert "+new\n" in ended.stdout
    assert "exit code 7" in ended.stderr
    assert "failed and rolled back" in ended.stderr
    outcomes = [json.loads(line)["outcome"] for line in receipts.read_text().splitlines()]
    assert outcomes == ["committed", "committed", "committed", "failed", "committed"]
    logged = ringfence("log", tree)
    assert logged.stdout.count("shell_execute") == 1
    assert "write_file" in logged.stdout
    assert ringfence("undo", tree, "2").returncode == 0
    assert {path.name: path.read_text() for path in tree.iterdir()} == {"a.txt": "one\n"}


def test_commands_have_the_limits_that_the_command_line_names(tree: Path) -> None:
    places = "memory/memory.limit_in_bytes memory.max cpu/cpu.cfs_quota_us cpu.max"
    look = f"cd /sys/fs/cgroup; cat {places} 2>/dev/null > /workspace/limits; true"
    late = call("shell_execute", command="sleep 60", timeout_seconds=999)
    limits = "--memory", "96m", "--cpus", "0.5", "--command-timeout", "2s"
    ended = ringfence(*command_of(tree, call("shell_execute", command=look), late, DONE), *limits)
    assert ended.returncode == 0, ended.stderr
    assert (tree / "limits").read_text().split()[:2] == [f"{96 << 20}", "50000"]
    assert "exit code 124" in ended.stderr


def test_a_command_whose_changes_are_denied_is_told_all_the_same(tree: Path) -> None:
    receipts = tree.parent / "receipts.jsonl"
    failing = call("shell_execute", command="echo cache > b.txt; echo 3 failed; exit 1")
    options = "--policy", "allow:/src/**", "--receipts", receipts, "--report", tree.parent / "run.html"
    ended = ringfence(*command_of(tree, failing, DONE), *options)
    receipt = json.loads(receipts.read_text())
    assert (receipt["outcome"], receipt["exit_code"], (tree / "b.txt").exists()) == ("denied", 1, False)
    assert "b.txt is not among what may be changed; it had ended with exit code 1" in receipt["message"]
    assert ended.returncode == 0, ended.stderr


def test_what_a_run_writes_for_its_user_into_the_directory_is_in_neither_its_changes_nor_its_patch(tree: Path) -> None:
    commands = call("shell_execute", command="echo two > a.txt"), call("shell_execute", command="true")
    files = "--receipts", tree / "run.jsonl", "--patch", tree / "run.patch"
    ended = ringfence(*command_of(tree, *commands, DONE), *files, "--json")
    told = json.loads(ended.stdout)
    assert [change["path"] for change in told["changes"]] == ["a.txt"]
    assert told["patch"] == (tree / "run.patch").read_text()
    assert told["patch"].count("diff --git") == 1


def test_a_run_that_was_cut_off_goes_on_in_a_container_with_what_it_has_read(tree: Path) -> None:
    receipts = tree.parent / "receipts.jsonl"
    cut = ringfence(
        *command_of(tree, call("read_file", file_path="a.txt"), call("shell_execute", command="false")),
        *("--receipts", receipts, "--keep-environment"),
    )
    assert cut.returncode == 3
    assert [json.loads(line)["exit_code"] for line in receipts.read_text().splitlines()] == [None, 1]
    write, look = (
        call("write_file", file_path="a.txt", content="two\n"),
        call("shell_execute", command="grep two a.txt"),
    )
    named = ("--task", "Do it.", "--workspace", "podman")
    ended = ringfence(
        *(each for each in command_of(tree, write, look, DONE) if each not in named), "--resume", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    assert "goes on with --workspace podman --keep-environment" in ended.stderr
    told = json.loads(ended.stdout)
    assert (told["parts"], told["tool_calls"]["committed"]) == (2, 4)
    assert (tree / "a.txt").read_text() == "two\n"


def test_a_run_ends_with_what_its_commands_made_that_the_history_leaves_out(tree: Path) -> None:
    made = call("shell_execute", command="truncate -s 300M large.bin; echo two > a.txt")
    ended = ringfence(*command_of(tree, made, DONE))
    assert ended.returncode == 0, ended.stderr
    assert "left out: large.bin (too large: what commands did to it" in ended.stderr
    assert "1 file changed" in ended.stderr
    assert (tree / "large.bin").stat().st_size == 300 << 20


def test_a_run_never_says_that_nothing_was_changed_when_a_command_removed_what_the_history_lacks(tree: Path) -> None:
    with (tree / "large.bin").open("wb") as file:
        file.truncate(300 << 20)
    page = tree.parent / "run.html"
    ended = ringfence(*command_of(tree, call("shell_execute", command="rm -f large.bin"), DONE), "--report", str(page))
    assert "left out: large.bin (too large: what commands did to it" in ended.stderr
    assert "\nnothing else was changed" in ended.stderr
    assert "Nothing was changed." not in page.read_text()
    assert "no undo brings it back" in page.read_text()


def test_commands_may_look_into_a_git_repository_and_not_change_its_own_data(tree: Path) -> None:
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *arguments], cwd=tree, check=True)
    before = shape(tree)
    turns = (
        call("shell_execute", command="git status --short && git diff && git log --oneline"),
        call("shell_execute", command="echo two > a.txt; printf 'touch ran' > .git/hooks/post-checkout"),
        call("shell_execute", command="rm .git/config"),
    )
    ended = ringfence(*command_of(tree, *turns, DONE))
    assert ended.returncode == 0
    assert "exit code 0" in ended.stderr
    assert ended.stderr.count("git's own data") == 2
    assert shape(tree) == before


def test_commands_of_a_run_have_no_network_unless_it_is_asked_for(tree: Path) -> None:
    turns = (call("shell_execute", command="ls /sys/class/net > net"), DONE)
    assert ringfence(*command_of(tree, *turns)).returncode == 0
    assert (tree / "net").read_text().split() == ["lo"]


def test_an_image_that_is_not_there_ends_a_run_with_4(tree: Path) -> None:
    ended = ringfence(*command_of(tree, DONE), "--image", "localhost/no-such-image:1")
    assert ended.returncode == 4
    assert "no-such-image" in ended.stderr
    assert "turn 1" not in ended.stderr


def test_an_interrupted_command_is_rolled_back(tree: Path, podman: Connection) -> None:
    turns = (call("shell_execute", command="echo two > a.txt"), call("shell_execute", command="rm a.txt; sleep 60"))
    command = [sys.executable, "-m", "ringfence_cli", *map(str, command_of(tree, *turns, DONE))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + SECONDS
        while (tree / "a.txt").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert b"1 step committed before" in said
    assert (tree / "a.txt").read_text() == "two\n"


def test_the_demonstration_runs_the_repository_s_tests_in_the_container(tmp_path: Path) -> None:
    temporary = tmp_path / ("tmp" * 30)  # longer than the path of a socket may be
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    ended = ringfence("demo", "--workspace", "podman", env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "yes  the agent ran the tests itself: exit code 1, exit code 0" in ended.stderr
    assert "NO " not in ended.stderr
    assert ended.stdout.startswith("diff --git a/HISTORY b/HISTORY\n")
    assert [name for name in os.listdir(temporary) if name.startswith("ringfence-demo")] == []


def test_a_demonstration_that_is_kept_can_be_undone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    ended = ringfence("demo", "--workspace", "podman", "--keep", kept)
    assert ended.returncode == 0, ended.stderr
    assert "timedelta(days=1)" in (kept / "timesheet" / "entries.py").read_text()
    assert ringfence("undo", kept, "2").returncode == 0
    assert "unreleased" not in (kept / "HISTORY").read_text()


def test_a_client_of_the_mcp_server_runs_commands_in_the_container(tree: Path) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    calls = [
        ("shell_execute", {"command": "echo two > a.txt && id -u"}),
        ("shell_execute", {"command": "rm a.txt; sleep 60", "timeout_seconds": 1}),
        ("read_file", {"file_path": "/workspace/a.txt"}),
    ]
    asked: list[Mapping[str, Any]] = [{"id": 0, "method": "initialize", "params": hello}]
    asked.append({"method": "notifications/initialized"})
    for number, (name, arguments) in enumerate(calls, start=1):
        asked.append({"id": number, "method": "tools/call", "params": {"name": name, "arguments": arguments}})
    command = [sys.executable, "-m", "ringfence_cli", "serve", str(tree), "--workspace", "podman"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for message in asked:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
        answers = [json.loads(server.stdout.readline())["result"] for _ in range(len(calls) + 1)][1:]
        server.stdin.close()
        assert server.wait(SECONDS) == 0
    assert [answer.get("isError", False) for answer in answers] == [False, True, False]
    assert "1000" in answers[0]["content"][0]["text"]
    assert "two" in answers[2]["content"][0]["text"]
    assert (tree / "a.txt").read_text() == "two\n"
    with Workspace.open(tree, read_only=True) as workspace:
        assert [step.tool for step in workspace.steps()] == ["shell_execute"]


@pytest.mark.parametrize("how", ["SIGTERM", "the end of its input", "a cancellation"])
def test_a_command_ends_with_the_call_that_nobody_waits_for(tree: Path, how: str) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    before = {path.name: path.read_text() for path in tree.iterdir()}
    running = {"command": "rm a.txt; touch begun; sleep 110", "timeout_seconds": 120}
    command = [sys.executable, "-m", "ringfence_cli", "serve", str(tree), "--workspace", "podman"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def tell(**message: Any) -> None:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")  # pyright: ignore[reportOptionalMemberAccess]

        tell(id=0, method="initialize", params=hello)
        tell(method="notifications/initialized")
        assert "result" in json.loads(server.stdout.readline())
        tell(id=1, method="tools/call", params={"name": "shell_execute", "arguments": running})
        while not (tree / "begun").exists():
            time.sleep(0.01)
        if how == "SIGTERM":
            server.send_signal(signal.SIGTERM)
        elif how == "a cancellation":
            tell(method="notifications/cancelled", params={"requestId": 1})
            tell(id=2, method="tools/call", params={"name": "ls", "arguments": {}})
            assert select.select([server.stdout], [], [], 60)[0]
            answer = json.loads(server.stdout.readline())
            assert (answer["id"], answer["result"].get("isError", False)) == (2, False)
        server.stdin.close()
        assert server.wait(60) == (130 if how == "SIGTERM" else 0)
    assert {path.name: path.read_text() for path in tree.iterdir()} == before
