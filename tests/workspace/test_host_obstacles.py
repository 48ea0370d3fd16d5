"""Trees that resist: other filesystems mounted in them, and files that may not be read. Said, undone, never lost."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree
from killing import as_nobody, killed_at
from mounts import mounted

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

Change = Callable[[HostFilesystem], object]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/mnt").mkdir(parents=True)
    (root / "beside").mkdir()
    (root / "a.txt").write_text("a\n")
    (root / "d/b.txt").write_text("b\n")
    return root


@pytest.fixture(params=["another filesystem", "the same one"])
def mount(root: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    elsewhere = root.parent / "else where"
    elsewhere.mkdir()
    bound = request.param == "the same one"
    options = ("--bind", str(elsewhere)) if bound else ("-t", "tmpfs", "-o", "size=1m", "test")
    with mounted(root / "d/mnt", *options):
        (root / "d/mnt/in").mkdir()
        (root / "d/mnt/in/x").write_text("precious\n")
        yield root / "d/mnt"


def test_a_call_in_a_directory_that_was_removed_fails_and_says_so(root: Path) -> None:
    with Workspace.open(root) as workspace:
        shutil.rmtree(root)
        (root / "d").mkdir(parents=True)
        with pytest.raises(FileNotFoundError, match="was removed while it was open"):
            call(workspace.filesystem, lambda fs: fs.write("n", ""), "commit")


@pytest.mark.parametrize("opaque", [False, True])
def test_a_call_in_a_directory_that_another_one_is_in_the_place_of_fails_and_says_so(root: Path, opaque: bool) -> None:
    with Workspace.open(root) as workspace:
        root.rename(root.with_name("moved"))
        with held_call(workspace.filesystem) as held:  # nobody works in another one yet
            workspace.filesystem.for_call(held).write("n", "")
            held.commit()
        root.mkdir()
        with (
            pytest.raises(FileNotFoundError, match="was moved away while it was open"),
            held_call(workspace.filesystem, opaque=opaque),
        ):
            pytest.fail("it has begun")


def call(fs: HostFilesystem, change: Change, end: str) -> None:
    with held_call(fs) as held:
        try:
            change(fs.for_call(held))
            getattr(held, end)()
        except BaseException:
            held.rollback()
            raise


ACROSS: dict[str, tuple[int, Change]] = {
    "delete what is mounted": (errno.EBUSY, lambda fs: fs.delete("d/mnt", recursive=True)),
    "delete a directory above": (errno.EBUSY, lambda fs: fs.delete("d", recursive=True)),
    "move a directory above": (errno.EBUSY, lambda fs: fs.move("d", "e")),
    "move into it": (errno.EXDEV, lambda fs: fs.move("a.txt", "d/mnt/a.txt")),
    "move a directory into it": (errno.EXDEV, lambda fs: fs.move("beside", "d/mnt/in/beside")),
    "move out of it": (errno.EXDEV, lambda fs: fs.move("d/mnt/in", "in")),
    "move out of it over a file": (errno.EXDEV, lambda fs: fs.move("d/mnt/in/x", "a.txt", overwrite=True)),
    "write in it": (errno.EXDEV, lambda fs: fs.write("d/mnt/in/x", "ours")),
    "make a file in it": (errno.EXDEV, lambda fs: fs.write("d/mnt/new/y", "ours")),
    "delete a file in it": (errno.EXDEV, lambda fs: fs.delete("d/mnt/in/x")),
    "make a link in it": (errno.EXDEV, lambda fs: fs.symlink("d/mnt/link", "in")),
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_crosses_a_mount_point_fails_and_rolls_back_exactly(root: Path, mount: Path, name: str) -> None:
    code, change = ACROSS[name]
    before = capture_tree(root)
    with HostFilesystem(root, store=root.parent / "store") as fs:
        with pytest.raises(OSError, match="mounted") as caught:
            call(fs, lambda fs: (fs.write("a.txt", "changed"), fs.write("d/new", "x"), change(fs)), "commit")
        assert caught.value.errno == code
        assert capture_tree(root) == before
        call(fs, lambda fs: (fs.mkdir("d/mnt/made"), fs.chmod("d/mnt/in/x", 0o600), fs.delete("d/b.txt")), "rollback")
    assert capture_tree(root) == before


def test_what_is_mounted_is_never_removed_with_what_is_held(root: Path, mount: Path) -> None:
    """Somebody mounts it in a directory that a call had deleted, before the call ends."""
    options = ("--bind", str(mount))
    with HostFilesystem(root, store=root.parent / "store") as fs:
        with held_call(fs) as held:
            fs.for_call(held).delete("beside")
            [displaced] = root.glob(".ringfence*/[0-9]*")
            with mounted(displaced, *options):
                held.commit()
        assert (mount / "in/x").read_text() == "precious\n"


def test_a_mount_that_a_program_moved_stays_and_the_rest_is_rolled_back(root: Path, mount: Path) -> None:
    with HostFilesystem(root, store=root.parent / "store") as fs:
        with held_call(fs, opaque=True) as held:
            (root / "a.txt").write_text("changed\n")
            (root / "d").rename(root / "e")
            report = held.rollback()
        assert report.conflicts == ()
        assert {"d/mnt is not as before", "e/mnt is not covered"} <= {
            note.partition(" the call")[0].partition(":")[0] for note in report.notes
        }
    assert (root / "a.txt").read_text() == "a\n"
    assert (root / "d/b.txt").read_text() == "b\n"
    assert (root / "e/mnt/in/x").read_text() == "precious\n"
    (root / "d/b.txt").rename(root / "e/b.txt")
    (root / "e").rename(root / "d")


@pytest.fixture
def subvolumes(root: Path) -> Iterator[Path]:
    """A tree on btrfs with two subvolumes in it, whose files have the same inode numbers."""
    if not (shutil.which("mkfs.btrfs") and shutil.which("btrfs")):
        pytest.skip("btrfs-progs are not here")
    image, place = root.parent / "image", root.parent / "btrfs"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(120 << 20)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    with mounted(place, "-o", "loop", str(image)):
        (place / "root").mkdir()
        for name in ("one", "two"):
            subprocess.run(["btrfs", "subvolume", "create", place / "root" / name], check=True, capture_output=True)
            (place / "root" / name / "f").write_text(name)
            os.link(place / "root" / name / "f", place / "root" / name / "g")
        yield place / "root"


def test_files_of_subvolumes_are_not_one_file_because_their_inodes_have_one_number(subvolumes: Path) -> None:
    before = capture_tree(subvolumes)
    assert before["one/f"].inode == before["two/f"].inode
    with Workspace.open(subvolumes, store=subvolumes.parents[1] / "store") as workspace:
        with held_call(workspace.filesystem, opaque=True) as held:
            subprocess.run(["sh", "-ec", "echo more >> one/f; mv one ONE"], cwd=subvolumes, check=True)
            held.rollback()
        assert capture_tree(subvolumes)["two/f"].mtime_ns == before["two/f"].mtime_ns
        assert "two" not in {path.read_text() for path in subvolumes.glob("[oO]*/?")}


# A lower layer of an overlay


@pytest.fixture
def layered(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root that is in a lower layer, as what an image of a container has."""
    os.link(root / "a.txt", root / "d/another name")
    for name in ("upper", "work", "whole"):
        (root.parent / name).mkdir()
    lower = tmp_path_factory.mktemp("lower")
    root.rename(lower / "root")
    options = f"lowerdir={lower},upperdir={root.parent}/upper,workdir={root.parent}/work"
    with mounted(root.parent / "whole", "-t", "overlay", "overlay", "-o", options):
        yield root.parent / "whole/root"


