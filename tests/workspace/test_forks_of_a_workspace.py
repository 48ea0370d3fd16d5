"""Forks: directories with a history of their own that borrow the objects of the workspace that they left."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree, shape
from failpoints import injected
from mounts import small_disk
from real_git import fsck, git, needs_git, repository

from ringfence.errors import WorkspaceLockedError
from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace, forget_store, stores


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root) as opened:
        yield opened


def write(workspace: Workspace, path: str, content: str) -> None:
    with workspace.transaction("write", opaque=False):
        workspace.filesystem.write(path, content)


def a_rich_tree(root: Path) -> None:
    (root / "src").mkdir(parents=True)
    (root / "src/main.py").write_text("print()\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "empty/in").mkdir(parents=True)
    (root / "node_modules/x").mkdir(parents=True)
    (root / "node_modules/x/index.js").write_text("x\n")
    (root / ".gitignore").write_text("node_modules\n")
    (root / "link").symlink_to("src/main.py")
    (root / "dangling").symlink_to("nowhere")
    os.link(root / "src/main.py", root / "src/same.py")
    (root / "closed").mkdir()
    (root / "closed/a").write_text("a\n")
    (root / "closed").chmod(0o555)
    with (root / "sparse").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(2 << 20)
        file.write(b"in the middle")
    (root / "large").write_bytes(os.urandom(1 << 18))
    (root / "nested").mkdir()
    for path in ("src/main.py", "empty", "link"):
        os.utime(root / path, ns=(10**18, 10**18 + 7), follow_symlinks=False)


def test_a_fork_has_all_of_the_tree_and_shares_no_inode(root: Path, workspace: Workspace) -> None:
    a_rich_tree(root / "tree")
    workspace.look()
    before, ctimes = capture_tree(root), {path: path.lstat().st_ctime_ns for path in root.rglob("*")}
    with workspace.fork("a") as fork:
        there = capture_tree(Path(fork.root))
        assert {path: (one.lasting, one.mtime_ns, one.links) for path, one in there.items() if path} == {
            path: (one.lasting, one.mtime_ns, one.links) for path, one in before.items() if path
        }
        assert {one.inode for one in there.values()}.isdisjoint(one.inode for one in before.values())
        assert there[""].mode == 0o700
        assert [entry.kind for entry in fork.log()] == ["baseline"]
        assert fork.changes_since_fork() == []
        assert os.stat(Path(fork.root, "tree/sparse")).st_blocks * 512 < 1 << 20
    assert {path: path.lstat().st_ctime_ns for path in root.rglob("*")} == ctimes
    assert capture_tree(root) == before


def test_opening_a_fork_reads_no_file(root: Path, workspace: Workspace) -> None:
    a_rich_tree(root / "tree")
    workspace.look()
    time.sleep(0.05)  # the clock of the filesystem ticks: a file is known whose time is of an earlier instant
    workspace.fork("a").close()
    place = workspace.fork_named("a").root
    script = f"""
