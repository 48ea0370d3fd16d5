"""A real coding agent, Codex from npm, on a repository through `ringfence serve`. Its model is a script; it is not."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from provider_server import ProviderServer

from ringfence_sandbox import Workspace

PROJECT = Path(__file__).parent.parent
VERSION = "0.169.0"
INSTALLED = PROJECT / f"build/codex-{VERSION}"
PROBE_SECONDS, INSTALL_SECONDS, RUN_SECONDS = 20, 240, 120
TOKEN = "0123456789abcdef-token"
CODEX_CONFIG = re.findall(
    r"^```toml\n(.*?)^```", (PROJECT / "docs" / "use" / "mcp.md").read_text(), re.MULTILINE | re.DOTALL
)
"""What people are told to write into their config.toml: for standard input and output, and for HTTP."""

GIVEN = {"a.py": "total = 1\n", "old/b.py": "unused = True\n", "old/c.py": "unused = True\n"}
MISFIT = """\
--- a/a.py
+++ b/a.py
@@ -1 +1 @@
-sum = 1
+sum = 2
--- a/old/b.py
+++ b/old/b.py
@@ -1 +1 @@
-something = "else"
+used = True
"""
CALLS: list[tuple[str, dict[str, str | bool]]] = [
    ("edit_file", {"file_path": "a.py", "old_string": "total", "new_string": "blind"}),
    ("read_file", {"file_path": "a.py"}),
    ("edit_file", {"file_path": "a.py", "old_string": "total", "new_string": "sum"}),
    ("read_file", {"file_path": "old/b.py"}),
    ("read_file", {"file_path": "old/c.py"}),
    ("apply_patch", {"patch": MISFIT}),
    ("rm", {"path": "old", "recursive": True}),
    ("write_file", {"file_path": "new.py", "content": "import a\n"}),
]
OUTCOMES = ["denied", "committed", "committed", "committed", "committed", "failed", "denied", "committed"]
"""The last one but one is denied when it has removed the directory: more deletions than the policy allows."""


@pytest.fixture(scope="module")
def codex() -> Path:
    """The program; installed once, where npm and its registry can be reached."""
    program = INSTALLED / "node_modules/.bin/codex"
    if program.exists():
        return program
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here to install Codex with")
    INSTALLED.parent.mkdir(exist_ok=True)
    with open(f"{INSTALLED}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _install(npm)
    return program


def _install(npm: str) -> None:
    once = ["--fetch-retries=0", "--loglevel=error"]
    package = f"@openai/codex@{VERSION}"
    partial = Path(f"{INSTALLED}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    install = [npm, "install", "--prefix", str(partial), "--no-audit", "--no-fund", "--ignore-scripts", *once, package]
    reachable = [npm, "view", package, "version", *once]
    runs = [str(partial / "node_modules/.bin/codex"), "--version"]
    try:
        for command, seconds in ((reachable, PROBE_SECONDS), (install, INSTALL_SECONDS), (runs, PROBE_SECONDS)):
            subprocess.run(command, cwd=partial, capture_output=True, check=True, timeout=seconds)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        said = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace")
        pytest.skip(f"npm could not install {package}: {said.strip().splitlines()[0]}")
    partial.rename(INSTALLED)


@dataclass
class Place:
    """A repository, and a home for everybody who works on it."""

    root: Path
    home: Path
    receipts: Path
    state: Path

    @property
    def options(self) -> list[str]:
        return ["--policy", "deletions:1", "--receipts", str(self.receipts)]

    @property
    def environment(self) -> dict[str, str]:
        """For Codex: nothing of this machine's own, and no way out of it."""
        nowhere = "http://127.0.0.1:9"
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "CODEX_HOME": str(self.home),
            "MODEL_KEY": "none",
            "RINGFENCE_MCP_TOKEN": TOKEN,
            "HTTPS_PROXY": nowhere,
            "HTTP_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1",
        }


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path / "root", tmp_path / "home", tmp_path / "receipts.jsonl", tmp_path / "state")
    place.home.mkdir()
    for name, content in GIVEN.items():
        path = place.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return place


@contextmanager
def over_stdio(place: Place) -> Iterator[str]:
    options = ", ".join(json.dumps(word) for word in (str(place.root), *place.options))
    config = CODEX_CONFIG[0].replace('"/path/to/repo"', options)
    yield f'{config}env = {{ RINGFENCE_STATE_DIR = "{place.state}" }}\n'


@contextmanager
def over_http(place: Place) -> Iterator[str]:
    command = [sys.executable, "-m", "ringfence_cli", "serve", str(place.root), "--http", "127.0.0.1:0", *place.options]
    environment = {**os.environ, "RINGFENCE_MCP_TOKEN": TOKEN, "RINGFENCE_STATE_DIR": str(place.state)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as server:
        try:
            assert server.stderr is not None
            found = re.search(rb"http://\S+", server.stderr.readline())
            assert found is not None
            yield CODEX_CONFIG[1].replace("http://127.0.0.1:8765/mcp", found[0].decode())
        finally:
            server.terminate()
            server.communicate(timeout=RUN_SECONDS)


def script() -> list[dict[str, Any]]:
    called = [
        {"tool_calls": [{"id": f"call_{number}", "namespace": "mcp__ringfence", "name": name, "arguments": arguments}]}
        for number, (name, arguments) in enumerate(CALLS)
    ]
    return [*called, {"text": "Done."}]


@pytest.mark.prove
@pytest.mark.parametrize("transport", [over_stdio, over_http])
def test_codex_edits_a_repository_and_what_fails_is_rolled_back(
    codex: Path, place: Place, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (place.root / "old/b.py").stat()
    with ProviderServer(script()) as provider, transport(place) as configured:
        (place.home / "config.toml").write_text(
            'model = "scripted"\nmodel_provider = "local"\n'
            f'[model_providers.local]\nname = "local"\nbase_url = "{provider.openai_url}"\n'
            f'wire_api = "responses"\nenv_key = "MODEL_KEY"\n{configured}'
        )
        done = subprocess.run(
            [codex, "exec", "--skip-git-repo-check", "--sandbox", "read-only", "--json", "-C", place.root, "Rename."],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            env=place.environment,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["outcome"] for line in place.receipts.read_text().splitlines()] == OUTCOMES

    (offered,) = (tool for tool in provider.asked[0].body["tools"] if tool.get("name") == "mcp__ringfence")
    assert {name for name, _ in CALLS} < {tool["name"] for tool in offered["tools"]}
    told = [
        json.dumps(item["output"])
        for item in provider.asked[-1].body["input"]
        if item["type"] == "function_call_output"
    ]
    assert len(told) == len(CALLS)
    assert "has not been read" in told[0]
    assert "total = 1" in told[1]
    assert "nothing was changed" in told[5]
    assert "denied" in told[6]

    files = {str(path.relative_to(place.root)): path for path in place.root.rglob("*") if path.is_file()}
    texts = {name: path.read_text() for name, path in files.items()}
    assert texts == {**GIVEN, "a.py": "sum = 1\n", "new.py": "import a\n"}
    after = files["old/b.py"].stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (before.st_ino, before.st_mtime_ns, before.st_mode)
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(place.state))
    with Workspace.open(place.root) as workspace:
        assert workspace.recovered is None
        assert [step.tool for step in workspace.steps()] == ["edit_file", "write_file"]
        workspace.undo(2)
    assert {name: (place.root / name).read_text() for name in GIVEN} == GIVEN
