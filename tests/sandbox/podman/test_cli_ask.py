"""`ringfence run --ask commands` at a terminal, with a container."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from terminals import Terminal

from ringfence_sandbox import Workspace

pytestmark = pytest.mark.usefixtures("podman", "limits_hold")


def at_terminal(tree: Path, *commands: str, options: tuple[str, ...] = ()) -> Terminal:
    tree.mkdir()
    (tree / "a").write_text("old\n")
    turns: list[Mapping[str, Any]] = [
        {"tool_calls": [{"name": "shell_execute", "arguments": {"command": command}}]} for command in commands
    ]
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in [*turns, {"text": "Done."}]))
    run = [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--task", "x", "--model", f"script:{script}"]
    receipts = str(tree.parent / "receipts.jsonl")
    return Terminal([*run, "--workspace", "podman", "--ask", "commands", "--receipts", receipts, *options])


def test_a_command_is_approved_by_what_it_did(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    commands = [
        "cat a",
        "echo new > a; printf 'said\\033[2J'; exit 3",
        "echo new > a; rm a",
        "date +%N > b",
        "date +%N > b",
    ]
    with at_terminal(tree, *commands) as terminal:
        shown = terminal.wait_for("keep it?")
        assert "  | command: echo new > a; printf 'said\\033[2J'; exit 3" in shown  # the first has changed nothing
        assert "  exit code 3\n" in shown
        assert "  | said\\x1b[2J" in shown
        assert "| modified a" not in shown, "the diff has it"
        assert "  | -old\n  | +new\n" in shown
        terminal.type("no leave it\n")
        shown = terminal.wait_for("keep it?")
        assert "  | deleted file mode 100644" in shown
        assert (tree / "b").exists() is False
        terminal.type("no\n\n")
        assert "always covers exactly this command" in terminal.wait_for("keep it?")
        terminal.type("always\n")
        assert terminal.end() == 0
    assert {path.name for path in tree.iterdir()} == {"a", "b"}
    assert (tree / "a").read_text() == "old\n"
    lines = (tmp_path / "receipts.jsonl").read_text().splitlines()
    assert "a person said no: leave it; it had ended with exit code 3" in json.loads(lines[1])["message"]


def test_a_kill_while_a_command_waits_is_a_rollback(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    with at_terminal(tree, "echo new > a; echo new > b") as terminal:
        terminal.wait_for("keep it?")
        assert (tree / "b").exists()
        terminal.process.send_signal(signal.SIGKILL)
        terminal.end()
    with Workspace.open(tree) as workspace:
        assert workspace.steps() == []
    assert {path.name: path.read_text() for path in tree.iterdir()} == {"a": "old\n"}


@pytest.mark.parametrize(
    ("options", "has"), [(("--network", "bridge"), "a network (bridge)"), (("--secret", "ASKED"), "the secret ASKED")]
)
def test_a_command_that_may_do_what_stays_is_asked_about_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str], has: str
) -> None:
    monkeypatch.setenv("ASKED", "correct horse battery")
    tree = tmp_path / "tree"
    with at_terminal(tree, "echo new > a", options=options) as terminal:
        shown = terminal.wait_for("run it?")
        assert f"it has not run yet: its commands have {has}" in shown
        assert (tree / "a").read_text() == "old\n"
        terminal.type("yes\n")
        assert "+new" in terminal.wait_for("keep it?")
        terminal.type("yes\n")
        assert terminal.end() == 0
    assert (tree / "a").read_text() == "new\n"
