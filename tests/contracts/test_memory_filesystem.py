from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


HOLDS_LESS = """
import pytest

from ringfence.filesystem import InMemoryFilesystem
from ringfence.testing import FilesystemContract


class Plain(InMemoryFilesystem):
    def symlink(self, path, target):
        raise NotImplementedError

    def chmod(self, path, mode):
        raise NotImplementedError


class TestPlain(FilesystemContract):
    symlinks = permission_bits = any_bytes_in_names = False

    @pytest.fixture
    def fs(self):
        return Plain()

    @pytest.fixture
    def read_only_fs(self):
        filesystem = Plain(read_only=True)
        filesystem.load("a.txt", b"a\\n")
        return filesystem
"""


def test_a_backend_is_not_asked_for_what_it_says_that_it_has_not(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(HOLDS_LESS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    [(passed, skipped)] = re.findall(r"(\d+) passed, (\d+) skipped", done.stdout)
    assert (int(passed) > 50, int(skipped) > 20) == (True, True), done.stdout
