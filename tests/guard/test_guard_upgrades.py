"""The hooks of `ringfence guard` after an upgrade of ringfence, or without it: as agents run them, by a shell."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence_text

from ringfence_guard import GuardLog, client_path, guard_directory


@dataclass
class Installed:
    """An installation of ringfence in an environment of its own, and the hooks that it has written."""

    root: Path
    tool: Path
    program: Path
    hooks: dict[str, str]

    @property
    def package(self) -> Path:
        return self.tool / "lib/python3.11/site-packages/ringfence_guard"

    def fire(self, name: str, *, allow: bool = False) -> subprocess.CompletedProcess[str]:
        call = {"tool_name": "Bash", "tool_input": {"command": "x"}, "tool_use_id": "x", "tool_response": {}}
        event = {"hook_event_name": name, "session_id": "s", "cwd": str(self.root), "prompt_id": "p", **call}
        return subprocess.run(
            self.hooks[name] + (" --if-unavailable allow" if allow else ""),
            shell=True,
            input=json.dumps(event),
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "CLAUDE_PID": str(os.getpid())},
        )

    def call(self, name: str) -> None:
        assert self.fire("PreToolUse").returncode == 0
        (self.root / name).write_text(name)
        assert self.fire("PostToolUse").returncode == 0


@pytest.fixture
def installed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Installed]:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = ringfence_text("guard", "install", "claude", cwd=root)
    assert done.returncode == 0, done.stderr
    tool, program = tmp_path / "tool", tmp_path / "ringfence"
    found = Installed(root, tool, program, {})
    shutil.copytree(Path(client_path()).parent, found.package)
    interpreter(tool / "bin/python", sys.executable)
    program.write_text(f"#!{tool}/bin/python\n")
    written: dict[str, Any] = json.loads((root / ".claude/settings.local.json").read_text())["hooks"]
    for name, groups in written.items():
        words = shlex.split(groups[0]["hooks"][0]["command"])
        words[2:5] = [str(tool / "bin/python"), str(found.package / "hook_client.py"), str(program)]
        found.hooks[name] = shlex.join(words)
    yield found
    ringfence_text("guard", "stop", cwd=root)


def interpreter(path: Path, runs: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(runs)} "$@"\n')
    path.chmod(0o755)


SHORT = "#!{}\n"
LONG = '#!/bin/sh\n\'\'\'exec\' "{}" "$0" "$@"\n'
"""The first lines of a program in Python whose interpreter has a long path."""


@pytest.mark.parametrize("lines", [SHORT, LONG])
def test_a_hook_finds_an_installation_that_was_made_anew(installed: Installed, tmp_path: Path, lines: str) -> None:
    installed.call("1.txt")
    (installed.tool / "lib/python3.11").rename(installed.tool / "lib/python3.12")
    installed.call("2.txt")
    installed.tool.rename(tmp_path / "another")
    installed.program.write_text(lines.format(tmp_path / "another/bin/python"))
    installed.call("3.txt")
    log = GuardLog(guard_directory(installed.root)).read()
    assert [record.paths for record in log] == [["1.txt"], ["2.txt"], ["3.txt"]]


def only_client(installed: Installed) -> None:
    """Leave the client, with an interpreter that has no package to start a guard."""
    shutil.rmtree(installed.package)
    installed.package.mkdir()
    shutil.copy(client_path(), installed.package)
    interpreter(installed.tool / "bin/python", os.path.realpath(sys.executable))


@pytest.mark.parametrize(
    "remove",
    [
        lambda installed: shutil.rmtree(installed.tool),
        lambda installed: shutil.rmtree(installed.tool / "bin"),
        lambda installed: shutil.rmtree(installed.package),
        only_client,
    ],
    ids=["all", "interpreter", "package", "all but the client"],
)
def test_a_hook_whose_installation_has_gone_says_so_and_obeys(
    installed: Installed, remove: Callable[[Installed], None]
) -> None:
    remove(installed)
    denied = installed.fire("PreToolUse")
    assert denied.returncode == 2
    assert "run `ringfence guard install` again" in denied.stderr
    for event in ("PostToolUse", "Stop", "SessionEnd", "UserPromptSubmit"):
        done = installed.fire(event)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert installed.fire("PreToolUse", allow=True).returncode == 0


@pytest.mark.parametrize(("cache", "tag"), [("uv/archive-v0", "uv/CACHEDIR.TAG"), (".cache/pipx", "unrelated")])
def test_hooks_that_a_cleaning_of_a_cache_would_end_are_not_installed(
    root: Path, tmp_path: Path, cache: str, tag: str
) -> None:
    environment = tmp_path / cache / "abc"
    venv.create(environment, symlinks=True)
    (tmp_path / tag).write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    (environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages/own.pth").write_text(
        "\n".join(path for path in sys.path if path)
    )
    words = [str(environment / "bin/python"), "-m", "ringfence_cli", "guard", "install", "claude"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        f"ringfence runs from the cache {(tmp_path / tag).parent if 'TAG' in tag else tmp_path / cache}" in done.stderr
    )
    assert "`uv tool install ringfence`" in done.stderr
    assert not (root / ".claude").exists()
