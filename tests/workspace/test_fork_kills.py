"""Killed inside of a fork, of a discard and of a promotion: the source is exact, and the fork whole or named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from captured_tree import capture_tree, lasting
from effort import amount
from failpoints import injected
from killing import killed_at
from real_git import fsck, git, needs_git, repository

from ringfence_sandbox import Workspace


def source(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/e").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "d/c.txt", "d/e/f.txt"):
        (root / name).write_text(f"{name}\n")
    os.link(root / "a.txt", root / "d/same.txt")
    (root / "link").symlink_to(root / "a.txt")
    Workspace.open(root).close()
    return root


def looks(root: Path) -> dict[str, object]:
    return {path: (one.lasting, one.mtime_ns, one.links, one.inode) for path, one in capture_tree(root).items()}


def at_each_point(work: Callable[[], object], check: Callable[[bool], None], *, stride: int) -> int:
    """Kill ``work`` at one point after the other, and check what is left each time; the number of points."""
    number = 0
    while True:

        def killed(before: Callable[[str], None]) -> None:
            with injected(before):
                work()

        was_killed = killed_at(number, killed)
        check(was_killed)
        if not was_killed:
            return number
        number += amount(prove=1, test=stride)


def test_a_killed_fork_is_whole_or_unfinished_and_the_source_is_exact(tmp_path: Path) -> None:
    root = source(tmp_path)
    before, states = looks(root), set[str]()

    def work() -> None:
        with Workspace.open(root) as workspace:
            workspace.fork("a").close()

    def check(was_killed: bool) -> None:
        assert looks(root) == before
        with Workspace.open(root, read_only=True) as workspace:
            found = workspace.forks()
        states.update(fork.state for fork in found)
        assert was_killed or [fork.state for fork in found] == ["ready"]
        for fork in found:
            if fork.state == "ready":
                with Workspace.open(fork.root) as opened:
                    assert opened.changes_since_fork() == []
                    assert [entry.kind for entry in opened.log()] == ["baseline"]
            else:
                assert not Path(fork.root).exists()
        with Workspace.open(root) as workspace:
            workspace.gc(0)
            assert [entry.kind for entry in workspace.log()] == ["baseline"]
            for fork in workspace.forks():
                workspace.discard_fork(fork.name)
            assert workspace.forks() == []
            workspace.gc(0)
            if found:
                place = Path(found[0].root)
                assert not any(path.exists() for path in (place, Path(found[0].store)))
                assert [*place.parent.glob("*")] == []

    assert at_each_point(work, check, stride=7) > 20
    assert states == {"ready", "unfinished"}


def test_a_killed_discard_goes_on(tmp_path: Path) -> None:
    root = source(tmp_path)

    def again() -> None:
        with Workspace.open(root) as workspace:
            if not workspace.forks():
                with workspace.fork("a") as fork:
                    Path(fork.root, "closed").mkdir(mode=0o500)

    def work() -> None:
        with Workspace.open(root, read_only=True) as workspace:
            workspace.discard_fork("a")

    def check(was_killed: bool) -> None:
        with Workspace.open(root, read_only=True) as workspace:
            found = workspace.forks()
            assert bool(found) == was_killed
            for fork in found:
                workspace.discard_fork("a")
                assert not Path(fork.root).exists()
            assert workspace.forks() == []
        if was_killed:
            again()

    again()
    assert at_each_point(work, check, stride=1) >= 2


@needs_git
@pytest.mark.parametrize("on_conflict", ["abort", "keep"])
def test_a_killed_promotion_is_done_or_not_done(tmp_path: Path, on_conflict: str) -> None:
    root = source(tmp_path)
    (root / "d/e/f.txt").write_text("".join(f"{number}\n" for number in range(9)))
    repository(root)
    with Workspace.open(root) as workspace:
        fork = workspace.fork("a")
        place, ends = Path(fork.root), set[str]()
        (place / "a.txt").write_text("of the fork\n")
        (place / "d/e/f.txt").write_text((place / "d/e/f.txt").read_text() + "more\n")
        (place / "new/empty").mkdir(parents=True)
        shutil.move(place / "b.txt", place / "new/b.txt")
        git(place, "add", "--all")
        git(place, "commit", "--quiet", "--message", "of the fork")
        fork.close()
    if on_conflict == "keep":
        (root / "a.txt").write_text("of here\n")
        Workspace.open(root).close()
    before = lasting(capture_tree(root))
    wanted: list[object] = []

    def work() -> None:
        with Workspace.open(root) as workspace:
            workspace.promote("a", "keep" if on_conflict == "keep" else "abort", with_git=True)

    def check(was_killed: bool) -> None:
        with Workspace.open(root) as workspace:
            steps = workspace.steps()
            if steps and steps[-1].tool == "promote":
                ends.add("after")
                wanted.append(lasting(capture_tree(root)))
                assert wanted[-1] == wanted[0]
                assert git(root, "log", "-1", "--format=%s") == "of the fork\n"
                fsck(root)
                workspace.undo()
            else:
                ends.add("before")
                assert was_killed
            assert lasting(capture_tree(root)) == before
            assert [one.state for one in workspace.forks()] == ["ready"]

    assert at_each_point(work, check, stride=11) > 20
    assert ends == {"before", "after"}
