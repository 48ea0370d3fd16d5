"""A model's files and commands in a container: every ending of a command, and what is kept of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captured_tree import CapturedPath, capture_tree
from tool_values import MAX_CHANGES, CommandOutcome, EvaluatePython

from ringfence import PromptValidationError
from ringfence.adapters import ToolExecutor
from ringfence.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ProtectedFilesPolicy,
    RequireCleanTestsPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.runtime import Receipt, Session, ToolOutput
from ringfence_sandbox import PodmanSandbox
from ringfence_tools import PodmanSandboxSection

MakeSandbox = Callable[..., PodmanSandbox]


class Tools:
    """The section's tools over one directory, called as a model calls them."""

    def __init__(self, sandbox: PodmanSandbox, *, more: tuple[Tool[Any, Any], ...] = ()) -> None:
        self.sandbox = sandbox
        self.root = Path(sandbox.filesystem.root)
        self.session = Session()
        section = PodmanSandboxSection(session=self.session, sandbox=sandbox)
        own = MarkdownSection(title="More", key="more", template="More.", tools=more)
        self.prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section, own]))
        self.executor = ToolExecutor(prompt=self.prompt, session=self.session)

    def call(self, name: str, **arguments: object) -> ToolResult[Any]:
        return self.executor.call(name, arguments)

    def shell(self, command: str, **arguments: object) -> CommandOutcome:
        result = self.call("shell_execute", command=command, **arguments)
        assert result.success, result.text()
        assert isinstance(result.value, CommandOutcome)
        return result.value

    def said(self, name: str, **arguments: object) -> str:
        return self.call(name, **arguments).text()


@pytest.fixture
def make_tools(make_sandbox: MakeSandbox) -> Iterator[Callable[..., Tools]]:
    opened: list[Tools] = []

    def make(**options: Any) -> Tools:
        tools = Tools(make_sandbox(), **options)
        (tools.root / "a.txt").write_text("one\n")
        (tools.root / "sub").mkdir()
        (tools.root / "sub" / "b.txt").write_text("b\n")
        tools.prompt.resources.__enter__()
        opened.append(tools)
        return tools

    yield make
    for tools in opened:
        tools.prompt.resources.__exit__(None, None, None)


def test_the_output_of_a_command_is_published_while_it_runs(make_tools: Callable[..., Tools]) -> None:
    tools = make_tools()
    pieces: list[ToolOutput] = []

    def hear(event: ToolOutput) -> None:
        pieces.append(event)
        (tools.root / "answered").touch()

    tools.session.dispatcher.subscribe(ToolOutput, hear)
    tools.shell("echo one; until [ -e answered ]; do sleep 0.01; done; echo two >&2")
    assert "".join(piece.text for piece in pieces) == "one\ntwo\n"
    assert {piece.call_id for piece in pieces} == {tools.session[Receipt].latest().call_id}


@pytest.fixture
def tools(make_tools: Callable[..., Tools]) -> Tools:
    return make_tools()


def shape(root: Path) -> dict[str, CapturedPath]:
    """All that a rollback brings back; which inode it is, is no part of that."""
    return {path: replace(one, inode=0) for path, one in capture_tree(root).items()}


WRECK = "rm -rf sub; echo two > a.txt; chmod 600 a.txt; mkdir -p new/deep; echo x > new/deep/x; ln -s a.txt link"


def test_a_command_says_how_it_ended_what_it_printed_and_what_it_changed(tools: Tools) -> None:
    command = "echo out; echo err >&2; echo two > a.txt; rm sub/b.txt; touch new"
    answer = tools.executor.execute("shell_execute", {"command": command})
    result: ToolResult[Any] = answer.result
    assert result.success
    assert [change.path for change in answer.receipt.changes] == ["a.txt", "new", "sub/b.txt"]
    assert result.value.exit_code == 0
    assert result.message.startswith("exit code 0 after 0.")
    assert result.value.render() == (
        "stdout:\nout\nstderr:\nerr\nchanged:\nmodified a.txt\ncreated new\ndeleted sub/b.txt"
    )
    assert result.value.changed_paths == ("a.txt", "new", "sub/b.txt")
    assert tools.said("shell_execute", command="true").endswith("it printed nothing")


def test_what_changed_is_listed_up_to_a_number(tools: Tools) -> None:
    outcome = tools.shell("mkdir many; for n in $(seq 1 300); do echo > many/$n; done")
    assert len(outcome.changed) == MAX_CHANGES
    assert outcome.changes_left_out == 301 - MAX_CHANGES
    assert outcome.render().endswith(f"[and {301 - MAX_CHANGES} more]")


