"""Promotion: the net changes of a fork as one step of the workspace that it was made from."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree
from real_git import fsck, git, needs_git, repository

from ringfence.errors import TransactionError, WorkspaceLockedError
from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace

LINES = [f"{number}\n" for number in range(40)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/e").mkdir(parents=True)
    (root / "a.txt").write_text("".join(LINES))
    (root / "d/b.txt").write_text("b\n")
    (root / "d/e/c.txt").write_text("c\n")
    (root / "link").symlink_to("a.txt")
    os.link(root / "d/b.txt", root / "d/same.txt")
    return root


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root) as opened:
        yield opened


@pytest.fixture
def fork(workspace: Workspace) -> Iterator[Workspace]:
    with workspace.fork("a") as opened:
        yield opened


def line(number: int, text: str) -> str:
    return "".join([*LINES[:number], text, *LINES[number + 1 :]])


def without_root(found: dict[str, object]) -> dict[str, object]:
    return {path: one for path, one in found.items() if path}


def looks(root: Path) -> dict[str, object]:
    return {path: (one.lasting, one.mtime_ns, one.links) for path, one in capture_tree(root).items()}


def change_everything(place: Path) -> None:
    (place / "a.txt").write_text("other\n")
    (place / "a.txt").chmod(0o600)
    with (place / "d/b.txt").open("a") as file:  # by both of its names
        file.write("more\n")
    os.utime(place / "d/b.txt", ns=(10**18, 10**18 + 3))
    shutil.rmtree(place / "d/e")
    (place / "d/e").write_text("a file now\n")
    (place / "link").unlink()
    (place / "link").mkdir()
    (place / "new/empty").mkdir(parents=True)
    (place / "new/empty").chmod(0o750)
    (place / "new/binary").write_bytes(bytes(range(256)) * 10)
    (place / "new/link").symlink_to("../a.txt")
    (place / "new/absolute").symlink_to(place / "a.txt")
    os.link(place / "new/binary", place / "new/again")
    os.utime(place / "new", ns=(10**18, 10**18 + 5))


def test_a_promotion_makes_the_source_just_like_the_fork(root: Path, workspace: Workspace, fork: Workspace) -> None:
    before = looks(root)
    change_everything(Path(fork.root))
    wanted = looks(Path(fork.root))
    planned = workspace.promote(fork, dry_run=True)
    assert (looks(root), planned.step) == (before, None)
    done = workspace.promote(fork)
    assert planned.outcomes == done.outcomes
    assert set(done.outcomes.values()) == {"applied"}
    assert done.step is not None
    assert [(step.number, step.tool) for step in workspace.steps()] == [(1, "promote")]
    there = looks(root)
    (link, *more), (_, *others) = there.pop("new/absolute"), wanted.pop("new/absolute")
    assert link[-1] == f"{root}/a.txt"
    assert more == others
    assert without_root(there) == without_root(wanted)
    assert there[""][0] == before[""][0]
    assert [entry.kind for entry in workspace.log()] == ["step", "baseline"]
    again = workspace.promote(fork)
    assert (again.outcomes, again.step) == ({}, None)
    workspace.undo()
    assert looks(root) == before


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda root: (root / "a.txt").write_text("here\n"), "a.txt"),
    "gone": (lambda root: (root / "a.txt").unlink(), "a.txt"),
    "mode": (lambda root: (root / "a.txt").chmod(0o755), "a.txt"),
    "kind": (lambda root: ((root / "link").unlink(), (root / "link").write_text("x")), "link"),
    "new": (lambda root: ((root / "new").mkdir(), (root / "new/binary").write_text("x")), "new/binary"),
    "in a directory that goes": (lambda root: (root / "d/e/mine.txt").write_text("x"), "d/e"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_conflict_changes_nothing_or_stays_alone(
    root: Path, workspace: Workspace, fork: Workspace, name: str
) -> None:
    change, path = CHANGES[name]
    change_everything(Path(fork.root))
    change(root)
    before = looks(root)
    done = workspace.promote(fork)
    assert path in done.conflicts
    assert done.reasons[path]
    assert (looks(root), done.step, workspace.steps()) == (before, None, [])
    done = workspace.promote(fork, "keep")
    assert path in done.conflicts
    assert looks(root).get(path, (None,))[0] == before.get(path, (None,))[0]
    assert (root / "new/empty").is_dir()
    workspace.undo()
    assert looks(root) == before


def test_what_both_changed_in_other_lines_is_merged(root: Path, workspace: Workspace, fork: Workspace) -> None:
    Path(fork.root, "a.txt").write_text(line(3, "of the fork\n"))
    with workspace.transaction("write", opaque=False):
        workspace.filesystem.write("a.txt", line(30, "of here\n"))
    done = workspace.promote(fork)
    assert done.outcomes["a.txt"] == "merged"
    assert (root / "a.txt").read_text() == line(3, "of the fork\n").replace("30\n", "of here\n")
    workspace.undo()
    assert (root / "a.txt").read_text() == line(30, "of here\n")
    with workspace.transaction("write", opaque=False):
        workspace.filesystem.write("a.txt", line(3, "of here\n"))
    done = workspace.promote(fork)
    assert (done.conflicts, done.reasons["a.txt"]) == (["a.txt"], "changed since by step 4 (write)")


def test_hidden_files_and_what_git_ignores_on_both_sides_stay(root: Path) -> None:
    (root / ".env").write_text("KEY=secret\n")
    with Workspace.open(root, hide=HiddenFiles()) as workspace, workspace.fork("a") as fork:
        place = Path(fork.root)
        (place / ".env").write_text("KEY=stolen\n")
        (place / "d/.env").write_text("KEY=new\n")
        (place / "a.txt").write_text("a\n")
        done = workspace.promote(fork)
        assert done.outcomes == {"a.txt": "applied"}
        assert done.left_out == dict.fromkeys([".env", "d/.env"], "hidden files are never promoted")
        assert (root / ".env").read_text() == "KEY=secret\n"
        assert not (root / "d/.env").exists()


@needs_git
def test_what_git_ignores_is_no_conflict(root: Path) -> None:
    (root / ".gitignore").write_text("cache\n")
    repository(root)
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        for place, text in ((root, "here"), (Path(fork.root), "there")):
            (place / "cache").mkdir()
            (place / "cache/x").write_text(text)
        Path(fork.root, "a.txt").write_text("a\n")
        done = workspace.promote(fork)
        assert (done.outcomes["cache/x"], done.outcomes["a.txt"]) == ("kept", "applied")
        assert (root / "cache/x").read_text() == "here"


def commit(place: Path, message: str) -> str:
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", message)
    return git(place, "rev-parse", "HEAD").strip()


@needs_git
def test_commits_come_along_from_a_fork_of_a_shallow_clone(tmp_path: Path) -> None:
    origin, root = tmp_path / "origin", tmp_path / "root"
    origin.mkdir()
    repository(origin)
    (origin / "more.txt").write_text("more\n")
    commit(origin, "a second one")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{origin}", str(root))
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        (Path(fork.root) / "new.txt").write_text("new\n")
        new = commit(Path(fork.root), "of the fork")
        done = workspace.promote(fork)
        assert git(root, "rev-parse", done.git_ref).strip() == new
        fsck(root)


@needs_git
@pytest.mark.parametrize("with_git", [False, True])
def test_commits_come_along_and_the_branch_moves_only_if_asked(root: Path, with_git: bool) -> None:
    repository(root)
    old, branch = git(root, "rev-parse", "HEAD").strip(), git(root, "symbolic-ref", "HEAD").strip()
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        place = Path(fork.root)
        (place / "new.txt").write_text("new\n")
        git(place, "config", "core.fsmonitor", "evil")
        (place / ".git/hooks").mkdir(exist_ok=True)
        (place / ".git/hooks/pre-commit").write_text("evil")
        new = commit(place, "of the fork")
        index = (root / ".git/index").read_bytes()
        done = workspace.promote(fork, with_git=with_git)
        assert done.git_ref == (branch if with_git else "refs/ringfence/candidates/a")
        assert done.outcomes == {".git": "kept", "new.txt": "applied"}
        assert git(root, "rev-parse", done.git_ref).strip() == new
        assert git(root, "rev-parse", "HEAD").strip() == (new if with_git else old)
        assert git(root, "log", "--format=%s", done.git_ref) == "of the fork\nas it was\n"
        fsck(root)
        assert (root / ".git/index").read_bytes() == index
        assert not (root / ".git/hooks/pre-commit").exists()
        assert "fsmonitor" not in (root / ".git/config").read_text()
        workspace.undo()
        assert git(root, "rev-parse", "HEAD").strip() == old
        assert not (root / "new.txt").exists()
        fsck(root)


@needs_git
@pytest.mark.parametrize("head", ["refs/heads/../../config", "refs/heads/x.lock", "refs/other", "../out"])
def test_no_name_of_a_branch_leads_to_other_files_of_git(root: Path, head: str) -> None:
    repository(root)
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        place = Path(fork.root)
        new = commit(place, "of the fork") if (place / "new.txt").write_text("new\n") else ""
        (place / ".git" / head).parent.mkdir(parents=True, exist_ok=True)
        (place / ".git" / head).write_text(f"{new}\n")
        (place / ".git/HEAD").write_text(f"ref: {head}\n")
        before = {path: path.read_bytes() for path in (root / ".git").rglob("*") if path.is_file()}
        done = workspace.promote(fork, with_git=True)
        assert done.outcomes["new.txt"] == "applied"
        after = {path: path.read_bytes() for path in (root / ".git").rglob("*") if path.is_file()}
        assert {path: after[path] for path in before} == before
        assert {path.suffix for path in after.keys() - before.keys()} <= {"", ".pack", ".idx"}
        assert not any(path.is_relative_to(root / ".git/refs/heads") for path in after.keys() - before.keys())


@needs_git
def test_a_branch_that_has_moved_here_stays(root: Path) -> None:
    repository(root)
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        Path(fork.root, "new.txt").write_text("new\n")
        commit(Path(fork.root), "of the fork")
        (root / "mine.txt").write_text("mine\n")
        mine = commit(root, "of here")
        done = workspace.promote(fork, with_git=True)
        assert done.git_ref == "refs/ringfence/candidates/a"
        assert done.notes == ["the branch of the fork has moved here as well: its commits are named by " + done.git_ref]
        assert git(root, "rev-parse", "HEAD").strip() == mine


def test_a_fork_is_promoted_by_its_name_and_through_the_one_between(root: Path, workspace: Workspace) -> None:
    with workspace.fork("a") as first:
        with first.fork("b") as second:
            Path(second.root, "d/b.txt").write_text("of the second\n")
            with pytest.raises(ValueError, match="is no fork of"):
                workspace.promote(second)
            assert first.promote(second).conflicts == []
        with pytest.raises(WorkspaceLockedError):
            asyncio.run(workspace.apromote("a"))
    assert workspace.promote("a").outcomes["d/b.txt"] == "applied"
    assert (root / "d/b.txt").read_text() == "of the second\n"
    with pytest.raises(ValueError, match="on_conflict"):
        workspace.promote("a", "theirs")  # pyright: ignore[reportArgumentType]
    with pytest.raises(LookupError, match="no fork 'c'"):
        workspace.promote("c")


def test_a_call_that_has_changed_files_promotes_nothing(workspace: Workspace, fork: Workspace) -> None:
    Path(fork.root, "a.txt").write_text("x\n")
    with (
        pytest.raises(TransactionError, match="promote is for a tool call of its own"),
        workspace.transaction("tool", opaque=False),
    ):
        workspace.filesystem.write("a.txt", "y\n")
        workspace.promote(fork)
    with workspace.transaction("tool", opaque=False) as call:
        assert workspace.promote(fork).outcomes == {"a.txt": "applied"}
    assert call.step is not None
    assert (call.step.tool, call.step.paths) == ("tool", ("a.txt",))


def test_what_was_promoted_is_kept_when_the_fork_is_discarded(root: Path, workspace: Workspace) -> None:
    with workspace.fork("a") as fork:
        Path(fork.root, "new.txt").write_text("new\n" * 100)
        workspace.promote(fork)
        fork.discard()
    workspace.undo()
    workspace.gc(5)
    workspace.undo()
    assert (root / "new.txt").read_text() == "new\n" * 100