def without_twins(root: Path) -> dict[str, object]:
    """An overlay parts the names of one file with its first change."""
    return {path: (one.lasting, one.mtime_ns) for path, one in capture_tree(root).items()}


OF_LAYERS: dict[str, Change] = {
    "write": lambda fs: fs.write("a.txt", "ours"),
    "make": lambda fs: fs.write("d/new", "ours"),
    "move": lambda fs: fs.move("a.txt", "moved"),
    "permissions": lambda fs: fs.chmod("d/b.txt", 0o600),
}


@pytest.mark.parametrize("name", OF_LAYERS)
@pytest.mark.parametrize("killed", [False, True], ids=["rolled back", "killed"])
def test_what_is_in_a_lower_layer_comes_back(layered: Path, name: str, killed: bool) -> None:
    before = without_twins(layered)

    def work(announce: Callable[[str], None]) -> None:
        with HostFilesystem(layered, store=layered.parents[1] / "store") as fs, held_call(fs) as held:
            OF_LAYERS[name](fs.for_call(held))
            announce("the end")
            assert held.rollback().conflicts == ()

    assert killed_at(0 if killed else -1, work) == killed
    with HostFilesystem(layered, store=layered.parents[1] / "store") as fs:
        assert (fs.recovered is not None and fs.recovered.outcome == "rolled back") == killed
    assert without_twins(layered) == before


