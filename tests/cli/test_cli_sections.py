"""Tools of the user's own on the command line: sections from files and modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import TextContent

DONE: Mapping[str, Any] = {"text": "Done."}
SECTION = """
import ctypes
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from ringfence import MarkdownSection, Session, Tool, ToolContext, ToolResult
from ringfence.filesystem import Filesystem

@dataclass(frozen=True)
class Checked:
    exit_code: int

def check(params: None, *, context: ToolContext) -> ToolResult[Checked]:
    print("from the handler")
    sys.__stdout__.write("from a stream with a buffer")
    ctypes.CDLL(None).printf(b"from C")
    subprocess.run("echo from its program; echo made > made.txt", shell=True, cwd=context.filesystem.root, check=True)
    clean = context.filesystem.read("a.txt").content == "two\\n"
    return ToolResult(f"clean: {clean}", Checked(0 if clean else 1))

def spoil(params: None, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write("b.txt", "half")
    raise RuntimeError("in the middle")

def leave(params: None, *, context: ToolContext) -> ToolResult[None]:
    context.filesystem.write("b.txt", "half")
    sys.exit(0)

def fork(params: None, *, context: ToolContext) -> ToolResult[None]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.apply_async(time.sleep, (60,))
        return ToolResult.ok(None, f"as text: {pool.map(str, [2, 4])}")

def look(params: None, *, context: ToolContext) -> ToolResult[None]:
    return ToolResult.ok(None, min(each.name for each in context.filesystem.list()))

def spoil_process(params: None, *, context: ToolContext) -> ToolResult[None]:
    os.chdir("/")
    sys.stdout.close()
    return ToolResult.ok(None, "elsewhere now")

print("from the module")
TOOLS = [
    Tool[None, Checked](name="check", description="Check it.", handler=check, opaque=True),
    Tool[None, None](name="spoil", description="Spoil it.", handler=spoil),
    Tool[None, None](name="leave", description="Leave it.", handler=leave),
    Tool[None, None](name="fork", description="Fork.", handler=fork, read_only=True),
    Tool[None, None](name="spoil_process", description="Go.", handler=spoil_process, read_only=True),
    Tool[None, None](name="seen", description="Look at it.", handler=look, read_only=True),
]
section = MarkdownSection(title="Own", key="own", template="Text.", tools=TOOLS)

def made(session: Session) -> MarkdownSection[None]:
    assert isinstance(session, Session)
    return MarkdownSection(title="Own", key="own", template="Text.", tools=TOOLS)

def fails(session: Session) -> None:
    raise ValueError("not today")

def leaves(session: Session) -> None:
    sys.exit(0)

def none(session: Session) -> None: ...
number = 3
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a.txt").write_text("one\n")
    (tmp_path / "own.py").write_text(SECTION)
    return tmp_path / "tree"


def calls(*names: str, **arguments: object) -> Mapping[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments} for name in names]}


READ = calls("read_file", file_path="a.txt")
EDIT = calls("edit_file", file_path="a.txt", old_string="one", new_string="two")


