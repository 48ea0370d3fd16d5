"""A guard that is killed in the middle of an event: what it has done counts, and the next one says what that was."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from effort import kill_points
from failpoints import injected
from killing import killed_at

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, HookAnswer, open_guarded, parse_event
from ringfence_sandbox import Workspace

BASH = {"tool_name": "Bash", "tool_use_id": "c1", "tool_input": {"command": "x"}}
WRITE = {"tool_name": "Write", "tool_use_id": "c2"}
CALLS = ("open", "replace")
"""What a guard writes by, besides the points that the history names."""


class Guard:
    """Guards of one directory, one after the other, each in the place of one that was killed."""

    def __init__(self, root: Path, state: Path) -> None:
        self.root, self._state = root, state
        state.mkdir()
        self.log = GuardLog(state)

    def calls(self) -> GuardedCalls:
        return GuardedCalls(
            self.root,
            self.log,
            open_workspace=partial(open_guarded, str(self.root)),
            policies=[PathPolicy(deny=["/protected"])],
            state=self._state,
        )

    def tell(self, name: str, **more: Any) -> HookAnswer:
        calls = self.calls()
        try:
            return calls.handle(
                parse_event("claude", {"hook_event_name": name, "session_id": "s", "cwd": str(self.root), **more})
            )
        finally:
            calls.close()

    def is_killed_at(self, point: int, name: str, **more: Any) -> bool:
        """Whether it was killed before it had an answer."""

        def work(before: Callable[[str], None]) -> None:
            calls = self.calls()
            calls.open()
            count(before)
            with injected(before):
                calls.handle(
                    parse_event("claude", {"hook_event_name": name, "session_id": "s", "cwd": str(self.root), **more})
                )

        return killed_at(point, work)

    def files(self) -> set[str]:
        return {
            path.relative_to(self.root).as_posix()
            for path in self.root.rglob("*")
            if path.is_file() and not path.relative_to(self.root).parts[0].startswith(".ringfence")
        }


def count(before: Callable[[str], None]) -> None:
    """Have a forked child, which ends soon, name each file that it opens or replaces."""

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before(real.__name__)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))


def all_points(tmp_path: Path, work: Callable[[Guard, int], bool]) -> int:
    """Kill at one point after the other, each in a directory of its own. Return how many there are."""
    for number, point in enumerate(kill_points(6)):
        place = tmp_path / str(number)
        (place / "repo").mkdir(parents=True)
        (place / "repo" / "a.txt").write_text("a\n")
        if not work(Guard(place / "repo", place / "guard"), point):
            return number
    raise AssertionError("it is killed without end")


def test_a_kept_call_is_one_step_and_logged_once(tmp_path: Path) -> None:
    def work(guard: Guard, point: int) -> bool:
        guard.tell("PreToolUse", **BASH)
        (guard.root / "b.txt").write_text("b")
        killed = guard.is_killed_at(point, "PostToolUse", **BASH, tool_response={})
        assert guard.tell("PostToolUse", **BASH, tool_response={}) == HookAnswer()
        with Workspace.open(guard.root, read_only=True) as workspace:
            assert [(step.tool, step.paths) for step in workspace.steps()] == [("Bash", ("b.txt",))]
        assert [(one.kind, one.step) for one in guard.log.read() if one.kind != "unseen"] == [("kept", 1)]
        return killed

    assert all_points(tmp_path, work) >= 1


@pytest.mark.parametrize("tool", ["Bash", "Write"])
def test_a_denied_call_goes_back_and_its_model_is_told_by_the_next_guard(tmp_path: Path, tool: str) -> None:
    def work(guard: Guard, point: int) -> bool:
        (guard.root / "protected").mkdir()
        file = guard.root / "protected" / "x"
        call = BASH if tool == "Bash" else {**WRITE, "tool_input": {"file_path": str(file)}}
        guard.tell("PreToolUse", **call)
        file.write_text("x")
        if tool == "Bash":
            (guard.root / "side.txt").write_text("s")
        killed = guard.is_killed_at(point, "PostToolUse", **call, tool_response={})
        told = guard.tell("PostToolUse", **call, tool_response={})
        assert not file.exists()
        [record] = [one for one in guard.log.read() if one.kind == "denied"]
        with Workspace.open(guard.root, read_only=True) as workspace:
            assert record.aborted in [entry.number for entry in workspace.aborted()]
            kept = {path for step in workspace.steps() for path in step.paths}
        assert ("side.txt" in guard.files()) == ("side.txt" in kept)
        if killed:
            assert f"aborted/{record.aborted}" in told.verdict
        return killed

    assert all_points(tmp_path, work) >= 1


def test_a_call_that_begins_may_begin_again(tmp_path: Path) -> None:
    def work(guard: Guard, point: int) -> bool:
        killed = guard.is_killed_at(point, "PreToolUse", **BASH)
        assert guard.tell("PreToolUse", **BASH) == HookAnswer()
        (guard.root / "b.txt").write_text("b")
        assert guard.tell("PostToolUse", **BASH, tool_response={}) == HookAnswer()
        with Workspace.open(guard.root, read_only=True) as workspace:
            assert [(step.tool, step.paths) for step in workspace.steps()] == [("Bash", ("b.txt",))]
        assert [one.kind for one in guard.log.read()] == ["kept"]
        return killed

    assert all_points(tmp_path, work) >= 1


def test_a_call_whose_end_never_comes_loses_nothing(tmp_path: Path) -> None:
    def work(guard: Guard, point: int) -> bool:
        guard.tell("PreToolUse", **BASH)
        (guard.root / "protected").write_text("no")
        (guard.root / "b.txt").write_text("b")
        killed = guard.is_killed_at(point, "Stop")
        guard.tell("Stop")
        assert guard.files() == {"a.txt", "b.txt"}
        with Workspace.open(guard.root, read_only=True) as workspace:
            assert [step.paths for step in workspace.steps()] == [("b.txt",)]
            assert any("protected" in entry.paths for entry in workspace.aborted())
        return killed

    assert all_points(tmp_path, work) >= 1