# What may not be read


@pytest.fixture
def shut(root: Path) -> Iterator[Path]:
    """A tree with a file and a directory that only the superuser may read."""
    (root / "file").write_text("secret\n")
    (root / "file").chmod(0)
    (root / "d/shut").mkdir()
    (root / "d/shut/x").write_text("secret too\n")
    (root / "d/shut").chmod(0)
    yield root
    for path in (root / "d/shut", root / "e/shut", root / "file"):
        if path.exists():
            path.chmod(0o700)


UNREADABLE: dict[str, Change] = {
    "delete the file": lambda fs: fs.delete("file"),
    "replace the file": lambda fs: fs.move("a.txt", "file", overwrite=True),
    "write the file": lambda fs: fs.write("file", "ours"),
    "append to the file": lambda fs: fs.write("file", "ours", mode="append"),
    "delete the directory": lambda fs: fs.delete("d/shut", recursive=True),
    "delete one above": lambda fs: fs.delete("d", recursive=True),
    "move one above": lambda fs: fs.move("d", "e"),
    "write into it": lambda fs: fs.write("d/shut/x", "ours"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_cannot_be_lost(shut: Path, name: str) -> None:
    before = capture_tree(shut)

    def work() -> None:
        with Workspace.open(shut, store=shut.parent / "store") as workspace:
            assert workspace.left_out == {"file": "unreadable", "d/shut": "unreadable"}
            with pytest.raises(PermissionError):
                call(workspace.filesystem, lambda fs: (fs.write("a.txt", "x"), UNREADABLE[name](fs)), "commit")
            assert workspace.steps() == []

    as_nobody(work, shut.parent)
    now = capture_tree(shut)
    assert {path: (one.inode, one.content, one.mode, one.mtime_ns) for path, one in now.items()} == {
        path: (one.inode, one.content, one.mode, one.mtime_ns) for path, one in before.items()
    }


def test_what_cannot_be_read_breaks_no_listing_and_stays_beside_changes(shut: Path) -> None:
    def work() -> None:
        with Workspace.open(shut, store=shut.parent / "store") as workspace:
            fs = workspace.filesystem
            assert [entry.path for entry in fs.list()] == ["a.txt", "beside", "d", "file"]
            assert [match.path for match in fs.glob("**")] == [
                "a.txt",
                "beside",
                "d",
                "d/b.txt",
                "d/mnt",
                "d/shut",
                "file",
            ]
            assert [match.path for match in fs.grep(".")] == ["a.txt", "d/b.txt"]
            for use in (fs.read, fs.content_hash):
                with pytest.raises(PermissionError):
                    use("file")
            call(fs, lambda fs: (fs.write("d/b.txt", "ours"), fs.move("file", "moved")), "rollback")
            call(fs, lambda fs: fs.write("d/b.txt", "ours\n"), "commit")
            assert workspace.undo().outcomes == {"d/b.txt": "restored"}
            assert workspace.restore(0).outcomes == {}

    as_nobody(work, shut.parent)
    (shut / "file").chmod(0o600)
    (shut / "d/shut").chmod(0o700)
    assert ((shut / "file").read_text(), (shut / "d/shut/x").read_text()) == ("secret\n", "secret too\n")


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o400, 0o500])
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("path", ["", "d"], ids=["the root", "a directory"])
def test_a_program_that_shuts_directories_is_rolled_back(root: Path, mode: int, end: str, path: str) -> None:
    before = {path: (one.content, one.mode, one.mtime_ns) for path, one in capture_tree(root).items()}

    def work() -> None:
        with Workspace.open(root, store=root.parent / "store") as workspace:
            with held_call(workspace.filesystem, opaque=True) as held:
                (root / "d/b.txt").write_text("two\n")
                (root / "new").write_text("")
                (root / path).chmod(mode)
                held.commit() if end == "commit" else held.rollback()
            assert workspace.filesystem.exists("new") == (end == "commit")
        Workspace.open(root, store=root.parent / "store").close()

    as_nobody(work, root.parent)
    if end == "commit":
        assert stat.S_IMODE((root / path).stat().st_mode) == (mode if path else mode | 0o500)
    else:
        assert {path: (one.content, one.mode, one.mtime_ns) for path, one in capture_tree(root).items()} == before


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("end", ["rollback", "close"])
def test_what_a_call_has_written_and_may_not_read_is_taken_back(root: Path, end: str, opaque: bool) -> None:
    def work() -> None:
        files = HostFilesystem(root, store=root.parent / "store")
        with files, held_call(files, opaque=opaque) as held:
            ours = files.for_call(held)
            ours.chmod("a.txt", 0o200)
            ours.write("a.txt", "for others to read")
            if end == "rollback":
                assert held.rollback().conflicts == ()

    before = capture_tree(root)
    as_nobody(work, root.parent)
    now, was = capture_tree(root)["a.txt"], before["a.txt"]
    assert (now.content, now.mode, now.mtime_ns) == (was.content, was.mode, was.mtime_ns)


