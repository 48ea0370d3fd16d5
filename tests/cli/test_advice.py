"""The commands that pages and summaries give to a reader: each is right where it is shown."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from agent_runs import outcome_words
from batches import EDIT, READ, TURNS, script, task
from captured_tree import capture_tree
from command_line import ringfence_text

from ringfence.runtime import Receipt
from ringfence_batch import Batch


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory inside of a git repository."""
    project = tmp_path / "the repo/the project"
    project.mkdir(parents=True)
    (project / "a.txt").write_text("one\n")
    (project / ".gitignore").write_text("*.log\n")
    (project / ".env").write_text("TOKEN=a-secret-value\n")
    git = ["git", "-C", str(project.parent), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    return project


def commands(said: str) -> list[str]:
    """Return the commands that a text gives to its reader."""
    return [html.unescape(found) for found in re.findall(r"(?:`|<code>)((?:git|ringfence) [^`<]*)", said)]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_page_of_a_task_advises_nothing_but_applying_the_patch(project: Path, tmp_path: Path, kind: Any) -> None:
    before = capture_tree(project)
    make_log = {"name": "write_file", "arguments": {"file_path": "x.log", "content": "ignored\n"}}
    rejected = {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "none", "new_string": "x"}}
    turns = [{"tool_calls": [READ, rejected, EDIT, make_log]}, {"text": "Done."}]
    batch = Batch([task(project, "a", *turns, kind=kind)], out=tmp_path / "out")
    batch.run(jobs=1)
    assert capture_tree(project) == before
    page = (batch.ledger.directory("a") / "attempts/1/report.html").read_text()
    assert "<h1>" in page
    assert "The task is done" in page
    for option in ("Nothing was changed", "--with-ignored", "--no-hide", "--receipts", "Exit code"):
        assert option not in page
    (command,) = commands(page)
    subprocess.run(shlex.split(command), cwd="/", check=True)
    assert (project / "a.txt").read_text() == "two\n"


def test_the_page_of_a_task_that_changed_nothing_says_so(project: Path, tmp_path: Path) -> None:
    batch = Batch([task(project, "a", {"text": "Done."})], out=tmp_path / "out")
    batch.run(jobs=1)
    page = (batch.ledger.directory("a") / "attempts/1/report.html").read_text()
    assert "Nothing was changed." in page
    assert commands(page) == []


def test_the_page_of_a_failed_task_has_the_outcome_of_the_batch_and_its_reason(project: Path, tmp_path: Path) -> None:
    batch = Batch([task(project, "a", {"tool_calls": [READ]})], out=tmp_path / "out", retries=0)
    batch.run(jobs=1)
    result = batch.ledger.result("a")
    assert result is not None
    assert result.outcome == "infra-failed"
    page = html.unescape((batch.ledger.directory("a") / "attempts/1/report.html").read_text())
    assert "The infrastructure failed" in page
    assert result.cause in page


def test_a_run_in_memory_advises_the_command_that_applies_its_patch(project: Path, tmp_path: Path) -> None:
    model, patch, report = script(project, "m", *TURNS), tmp_path / "my patch", tmp_path / "page.html"
    words = ["run", project, "--workspace", "memory", "--task", "x", "--model", model]
    done = ringfence_text(*words, "--patch", patch, "--report", report)
    assert commands(report.read_text()) == commands(done.stderr)
    (command,) = commands(done.stderr)
    assert (project / "a.txt").read_text() == "one\n"
    subprocess.run(shlex.split(command), cwd="/", check=True)
    assert (project / "a.txt").read_text() == "two\n"


def test_a_run_on_disk_advises_the_command_that_reverses_it(project: Path, tmp_path: Path) -> None:
    model, report = script(project, "m", *TURNS), tmp_path / "page.html"
    done = ringfence_text("run", project, "--task", "x", "--model", model, "--report", report)
    (command,) = commands(done.stderr)
    assert command in commands(report.read_text())
    undone = ringfence_text(*shlex.split(command)[1:])
    assert (undone.returncode, (project / "a.txt").read_text()) == (0, "one\n")


def test_of_a_copy_that_is_gone_no_kept_file_is_promised() -> None:
    said = "[rolled back: new; what they were is kept as aborted/3]"
    receipt = Receipt("r", "c", "t", None, "failed", said, datetime.now(UTC), 0.1, "s", "p")
    assert outcome_words(receipt, None) == "failed and rolled back: [rolled back: new]"
    assert commands(outcome_words(receipt, Path("/repo"))) == ["ringfence show /repo 3 --aborted"]
