"""``ringfence demo``: the main job on a small repository with a failing test, which passes afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.adapters.model import ModelRetry, ModelText, ModelTurn
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.errors import SandboxUnavailableError
from ringfence.runtime.receipts import Receipt
from ringfence_cli.options import UNAVAILABLE
from ringfence_cli.outputs import ErrorStream, put_diff
from ringfence_cli.run import run_watched, summary
from ringfence_cli.signals import Signals
from ringfence_tools.agent_run import EXIT_CODES, AgentTask, apply_changes
from ringfence_tools.planning import Plan
from ringfence_tools.printable import outcome_words, why
from ringfence_tools.run_workspace import DiskWorkspace, MemoryWorkspace, Place

if TYPE_CHECKING:
    from ringfence_sandbox import PodmanSandbox

PAUSE_SECONDS = 0.8
"""After each turn, at a terminal, so that a person can follow."""
TESTS_SECONDS = 60.0


@dataclass(slots=True)
class DemoNarrator:
    """A watcher that remembers where a call was denied, where one was rolled back, and how commands ended."""

    pause: Callable[[], None]
    directory: Path
    turns: int = 0
    denied: list[str] = field(default_factory=list[str])
    rolled_back: list[str] = field(default_factory=list[str])
    commands: list[str] = field(default_factory=list[str])

    def text(self, event: ModelText) -> None: ...

    def retry(self, event: ModelRetry) -> None: ...

    def turn(self, event: ModelTurn) -> None:
        self.turns = event.number
        self.pause()

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        if receipt.tool == "shell_execute":
            self.commands.append(receipt.message)
        told = {"denied": self.denied, "failed": self.rolled_back}.get(receipt.outcome)
        if told is not None:
            told.append(f"turn {self.turns}, {receipt.tool}: {outcome_words(receipt, self.directory)}")


@dataclass(frozen=True, slots=True)
class TestRun:
    __test__ = False

    passed: bool
    failing: Sequence[str]
    """The tests that failed, by name."""
    said: str
    """What the test runner said last."""


def demonstrate(
    keep: Path | None,
    signals: Signals,
    data: Traversable | None = None,
    *,
    in_container: bool = False,
    image: str | None = None,
) -> int:
    """The exit code: 0 only if everything happened that the demonstration is there to show.

    `data` is a directory with what the package has in ``demo``. With ``in_container`` the agent works on the files as
    they are, and whatever runs of the repository runs in a container of ``image``.

    Raises:
        click.UsageError: `keep` cannot be made.
    """
    errors = ErrorStream()
    with ExitStack() as stack:
        directory = _place(keep, stack)
        data = files("ringfence_cli") / "demo" if data is None else data
        try:
            # The history goes the way of the directory.
            store = None if keep is not None else directory.with_name(f"{directory.name}-history")
            if store is not None:
                stack.callback(shutil.rmtree, store, ignore_errors=True)
            with signals.let_through():
                copy_tree(data / "sample", directory)
                container = _container(directory, image, store, stack) if in_container else None
            shown = _shown(directory, data, errors, signals, container, store)
        except KeyboardInterrupt:
            errors.say("ringfence: interrupted")
            return EXIT_CODES["interrupted"]
        except SandboxUnavailableError as error:
            errors.say(f"ringfence: {error}")
            return UNAVAILABLE
    for what, happened in shown:
        errors.say(f"{'yes' if happened else 'NO '}  {what}")
    if keep is not None:
        errors.say(f"`ringfence log {keep}` has the steps, and `ringfence undo {keep}` takes the last one back")
    return 0 if shown and all(happened for _, happened in shown) else 1


def _container(directory: Path, image: str | None, store: Path | None, stack: ExitStack) -> DiskWorkspace:
    workspace = DiskWorkspace(directory, store=store)
    stack.callback(workspace.close)
    workspace.start_container(Place("podman", image))
    return workspace


def _place(keep: Path | None, stack: ExitStack) -> Path:
    if keep is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-demo-")))
    try:
        keep.mkdir()
    except OSError as error:
        raise click.BadParameter(f"{str(keep)!r} cannot be made: {why(error)}", param_hint="'--keep'") from None
    return keep


def _shown(
    directory: Path,
    data: Traversable,
    errors: ErrorStream,
    signals: Signals,
    container: DiskWorkspace | None,
    store: Path | None,
) -> list[tuple[str, bool]]:
    """What was to happen, and whether it did."""
    task = (data / "task.txt").read_text(encoding="utf-8").strip()
    sandbox = container.sandbox if container is not None else None
    tests = partial(run_tests, directory, data) if sandbox is None else partial(run_tests_in, sandbox, data)
    with signals.let_through():
        where = "there" if container is None else "in a container that has it"
        errors.say(f"A copy of timesheet, which adds up hours, is in {directory}. Its own tests, run {where}:")
        before = tests()
    errors.say(f"  {before.said}\n\nThe task: {task}\n")

    story = DemoNarrator(_pause if errors.isatty() else _no_pause, directory)
    workspace = MemoryWorkspace(directory, store=store) if container is None else container
    turns = turns_for("memory" if container is None else "podman", data)
    outcome = run_watched(AgentTask(task, workspace, ScriptedAdapter(turns)), signals, [story], errors)
    if outcome.outcome == "interrupted":
        raise KeyboardInterrupt
    errors.say("")
    put_diff(outcome.patch)
    apply_changes(outcome, workspace)
    for line in summary(outcome):
        errors.say(line)

    errors.say(f"\n{'Applied' if outcome.applied else 'NOT applied'} to the repository. Its own tests, run again:")
    with signals.let_through():
        after = tests()
    errors.say(f"  {after.said}\n")
    for line in (*story.denied, *story.rolled_back):
        errors.say(f"at {line}")
    return [
        (f"a test failed before: {', '.join(before.failing)}", not before.passed and len(before.failing) == 1),
        ("a write was denied, since the model had not read the file", bool(story.denied)),
        ("a failed call was rolled back", bool(story.rolled_back)),
        *([] if container is None else [_ran_the_tests(story)]),
        (f"the task was done and applied{f': {outcome.error}' if outcome.error else ''}", outcome.applied),
        ("all tests pass now", after.passed),
    ]


def _ran_the_tests(story: DemoNarrator) -> tuple[str, bool]:
    ended = [words.split(" after ")[0] for words in story.commands]
    return f"the agent ran the tests itself: {', '.join(ended)}", ended == ["exit code 1", "exit code 0"]


def turns_for(workspace: str, data: Traversable) -> list[dict[str, Any]]:
    """The scripted model's turns: those for every workspace, and those that are ``only`` for this one."""
    lines = (data / "script.jsonl").read_text(encoding="utf-8").split("\n")
    turns: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return [turn for turn in turns if turn.pop("only", workspace) == workspace]


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)


