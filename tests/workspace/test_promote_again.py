"""A fork that is promoted, worked on, and promoted again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_git import fsck, git, needs_git, repository

from ringfence_sandbox import Workspace

LINES = [f"{number}\n" for number in range(40)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("".join(LINES))
    (root / "b.txt").write_text("b\n")
    return root


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root) as opened:
        yield opened


@pytest.fixture
def fork(workspace: Workspace) -> Iterator[Workspace]:
    with workspace.fork("a") as opened:
        yield opened


def line(number: int, text: str, lines: str = "".join(LINES)) -> str:
    found = lines.splitlines(keepends=True)
    return "".join([*found[:number], text, *found[number + 1 :]])


def test_what_the_fork_changes_after_a_promotion_is_promoted_next(
    root: Path, workspace: Workspace, fork: Workspace
) -> None:
    place = Path(fork.root)
    for text in ("one\n", "two\n", "three\n"):
        (place / "a.txt").write_text(text)
        (place / "new.txt").write_text(text)
        assert workspace.promote(fork).outcomes == {"a.txt": "applied", "new.txt": "applied"}
        assert (root / "new.txt").read_text() == text
    assert workspace.promote(fork).outcomes == {}


def test_what_the_fork_takes_back_after_a_promotion_is_taken_back_here(
    root: Path, workspace: Workspace, fork: Workspace
) -> None:
    place = Path(fork.root)
    (place / "b.txt").write_text("other\n")
    (place / "new.txt").write_text("new\n")
    (place / "a.txt").unlink()
    workspace.promote(fork)
    fork.restore(0)
    assert workspace.promote(fork).outcomes == dict.fromkeys(["a.txt", "b.txt", "new.txt"], "applied")
    assert (root / "a.txt").read_text() == "".join(LINES)
    assert (root / "b.txt").read_text() == "b\n"
    assert not (root / "new.txt").exists()


def test_a_promotion_that_was_merged_is_what_the_next_one_is_merged_with(
    root: Path, workspace: Workspace, fork: Workspace
) -> None:
    place = Path(fork.root)
    (place / "a.txt").write_text(line(3, "fork\n"))
    (root / "a.txt").write_text(line(30, "here\n"))
    assert workspace.promote(fork).outcomes == {"a.txt": "merged"}
    (place / "a.txt").write_text(line(3, "fork, again\n"))
    assert workspace.promote(fork).outcomes == {"a.txt": "merged"}
    assert (root / "a.txt").read_text() == line(3, "fork, again\n", line(30, "here\n"))


def test_a_change_here_of_what_was_promoted_is_a_conflict_with_the_next_one(
    root: Path, workspace: Workspace, fork: Workspace
) -> None:
    Path(fork.root, "b.txt").write_text("one\n")
    workspace.promote(fork)
    (root / "b.txt").write_text("of a person\n")
    assert workspace.promote(fork).outcomes == {}
    Path(fork.root, "b.txt").write_text("two\n")
    done = workspace.promote(fork)
    assert (done.conflicts, done.reasons["b.txt"]) == (["b.txt"], "changed since by somebody else")


@pytest.mark.parametrize("how", ["undo", "restore"])
def test_what_was_taken_back_here_is_promoted_anew(root: Path, workspace: Workspace, fork: Workspace, how: str) -> None:
    place = Path(fork.root)
    (place / "a.txt").write_text(line(3, "fork\n"))
    (place / "b.txt").write_text("one\n")
    workspace.promote(fork)
    (root / "a.txt").write_text(line(30, "here\n", line(3, "fork\n")))
    workspace.undo() if how == "undo" else workspace.restore(0)
    (place / "b.txt").write_text("two\n")
    done = workspace.promote(fork)
    assert done.outcomes == {"a.txt": "merged" if how == "undo" else "applied", "b.txt": "applied"}
    here = line(30, "here\n") if how == "undo" else "".join(LINES)
    assert (root / "a.txt").read_text() == line(3, "fork\n", here)


def test_only_the_promotion_and_the_paths_that_were_undone_are_promoted_anew(
    root: Path, workspace: Workspace, fork: Workspace
) -> None:
    place = Path(fork.root)
    (place / "a.txt").write_text("one\n")
    (place / "b.txt").write_text("one\n")
    workspace.promote(fork)
    (place / "a.txt").write_text("two\n")
    workspace.promote(fork)
    workspace.undo()
    assert workspace.promote(fork, dry_run=True).outcomes == {"a.txt": "applied"}
    workspace.undo(step=1, paths=["b.txt"])
    assert workspace.promote(fork, dry_run=True).outcomes == {"a.txt": "applied", "b.txt": "applied"}
    workspace.undo()  # the undo of b.txt
    workspace.undo(step=3)  # the undo of the second promotion
    assert workspace.promote(fork).outcomes == {}
    assert (root / "a.txt").read_text() == "two\n"


def test_what_was_in_conflict_is_still_in_conflict_at_the_next_promotion(
    root: Path, workspace: Workspace, fork: Workspace
) -> None:
    place = Path(fork.root)
    for path in ("a.txt", "b.txt"):
        (place / path).write_text("fork\n")
    (root / "b.txt").write_text("here\n")
    assert workspace.promote(fork, "keep").outcomes == {"a.txt": "applied", "b.txt": "conflict"}
    assert workspace.promote(fork).outcomes == {"b.txt": "conflict"}


def test_a_call_that_is_rolled_back_has_promoted_nothing(root: Path, workspace: Workspace, fork: Workspace) -> None:
    Path(fork.root, "b.txt").write_text("one\n")
    with workspace.transaction("outer", opaque=False) as outer:
        workspace.promote(fork)
        outer.rollback()
    assert (root / "b.txt").read_text() == "b\n"
    assert workspace.promote(fork).outcomes == {"b.txt": "applied"}


@needs_git
def test_the_branch_that_a_promotion_has_moved_moves_on_with_the_next_one(root: Path) -> None:
    repository(root)
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        for text in ("one\n", "two\n"):
            Path(fork.root, "b.txt").write_text(text)
            git(Path(fork.root), "commit", "--quiet", "--all", "--message", text)
            done = workspace.promote(fork, with_git=True)
            assert (done.notes, done.outcomes["b.txt"]) == ([], "applied")
            assert git(root, "log", "-1", "--format=%s") == text
        fsck(root)
