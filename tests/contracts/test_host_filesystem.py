from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from effort import amount
from kernels import OLD_KERNEL

from ringfence.testing import FilesystemContract
from ringfence_sandbox import HostFilesystem


class TestHostFilesystem(FilesystemContract):
    depth = amount(prove=FilesystemContract.depth, test=1_050)  # more than Python's stack has, and each name is opened

    @pytest.fixture
    def fs(self, tmp_path: Path) -> Iterator[HostFilesystem]:
        (tmp_path / "root").mkdir()
        with HostFilesystem(tmp_path / "root", store=tmp_path / "store") as filesystem:
            yield filesystem

    @pytest.fixture
    def read_only_fs(self, tmp_path: Path) -> Iterator[HostFilesystem]:
        (tmp_path / "read-only").mkdir()
        (tmp_path / "read-only/a.txt").write_text("a\n")
        with HostFilesystem(tmp_path / "read-only", read_only=True) as filesystem:
            yield filesystem


class TestHostFilesystemOnAnOldKernel(TestHostFilesystem):
    """Without `openat2`, `renameat2` and O_TMPFILE."""

    depth = 300  # of a path, each name is opened by itself

    @pytest.fixture
    def fs(self, tmp_path: Path) -> Iterator[HostFilesystem]:
        (tmp_path / "root").mkdir()
        with HostFilesystem(tmp_path / "root", store=tmp_path / "store", can=OLD_KERNEL) as filesystem:
            yield filesystem