def _no_pause() -> None:
    pass


def copy_tree(source: Traversable, target: Path) -> None:
    """Copy a directory of the package's data, wherever the package is installed, without what Python left in it."""
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                copy_tree(entry, target / entry.name)
        else:
            (target / entry.name).write_bytes(entry.read_bytes())


def run_tests(directory: Path, data: Traversable) -> TestRun:
    """The repository's own tests, with this interpreter, in a process of their own."""
    command = _test_command(data)
    try:
        ended = subprocess.run(
            [sys.executable, *command["argv"]],
            cwd=directory,
            env={**os.environ, **command["env"]},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TESTS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TestRun(False, (), f"they did not end within {TESTS_SECONDS:g} s")
    return _test_run(ended.returncode, ended.stderr)


def run_tests_in(sandbox: PodmanSandbox, data: Traversable) -> TestRun:
    """The repository's own tests, in a container. SandboxUnavailableError: there is none."""
    command = _test_command(data)
    ended = sandbox.run(["python3", *command["argv"]], env=command["env"], timeout_seconds=TESTS_SECONDS)
    return TestRun(False, (), ended.failure) if ended.failure else _test_run(ended.exit_code, ended.stderr)


def _test_command(data: Traversable) -> dict[str, Any]:
    return json.loads((data / "test_command.json").read_text(encoding="utf-8"))


def _test_run(exit_code: int, said_by_tests: str) -> TestRun:
    # unittest's own words: "ERROR: test_name (where)", "Ran 62 tests in ...", "FAILED (errors=1)"
    failing = tuple(re.findall(r"^(?:ERROR|FAIL): (\w+)", said_by_tests, re.MULTILINE))
    said = re.findall(r"^(?:Ran \d+ tests?|OK|FAILED).*", said_by_tests, re.MULTILINE)
    return TestRun(exit_code == 0 and bool(said), failing, ": ".join((*said, *failing)) or said_by_tests[-500:])
