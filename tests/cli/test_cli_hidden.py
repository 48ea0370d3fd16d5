"""`--hide` and `--no-hide` of `ringfence run` and `ringfence serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_runs import hidden_as_before
from command_line import ringfence
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters
from served import open_served
from store_bytes import store_bytes

from ringfence.filesystem import HiddenFiles
from ringfence.testing import held_call
from ringfence_sandbox import Workspace, describe_lost_rule, remembered_hidden, store_directory

SECRET = b"a-secret-value-of-the-host"
NOTE = b"a-private-note-of-the-host"
READS: Mapping[str, Any] = {
    "tool_calls": [
        {"name": "ls", "arguments": {}},
        {"name": "read_file", "arguments": {"file_path": ".env"}},
        {"name": "read_file", "arguments": {"file_path": "private/note.txt"}},
        {"name": "write_file", "arguments": {"file_path": ".env", "content": "x"}},
        {"name": "grep", "arguments": {"pattern": "value|note"}},
        {"name": "glob", "arguments": {"pattern": "**"}},
        {"name": "move", "arguments": {"source": ".env", "target": "shown.txt"}},
        {"name": "write_file", "arguments": {"file_path": "made.txt", "content": "made"}},
    ]
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "private").mkdir(parents=True)
    (tree / ".env").write_bytes(b"TOKEN=" + SECRET + b"\n")
    (tree / "private/note.txt").write_bytes(NOTE)
    (tree / "a.txt").write_text("one\n")
    return tree


def run(tree: Path, *options: str, turns: tuple[Mapping[str, Any], ...] = (READS, {"text": "Done."})) -> Any:
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    files = [f"--{name}={tree.parent / name}" for name in ("receipts", "report", "patch")]
    return ringfence("run", tree, "--task", "Do it.", "--model", f"script:{script}", *files, *options)


def written(tree: Path) -> bytes:
    """All that a run left: its outputs, and the store with every object of it."""
    outputs = [*tree.parent.glob("re*"), tree.parent / "patch"]
    return store_bytes(store_directory(tree)) + b"".join(path.read_bytes() for path in outputs)


@pytest.mark.parametrize("workspace", ["disk", "memory"])
def test_a_run_says_what_it_hides_and_nothing_of_it_is_in_what_it_writes(tree: Path, workspace: str) -> None:
    done = run(tree, "--workspace", workspace, "--hide", "/private", *(["--apply"] if workspace == "memory" else []))
    assert done.returncode == 0
    said = done.stderr.decode()
    assert "left out: .env (hidden" in said
    assert "left out: private" in said
    assert said.index("left out: .env") < said.index("turn 1")
    for secret in (SECRET, NOTE):
        assert secret not in done.stdout + done.stderr + written(tree)
    assert (tree / ".env").read_bytes() == b"TOKEN=" + SECRET + b"\n"
    assert (tree / "made.txt").read_text() == "made"
    answers = [json.loads(line) for line in (tree.parent / "receipts").read_text().splitlines()]
    assert [answer["outcome"] for answer in answers if answer["tool"] in ("ls", "grep", "glob")] == ["committed"] * 3
    assert "committed" not in {answer["outcome"] for answer in answers if answer["tool"] in ("read_file", "move")}


def test_the_next_commands_hide_the_same_files(tree: Path) -> None:
    assert run(tree, "--hide", "/private").returncode == 0
    (tree / "a.txt").write_text("by a person\n")
    for command in ("undo", "diff", "log", "restore"):
        done = ringfence(command, tree, *(["0"] if command == "restore" else []))
        assert SECRET not in done.stdout + done.stderr, command
    for secret in (SECRET, NOTE):
        assert secret not in written(tree)
    assert (tree / ".env").exists()


def test_what_was_hidden_stays_hidden_until_no_hide(tree: Path) -> None:
    (tree / "other.txt").write_bytes(NOTE)
    run(tree, "--hide", "/private")
    for options, hidden in (
        ((), ["/private"]),
        (("--workspace", "memory"), ["/private"]),
        (("--hide", "other.txt"), ["/private", "other.txt"]),
        (("--resume", "--task", "Do it."), ["/private", "other.txt"]),
        (("--quiet",), ["/private", "other.txt"]),
    ):
        (tree.parent / "receipts").unlink()  # of runs that could read what is hidden now
        done = run(tree, *options)
        said = done.stderr.decode()
        if "--quiet" not in options:
            assert ("hidden as before: /private" in said, "left out: private" in said) == (True, True)
        assert remembered_hidden(tree) == HiddenFiles(hidden)
        for secret in (SECRET, *[NOTE] * ("other.txt" in hidden)):
            assert secret not in done.stdout + done.stderr + (tree.parent / "receipts").read_bytes()
    assert SECRET not in written(tree)
    said = run(tree, "--no-hide", "--hide", "other.txt").stderr.decode()
    assert "no longer hidden: /private\n" in said
    assert "left out: .env" not in said
    (tree / ".env").write_bytes(SECRET)
    said = run(tree).stderr.decode()
    assert "left out: private" not in said
    assert "left out: other.txt" in said
    assert "left out: .env (hidden" in said


@pytest.mark.anyio
async def test_a_server_hides_what_a_run_hid(tree: Path) -> None:
    run(tree, "--hide", "/private")
    said: list[str] = []
    assert hidden_as_before(tree, HiddenFiles(["*.tfvars"]), said.append) == HiddenFiles(["/private", "*.tfvars"])
    assert said == ["hidden as before: /private (--no-hide forgets this)"]
    words = ["-m", "ringfence_cli", "serve", str(tree)]
    environment = {name: value for name, value in os.environ.items() if name.startswith(("RINGFENCE", "HOME", "TMP"))}
    async with Client(StdioServerParameters(command=sys.executable, args=words, env=environment)) as client:
        answer = await client.call_tool("read_file", {"file_path": "private/note.txt"})
    assert "there and hidden" in str(answer)


DAMAGE = {
    "missing": None,
    "empty": b"",
    "cut off": b'[["*.x"], tr',
    "bytes": b"\xff\xfe",
    "another value": b"null",
    "a text for patterns": b'["*.x", true]',
    "numbers for patterns": b"[[1, 2], true]",
    "a bad pattern": b'[["{a,b}"], true]',
    "a text for the switch": b'[["*.x"], "no"]',
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_usual_files_are_hidden_if_nobody_knows_what_was(tree: Path, name: str) -> None:
    store = store_directory(tree)
    with Workspace.open(tree, hide=HiddenFiles(["/private"])) as workspace, workspace.transaction("a test"):
        workspace.filesystem.write("a.txt", "two\n")
    rule, content = store / "hidden.json", DAMAGE[name]
    rule.unlink() if content is None else rule.write_bytes(content)
    assert str(rule) in str(describe_lost_rule(tree))
    with Workspace.open(tree, read_only=True) as view:
        assert view.filesystem.hides(".env")
    with Workspace.open(tree) as workspace:
        assert workspace.filesystem.hidden_paths == (".env",)
        workspace.undo()
    assert SECRET not in store_bytes(store)


def test_a_command_says_that_nobody_knows_what_was_hidden(tree: Path) -> None:
    run(tree, "--hide", "/private")
    (store_directory(tree) / "hidden.json").write_bytes(b"")
    for command in ("log", "undo"):
        said = " ".join(ringfence(command, tree).stderr.decode().split())
        assert "hidden.json is damaged: only the usual files with secrets are hidden." in said
    assert SECRET not in written(tree)
    said = run(tree).stderr.decode()
    assert "is damaged" in said
    assert "is damaged" not in run(tree).stderr.decode()


def test_a_program_that_hides_nothing_hides_nothing_later(tree: Path) -> None:
    for _ in range(2):
        with Workspace.open(tree) as workspace:
            assert workspace.filesystem.hidden is None
    assert describe_lost_rule(tree) is None
    assert remembered_hidden(tree) is None


def test_no_hide_shows_the_usual_files_and_a_later_run_hides_them_again(tree: Path) -> None:
    done = run(tree, "--no-hide", "--hide", "/private")
    assert "left out: .env" not in done.stderr.decode()
    assert "left out: private" in done.stderr.decode()
    assert SECRET in written(tree), "it was read"
    (tree / ".env").write_bytes(SECRET)
    later = run(tree)
    assert "left out: .env (hidden" in later.stderr.decode()
    assert SECRET not in later.stdout + later.stderr


def test_a_resumed_run_hides_what_the_run_hid(tree: Path) -> None:
    broken = run(tree, "--hide", "/private", "--max-turns", "1")
    assert broken.returncode == 5
    script = tree.parent / "script.jsonl"
    done = ringfence("run", tree, "--resume", "--model", f"script:{script}", "--max-turns", "3")
    assert "left out: private" in done.stderr.decode()
    assert SECRET not in done.stderr + written(tree)
    assert NOTE not in done.stderr + written(tree)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_bad_pattern_is_a_usage_error(tree: Path, command: str) -> None:
    done = ringfence(command, tree, "--hide", "{a,b}", *(["--model", "script:x", "--task", "x"] * (command == "run")))
    assert done.returncode == 2
    assert b"--hide" in done.stderr


def test_a_server_says_what_it_hides(tree: Path) -> None:
    for place in ("disk", "memory"):
        for read_only in (False, True):
            served = open_served(tree, place, hide=HiddenFiles(), read_only=read_only)
            served.close()
            assert any(note.startswith("left out: .env (hidden") for note in served.notes)


@pytest.mark.anyio
async def test_the_official_client_gets_nothing_of_a_hidden_file(tree: Path) -> None:
    words = ["-m", "ringfence_cli", "serve", str(tree), "--hide", "/private"]
    environment = {name: value for name, value in os.environ.items() if name.startswith(("RINGFENCE", "HOME", "TMP"))}
    async with Client(StdioServerParameters(command=sys.executable, args=words, env=environment)) as client:
        for call in READS["tool_calls"]:
            answer = str(await client.call_tool(call["name"], call["arguments"]))
            assert not [secret for secret in (SECRET, NOTE) if secret.decode() in answer]
            if call["name"] == "read_file":
                assert "there and hidden" in answer
        assert SECRET.decode() not in str(await client.call_tool("diff", {"since": 0}))
        with pytest.raises(MCPError, match="hidden"):
            await client.read_resource("workspace:///.env")
    assert (tree / ".env").read_bytes() == b"TOKEN=" + SECRET + b"\n"


def test_a_killed_call_that_moved_a_hidden_file_is_rolled_back(tree: Path) -> None:
    """The recovery knows what was hidden: it brings it back to its place, and takes nothing of it into the history."""
    store = tree.parent / "store"

    with Workspace.open(tree, store=store, hide=HiddenFiles(["/private"])):
        pass
    process = os.fork()
    if process == 0:
        with Workspace.open(tree, store=store) as workspace, held_call(workspace.filesystem, opaque=True):
            subprocess.run(["sh", "-c", "mkdir d; mv .env private d; echo x > made"], cwd=tree, check=True)
            os.kill(os.getpid(), 9)
    os.waitpid(process, 0)
    with Workspace.open(tree, store=store) as workspace:
        assert workspace.recovered is not None
        assert workspace.filesystem.hidden_paths == (".env", "private")
    assert (tree / "private/note.txt").read_bytes() == NOTE
    assert not (tree / "made").exists()
    for secret in (SECRET, NOTE):
        assert secret not in store_bytes(store)
