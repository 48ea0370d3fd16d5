from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One file; a module that needs another tree has its own fixture of this name."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return root
