"""What a rollback of a call through the filesystem takes away is kept, and can be looked at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from captured_tree import capture_tree
from effort import amount
from failpoints import injected
from killing import killed_at
from real_git import fsck, git_bytes

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

CHANGED = ("a.txt", "d/b.txt", "gone", "link", "moved", "n", "n/o", "n/o/new.txt", "old", "t", "t/x", "tree", "tree/x")


def build(root: Path) -> None:
    (root / "d").mkdir(parents=True)
    (root / "tree").mkdir()
    for path in ("a.txt", "d/b.txt", "gone", "old", "tree/x"):
        (root / path).write_text(f"{path} before\n")
    (root / "script").write_text("#!/bin/sh\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build(tmp_path / "root")
    return tmp_path / "root"


def opened(root: Path, *, read_only: bool = False) -> Workspace:
    return Workspace.open(root, store=root.parent / "store", read_only=read_only)


def everything(fs: HostFilesystem) -> None:
    fs.write("a.txt", "an hour of work\n")
    fs.write("d/b.txt", "written\n")
    fs.write("d/b.txt", "and appended\n", mode="append")
    fs.delete("gone")
    fs.move("old", "moved")
    fs.write("n/o/new.txt", "first\n")
    fs.write("n/o/new.txt", "last\n")
    fs.move("tree", "t")
    fs.symlink("link", "a.txt")
    fs.write("never", "came and went")
    fs.delete("never")


def failed(
    workspace: Workspace, change: Callable[[HostFilesystem], object], call_id: str = "call-1", *, asked: bool = True
) -> list[str]:
    """The notes of its rollback; what the call had changed was ``asked`` for before it, as after a handler's end."""
    with held_call(workspace.filesystem, call_id=call_id) as held:
        change(workspace.filesystem.for_call(held))
        if asked:
            held.changed()
        return list(held.rollback().notes)


def kept(root: Path, number: int, path: str) -> bytes:
    return git_bytes(root.parent / "store/history", "show", f"refs/ringfence/aborted/{number}:files/{path}")


@pytest.mark.parametrize("asked", [True, False])
def test_all_that_a_call_had_changed_is_kept(root: Path, workspace: Workspace, asked: bool) -> None:
    before = capture_tree(root)
    assert failed(workspace, everything, asked=asked) == []
    assert capture_tree(root) == before
    [entry] = workspace.aborted()
    assert (entry.number, entry.kind, entry.tool, entry.call_id) == (1, "aborted", "a test", "call-1")
    assert entry.paths == CHANGED
    patch = workspace.aborted_step(1).patch
    assert b"+an hour of work\n" in patch
    assert b"+written\n+and appended\n" in patch
    assert b"rename from old\nrename to" in patch
    workspace.close()
    assert kept(root, 1, "n/o/new.txt") == b"last\n"
    assert kept(root, 1, "t/x") == b"tree/x before\n"
    fsck(root.parent / "store/history")


def odd(fs: HostFilesystem) -> None:
    fs.write("caf\udce9\n", "a name that is no UTF-8")
    fs.delete("tree", recursive=True)
    fs.write("tree", "a file where a directory was")
    fs.delete("gone")
    fs.write("gone/below", "a directory where a file was")
    fs.chmod("script", 0o755)
    fs.chmod("old", 0o600)
    fs.write("hard", "by one of two names")
    fs.move("link", "d/link")
    fs.move("a.txt", "d/b.txt", overwrite=True)


@pytest.mark.parametrize("asked", [True, False])
def test_kinds_names_and_bits_of_all_sorts_are_kept(root: Path, asked: bool) -> None:
    os.link(root / "script", root / "hard")
    os.symlink("a.txt", root / "link")
    with opened(root) as workspace:
        before = capture_tree(root)
        assert failed(workspace, odd, asked=asked) == []
        assert capture_tree(root) == before
        [entry] = workspace.aborted()
        paths = "a.txt caf\udce9\n d/b.txt d/link gone gone/below hard link old script tree tree/x"
        assert entry.paths == tuple(paths.split(" "))
        changes = {change.path: change.after for change in workspace.aborted_step(1).changes}
        modes = {path: after.mode for path, after in changes.items() if after is not None}
        assert (modes["script"], modes["old"]) == (0o755, 0o600)
        assert (root / "script").stat().st_nlink == 2
    assert kept(root, 1, "tree") == b"a file where a directory was"
    assert kept(root, 1, "d/b.txt") == b"a.txt before\n"
    assert kept(root, 1, "d/link") == b"a.txt"
    assert kept(root, 1, "old") == b"old before\n"
    fsck(root.parent / "store/history")


def test_who_only_looks_sees_it_at_once_and_writes_nothing(root: Path, workspace: Workspace) -> None:
    failed(workspace, everything)
    failed(workspace, lambda fs: fs.write("a.txt", "again"), "call-2")
    before = capture_tree(root.parent / "store")
    with opened(root, read_only=True) as looking:
        seen = looking.aborted()
        shown = looking.aborted_step(1)
        assert looking.aborted() == seen
    assert capture_tree(root.parent / "store") == before
    assert [(entry.number, entry.call_id) for entry in seen] == [(2, "call-2"), (1, "call-1")]
    assert workspace.aborted() == seen
    assert workspace.aborted_step(1) == shown
    with opened(root, read_only=True) as looking:
        assert looking.aborted() == seen


def test_it_outlives_steps_and_gc(root: Path, workspace: Workspace) -> None:
    failed(workspace, everything)
    for number in range(3):
        with held_call(workspace.filesystem, call_id=f"call-{number + 2}") as held:
            workspace.filesystem.for_call(held).write("a.txt", str(number))
            held.commit()
    workspace.gc(1)
    assert workspace.aborted()[0].paths == CHANGED
    assert b"+an hour of work\n" in workspace.aborted_step(1).patch