def test_a_command_runs_in_the_directory_that_is_named(tools: Tools) -> None:
    for cwd in ("/workspace/sub", "sub/../sub"):
        assert tools.shell("pwd", cwd=cwd).stdout == "/workspace/sub\n"
    given = {"argv": ["sh", "-c", 'cat; echo "$NAME" "$1"', "sh", "a  b*"], "stdin": "in\n", "env": {"NAME": "value"}}
    assert tools.call("shell_execute", **given).value.stdout == "in\nvalue a  b*\n"
    for cwd in ("missing", "a.txt"):
        result = tools.call("shell_execute", command="true", cwd=cwd)
        assert not result.success
        assert "no directory of the workspace" in result.message
    assert not tools.call("shell_execute", command="true", cwd="../..").success


def test_another_exit_code_than_0_is_a_result_and_what_was_done_stays(tools: Tools) -> None:
    outcome = tools.shell("echo two > a.txt; exit 3")
    assert outcome.exit_code == 3
    assert outcome.changed_paths == ("a.txt",)
    assert (tools.root / "a.txt").read_text() == "two\n"


def test_with_rollback_on_error_it_is_a_failure_and_the_tree_is_as_it_was(tools: Tools) -> None:
    before = shape(tools.root)
    result = tools.call("shell_execute", command=f"{WRECK}; exit 3", rollback_on_error=True)
    assert not result.success
    assert "exit code 3" in result.message
    assert "as rollback_on_error asks" in result.message
    assert result.value.changed_paths == ()
    assert shape(tools.root) == before
    assert tools.shell("echo fine", rollback_on_error=True).stdout == "fine\n"


def test_a_timeout_is_a_failure_and_the_tree_is_as_it_was(tools: Tools) -> None:
    before = shape(tools.root)
    result = tools.call(
        "shell_execute", command=f"echo some; {WRECK}; (trap '' TERM; sleep 3600) & sleep 3600", timeout_seconds=0.1
    )
    assert not result.success
    assert (result.value.exit_code, result.value.timed_out, result.value.stdout) == (124, True, "some\n")
    assert "timed out after 1 second;" in result.message  # the shortest there is
    assert shape(tools.root) == before
    assert tools.shell("echo next").stdout == "next\n"


def test_what_a_command_leaves_running_is_ended_and_said(tools: Tools) -> None:
    result = tools.call("shell_execute", command="sleep 60 & sleep 61 & echo done")
    assert result.success
    assert result.value.leftovers == 2
    assert "2 processes that it left running had to be ended" in result.message


@pytest.mark.usefixtures("limits_hold")
def test_a_process_that_memory_ran_out_for_is_said(tools: Tools) -> None:
    hog = "b = []\nwhile True: b.append(bytearray(1 << 24))"
    result = tools.call("shell_execute", argv=["python3", "-c", hog])
    assert result.success
    assert result.value.out_of_memory
    assert result.value.exit_code == 137
    assert "out of memory" in result.message
    assert tools.shell("echo next").stdout == "next\n"


def test_an_interrupt_ends_the_command_and_the_tree_is_as_it_was(tools: Tools) -> None:
    before = shape(tools.root)
    tools.shell("true")
    interrupter = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        tools.call("shell_execute", command=f"{WRECK}; sleep 30")
    interrupter.join()
    assert shape(tools.root) == before
    assert tools.shell("ps -e -o args | grep -c '[s]leep'").stdout == "0\n"


def test_python_runs_in_the_container(tools: Tools) -> None:
    code = "import os\nprint(os.getcwd(), open('a.txt').read())\nopen('made', 'w').write('x')"
    result = tools.call("evaluate_python", code=code)
    assert result.success
    assert result.value.stdout == "/workspace one\n\n"
    assert result.value.changed_paths == ("made",)


def test_python_that_fails_or_takes_too_long_is_a_failure_and_the_tree_is_as_it_was(tools: Tools) -> None:
    before = shape(tools.root)
    wreck = "import os, sys, time\nos.remove('a.txt')\nopen('made', 'w').write('x')\n"
    for last, said in (("sys.exit(4)", "exit code 4"), ("1 / 0", "exit code 1"), ("time.sleep(60)", "timed out")):
        result = tools.call("evaluate_python", code=wreck + last, timeout_seconds=1)
        assert not result.success
        assert said in result.message
        assert shape(tools.root) == before
    assert "ZeroDivisionError" in tools.said("evaluate_python", code="1 / 0")


