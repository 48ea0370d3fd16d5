"""Agents that people have, from npm, each with a home and a repository. Their models are scripts; they are not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RUN_SECONDS = 180
TOKEN = "0123456789abcdef-token"
GIVEN = {"a.py": "total = 1\n", "old/b.py": "unused = True\n", "old/c.py": "unused = True\n"}


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
        "2.1.332",
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
        "0.171.0",
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
