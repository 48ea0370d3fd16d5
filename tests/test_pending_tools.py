"""Tools that somebody else runs, and tells of before and after each call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringfence.errors import ParticipantBusyError
from ringfence.filesystem import InMemoryFilesystem
from ringfence.participants import CURRENT_CALL, Transactional
from ringfence.runtime import PendingToolTracker, Session
from ringfence_sandbox import Workspace


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Taking:
    participants: tuple[Transactional, ...]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    with Workspace.open(tmp_path / "tree", store=tmp_path / "store") as opened:
        yield opened


def test_what_changed_between_the_hooks_is_kept_or_rolled_back(workspace: Workspace) -> None:
    session, root = Session(), Path(workspace.root)
    tracker = PendingToolTracker(session, Taking((workspace.filesystem,)))
    tracker.begin_tool_execution("1", "Bash")
    assert tracker.pending_tool_executions == {"1": "Bash"}
    (root / "a.txt").write_text("two\n")
    (root / "b.txt").write_text("new\n")
    session.dispatch(Note("lost"))
    assert tracker.end_tool_execution("1", success=False) is True
    assert ((root / "a.txt").read_text(), (root / "b.txt").exists()) == ("one\n", False)
    assert session[Note].all() == ()

    tracker.begin_tool_execution("2", "Edit")
    (root / "a.txt").write_text("two\n")
    assert tracker.end_tool_execution("2", success=True) is False
    assert (root / "a.txt").read_text() == "two\n"
    assert [(step.tool, step.paths) for step in workspace.steps()] == [("Edit", ("a.txt",))]
    assert tracker.pending_tool_executions == {}


def test_hooks_come_on_any_thread_and_leave_nothing_there(workspace: Workspace) -> None:
    tracker = PendingToolTracker(Session(), Taking((workspace.filesystem,)))
    tracker.begin_tool_execution("1", "Bash")
    assert CURRENT_CALL.get() is None
    (Path(workspace.root) / "a.txt").write_text("two\n")
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(tracker.abort_tool_execution("1")))
    thread.start()
    thread.join(30)
    assert ended == [True]
    assert (Path(workspace.root) / "a.txt").read_text() == "one\n"
    tracker.begin_tool_execution("1", "Bash")
    assert tracker.end_tool_execution("1", success=True) is False


def test_an_unknown_call_is_none_and_a_known_one_begins_once() -> None:
    tracker = PendingToolTracker(Session())
    assert tracker.end_tool_execution("no", success=False) is False
    assert tracker.abort_tool_execution("no") is False
    tracker.begin_tool_execution("1", "Read")
    with pytest.raises(ValueError, match="1 has begun already"):
        tracker.begin_tool_execution("1", "Read")
    assert tracker.abort_tool_execution("1") is True
    assert tracker.abort_tool_execution("1") is False


def test_one_call_runs_at_a_time() -> None:
    impatient = InMemoryFilesystem(patience_seconds=0.01)  # older than the session, and so waited for first
    tracker = PendingToolTracker(Session(), Taking((impatient,)))
    tracker.begin_tool_execution("1", "Read")
    with pytest.raises(ParticipantBusyError):
        tracker.begin_tool_execution("2", "Read")
    assert tracker.pending_tool_executions == {"1": "Read"}
    assert tracker.end_tool_execution("1", success=True) is False
    tracker.begin_tool_execution("2", "Read")
    tracker.abort_tool_execution("2")
