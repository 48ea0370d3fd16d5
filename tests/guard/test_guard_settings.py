"""`ringfence guard install` and `uninstall` by a person, while an agent is at work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import ringfence_text
from guard_processes import BASH, RESULT, Run, asked

from ringfence_guard import AGENT_MARKS, GuardSettings, guard_directory, save_settings

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


@pytest.mark.parametrize("mark", AGENT_MARKS)
def test_a_command_of_an_agent_changes_no_installation_wherever_it_runs(
    root: Path, guard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    """No guard runs that could know the agent, as after `ringfence guard stop` or in another directory."""
    for scope in ((), ("--user",)):
        assert guard("install", "claude", *scope, "--policy", "deny:/protected").returncode == 0
    files = [path for top in (root, tmp_path / "home", tmp_path / "state") for path in sorted(top.rglob("*"))]
    before = {path: path.read_bytes() for path in files if path.is_file()}
    sibling = tmp_path / "sibling"
    sibling.mkdir()
    monkeypatch.setenv(mark, "1")
    for words in (("install", "claude"), ("uninstall", "claude"), ("stop",)):
        for scope in ((str(root),), ("--user",)) if words != ("stop",) else (("--directory", str(root)),):
            for cwd in (root, sibling):
                done = ringfence_text("guard", *words, *scope, cwd=cwd)
                assert done.returncode == 2, words
                assert "an agent's command may not do this: run it in a terminal of your own" in done.stderr
                assert f"unset {mark}" in done.stderr
    assert {path: path.read_bytes() for path in files if path.is_file()} == before
    monkeypatch.delenv(mark)
    assert guard("uninstall", "claude").returncode == 0


def test_an_agent_without_a_mark_is_known_by_the_guard_that_watches_it(root: Path, hook: Run, guard: Command) -> None:
    guard("install", "claude", "--user", "--policy", "deny:/protected")
    guard("install", "claude")
    hook("PreToolUse", **BASH, tool_input={"command": "x"})  # of this very process
    hook("PostToolUse", **BASH, tool_input={"command": "x"}, tool_response=RESULT)
    for words in (("uninstall", "claude", "--user"), ("install", "claude", "--user"), ("install", "claude")):
        command = [sys.executable, "-m", "ringfence_cli", "guard", *words]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, words
        assert "install and uninstall are for people" in done.stderr
    assert asked(root, {"kind": "status"})["status"]["sessions"] == 1
    assert "policies for all your projects (--user): deny:/protected" in guard("status").stdout


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


def test_a_status_says_why_policies_cannot_be_read_and_that_calls_are_denied(
    root: Path, guard: Command, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[policies]\npaths = { deny = ["/protected"] }\n')
    guard("install", "claude", "--policy", str(rules))
    assert "cannot be read" not in guard("status").stdout
    assert json.loads(guard("status", "--json").stdout)["unreadable_policies"] is None
    broken = guard_directory(root) / "settings.json"
    for file, break_it in ((rules, rules.unlink), (rules, lambda: rules.write_text("x")), (broken, broken.unlink)):
        break_it()
        if file == broken:
            file.write_text("x")
        (line,) = (one for one in guard("status").stdout.splitlines() if one.startswith("policies cannot be read: "))
        assert str(file) in line
        assert line.endswith("; calls are denied")
        assert str(file) in json.loads(guard("status", "--json").stdout)["unreadable_policies"]
        assert "no guard runs" in guard("status").stdout


@pytest.mark.parametrize("scope", [(), ("--user",)])
def test_policies_that_an_installation_does_not_name_again_are_dropped_and_said(
    root: Path, guard: Command, scope: tuple[str, ...]
) -> None:
    given = ("--background", "deny", *options("deny:/protected", "deletions:2"))
    assert "dropped" not in guard("install", "claude", *scope, *given).stdout
    assert "dropped" not in guard("install", "claude", *scope, *given).stdout
    said = guard("install", "claude", *scope, "--policy", "deletions:2").stdout
    assert "policies dropped, which held before: deny:/protected, --background deny\n" in said
    said = guard("install", "claude", *scope).stdout
    assert "policies dropped, which held before: deletions:2\npolicies: none beside those of the owner\n" in said
    assert "dropped" not in guard("uninstall", "claude", *scope).stdout
    guard("install", "claude", *scope, "--policy", "deletions:2")
    assert "policies dropped, which held before: deletions:2\n" in guard("uninstall", "claude", *scope).stdout


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


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to somebody else")


@needs_root
def test_settings_stay_their_owners(root: Path, guard: Command) -> None:
    (root / ".claude").mkdir()
    (root / FILE).write_text('{"a": 1}')
    os.chown(root / FILE, 65534, 65533)
    (root / FILE).chmod(0o640)
    for words in (("install", "claude"), ("uninstall", "claude")):
        assert guard(*words).returncode == 0
        found = (root / FILE).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (65534, 65533, 0o640)
    assert (root / FILE).read_text() == '{"a": 1}'


def test_a_link_to_settings_stays_a_link(root: Path, guard: Command, tmp_path: Path) -> None:
    (root / ".claude").mkdir()
    kept = tmp_path / "dotfiles.json"
    kept.write_text('{"a": 1}')
    (root / FILE).symlink_to(kept)
    guard("install", "claude")
    assert "hook_client.py" in kept.read_text()
    guard("uninstall", "claude")
    assert (root / FILE).is_symlink()
    assert kept.read_text() == '{"a": 1}'


def fire(root: Path, name: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a hook as an editor or an SSH server starts one: without a terminal, and with nothing in its environment."""
    call = {"tool_name": "Bash", "tool_input": {"command": script}, "tool_use_id": script, "tool_response": RESULT}
    event = {"hook_event_name": name, "session_id": "s", "cwd": str(root), "prompt_id": "p", **call}
    command = json.loads((root / FILE).read_text())["hooks"][name][0]["hooks"][0]["command"]
    words = ["/bin/sh", "-c", command]
    given = json.dumps(event)
    return subprocess.run(
        words, input=given, capture_output=True, text=True, cwd="/", env={}, start_new_session=True, timeout=60
    )


def test_a_hook_needs_nothing_of_the_environment_of_its_agent(root: Path, guard: Command) -> None:
    guard("install", "claude", "--policy", "deny:/protected")
    assert fire(root, "PreToolUse", "x").returncode == 0
    (root / "protected").mkdir()
    assert "protected must not be created" in fire(root, "PostToolUse", "x").stdout
    assert "aborted/1" in guard("log").stdout
    guard("stop")


def test_calls_are_denied_where_the_state_has_gone_until_hooks_are_installed_again(
    root: Path, guard: Command, tmp_path: Path
) -> None:
    """As in a container that was made anew, with the directory mounted and the state directory not."""
    guard("install", "claude", "--policy", "deny:/protected")
    assert fire(root, "PreToolUse", "x").returncode == 0
    assert fire(root, "PostToolUse", "x").returncode == 0
    guard("stop")
    shutil.rmtree(tmp_path / "state")
    assert fire(root, "PreToolUse", "y").returncode not in (0, 1)
    assert not guard_directory(root).exists()
    assert guard("install", "claude", "--policy", "deny:/protected").returncode == 0
    assert fire(root, "PreToolUse", "y").returncode == 0
    (root / "protected").mkdir()
    assert "protected must not be created" in fire(root, "PostToolUse", "y").stdout
    guard("stop")
