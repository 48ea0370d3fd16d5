"""Agents that people have, from npm, on a repository through `ringfence serve`. Their models are scripts; they are not.

The commands are those of the agent's page, and it prints what the page quotes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from npm import programs_of
from pages import page
from provider_server import Asked, ProviderServer, Reply

from ringfence_sandbox import Workspace

RUN_SECONDS = 180
TOKEN = "0123456789abcdef-token"
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


@dataclass(frozen=True)
class Agent:
    package: str
    version: str
    own: frozenset[str]
    """Its own tools that `--exclusive` takes from the model."""
    prefix: str = "mcp__ringfence__"
    call: Mapping[str, str] = field(default_factory=dict[str, str])
    """What a call of a tool says besides."""
    hidden: frozenset[str] = frozenset()
    """Tools of the server that `--exclusive` takes, too."""
    freely: str = ""
    """The option without which a script has no tool that changes anything."""
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}
    home: Callable[[Path, str], Mapping[str, object]] = lambda root, url: {}
    """Files that its user has, who logged in to the provider at the URL and said yes to what it asked for."""
    options: Sequence[str] = ("--ignore-scripts",)
    """For npm."""


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code",
        "2.1.331",
        frozenset({"Edit", "Write", "Bash"}),
        environment=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        home=lambda root, url: {
            ".claude.json": {
                "projects": {str(root): {"hasTrustDialogAccepted": True, "enabledMcpjsonServers": ["ringfence"]}}
            }
        },
        options=(),
    ),
    "codex": Agent(
        "@openai/codex",
        "0.169.0",
        frozenset({"exec_command", "write_stdin"}),
        prefix="",
        call={"namespace": "mcp__ringfence"},
        environment=lambda url: {"MODEL_KEY": "none"},
        home=lambda root, url: {
            ".codex/config.toml": 'model = "scripted"\nmodel_provider = "local"\n[model_providers.local]\n'
            f'name = "local"\nbase_url = "{url}/v1"\nwire_api = "responses"\nenv_key = "MODEL_KEY"\n'
        },
    ),
    "gemini": Agent(
        "@google/gemini-cli",
        "0.61.0",
        frozenset({"write_file", "replace", "run_shell_command"}),
        prefix="mcp_ringfence_",
        hidden=frozenset({"write_file"}),
        freely=" --approval-mode yolo",
        environment=lambda url: {"GEMINI_API_KEY": "none", "GOOGLE_GEMINI_BASE_URL": url},
        home=lambda root, url: {".gemini/settings.json": {"security": {"auth": {"selectedType": "gemini-api-key"}}}},
    ),
    "opencode": Agent(
        "opencode-ai",
        "1.18.33",
        frozenset({"edit", "write", "bash"}),
        prefix="ringfence_",
        home=lambda root, url: {
            ".config/opencode/opencode.json": {
                "model": "local/scripted",
                "provider": {
                    "local": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                        "models": {"scripted": {}},
                    }
                },
            }
        },
        options=(),
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code",
        "0.24.4",
        frozenset({"edit", "write_file", "run_shell_command"}),
        freely=" --approval-mode yolo",
        environment=lambda url: {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_MODEL": "scripted",
        },
        home=lambda root, url: {".qwen/settings.json": {"security": {"auth": {"selectedType": "openai"}}}},
    ),
}
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


@dataclass
class Place:
    """A repository, and a home for everybody who works on it."""

    agent: Agent
    programs: Path
    base: Path

    def __post_init__(self) -> None:
        for name, content in GIVEN.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        subprocess.run(["git", "init", "--quiet", self.root], check=True)
        self.home.mkdir()
        (self.base / "tmp").mkdir()

    @property
    def root(self) -> Path:
        return self.base / "root"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def options(self) -> list[str]:
        return ["--policy", "deletions:1", "--receipts", str(self.base / "receipts.jsonl")]

    def outcomes(self) -> list[str]:
        return [json.loads(line)["outcome"] for line in (self.base / "receipts.jsonl").read_text().splitlines()]

    def log_in(self, url: str) -> None:
        for name, content in self.agent.home(self.root, url).items():
            path = self.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            held = json.loads(path.read_text()) if path.exists() and isinstance(content, dict) else {}
            path.write_text(content if isinstance(content, str) else json.dumps({**held, **content}))

    def run(self, line: str, url: str = "") -> str:
        """Run a line of a page; nothing of this machine's own is there, and no way out of it."""
        nowhere = "http://127.0.0.1:9"
        done = subprocess.run(
            ["sh", "-ec", line],
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            env={
                "PATH": f"{Path(sys.executable).parent}:{self.programs}:{os.environ['PATH']}",
                "HOME": str(self.home),
                "TMPDIR": str(self.base / "tmp"),
                "TERM": "dumb",
                "RINGFENCE_STATE_DIR": str(self.state),
                "RINGFENCE_MCP_TOKEN": TOKEN,
                "HTTPS_PROXY": nowhere,
                "HTTP_PROXY": nowhere,
                "NO_PROXY": "127.0.0.1",
                **self.agent.environment(url),
            },
        )
        said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
        assert done.returncode == 0, f"{line}: {said}"
        return said


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
