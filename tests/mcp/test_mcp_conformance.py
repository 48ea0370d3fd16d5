"""The official inspector and conformance suite of the Model Context Protocol, from npm, on `ringfence serve`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from npm import programs_of

pytestmark = pytest.mark.prove

SERVE = [sys.executable, "-m", "ringfence_cli", "serve"]
NODE = "node@22.23.3"
"""The suite needs a newer one than many machines have."""
SECONDS = 60
TOKEN = "0123456789abcdef-token"
AUTHORIZED = f"""\
import {{ subscribe }} from "node:diagnostics_channel";
subscribe("undici:request:create", ({{ request }}) => request.addHeader("authorization", "Bearer {TOKEN}"));
"""
"""The suite has no option for a token."""
SECTION = """
import time
from dataclasses import dataclass

from ringfence.prompt import MarkdownSection, Tool, ToolContext, ToolResult


@dataclass(frozen=True)
class Nothing:
    pass


def simple(params: Nothing, *, context: ToolContext) -> ToolResult[str]:
    return ToolResult.ok("This is a simple text response for testing.")


def failing(params: Nothing, *, context: ToolContext) -> ToolResult[str]:
    raise RuntimeError("This tool intentionally returns an error for testing")


def slow(params: Nothing, *, context: ToolContext) -> ToolResult[str]:
    time.sleep(3.5)
    return ToolResult.ok("done")


def section(session: object) -> MarkdownSection:
    handlers = {"test_simple_text": simple, "test_error_handling": failing, "test_tool_with_progress": slow}
    tools = [Tool[Nothing, str](name=n, description=n, handler=h) for n, h in handlers.items()]
    return MarkdownSection(title="Suite", template="", tools=tools)
"""
"""The tools that the suite calls."""
SCENARIOS = [
    "server-initialize",
    "ping",
    "tools-list",
    "tools-call-simple-text",
    "tools-call-error",
    "tools-call-with-progress",
    "resources-list",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
]
"""The other scenarios are about what this server does not offer: prompts, completion, logging, sampling, resources and
schemas of the suite's own, images and audio, streams that are resumed."""


def run(program: Path, *arguments: str, fails: bool = False, **environment: str) -> str:
    """Run one program with the node beside it. Return what it printed to standard output."""
    search = f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(program), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PATH": search, **environment},
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout


@contextmanager
def over_http(root: Path, *options: str) -> Iterator[str]:
    command = [*SERVE, str(root), "--http", "127.0.0.1:0", *options]
    environment = {**os.environ, "RINGFENCE_MCP_TOKEN": TOKEN}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as server:
        try:
            assert server.stderr is not None
            found = re.search(rb"http://\S+", server.stderr.readline())
            assert found is not None
            yield found[0].decode()
        finally:
            server.terminate()
            server.communicate(timeout=SECONDS)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_the_inspector_lists_and_calls_tools(
    transport: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    inspector = (
        programs_of(["@modelcontextprotocol/inspector@2.12.0", NODE], "mcp-inspector", request) / "mcp-inspector"
    )

    def inspect(target: list[str], *options: str, fails: bool = False) -> Any:
        return json.loads(run(inspector, "--cli", *target, *options, fails=fails, HOME=str(tmp_path)))

    def write(target: list[str], name: str, *, fails: bool = False) -> str:
        told = ["--tool-name", "write_file", "--tool-arg", f"file_path={name}", "content=two"]
        return inspect(target, "--method", "tools/call", *told, fails=fails)["_meta"]["ringfence/outcome"]

    def check(target: list[str]) -> None:
        tools = inspect(target, "--method", "tools/list", "--strict")["tools"]
        assert {"read_file", "write_file", "undo"} <= {tool["name"] for tool in tools}
        assert write(target, "new.txt") == "committed"
        assert write(target, "a.txt", fails=True) == "denied"
        files = inspect(target, "--method", "resources/list")["resources"]
        assert [file["name"] for file in files] == ["a.txt", "new.txt"]

    if transport == "stdio":
        check([*SERVE, str(root)])
    else:
        with over_http(root) as url:
            check([url, "--header", f"Authorization: Bearer {TOKEN}"])
    assert (root / "new.txt").read_text() == "two"
    assert (root / "a.txt").read_text() == "one\n"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_server_conforms(scenario: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    suite = programs_of(["@modelcontextprotocol/conformance@0.1.16", NODE], "conformance", request) / "conformance"
    (tmp_path / "own.py").write_text(SECTION)
    (tmp_path / "authorized.mjs").write_text(AUTHORIZED)
    with over_http(root, "--section", f"{tmp_path / 'own.py'}:section") as url:
        loaded = f"--import {tmp_path / 'authorized.mjs'}"
        said = run(suite, "server", "--url", url, "--scenario", scenario, NODE_OPTIONS=loaded)
    assert re.search(r"Passed: [1-9]", said)
    assert "0 failed, 0 warnings" in said
