"""Undo and restore leave a repository of git whole: what is below one `.git` goes back together, or stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.testing import held_call
from ringfence_sandbox import Reversal, Workspace

QUIET = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
IDENTITY = "-c user.name=A -c user.email=a@example.org"
COMMIT = f"printf 'two\\n' > a.txt; git {IDENTITY} commit -qam x"
REFRESH = "touch -d 2001-01-01 a.txt b.txt; git status"


def shell(command: str, cwd: Path) -> str:
    return subprocess.run(command, shell=True, cwd=cwd, env=QUIET, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    for name in ("a.txt", "b.txt"):
        (root / name).write_text("one\n")
    shell(f"git init -q; git add .; git {IDENTITY} commit -qm All", root)
    return root


def opened(project: Path) -> Workspace:
    return Workspace.open(project, store=project.parent / "store")


def step(workspace: Workspace, command: str) -> None:
    with held_call(workspace.filesystem, opaque=True) as call:
        shell(command, Path(workspace.root))
        call.commit()


def fsck(project: Path) -> str:
    return shell("git fsck --no-dangling 2>&1", project)


Undo = Callable[[Workspace], Reversal]


def undo_newest(workspace: Workspace) -> Reversal:
    return workspace.undo()


def undo_by_number(workspace: Workspace) -> Reversal:
    return workspace.undo(step=1)


def restore_baseline(workspace: Workspace) -> Reversal:
    return workspace.restore(0)


WAYS = (undo_newest, undo_by_number, restore_baseline)


@pytest.mark.parametrize("undo", WAYS)
@pytest.mark.parametrize("between", ["true", REFRESH])
def test_a_commit_of_a_command_is_undone_also_after_git_status(project: Path, undo: Undo, between: str) -> None:
    head = shell("git rev-parse HEAD", project)
    with opened(project) as workspace:
        step(workspace, COMMIT)
        shell(between, project)
        assert "conflict" not in undo(workspace).outcomes.values()
    assert fsck(project) == ""
    assert shell("git rev-parse HEAD; git status --porcelain", project) == head
    assert (project / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize("undo", WAYS)
@pytest.mark.parametrize(
    "between",
    [
        f"printf 'three\\n' > b.txt; git {IDENTITY} commit -qam mine",
        "git branch mine",
        "git add c.txt",
        f"git {IDENTITY} tag -am 1 v1; git checkout -q HEAD~1",
    ],
)
def test_git_data_stays_whole_where_somebody_has_used_git_since(project: Path, undo: Undo, between: str) -> None:
    (project / "c.txt").write_text("c\n")
    with opened(project) as workspace:
        step(workspace, COMMIT)
        shell(between, project)
        refs = shell("git rev-parse HEAD; git for-each-ref; git ls-files -s", project)
        done = undo(workspace)
        git = {path: outcome for path, outcome in done.outcomes.items() if path.startswith(".git/")}
        assert "conflict" in git.values()
        assert not {"restored", "removed"} & {*git.values()}
        told = {reason for path, reason in done.reasons.items() if git.get(path) == "conflict"}
        assert any("use git" in reason for reason in told)
    assert fsck(project) == ""
    assert shell("git rev-parse HEAD; git for-each-ref; git ls-files -s", project) == refs


def test_two_commits_of_commands_are_undone_with_git_status_between(project: Path) -> None:
    head = shell("git rev-parse HEAD", project)
    with opened(project) as workspace:
        step(workspace, COMMIT)
        shell(REFRESH, project)
        step(workspace, COMMIT.replace("two", "three"))
        assert "conflict" not in workspace.undo(2).outcomes.values()
    assert fsck(project) == ""
    assert shell("git rev-parse HEAD; git status --porcelain", project) == head


def test_an_undo_is_undone(project: Path) -> None:
    with opened(project) as workspace:
        step(workspace, COMMIT)
        head = shell("git rev-parse HEAD", project)
        workspace.undo()
        assert "conflict" not in workspace.undo().outcomes.values()
    assert fsck(project) == ""
    assert shell("git rev-parse HEAD; git status --porcelain", project) == head


def test_a_command_that_only_looks_makes_no_step(project: Path) -> None:
    with opened(project) as workspace:
        step(workspace, "printf 'two\\n' > a.txt")
        before = (project / ".git/index").read_bytes()
        step(workspace, REFRESH)
        assert (project / ".git/index").read_bytes() != before
        assert [one.number for one in workspace.steps()] == [1]
        assert workspace.undo().outcomes == {"a.txt": "restored"}
    assert (project / "a.txt").read_text() == "one\n"
