"""The trust of Codex in the guard's hooks: asked of a person, and written to Codex's own settings."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CODEX = '''#!{python}
"""Answers as `codex app-server` does, with the hooks of a project that the settings trust."""
import hashlib, json, os, sys, tomllib

home = os.environ["HOME"] + "/.codex/config.toml"
held = tomllib.load(open(home, "rb")) if os.path.exists(home) else {{}}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        print(json.dumps({{"method": "configWarning", "params": {{}}}}))
        print(json.dumps({{"id": asked["id"], "result": {{}}}}))
    if asked["method"] == "hooks/list":
        cwd = asked["params"]["cwds"][0]
        file = cwd + "/.codex/hooks.json"
        hooks = []
        for event, groups in json.load(open(file))["hooks"].items() if cwd in held.get("projects", {{}}) else ():
            for number, group in enumerate(groups):
                key = f"{{file}}:{{event}}:{{number}}:0"
                digest = "sha256:" + hashlib.sha256(json.dumps(group).encode()).hexdigest()
                known = held.get("hooks", {{}}).get("state", {{}}).get(key, {{}}).get("trusted_hash")
                trust = "untrusted" if known is None else "trusted" if known == digest else "modified"
                about = {{"key": key, "eventName": event, "command": group["hooks"][0]["command"]}}
                hooks.append(about | {{"sourcePath": file, "currentHash": digest, "trustStatus": trust}})
        print(json.dumps({{"id": asked["id"], "result": {{"data": [{{"cwd": cwd, "hooks": hooks}}]}}}}))
    sys.stdout.flush()
'''

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def settings(root: Path, tmp_path: Path) -> Path:
    path = tmp_path / "home/.codex/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(f'# mine\nmodel = "m"\n\n[projects."{root}"]\ntrust_level = "trusted"\n')
    return path


@pytest.fixture
def guard(root: Path, tmp_path: Path, settings: Path) -> Run:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/codex"
    program.write_text(CODEX.format(python=sys.executable))
    program.chmod(0o755)

    def run(*words: str, answer: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HOME": str(tmp_path / "home"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        environment.pop("CODEX_HOME", None)
        command = [sys.executable, "-m", "ringfence_cli", "guard", *words]
        return subprocess.run(
            command, cwd=root, input=answer, capture_output=True, text=True, timeout=60, env=environment
        )

    return run


def trusted(settings: Path) -> dict[str, Any]:
    return tomllib.loads(settings.read_text()).get("hooks", {}).get("state", {})


def test_hooks_are_trusted_after_a_yes_and_forgotten_by_an_uninstallation(guard: Run, settings: Path) -> None:
    before = settings.read_text()
    done = guard("install", "codex", "--trust", answer="y\n")
    assert done.returncode == 0, done.stderr
    assert "hook_client.py" in done.stdout
    assert "PreToolUse" in done.stdout
    assert len(trusted(settings)) == 8
    assert settings.read_text().startswith(before)
    assert "trusted already" in guard("install", "codex", "--trust").stdout
    changed = guard("install", "codex", "--trust", "--if-unavailable", "allow", answer="y\n")
    assert "the hooks are trusted, in" in changed.stdout
    assert "trusted already" in guard("install", "codex", "--trust", "--if-unavailable", "allow").stdout
    assert guard("uninstall", "codex").returncode == 0
    assert trusted(settings) == {}
    assert settings.read_text().strip() == before.strip()


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_without_a_yes_nothing_is_trusted(guard: Run, settings: Path, answer: str) -> None:
    before = settings.read_text()
    done = guard("install", "codex", "--trust", answer=answer)
    assert done.returncode == 0
    assert "the hooks are not trusted" in done.stdout
    assert settings.read_text() == before


def test_hooks_of_a_project_that_is_not_trusted_are_not(guard: Run, settings: Path) -> None:
    settings.write_text("")
    done = guard("install", "codex", "--trust", answer="y\n")
    assert done.returncode == 2
    assert "trust the project in codex first" in done.stderr
    assert settings.read_text() == ""


@pytest.mark.parametrize(
    "program", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nonsense\n", "#!/bin/sh\necho '{\"id\": 1}'\n"]
)
def test_a_codex_that_cannot_be_asked_is_named(guard: Run, tmp_path: Path, program: str) -> None:
    (tmp_path / "bin/codex").write_text(program)
    done = guard("install", "codex", "--trust", answer="y\n")
    assert done.returncode == 2
    assert "codex does not say what it trusts" in done.stderr


def test_only_codex_asks_for_trust(guard: Run) -> None:
    assert "--trust is for codex" in guard("install", "claude", "--trust").stderr
