"""What a promotion cannot take over is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from real_git import git, needs_git, repository

from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace

HIDDEN = "hidden files are never promoted"
TOO_LARGE = (256 << 20) + 1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("a\n")
    return root


def make_large(path: Path, first: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(first)
        file.truncate(TOO_LARGE)


def test_only_the_uncovered_files_that_the_fork_has_changed_are_named(root: Path) -> None:
    for name in (".env", "gone.env", "touched.env", "here.env", "secrets.env"):
        (root / name).write_text("KEY=1\n")
    make_large(root / "large")
    with Workspace.open(root, hide=HiddenFiles(["*.env"])) as workspace, workspace.fork("a") as fork:
        place = Path(fork.root)
        (root / "here.env").write_text("KEY=of here\n")
        assert workspace.promote(fork).left_out == {}
        assert fork.unpromoted() == []
        (place / ".env").write_text("KEY=2\n")
        (place / "gone.env").unlink()
        (place / "touched.env").touch()
        (place / "new.env").write_text("KEY=3\n")
        make_large(place / "new-large")
        done = workspace.promote(fork, dry_run=True)
        assert done.left_out == {
            ".env": HIDDEN,
            "gone.env": "the fork has deleted it, and no history has it",
            "new-large": "it is too large for a history: copy it yourself",
            "new.env": HIDDEN,
        }
        assert workspace.promote(fork).left_out == done.left_out
        shutil.copy(root / ".env", place / ".env")
        assert fork.unpromoted() == ["gone.env", "new-large", "new.env"]


@needs_git
def test_new_worktrees_and_commits_of_submodules_are_named(root: Path, tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    (module / "m.txt").write_text("m\n")
    repository(module)
    repository(root)
    git(root, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(module), "sub")
    git(root, "commit", "--quiet", "--message", "with a submodule")
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        place = Path(fork.root)
        assert workspace.promote(fork).left_out == {}
        git(place, "worktree", "add", "--quiet", "-b", "other", "tree")
        (place / "sub/m.txt").write_text("changed\n")
        git(place / "sub", "commit", "--quiet", "--all", "--message", "in the submodule")
        done = workspace.promote(fork)
        assert done.outcomes["sub/m.txt"] == "applied"
        assert done.left_out == {
            ".git/modules/sub": "commits of a submodule stay in the fork: push them, or fetch them from there",
            "tree": "a linked worktree of git stays in the fork: push its branch, or fetch it from there",
        }


def test_what_is_in_the_place_of_a_hidden_file_is_kept_with_that_reason(root: Path) -> None:
    (root / ".env").write_text("KEY=1\n")
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        with workspace.fork("a") as fork:
            place = Path(fork.root)
        (place / ".env").unlink()
        (place / ".env").mkdir()
        (place / ".env/inner").write_text("x\n")
        done = workspace.promote("a")
        assert done.reasons == {".env": HIDDEN, ".env/inner": ".env is a hidden file here, which stays"}
        assert (root / ".env").read_text() == "KEY=1\n"


@needs_git
def test_commits_of_a_fork_without_a_branch_are_named_with_that_reason(root: Path) -> None:
    repository(root)
    git(root, "checkout", "--quiet", "--detach")
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        (Path(fork.root) / "a.txt").write_text("changed\n")
        git(Path(fork.root), "commit", "--quiet", "--all", "--message", "of the fork")
        done = workspace.promote(fork, with_git=True)
        ref = "refs/ringfence/candidates/a"
        assert done.notes == [f"no branch is checked out in the fork: its commits are named by {ref}"]