def test_importing_the_workspace_leaves_nothing_in_it(tools: Tools) -> None:
    (tools.root / "sub" / "__init__.py").write_text("value = 7\n")
    tools.shell("true")
    assert tools.call("evaluate_python", code="import sub\nprint(sub.value)").value.stdout == "7\n"
    assert tools.shell("python3 -c 'import sub'").changed == ()
    assert tools.shell("python3 -c 'import sub'", env={"PYTHONPYCACHEPREFIX": ""}).changed != ()


def test_a_file_that_a_command_changed_or_made_is_read_again_before_it_is_written(tools: Tools) -> None:
    assert tools.call("read_file", file_path="a.txt").success
    edit = {"file_path": "/workspace/a.txt", "old_string": "o", "new_string": "0"}
    assert tools.call("edit_file", **edit).success
    tools.shell("echo two > a.txt; echo made > made.txt")
    denied = tools.call("edit_file", **edit)
    assert not denied.success
    assert "a.txt has changed since it was read" in denied.message
    assert "has not been read" in tools.said("write_file", file_path="made.txt", content="x")
    assert tools.call("read_file", file_path="/workspace/made.txt").success
    assert tools.call("write_file", file_path="made.txt", content="x").success
    assert tools.call("read_file", file_path="a.txt").success
    assert tools.call("edit_file", **edit).success
    assert tools.shell("cat a.txt made.txt").stdout == "tw0\nx"


def test_a_file_that_a_command_changed_and_that_was_taken_back_need_not_be_read_again(tools: Tools) -> None:
    assert tools.call("read_file", file_path="a.txt").success
    assert not tools.call("shell_execute", command="echo two > a.txt; exit 1", rollback_on_error=True).success
    assert tools.call("write_file", file_path="a.txt", content="three\n").success


def test_the_whole_of_a_long_output_can_be_read_and_searched(tools: Tools) -> None:
    result = tools.call("shell_execute", command="seq 1 100000")
    where = result.value.stdout.split("; read ")[1].split(" for all of it")[0]
    assert "50001" not in result.value.stdout
    assert "50001 | 50001" in tools.said("read_file", file_path=where, offset=50_000, limit=1)
    assert f"{where}:77777: 77777" in tools.said("grep", pattern="^7{5}$", path=where)
    assert f"{where}:77777: 77777" in tools.said("grep", pattern="^7{5}$", path=f"/workspace/{where}")
    assert not tools.call("write_file", file_path=where, content="forged").success
    assert not tools.call("rm", path=where).success
    assert "50001 | 50001" in tools.said("read_file", file_path=where, offset=50_000, limit=1)
    assert sorted(os.listdir(tools.root)) == ["a.txt", "sub"]


def test_no_part_of_a_long_line_is_out_of_reach(tools: Tools) -> None:
    result = tools.call("shell_execute", command="seq -s , 1 20000; echo end")
    where = result.value.stdout.split("; read ")[1].split(" for all of it")[0]
    whole = ",".join(map(str, range(1, 20001)))
    read = tools.call("read_file", file_path=where)
    lines = [line.partition(" | ")[2] for line in read.value.content.split("\n")]
    offset = len(lines)
    while any("read on with" in note for note in read.value.notes):
        read = tools.call("read_file", file_path=where, offset=offset)
        lines += [line.partition(" | ")[2] for line in read.value.content.split("\n")]
        offset = len(lines)
    assert "".join(lines) == f"{whole}end"


def test_the_call_of_another_tool_that_runs_a_command_is_one_transaction_with_it(
    make_tools: Callable[..., Tools],
) -> None:
    holder: list[Tools] = []

    def handler(params: EvaluatePython, *, context: ToolContext) -> ToolResult[CommandOutcome]:
        tools = holder[0]
        assert context.filesystem is not None
        context.filesystem.write("typed.txt", "typed\n")
        assert tools.call("shell_execute", command="cat typed.txt > copied.txt; echo two > a.txt").success
        inner = tools.call("shell_execute", command="rm -rf sub copied.txt; exit 1", rollback_on_error=True)
        assert not inner.success
        assert (tools.root / "copied.txt").read_text() == "typed\n"
        assert (tools.root / "sub" / "b.txt").exists()
        return ToolResult("as asked", CommandOutcome(0, "", ""), params.code == "keep")

    outer = Tool[EvaluatePython, CommandOutcome](name="outer", description="Runs.", handler=handler, opaque=True)
    tools = make_tools(more=(outer,))
    holder.append(tools)
    before = shape(tools.root)
    assert not tools.call("outer", code="fail").success
    assert shape(tools.root) == before
    kept = tools.call("outer", code="keep")
    assert kept.success
    assert kept.value.changed_paths == ("a.txt", "copied.txt", "typed.txt")
    assert (tools.root / "a.txt").read_text() == "two\n"


