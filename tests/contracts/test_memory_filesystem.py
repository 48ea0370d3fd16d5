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
