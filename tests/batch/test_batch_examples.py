"""The examples of batches run as they are, on a copy of their directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    return tmp_path


def test_the_workflow_runs_its_tasks_and_shows_a_summary(copied: Path) -> None:
    workflow = (EXAMPLES / "batch/github-actions.yml").read_text()
    (tasks,) = re.findall(r"^  TASKS: (.*)$", workflow, re.MULTILINE)
    steps = [step for step in re.findall(r"^ +(?:- )?run: (.*)$", workflow, re.MULTILINE) if "pip install" not in step]
    assert len(steps) == 2
    own = {"TASKS": tasks, "GITHUB_STEP_SUMMARY": str(copied / "shown.md")}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in steps:
        subprocess.run(["bash", "-ec", step], cwd=copied, env=os.environ | own, check=True)
    assert (copied / "shown.md").read_text().startswith("## 2 of 2 tasks done")
    assert (copied / "out/index.html").exists()


def test_best_of_n_keeps_a_patch_that_applies_for_each_task(copied: Path) -> None:
    words = ["examples/batch/best_of_n.py", "examples/batch/tasks.jsonl", "--candidates", "2", "--out", "out"]
    done = subprocess.run([sys.executable, *words, "--jobs", "1"], cwd=copied, capture_output=True, text=True)
    assert done.stdout == "spelling: 2 of 2 agree\nspelling-on-disk: 2 of 2 agree\n", done.stderr
    project = copied / "examples/batch/project"
    subprocess.run(["git", "apply", copied / "out/best/spelling.patch"], cwd=project, check=True)
    assert "Hello" in (project / "src/greeting.py").read_text()
    again = subprocess.run([sys.executable, *words], cwd=copied, capture_output=True, text=True)
    assert again.stdout == done.stdout  # at once: what has a result does not run again
    assert len(list(copied.glob("out/tasks/*/*/attempts/*"))) == 4
