"""`ringfence guard undo`: which steps of agents it takes, and what it says of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

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