def test_it_is_there_when_the_workspace_is_opened_again(root: Path, workspace: Workspace) -> None:
    failed(workspace, everything)
    workspace.close()
    with opened(root) as again:
        failed(again, lambda fs: fs.write("a.txt", "the same call id, in another process"))
        assert [entry.number for entry in again.aborted()] == [2, 1]


def test_it_outlives_a_kill_after_the_rollback(root: Path) -> None:
    def work(announce: Callable[[str], None]) -> None:
        workspace = opened(root)
        failed(workspace, everything)
        announce("rolled back")

    assert killed_at(0, work)
    with opened(root, read_only=True) as looking:
        seen = looking.aborted()
        patch = looking.aborted_step(1).patch
    assert [entry.paths for entry in seen] == [CHANGED]
    with opened(root) as again:
        assert again.aborted() == seen
        assert again.aborted_step(1).patch == patch
    assert kept(root, 1, "n/o/new.txt") == b"last\n"
    fsck(root.parent / "store/history")


def test_a_call_within_a_call_is_kept_as_a_call_of_its_own(root: Path, workspace: Workspace) -> None:
    with held_call(workspace.filesystem, call_id="outer") as outer:
        workspace.filesystem.for_call(outer).write("a.txt", "the outer one")
        with held_call(workspace.filesystem, call_id="inner", parent=outer) as inner:
            workspace.filesystem.for_call(inner).write("a.txt", "the inner one")
            inner.rollback()
        outer.commit()
    [entry] = workspace.aborted()
    assert (entry.call_id, entry.paths) == ("inner", ("a.txt",))
    assert (root / "a.txt").read_text() == "the outer one"
    assert b"the inner one" in workspace.aborted_step(entry.number).patch
    assert b"+the outer one" in workspace.show(1).patch
    assert b"the inner one" not in workspace.show(1).patch
    workspace.close()
    assert kept(root, 1, "a.txt") == b"the inner one"


def test_typed_changes_before_a_program_are_kept_with_what_it_changed(root: Path, workspace: Workspace) -> None:
    with held_call(workspace.filesystem, call_id="outer", opaque=True) as outer:
        workspace.filesystem.for_call(outer).write("a.txt", "typed")
        with held_call(workspace.filesystem, call_id="inner", parent=outer, opaque=True) as inner:
            (root / "script").write_text("by a program")
            inner.commit()
        outer.rollback()
    assert [entry.paths for entry in workspace.aborted()] == [("a.txt", "script")]
    assert (root / "a.txt").read_text() == "a.txt before\n"


def test_a_call_that_changed_nothing_keeps_nothing(workspace: Workspace) -> None:
    failed(workspace, lambda fs: fs.read("a.txt"))
    failed(workspace, lambda fs: fs.write("a.txt", "a.txt before\n"))
    failed(workspace, lambda fs: fs.write("a.txt", "a.txt before\n"), asked=False)
    assert workspace.aborted() == []


def test_files_that_the_history_has_not_seen_yet_are_no_hindrance(root: Path, workspace: Workspace) -> None:
    (root / "theirs").mkdir()
    (root / "theirs/file").write_text("somebody else's")

    def change(fs: HostFilesystem) -> None:
        fs.write("theirs/below/new", "new")
        fs.delete("theirs/file")

    failed(workspace, change)
    assert workspace.aborted()[0].paths == ("theirs", "theirs/below", "theirs/below/new")
    assert (root / "theirs/file").read_text() == "somebody else's"


def test_the_newest_fifty_are_kept(root: Path, workspace: Workspace) -> None:
    for number in range(1, 110):
        failed(workspace, lambda fs, number=number: fs.write("a.txt", f"{number}"), f"call-{number}")
    with opened(root, read_only=True) as looking:
        seen = looking.aborted()
    assert [entry.number for entry in seen] == list(range(109, 59, -1))
    assert workspace.aborted() == seen
    assert b"+109" in workspace.aborted_step(109).patch


def test_of_what_is_too_much_a_hash_is_told(workspace: Workspace) -> None:
    def change(fs: HostFilesystem) -> None:
        fs.write("a.txt", "small")
        fs.write_bytes("big", bytes((8 << 20) + 1))

    [note] = failed(workspace, change)
    assert note.startswith(f"big was not kept, it was too much: {(8 << 20) + 1} bytes, sha256 ")
    assert workspace.aborted()[0].paths == ("a.txt",)


def test_a_call_that_is_killed_anywhere_is_kept_once(tmp_path: Path) -> None:
    point, locks_to_keep = 0, list[int]()
    while True:
        root = tmp_path / str(point) / "root"
        build(root)
        opened(root).close()
        before = capture_tree(root)

        def work(announce: Callable[[str], None], root: Path = root) -> None:
            with injected(announce), opened(root) as workspace:
                failed(workspace, everything, "killed")

        killed = killed_at(point, work)
        with opened(root) as workspace:
            assert capture_tree(root) == before
            found = workspace.aborted()
            assert [entry.call_id for entry in found] in ([], ["killed"])
            locks_to_keep.append(len(found[0].paths) if found else 0)
            if found:
                assert set(found[0].paths) <= {*CHANGED, "never"}
                assert b"+an hour of work\n" in workspace.aborted_step(1).patch
        fsck(root.parent / "store/history")
        shutil.rmtree(tmp_path / str(point))
        if not killed:
            break
        point += amount(prove=1, test=7)
    full = locks_to_keep.index(len(CHANGED))
    assert set(locks_to_keep[full:]) <= {len(CHANGED), len(CHANGED) + 1}
    assert locks_to_keep[-1] == len(CHANGED)
    assert any(0 < number < len(CHANGED) for number in locks_to_keep)
