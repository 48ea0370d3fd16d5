"""Agents that people have, from npm, on a repository through `ringfence serve`. Their models are scripts; they are not.

The commands are those of the agent's page, and it prints what the page quotes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from npm import programs_of
from pages import page
from provider_server import Asked, ProviderServer, Reply
from real_agents import AGENTS, GIVEN, RUN_SECONDS, TOKEN, Agent, Place

from ringfence_sandbox import Workspace

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
NEW = """\
--- /dev/null
+++ b/new.py
@@ -0,0 +1 @@
+import a
"""
CALLS: list[tuple[str, dict[str, str | bool], str]] = [
    ("edit_file", {"file_path": "a.py", "old_string": "total", "new_string": "blind"}, "denied"),
    ("read_file", {"file_path": "a.py"}, "committed"),
    ("edit_file", {"file_path": "a.py", "old_string": "total", "new_string": "sum"}, "committed"),
    ("read_file", {"file_path": "old/b.py"}, "committed"),
    ("read_file", {"file_path": "old/c.py"}, "committed"),
    ("apply_patch", {"patch": MISFIT}, "failed"),
    ("rm", {"path": "old", "recursive": True}, "denied"),  # when it has removed it: more than the policy allows
    ("apply_patch", {"patch": NEW}, "committed"),
]
OUTCOMES = [outcome for _, _, outcome in CALLS]


OFFERED = frozenset({"ls", "read_file", "write_file", "edit_file", "apply_patch", "rm", "history", "undo"})


@pytest.fixture
def programs(name: str, request: pytest.FixtureRequest) -> Path:
    agent = AGENTS[name]
    return programs_of([f"{agent.package}@{agent.version}"], name, request, agent.options)


class Provider(ProviderServer):
    """Answers the conversation that offers the server's tools, and gives a title to whatever is asked besides."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        super().__init__(replies)
        self.besides: list[Asked] = []

    def reply(self, asked: Asked) -> Reply:
        if "edit_file" in json.dumps(asked.body.get("tools")):
            return super().reply(asked)
        self.besides.append(asked)
        return {"text": "A title"}

    @property
    def offered(self) -> set[str]:
        """The names of the tools in the first request."""
        assert self.asked, f"no conversation with the tools of the server, but {self.besides}"
        offered: set[str] = set()
        for tool in self.asked[0].body["tools"]:
            for one in tool.get("functionDeclarations") or tool.get("tools") or [tool.get("function", tool)]:
                offered.add(one.get("name"))
        return offered


@pytest.fixture
def place(name: str, programs: Path, tmp_path: Path) -> Place:
    return Place(AGENTS[name], programs, tmp_path)


def turn(agent: Agent, name: str, arguments: Mapping[str, str | bool], number: int = 0) -> Reply:
    called = {"id": f"call_{number}", **agent.call, "name": agent.prefix + name, "arguments": arguments}
    return {"tool_calls": [called]}


def turns(agent: Agent) -> list[Reply]:
    called = [turn(agent, name, arguments, number) for number, (name, arguments, _) in enumerate(CALLS)]
    return [*called, {"text": "Done."}]


