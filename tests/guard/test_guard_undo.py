"""`ringfence guard undo`: which steps of agents it takes, and what it says of them."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from effort import SEED, spread

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


def change_at_random(root: Path, chance: random.Random) -> None:
    """Make, edit, empty, remove or move a few of a few files."""
    for _ in range(chance.randint(1, 3)):
        path = root / chance.choice(("a.txt", "b.txt", "d/c.txt", "d/e.txt"))
        lines = path.read_text().splitlines() if path.exists() else [*"12345678"]
        match chance.randrange(5):
            case 0:
                path.unlink(missing_ok=True)
                if path.parent != root and path.parent.exists() and not [*path.parent.iterdir()]:
                    path.parent.rmdir()
                continue
            case 1 if path.exists():
                path.replace(root / "b.txt")
                continue
            case 2:
                lines = []
            case _:
                at = chance.randrange(len(lines) + 1)
                del lines[at : at + 1]
                lines.insert(chance.randrange(len(lines) + 1), str(chance.random()))
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("seed", spread(range(120), 12))
def test_a_dry_run_says_what_the_undo_then_does(root: Path, calls: GuardedCalls, tell: Tell, seed: int) -> None:
    chance = random.Random(f"{SEED} {seed}")
    for number in range(8):
        if chance.random() < 0.3:
            change_at_random(root, chance)  # a person
        tell("PreToolUse", f"{number}")
        change_at_random(root, chance)
        tell("PostToolUse", f"{number}")
    for _ in range(3):
        n, by = chance.randint(1, 4), chance.choice(("", "", "prompt"))
        paths = chance.choice((None, None, ["d"], ["a.txt", "b.txt"]))
        before = {path: path.read_text() for path in root.rglob("*.txt")}
        try:
            would = calls.undo(n, by, paths, dry_run=True)
        except LookupError as error:
            with pytest.raises(LookupError, match=".") as caught:
                calls.undo(n, by, paths)
            assert str(caught.value) == str(error)
            continue
        assert {path: path.read_text() for path in root.rglob("*.txt")} == before
        did = calls.undo(n, by, paths)
        words = would.replace("Would be undone", "Undone").replace("Nothing would be undone", "Nothing was undone")
        assert did.partition(" (step ")[0] == words
        if chance.random() < 0.5:
            change_at_random(root, chance)


def test_an_undo_of_several_steps_is_one_step(
    root: Path, calls: GuardedCalls, tell: Tell, workspace: Workspace
) -> None:
    for name in ("b", "c"):
        tell("PreToolUse", name)
        (root / name).write_text(name)
        tell("PostToolUse", name)
    assert calls.undo(2) == "Undone: b, c. (step 3)"
    workspace.undo()
    assert (root / "b").exists()
    assert (root / "c").exists()
