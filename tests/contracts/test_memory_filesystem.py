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


class LesserFilesystem(InMemoryFilesystem):
    def symlink(self, path: str, target: str) -> None:
        raise NotImplementedError

    def chmod(self, path: str, mode: int) -> None:
        raise NotImplementedError


class TestLesserFilesystem(FilesystemContract):
    """A backend is not asked for what it says that it has not."""

    symlinks = permission_bits = any_bytes_in_names = False

    @pytest.fixture
    def fs(self) -> InMemoryFilesystem:
        return LesserFilesystem()

    @pytest.fixture
    def read_only_fs(self) -> InMemoryFilesystem:
        filesystem = LesserFilesystem(read_only=True)
        filesystem.load("a.txt", b"a\n")
        return filesystem