def run(
    tree: Path,
    turns: Sequence[Mapping[str, Any]],
    *options: str,
    directory: str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    begun = [] if "--resume" in options else ["--task", "Do it."]
    command = [sys.executable, "-m", "ringfence_cli", "run", directory or str(tree), "--model", f"script:{script}"]
    environment = {**os.environ, **(env or {})}
    environment.pop("PYTHONUNBUFFERED", None)  # with it Python keeps nothing in a buffer
    return subprocess.run(
        [*command, *begun, *options], capture_output=True, text=True, timeout=60, cwd=tree.parent, env=environment
    )


@pytest.mark.parametrize("name", ["section", "made"])
def test_tools_of_a_file_are_transactions_like_all_others(tree: Path, name: str) -> None:
    done = run(tree, [calls("check"), calls("spoil"), calls("seen"), DONE], "--section", f"own.py:{name}")
    assert done.returncode == 0, done.stderr
    assert "check -> committed: clean: False" in done.stderr
    assert "spoil -> failed and rolled back" in done.stderr
    assert "seen -> ok: a.txt" in done.stderr
    assert (tree / "made.txt").read_text() == "made\n"
    assert not (tree / "b.txt").exists()
    assert "1 step in" in done.stderr


def test_standard_output_has_the_results_alone(tree: Path) -> None:
    done = run(tree, [calls("check"), DONE], "--section", "own.py:section", "--json")
    assert json.loads(done.stdout)["outcome"] == "done"
    for said in ("from the module", "from the handler", "from a stream with a buffer", "from C", "from its program"):
        assert said in done.stderr


def test_a_tool_that_closes_the_output_and_goes_elsewhere_costs_no_results(tree: Path) -> None:
    options = ("--section", "own.py:section", "--workspace", "memory", "--apply", "--json", "--patch", "run.patch")
    done = run(tree, [READ, EDIT, calls("spoil_process"), calls("seen"), DONE], *options, directory="tree")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["applied"] is True
    assert "seen -> ok: a.txt" in done.stderr
    assert (tree / "a.txt").read_text() == "two\n"
    assert (tree.parent / "run.patch").exists()


def test_a_process_that_a_tool_has_forked_is_ended_without_a_word(tree: Path) -> None:
    done = run(tree, [calls("fork"), DONE], "--section", "own.py:section")
    assert done.returncode == 0, done.stderr
    assert "fork -> ok: as text: ['2', '4']" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tool_that_ends_its_program_fails_the_run_and_all_is_told(tree: Path) -> None:
    report = tree.parent / "run.html"
    done = run(tree, [calls("leave"), DONE], "--section", "own.py:section", "--json", "--report", str(report))
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (told["outcome"], told["tool_calls"]["interrupted"]) == ("failed", 1)
    assert "SystemExit: 0" in told["error"]
    assert "SystemExit: 0" in report.read_text()
    assert not (tree / "b.txt").exists()


def test_a_tool_of_one_s_own_can_be_what_a_policy_asks_for(tree: Path) -> None:
    policy = ("--section", "own.py:section", "--policy", "tests:check:/b.txt")
    write = calls("write_file", file_path="b.txt", content="b\n")
    done = run(tree, [calls("check"), write, READ, EDIT, calls("check"), write, DONE], *policy)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("write_file") == 2
    assert done.stderr.count("denied by the policy") == 1
    assert (tree / "b.txt").read_text() == "b\n"


def test_a_resumed_run_has_the_sections_that_it_had(tree: Path) -> None:
    assert run(tree, [calls("check")], "--section", "own.py:section").returncode == 3
    again = run(tree, [calls("check"), DONE], "--resume")
    assert again.returncode == 0, again.stderr
    assert f"--section {tree.parent / 'own.py'}:section" in again.stderr
    assert "check -> ok" in again.stderr


def test_a_copy_in_memory_has_tools_of_its_own_but_runs_no_programs(tree: Path) -> None:
    turns = [calls("seen"), calls("check"), DONE]
    done = run(tree, turns, "--section", "own.py:section", "--workspace", "memory")
    assert done.returncode == 0, done.stderr
    assert "seen -> ok: a.txt" in done.stderr
    assert "check -> failed and rolled back" in done.stderr
    assert not (tree / "made.txt").exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("own.py", "FILE.py:NAME or MODULE:NAME"),
        ("missing.py:section", "No such file"),
        ("tree/a.txt.py:section", "inside of the workspace"),
        ("own.py:number", "has a int there"),
        ("own.py:fails", "not today"),
        ("own.py:none", "made a NoneType, and no section"),
        ("wrong.py:section", "wrong.py, line 2"),
        ("raises.py:section", "ZeroDivisionError"),
        ("own.py:leaves", "SystemExit: 0"),
        ("json.no_such_module:section", "json.no_such_module"),
        ("json:loads", "makes no section"),
    ],
)
def test_what_is_no_section_is_wrong_usage_and_begins_nothing(tree: Path, spec: str, words: str) -> None:
    (tree.parent / "wrong.py").write_text("\nsection = (\n")
    (tree.parent / "raises.py").write_text("1 / 0\n")
    refused = run(tree, [DONE], "--section", spec, "--json")
    assert refused.returncode == 2, refused.stderr
    assert words in json.loads(refused.stdout)["error"]
    assert "Traceback" not in refused.stderr


