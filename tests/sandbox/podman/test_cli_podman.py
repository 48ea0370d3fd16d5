"""`ringfence run` and `ringfence demo` with a container."""

from __future__ import annotations

import json
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
from captured_tree import shape
from command_line import ringfence_text
from real_git import repository

from ringfence_sandbox import Workspace

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
    ended = ringfence_text(*command_of(tree, *turns, DONE), "--receipts", receipts)
    assert ended.returncode == 0, ended.stderr
    assert "-one\n+three\n" in ended.stdout
    assert "+new\n" in ended.stdout
    assert "exit code 7" in ended.stderr
    assert "failed and rolled back" in ended.stderr
    outcomes = [json.loads(line)["outcome"] for line in receipts.read_text().splitlines()]
    assert outcomes == ["committed", "committed", "committed", "failed", "committed"]
    logged = ringfence_text("log", tree)
    assert logged.stdout.count("shell_execute") == 1
    assert "write_file" in logged.stdout
    assert ringfence_text("undo", tree, "2").returncode == 0
    assert {path.name: path.read_text() for path in tree.iterdir()} == {"a.txt": "one\n"}


def test_commands_have_the_limits_that_the_command_line_names(tree: Path) -> None:
    places = "memory/memory.limit_in_bytes memory.max cpu/cpu.cfs_quota_us cpu.max"
    look = f"cd /sys/fs/cgroup; cat {places} 2>/dev/null > /workspace/limits; true"
    late = call("shell_execute", command="sleep 60", timeout_seconds=999)
    limits = "--memory", "96m", "--cpus", "0.5", "--command-timeout", "2s"
    ended = ringfence_text(*command_of(tree, call("shell_execute", command=look), late, DONE), *limits)
    assert ended.returncode == 0, ended.stderr
    assert (tree / "limits").read_text().split()[:2] == [f"{96 << 20}", "50000"]
    assert "exit code 124" in ended.stderr


def test_a_command_whose_changes_are_denied_is_told_all_the_same(tree: Path) -> None:
    receipts = tree.parent / "receipts.jsonl"
    failing = call("shell_execute", command="echo cache > b.txt; echo 3 failed; exit 1")
    options = "--policy", "allow:/src/**", "--receipts", receipts, "--report", tree.parent / "run.html"
    ended = ringfence_text(*command_of(tree, failing, DONE), *options)
    receipt = json.loads(receipts.read_text())
    assert (receipt["outcome"], receipt["exit_code"], (tree / "b.txt").exists()) == ("denied", 1, False)
    assert "b.txt is not among what may be changed; it had ended with exit code 1" in receipt["message"]
    assert ended.returncode == 0, ended.stderr


def test_what_a_run_writes_for_its_user_into_the_directory_is_in_neither_its_changes_nor_its_patch(tree: Path) -> None:
    commands = call("shell_execute", command="echo two > a.txt"), call("shell_execute", command="true")
    files = "--receipts", tree / "run.jsonl", "--patch", tree / "run.patch"
    ended = ringfence_text(*command_of(tree, *commands, DONE), *files, "--json")
    told = json.loads(ended.stdout)
    assert [change["path"] for change in told["changes"]] == ["a.txt"]
    assert told["patch"] == (tree / "run.patch").read_text()
    assert told["patch"].count("diff --git") == 1


