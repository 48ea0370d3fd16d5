"""What undo and restore bring back besides bytes: times, owners, and which files are one file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from captured_tree import capture_tree, shape
from killing import as_nobody

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files to others")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/e").mkdir(parents=True)
    (root / "a.txt").write_text("a\n")
    os.link(root / "a.txt", root / "d/same")
    os.link(root / "a.txt", root / "d/e/too")
    (root / "d/b.sh").write_text("b\n")
    (root / "d/b.sh").chmod(0o755)
    os.symlink("a.txt", root / "link")
    os.utime(root / "link", ns=(10**18, 10**18 + 7), follow_symlinks=False)
    for n, path in enumerate(("a.txt", "d/b.sh", "d/e", "d", "")):
        os.utime(root / path, ns=(10**18, 10**18 + n))
    return root


def call(workspace: Workspace, change: Callable[[HostFilesystem], object]) -> None:
    with held_call(workspace.filesystem, call_id=f"call-{len(workspace.steps()) + 1}") as held:
        change(workspace.filesystem.for_call(held))
        held.commit()


def replaced_all(fs: HostFilesystem) -> None:
    fs.delete("d", recursive=True)
    fs.write("d", "a file now")
    fs.delete("a.txt")
    fs.delete("link")
    fs.symlink("link", "d")


CHANGES: dict[str, Callable[[HostFilesystem], object]] = {
    "one name written": lambda fs: fs.write("a.txt", "ours\n"),
    "one name deleted": lambda fs: fs.delete("d/same"),
    "two names written": lambda fs: (fs.write("d/same", "x"), fs.write("a.txt", "y")),
    "a directory deleted": lambda fs: fs.delete("d", recursive=True),
    "all of it replaced": replaced_all,
    "bits": lambda fs: fs.chmod("d/b.sh", 0o600),
    "bits of one name": lambda fs: fs.chmod("d/same", 0o600),
    "a new file in a directory": lambda fs: fs.write("d/e/new", "x"),
    "a symlink": lambda fs: (fs.delete("link"), fs.symlink("link", "d/e")),
    "moved away": lambda fs: fs.move("d", "n/d"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("way", ["undo", "restore"])
def test_times_and_names_of_one_file_come_back(workspace: Workspace, root: Path, name: str, way: str) -> None:
    before = shape(root)
    call(workspace, CHANGES[name])
    assert shape(root) != before
    done = workspace.undo() if way == "undo" else workspace.restore(0)
    assert done.notes == ()
    assert shape(root) == before
    workspace.undo()
    workspace.undo()
    assert shape(root) == before


def test_several_steps_are_undone_to_the_same_files(workspace: Workspace, root: Path) -> None:
    before = shape(root)
    for change in ("one name written", "bits", "a new file in a directory", "moved away"):
        call(workspace, CHANGES[change])
    workspace.undo(4)
    assert shape(root) == before


def touched(root: Path) -> None:
    os.utime(root / "d/b.sh", ns=(3, 3))


def parted(root: Path) -> None:
    (root / "d/same").unlink()
    (root / "d/same").write_text("a\n")
    os.utime(root / "d/same", ns=(10**18, 10**18))


def joined(root: Path) -> None:
    os.link(root / "d/b.sh", root / "d/new")
    os.replace(root / "d/new", root / "d/e/one")


def time_of_a_directory(root: Path) -> None:
    os.utime(root / "d/e", ns=(5, 5))


@pytest.mark.parametrize("change", [touched, parted, joined, time_of_a_directory])
@pytest.mark.parametrize("opaque", [True, False], ids=["by a command", "by somebody else"])
def test_what_a_restore_changed_of_times_and_names_alone_comes_back_with_its_undo(
    workspace: Workspace, root: Path, change: Callable[[Path], None], opaque: bool
) -> None:
    first = shape(root)
    with held_call(workspace.filesystem, opaque=True) as held:
        if opaque:
            change(root)
        (root / "link").unlink()
        held.commit()
    if not opaque:
        change(root)
    changed = shape(root)
    workspace.restore(0)
    assert shape(root) == first
    workspace.undo()
    assert shape(root) == changed
    workspace.undo()
    assert shape(root) == first


def test_a_directory_whose_time_a_command_has_set_back_keeps_it_in_an_undo(workspace: Workspace, root: Path) -> None:
    before = shape(root)
    with held_call(workspace.filesystem, opaque=True) as held:
        (root / "d/e/new").write_text("unpacked")
        os.utime(root / "d/e", ns=(before["d/e"].mtime_ns, before["d/e"].mtime_ns))
        held.commit()
    after = shape(root)
    workspace.undo()
    assert shape(root) == before
    workspace.undo()
    assert shape(root) == after


def test_a_name_that_somebody_wrote_to_since_is_not_tied_to_it_again(workspace: Workspace, root: Path) -> None:
    call(workspace, CHANGES["one name written"])
    (root / "d/same").write_text("theirs\n")  # and so d/e/too, which is still the same file
    workspace.undo()
    assert (root / "a.txt").read_text() == "a\n"
    assert (root / "d/same").read_text() == (root / "d/e/too").read_text() == "theirs\n"
    assert capture_tree(root)["a.txt"].links == ("a.txt",)


def test_what_a_merge_made_is_as_new_as_it_is(workspace: Workspace, root: Path) -> None:
    (root / "text").write_text("one\ntwo\nthree\nfour\nfive\n")
    os.utime(root / "text", ns=(10**18, 10**18))
    call(workspace, lambda fs: fs.write("text", "ONE\ntwo\nthree\nfour\nfive\n"))
    (root / "text").write_text("ONE\ntwo\nthree\nfour\nFIVE\n")
    os.utime(root / "text", ns=(10**18, 10**18 + 5))
    workspace.undo()
    assert (root / "text").read_text() == "one\ntwo\nthree\nfour\nFIVE\n"
    assert (root / "text").stat().st_mtime_ns > 10**18 + 5


@as_root
@pytest.mark.parametrize("name", ["one name written", "a directory deleted", "all of it replaced", "moved away"])
def test_owners_come_back(root: Path, name: str) -> None:
    for path, owner in (
        ("d/b.sh", (1234, 1235)),
        ("d/e", (1236, 1237)),
        ("d", (1, 2)),
        ("a.txt", (3, 4)),
        ("link", (5, 6)),
    ):
        os.chown(root / path, *owner, follow_symlinks=False)
    os.chmod(root / "d/b.sh", 0o6751)
    with Workspace.open(root, store=root.parent / "store") as workspace:
        before = shape(root)
        call(workspace, CHANGES[name])
        assert workspace.undo().notes == ()
    assert shape(root) == before


def test_an_edit_parts_a_hard_link_from_its_twin_and_an_undo_joins_them(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("one\n")
    os.link(root / "a", root / "b")
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        with held_call(workspace.filesystem) as held:
            workspace.filesystem.for_call(held).write("a", "two\n")
            held.commit()
        assert ((root / "a").read_text(), (root / "b").read_text()) == ("two\n", "one\n")
        assert workspace.restore(0).outcomes == {"a": "restored"}
    assert os.path.samefile(root / "a", root / "b")


def test_steps_that_moved_a_name_of_a_file_with_others_are_undone_together(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    call(workspace, lambda fs: fs.move("d/same", "a"))
    call(workspace, lambda fs: fs.write("other", "x"))
    assert workspace.undo(2).outcomes["d/same"] == "restored"
    assert shape(root) == before


def test_steps_that_parted_two_names_of_a_file_one_after_the_other_are_undone_together(
    root: Path, workspace: Workspace
) -> None:
    before = shape(root)
    call(workspace, lambda fs: fs.chmod("a.txt", 0o600))
    call(workspace, lambda fs: fs.delete("d/same"))
    workspace.look()
    call(workspace, lambda fs: fs.move("d/e/too", "a"))
    workspace.undo(3)
    assert shape(root) == before


def test_a_sparse_file_comes_back_without_its_holes(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with open(root / "sparse", "wb") as file:
        file.truncate(1 << 20)
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        with held_call(workspace.filesystem) as held:
            workspace.filesystem.for_call(held).delete("sparse")
            held.commit()
        workspace.undo()
    assert (root / "sparse").read_bytes() == bytes(1 << 20)
    assert (root / "sparse").stat().st_blocks * 512 >= 1 << 20


def test_an_undo_restores_the_time_of_an_unchanged_file(workspace: Workspace, root: Path) -> None:
    before = shape(root)
    call(workspace, lambda fs: (fs.write("d/b.sh", "b\n"), fs.write("d/same", "a\n"), fs.write("new", "n\n")))
    assert workspace.steps()[-1].paths == ("new",)
    assert workspace.undo().outcomes == {"new": "removed"}
    assert shape(root) == before


def test_what_a_call_made_newer_is_somebody_else_s_where_they_had_changed_it(workspace: Workspace, root: Path) -> None:
    (root / "d/b.sh").write_text("theirs\n")
    call(workspace, lambda fs: (fs.write("d/b.sh", "theirs\n"), fs.write("new", "n\n")))
    assert workspace.undo().outcomes == {"new": "removed"}
    assert (root / "d/b.sh").read_text() == "theirs\n"
    assert [entry.paths for entry in workspace.log() if entry.kind == "external"] == [("d/b.sh",)]


@as_root
def test_what_may_not_be_given_to_another_user_is_said(root: Path) -> None:
    (root / "d/foreign").write_text("x")
    os.chown(root / "d/foreign", 1234, 1234)
    (root / "d/foreign").chmod(0o4755)

    def work() -> None:
        with Workspace.open(root, store=root.parent / "store") as workspace:
            call(workspace, lambda fs: fs.delete("d/foreign"))
            done = workspace.undo()
            assert done.outcomes == {"d/foreign": "restored"}
            assert done.notes == ("d/foreign is not given back to user 1234 and group 1234",)

    as_nobody(work, root.parent, foreign={"foreign"})
    found = capture_tree(root)["d/foreign"]
    assert (found.owner, found.mode) == ((65534, 65534), 0o755)


@as_root
def test_in_a_directory_of_somebody_else_all_is_brought_back_but_what_only_its_owner_may_set(root: Path) -> None:
    (root / "foreign").mkdir(mode=0o777)
    (root / "foreign").chmod(0o777)
    (root / "foreign/b").write_text("b")

    def work() -> None:
        with Workspace.open(root, store=root.parent / "store") as workspace:
            call(workspace, lambda fs: (fs.write("foreign/b", "changed"), fs.write("foreign/new", "new")))
            done = workspace.restore(0)
            assert done.outcomes == {"foreign/b": "restored", "foreign/new": "removed"}
            assert done.notes == ("the time of foreign cannot be brought back, it is another user's",)

    as_nobody(work, root.parent, foreign={"foreign"})
    assert {path.name: path.read_text() for path in (root / "foreign").iterdir()} == {"b": "b"}
