from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from guard_processes import Run, hooks

from ringfence_sandbox import Workspace


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two files, and a state directory of its own."""
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    made = tmp_path / "repo"
    made.mkdir()
    (made / "a.txt").write_text("a\n")
    (made / "notes.txt").write_text("notes\n")
    return made


@pytest.fixture
def workspace(root: Path) -> Generator[Workspace]:
    with Workspace.open(root) as opened:
        yield opened


@pytest.fixture
def hook(root: Path, tmp_path: Path) -> Generator[Run]:
    """Runs the client as Claude Code would. A guard that it started is ended."""
    with hooks(root, tmp_path / "state") as run:
        yield run