@pytest.mark.parametrize(
    "change", [lambda fs: fs.write("a.txt", "x"), lambda fs: fs.delete("a.txt"), lambda fs: fs.move("a.txt", "b.txt")]
)
def test_a_file_that_can_only_be_appended_to_stays_and_is_named(root: Path, change: Change) -> None:
    if os.geteuid() != 0 or subprocess.run(["chattr", "+a", root / "a.txt"], capture_output=True).returncode:
        pytest.skip("only root, on a filesystem that has such attributes, gives them")
    try:
        with HostFilesystem(root) as fs, pytest.raises(PermissionError, match="lsattr.*'a.txt'"):
            call(fs, change, "commit")
        assert (root / "a.txt").read_text() == "a\n"
    finally:
        subprocess.run(["chattr", "-a", root / "a.txt"], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a directory that is another's")
def test_a_file_of_another_in_a_sticky_directory_stays_and_is_named(root: Path) -> None:
    os.chmod(root, 0o1777)
    os.chmod(root / "a.txt", 0o666)
    (store := root.parent / "store").mkdir()

    def work() -> None:
        with HostFilesystem(root, store=store) as fs:
            for change in (lambda: fs.delete("a.txt"), lambda: fs.write("a.txt", "x")):
                with pytest.raises(PermissionError, match="sticky: 'a.txt'"):
                    change()

    as_nobody(work, store)
    assert (root / "a.txt").read_text() == "a\n"


def test_a_directory_that_may_be_listed_and_not_searched_is_not_empty(root: Path) -> None:
    def work() -> None:
        with Workspace.open(root, store=root.parent / "store") as workspace:
            assert "d" in {entry.name for entry in workspace.filesystem.list()}
            with pytest.raises(PermissionError) as refused:
                workspace.filesystem.list("d")
            assert refused.value.filename == "d"

    (root / "d").chmod(0o444)
    try:
        as_nobody(work, root.parent)
    finally:
        (root / "d").chmod(0o755)


def test_a_root_that_cannot_be_written_is_said(shut: Path) -> None:
    def work() -> None:
        with (
            Workspace.open(shut, store=shut.parent / "store") as workspace,
            pytest.raises(PermissionError, match=r"the root of the workspace cannot be written .*: give this user"),
        ):
            call(workspace.filesystem, lambda fs: fs.write("a.txt", "x"), "commit")

    shut.chmod(0o555)
    try:
        as_nobody(work, shut.parent)
    finally:
        shut.chmod(0o755)
