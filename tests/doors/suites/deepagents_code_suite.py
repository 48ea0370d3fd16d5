"""``dcode --sandbox ringfence``, as dcode itself finds and opens it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepagents_code.integrations.sandbox_factory import create_sandbox
from deepagents_code.integrations.sandbox_provider import SandboxError, SandboxNotFoundError
from deepagents_code.integrations.sandbox_registry import SandboxRegistry

from ringfence_sandbox import Workspace


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    monkeypatch.chdir(made)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    return made


def test_dcode_knows_the_sandbox_and_where_it_works(root: Path) -> None:
    registry = SandboxRegistry()
    assert "ringfence" in registry.available_providers()
    assert registry.provider_metadata("ringfence").working_dir == str(root)


def test_a_session_of_dcode_works_in_the_directory_and_leaves_it(root: Path) -> None:
    with create_sandbox("ringfence") as sandbox:
        assert sandbox.id == str(root)
        assert sandbox.execute("echo made > a.txt; pwd").output == f"{root}\n"
        assert sandbox.write(f"{root}/b.txt", "b").error is None
    assert (root / "a.txt").read_text() == "made\n"
    with Workspace.open(root) as workspace:
        assert [step.tool for step in workspace.steps()] == ["run", "write_file"]
        workspace.undo(2)
    assert [path.name for path in root.iterdir()] == []


def test_a_directory_that_is_open_elsewhere_or_is_none_is_an_error_that_says_so(root: Path) -> None:
    provider = SandboxRegistry().create_provider("ringfence")
    with Workspace.open(root), pytest.raises(SandboxError, match="cannot open"):
        provider.get_or_create()
    with pytest.raises(SandboxNotFoundError):
        provider.get_or_create(sandbox_id=str(root / "none"))
