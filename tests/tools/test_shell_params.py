"""What a model may ask of a sandbox, and what it is told where there is none. No Podman is needed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from tool_values import MAX_CHANGES, CommandOutcome, EvaluatePython, ShellExecute

from ringfence import PromptValidationError, ToolValidationError
from ringfence.adapters import ToolExecutor
from ringfence.prompt import Prompt, PromptTemplate, ReadBeforeWritePolicy
from ringfence.runtime import Change, Deadline, FileVersion, Session
from ringfence_cli import options
from ringfence_sandbox import CommandResult, PodmanSandbox, SandboxLimits
from ringfence_tools import PodmanSandboxSection

NOWHERE = "unix:///nowhere/podman.sock"
FILE = FileVersion("file", 0o644, 1, "0" * 64)


@pytest.fixture
def sandbox(tmp_path: Path) -> Any:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.txt").write_text("one\n")
    with PodmanSandbox(tmp_path / "tree", url=NOWHERE) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either command"),
        ({"command": "true", "argv": ("true",)}, "either command"),
        ({"command": "  "}, "empty"),
        ({"argv": ("", "x")}, "empty"),
        ({"command": "x" * 48_001}, "write a script"),
        ({"argv": ("echo", "x" * 48_000)}, "write a script"),
        ({"command": "cat", "stdin": "x" * 48_001}, "redirect"),
        ({"command": "a\0b"}, "zero"),
        ({"command": "true", "env": {"A": "\0"}}, "zero"),
        ({"command": "true", "env": {"A=B": "x"}}, "no name of a variable"),
        ({"command": "true", "env": {"": "x"}}, "no name of a variable"),
        ({"command": "true", "env": {"A" * 81: "x"}}, "no name of a variable"),
        ({"command": "true", "env": {"A": "x" * 513}}, "513 characters"),
        ({"command": "true", "env": {f"A{n}": "" for n in range(65)}}, "65 variables"),
    ],
)
def test_what_cannot_be_a_command_is_refused_with_what_to_do(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolValidationError, match=said):
        ShellExecute(**arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"code": " \n"}, "empty"),
        ({"code": "x" * 48_001}, "write_file"),
        ({"code": "print(1)\r"}, "control characters"),
    ],
)
def test_what_cannot_be_a_program_is_refused_with_what_to_do(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ToolValidationError, match=said):
        EvaluatePython(**arguments)


def test_the_same_words_are_known_as_names_and_as_limits(sandbox: PodmanSandbox) -> None:
    *_, shell, python = PodmanSandboxSection(session=Session(), sandbox=sandbox).tools()
    assert shell.decode('{"command": "ls", "timeout_seconds": 7, "env": {"ä": "ö"}}').timeout_seconds == 7
    assert shell.decode({"argv": ["ls", "-l"]}).argv == ("ls", "-l")
    assert python.decode({"code": "1"}).timeout_seconds == 5
    assert (shell.opaque, python.opaque) == (True, True)


def test_changes_are_listed_up_to_a_number_and_shown_as_paths_are() -> None:
    changes = [Change("b\udcff", None, FILE), *(Change(f"c{n:03}", FILE, None) for n in range(MAX_CHANGES + 5))]
    told = CommandOutcome(0, "out\n", "").with_changes(changes)
    assert told.changed_paths[:2] == ("b\\xff", "c000")
    assert told.changes_left_out == 6
    assert told.render().startswith("stdout:\nout\nchanged:\ncreated b\\xff\ndeleted c000\n")
    assert told.render().endswith("\n[and 6 more]")


def test_a_change_of_the_root_says_so() -> None:
    told = CommandOutcome(0, "", "").with_changes([Change("", FILE, FILE)])
    assert told.render() == "changed:\nmodified the root"


def test_a_section_is_rendered_and_its_files_are_worked_on_without_podman(sandbox: PodmanSandbox) -> None:
    session = Session()
    section = PodmanSandboxSection(session=session, sandbox=sandbox)
    prompt = Prompt(PromptTemplate(ns="tests", key="shell", sections=[section]))
    with prompt.resources:
        text = prompt.render(session=session).text
        assert "at /workspace" in text
        assert "no network" in text
        assert "may take 120 seconds, or up to 1200 if" in text
        executor = ToolExecutor(prompt=prompt, session=session)
        assert executor.call("read_file", {"file_path": "/workspace/a.txt"}).success
        assert executor.call("write_file", {"file_path": "a.txt", "content": "two\n"}).success
        result = executor.call("shell_execute", {"command": "true"})
        assert not result.success
        assert result.message.startswith(f"no command can be run here: no Podman service answers at {NOWHERE}")
        assert "no command can be run here" in executor.call("evaluate_python", {"code": "1"}).message
    assert Path(sandbox.filesystem.root, "a.txt").read_text() == "two\n"


class TimedOut(PodmanSandbox):
    """Notes the time limit of each command, and has it run out."""

    def run(self, command: Any, *, timeout_seconds: float = 30.0, **_: Any) -> CommandResult:
        self.given = timeout_seconds
        return CommandResult(124, "", "", timed_out=True, duration_seconds=timeout_seconds, failure="timed out")


@pytest.mark.parametrize(
    ("tool", "asked", "longest", "deadline", "given", "advice"),
    [
        ("shell_execute", None, None, None, 120, "up to 1200"),
        ("shell_execute", 600, None, None, 600, "up to 1200"),
        ("shell_execute", 7200, None, None, 1200, None),
        ("shell_execute", None, 60, None, 60, None),
        ("shell_execute", 7200, 3600, None, 3600, None),
        ("shell_execute", None, None, 40, 40, None),
        ("shell_execute", 600, 3600, 300, 300, None),
        ("evaluate_python", None, None, None, 5, "up to 1200"),
        ("evaluate_python", 600, None, None, 600, "up to 1200"),
        ("evaluate_python", 7200, None, 300, 300, None),
    ],
)
def test_a_command_has_the_time_that_was_asked_for_up_to_the_longest_and_the_deadline(
    tool: str,
    asked: float | None,
    longest: float | None,
    deadline: float | None,
    given: float,
    advice: str | None,
    tmp_path: Path,
) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    session = Session()
    options: dict[str, Any] = {} if longest is None else {"longest_seconds": longest}
    with TimedOut(tmp_path, url=NOWHERE) as sandbox:
        prompt = Prompt(
            PromptTemplate(
                ns="tests", key="time", sections=[PodmanSandboxSection(session=session, sandbox=sandbox, **options)]
            )
        )
        limit = None if deadline is None else Deadline(now + timedelta(seconds=deadline), clock=lambda: now)
        with prompt.resources:
            executor = ToolExecutor(prompt=prompt, session=session, deadline=limit)
            arguments = {"code": "1"} if tool == "evaluate_python" else {"command": "true"}
            result = executor.call(tool, arguments if asked is None else {**arguments, "timeout_seconds": asked})
        assert sandbox.given == given
    assert not result.success
    assert ("timeout_seconds may be" in result.message) == (advice is not None)
    assert (advice or "") in result.message


def test_a_section_takes_a_directory_or_a_sandbox(sandbox: PodmanSandbox, tmp_path: Path) -> None:
    session = Session()
    with pytest.raises(PromptValidationError, match="either root"):
        PodmanSandboxSection(session=session)
    with pytest.raises(PromptValidationError, match="either root"):
        PodmanSandboxSection(session=session, root=tmp_path, sandbox=sandbox)
    with pytest.raises(PromptValidationError, match="leave them"):
        PodmanSandboxSection(session=session, sandbox=sandbox, limits=SandboxLimits())
    with pytest.raises(PromptValidationError, match="longest_seconds is at least 1, not 0"):
        PodmanSandboxSection(session=session, sandbox=sandbox, longest_seconds=0)
    with pytest.raises(ValueError, match="network"):
        PodmanSandboxSection(session=session, root=tmp_path / "tree", network="host")


def test_its_policy_can_be_taken_off(sandbox: PodmanSandbox) -> None:
    governed = PodmanSandboxSection(session=Session(), sandbox=sandbox)
    free = PodmanSandboxSection(session=Session(), sandbox=sandbox, policies=())
    assert [type(policy) for policy in governed.policies()] == [ReadBeforeWritePolicy]
    assert free.policies() == ()


def ringfence(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringfence_cli", *arguments]
    environment = {**os.environ, "CONTAINER_HOST": NOWHERE, **environment}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_without_podman_a_run_ends_with_4_before_the_model_is_asked(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": "Done."}) + "\n")
    ended = ringfence(
        tmp_path, "run", "tree", "--workspace", "podman", "--task", "Do it.", "--model", f"script:{script}"
    )
    assert ended.returncode == 4
    assert NOWHERE in ended.stderr
    assert "turn 1" not in ended.stderr
    assert "Traceback" not in ended.stderr
    again = ringfence(tmp_path, "run", "tree", "--task", "Do it.", "--model", f"script:{script}")
    assert again.returncode == 0


def test_without_podman_the_demonstration_in_a_container_ends_with_4(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    ended = ringfence(tmp_path, "demo", "--workspace", "podman", TMPDIR=str(tmp_path / "tmp"))
    assert ended.returncode == 4
    assert NOWHERE in ended.stderr
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    ("given", "network"),
    [
        ((), None),
        (("bridge",), "bridge"),
        (("allow:one.test", "allow:*.two.test:81"), "allow:one.test,*.two.test:81"),
        (("allow:one.test", "bridge"), ""),
        (("bridge", "none"), ""),
    ],
)
def test_hosts_of_several_options_are_one_network(given: tuple[str, ...], network: str | None) -> None:
    context = click.Context(click.Command("x"))
    if network == "":
        with pytest.raises(click.BadParameter, match="cannot be had together: .*, "):
            options.network(context, click.Option(["--network"]), given)
    else:
        assert options.network(context, click.Option(["--network"]), given) == network


@pytest.mark.parametrize("option", [("--image", "x"), ("--network", "bridge")])
def test_an_image_and_a_network_are_for_podman(tmp_path: Path, option: tuple[str, str]) -> None:
    ended = ringfence(tmp_path, "run", ".", "--task", "x", "--model", "script:x", *option)
    assert ended.returncode == 2
    assert "--workspace podman" in ended.stderr
