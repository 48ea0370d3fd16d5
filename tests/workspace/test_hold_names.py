"""A name that looks like that of a hold is a path like any other, unless it is the own hold."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence import Filesystem, Session
from ringfence.adapters import ToolExecutor
from ringfence.prompt import PathPolicy, Prompt, PromptTemplate, Tool, ToolContext, ToolResult, ToolsSection
from ringfence.resources import Binding
from ringfence.runtime import Receipt
from ringfence.testing import held_call
from ringfence_sandbox import Workspace

NAME = ".ringfence-hold-0123456789abcdef"
MAKE = f"mkdir {NAME}; echo made > {NAME}/x"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return root


@pytest.fixture
def open_again(root: Path) -> Callable[[], Workspace]:
    return lambda: Workspace.open(root, store=root.parent / "store")


@pytest.fixture
def workspace(open_again: Callable[[], Workspace]) -> Iterator[Workspace]:
    with open_again() as workspace:
        yield workspace


def run(workspace: Workspace, script: str, *policies: PathPolicy, fails: bool = False) -> Receipt:
    """A call of an opaque tool that runs a script on the host."""

    def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
        subprocess.run(["sh", "-ec", script], cwd=workspace.root, check=True)
        return ToolResult.error("on purpose") if fails else ToolResult.ok(None)

    tool = Tool[None, None]("run", "Runs a script.", handler, opaque=True)
    section = ToolsSection(title="Shell", key="shell", tools=[tool])
    prompt = Prompt(PromptTemplate(ns="tests", key="holds", sections=[section], policies=policies))
    prompt.bind(resources={Filesystem: Binding.instance(Filesystem, workspace.filesystem)})
    with prompt.resources:
        return ToolExecutor(prompt=prompt, session=Session()).execute("run", {}).receipt


def own_hold(root: Path) -> Path:
    (hold,) = (path for path in root.iterdir() if path.name.startswith(".ringfence-hold-") and path.name != NAME)
    return hold


def test_what_a_command_makes_under_such_a_name_is_a_change(workspace: Workspace, root: Path) -> None:
    receipt = run(workspace, MAKE)
    assert [change.path for change in receipt.changes] == [NAME, f"{NAME}/x"]
    assert workspace.steps()[-1].paths == (NAME, f"{NAME}/x")
    assert b"+made" in workspace.diff(0)
    assert [entry.name for entry in workspace.filesystem.list()] == [NAME, "a.txt"]
    workspace.undo()
    assert not (root / NAME).exists()


def test_a_policy_denies_it_and_a_failed_call_rolls_it_back(workspace: Workspace, root: Path) -> None:
    assert run(workspace, MAKE, PathPolicy(deny=[".ringfence-*/"])).outcome == "denied"
    assert run(workspace, MAKE, fails=True).outcome == "failed"
    assert sorted(os.listdir(root)) == ["a.txt"]


def test_file_tools_take_it_for_a_path(workspace: Workspace, root: Path) -> None:
    files = workspace.filesystem
    with workspace.transaction("a test"):
        files.write(f"{NAME}/x", "one\n")
        files.write(f"{NAME}/x", "two\n")
        files.move("a.txt", f"{NAME}/a.txt")
    assert files.read(f"{NAME}/x").content == "two\n"
    assert {match.path for match in files.glob("**/x")} == {f"{NAME}/x"}
    with held_call(files) as call:
        files.for_call(call).delete(NAME, recursive=True)
        call.rollback()
    assert (root / NAME / "a.txt").read_text() == "one\n"
    workspace.undo()
    assert sorted(os.listdir(root)) == [own_hold(root).name, "a.txt"]


def test_the_own_hold_is_no_path_and_git_does_not_see_it(workspace: Workspace, root: Path) -> None:
    subprocess.run(["git", "init", "-q", root], check=True)
    files = workspace.filesystem
    with held_call(files, opaque=True) as call:
        files.for_call(call).write("a.txt", "two\n")
        hold = own_hold(root).name
        for path in (hold, f"{hold}/0"):
            with pytest.raises(PermissionError, match="displaced files"):
                files.for_call(call).write(path, "x")
        assert hold not in {entry.name for entry in files.list()}
        assert [change.path for change in call.changed()] == ["a.txt"]
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, check=True)
        assert status.stdout == b"?? a.txt\n"
        call.commit()


def test_what_a_command_puts_into_the_own_hold_does_not_outlast_its_call(workspace: Workspace, root: Path) -> None:
    with workspace.transaction("a test"):
        workspace.filesystem.write("a.txt", "two\n")
    hold = own_hold(root)
    run(workspace, f"echo made > {hold.name}/x")
    assert os.listdir(hold) == [".gitignore"]
    run(workspace, f"rm -r {hold.name}; mkdir {hold.name}; echo made > {hold.name}/x")
    with workspace.transaction("a test"):
        workspace.filesystem.write("a.txt", "three\n")
    assert not (hold / "x").exists()


def test_the_next_opening_leaves_it_and_says_nothing(
    workspace: Workspace, root: Path, open_again: Callable[[], Workspace]
) -> None:
    run(workspace, f"{MAKE}; mkdir {NAME[:-1]}0")
    workspace.close()
    with open_again() as again:
        assert again.recovered is None
        assert b"+made" in again.diff(0)
    assert sorted(os.listdir(root)) == [f"{NAME[:-1]}0", NAME, "a.txt"]


def test_a_recovery_removes_the_hold_that_the_log_names_and_rolls_back_another_one(
    root: Path, open_again: Callable[[], Workspace]
) -> None:
    open_again().close()
    process = os.fork()
    if process == 0:
        with open_again() as workspace, held_call(workspace.filesystem, opaque=True) as call:
            workspace.filesystem.for_call(call).write("a.txt", "two\n")
            subprocess.run(["sh", "-ec", MAKE], cwd=root, check=True)
            os.kill(os.getpid(), 9)
    os.waitpid(process, 0)
    assert len(os.listdir(root)) == 3
    with open_again() as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.notes[0].startswith(f"rolled back: {NAME}, {NAME}/x, a.txt;")
        assert sorted(os.listdir(root)) == ["a.txt"]
        assert workspace.filesystem.read("a.txt").content == "one\n"
