"""`ringfence guard install` and `uninstall` by a person, while an agent is at work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import ringfence_text
from guard_processes import BASH, RESULT, Run, asked

from ringfence_guard import GuardSettings, save_settings

FILE = ".claude/settings.local.json"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def guard(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in the directory, with a home of its own, as a person does."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return lambda *words: ringfence_text("guard", *words, cwd=root)


def test_an_uninstallation_during_a_call_stands_when_the_call_is_denied(root: Path, hook: Run, guard: Command) -> None:
    assert guard("install", "claude", "--policy", "deny:/protected").returncode == 0
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    (root / "side.txt").write_text("s")
    done = guard("uninstall", "claude")
    assert done.returncode == 0, done.stderr
    assert not (root / ".claude").exists()
    (root / "protected").mkdir()
    told = hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT).stdout
    assert "protected must not be created" in told
    assert ".claude" not in told
    assert not (root / "side.txt").exists()
    assert not (root / ".claude").exists()


def test_an_installation_during_a_call_stands_and_the_call_is_judged(root: Path, hook: Run, guard: Command) -> None:
    save_settings(root, GuardSettings(policies=("deny:/protected",)))
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    (root / "protected").mkdir()
    done = guard("install", "claude", "--policy", "deny:/other")
    assert done.returncode == 0, done.stderr
    told = hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT).stdout
    assert "protected must not be created" in told
    assert "hook_client.py" in (root / FILE).read_text()
    hook("PreToolUse", **{**BASH, "tool_use_id": "c2"}, tool_input={"command": "y"})
    (root / "other").mkdir()
    told = hook(
        "PostToolUse", **{**BASH, "tool_use_id": "c2"}, tool_input={"command": "y"}, tool_response=RESULT
    ).stdout
    assert "other must not be created" in told


def test_settings_that_a_call_has_changed_are_left_to_its_end(root: Path, hook: Run, guard: Command) -> None:
    guard("install", "claude")
    before = (root / FILE).read_bytes()
    hook("PreToolUse", **BASH, tool_input={"command": "x"})
    (root / FILE).write_text(json.dumps({"hooks": {}}))
    done = guard("uninstall", "claude")
    assert done.returncode == 2
    assert f"a call of an agent has changed {FILE}: do this again after its end" in done.stderr
    assert FILE in hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT).stdout
    assert (root / FILE).read_bytes() == before


def test_an_agent_does_not_uninstall_its_guard(root: Path, hook: Run, guard: Command) -> None:
    guard("install", "claude")
    before = (root / FILE).read_bytes()
    hook("PreToolUse", **BASH, tool_input={"command": "x"})  # of this very process
    words = [sys.executable, "-m", "ringfence_cli", "guard", "uninstall", "claude"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "install and uninstall are for people" in done.stderr
    assert (root / FILE).read_bytes() == before
    assert hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT).stdout == ""


def test_an_uninstallation_beside_a_background_command_is_no_late_change(root: Path, hook: Run, guard: Command) -> None:
    guard("install", "claude")
    call = {**BASH, "tool_input": {"command": "x", "run_in_background": True}}
    hook("PreToolUse", **call)
    hook("PostToolUse", **call, tool_response=RESULT)
    assert guard("uninstall", "claude").returncode == 0
    hook("PreToolUse", **{**BASH, "tool_use_id": "c2"}, tool_input={"command": "y"})
    assert not (root / FILE).exists()
    assert asked(root, {"kind": "status"})["status"]["sessions"] == 1


def bash(root: Path, hook: Run, script: str) -> str:
    """Have an agent run a command. Returns what its model is told."""
    call = {"tool_name": "Bash", "tool_use_id": script, "tool_input": {"command": script}}
    assert hook("PreToolUse", **call).returncode == 0
    subprocess.run(["sh", "-c", script], cwd=root, check=True)
    return hook("PostToolUse", **call, tool_response=RESULT).stdout


def options(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--policy", spec)]


def test_policies_of_a_person_and_of_a_directory_both_hold(root: Path, hook: Run, guard: Command) -> None:
    persons, directorys = ("deny:/src/protected", "allow:/src"), ("deny:/src/other", "allow:/src", "allow:/docs")
    (root / "src").mkdir()
    guard("install", "claude", "--user", *options(*persons))
    guard("install", "claude", *options(*directorys))
    for path in ("src/protected", "src/other", "docs"):
        assert f"denies it: {path} " in bash(root, hook, f"mkdir {path}")
    assert bash(root, hook, "touch src/f") == ""
    shown = guard("status").stdout
    assert f"policies for all your projects (--user): {', '.join(persons)}\n" in shown
    assert f"policies of this directory: {', '.join(directorys)}\n" in shown
    chosen = json.loads(guard("status", "--json").stdout)["settings"]
    assert [(scope, tuple(one["policies"])) for scope, one in chosen.items()] == [
        ("user", persons),
        ("directory", directorys),
    ]


def test_policies_go_with_the_last_agent_that_they_were_chosen_for(root: Path, guard: Command) -> None:
    for agent in ("claude", "qwen"):
        guard("install", agent, "--user", "--policy", "deny:/protected")
    guard("uninstall", "claude", "--user")
    assert "deny:/protected" in guard("status").stdout
    guard("uninstall", "qwen", "--user")
    assert "policies: none beside" in guard("status").stdout


def test_a_policy_file_is_found_from_any_directory(root: Path, hook: Run, guard: Command, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('[policies]\npaths = { deny = ["/protected"] }\n')
    done = guard("install", "claude", "--policy", "../rules.toml")
    assert done.returncode == 0, done.stderr
    assert "protected must not be created" in bash(root, hook, "mkdir protected")


def test_an_installation_within_a_guarded_directory_says_what_to_do(root: Path, guard: Command) -> None:
    inner = root / "inner"
    inner.mkdir()
    guard("install", "claude")
    said = guard("install", "claude", "inner").stdout
    assert f"{root} is guarded, too" in said
    assert f"`ringfence guard stop --directory {root}`" in said
    guard("uninstall", "claude")
    assert "is guarded, too" not in guard("install", "claude", "inner").stdout