def check_the_tree(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: (place.root / name).read_text() for name in (*GIVEN, "new.py")}
    assert texts == {**GIVEN, "a.py": "sum = 1\n", "new.py": "import a\n"}
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(place.state))
    with Workspace.open(place.root) as workspace:
        assert workspace.recovered is None
        assert [step.tool for step in workspace.steps()] == ["edit_file", "apply_patch"]
        workspace.undo(2)
    assert {name: (place.root / name).read_text() for name in GIVEN} == GIVEN
    assert not (place.root / "new.py").exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.prove if name != "codex" else ()) for name in AGENTS]
)
def test_an_agent_changes_a_repository_as_its_page_says(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = AGENTS[name]
    blocks = [block for block in page(f"use/clients/{name}").blocks if block.language]
    register, exclude, ask, remove = (block.text.splitlines() for block in blocks if block.language == "sh")
    ours = {agent.prefix + tool for tool in OFFERED}

    def run(lines: Sequence[str], replies: Sequence[Reply]) -> tuple[str, Provider]:
        with Provider(replies) as provider:
            place.log_in(provider.url)
            said = ""
            for line in lines:
                if "mcp install" in line:
                    line = f"{line} -- {' '.join(place.options)}"
                elif "Rename" in line:
                    line += agent.freely
                said += place.run(line, provider.url)
        return said, provider

    _, provider = run([*register, *ask], [{"text": "Done."}])
    assert provider.offered >= ours | agent.own

    before = (place.root / "old/b.py").stat()
    printed, provider = run([*exclude, *register[1:], *ask], turns(agent))
    assert re.search(r"[Cc]onnected|enabled", printed)
    assert place.outcomes() == OUTCOMES
    assert provider.offered >= ours - {agent.prefix + tool for tool in agent.hidden}
    assert not provider.offered & agent.own
    after = (place.root / "old/b.py").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (before.st_ino, before.st_mtime_ns, before.st_mode)
    told = json.dumps(provider.asked[-1].body)
    assert "has not been read" in told
    assert "total = 1" in told
    assert "nothing was changed" in told
    quoted = [line for block in blocks if block.language == "text" for line in block.text.splitlines()]
    assert [line for line in quoted if line not in printed] == [], printed

    place.run(remove[0])
    check_the_tree(place, monkeypatch)


@pytest.mark.prove
@pytest.mark.parametrize("end", [" of the usual length", ""])  # some limit characters, and some lines
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_shows_its_model_all_of_a_cut_answer(name: str, place: Place, end: str) -> None:
    agent = AGENTS[name]
    (place.root / "long.txt").write_text("".join(f"line-{number}{end}\n" for number in range(1, 2501)))
    blocks = [block.text.splitlines() for block in page(f"use/clients/{name}").blocks if block.language == "sh"]
    with Provider([turn(agent, "read_file", {"file_path": "long.txt"}), {"text": "Done."}]) as provider:
        place.log_in(provider.url)
        for line in (*blocks[1], *blocks[2]):
            place.run(line + (agent.freely if "Rename" in line else ""), provider.url)
        told = json.dumps(provider.asked[-1].body)
    left = re.search(r"read on with offset=(\d+)", told)
    assert left is not None
    assert {int(number) for number in re.findall(r"line-(\d+)", told)} == {*range(1, int(left[1]) + 1)}


@pytest.mark.prove
@pytest.mark.parametrize("name", ["codex"])
def test_codex_works_over_http(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = (block.text for block in page("use/mcp").blocks if block.language == "toml")
    with Provider(turns(place.agent)) as provider, over_http(place) as url:
        place.log_in(provider.url)
        with (place.home / ".codex/config.toml").open("a") as config:
            config.write(shown.replace("http://127.0.0.1:8765/mcp", url))
        place.run("codex exec 'Rename total to sum.'", provider.url)
    assert place.outcomes() == OUTCOMES
    check_the_tree(place, monkeypatch)


@contextmanager
def over_http(place: Place) -> Iterator[str]:
    command = [sys.executable, "-m", "ringfence_cli", "serve", str(place.root), "--http", "127.0.0.1:0", *place.options]
    environment = {**os.environ, "RINGFENCE_MCP_TOKEN": TOKEN, "RINGFENCE_STATE_DIR": str(place.state)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as server:
        try:
            assert server.stderr is not None
            found = re.search(rb"http://\S+", server.stderr.readline())
            assert found is not None
            yield found[0].decode()
        finally:
            server.terminate()
            server.communicate(timeout=RUN_SECONDS)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["codex"])
def test_the_patch_tool_that_codex_keeps_is_refused(name: str, place: Place) -> None:
    patch = "*** Begin Patch\n*** Add File: own.py\n+mine = True\n*** End Patch\n"
    replies: list[Reply] = [{"tool_calls": [{"name": "apply_patch", "input": patch}]}, {"text": "Done."}]
    for exclusive in ("", " --exclusive"):
        with ProviderServer(replies) as provider:
            place.log_in(provider.url)
            place.run(f"ringfence mcp install codex{exclusive}")
            place.run("codex exec --trust -m gpt-5.5 'Add a file.'", provider.url)  # a model that it offers the tool
        assert (place.root / "own.py").exists() == (not exclusive)
        (place.root / "own.py").unlink(missing_ok=True)


@pytest.mark.prove
@pytest.mark.parametrize("model", ["gpt-6-sol", "gpt-5.5"])
@pytest.mark.parametrize("name", ["codex"])
def test_models_that_search_for_tools_have_those_of_the_server_at_once(name: str, model: str, place: Place) -> None:
    replies = [turn(place.agent, "read_file", {"file_path": "a.py"}), {"text": "Done."}]
    with ProviderServer(replies) as provider:
        place.log_in(provider.url)
        place.run("ringfence mcp install codex")
        place.run(f"codex exec --trust -m {model} 'Read a file.'", provider.url)
    assert '"edit_file"' in json.dumps(provider.asked[0].body)
    assert "total = 1" in json.dumps(provider.asked[1].body)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["claude"])
def test_a_script_of_claude_may_call_each_tool(name: str, place: Place) -> None:
    with Provider(turns(place.agent)) as provider:
        place.log_in(provider.url)
        place.run(f"ringfence mcp install claude -- {' '.join(place.options)}")
        place.run("claude -p 'Rename total to sum.'", provider.url)
    assert place.outcomes() == OUTCOMES


@pytest.mark.prove
@pytest.mark.parametrize("name", ["claude"])
def test_claude_registers_the_server_for_all_projects(name: str, place: Place) -> None:
    for _ in range(2):
        place.run("ringfence mcp install claude --global")
    assert "Connected" in place.run("claude mcp get ringfence")
    place.run("ringfence mcp uninstall claude --global")
    place.run("! claude mcp get ringfence")
