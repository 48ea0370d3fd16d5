"""Killed inside of what the store itself writes: the step is there or is not, and git finds the store in order."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from captured_tree import capture_tree, lasting
from effort import amount
from killing import killed_at, killed_at_call
from real_git import fsck, needs_git

from ringfence.testing import held_call
from ringfence_sandbox import Workspace

CALLS = ("write", "pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "ftruncate", "open", "close", "mkdir")


def call(workspace: Workspace, content: str, call_id: str) -> None:
    with held_call(workspace.filesystem, call_id=call_id) as held:
        fs = workspace.filesystem.for_call(held)
        fs.write("a.txt", content)
        fs.write(f"new/{call_id}", content)
        held.commit()


def one_step(root: Path, store: Path) -> None:
    """The log of objects, the tip, and at the end the pack and the refs."""
    with Workspace.open(root, store=store) as workspace:
        call(workspace, "ours\n", "killed")


def one_step_with_power(root: Path, store: Path) -> None:
    with Workspace.open(root, store=store, durability="power") as workspace:
        call(workspace, "ours\n", "killed")


def many_openings(root: Path, store: Path) -> None:
    """Packs are made into one."""
    for number in range(14):
        with Workspace.open(root, store=store) as workspace:
            call(workspace, f"ours {number}\n", "killed")


def collecting(root: Path, store: Path) -> None:
    with Workspace.open(root, store=store) as workspace:
        workspace.gc(1)
        call(workspace, "ours\n", "killed")


WORKS = {work.__name__: work for work in (one_step, one_step_with_power, many_openings, collecting)}
STRIDES = {"many_openings": 389, "collecting": 23}


@needs_git
@pytest.mark.parametrize("name", WORKS)
def test_killed_anywhere_in_the_store_the_step_is_whole_or_not_there(tmp_path: Path, name: str) -> None:
    work = WORKS[name]
    start = tmp_path / "start"
    (start / "root").mkdir(parents=True)
    (start / "root/a.txt").write_text("a\n")
    for number in range(3):
        with Workspace.open(start / "root", store=start / "store") as workspace:
            call(workspace, f"{number}\n", f"before-{number}")
    number, ends = 0, set[str]()
    while True:
        # The very tree, since the log knows it by its inode; only the store is put back.
        root, store = start / "root", tmp_path / f"store-{number}"
        shutil.copytree(start / "store", store, symlinks=True)
        before = lasting(capture_tree(root))
        killed = killed_at_call(number, CALLS, lambda root=root, store=store: work(root, store))
        with Workspace.open(root, store=store) as again:
            steps = [step for step in again.steps() if step.call_id == "killed"]
            if steps:
                ends.add("after")
                assert (root / "a.txt").read_text().startswith("ours")
                assert (root / "new/killed").read_text() == (root / "a.txt").read_text()
                assert not [entry for entry in again.log() if entry.kind == "external"]
                again.undo(len(steps))
            else:
                ends.add("before")
            assert lasting(capture_tree(root)) == before, number
            assert len([step for step in again.steps() if step.call_id.startswith("before")]) >= 1
        fsck(store / "history")
        shutil.rmtree(store)
        if not killed:
            break
        number += amount(prove=1, test=STRIDES.get(name, 17))
    assert ends == {"before", "after"}
    assert number > 30


def test_what_gc_dropped_before_a_kill_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()

    def work(before: Callable[[str], None]) -> None:
        with Workspace.open(tmp_path / "root", store=tmp_path / "store") as workspace:
            for number in range(4):
                call(workspace, f"{number}", f"call-{number}")
            workspace.gc(1)
            before("the end")

    assert killed_at(0, work)
    with Workspace.open(tmp_path / "root", store=tmp_path / "store") as workspace:
        assert [step.call_id for step in workspace.steps()][-1] == "call-3"
        assert workspace.damage is None
