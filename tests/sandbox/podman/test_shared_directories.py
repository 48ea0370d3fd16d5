"""The directories that a fork shares: its containers show those of the source, which no command changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from command_line import ringfence_text

from ringfence.errors import SandboxUnavailableError
from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import PodmanSandbox, Workspace

MakeSandbox = Callable[..., PodmanSandbox]
pytestmark = pytest.mark.usefixtures("podman", "limits_hold")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "web/node_modules/x").mkdir(parents=True)
    (tree / "web/node_modules/x/index.js").write_text("x\n")
    (tree / "web/node_modules/x/.env").write_text("KEY=a-secret-value\n")
    (tree / "a.txt").write_text("a\n")
    return tree


@pytest.fixture
def fork(tree: Path) -> Iterator[Workspace]:
    with (
        Workspace.open(tree, hide=HiddenFiles()) as workspace,
        workspace.fork("a", share=["web/node_modules"]) as fork,
    ):
        yield fork


def test_commands_read_what_the_source_has_and_cannot_change_it(
    tree: Path, fork: Workspace, make_sandbox: MakeSandbox
) -> None:
    sandbox = make_sandbox(Path(fork.root), filesystem=fork.filesystem)
    read = sandbox.run("cat web/node_modules/x/index.js; cat web/node_modules/x/.env; echo b > a.txt")
    assert (read.stdout, read.exit_code) == ("x\n", 0)
    denied = sandbox.run("echo y > web/node_modules/x/index.js || rm -r web/node_modules")
    assert denied.exit_code != 0
    assert "Read-only file system" in denied.stderr
    (tree / "web/node_modules/x/index.js").write_text("newer\n")
    assert sandbox.run(["cat", "web/node_modules/x/index.js"]).stdout == "newer\n"
    assert [change.path for change in fork.changes_since_fork()] == ["a.txt"]
    assert list((Path(fork.root) / "web/node_modules").iterdir()) == []
    assert (tree / "a.txt").read_text() == "a\n"


def test_the_next_command_has_the_directory_that_the_source_has_then(
    tree: Path, fork: Workspace, make_sandbox: MakeSandbox, tmp_path: Path
) -> None:
    sandbox = make_sandbox(Path(fork.root), filesystem=fork.filesystem)
    assert sandbox.run(["ls", "web/node_modules"]).stdout == "x\n"
    (tree / "web/node_modules").rename(tmp_path / "away")
    (tree / "web/node_modules/y").mkdir(parents=True)
    assert sandbox.run(["ls", "web/node_modules"]).stdout == "y\n"
    shutil.rmtree(tree / "web/node_modules")
    with pytest.raises(SandboxUnavailableError, match="shares web/node_modules with .* no directory now"):
        sandbox.run(["ls", "web/node_modules"])
    (tree / "web/node_modules").symlink_to(tmp_path / "away")
    with pytest.raises(SandboxUnavailableError, match="no directory now"):
        sandbox.run(["ls", "web/node_modules"])


def test_candidates_share_a_directory_and_their_forks_remember_it(tree: Path) -> None:
    turns = ({"tool_calls": [{"name": "shell_execute", "arguments": {"command": "cp web/node_modules/x/index.js b"}}]},)
    (tree.parent / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in (*turns, {"text": "Done."})))
    task = ("--workspace", "podman", "--task", "Do it.", "--model", f"script:{tree.parent}/script.jsonl", "--json")
    options = ("--candidates", "2", "--jobs", "1", "--share", "web/node_modules")
    score = ("--score", "cmp b web/node_modules/x/index.js", "--promote", "best")
    ended = ringfence_text("run", tree, *task, *options, *score)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [one["passed"] for one in found["candidates"]] == [True, True]
    assert [one["path"] for one in found["promotion"]["paths"]] == ["b"]
    assert (tree / "b").read_text() == "x\n"
    fork = found["candidates"][0]["fork"]
    assert fork["shared"] == {"web/node_modules": str(tree)}
    with closing(Workspace.open(fork["root"])) as workspace:
        assert [change.path for change in workspace.changes_since_fork()] == ["b"]
    (Path(fork["root"]) / "b").unlink()
    again = ringfence_text("run", fork["root"], *task)
    assert again.returncode == 0, again.stderr
    assert (Path(fork["root"]) / "b").read_text() == "x\n"
    refused = ringfence_text("run", fork["root"], *task[2:])
    assert refused.returncode == 2
    assert "this fork shares web/node_modules, which only a container of it shows" in refused.stdout + refused.stderr
