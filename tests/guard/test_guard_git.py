"""What a denied call did to git's own data: what is said of it, and how a person gets at it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence_text
from real_git import git, repository

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, parse_event
from ringfence_sandbox import Workspace

Deny = Callable[[str], str]
WHO = "git config --local user.name n; git config --local user.email e;"
COMMIT = "git add -A; git -c user.name=n -c user.email=e@e commit -qm more;"


@pytest.fixture
def deny(root: Path, tmp_path: Path) -> Deny:
    """Has an agent run a command that is denied. Returns what its model is told."""
    repository(root)

    def run(script: str) -> str:
        call = {"tool_name": "Bash", "tool_input": {"command": script}, "tool_use_id": script}
        given: dict[str, Any] = {"session_id": "s", "cwd": str(root), "prompt_id": "p", "tool_response": {}, **call}
        policies = [PathPolicy(deny=["/protected"])]
        with Workspace.open(root) as workspace:
            calls = GuardedCalls(root, GuardLog(tmp_path), open_workspace=lambda: workspace, policies=policies)
            calls.handle(parse_event("claude", {"hook_event_name": "PreToolUse", **given}))
            subprocess.run(["sh", "-ec", script], cwd=root, check=True)
            return calls.handle(parse_event("claude", {"hook_event_name": "PostToolUse", **given})).verdict

    return run


def show(root: Path, *words: str) -> str:
    done = ringfence_text("guard", "show", "aborted/1", *words, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_denied_commit_is_named_and_a_branch_gets_it(root: Path, deny: Deny) -> None:
    before = git(root, "rev-parse", "HEAD").strip()
    verdict = deny(f"echo 2 > b.txt; touch protected; {COMMIT}")
    assert git(root, "rev-parse", "HEAD").strip() == before
    assert "objects of git" not in verdict
    assert "What came to .git/objects stays there, and git's refs are what they were." in verdict
    shown = show(root)
    (new,) = re.findall(rf"^git: refs/heads/\w+: {before} -> ([0-9a-f]{{40}})$", shown, re.MULTILINE)
    (command,) = re.findall("`(git branch NAME .+)` gets it", shown)
    git(root, *command.replace("NAME", "again").split()[1:])
    assert git(root, "rev-parse", "again").strip() == new
    assert git(root, "show", "again:b.txt") == "2\n"
    assert git(root, "fsck", "--full") == ""
    (ref,) = json.loads(show(root, "--json"))["git"]["refs"]
    assert (ref["repository"], ref["before"], ref["after"], ref["missing"]) == (".git", before, new, False)


def test_commits_of_branches_tags_and_stashes_are_named_though_refs_are_packed(root: Path, deny: Deny) -> None:
    deny(
        f"{COMMIT[:-1]} --allow-empty; git tag v1; git branch side; git pack-refs --all; git checkout -q side;"
        "echo s > a.txt; git -c user.name=n -c user.email=e@e stash -q; touch protected"
    )
    shown = show(root)
    for name in ("refs/heads/side", "refs/tags/v1", "refs/stash"):
        assert re.search(rf"^git: {name}: none -> [0-9a-f]{{40}}$", shown, re.MULTILINE)
    assert re.search(r"^git: HEAD: ref: refs/heads/\w+ -> ref: refs/heads/side$", shown, re.MULTILINE)
    (stash,) = re.findall("refs/stash: none -> (.+)", shown)
    git(root, "stash", "apply", stash)
    assert (root / "a.txt").read_text() == "s\n"


def test_settings_hooks_and_logs_of_a_denied_call_are_shown_as_text(root: Path, deny: Deny) -> None:
    deny(f"{WHO} git config alias.x '!rm'; echo 'echo hi' > .git/hooks/pre-commit; {COMMIT[:-1]} --allow-empty")
    shown = show(root)
    for line in ("+++ b/.git/config", "+\tx = !rm", "+++ b/.git/hooks/pre-commit", "+echo hi", "+++ b/.git/logs/HEAD"):
        assert f"\n    {line}\n" in shown
    assert re.search(r"\n    \+.*\tcommit: more\n", shown)
    listed = show(root, "--stat")
    assert ".git/hooks/pre-commit" in listed
    assert "+echo hi" not in listed


def test_a_patch_is_applied_by_git_whatever_a_step_did_to_its_own_data(root: Path, deny: Deny) -> None:
    deny(f"echo 2 > b.txt; git config a.b c; {COMMIT} touch protected")
    git(root, "apply", given=show(root).encode())
    assert (root / "b.txt").read_text() == "2\n"


def test_an_id_whose_objects_went_back_too_is_named_so(root: Path) -> None:
    repository(root)
    commit = ["sh", "-c", f"echo 2 > b.txt; {COMMIT} exit 1"]
    assert ringfence_text("exec", "--", *commit, cwd=root).returncode == 1
    shown = show(root)
    assert re.search(r"^git: refs/heads/\w+: [0-9a-f]+ -> [0-9a-f]{40}, whose objects", shown, re.MULTILINE)
    assert "git branch" not in shown