import os, sys
from ringfence_sandbox import Workspace
opened = []
sys.addaudithook(lambda event, given: opened.append(given) if event == "open" else None)
Workspace.open({place!r}).close()
print(sorted({{str(path) for path, *_ in opened if os.path.basename(str(path)) in {os.listdir(root / "tree/src")!r}}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stderr


def test_source_and_fork_go_on_each_for_itself(root: Path, workspace: Workspace) -> None:
    (root / "a.txt").write_text("a\n")
    workspace.look()
    with workspace.fork("a") as fork:
        (root / "a.txt").write_text("of the source\n")
        Path(fork.root, "a.txt").write_text("of the fork\n")
        fork.filesystem.write("new.txt", "new\n")
        assert [change.path for change in fork.changes_since_fork()] == ["a.txt", "new.txt"]
        assert b"+of the fork" in fork.patch()
        assert fork.diff() == fork.patch()
        fork.restore(0)
        assert Path(fork.root, "a.txt").read_text() == "a\n"
        assert fork.changes_since_fork() == []
    assert (root / "a.txt").read_text() == "of the source\n"


def test_a_fork_of_an_earlier_step_begins_with_its_state(root: Path, workspace: Workspace) -> None:
    files = workspace.filesystem
    write(workspace, "gone/b.txt", "b\n")
    files.symlink("gone/link", "b.txt")
    workspace.look()
    write(workspace, "a.txt", "one\n")
    step = workspace.steps()[-1].number
    then = capture_tree(root)
    files.delete("gone", recursive=True)
    files.write("a.txt", "two\n")
    files.write("later/c.txt", "c\n")
    with workspace.fork("then", at=step) as fork:
        there = capture_tree(Path(fork.root))
        assert {path: (one.lasting, one.mtime_ns) for path, one in there.items() if path} == {
            path: (one.lasting, one.mtime_ns) for path, one in then.items() if path
        }
        assert [entry.kind for entry in fork.log()] == ["baseline"]
        assert (workspace.fork_named("then").step, fork.changes_since_fork()) == (step, [])
    with pytest.raises(LookupError, match="no step 99"):
        workspace.fork("never", at=99)


def test_hidden_files_come_along_unless_they_are_not_to(root: Path, tmp_path: Path) -> None:
    (root / ".env").write_text("KEY=secret\n")
    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        with workspace.fork("a") as fork:
            assert Path(fork.root, ".env").read_text() == "KEY=secret\n"
            assert fork.filesystem.hides(".env")
            assert [entry.kind for entry in fork.log()] == ["baseline"]
            Path(fork.root, ".env").write_text("KEY=other\n")
            assert fork.changes_since_fork() == []
        with workspace.fork("b", into=tmp_path / "b", secrets=False) as fork:
            assert not Path(fork.root, ".env").exists()
            assert fork.fork_record is not None
            assert fork.fork_record.left_out == {".env": "hidden"}
            assert [entry.kind for entry in fork.log()] == ["baseline"]


@needs_git
def test_git_reads_the_history_of_a_fork_of_a_fork(root: Path, workspace: Workspace) -> None:
    workspace.filesystem.write("a.txt", "a\n" * 100)
    with workspace.fork("a") as first:
        first.filesystem.write("b.txt", "b\n" * 100)
        with first.fork("b") as second:
            second.filesystem.write("c.txt", "c\n" * 100)
            history = second.filesystem.history
            assert history is not None
            folder = history.store.folder
            assert [change.path for change in second.changes_since_fork()] == ["c.txt"]
    fsck(folder)
    tip = git(folder, "rev-parse", "refs/heads/main").strip()
    assert git(folder, "show", f"{tip}:files/b.txt") == "b\n" * 100
    assert git(folder, "log", "--oneline", tip).count("\n") == 2


@needs_git
def test_gits_own_data_is_the_forks_own(root: Path, workspace: Workspace) -> None:
    repository(root)
    workspace.look()
    with workspace.fork("a") as fork:
        place, record = Path(fork.root), workspace.fork_named("a")
        assert (record.git_branch, record.git_commit) == (
            git(root, "symbolic-ref", "HEAD").strip(),
            git(root, "rev-parse", "HEAD").strip(),
        )
        assert git(place, "status", "--porcelain") == ""
        (place / "new.txt").write_text("new\n")
        git(place, "add", "--all")
        git(place, "commit", "--quiet", "--message", "of the fork")
        assert git(root, "log", "--format=%s") == "as it was\n"
        assert git(place, "log", "--format=%s") == "of the fork\nas it was\n"


@needs_git
def test_a_linked_worktree_is_not_forked_and_not_copied(root: Path, tmp_path: Path) -> None:
    repository(root)
    git(root, "worktree", "add", "--quiet", str(tmp_path / "tree"))
    git(root, "worktree", "add", "--quiet", str(root / "inner"))
    with (
        Workspace.open(tmp_path / "tree") as workspace,
        pytest.raises(ValueError, match=r"cannot be forked: its \.git leads to .*worktrees/tree"),
    ):
        workspace.fork("a")
    with Workspace.open(root) as workspace, workspace.fork("a") as fork:
        record = fork.fork_record
        assert record is not None
        assert record.left_out == {"inner": "linked worktree"}
        assert not Path(fork.root, "inner").exists()
        assert ".git/worktrees/inner/gitdir" in record.points_back


def test_what_points_back_is_named_and_absolute_links_lead_into_the_fork(root: Path, workspace: Workspace) -> None:
    venv.create(root / ".venv", with_pip=False, symlinks=True)
    (root / ".venv/bin/tool").write_text(f"#!{root}/.venv/bin/python\n")
    (root / "build").mkdir()
    (root / "build/CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={root}\n")
    (root / "here").symlink_to(root / "build")
    (root / "beside.pth").write_text(f"{root}-lib\n")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "s"))
    workspace.look()
    with workspace.fork("a") as fork:
        record = fork.fork_record
        assert record is not None
        assert set(record.points_back) >= {".venv/bin/tool", "build/CMakeCache.txt"}
        assert record.rewritten == ["here"]
        assert record.left_out == {"s": "special file"}
        assert os.readlink(Path(fork.root, "here")) == f"{fork.root}/build"
        assert fork.changes_since_fork() == []


def test_each_name_of_a_link_into_the_source_leads_into_the_fork_and_so_does_one_of_an_earlier_step(
    root: Path, workspace: Workspace
) -> None:
    (root / "a").mkdir()
    (root / "one").symlink_to(root / "a")
    os.link(root / "one", root / "two", follow_symlinks=False)
    workspace.checkpoint("linked")
    for at in (None, "linked"):
        with workspace.fork(f"fork-{at}", at=at) as fork:
            assert {os.readlink(Path(fork.root, name)) for name in ("one", "two")} == {f"{fork.root}/a"}
            assert fork.fork_record is not None
            assert sorted(fork.fork_record.rewritten) == ["one", "two"]
            assert fork.changes_since_fork() == []
            assert workspace.promote(fork).outcomes == {}
        for name in ("one", "two"):
            (root / name).unlink(missing_ok=True)


def test_forks_are_named_and_discarded(root: Path, workspace: Workspace, tmp_path: Path) -> None:
    (root / "a.txt").write_text("a\n")
    (root / "closed").mkdir(mode=0o500)
    a, b = workspace.fork("a"), workspace.fork("b", into=tmp_path / "elsewhere")
    assert [(fork.name, fork.state) for fork in workspace.forks()] == [("a", "ready"), ("b", "ready")]
    assert Path(b.root) == tmp_path / "elsewhere"
    with pytest.raises(FileExistsError, match="there is a fork 'a'"):
        workspace.fork("a")
    with pytest.raises(FileExistsError, match="a place of its own"):
        workspace.fork("c", into=tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="inside of its source"):
        workspace.fork("c", into=root / "c")
    for name in ("", ".a", "a/b", "a..b", "a.lock", "x" * 65):
        with pytest.raises(ValueError, match="cannot be the name of a fork"):
            workspace.fork(name)
    with pytest.raises(WorkspaceLockedError):
        workspace.discard_fork("a")
    place, record = Path(a.root), a.fork_record
    a.discard()
    assert record is not None
    assert (place.exists(), Path(record.store).exists()) == (False, False)
    b.close()
    workspace.discard_fork("b")
    assert workspace.forks() == []
    with pytest.raises(LookupError, match="no fork 'b'; there are none"):
        workspace.discard_fork("b")
    with pytest.raises(ValueError, match="is no fork"):
        workspace.discard()


def test_a_fork_that_has_forks_is_not_discarded(workspace: Workspace) -> None:
    with workspace.fork("a") as first:
        first.fork("b").close()
        with pytest.raises(ValueError, match="first discard these of .*: b"):
            first.discard()
    with Workspace.open(workspace.fork_named("a").root, read_only=True) as first:
        assert [fork.name for fork in first.forks()] == ["b"]
        first.discard_fork("b")
    workspace.discard_fork("a")
    assert workspace.forks() == []


def test_gc_keeps_what_forks_borrow_and_drops_those_that_are_gone(root: Path, workspace: Workspace) -> None:
    write(workspace, "a.txt", os.urandom(8192).hex())
    content = (root / "a.txt").read_text()
    with workspace.fork("a") as fork:
        place = Path(fork.root)
    for number in range(3):
        write(workspace, "a.txt", f"{number}\n")
    workspace.gc(0)
    with Workspace.open(place) as fork:
        fork.filesystem.write("a.txt", "other\n")
        fork.gc(0)
        fork.restore(0)
        assert (place / "a.txt").read_text() == content
        assert fork.damage is None
    subprocess.run(["rm", "-rf", str(place)], check=True)
    assert [fork.state for fork in workspace.forks()] == ["gone"]
    assert workspace.gc(0) > 4096
    assert workspace.forks() == []


def test_a_fork_of_a_fork_that_is_gone_keeps_what_it_borrows(root: Path, workspace: Workspace) -> None:
    with workspace.fork("a") as first:
        place = Path(first.root)
        first.fork("b").close()
        below = first.fork_named("b").root
    subprocess.run(["rm", "-rf", str(place)], check=True)
    with pytest.raises(FileExistsError, match="which has forks"):
        workspace.fork("a")
    workspace.gc(0)
    workspace.close()
    (own,) = [store for store in stores() if store.root == str(root)]
    with pytest.raises(ValueError, match="borrows from it: discard a first"):
        forget_store(own)
    with Workspace.open(below) as second:
        assert second.damage is None
        second.restore(0)


def test_a_fork_whose_directory_may_only_be_unmounted_stays(workspace: Workspace, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    workspace.fork("a", into=drive / "a").close()
    drive.rename(tmp_path / "away")
    workspace.gc(0)
    with pytest.raises(FileExistsError, match="whose directory is away"):
        workspace.fork("a")
    (tmp_path / "away").rename(drive)
    (drive / "a/new.txt").write_text("made there\n")
    assert workspace.promote("a").outcomes == {"new.txt": "applied"}


def test_a_history_that_forks_borrow_from_is_not_forgotten(root: Path, workspace: Workspace) -> None:
    workspace.fork("a").close()
    workspace.close()
    (own,) = [store for store in stores() if store.root == str(root)]
    with pytest.raises(ValueError, match="borrows from it: discard a first"):
        forget_store(own)


def test_a_fork_is_private_and_its_place_too(root: Path, workspace: Workspace, tmp_path: Path) -> None:
    for into in (None, tmp_path / "there"):
        with workspace.fork(f"a-{into is None}", into=into) as fork:
            assert stat.S_IMODE(os.stat(fork.root).st_mode) == 0o700
            assert fork.fork_record is not None
            assert stat.S_IMODE(os.stat(fork.fork_record.store).st_mode) == 0o700


def test_room_for_all_forks_is_checked_before_the_first(root: Path, workspace: Workspace) -> None:
    (root / "a.txt").write_bytes(b"x" * 5000)
    time.sleep(0.03)  # what was changed just now is not known by its size yet
    workspace.check_fork_room(2)
    with pytest.raises(OSError, match=r"1000000000000 forks of .* would need [0-9]+,[0-9]{3},000,000,000,000 bytes"):
        workspace.check_fork_room(10**12)
    assert workspace.forks() == []


def test_a_fork_is_made_from_asyncio(workspace: Workspace) -> None:
    async def work() -> str:
        with await workspace.afork("a") as fork:
            return fork.root

    assert asyncio.run(work()) == workspace.fork_named("a").root


def test_a_store_of_its_own_has_its_forks_beside_it(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with Workspace.open(tmp_path / "r", store=tmp_path / "s") as workspace, workspace.fork("a") as fork:
        assert fork.root == str(tmp_path / "s.forks/roots/a")
        assert fork.fork_record is not None
        assert fork.fork_record.store == str(tmp_path / "s.forks/stores/a")
        assert [*shape(Path(fork.root))] == [*shape(tmp_path / "r")]


def test_what_somebody_changes_while_a_fork_is_made_is_no_change_of_the_fork(root: Path, workspace: Workspace) -> None:
    for name in ("a.txt", "b.txt", "d/c.txt", "d/e/f.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one\n")
    workspace.look()

    def edit(point: str) -> None:
        if point == "fork directory":  # the source was looked at, and is not copied yet
            (root / "a.txt").write_text("of a person\n")
            (root / "new.txt").write_text("of a person\n")
            (root / "b.txt").unlink()
            shutil.rmtree(root / "d/e")

    with injected(edit):
        fork = workspace.fork("a")
    with fork:
        assert Path(fork.root, "a.txt").read_text() == "of a person\n"
        assert fork.changes_since_fork() == []
        (root / "b.txt").write_text("again\n")
        fork.filesystem.write("mine.txt", "x\n")
        done = workspace.promote(fork)
        assert dict(done.outcomes) == {"mine.txt": "applied"}
        assert (root / "b.txt").read_text() == "again\n"


def test_a_secret_that_somebody_writes_while_a_fork_is_made_is_not_in_its_history(root: Path) -> None:
    def edit(point: str) -> None:
        if point == "fork directory":
            (root / "a.pem").write_text("-----BEGIN RSA PRIVATE KEY-----\nx\n")
            (root / ".env").write_text("TOKEN=x\n")

    with Workspace.open(root, hide=HiddenFiles()) as workspace:
        with injected(edit):
            fork = workspace.fork("a")
        with fork:
            assert {path.name for path in Path(fork.root).iterdir()} >= {".env", "a.pem"}
            assert fork.changes_since_fork() == []
            assert {fork.left_out[path] for path in (".env", "a.pem")} == {"hidden"}


def test_a_disk_that_is_full_when_it_is_forked_to_gets_nothing_and_the_source_stays(
    root: Path, workspace: Workspace, tmp_path: Path
) -> None:
    for number in range(40):
        (root / f"{number}.bin").write_bytes(os.urandom(20_000))
    workspace.look()
    before = capture_tree(root)
    with small_disk(tmp_path / "disk", "2m") as disk:
        (disk / "filler").write_bytes(bytes(1_600_000))
        with pytest.raises(OSError, match="make room, or fork into another place") as caught:
            workspace.fork("a", into=disk / "fork")
        assert caught.value.errno == errno.ENOSPC
        (disk / "filler").unlink()

        def fill(point: str) -> None:
            if point == "fork directory":  # there was room when it was looked for
                (disk / "filler").write_bytes(bytes(1_600_000))

        with injected(fill), pytest.raises(OSError, match="No space left") as caught:
            workspace.fork("a", into=disk / "fork")
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in disk.iterdir()] == ["filler"]
        assert workspace.forks() == []
        assert capture_tree(root) == before
        (disk / "filler").unlink()
        with workspace.fork("a", into=disk / "fork") as fork:
            assert fork.changes_since_fork() == []
