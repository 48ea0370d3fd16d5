"""What `ringfence guard` names as the cause, where nobody knows for sure whose a change is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, GuardSettings, HookAnswer, parse_event
from ringfence_sandbox import Workspace

Tell = Callable[..., HookAnswer]


@pytest.fixture
def log(tmp_path: Path) -> GuardLog:
    return GuardLog(tmp_path)


@pytest.fixture
def tell(root: Path, workspace: Workspace, log: GuardLog) -> Tell:
    """Tells the guard of an event of a command of Claude Code, which must not run in the background."""
    calls = GuardedCalls(
        root,
        log,
        open_workspace=lambda: workspace,
        policies=[PathPolicy(deny=["/protected"])],
        settings=GuardSettings(deny_background=True),
    )

    def event(name: str, command: str, **more: Any) -> HookAnswer:
        call = {"tool_name": "Bash", "tool_input": {"command": command, **more}, "tool_use_id": command}
        about = {"session_id": "s", "cwd": str(root), "prompt_id": "p", "tool_response": {}}
        given = {"hook_event_name": name, "transcript_path": str(root.parent / "transcript"), **about, **call}
        return calls.handle(parse_event("claude", given))

    return event


def record_result(root: Path, command: str) -> None:
    with (root.parent / "transcript").open("a") as transcript:
        transcript.write(json.dumps({"type": "tool_result", "tool_use_id": command, "is_error": True}) + "\n")


def test_a_call_that_was_refused_is_not_blamed_for_what_a_person_does_later(
    root: Path, tell: Tell, log: GuardLog, workspace: Workspace
) -> None:
    tell("PreToolUse", "rm -r everything")
    record_result(root, "rm -r everything")
    tell("PreToolUse", "true")
    tell("PostToolUse", "true")
    (root / "protected").mkdir()
    tell("PreToolUse", "echo")
    assert tell("PostToolUse", "echo") == HookAnswer()
    assert (root / "protected").exists()
    assert log.read() == ()
    assert not workspace.steps()


def test_a_call_whose_end_nobody_knows_is_named_so(root: Path, tell: Tell) -> None:
    tell("PreToolUse", "lost")
    tell("Stop", "")
    (root / "protected").mkdir()
    tell("PreToolUse", "echo")
    told = tell("PostToolUse", "echo").context
    assert "by lost (its end was never told) or by somebody else" in told


@pytest.mark.parametrize(
    ("given", "why"), [({"command": "sleep 9 &"}, "`&`"), ({"command": "sleep", "run_in_background": True}, "asks for")]
)
def test_a_refusal_of_a_command_in_the_background_says_by_what_it_is_known(
    tell: Tell, given: dict[str, Any], why: str
) -> None:
    assert why in tell("PreToolUse", **given).denial
