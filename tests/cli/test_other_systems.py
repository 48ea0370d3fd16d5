"""What works without Linux: in a process from which `other_systems` of tests/support took what only Linux has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
LEFT = f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); import other_systems; other_systems.leave_linux()\n"
EDIT = [
    {"name": "read_file", "arguments": {"file_path": "a.txt"}},
    {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "one", "new_string": "two"}},
    {"name": "write_file", "arguments": {"file_path": "new/b.txt", "content": "new\n"}},
    {"name": "grep", "arguments": {"pattern": "two"}},
]
IMPORTS = """
import importlib, pkgutil
for top in sys.argv[1:]:
    package = importlib.import_module(top)
    for found in pkgutil.iter_modules(package.__path__, f"{top}."):
        if not found.name.endswith(("__main__", ".ray")):
            importlib.import_module(found.name)
"""
PACKAGES = (
    "ringfence",
    "ringfence_workspace",
    "ringfence_workspace.history",
    "ringfence_workspace.transaction",
    "ringfence_sandbox",
    "ringfence_tools",
    "ringfence_tools.runs",
    "ringfence_batch",
    "ringfence_mcp",
    "ringfence_guard",
    "ringfence_cli",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    turns = [{"tool_calls": EDIT}, {"text": "Done."}]
    (tmp_path / "model.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return tmp_path / "tree"


def without_linux(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RINGFENCE_STATE_DIR": str(cwd / "state")}
    command = [sys.executable, "-c", LEFT + code, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def ringfence(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return without_linux("from ringfence_cli.main import main; main()", *words, cwd=cwd)


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    done = without_linux(IMPORTS, *PACKAGES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_agent_works_in_memory_and_its_patch_is_saved(tree: Path) -> None:
    words = ("--workspace", "memory", "--task", "Do it.", "--model", "script:model.jsonl", "--patch", "fix.patch")
    done = ringfence("run", "tree", *words, cwd=tree.parent)
    assert done.returncode == 0, done.stderr
    assert "4 tool calls (4 committed)" in done.stderr
    subprocess.run(["git", "apply", "../fix.patch"], cwd=tree, check=True)
    assert (tree / "a.txt").read_text() == "two\n"
    assert (tree / "new" / "b.txt").read_text() == "new\n"


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (("run", "tree", "--task", "Do it.", "--model", "script:model.jsonl"), 2),
        (("exec", "tree", "--", "rm", "a.txt"), 125),
        (("run", "tree", "--workspace=memory", "--apply", "--task=Do it.", "--model=script:model.jsonl"), 1),
    ],
    ids=["run", "exec", "apply"],
)
def test_what_would_change_files_on_disk_says_that_it_needs_linux(
    tree: Path, words: tuple[str, ...], exit_code: int
) -> None:
    done = ringfence(*words, cwd=tree.parent)
    assert done.returncode == exit_code, done.stderr
    assert "files on disk are changed under Linux alone: work on a copy in memory" in done.stderr
    assert (tree / "a.txt").read_text() == "one\n"
