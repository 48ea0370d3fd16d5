"""Who may have a workspace open together: all of one process that ask for it, and of hosts only one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import on_filesystem

from ringfence.errors import WorkspaceLockedError
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.txt").write_text("a\n")
    os.symlink(tmp_path / "root", tmp_path / "link")
    return tmp_path / "root"


@pytest.fixture
def workspace(root: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=root.parent / "store") as workspace:
        yield workspace


# In one process


def test_who_asks_to_share_gets_what_is_open(workspace: Workspace, root: Path) -> None:
    for spelling in (root, root.parent / "link", f"{root}/."):
        with HostFilesystem.shared(spelling) as shared:
            assert shared == workspace.filesystem
            assert shared.lock is workspace.filesystem.lock
    assert workspace.filesystem.read("a.txt").content == "a\n"


def test_the_last_one_closes_it(root: Path) -> None:
    first, second = (HostFilesystem.shared(root, store=root.parent / "store") for _ in range(2))
    first.close()
    first.close()
    with pytest.raises(ValueError, match="is closed"):
        first.read("a.txt")
    second.write("a.txt", "still open")
    with pytest.raises(WorkspaceLockedError):
        HostFilesystem(root, store=root.parent / "store")
    second.close()
    HostFilesystem(root, store=root.parent / "store").close()


def test_a_workspace_that_is_shared_keeps_its_history_until_the_last_has_gone(root: Path) -> None:
    store = root.parent / "store"
    workspace = Workspace.open(root, store=store)
    shared = HostFilesystem.shared(root)
    workspace.close()
    with held_call(shared) as held:
        shared.for_call(held).write("a.txt", "b\n")
        made = held.commit()
    assert made is not None
    shared.close()
    with Workspace.open(root, store=store) as again:
        assert again.steps() == [made]


def test_a_call_that_one_holds_keeps_the_changes_of_the_others_waiting(workspace: Workspace, root: Path) -> None:
    with HostFilesystem.shared(root) as shared, held_call(workspace.filesystem) as held:
        thread = threading.Thread(target=lambda: shared.write("theirs", "x"))
        thread.start()
        workspace.filesystem.for_call(held).write("a.txt", "x")
        assert not (root / "theirs").exists()
        held.commit()
        held.release()
        thread.join(10)
        assert (root / "theirs").exists()


# Between hosts

KINDS = {0x6969: "NFS", 0x01021997: "9p", 0x65735546: "FUSE", 0xFF534D42: "CIFS", 0xFE534D42: "SMB"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["root", "store"])
def test_shared_filesystems_need_only_this_host(
    root: Path, kind: int, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = root.parent / "store"
    store.mkdir()
    there = os.stat(root if of == "root" else store)
    can = on_filesystem(lambda fd: kind if os.path.samestat(os.fstat(fd), there) else 0xEF53)
    with pytest.raises(OSError, match=f"{KINDS[kind]}.*only_this_host=True"):
        HostFilesystem(root, store=store, can=can)
    assert os.listdir(store) == []
    HostFilesystem(root, store=store, can=can, only_this_host=True).close()
    monkeypatch.setenv("RINGFENCE_ONLY_THIS_HOST", "1")
    HostFilesystem(root, store=store, can=can).close()


def test_a_read_only_one_takes_no_lock_so_that_the_kind_does_not_matter(root: Path) -> None:
    can = on_filesystem(lambda fd: 0x6969)
    with (
        HostFilesystem(root, read_only=True, can=can) as reader,
        HostFilesystem(root, store=root.parent / "store") as writer,
    ):
        writer.write("a.txt", "x")
        assert reader.read("a.txt").content == "x"
