"""The contract of MCP clients, for those that ringfence knows and for the one of the example."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from client_programs import make_client_programs

from ringfence_mcp import ClientScope, McpClient
from ringfence_mcp.known_clients import client_named
from ringfence_mcp.testing import McpClientContract

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/client/acme_client.py"


class Known(McpClientContract):
    name: str

    @pytest.fixture(autouse=True)
    def _programs(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.programs = tmp_path_factory.mktemp("programs") / "bin"
        make_client_programs(self.programs)

    def client(self) -> McpClient:
        return client_named(self.name)

    def run(self, command: Sequence[str], scope: ClientScope) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.programs / command[0], *command[1:]],
            cwd=scope.project,
            env={**os.environ, "HOME": str(scope.home)},
            capture_output=True,
            text=True,
            check=False,
        )


class TestClaude(Known):
    name = "claude"


class TestCodex(Known):
    name = "codex"


class TestGemini(Known):
    name = "gemini"


class TestOpencode(Known):
    name = "opencode"


class TestQwen(Known):
    name = "qwen"


class TestVscode(Known):
    name = "vscode"


class TestCursor(Known):
    name = "cursor"


class TestExample(McpClientContract):
    def client(self) -> McpClient:
        return runpy.run_path(str(EXAMPLE))["acme"]
