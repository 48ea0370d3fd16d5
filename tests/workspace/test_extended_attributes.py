"""Extended attributes of what a program replaces or removes in an opaque call that is taken back."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from effort import kill_points
from failpoints import injected
from killing import as_nobody, killed_at

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace, is_reserved

ACL = struct.pack(
    "<I" + "HHI" * 5, 2, 1, 7, 2**32 - 1, 2, 6, 12345, 4, 5, 2**32 - 1, 16, 7, 2**32 - 1, 32, 5, 2**32 - 1
)
DAMAGE = """
    cp a.txt t; echo more >> t; mv t a.txt
    rm gone; rm -r d; mv moved elsewhere; cp same t; mv t same
    mkdir d; echo n > d/new
"""
Attributes = dict[str, dict[str, bytes]]


def attributes(root: Path) -> Attributes:
    """Of all that has any, by path."""
    found = {path: {name: os.getxattr(path, name) for name in os.listxattr(path)} for path in [root, *root.rglob("*")]}
    named = {str(path.relative_to(root)): one for path, one in found.items() if one}
    return {path: one for path, one in named.items() if not is_reserved(path)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/e").mkdir(parents=True)
    try:
        for path in ("a.txt", "gone", "d/f", "moved", "same", "d/e/plain", "new"):
            (root / path).write_text(path)
        for path in ("a.txt", "gone", "d", "d/f", "moved", "same"):
            os.setxattr(root / path, "user.of", path.encode())
        for path in ("gone", "a.txt", "d"):
            os.setxattr(root / path, "system.posix_acl_access", ACL)
        os.setxattr(root / "d", "system.posix_acl_default", ACL)
    except OSError as error:
        pytest.skip(f"this filesystem has no such attributes: {error}")
    return root


@pytest.fixture(params=["as it is opened", "opened anew"])
def fs(root: Path, request: pytest.FixtureRequest) -> Iterator[HostFilesystem]:
    store = root.parent / "store"
    if request.param == "opened anew":
        os.utime(root / "gone", ns=(10**18, 10**18))
        Workspace.open(root, store=store).close()
    with Workspace.open(root, store=store) as workspace:
        yield workspace.filesystem


def damage(root: Path) -> None:
    subprocess.run(["sh", "-ec", DAMAGE], cwd=root, check=True)


def test_they_come_back_with_what_they_are_of(root: Path, fs: HostFilesystem) -> None:
    before = attributes(root)
    for _ in range(2):
        with held_call(fs, opaque=True) as call:
            damage(root)
            assert attributes(root) != before
            assert call.rollback().conflicts == ()
        assert attributes(root) == before


CHANGES: dict[str, Callable[[Path], object]] = {
    "another value": lambda root: os.setxattr(root / "a.txt", "user.of", b"other"),
    "a new one": lambda root: os.setxattr(root / "d/e/plain", "user.new", b"new"),
    "a second one": lambda root: os.setxattr(root / "moved", "user.new", b"new"),
    "none any more": lambda root: os.removexattr(root / "d/f", "user.of"),
    "of a directory": lambda root: os.setxattr(root / "d", "user.of", b"other"),
    "none any more of a directory": lambda root: [
        os.removexattr(root / "d", name) for name in os.listxattr(root / "d")
    ],
    "of the root": lambda root: os.setxattr(root, "user.of", b"new"),
    "a directory that had none": lambda root: os.setxattr(root / "d/e", "user.of", b"new"),
    "a rule of access": lambda root: os.removexattr(root / "d", "system.posix_acl_default"),
    "in a directory that was moved": lambda root: (
        os.setxattr(root / "d/f", "user.of", b"other"),
        os.rename(root / "d", root / "n"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_rollback_restores_them_where_nothing_else_was_changed(root: Path, fs: HostFilesystem, name: str) -> None:
    before = attributes(root)
    for _ in range(2):
        with held_call(fs, opaque=True) as call:
            CHANGES[name](root)
            assert attributes(root) != before
            assert call.changed() == [] or name == "in a directory that was moved"
            assert call.rollback().conflicts == ()
        assert attributes(root) == before
    with held_call(fs, opaque=True) as call:
        CHANGES[name](root)
        after = attributes(root)
        assert (call.commit() is None) == (name != "in a directory that was moved")
    with held_call(fs, opaque=True) as call:  # what was committed stays
        (root / "made").touch()
        call.rollback()
    assert attributes(root) == after


def test_a_recovery_restores_them_where_nothing_else_was_changed(root: Path) -> None:
    store = root.parent / "store"
    Workspace.open(root, store=store).close()
    before = attributes(root)
    process = os.fork()
    if process == 0:
        with Workspace.open(root, store=store) as workspace, held_call(workspace.filesystem, opaque=True):
            for change in list(CHANGES.values())[:-1]:
                change(root)
            os.kill(os.getpid(), 9)
    os.waitpid(process, 0)
    assert attributes(root) != before
    with Workspace.open(root, store=store) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.notes == ("rolled back: a.txt, d/e/plain, d/f, moved",)
    assert attributes(root) == before


def test_those_that_a_typed_change_and_somebody_have_set_meanwhile_come_back(root: Path, fs: HostFilesystem) -> None:
    fs.write("a.txt", "written")
    fs.move("moved", "n/moved")
    os.setxattr(root / "n/moved", "user.of", b"another")
    os.removexattr(root / "gone", "user.of")
    before = attributes(root)
    with held_call(fs, opaque=True) as call:
        subprocess.run(["sh", "-ec", "rm -r n gone; cp a.txt t; mv t a.txt"], cwd=root, check=True)
        call.rollback()
    assert attributes(root) == before


def test_a_call_that_changed_files_before_a_program_has_those_of_directories_back(
    root: Path, fs: HostFilesystem
) -> None:
    before = attributes(root)
    with held_call(fs, call_id="outer", opaque=True) as outer:
        fs.for_call(outer).write("d/f", "typed")
        fs.for_call(outer).delete("d/e", recursive=True)
        with held_call(fs, call_id="inner", parent=outer, opaque=True) as inner:
            inner.commit()
        assert outer.rollback().conflicts == ()
    assert attributes(root) == before


def test_a_new_file_in_the_place_of_another_has_none_of_its(root: Path, fs: HostFilesystem) -> None:
    with held_call(fs, opaque=True) as call:
        subprocess.run(["sh", "-ec", "mv a.txt new"], cwd=root, check=True)
        (root / "a.txt").write_text("new")
        call.rollback()
    assert "new" not in attributes(root)


def test_they_come_back_without_root(root: Path) -> None:
    def work() -> None:
        for path in ("a.txt", "d/f", "same"):
            os.chmod(root / path, 0o400)
        os.chmod(root / "d", 0o500)
        before, modes = attributes(root), [os.lstat(path).st_mode for path in sorted(root.rglob("*"))]
        store = root.parent / "store"
        with HostFilesystem(root, store=store) as fs, held_call(fs, opaque=True) as call:
            subprocess.run(["sh", "-ec", "chmod 700 d; rm -f same; rm -rf d a.txt gone"], cwd=root, check=True)
            report = call.rollback()
        assert attributes(root) == before, report
        assert [os.lstat(path).st_mode for path in sorted(root.rglob("*"))] == modes

    as_nobody(work, root.parent)


def test_they_come_back_after_kills(root: Path) -> None:
    before, store = attributes(root), root.parent / "store"

    def called(announced: Callable[[str], None]) -> None:
        with Workspace.open(root, store=store) as workspace, held_call(workspace.filesystem, opaque=True):
            damage(root)
            announced("damaged")

    def reopened(announced: Callable[[str], None]) -> None:
        with injected(announced):
            Workspace.open(root, store=store).close()

    for point in kill_points(7):
        assert killed_at(0, called)
        killed = killed_at(point, reopened)
        Workspace.open(root, store=store).close()
        assert attributes(root) == before, point
        if not killed:
            return
