"""`ringfence guard undo`: which steps of agents it takes, and what it says of them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCallRecord, GuardedCalls, GuardLog, parse_event
from ringfence_sandbox import Workspace

Tell = Callable[..., None]


class ReadLog(GuardLog):
    """Says when it was read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.was_read = threading.Event()

    def read(self) -> Sequence[GuardedCallRecord]:
        self.was_read.set()
        return super().read()


@pytest.fixture
def log(tmp_path: Path) -> ReadLog:
    return ReadLog(tmp_path)


@pytest.fixture
def calls(workspace: Workspace, log: ReadLog) -> GuardedCalls:
    return GuardedCalls(workspace.root, log, open_workspace=lambda: workspace)


@pytest.fixture
def tell(root: Path, calls: GuardedCalls) -> Tell:
    """Tells the guard of an event of a command of Claude Code."""

    def event(name: str, command: str) -> None:
        call = {"tool_name": "Bash", "tool_input": {"command": command}, "tool_use_id": command}
        given: dict[str, Any] = {"session_id": "s", "cwd": str(root), "prompt_id": "p", "tool_response": {}}
        calls.handle(parse_event("claude", {"hook_event_name": name, **given, **call}))

    return event


def test_an_undo_that_waits_for_a_call_does_not_take_its_step_unsaid(
    root: Path, calls: GuardedCalls, log: ReadLog, tell: Tell
) -> None:
    tell("PreToolUse", "short")
    (root / "b.txt").write_text("b")
    log.was_read.clear()
    refused: list[str] = []

    def undo() -> None:
        with pytest.raises(LookupError) as caught:
            calls.undo(1)
        refused.append(str(caught.value))

    waiting = threading.Thread(target=undo)
    waiting.start()
    assert log.was_read.wait(60)
    tell("PostToolUse", "short")
    waiting.join()
    assert "step 1 (claude Bash: short) was made" in refused[0]
    assert (root / "b.txt").exists()
    assert "b.txt" in calls.undo(1)
    assert not (root / "b.txt").exists()


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "core.hooksPath=/dev/null"]
    done = subprocess.run(["git", *who, *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_a_commit_is_undone_after_a_later_one_was_denied(root: Path, log: ReadLog) -> None:
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    with Workspace.open(root) as workspace:
        calls = GuardedCalls(root, log, open_workspace=lambda: workspace, policies=[PathPolicy(deny=["/protected"])])
        for name in ("b.txt", "protected"):
            call = {"tool_name": "Bash", "tool_input": {"command": name}, "tool_use_id": name}
            given: dict[str, Any] = {"session_id": "s", "cwd": str(root), "prompt_id": "p", "tool_response": {}}
            calls.handle(parse_event("claude", {"hook_event_name": "PreToolUse", **given, **call}))
            (root / name).write_text("x")
            git(root, "add", ".")
            git(root, "commit", "-qm", name)
            calls.handle(parse_event("claude", {"hook_event_name": "PostToolUse", **given, **call}))
        assert not (root / "protected").exists()
        assert git(root, "log", "--format=%s").split() == ["b.txt", "first"]
        assert "b.txt" in calls.undo(1)
        assert git(root, "log", "--format=%s").split() == ["first"]
        assert git(root, "status", "--short") == ""
        assert "missing" not in git(root, "fsck")
        workspace.undo()
        assert git(root, "log", "--format=%s").split() == ["b.txt", "first"]
        assert git(root, "status", "--short") == ""
