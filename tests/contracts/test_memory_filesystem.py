from __future__ import annotations

import pytest

from ringfence.filesystem import InMemoryFilesystem
from ringfence.testing import FilesystemContract


class TestInMemoryFilesystem(FilesystemContract):
    @pytest.fixture
    def fs(self) -> InMemoryFilesystem:
        return InMemoryFilesystem()

    @pytest.fixture
    def read_only_fs(self) -> InMemoryFilesystem:
        filesystem = InMemoryFilesystem(read_only=True)
        filesystem.load("a.txt", b"a\n")
        return filesystem


class Plain(InMemoryFilesystem):
    """Without what not every backend has."""

    def symlink(self, path: str, target: str) -> None:
        raise NotImplementedError

    def chmod(self, path: str, mode: int) -> None:
        raise NotImplementedError


class TestAFilesystemThatHoldsLess(FilesystemContract):
    symlinks = permission_bits = any_bytes_in_names = False

    @pytest.fixture
    def fs(self) -> InMemoryFilesystem:
        return Plain()

    @pytest.fixture
    def read_only_fs(self) -> InMemoryFilesystem:
        filesystem = Plain(read_only=True)
        filesystem.load("a.txt", b"a\n")
        return filesystem
