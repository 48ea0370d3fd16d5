"""A workspace on disk: opening it, and the steps that calls make."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from captured_tree import capture_tree, lasting
from counting import count_calls
from effort import kill_points
from failpoints import injected
from killing import killed_at

from ringfence.errors import WorkspaceLockedError
from ringfence.runtime import Step
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, ScanLimits, Workspace


def build(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (root / "d/b.txt").write_text("b\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    build(tmp_path / "root")
    return tmp_path / "root"


def opened(root: Path, **options: bool) -> Workspace:
    return Workspace.open(root, store=root.parent / "store", **options)


def call(workspace: Workspace, change: Callable[[HostFilesystem], object], call_id: str = "call-1") -> Step | None:
    with held_call(workspace.filesystem, call_id=call_id) as held:
        change(workspace.filesystem.for_call(held))
        return held.commit()


def others(workspace: Workspace) -> list[tuple[str, ...]]:
    """What somebody else changed, newest first."""
    return [entry.paths for entry in workspace.log() if entry.kind == "external"]


def test_the_first_opening_takes_the_baseline(workspace: Workspace) -> None:
    [baseline] = workspace.log()
    assert (baseline.number, baseline.kind) == (0, "baseline")
    assert baseline.paths == ("a.txt", "d", "d/b.txt", "d/e")
    assert workspace.steps() == []
    assert workspace.recovered is None


def test_a_call_that_changed_files_is_a_step(workspace: Workspace) -> None:
    made = call(workspace, lambda fs: fs.write("d/new.txt", "new"))
    assert made is not None
    assert (made.number, made.tool, made.call_id, made.session_id) == (1, "a test", "call-1", "a session")
    assert made.paths == ("d/new.txt",)
    assert workspace.steps() == [made]
    assert [entry.receipt_id for entry in workspace.log()] == ["receipt of call-1", ""]
    assert others(workspace) == []


def test_a_call_that_changed_nothing_is_none(workspace: Workspace) -> None:
    assert call(workspace, lambda fs: fs.read("a.txt")) is None
    assert call(workspace, lambda fs: (fs.write("x", ""), fs.delete("x"))) is None
    assert workspace.steps() == []


def test_a_call_that_was_rolled_back_is_none(workspace: Workspace, root: Path) -> None:
    before = capture_tree(root)
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("a.txt", "gone soon")
        held.rollback()
    assert workspace.steps() == []
    assert capture_tree(root) == before


def test_steps_are_there_at_the_next_opening_and_nothing_is_taken_for_somebody_else_s(root: Path) -> None:
    with opened(root) as workspace:
        call(workspace, lambda fs: fs.write("n/o/p.txt", "new"))
        call(workspace, lambda fs: fs.move("d", "moved"), "call-2")
        call(workspace, lambda fs: fs.delete("n", recursive=True), "call-3")
        steps = workspace.steps()
    with opened(root) as again:
        assert again.steps() == steps
        assert [entry.kind for entry in again.log()] == ["step", "step", "step", "baseline"]


def test_what_others_change_between_openings_is_no_step(root: Path) -> None:
    with opened(root) as workspace:
        call(workspace, lambda fs: fs.write("a.txt", "two"))
    (root / "a.txt").write_text("three")
    (root / "their.txt").write_text("theirs")
    with opened(root) as again:
        assert others(again) == [("a.txt", "their.txt")]
        assert [step.number for step in again.steps()] == [1]


def test_what_others_changed_before_a_call_meets_it_comes_before_the_step(workspace: Workspace, root: Path) -> None:
    (root / "a.txt").write_text("theirs\n")
    (root / "d/b.txt").unlink()
    (root / "d/b.txt").mkdir()
    (root / "their/own").mkdir(parents=True)
    (root / "their/own/x").write_text("x")
    call(workspace, lambda fs: (fs.write("a.txt", "ours\n"), fs.move("their/own/x", "d/b.txt/y"), fs.delete("d/e")))
    assert others(workspace) == [("a.txt", "d/b.txt", "their", "their/own", "their/own/x")]
    assert workspace.steps()[0].paths == ("a.txt", "d/b.txt/y", "d/e", "their/own/x")
    assert b"-theirs\n+ours\n" in workspace.show(1).patch


def test_what_others_removed_before_a_call_puts_it_back_is_theirs(workspace: Workspace, root: Path) -> None:
    (root / "d/b.txt").unlink()
    (root / "d/e").rmdir()
    (root / "d").rmdir()
    call(workspace, lambda fs: fs.write("d/new", "new"))
    assert others(workspace) == [("d", "d/b.txt", "d/e")]
    assert workspace.steps()[0].paths == ("d", "d/new")


def test_a_second_opener_is_told_who_has_it_and_may_look(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: fs.write("a.txt", "x"))
    with pytest.raises(WorkspaceLockedError, match=f"process {os.getpid()}"):
        opened(root)
    with opened(root, read_only=True) as looking:
        assert [step.number for step in looking.steps()] == [1]
        with pytest.raises(PermissionError, match="read-only"):
            looking.undo()


def test_a_workspace_without_history_cannot_be_looked_at(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no history yet"):
        opened(root, read_only=True)


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_directory_is_said_to_be_none(root: Path, read_only: bool) -> None:
    with pytest.raises(NotADirectoryError, match=r"a\.txt is no directory: a workspace is opened at one"):
        opened(root / "a.txt", read_only=read_only)
    with pytest.raises(FileNotFoundError, match="there is no directory .*nowhere: make it first"):
        opened(root / "nowhere", read_only=read_only)


def test_a_filesystem_on_its_own_keeps_steps_too(root: Path) -> None:
    with HostFilesystem(root, store=root.parent / "store") as fs, held_call(fs) as held:
        fs.for_call(held).write("a.txt", "x")
        step = held.commit()
    with Workspace.open(root, store=root.parent / "store") as workspace:
        assert workspace.steps() == [step]
        workspace.undo()
    assert (root / "a.txt").read_text() != "x"


def test_closing_twice_is_no_error_and_lets_the_next_in(root: Path) -> None:
    first = opened(root)
    first.close()
    first.close()
    with opened(root) as second:
        first.close()
        with pytest.raises(WorkspaceLockedError):
            opened(root)
        call(second, lambda fs: fs.write("a.txt", "x"))
        assert [step.number for step in second.steps()] == [1]


def test_where_closing_cannot_roll_back_it_says_so_and_can_be_repeated(root: Path) -> None:
    full = False

    def before(name: str) -> None:
        if full:
            raise OSError(28, "No space left on device")

    tree = capture_tree(root)
    workspace = opened(root)
    with injected(before), held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("a.txt", "x")
        full = True
        with pytest.raises(OSError, match="No space") as caught:
            workspace.close()
        assert "close it again" in caught.value.__notes__[0]
        full = False
        workspace.close()
    assert capture_tree(root) == tree
    opened(root).close()


# A crash in the middle of a step.


def a_call(fs: HostFilesystem) -> None:
    fs.write("a.txt", "three")
    fs.write("n/o/p.txt", "new")
    fs.move("d/b.txt", "n/b.txt")


def test_a_call_killed_anywhere_is_a_step_or_is_not(tmp_path: Path) -> None:
    ends = set[str]()
    for point in kill_points(5):
        root, store = tmp_path / str(point) / "root", tmp_path / str(point) / "store"
        root.mkdir(parents=True)
        build(root)
        Workspace.open(root, store=store).close()
        (root / "d/b.txt").write_text("theirs")
        before = capture_tree(root)

        def work(before: Callable[[str], None], root: Path = root, store: Path = store) -> None:
            with injected(before), Workspace.open(root, store=store) as workspace:
                call(workspace, a_call, "killed")

        killed = killed_at(point, work)
        with Workspace.open(root, store=store) as workspace:
            said = workspace.recovered
            if [step.call_id for step in workspace.steps()] == ["killed"]:
                assert said is None or said.outcome == "finished"
                assert (root / "a.txt").read_text() == "three"
                assert (root / "n/b.txt").read_text() == "theirs"
                assert others(workspace) == [("d/b.txt",)]
                ends.add("after")
                workspace.undo()
                assert lasting(capture_tree(root)) == lasting(before)
            else:
                assert capture_tree(root) == before
                assert workspace.steps() == []
                assert said is None or said.outcome == "rolled back"
                ends.add("before")
        if not killed:
            break
    assert ends == {"before", "after"}


def test_what_no_history_has_since_the_opening_is_said(root: Path) -> None:
    for name in ("by command", "by tool", "large"):
        (root / name).write_bytes(b"x" * 2000)
    with Workspace.open(root, store=root.parent / "store", limits=ScanLimits(max_file_bytes=1000)) as workspace:
        assert workspace.left_out_since == {}
        call(workspace, lambda fs: fs.delete("by tool"))
        for end in ("rollback", "commit"):
            with held_call(workspace.filesystem, opaque=True) as held:
                (root / "new").write_bytes(b"y" * 2000)
                with (root / "large").open("ab") as file:
                    file.write(b"y")
                if end == "commit":
                    (root / "by command").unlink()
                getattr(held, end)()
        assert workspace.left_out_since == dict.fromkeys(("by command", "large", "new"), "too large")


# What it costs.


def read_and_delete(fs: HostFilesystem, paths: list[str]) -> None:
    for path in paths:
        fs.read(path)
        fs.delete(path)


def write_anew(fs: HostFilesystem, paths: list[str]) -> None:
    for path in paths:
        fs.delete(path)
    for path in paths:
        fs.write(path, "new")


@pytest.mark.parametrize("change", [read_and_delete, write_anew])
def test_a_call_that_changes_twice_as_many_files_costs_twice_as_much(
    workspace: Workspace, root: Path, change: Callable[[HostFilesystem, list[str]], None]
) -> None:
    costs: list[int] = []
    for count in (300, 600):
        paths = [f"d/{count} {number}" for number in range(count)]
        call(workspace, lambda fs, paths=paths: [fs.write(path, "x") for path in paths])
        costs.append(count_calls(lambda paths=paths: call(workspace, lambda fs: change(fs, paths))))
    assert costs[1] < 2.2 * costs[0]


def test_the_first_opening_does_not_look_at_every_other_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    costs: list[int] = []
    for number in range(3):
        (tmp_path / f"root {number}").mkdir()
        costs.append(count_calls(lambda number=number: Workspace.open(tmp_path / f"root {number}").close()))
        for other in range(500):
            store = tmp_path / f"state/stores/{number} {other}"
            store.mkdir()
            (store / "root").write_text(json.dumps([f"/somewhere/{other}", other, other, ""]))
    assert costs[2] < costs[1] + 200


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize(
    "undone",
    [
        lambda fs: fs.delete("moved", recursive=True),
        lambda fs: fs.move("moved", "again"),
        lambda fs: (fs.write("moved/file", "new"), fs.delete("moved/file")),
    ],
)
def test_a_call_commits_what_it_has_moved_after_a_call_within_was_rolled_back(
    workspace: Workspace, root: Path, undone: Callable[[HostFilesystem], object], opaque: bool
) -> None:
    (root / "directory").mkdir()
    (root / "directory/file").write_text("old")
    workspace.look()
    with held_call(workspace.filesystem, opaque=opaque) as held:
        fs = workspace.filesystem.for_call(held)
        fs.move("directory", "moved")
        with held_call(workspace.filesystem, call_id="inner", parent=held, opaque=opaque) as inner:
            undone(workspace.filesystem.for_call(inner))
            inner.rollback()
        held.commit()
    assert workspace.steps()[-1].paths == ("directory", "directory/file", "moved", "moved/file")


def test_a_call_goes_back_to_before_a_move_of_another_call(workspace: Workspace, root: Path) -> None:
    (root / "file").write_text("old")
    snapshot = workspace.filesystem.snapshot()
    for work in (lambda fs: fs.move("file", "moved"), lambda fs: fs.restore(snapshot)):
        with held_call(workspace.filesystem) as held:
            work(workspace.filesystem.for_call(held))
            held.commit()
    assert (root / "file").read_text() == "old"
    assert workspace.steps()[-1].paths == ("file", "moved")
