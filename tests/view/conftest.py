from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from viewed import viewed_workspace

from ringfence_view import CallSource


@dataclass(frozen=True)
class Viewed:
    root: Path
    receipts: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    """A workspace that no test changes."""
    directory = tmp_path_factory.mktemp("viewed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_STATE_DIR", str(directory / "state"))
        yield Viewed(*viewed_workspace(directory))


@pytest.fixture
def source(made: Viewed, monkeypatch: pytest.MonkeyPatch) -> CallSource:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(made.root.parent / "state"))
    return CallSource(made.root, made.receipts)
