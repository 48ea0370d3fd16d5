"""``ringfence apply``, and ``ringfence undo`` of some paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import ringfence

from ringfence_sandbox import Workspace

PATCH = b"--- a/a\n+++ b/a\n@@ -1 +1,2 @@\n one\n+two\n--- /dev/null\n+++ b/n/new\n@@ -0,0 +1 @@\n+new\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree/d").mkdir(parents=True)
    (tmp_path / "tree/a").write_text("one\n")
    (tmp_path / "patch").write_bytes(PATCH)
    return tmp_path / "tree"


def test_a_patch_is_one_step(tree: Path) -> None:
    done = ringfence("apply", tree.parent / "patch", tree)
    assert done.returncode == 0, done.stderr
    assert (tree / "a").read_text() == "one\ntwo\n"
    assert (tree / "n/new").read_text() == "new\n"
    with Workspace.open(tree, read_only=True) as workspace:
        assert [(step.tool, step.paths) for step in workspace.steps()] == [("apply", ("a", "n", "n/new"))]
    assert ringfence("undo", tree).returncode == 0
    assert (tree / "a").read_text() == "one\n"


@pytest.mark.parametrize("options", [("--dry-run",), ("--policy", "deny:n")])
def test_a_patch_that_is_not_kept_changes_nothing(tree: Path, options: tuple[str, ...]) -> None:
    done = ringfence("apply", tree.parent / "patch", tree, *options, "--json")
    assert done.returncode == (0 if options == ("--dry-run",) else 1)
    assert (tree / "a").read_text() == "one\n"
    assert not (tree / "n").exists()
    if done.returncode == 0:
        assert [change["path"] for change in json.loads(done.stdout)["changes"]] == ["a", "n", "n/new"]


def test_a_patch_that_does_not_apply_changes_nothing(tree: Path) -> None:
    (tree / "a").write_text("other\n")
    assert ringfence("apply", tree.parent / "patch", tree).returncode != 0
    (tree.parent / "patch").write_text("no patch")
    assert ringfence("apply", tree.parent / "patch", tree).returncode != 0
    assert (tree / "a").read_text() == "other\n"
    assert not (tree / "n").exists()


def test_an_undo_of_some_paths_leaves_the_others(tree: Path) -> None:
    with Workspace.open(tree) as workspace, workspace.transaction("edit"):
        (tree / "a").write_text("changed\n")
        (tree / "d/x").write_text("x\n")
        (tree / "d/y").write_text("y\n")
    done = ringfence("undo", tree, "1", "--json", "--", "d/x")
    assert done.returncode == 0, done.stderr
    assert [path["path"] for path in json.loads(done.stdout)["paths"]] == ["d/x"]
    assert sorted(path.name for path in (tree / "d").iterdir()) == ["y"]
    assert ringfence("undo", "--step", "1", "--", "d", cwd=tree).returncode == 0
    assert list((tree / "d").iterdir()) == []
    assert (tree / "a").read_text() == "changed\n"
    nothing = ringfence("undo", tree, "--step", "1", "--", "nothing")
    assert (nothing.returncode, b"step 1 (edit) changed nothing at nothing" in nothing.stderr) == (1, True)
    assert ringfence("undo", tree, "--step", "1", "--", "../outside").returncode == 2


def test_in_a_subdirectory_a_patch_is_for_the_workspace_above(tree: Path) -> None:
    with Workspace.open(tree):
        pass
    assert ringfence("apply", tree.parent / "patch", tree / "d").returncode == 0
    assert (tree / "a").read_text() == "one\ntwo\n"
    with Workspace.open(tree, read_only=True) as workspace:
        assert [step.tool for step in workspace.steps()] == ["apply"]


def test_an_undo_of_a_path_that_the_newest_step_left_alone_names_the_step_that_changed_it(tree: Path) -> None:
    with Workspace.open(tree) as workspace:
        for name in ("x", "y"):
            with workspace.transaction(name):
                (tree / name).write_text(f"{name}\n")
    done = ringfence("undo", tree, "--json", "--", "x")
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"]) == (1, 1)
    assert "step 2 (y)" in told["error"]
    assert "--step 1" in told["error"]
    assert ringfence("undo", tree, "--step", "1", "--", "x").returncode == 0
    again = ringfence("undo", tree, "--", "x")  # the newest step is that undo
    assert again.returncode == 0
    assert b"step 3 is an undo" in again.stderr


def test_a_patch_does_not_go_in_twice(tree: Path) -> None:
    assert ringfence("apply", tree.parent / "patch", tree).returncode == 0
    (tree / "n/new").unlink()
    done = ringfence("apply", tree.parent / "patch", tree)
    assert (done.returncode, (tree / "a").read_text()) == (2, "one\ntwo\n")
    assert not (tree / "n/new").exists()