def test_calls_and_commands_of_several_threads_take_turns(tools: Tools) -> None:
    def commands() -> list[int]:
        return [tools.sandbox.run("echo x >> log; sleep 0.05").exit_code for _ in range(5)]

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(commands) for _ in range(2)]
        for _ in range(10):
            tools.shell("echo y >> log; sleep 0.02")
        assert [one.result() for one in running] == [[0] * 5] * 2
    assert sorted((tools.root / "log").read_text().split()) == ["x"] * 10 + ["y"] * 10


@pytest.mark.usefixtures("limits_hold")
def test_a_section_opens_a_sandbox_of_its_own_and_closes_it(tmp_path: Path, podman: object) -> None:
    session = Session()
    with PodmanSandboxSection(session=session, root=tmp_path) as section:
        prompt = Prompt(PromptTemplate(ns="tests", key="own", sections=[section]))
        with prompt.resources:
            executor = ToolExecutor(prompt=prompt, session=session)
            assert executor.call("shell_execute", {"command": "echo x > x"}).success
            process = section.sandbox.start().process
            twin = section.clone(session=Session())
            assert twin.sandbox is section.sandbox
            twin.close()
            assert process.lives
            assert executor.call("shell_execute", {"command": "cat x"}).success
    assert not process.lives
    with pytest.raises(PromptValidationError, match="either root"):
        PodmanSandboxSection(session=session)


def test_a_file_waits_for_the_very_tests_that_its_owner_named(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    (root / "test_it.py").write_text("def test_it():\n    open('it').close()\n")
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=sandbox, policies=())
    tests = RequireCleanTestsPolicy("shell_execute", command="pytest -q", paths=["released"])
    prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section], policies=[tests]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)

        def after(command: str) -> bool:
            assert executor.call("shell_execute", {"command": command}).success
            return executor.call("shell_execute", {"command": "echo x >> released"}).success

        assert [after(command) for command in ("true", "pytest -q || true", "pytest --version")] == [False] * 3
        assert not after("pytest -q"), "it failed"
        assert after("touch it; exit 3") is False
        assert after("pytest -q")
        assert not after("true"), "that was a change"


def test_tests_that_run_where_another_command_has_left_the_shell_do_not_count(sandbox: PodmanSandbox) -> None:
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=sandbox, policies=(), keep_environment=True)
    tests = RequireCleanTestsPolicy("shell_execute", command="true", paths=["released"])
    prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section], policies=[tests]))
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=session).call
        release = {"command": "echo x > released", "cwd": "."}
        assert call("shell_execute", {"command": "mkdir elsewhere; cd elsewhere"}).success
        assert call("shell_execute", {"command": "true"}).success
        assert not call("shell_execute", release).success
        assert call("shell_execute", {"command": "true", "cwd": "."}).success
        assert call("shell_execute", release).success


@pytest.mark.parametrize("variable", ["PATH=/workspace/bin:$PATH", "PYTEST_ADDOPTS=--collect-only", "X="])
def test_tests_that_begin_with_a_variable_of_another_command_do_not_count(
    sandbox: PodmanSandbox, variable: str
) -> None:
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=sandbox, policies=(), keep_environment=True)
    tests = RequireCleanTestsPolicy("shell_execute", command="true", paths=["released"])
    prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section], policies=[tests]))
    with prompt.resources:
        call = ToolExecutor(prompt=prompt, session=session).call
        name, release = variable.partition("=")[0], {"command": "echo x > released"}
        assert call("shell_execute", {"command": f"export OLD=$PATH {variable}"}).success
        assert call("shell_execute", {"command": "true"}).success
        assert "no other option or variable" in call("shell_execute", release).message
        assert call("shell_execute", {"command": f"unset {name}; export PATH=$OLD; unset OLD"}).success
        assert call("shell_execute", {"command": "true"}).success
        assert call("shell_execute", release).success


def test_what_a_command_really_changed_is_seen_by_policies_before_it_is_kept(sandbox: PodmanSandbox) -> None:
    root = Path(sandbox.filesystem.root)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("[core]\n")
    (root / "a.txt").write_text("one\n")
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=sandbox)
    template = PromptTemplate(ns="tests", key="shell", sections=[section], policies=[ProtectedFilesPolicy()])
    prompt = Prompt(template)
    before = shape(root)
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        answer = executor.execute("shell_execute", {"command": "echo two > a.txt; rm .git/config"})
        assert answer.receipt.outcome == "denied"
        assert answer.result.message.startswith("denied by the policy protected_files: .git/config is git's own data")
        assert shape(root) == before
        assert executor.call("shell_execute", {"command": "echo two > a.txt; cat .git/config"}).success
    assert (root / "a.txt").read_text() == "two\n"
