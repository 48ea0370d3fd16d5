"""What the history does not know of a workspace, since a scan left it out: it is not absent, and nobody's change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from real_git import fsck, needs_git

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, ScanLimits, Workspace

SMALL = ScanLimits(max_file_bytes=1000)
LARGE = b"large\n" * 500


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/d").mkdir(parents=True)
    (tmp_path / "root/d/x").write_text("x\n")
    (tmp_path / "root/d/y").write_text("y\n")
    (tmp_path / "root/a").write_text("a\n")
    return tmp_path / "root"


def opened(root: Path, limits: ScanLimits = SMALL) -> Workspace:
    return Workspace.open(root, store=root.parent / "store", limits=limits)


def step(root: Path, change: Callable[[HostFilesystem], object], *, opaque: bool = False) -> None:
    with opened(root) as workspace, held_call(workspace.filesystem, opaque=opaque) as held:
        change(workspace.filesystem.for_call(held))
        held.commit()


def unread(root: Path, path: str) -> None:
    """Have a scan leave it out."""
    found = root / path
    found.rename(root.parent / "aside")
    os.mkfifo(found)


def read_again(root: Path, path: str) -> None:
    (root / path).unlink()
    (root.parent / "aside").rename(root / path)


@pytest.mark.parametrize("path", ["a", "d"])
def test_what_one_scan_could_not_read_is_not_removed(root: Path, path: str) -> None:
    step(root, lambda fs: fs.write("one", "1"))
    unread(root, path)
    step(root, lambda fs: fs.write("two", "2"))
    read_again(root, path)
    step(root, lambda fs: fs.write("three", "3"))
    with opened(root) as workspace:
        assert [entry.kind for entry in workspace.log()] == ["step", "step", "step", "baseline"]
        assert b"deleted" not in workspace.diff(1, 2)
        assert workspace.restore(2).outcomes == {"three": "removed"}
    assert (root / "d/x").read_text() == "x\n"
    assert (root / "a").read_text() == "a\n"


@pytest.mark.parametrize("path", ["a", "d/x", "d"])
def test_a_restore_brings_back_what_was_unknown_as_it_was_when_it_was_next_known(root: Path, path: str) -> None:
    unread(root, path)
    step(root, lambda fs: fs.write("one", "1"))
    read_again(root, path)
    step(root, lambda fs: fs.delete(path, recursive=True))
    with opened(root) as workspace:
        assert workspace.restore(1).outcomes[path] == "restored"
    assert (root / "d/x").read_text() == "x\n"
    assert (root / "a").read_text() == "a\n"


def test_a_patch_says_that_it_leaves_out_a_removal_of_what_was_unknown(root: Path) -> None:
    (root / "large").write_bytes(LARGE)
    (root / "d/large").write_bytes(LARGE)
    (root / "moved").write_bytes(LARGE)
    step(root, lambda fs: (fs.delete("large"), fs.move("moved", "d/moved")))
    step(root, lambda fs: fs.delete("d", recursive=True))
    with opened(root) as workspace:
        assert dict(workspace.export(a=0, b=1).unknown) == {"large": "too large", "moved": "too large"}
        assert dict(workspace.export().unknown) == {"d/large": "too large", "large": "too large", "moved": "too large"}
        assert b"rename" not in workspace.diff()
        assert workspace.unclear_since(workspace.log()[-1].commit) == workspace.export().unknown
        assert workspace.export(fmt="mbox").unknown.keys() == {"d/large", "d/moved", "large", "moved"}


def test_a_restore_does_not_delete_what_its_step_left_out(root: Path) -> None:
    (root / "data").write_bytes(LARGE)
    step(root, lambda fs: fs.write("one", "1"))
    (root / "data").write_text("small\n")
    step(root, lambda fs: fs.write("two", "2"))
    with opened(root) as workspace:
        said = workspace.restore(1)
        assert said.outcomes == {"data": "kept", "two": "removed"}
        assert said.reasons == {"data": "what it was then is not in the history (too large then)"}
        exported = workspace.export(a=0, b=2)
        assert dict(exported.unknown) == {"data": "too large"}
        assert b"data" not in exported.text
    assert (root / "data").read_text() == "small\n"


def test_an_undo_leaves_alone_what_was_unknown_before(root: Path) -> None:
    (root / "data").write_bytes(LARGE)
    step(root, lambda fs: (root / "data").write_text("cut\n"), opaque=True)
    with opened(root) as workspace:
        said = workspace.undo()
        assert (said.outcomes, said.step) == ({"data": "kept"}, None)
        assert said.reasons == {"data": "what it was before is not in the history (too large then)"}
    assert (root / "data").read_text() == "cut\n"


def test_an_undo_leaves_alone_what_became_too_large(root: Path) -> None:
    step(root, lambda fs: (root / "a").write_bytes(LARGE), opaque=True)
    with opened(root) as workspace:
        assert workspace.steps()[0].paths == ("a",)
        said = workspace.undo()
        assert said.reasons == {"a": "what step 1 made of it is not in the history (too large)"}
    assert (root / "a").read_bytes() == LARGE


def test_a_large_file_that_is_overwritten_comes_back(root: Path) -> None:
    (root / "data").write_bytes(LARGE)
    step(root, lambda fs: fs.write("data", "small\n"))
    with opened(root) as workspace:
        assert workspace.undo().outcomes == {"data": "restored"}
    assert (root / "data").read_bytes() == LARGE


@pytest.mark.parametrize("path", ["d", "a"])
def test_what_a_command_has_replaced_by_a_pipe_is_said_and_comes_back_when_that_is_gone(root: Path, path: str) -> None:
    step(root, lambda _: unread(root, path), opaque=True)
    with opened(root) as workspace:
        assert workspace.show(1).left_out == {path: "special file"}
        assert workspace.undo().reasons == {path: "what step 1 made of it is not in the history (special file)"}
        restored = workspace.restore(0)
        assert (restored.outcomes, restored.has_changed) == ({path: "kept"}, False)
        assert restored.reasons == {path: "what it is now is not in the history (special file)"}
    assert (root / path).is_fifo()
    (root / path).unlink()
    with opened(root) as workspace:
        assert workspace.restore(0).outcomes[path] == "restored"
    assert ((root / "a").read_text(), (root / "d/x").read_text()) == ("a\n", "x\n")


def test_a_rollback_behind_a_command_does_not_take_an_older_state_for_the_one_before(root: Path) -> None:
    with opened(root) as workspace:
        (root / "a").write_bytes(LARGE)
        with held_call(workspace.filesystem, opaque=True) as held:
            with (root / "a").open("ab") as file:
                file.write(b"more")
            (root / "new").write_text("new")
            assert held.rollback().conflicts == ()
    assert (root / "a").read_bytes() == LARGE + b"more"  # nobody has what it was
    assert not (root / "new").exists()


@pytest.mark.parametrize("source", ["data", "d"])
def test_a_large_file_that_was_moved_is_not_read_and_an_undo_says_that_it_stays(root: Path, source: str) -> None:
    (root / "data").write_bytes(LARGE)
    (root / "d/data").write_bytes(LARGE)
    inode = (root / source / "data" if source == "d" else root / source).stat().st_ino
    stays = "moved/data" if source == "d" else "moved"
    step(root, lambda fs: fs.move(source, "moved"))
    with opened(root) as workspace:
        assert stays in workspace.steps()[0].paths
        assert workspace.show(1).left_out == {stays: "too large"}
        said = workspace.undo()
        assert said.outcomes[stays] == "kept"
        assert said.reasons[stays] == "what step 1 made of it is not in the history (too large)"
        assert [entry.kind for entry in workspace.log()][-1] == "baseline"
    assert (root / stays).stat().st_ino == inode
    assert ((root / "d/x").read_text(), (root / "d/y").read_text()) == ("x\n", "y\n")
    with opened(root) as workspace:
        assert workspace.restore(0).outcomes.get(stays, "kept") == "kept"
    assert (root / stays).read_bytes() == LARGE


@needs_git
def test_git_reads_what_is_not_known_and_gc_keeps_it(root: Path) -> None:
    (root / "data").write_bytes(LARGE)
    for name in ("one", "two", "three"):
        step(root, lambda fs, name=name: fs.write(name, "x"))
    (root / "data").write_text("small\n")
    with opened(root) as workspace:
        workspace.gc(2)
        assert workspace.restore(2).outcomes == {"data": "kept", "three": "removed"}
    fsck(root.parent / "store/history")
