"""``durability="power"``: what waits for the disk, how often, and what a loss of power leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from captured_tree import capture_tree
from effort import kill_points
from failpoints import injected
from kernels import in_another_boot
from killing import killed_at
from mounts import mounted

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace
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


def write_one(fs: HostFilesystem) -> None:
    fs.write_bytes("d/new", CONTENT)
    fs.chmod("d/new", 0o640)


@pytest.mark.parametrize("lost", [b"", bytes(3000), CONTENT[:512], CONTENT[:1024] + bytes(1976)])
def test_what_a_committed_file_lost_is_in_its_step(root: Path, lost: bytes) -> None:
    store = unplugged(root, write_one)
    losing(root / "d/new", lost)
    with Workspace.open(root, store=store) as workspace:
        # As with every change that no call made: it is seen, it stays, and the step has what was there.
        assert [entry.kind for entry in workspace.log()] == ["external", "step", "baseline"]
        assert (root / "d/new").read_bytes() == lost
        workspace.restore(1)
    assert (root / "d/new").read_bytes() == CONTENT


def test_what_a_call_was_to_leave_and_lost_is_a_conflict_of_its_rollback(root: Path) -> None:
    store = unplugged(root, lambda fs: (write_one(fs), fs.write("f0", "ours " * 500)), commit=False)
    losing(root / "d/new", b"")
    losing(root / "f0", bytes(2500))
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert (workspace.recovered.outcome, workspace.recovered.conflicts) == ("rolled back", ("d/new", "f0"))
        assert any("f0" in note for note in workspace.recovered.notes)  # where the file of before is kept
    assert (root / "f0").read_bytes() == bytes(2500)


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
