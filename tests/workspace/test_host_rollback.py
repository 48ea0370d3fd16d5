"""What a rolled back call leaves on disk: nothing of its own, and everything of everybody else's."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from captured_tree import CapturedPath, capture_tree
from effort import kill_points
from failpoints import injected
from kernels import on_each_kernel
from killing import killed_at

from ringfence.errors import CallEndedError
from ringfence.runtime import RollbackReport
from ringfence.testing import HeldCall, held_call
from ringfence_sandbox import HostFilesystem, Workspace, is_reserved


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/e").mkdir(parents=True)
    (root / "a.txt").write_text("a\n")
    (root / "d/b.txt").write_text("b\n")
    (root / "d/e/c.txt").write_text("c\n")
    for path in ("a.txt", "d/e/c.txt", "d/b.txt", "d/e", "d", ""):
        os.utime(root / path, ns=(10**18, 10**18 + len(path)))
    return root


@on_each_kernel
def fs(root: Path, request: pytest.FixtureRequest) -> Iterator[HostFilesystem]:
    with HostFilesystem(root, store=root.parent / "store", can=request.param) as filesystem:
        yield filesystem


@pytest.fixture
def call(fs: HostFilesystem) -> Iterator[HeldCall]:
    with held_call(fs) as call:
        yield call


def without_held(root: Path) -> dict[str, CapturedPath]:
    return {path: one for path, one in capture_tree(root).items() if not path.startswith(".ringfence-hold")}


# Exactly


def change_a_lot(fs: HostFilesystem) -> None:
    fs.write("a.txt", "changed")
    fs.write("a.txt", " and changed", mode="append")
    fs.chmod("d/b.txt", 0o4755)
    fs.write("d/b.txt", "b")
    fs.move("d", "n/d")
    fs.write("n/d/e/c.txt", "")
    fs.write("n/d/e/new/f.txt", "f")
    fs.delete("n/d/e", recursive=True)
    fs.symlink("d", "n/d")
    fs.write("d/g.txt", "through a link")
    fs.delete("a.txt")
    fs.mkdir("a.txt/is/a/directory")


def test_everything_is_back_down_to_inodes_and_times(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    before = capture_tree(root)
    change_a_lot(fs.for_call(call))
    assert capture_tree(root).keys() != before.keys()
    assert call.rollback().conflicts == ()
    assert capture_tree(root) == before


def test_an_outer_rollback_takes_inner_calls_along(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    before = capture_tree(root)
    fs.for_call(call).write("a.txt", "outer")
    for number in range(2):
        middle = without_held(root)
        with held_call(fs, call_id=f"inner {number}", parent=call) as inner:
            change_a_lot(fs.for_call(inner))
            inner.rollback()
        assert without_held(root) == middle
    with held_call(fs, call_id="kept", parent=call) as inner:
        change_a_lot(fs.for_call(inner))
        inner.commit()
    fs.for_call(call).delete("n", recursive=True)
    call.rollback()
    assert capture_tree(root) == before


def test_hard_links_stay_together(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    os.link(root / "a.txt", root / "d/same")
    before = capture_tree(root)
    handle = fs.for_call(call)
    handle.write("a.txt", "changed")
    assert (root / "d/same").read_text() == "a\n"
    handle.delete("d/same")
    call.rollback()
    assert capture_tree(root) == before
    assert before["a.txt"].links == ("a.txt", "d/same")


def test_hard_links_that_calls_within_each_other_change_stay_together(root: Path, fs: HostFilesystem) -> None:
    os.link(root / "a.txt", root / "same")
    before = capture_tree(root)
    with held_call(fs) as outer:
        fs.for_call(outer).write("a.txt", "outer")
        with held_call(fs, parent=outer) as inner:
            fs.for_call(inner).delete("a.txt")
            fs.for_call(inner).write("same", "inner")
            assert inner.rollback().conflicts == ()
        assert (root / "a.txt").read_text() == "outer"
        assert outer.rollback().conflicts == ()
    assert capture_tree(root) == before


def test_a_name_that_moved_over_another_of_its_file_is_back(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    os.link(root / "a.txt", root / "d/hard")
    before = capture_tree(root)
    fs.for_call(call).move("a.txt", "d/hard", overwrite=True)
    fs.for_call(call).write("d/hard", "changed")
    assert call.rollback().conflicts == ()
    assert capture_tree(root) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda fs: fs.write("a.txt", "changed"),
        lambda fs: fs.write("a.txt", "more", mode="append"),
        lambda fs: fs.chmod("a.txt", 0o600),
        lambda fs: fs.delete("a.txt"),
        lambda fs: fs.move("d/b.txt", "a.txt", overwrite=True),
    ],
)
def test_nothing_is_written_through_to_a_name_outside(
    root: Path, fs: HostFilesystem, change: Callable[[HostFilesystem], None]
) -> None:
    cache = root.parent / "cache"
    os.link(root / "a.txt", cache)
    mode = cache.stat().st_mode
    for end in ("rollback", "commit"):
        with held_call(fs) as call:
            change(fs.for_call(call))
            getattr(call, end)()
        assert (cache.read_text(), cache.stat().st_mode) == ("a\n", mode)


def test_a_rollback_does_not_cost_what_a_file_weighs(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    with open(root / "huge", "wb") as file:
        file.truncate(1 << 40)
    handle = fs.for_call(call)
    handle.write("huge", "small")
    handle.move("d/b.txt", "huge", overwrite=True)
    [_, change] = call.changed()
    assert change.before is not None
    assert (change.before.size, change.before.content_hash) == (1 << 40, None)
    call.rollback()
    assert (root / "huge").stat().st_size == 1 << 40


def test_new_files_belong_to_the_group_of_their_directory(root: Path, fs: HostFilesystem) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can give a directory to any group")
    os.chown(root / "d", 0, 12345)
    os.chmod(root / "d", 0o2775)
    fs.write("d/new.txt", "x")
    assert (root / "d/new.txt").stat().st_gid == 12345


# Not what is somebody else's


def test_an_edit_by_somebody_else_to_another_path_stays(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    fs.for_call(call).write("a.txt", "call")
    (root / "d/b.txt").write_text("person")
    (root / "d/new.txt").write_text("person")
    report = call.rollback()
    assert report.conflicts == ()
    assert (root / "a.txt").read_text() == "a\n"
    assert (root / "d/b.txt").read_text() == (root / "d/new.txt").read_text() == "person"


def in_place(path: Path) -> None:
    path.write_text("person")


def replaced(path: Path) -> None:
    path.with_name("editor's").write_text("person")
    os.replace(path.with_name("editor's"), path)


def same_size_and_time(path: Path) -> None:
    found = path.stat()
    path.write_bytes(b"p" * found.st_size)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("edit", [in_place, replaced, same_size_and_time, os.unlink])
@pytest.mark.parametrize("twice", [False, True])
def test_an_edit_of_what_the_call_wrote_stays_and_is_reported(
    root: Path, fs: HostFilesystem, call: HeldCall, edit: Callable[[Path], None], twice: bool
) -> None:
    fs.for_call(call).write("a.txt", "call")
    if twice:
        fs.for_call(call).write("a.txt", "call again")
    edit(root / "a.txt")
    theirs = (root / "a.txt").read_bytes() if (root / "a.txt").exists() else None
    report = call.rollback()
    assert report.conflicts == ("a.txt",)
    assert ((root / "a.txt").read_bytes() if (root / "a.txt").exists() else None) == theirs
    [kept] = (root.parent / "store/kept").iterdir()
    assert kept.read_text() == "a\n"
    assert str(kept) in report.notes[0]


def test_a_directory_keeps_the_time_of_an_external_change(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    handle = fs.for_call(call)
    handle.write("d/b.txt", "call")
    handle.write("d/e/c.txt", "call")
    (root / "d/theirs.txt").write_text("person")
    theirs = (root / "d").stat().st_mtime_ns
    with held_call(fs, call_id="inner", parent=call) as inner:
        fs.for_call(inner).write("d/b.txt", "inner")
        (root / "d/e/theirs.txt").write_text("person")
        inner.rollback()
    within = (root / "d/e").stat().st_mtime_ns
    handle.delete("d/b.txt")
    handle.move("d", "moved")
    handle.write("moved/b.txt", "call")
    assert call.rollback().conflicts == ()
    assert [(root / path).stat().st_mtime_ns for path in ("d", "d/e", "")] == [theirs, within, 10**18]


def test_a_new_directory_with_somebody_else_s_file_stays(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    fs.for_call(call).write("n/new.txt", "call")
    (root / "n/theirs.txt").write_text("person")
    assert "n" in call.rollback().conflicts
    assert [path.name for path in (root / "n").iterdir()] == ["theirs.txt"]


def test_what_came_in_the_place_of_a_deleted_file_stays(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    fs.for_call(call).delete("d", recursive=True)
    (root / "d").write_text("person")
    report = call.rollback()
    assert report.conflicts == ("d",)
    assert (root / "d").read_text() == "person"
    [kept] = (root.parent / "store/kept").iterdir()
    assert (kept / "e/c.txt").read_text() == "c\n"


def test_a_file_put_into_a_moved_directory_goes_back_with_it(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    fs.for_call(call).move("d", "moved")
    (root / "moved/theirs.txt").write_text("person")
    assert call.rollback().conflicts == ()
    assert (root / "d/theirs.txt").read_text() == "person"


def test_what_came_in_the_way_of_a_move_back_stays(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    fs.for_call(call).move("a.txt", "moved.txt")
    (root / "a.txt").write_text("person")
    report = call.rollback()
    assert (report.conflicts, report.notes) == (("a.txt",), ("what was moved from a.txt is still at moved.txt",))
    assert ((root / "a.txt").read_text(), (root / "moved.txt").read_text()) == ("person", "a\n")


def test_a_moved_file_in_conflict_is_named_at_its_final_path(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    handle = fs.for_call(call)
    handle.move("d", "elsewhere/d")
    handle.move("a.txt", "elsewhere/d/e/moved")
    (root / "a.txt").write_text("person")
    assert call.rollback().notes == ("what was moved from a.txt is still at d/e/moved",)
    assert (root / "d/e/moved").read_text() == "a\n"


def test_a_moved_file_that_somebody_writes_into_stays_and_is_named(
    root: Path, fs: HostFilesystem, call: HeldCall
) -> None:
    fs.for_call(call).move("a.txt", "moved")
    (root / "moved").write_text("person, in place")
    report = call.rollback()
    assert set(report.conflicts) == {"a.txt", "moved"}
    assert report.notes == ("what was moved from a.txt is still at moved",)
    assert (root / "moved").read_text() == "person, in place"


def test_a_link_in_the_place_of_a_directory_is_not_followed(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    fs.for_call(call).write("d/b.txt", "call")
    (root / "d").rename(root / "gone")
    (outside / "b.txt").write_text("outside")
    os.symlink(outside, root / "d")
    assert call.rollback().conflicts == ("d/b.txt",)
    assert (outside / "b.txt").read_text() == "outside"


# The holding directory


def waiting(root: Path) -> list[Path]:
    """What is in the hold."""
    return [path for path in root.glob(".ringfence*/*") if path.name != ".gitignore"]


def test_displaced_files_are_hidden_and_gone_in_the_end(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    handle = fs.for_call(call)
    handle.write("a.txt", "call")
    [name] = [name for name in os.listdir(root) if name.startswith(".ringfence")]
    assert name not in [entry.name for entry in handle.list()]
    assert [match.path for match in handle.glob("**") if ".ringfence" in match.path] == []
    assert [match.path for match in handle.grep(".", path="")] == ["a.txt", "d/b.txt", "d/e/c.txt"]
    assert handle.glob(f"{name}/*") == handle.glob(f"{name}") == []
    handle.symlink("link", name)
    [inside] = [path.name for path in waiting(root)]
    for path in (name, f"{name}/{inside}", "link", f"link/{inside}"):
        assert not handle.exists(path) or path == "link"
        for use in (handle.read, handle.list, handle.stat, handle.delete, handle.mkdir):
            if path != "link" or use not in (handle.delete, handle.mkdir):
                with pytest.raises(PermissionError):
                    use(path)
        with pytest.raises((PermissionError, FileExistsError)):
            handle.write(f"{path}/x", "x")
    call.rollback()
    assert waiting(root) == []


def test_one_hold_stays_until_the_workspace_is_closed_and_git_does_not_see_it(root: Path, tmp_path: Path) -> None:
    def git(*words: str) -> bytes:
        command = ["git", f"--git-dir={tmp_path / 'git'}", f"--work-tree={root}", *words]
        return subprocess.run(command, cwd=root, check=True, capture_output=True).stdout

    git("init", "-q")
    before, untracked = capture_tree(root), git("status", "--short", "-uall")
    names = list[str]()
    with HostFilesystem(root, store=tmp_path / "s") as fs:
        fs.read("a.txt")
        assert not list(root.glob(".ringfence*"))
        for removed in (False, True, False):
            with held_call(fs) as call:
                fs.for_call(call).write("a.txt", "call")
                names += [path.name for path in root.glob(".ringfence*")]
                assert git("status", "--short", "-uall") == untracked
                call.rollback()
            assert waiting(root) == []
            if removed:
                git("clean", "-qfdX")
                os.utime(root, ns=(10**18, before[""].mtime_ns))
            assert capture_tree(root) == before
    assert (names[0], len(names)) == (names[1], 3)
    assert names[2] != names[0]
    assert capture_tree(root) == before


def test_a_call_that_only_reads_changes_nothing_not_even_for_a_moment(root: Path, tmp_path: Path) -> None:
    done: list[str] = []
    with injected(done.append), HostFilesystem(root, store=tmp_path / "s") as fs:
        with held_call(fs):  # the first one takes in the tree
            pass
        done.clear()
        for end in ("commit", "rollback"):
            with held_call(fs) as call:
                handle = fs.for_call(call)
                handle.read("a.txt")
                handle.list()
                handle.glob("**")
                handle.grep("c")
                assert call.changed() == []
                getattr(call, end)()
        assert done == []


def test_a_snapshot_restores_own_changes_and_leaves_others(root: Path, fs: HostFilesystem) -> None:
    before = capture_tree(root)
    snapshot = fs.snapshot()
    change_a_lot(fs)
    (root / "theirs.txt").write_text("person")
    fs.restore(snapshot)
    assert (root / "theirs.txt").read_text() == "person"
    (root / "theirs.txt").unlink()
    os.utime(root, ns=(10**18, 10**18))
    now = without_held(root)
    assert {path: (one.lasting, one.mtime_ns) for path, one in now.items()} == {
        path: (one.lasting, one.mtime_ns) for path, one in before.items()
    }


def test_snapshots_know_the_bits_of_the_root(root: Path, fs: HostFilesystem) -> None:
    before = fs.snapshot()
    fs.write("n", "new")  # which changes the time of the root, too
    fs.chmod("", 0o700)
    after = fs.snapshot()
    for snapshot, mode in ((before, 0o755), (after, 0o700), (before, 0o755)):
        fs.restore(snapshot)
        assert stat.S_IMODE(root.stat().st_mode) == mode


def test_a_chmod_does_not_take_what_somebody_has_written_for_the_calls(root: Path, fs: HostFilesystem) -> None:
    with held_call(fs) as call:
        fs.for_call(call).write("n", "the call's")
        with (root / "n").open("w") as file:
            file.write("a person's, and longer")
        with pytest.raises(OSError, match="changed by somebody else"):
            fs.for_call(call).chmod("n", 0o600)
        assert call.rollback().conflicts == ("n",)
    assert (root / "n").read_text() == "a person's, and longer"


def test_a_snapshot_makes_a_removed_directory_anew_around_the_very_files(root: Path, fs: HostFilesystem) -> None:
    snapshot, directory, file = fs.snapshot(), (root / "d").stat(), (root / "d/b.txt").stat()
    held_open = os.open(root / "d", os.O_RDONLY)  # or its inode's number might be given again
    fs.delete("d", recursive=True)
    fs.restore(snapshot)
    os.close(held_open)
    assert (root / "d/b.txt").stat().st_ino == file.st_ino
    assert (root / "d").stat().st_ino != directory.st_ino


def test_a_call_goes_on_after_a_nested_one_that_restored_snapshots_was_rolled_back(
    root: Path, fs: HostFilesystem
) -> None:
    before = fs.snapshot()
    fs.write("d/b.txt", "new")
    after = fs.snapshot()
    with held_call(fs, call_id="outer") as outer:
        for snapshot in (after, before):
            fs.for_call(outer).restore(snapshot)
        with held_call(fs, call_id="inner", parent=outer) as inner:
            for snapshot in (before, after):
                fs.for_call(inner).restore(snapshot)
            assert inner.rollback().conflicts == ()
        fs.for_call(outer).delete("d", recursive=True)
        assert "d/b.txt" in {change.path for change in outer.changed()}
        outer.commit()
    assert not (root / "d").exists()
    fs.restore(after)
    assert (root / "d/b.txt").read_text() == "new"


def delete_a_directory(fs: HostFilesystem) -> None:
    fs.delete("d", recursive=True)


def put_another_in_its_place(fs: HostFilesystem) -> None:
    fs.delete("d", recursive=True)
    fs.write("d/b.txt", "new")


def move_it_and_delete_it_there(fs: HostFilesystem) -> None:
    fs.move("d", "elsewhere")
    fs.delete("elsewhere", recursive=True)


@pytest.mark.parametrize("work", [delete_a_directory, put_another_in_its_place, move_it_and_delete_it_there])
@pytest.mark.parametrize("killed", [False, True])
def test_a_call_that_has_restored_a_directory_which_it_had_deleted_rolls_back(
    root: Path, tmp_path: Path, work: Callable[[HostFilesystem], None], killed: bool
) -> None:
    before = capture_tree(root)

    def run(here: Callable[[str], None]) -> None:
        with HostFilesystem(root, store=tmp_path / "s") as fs, held_call(fs) as call:
            handle = fs.for_call(call)
            snapshot = fs.snapshot()
            for _ in range(2):
                work(handle)
                handle.restore(snapshot)
            here("the end")
            assert call.rollback() == RollbackReport()

    assert killed_at(0 if killed else -1, run) == killed
    HostFilesystem(root, store=tmp_path / "s").close()
    assert capture_tree(root) == before


def test_what_somebody_put_into_a_directory_that_came_back_does_not_go_with_it(root: Path, fs: HostFilesystem) -> None:
    before = fs.snapshot()
    fs.mkdir("new")
    fs.delete("d", recursive=True)
    after = fs.snapshot()
    fs.restore(before)
    fs.restore(after)
    assert not (root / "d").exists()
    (root / "new/theirs.txt").write_text("person")
    fs.restore(before)
    assert (root / "new/theirs.txt").read_text() == "person"
    (root / "d/e/theirs.txt").write_text("person")
    fs.restore(after)
    assert (root / "d/e/theirs.txt").read_text() == "person"


def test_a_snapshot_restored_in_a_nested_call_costs_a_conflict_and_no_content(root: Path, tmp_path: Path) -> None:
    with HostFilesystem(root, store=tmp_path / "store") as fs, held_call(fs) as outer:
        snapshot = fs.snapshot()
        with held_call(fs, call_id="one", parent=outer) as one:
            fs.for_call(one).write("a.txt", "of the first\n")
            one.commit()
        with held_call(fs, call_id="two", parent=outer) as two:
            fs.for_call(two).restore(snapshot)
            fs.for_call(two).write("a.txt", "of the second\n")
            two.rollback()
        assert (root / "a.txt").read_text() == "of the first\n"
        report = outer.rollback()
    assert report.conflicts == ("a.txt",)
    [kept] = [path for path in (tmp_path / "store/kept").iterdir() if path.read_text() == "a\n"]
    assert str(kept) in " ".join(report.notes)


# A hold that was removed


def below(root: Path) -> dict[str, tuple[object, ...]]:
    return {path: (one.lasting, one.mtime_ns) for path, one in capture_tree(root).items() if path}


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_removed_hold_had_comes_back_from_the_history(root: Path, killed: bool) -> None:
    os.symlink("a.txt", root / "link")
    before = below(root)

    def work(at: Callable[[str], None]) -> None:
        with HostFilesystem(root, store=root.parent / "store") as fs, held_call(fs) as call:
            handle = fs.for_call(call)
            handle.write("a.txt", "of the call\n")
            handle.delete("link")
            handle.chmod("d", 0o700)
            shutil.rmtree(next(path for path in root.iterdir() if is_reserved(path.name)))
            at("removed")
            with pytest.raises(OSError, match="removed"):
                handle.write("more", "x")
            report = call.rollback()
            assert report.conflicts == ()
            assert "lost" not in " ".join(report.notes)

    if killed:
        assert killed_at(0, work)
    else:
        work(lambda _: None)
    with HostFilesystem(root, store=root.parent / "store") as fs:
        assert fs.recovered is None or fs.recovered.conflicts == ()
    assert below(root) == before


# Failing system calls


@pytest.mark.parametrize("committing", [False, True])
def test_a_call_that_meets_an_error_anywhere_is_rolled_back(root: Path, committing: bool) -> None:
    for point in kill_points(3):
        calls = 0

        def before(name: str, point: int = point) -> None:
            nonlocal calls
            calls += name != "utime"  # which nothing but permissions can make fail
            if calls == point + 1 and name != "utime":
                raise OSError(errno.ENOSPC, "no space", name)

        tree = capture_tree(root)
        store = root.parent / f"store-{point}"
        Workspace.open(root, store=store).close()
        with injected(before):
            try:
                fs = HostFilesystem(root, store=store)
            except OSError:
                continue
            failed = False
            with fs, held_call(fs) as call:
                try:
                    change_a_lot(fs.for_call(call))
                    if committing:
                        call.commit()
                except OSError:
                    failed = True
                if not failed and committing:
                    assert calls > 20
                    return
                try:
                    call.rollback()
                except OSError:
                    call.rollback()
        HostFilesystem(root, store=store).close()  # which drops what could not be dropped then
        assert capture_tree(root) == tree, point
        if calls < point:
            return


def test_an_operation_that_fails_half_way_is_undone_at_once(root: Path, tmp_path: Path) -> None:
    tree = capture_tree(root)
    countdown = [-1]

    def before(name: str) -> None:
        countdown[0] -= 1
        if countdown[0] == 0 and name != "utime":
            raise OSError(errno.ENOSPC, "no space", name)

    with injected(before), HostFilesystem(root, store=tmp_path / "s") as fs, held_call(fs) as call:
        for point in range(1, 1000):
            countdown[0] = point
            try:
                fs.for_call(call).write("n/o/p.txt", "x")
            except OSError:
                assert not (root / "n").exists()
                assert call.changed() == []
            if countdown[0] > 0:
                break
            fs.for_call(call).delete("n", recursive=True) if (root / "n").exists() else None
        assert point > 4
        countdown[0] = 0
        call.rollback()
    assert capture_tree(root) == tree


def test_a_conflict_of_an_inner_call_is_one_of_the_outer_too(root: Path, fs: HostFilesystem, call: HeldCall) -> None:
    with held_call(fs, call_id="inner", parent=call) as inner:
        fs.for_call(inner).delete("d", recursive=True)
        (root / "d").write_text("person")
        assert inner.rollback().conflicts == ("d",)
    with held_call(fs, call_id="the next", parent=call) as following:
        fs.for_call(following).write("a.txt", "changed")
        assert following.rollback().conflicts == ()
    assert call.rollback().conflicts == ("d",)


def test_after_closing_nothing_goes_through_any_more(root: Path, tmp_path: Path) -> None:
    fs = HostFilesystem(root, store=tmp_path / "s")
    with held_call(fs) as call:
        fs.for_call(call).write("a.txt", "open")
        fs.close()
        fs.close()
        assert (root / "a.txt").read_text() == "a\n"
        for use in (fs.read, fs.list, lambda path: fs.write(path, "x")):
            with pytest.raises((ValueError, CallEndedError)):
                use("a.txt")


# Races


def test_a_link_swapped_in_never_leads_a_write_outside(root: Path, fs: HostFilesystem) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "b.txt").write_text("outside")
    (root / "swapped").mkdir()
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            with suppress(OSError):  # a directory that the filesystem made meanwhile
                os.rename(root / "swapped", root / "aside")
            with suppress(OSError):
                os.symlink(outside, root / "swapped")
                os.unlink(root / "swapped")
            with suppress(OSError):
                os.rename(root / "aside", root / "swapped")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(300):
            try:
                fs.write("swapped/b.txt", str(number))
                fs.read("swapped/b.txt")
                fs.delete("swapped/b.txt")
            except OSError:
                pass
    finally:
        stop.set()
        thread.join()
    assert [path.name for path in outside.iterdir()] == ["b.txt"]
    assert (outside / "b.txt").read_text() == "outside"
    assert waiting(root) == []


# Cost

COUNTED = """
import os, sys
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace, is_reserved
with HostFilesystem(sys.argv[1], store=sys.argv[2]) as fs:
    def one_call(number):
        with held_call(fs) as call:
            fs.for_call(call).read("d0/f0")
            fs.for_call(call).write("d0/f0", str(number))
            call.changed()
            call.commit()
    def read_only_call(number):
        with held_call(fs) as call:
            fs.for_call(call).read("d0/f0")
            call.commit()
    for work in (one_call, read_only_call):
        work(0)
        os.access("/counted from here", 0)
        work(1)
        os.access("/counted to here", 0)
"""


def system_calls(root: Path, files: int) -> list[list[str]]:
    for number in range(files):
        (root / f"d{number % 10}").mkdir(parents=True, exist_ok=True)
        (root / f"d{number % 10}/f{number}").write_text("x")
    log = root.parent / "log"
    command = ["strace", "-f", "-o", str(log), sys.executable, "-c", COUNTED, str(root), str(root.parent / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"strace does not work here: {done.stderr[-200:]}")
    found: list[list[str]] = []
    for part in log.read_text().split("/counted from here")[1:]:
        lines = part.split("/counted to here")[0].splitlines()[1:-1]
        names = [line.split(maxsplit=1)[1].partition("(")[0] for line in lines]
        found.append([name for name in names if name not in ("brk", "mmap", "munmap", "futex", "madvise")])
    return found


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace counts the system calls")
def test_a_call_makes_the_same_system_calls_however_many_files_there_are(tmp_path: Path) -> None:
    few, many = (system_calls(tmp_path / str(files) / "root", files) for files in (10, 3000))
    assert few == many
    assert [len(calls) for calls in few] < [90, 15], few