def test_nothing_is_imported_from_where_the_agent_writes(tree: Path) -> None:
    proof = tree.parent / "proof"
    (tree / "other.py").write_text(f"open({str(proof)!r}, 'w')\nsection = None\n")
    (tree / "package").mkdir()
    (tree / "package/__init__.py").write_text(f"open({str(proof)!r}, 'w')\nsection = None\n")
    (tree.parent / "link.py").symlink_to(tree / "other.py")
    for spec in ("tree/other.py:section", "link.py:section", "other:section", "package:section", "package.sub:section"):
        refused = run(tree, [DONE], "--section", spec, env={"PYTHONPATH": str(tree)})
        assert (refused.returncode, "inside of the workspace" in refused.stderr) == (2, True), refused.stderr
    assert not proof.exists()


def test_no_module_of_a_package_elsewhere_is_imported_from_where_the_agent_writes(tree: Path) -> None:
    proof, package = tree.parent / "proof", tree.parent / "site/outer"
    (tree / "own.py").write_text(f"open({str(proof)!r}, 'w')\nsection = None\n")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    tree.rename(package / "tree")
    (package / "link.py").symlink_to("tree/own.py")
    for spec in ("outer.tree.own:section", "outer.link:section"):
        refused = run(package / "tree", [DONE], "--section", spec, env={"PYTHONPATH": str(tree.parent / "site")})
        assert (refused.returncode, "inside of the workspace" in refused.stderr) == (2, True), refused.stderr
    assert not proof.exists()


def test_a_file_is_not_overwritten_by_a_result(tree: Path) -> None:
    refused = run(tree, [DONE], "--section", "own.py:section", "--patch", "own.py")
    assert refused.returncode == 2
    assert (tree.parent / "own.py").read_text() == SECTION


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_server_offers_them_too(tree: Path, anyio_backend: str) -> None:
    arguments = ["-m", "ringfence_cli", "serve", str(tree), "--section", f"{tree.parent / 'own.py'}:made"]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with Client(stdio_client(parameters)) as client:
        assert {"check", "spoil", "seen"} <= {tool.name for tool in (await client.list_tools()).tools}
        checked = await client.call_tool("check", {})
        assert isinstance(checked.content[0], TextContent)
        assert "clean: False" in checked.content[0].text
        assert (await client.call_tool("spoil", {})).is_error
        left = await client.call_tool("leave", {})
        assert isinstance(left.content[0], TextContent)
        assert (left.is_error, "SystemExit: 0" in left.content[0].text) == (True, True)
        assert not (await client.call_tool("seen", {})).is_error, "one tool does not end it for all"
    assert (tree / "made.txt").exists()
    assert not (tree / "b.txt").exists()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_read_only_server_finds_its_directory_when_a_tool_went_elsewhere(
    tree: Path, anyio_backend: str
) -> None:
    assert run(tree, [READ, EDIT, DONE]).returncode == 0
    arguments = ["-m", "ringfence_cli", "serve", "tree", "--read-only", "--section", "own.py:section"]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ), cwd=tree.parent)
    async with Client(stdio_client(parameters)) as client:
        for name in ("history", "spoil_process", "history"):
            answer = await client.call_tool(name, {})
            assert not answer.is_error, answer.content
