"""``durability="power"``: what waits for the disk, how often, and what a loss of power leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from captured_tree import capture_tree, lasting
from effort import kill_points
from kernels import in_another_boot
from killing import killed_at
from mounts import mounted

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace, is_reserved
from ringfence_sandbox.disk.kernel import injected
from ringfence_tools import VfsToolsSection


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    for n in range(10):
        (root / f"f{n}").write_text(f"{n}\n")
    return root


def patch(*paths: str, new: tuple[str, ...] = ()) -> str:
    changed = "".join(f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{path[-1]}\n+ours\n" for path in paths)
    return changed + "".join(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+new\n" for path in new)


def patched(filesystem: HostFilesystem, text: str) -> None:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=filesystem)
    prompt = Prompt(PromptTemplate(ns="test", key="power", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        for n in range(10):
            assert executor.call("read_file", {"file_path": f"f{n}"}).success
        answer = executor.call("apply_patch", {"patch": text})
    assert answer.success, answer.message


@pytest.mark.parametrize("durability", ["process", "power"])
def test_calls_wait_for_the_disk_where_power_is_to_be_survived(
    root: Path, monkeypatch: pytest.MonkeyPatch, durability: Literal["process", "power"]
) -> None:
    waits = 0

    def counted(real: Callable[[int], None]) -> Callable[[int], None]:
        def wait(file: int) -> None:
            nonlocal waits
            waits += 1
            real(file)

        return wait

    with Workspace.open(root, store=root.parent / "store", durability=durability) as workspace:
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        patched(workspace.filesystem, patch(*(f"f{n}" for n in range(10)), new=("n/o/p", "d/r")))
        with held_call(workspace.filesystem) as held:
            workspace.filesystem.for_call(held).write("f0", "taken back")
            held.rollback()
        assert waits == 0 if durability == "process" else 22 < waits < 60  # each new file, and the log before it
        monkeypatch.undo()


def test_a_patch_killed_anywhere_is_undone_or_done(tmp_path: Path) -> None:
    ends: set[bool] = set()
    for point in kill_points(9):
        root, store = tmp_path / f"{point}/root", tmp_path / f"{point}/store"
        root.mkdir(parents=True)
        for n in range(10):
            (root / f"f{n}").write_text(f"{n}\n")
        before = capture_tree(root)

        def work(announce: Callable[[str], None], root: Path = root, store: Path = store) -> None:
            with injected(announce), HostFilesystem(root, store=store, durability="power") as fs:
                patched(fs, patch("f0", "f1", "f2", new=("n/o/p", "q")))

        killed = killed_at(point, work)
        HostFilesystem(root, store=store).close()
        done = (root / "q").exists()
        ends.add(done)
        if done:
            assert [(root / f"f{n}").read_text() for n in range(3)] == ["ours\n"] * 3
            assert (root / "n/o/p").read_text() == "new\n"
        else:
            assert capture_tree(root) == before
        assert not [name for name in os.listdir(root) if name.startswith(".ringfence")]
        if not killed:
            break
    assert ends == {True, False}


# After a loss of power, as far as it can be played: a process of another boot, and files without their bytes.

CONTENT = os.urandom(3000)


def unplugged(
    root: Path, change: Callable[[HostFilesystem], object], *, commit: bool = True, boot: bool = True
) -> Path:
    """A workspace whose machine stopped after a call, in the default durability; its store."""
    store = root.parent / "store"

    def work(stop: Callable[[str], None]) -> None:
        if boot:
            in_another_boot()
        workspace = Workspace.open(root, store=store)
        with held_call(workspace.filesystem) as held:
            change(workspace.filesystem.for_call(held))
            if commit:
                held.commit()
            stop("here")

    assert killed_at(0, work)
    return store


def losing(path: Path, content: bytes) -> None:
    found = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


LOST = {"empty": b"", "zeros": bytes(3000), "half": CONTENT[:1024] + bytes(1976), "short": CONTENT[:512]}


def write_one(fs: HostFilesystem) -> None:
    fs.write_bytes("d/new", CONTENT)
    fs.chmod("d/new", 0o640)


@pytest.mark.parametrize("lost", LOST)
def test_a_committed_file_that_lost_its_bytes_is_healed(root: Path, lost: str) -> None:
    store = unplugged(root, write_one)
    tree = {path: one for path, one in capture_tree(root).items() if not is_reserved(path)}
    before = lasting(tree), tree["d/new"].mtime_ns
    losing(root / "d/new", LOST[lost])
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.conflicts == ()
        assert "d/new" in workspace.recovered.notes[-1]
        assert [entry.kind for entry in workspace.log()] == ["step", "baseline"]
    assert (lasting(capture_tree(root)), capture_tree(root)["d/new"].mtime_ns) == before
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is None


def test_a_file_is_healed_where_a_later_call_moved_it(root: Path) -> None:
    def change(fs: HostFilesystem) -> None:
        write_one(fs)
        fs.move("d", "e/d")

    store = unplugged(root, change)
    losing(root / "e/d/new", b"")
    Workspace.open(root, store=store).close()
    assert (root / "e/d/new").read_bytes() == CONTENT


@pytest.mark.parametrize("lost", [b"theirs", b"", CONTENT[:512] + b"theirs"])
def test_what_somebody_wrote_after_the_loss_stays(root: Path, lost: bytes) -> None:
    store = unplugged(root, write_one)
    (root / "d/new").write_bytes(lost)
    Workspace.open(root, store=store).close()
    assert (root / "d/new").read_bytes() == lost


@pytest.mark.parametrize("edit", [CONTENT[:512] + b"x" * 2488, CONTENT + b"x"])
def test_what_no_crash_can_make_stays_even_with_the_old_time(root: Path, edit: bytes) -> None:
    store = unplugged(root, write_one)
    losing(root / "d/new", edit)
    Workspace.open(root, store=store).close()
    assert (root / "d/new").read_bytes() == edit


def test_in_the_same_boot_nothing_is_healed(root: Path) -> None:
    store = unplugged(root, write_one, boot=False)
    losing(root / "d/new", b"")
    Workspace.open(root, store=store).close()
    assert (root / "d/new").read_bytes() == b""


def test_a_call_that_was_not_committed_is_undone_though_its_files_lost_their_bytes(root: Path) -> None:
    before = capture_tree(root)
    store = unplugged(root, lambda fs: (write_one(fs), fs.write("f0", "ours " * 500)), commit=False)
    losing(root / "d/new", b"")
    losing(root / "f0", bytes(2500))
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert (workspace.recovered.outcome, workspace.recovered.conflicts) == ("rolled back", ())
    assert capture_tree(root) == before


def test_healing_killed_anywhere_is_done_again(tmp_path: Path) -> None:
    for point in kill_points(7):
        root = tmp_path / f"{point}/root"
        (root / "d").mkdir(parents=True)
        store = unplugged(root, write_one)
        losing(root / "d/new", CONTENT[:512])
        time = capture_tree(root)[""].mtime_ns

        def work(announce: Callable[[str], None], root: Path = root, store: Path = store) -> None:
            with injected(announce):
                Workspace.open(root, store=store).close()

        killed = killed_at(point, work)
        Workspace.open(root, store=store).close()
        assert (root / "d/new").read_bytes() == CONTENT, point
        assert sorted(os.listdir(root)) == ["d"], point
        assert capture_tree(root)[""].mtime_ns == time, point
        if not killed:
            assert point > 5
            break


# A disk that has only what somebody has waited for


@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="the disk is an image with ext4")
def test_a_rollback_that_is_on_record_is_on_the_disk(tmp_path: Path) -> None:
    image, copy, disk = tmp_path / "image", tmp_path / "copy", tmp_path / "disk"
    disk.mkdir()
    image.write_bytes(bytes(12 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", str(image)], check=True)
    root, store = disk / "root", disk / "store"

    def work(stop: Callable[[str], None]) -> None:
        in_another_boot()
        with Workspace.open(root, store=store, durability="power") as workspace:
            with held_call(workspace.filesystem) as held:
                workspace.filesystem.for_call(held).write("kept", "kept")
                held.commit()
            with held_call(workspace.filesystem) as held:
                workspace.filesystem.for_call(held).write_bytes("new/file", os.urandom(5000))
                held.rollback()
            with held_call(workspace.filesystem) as held:
                workspace.filesystem.for_call(held).chmod("kept", 0o600)
                stop("here")

    with mounted(disk, "-o", "loop,commit=300", str(image)):
        root.mkdir()
        os.sync()
        assert killed_at(0, work)
        shutil.copyfile(image, copy)
    with mounted(disk, "-o", "loop", str(copy)):
        Workspace.open(root, store=store, durability="power").close()
        assert [path.name for path in root.iterdir()] == ["kept"]
