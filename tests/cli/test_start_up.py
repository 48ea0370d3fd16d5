"""The quick commands import little. What they leave alone is named here, since a time would differ by machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ringfence_sandbox import Workspace

PROGRAM = (
    "import atexit, sys\n"
    "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    "from ringfence_cli.main import main\nmain()\n"
)
NEVER = {"asyncio", "importlib.metadata", "jinja2", "multiprocessing", "podman", "pydantic", "requests", "rich", "ssl"}
VERSION_NEVER = {"json", "logging", "ringfence.errors", "ringfence_workspace", "subprocess"}
LOG_NEVER = {
    "dulwich.repo",
    "ringfence.adapters",
    "ringfence.policies",
    "ringfence.prompt",
    "ringfence.runtime.transaction",
    "ringfence.session",
    "ringfence_workspace.forks.fork_git",
    "ringfence_workspace.looks",
    "ringfence_workspace.workspace_calls",
}


def imported(*words: str | Path) -> set[str]:
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return {*ended.stderr.split()}


@pytest.mark.parametrize("words", [["--version"], ["--help"]], ids=" ".join)
def test_what_only_answers_imports_no_workspace(words: list[str]) -> None:
    assert imported(*words) & (NEVER | VERSION_NEVER) == set()


def test_the_log_imports_only_what_reads_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    (tree := tmp_path / "tree").mkdir()
    with Workspace.open(tree) as workspace, workspace.transaction("write"):
        workspace.filesystem.write("a.txt", "one")
    assert imported("log", tree) & (NEVER | LOG_NEVER) == set()
