"""What commands do to git's own data: what only looks is no change, and what changes it is for people."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence

from ringfence.filesystem.paths import is_dotgit
from ringfence.testing import held_call
from ringfence_sandbox import Workspace

QUIET = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
IDENTITY = "-c user.name=A -c user.email=a@example.org"


def shell(command: str, cwd: Path) -> None:
    subprocess.run(command, shell=True, cwd=cwd, env=QUIET, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "nested").mkdir(parents=True)
    for place in (root, root / "nested"):
        (place / "a.txt").write_text("one\n")
        shell(f"git init -q; git add a.txt; git {IDENTITY} commit -qm All; git {IDENTITY} tag -am 1 v1", place)
        (place / "a.txt").write_text("two\n")
        os.utime(place / "a.txt", ns=(10**18, 10**18))
    return root


def changed_by(command: str, project: Path) -> list[str]:
    with Workspace.open(project, store=project.parent / "store") as workspace:
        with held_call(workspace.filesystem, opaque=True) as call:
            shell(command, project)
            call.commit()
        return [change.path for change in call.changes[workspace.filesystem.lock]]


TOUCH = "touch -d 2001-01-01 nested/a.txt a.txt"


@pytest.mark.parametrize(
    "command",
    [
        "git status",
        "git describe --tags --always --dirty",
        "git diff --stat",
        "git update-index --refresh || true",
        "git -C nested status",
        "git update-index --untracked-cache; git status",
        "git -c index.version=4 update-index --index-version 4",
        "git update-index --fsmonitor || true",
    ],
)
def test_a_refreshed_index_is_no_change(project: Path, command: str) -> None:
    shell("printf 'one\\n' > a.txt; printf 'one\\n' > nested/a.txt", project)
    index = project / ("nested/.git/index" if "-C nested" in command else ".git/index")
    before = index.read_bytes()
    assert changed_by(f"touch -d 2001-01-01 a.txt nested/a.txt; {command}", project) == []
    assert index.read_bytes() != before


@pytest.mark.parametrize(
    "command",
    [
        "git add a.txt",
        "git rm -q --cached a.txt",
        "git update-index --assume-unchanged a.txt",
        "git update-index --skip-worktree a.txt",
        "git update-index --chmod=+x a.txt",
        "git add -N nested/../b.txt",
        "printf 'DIRC of no version' > .git/index",
        "rm .git/index",
        "chmod 600 .git/index",
        "git update-index --split-index",
        "rm .git/index; ln -s ../nested/.git/index .git/index",
    ],
)
def test_an_index_with_other_entries_is_a_change(project: Path, command: str) -> None:
    (project / "b.txt").write_text("b\n")
    assert ".git/index" in changed_by(command, project)


def test_a_file_called_index_elsewhere_is_no_index(project: Path) -> None:
    (project / "index").write_bytes((project / ".git/index").read_bytes())
    assert changed_by("git status; printf x >> index", project) == ["index"]


SECTION = """
import subprocess
from ringfence import MarkdownSection, Tool, ToolResult
from dataclasses import dataclass

@dataclass(frozen=True)
class Run:
    command: str

def execute(params, *, context):
    done = subprocess.run(params.command, shell=True, cwd=context.filesystem.root, capture_output=True, text=True)
    return ToolResult.ok(None, f"exit {done.returncode} {done.stderr}")

tool = Tool[Run, None](name="execute", description="Run it.", handler=execute, opaque=True)
section = MarkdownSection(title="Commands", key="commands", template="Text.", tools=[tool])
"""
Execute = Callable[..., dict[str, Any]]


@pytest.fixture
def execute(project: Path) -> Execute:
    (project.parent / "commands.py").write_text(SECTION)

    def run(command: str, *options: str) -> dict[str, Any]:
        script = project.parent / "script.jsonl"
        calls = [{"name": "execute", "arguments": {"command": command}}]
        script.write_text(json.dumps({"text": "", "tool_calls": calls}) + "\n" + json.dumps({"text": "Done."}) + "\n")
        receipts = project.parent / "receipts.jsonl"
        receipts.unlink(missing_ok=True)
        named = ("--section", f"{project.parent}/commands.py:section", "--model", f"script:{script}", "--json")
        done = ringfence("run", project, "--task", "Do it.", *named, "--receipts", receipts, *options)
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "receipt": json.loads(receipts.read_text())}

    return run


def test_a_build_that_asks_git_for_its_version_is_kept(project: Path, execute: Execute) -> None:
    found = execute("touch -d 2001-01-01 a.txt; git describe --tags --always --dirty > version.txt")
    assert found["receipt"]["outcome"] == "committed"
    assert [change["path"] for change in found["receipt"]["changes"]] == ["version.txt"]
    assert (project / "version.txt").read_text() == "v1-dirty\n"
    assert ".git" not in found["patch"]


@pytest.mark.parametrize("command", ["git checkout -q -- a.txt", "git restore a.txt"])
def test_a_file_that_git_brings_back_is_a_change_of_that_file(project: Path, execute: Execute, command: str) -> None:
    receipt = execute(command)["receipt"]
    assert (receipt["outcome"], [change["path"] for change in receipt["changes"]]) == ("committed", ["a.txt"])
    assert (project / "a.txt").read_text() == "one\n"


GIT_COMMANDS = (f"git {IDENTITY} stash", f"git {IDENTITY} commit -qam x", "git checkout -q -b x", "git add a.txt")


@pytest.mark.parametrize("command", GIT_COMMANDS)
def test_what_is_denied_says_what_to_do_and_an_owner_may_allow_it(
    project: Path, execute: Execute, command: str
) -> None:
    before = (project / "a.txt").read_text()
    denied = execute(command)["receipt"]
    assert denied["outcome"] == "denied"
    assert "write_file" in denied["message"]
    assert (project / "a.txt").read_text() == before
    allowed = execute(command, "--allow-git")["receipt"]
    assert allowed["outcome"] == "committed"
    assert any(is_dotgit(path["path"].partition("/")[0].encode()) for path in allowed["changes"])
    assert ringfence("undo", project).returncode == 0
    assert (project / "a.txt").read_text() == before


@pytest.mark.parametrize(
    "command",
    [
        "printf '#!/bin/sh\\n' > .git/hooks/post-checkout",
        "git config core.fsmonitor ./evil",
        "git config --worktree core.pager ./evil",
        "printf '* filter=evil' > .git/info/attributes",
        "printf 'evil.py' > .git/info/exclude",
        "printf '/objects' > .git/objects/info/alternates",
        "printf '../elsewhere' > .git/commondir",
        "mkdir sub; git init -q sub",
        "mv nested/.git nested/moved; printf 'gitdir: /elsewhere' > nested/.git",
        "ln -s /elsewhere .git/refs/heads/x",
    ],
)
def test_hooks_and_settings_stay_as_they_are_also_where_git_is_allowed(execute: Execute, command: str) -> None:
    receipt = execute(command, "--allow-git")["receipt"]
    assert receipt["outcome"] == "denied"
    assert "git's own data" in receipt["message"]
