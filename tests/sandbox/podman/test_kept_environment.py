"""What one shell hands on to the next, where that is asked for: what it exported, and nothing of a failed call."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence

from ringfence.adapters import ToolExecutor
from ringfence.prompt import Prompt, PromptTemplate, ToolResult
from ringfence.runtime import Session
from ringfence_sandbox import CommandResult, PodmanSandbox, ShellEnvironment
from ringfence_tools import PodmanSandboxSection

MakeSandbox = Callable[..., PodmanSandbox]


class Shell:
    """`shell_execute` as a model calls it, in a session of its own."""

    def __init__(self, sandbox: PodmanSandbox, *, keep_environment: bool = True) -> None:
        self.sandbox = sandbox
        self.root = Path(sandbox.filesystem.root)
        self.session = Session()
        section = PodmanSandboxSection(session=self.session, sandbox=sandbox, keep_environment=keep_environment)
        self.prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section]))

    def __call__(self, command: str | list[str], **arguments: object) -> ToolResult[Any]:
        what = {"command": command} if isinstance(command, str) else {"argv": command}
        with self.prompt.resources:
            executor = ToolExecutor(prompt=self.prompt, session=self.session)
            return executor.call("shell_execute", {**what, **arguments})

    def out(self, command: str | list[str], **arguments: object) -> str:
        return self(command, **arguments).value.stdout

    @property
    def kept(self) -> ShellEnvironment | None:
        return self.session[ShellEnvironment].latest()


@pytest.fixture
def shell(shared: PodmanSandbox) -> Iterator[Shell]:
    root = Path(shared.filesystem.root)
    (root / "sub" / "deep").mkdir(parents=True)
    yield Shell(shared)
    shared.run("rm -rf /workspace/* /tmp/*")


def test_a_command_begins_where_the_last_one_ended(shell: Shell) -> None:
    said = shell("cd sub; export A='x  y\nz' B=1; C=2; umask 077; exit 3")
    assert said.value.exit_code == 3
    assert said.message.endswith("; the next begins in /workspace/sub")
    assert shell.out('pwd; echo "$A|$B|$C"') == "/workspace/sub\nx  y\nz|1|\n"
    assert shell.out(["printenv", "B"]) == "1\n"
    assert shell.out("unset A; cd deep; B=3; pwd") == "/workspace/sub/deep\n"
    assert shell.out('pwd; echo "${A-none} $B"') == "/workspace/sub/deep\nnone 3\n"
    assert shell.kept == ShellEnvironment("sub/deep", {"B": "3"})


def test_what_is_given_for_one_command_is_for_that_one(shell: Shell) -> None:
    shell("export A=kept; cd sub")
    assert shell.out("pwd; echo $A $X", cwd=".", env={"A": "given", "X": "1"}) == "/workspace\ngiven 1\n"
    assert shell.out('pwd; echo "$A $X"') == "/workspace/sub\nkept \n"
    shell("cd deep; A=changed", cwd="/workspace/sub", env={"A": "given"})
    assert shell.kept == ShellEnvironment("sub/deep", {"A": "changed"})


def test_a_variable_of_the_container_can_be_changed_taken_out_and_brought_back(shell: Shell) -> None:
    own = shell.out("echo $PATH")
    shell("export PATH=/workspace/bin:$PATH; unset HOME")
    assert shell.out('echo "$PATH ${HOME-none}"') == f"/workspace/bin:{own.strip()} none\n"
    assert shell.out(["env"]).count("HOME=") == 0
    shell("export PATH=${PATH#*:} HOME=/tmp")
    assert shell.kept == ShellEnvironment()
    shell("export PYTHONPYCACHEPREFIX=/tmp/mine")
    assert shell.out("echo $PYTHONPYCACHEPREFIX") == "/tmp/mine\n"


@pytest.mark.parametrize(
    "arguments", [{"rollback_on_error": True}, {"timeout_seconds": 1}], ids=["rolled back", "timed out"]
)
def test_a_failed_call_hands_on_nothing(shell: Shell, arguments: dict[str, object]) -> None:
    shell("export A=before; cd sub")
    before = shell.kept
    assert not shell("export A=after B=1; mkdir new; cd new; (sleep 3); exit 1", **arguments).success
    assert shell.kept is before
    assert shell.out("pwd; echo $A $B") == "/workspace/sub\nbefore\n"


def test_a_killed_container_loses_nothing_of_it(make_sandbox: MakeSandbox) -> None:
    shell = Shell(make_sandbox())
    shell("mkdir sub; cd sub; export A=1")
    process = shell.sandbox.start().process
    os.kill(process.pid, signal.SIGKILL)
    while process.lives:
        time.sleep(0.01)
    assert shell.out("pwd; echo $A") == "/workspace/sub\n1\n"


def test_where_it_is_not_asked_for_nothing_is_kept(shared: PodmanSandbox) -> None:
    shell = Shell(shared, keep_environment=False)
    shell("mkdir -p sub; cd sub; export A=1")
    assert shell.out('pwd; echo "$A"; ls /proc/self/fd') == "/workspace\n\n0\n1\n2\n3\n"
    assert shell.kept is None
    assert shared.run("export A=1").environment is None
    assert shell.out('echo "$A"') == "\n"


def test_each_session_has_its_own(shell: Shell) -> None:
    shell("cd sub; export A=1")
    assert Shell(shell.sandbox).out('pwd; echo "$A"') == "/workspace\n\n"


def test_a_directory_that_is_gone_or_outside_of_the_workspace_is_the_root(shell: Shell) -> None:
    shell("mkdir gone; cd gone")
    shell("rmdir ../gone")
    said = shell("pwd")
    assert said.value.stdout == "/workspace\n"
    assert "gone is no longer a directory of the workspace" in said.value.stderr
    for place in ("/tmp", "/", "$(mktemp -d)", "/workspace/../etc"):
        shell(f"cd /workspace/sub; cd {place}")
        assert shell.out("pwd") == "/workspace\n", place
    (shell.root / "out").symlink_to("/etc")
    shell("cd /workspace/out")
    assert shell.out("pwd") == "/workspace\n"


@pytest.mark.parametrize(
    "command",
    [
        "exec true",
        "trap 'echo mine' EXIT; cd sub",
        "kill -9 $$",
        "if",
        "export LARGE=$(head -c 60000 /dev/zero | tr '\\0' x) MORE=$(head -c 60000 /dev/zero | tr '\\0' x)",
    ],
)
def test_a_command_that_cannot_say_what_it_exported_leaves_all_as_it_was(shell: Shell, command: str) -> None:
    shell("export A=1; cd sub")
    said = shell(f"export A=2; {command}")
    assert "what it exported is not known" in said.value.stderr
    assert shell.kept == ShellEnvironment("sub", {"A": "1"})


def forged(sandbox: PodmanSandbox, report: str) -> CommandResult:
    return sandbox.run(f"trap - EXIT; printf '{report}' >/proc/self/fd/19", environment=ShellEnvironment("sub"))


@pytest.mark.parametrize(
    ("report", "left"),
    [
        ("", None),
        ("/workspace/sub\\n", None),
        ("/workspace\\n\\0A=1\\0", None),
        ("/workspace\\n\\0A=1", None),
        ("A=1\\0\\0", None),
        ("/etc\\n\\0A=1\\0\\0", ""),
        ("/workspace/../etc\\n\\0A=1\\0\\0", "../etc"),
        ("relative\\n\\0A=1\\0=2\\0novalue\\0a-b=1\\0B=\\377\\0\\0", ""),
    ],
)
def test_a_forged_report_says_no_more_than_a_shell_could(shell: Shell, report: str, left: str | None) -> None:
    environment = forged(shell.sandbox, report).environment
    assert environment is not None
    if left is None:
        assert environment == ShellEnvironment("sub")
        return
    assert environment.cwd == left
    assert {name: value for name, value in environment.variables.items() if value is not None} == {"A": "1"}
    # What is no directory of the workspace is looked at by the next command, which then begins in the root.
    assert shell.sandbox.run(["pwd"], environment=ShellEnvironment(left)).stdout == "/workspace\n"


def test_a_flood_of_a_report_is_none_and_holds_nothing_up(shell: Shell) -> None:
    done = shell.sandbox.run(
        "yes >/proc/self/fd/19 & sleep 0.5; echo done", environment=ShellEnvironment("", {"A": "1"})
    )
    assert done.stdout == "done\n"
    assert done.environment == ShellEnvironment("", {"A": "1"})


def test_variables_that_are_no_text_or_no_shell_s_are_left_as_they_are(shell: Shell) -> None:
    done = shell.sandbox.run("export A=$(printf '\\377') B=1", environment=ShellEnvironment(), env={"a.b": "x"})
    assert done.environment == ShellEnvironment("", {"B": "1"})


@pytest.mark.usefixtures("limits_hold")
def test_a_run_that_is_resumed_goes_on_with_it(tmp_path: Path, podman: object) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    commands = ["cd sub; export A=1", "echo $A > made"]
    turns = [{"tool_calls": [{"name": "shell_execute", "arguments": {"command": one}}]} for one in commands]

    def run(script: str, turns: list[Any], *options: str) -> int:
        (tmp_path / script).write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        where = ["--workspace", "podman", "--keep-environment", "--model", f"script:{tmp_path / script}"]
        return ringfence("run", tree, *where, *options).returncode

    assert run("first.jsonl", turns[:1], "--task", "Do it.") == 3  # the model has no more to say
    assert run("second.jsonl", [turns[1], {"text": "Done."}], "--resume") == 0
    assert (tree / "sub" / "made").read_text() == "1\n"
    assert ringfence("run", tree, "--keep-environment", "--task", "x", "--model", "y").returncode == 2