def test_a_run_that_was_cut_off_goes_on_in_a_container_with_what_it_has_read(tree: Path) -> None:
    receipts = tree.parent / "receipts.jsonl"
    cut = ringfence_text(
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
    ended = ringfence_text(
        *(each for each in command_of(tree, write, look, DONE) if each not in named), "--resume", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    assert "goes on with --workspace podman --keep-environment" in ended.stderr
    told = json.loads(ended.stdout)
    assert (told["parts"], told["tool_calls"]["committed"]) == (2, 4)
    assert (tree / "a.txt").read_text() == "two\n"


def test_a_run_ends_with_what_its_commands_made_that_the_history_leaves_out(tree: Path) -> None:
    made = call("shell_execute", command="truncate -s 300M large.bin; echo two > a.txt")
    ended = ringfence_text(*command_of(tree, made, DONE))
    assert ended.returncode == 0, ended.stderr
    assert "left out: large.bin (too large: what commands did to it" in ended.stderr
    assert "1 file changed" in ended.stderr
    assert (tree / "large.bin").stat().st_size == 300 << 20


def test_a_run_never_says_that_nothing_was_changed_when_a_command_removed_what_the_history_lacks(tree: Path) -> None:
    with (tree / "large.bin").open("wb") as file:
        file.truncate(300 << 20)
    page = tree.parent / "run.html"
    ended = ringfence_text(
        *command_of(tree, call("shell_execute", command="rm -f large.bin"), DONE), "--report", str(page)
    )
    assert "left out: large.bin (too large: what commands did to it" in ended.stderr
    assert "\nnothing else was changed" in ended.stderr
    assert "Nothing was changed." not in page.read_text()
    assert "no undo brings it back" in page.read_text()


def test_commands_may_look_into_a_git_repository_and_not_change_its_own_data(tree: Path) -> None:
    repository(tree)
    os.utime(tree / "a.txt", (1, 1))  # git would write into its index that it has looked at it again
    before = shape(tree)
    turns = (
        call("shell_execute", command="git status --short && git diff && git log --oneline"),
        call("shell_execute", command="echo two > a.txt; printf 'touch ran' > .git/hooks/post-checkout"),
        call("shell_execute", command="rm .git/config"),
    )
    ended = ringfence_text(*command_of(tree, *turns, DONE))
    assert ended.returncode == 0
    assert "exit code 0" in ended.stderr
    assert ended.stderr.count("git's own data") == 2
    assert shape(tree) == before


def test_commands_of_a_run_have_no_network_unless_it_is_asked_for(tree: Path) -> None:
    turns = (call("shell_execute", command="ls /sys/class/net > net"), DONE)
    assert ringfence_text(*command_of(tree, *turns)).returncode == 0
    assert (tree / "net").read_text().split() == ["lo"]


def test_an_image_that_is_not_there_ends_a_run_with_4(tree: Path) -> None:
    ended = ringfence_text(*command_of(tree, DONE), "--image", "localhost/no-such-image:1")
    assert ended.returncode == 4
    assert "no-such-image" in ended.stderr
    assert "turn 1" not in ended.stderr


def test_an_interrupted_command_is_rolled_back(tree: Path, podman: Any) -> None:
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
    ended = ringfence_text("demo", "--workspace", "podman", env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "yes  the agent ran the tests itself: exit code 1, exit code 0" in ended.stderr
    assert "NO " not in ended.stderr
    assert ended.stdout.startswith("diff --git a/HISTORY b/HISTORY\n")
    assert [name for name in os.listdir(temporary) if name.startswith("ringfence-demo")] == []


def test_a_demonstration_that_is_kept_can_be_undone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    ended = ringfence_text("demo", "--workspace", "podman", "--keep", kept)
    assert ended.returncode == 0, ended.stderr
    assert "timedelta(days=1)" in (kept / "timesheet" / "entries.py").read_text()
    assert ringfence_text("undo", kept, "2").returncode == 0
    assert "unreleased" not in (kept / "HISTORY").read_text()


@contextmanager
def served(tree: Path) -> Generator[Callable[..., Any]]:
    """A server whose tools a client may call; what it is told is answered, but for a notification or `wait=False`."""
    command = [sys.executable, "-m", "ringfence_cli", "serve", str(tree), "--workspace", "podman"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def tell(method: str, *, id: int | None = None, wait: bool = True, **params: Any) -> Any:
            message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if id is None else {"id": id})}
            stdin.write(json.dumps(message) + "\n")
            if id is not None and wait:
                answer = json.loads(stdout.readline())
                assert answer["id"] == id
                return answer["result"]
            return server

        client = {"name": "raw", "version": "1"}
        tell("initialize", id=0, protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
        tell("notifications/initialized")
        yield tell
        stdin.close()
        server.wait(SECONDS)


def test_a_client_of_the_mcp_server_runs_commands_in_the_container(tree: Path) -> None:
    with served(tree) as tell:

        def use(number: int, name: str, **arguments: object) -> tuple[bool, str]:
            answer = tell("tools/call", id=number, name=name, arguments=arguments)
            return answer.get("isError", False), answer["content"][0]["text"]

        failed, said = use(1, "shell_execute", command="echo two > a.txt && id -u")
        assert (failed, "1000" in said) == (False, True)
        assert use(2, "shell_execute", command="rm a.txt; sleep 60", timeout_seconds=1)[0]
        failed, said = use(3, "read_file", file_path="/workspace/a.txt")
        assert (failed, "two" in said) == (False, True)
        server = tell("notifications/none")
    assert server.returncode == 0
    assert (tree / "a.txt").read_text() == "two\n"
    with Workspace.open(tree, read_only=True) as workspace:
        assert [step.tool for step in workspace.steps()] == ["shell_execute"]


@pytest.mark.parametrize("how", ["SIGTERM", "the end of its input", "a cancellation"])
def test_a_command_ends_with_the_call_that_nobody_waits_for(tree: Path, how: str) -> None:
    before = {path.name: path.read_text() for path in tree.iterdir()}
    running = {"command": "rm a.txt; touch begun; sleep 110", "timeout_seconds": 120}
    with served(tree) as tell:
        server = tell("tools/call", id=1, wait=False, name="shell_execute", arguments=running)
        while not (tree / "begun").exists():
            time.sleep(0.01)
        if how == "SIGTERM":
            server.send_signal(signal.SIGTERM)
        elif how == "a cancellation":
            tell("notifications/cancelled", requestId=1)
            assert not tell("tools/call", id=2, name="ls", arguments={}).get("isError", False)
    assert server.returncode == (130 if how == "SIGTERM" else 0)
    assert {path.name: path.read_text() for path in tree.iterdir()} == before


def test_candidates_are_scored_in_their_containers_and_the_best_is_promoted(tree: Path) -> None:
    for number, words in enumerate(("one", "one two"), 1):
        turns = (call("shell_execute", command=f"echo {words} > b.txt; pwd > place.txt"), DONE)
        (tree.parent / f"{number}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    model = f"script:{tree.parent}/{{candidate}}.jsonl"
    words = ("run", tree, "--workspace", "podman", "--task", "Do it.", "--model", model)
    score = "touch scored; test $PWD = /workspace && wc -w < b.txt"
    options = ("--candidates", "2", "--jobs", "1", "--score", score, "--promote", "best", "--json")
    ended = ringfence_text(*words, *options)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [(one["name"], one["score"]["number"]) for one in found["candidates"]] == [
        ("candidate-2", 2.0),
        ("candidate-1", 1.0),
    ]
    assert {path.name: path.read_text() for path in tree.iterdir()} == {
        "a.txt": "one\n",
        "b.txt": "one two\n",
        "place.txt": "/workspace\n",
    }
