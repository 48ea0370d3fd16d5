"""A process that was forked off has its parent's objects, and must not touch what is the parent's."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from captured_tree import capture_tree, lasting

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def in_child(work: Callable[[], object]) -> str:
    """Run it in a forked child: what it raised, in words, or "nothing"; "" if it never ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
            os.write(writing, b"nothing")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        answer = said.read()
    os.waitpid(child, 0)
    return answer


def step(workspace: Workspace, content: str) -> None:
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("a.txt", content)
        held.commit()


def aborted(workspace: Workspace) -> None:
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("c.txt", "c\n")
        held.rollback()


def opaque(workspace: Workspace) -> None:
    with held_call(workspace.filesystem, opaque=True) as held:
        held.commit()


USES: dict[str, Callable[[Workspace], object]] = {
    "undo": lambda workspace: workspace.undo(),
    "restore": lambda workspace: workspace.restore(0),
    "checkpoint": lambda workspace: workspace.checkpoint("child"),
    "drop": lambda workspace: workspace.drop_checkpoint("named"),
    "gc": lambda workspace: workspace.gc(0),
    "aborted": lambda workspace: workspace.aborted(),
    "log": lambda workspace: workspace.log(),
    "diff": lambda workspace: workspace.diff(),
    "a call": lambda workspace: step(workspace, "child\n"),
    "an opaque call": opaque,
}


@pytest.mark.parametrize("use", USES)
def test_a_child_cannot_use_its_parent_s_workspace(workspace: Workspace, root: Path, use: str) -> None:
    step(workspace, "first\n")
    workspace.checkpoint("named")
    aborted(workspace)
    (root / "mine.txt").write_text("by hand\n")
    before = lasting(capture_tree(root)), lasting(capture_tree(root.parent / "store"))
    assert "was forked from" in in_child(lambda: USES[use](workspace))
    assert (lasting(capture_tree(root)), lasting(capture_tree(root.parent / "store"))) == before
    step(workspace, "second\n")
    assert [(entry.number, entry.paths) for entry in workspace.log(2)] == [(2, ("a.txt",)), (1, ("a.txt",))]
    assert len(workspace.aborted()) == 1


@pytest.mark.parametrize("end", ["commit", "rollback", "changed"])
@pytest.mark.parametrize("opaque", [False, True])
def test_a_forked_handler_does_not_end_the_call(workspace: Workspace, root: Path, end: str, opaque: bool) -> None:
    before = lasting(capture_tree(root))
    with held_call(workspace.filesystem, opaque=opaque) as held:
        files = workspace.filesystem.for_call(held)
        files.write("a.txt", "changed\n")
        files.delete("d", recursive=True)
        during = capture_tree(root)
        in_child(getattr(held, end))
        assert capture_tree(root) == during
        made = held.commit()
    assert made is not None
    assert made.paths == ("a.txt", "d", "d/b.txt")
    workspace.undo()
    assert lasting(capture_tree(root)) == before


def opened(root: Path) -> None:
    HostFilesystem(root, store=root.parent / "store").close()


def looked_at(root: Path) -> None:
    Workspace.open(root, store=root.parent / "store", read_only=True).close()


@pytest.mark.parametrize("use", [opened, looked_at])
def test_children_that_are_forked_while_another_thread_uses_a_workspace_do_not_keep_it(root: Path, use: Any) -> None:
    Workspace.open(root, store=root.parent / "store").close()
    enough, (reading, writing) = threading.Event(), os.pipe()
    with ThreadPoolExecutor() as threads, open(reading), open(writing, "w"):
        using = threads.submit(lambda: [use(root) for _ in iter(enough.is_set, True)])
        children = [os.fork() or lives_until_nobody_writes(reading, writing) for _ in range(30)]
        enough.set()
        using.result()
        opened(root)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 30


def lives_until_nobody_writes(reading: int, writing: int) -> int:
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)


def test_a_child_lets_go_of_a_workspace_that_another_thread_was_changing(workspace: Workspace) -> None:
    has_it, may_go = threading.Event(), threading.Event()

    def change() -> None:
        with workspace.filesystem.lock.mutex:
            has_it.set()
            may_go.wait()

    with ThreadPoolExecutor() as threads:
        threads.submit(change)
        has_it.wait()
        said = in_child(workspace.close)
        may_go.set()
    assert said == "nothing"
