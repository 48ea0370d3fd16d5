"""Of hosts that share a filesystem, only one may have a workspace open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kernels import on_filesystem

from ringfence_sandbox import HostFilesystem


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a.txt").write_text("a\n")
    return tmp_path / "root"


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
