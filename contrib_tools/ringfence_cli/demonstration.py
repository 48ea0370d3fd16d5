"""``ringfence demo``: the main job on a small repository with a failing test, which passes afterwards."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.adapters.model import ModelTurn
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.receipts import Receipt
from ringfence_cli.run import run_watched
from ringfence_cli.run_ending import summary
from ringfence_tools.planning import Plan
from ringfence_tools.printable import outcome_words, why
from ringfence_tools.runs.agent_run import AgentTask, RunWatcher, apply_changes
from ringfence_tools.runs.outputs import ErrorStream, open_output, put_diff
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.run_workspace import DiskWorkspace, MemoryWorkspace
from ringfence_tools.runs.signals import Signals

if TYPE_CHECKING:
    from ringfence_sandbox import PodmanSandbox

DATA = Path(__file__).with_name("demo")
PAUSE_SECONDS = 0.8
"""After each turn, at a terminal, so that a person can follow."""
TESTS_SECONDS = 60.0


@dataclass(slots=True)
class DemoObserver(RunWatcher):
    """Remembers where a call was denied, where one was rolled back, and how commands ended."""

    pause_seconds: float
    directory: Path
    turns: int = 0
    denied: list[str] = field(default_factory=list[str])
    rolled_back: list[str] = field(default_factory=list[str])
    commands: list[str] = field(default_factory=list[str])

    def turn(self, event: ModelTurn) -> None:
        self.turns = event.number
        time.sleep(self.pause_seconds)

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        words = f"turn {self.turns}, {receipt.tool}: {outcome_words(receipt, self.directory)}"
        if receipt.tool == "shell_execute":
            self.commands.append(receipt.message.split(" after ")[0])
        if receipt.outcome == "denied":
            self.denied.append(words)
        if receipt.outcome == "failed":
            self.rolled_back.append(words)


@dataclass(frozen=True, slots=True)
class TestRun:
    __test__ = False

    passed: bool
    failing: Sequence[str]
    """The names of the tests that failed."""
    said: str
    """The last line of the test runner."""


def demonstrate(
    keep: Path | None, signals: Signals, data: Path = DATA, *, in_container: bool = False, image: str | None = None
) -> int:
    """Run the demonstration. Return exit code 0 only if everything happened as it should.

    With ``in_container`` the agent works on the files as they are, and whatever runs of the repository runs in a
    container of ``image``.

    Raises:
        click.UsageError: `keep` cannot be made.
        click.Abort: it was interrupted.
        SandboxUnavailableError: there is no container.
    """
    errors = ErrorStream()
    with ExitStack() as stack:
        store = receipts = None
        if keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-demo-")))
            store = directory.with_name(f"{directory.name}-history")
            stack.callback(shutil.rmtree, store, ignore_errors=True)
        else:
            directory = keep
            try:
                keep.mkdir()
            except OSError as error:
                raise click.BadParameter(f"{str(keep)!r} cannot be made: {why(error)}", param_hint="'--keep'") from None
            receipts = open_output(ReceiptsFile, keep.with_name(f"{keep.name}.receipts.jsonl"), directory, stack)
        watchers = [] if receipts is None else [receipts]
        try:
            happened = _demonstrate(directory, store, data, errors, signals, in_container, image, stack, watchers)
        except KeyboardInterrupt:
            raise click.Abort from None
    for what, has_happened in happened.items():
        errors.say(f"{'yes' if has_happened else 'NO '}  {what}")
    if keep is not None:
        named = shlex.quote(str(keep))
        errors.say(f"`ringfence log {named}` has the steps, and `ringfence undo {named}` reverses the newest")
        errors.say(f"`ringfence view {named} --receipts {named}.receipts.jsonl` shows each call, also what was denied")
    else:
        errors.say("its directory is removed again: `ringfence demo --keep DIR` leaves it to look at")
    return 0 if all(happened.values()) else 1


def _demonstrate(
    directory: Path,
    store: Path | None,
    data: Path,
    errors: ErrorStream,
    signals: Signals,
    in_container: bool,
    image: str | None,
    stack: ExitStack,
    watchers: Sequence[RunWatcher],
) -> dict[str, bool]:
    """Return each expected event and whether it happened."""
    task = (data / "task.txt").read_text(encoding="utf-8").strip()
    with signals.let_through():
        copy_files(data / "sample", directory)
        if in_container:
            workspace = stack.enter_context(closing(DiskWorkspace(directory, store=store)))
            workspace.start_container(Place("podman", image))
            sandbox, kind, where = workspace.sandbox, "podman", "in a container that has it"
        else:
            workspace, sandbox, kind, where = MemoryWorkspace(directory, store=store), None, "memory", "there"
        errors.say(f"A copy of timesheet, which adds up hours, is in {directory}. Its own tests, run {where}:")
        before = run_tests(directory, data, sandbox)
    errors.say(f"  {before.said}\n\nThe task: {task}\n")
    observer = DemoObserver(PAUSE_SECONDS if errors.isatty() else 0, directory)
    adapter = ScriptedAdapter([*_turns_for(kind, data)])
    outcome = run_watched(AgentTask(task, workspace, adapter), signals, [observer, *watchers], errors)
    if outcome.outcome == "interrupted":
        raise KeyboardInterrupt
    errors.say("")
    put_diff(outcome.patch, readable=outcome.readable_patch)
    apply_changes(outcome, workspace)
    for line in summary(outcome):
        errors.say(line)
    errors.say(f"\n{'Applied' if outcome.applied else 'NOT applied'} to the repository. Its own tests, run again:")
    with signals.let_through():
        after = run_tests(directory, data, sandbox)
    errors.say(f"  {after.said}\n")
    for line in (*observer.denied, *observer.rolled_back):
        errors.say(f"at {line}")
    commands, error = ", ".join(observer.commands), f": {outcome.error}" if outcome.error else ""
    mended = observer.commands == ["exit code 1", "exit code 0"]
    return {
        f"a test failed before: {', '.join(before.failing)}": not before.passed and len(before.failing) == 1,
        "a write was denied, since the model had not read the file": bool(observer.denied),
        "a failed call was rolled back": bool(observer.rolled_back),
        **({} if sandbox is None else {f"the agent ran the tests itself: {commands}": mended}),
        f"the task was done and applied{error}": outcome.applied,
        "all tests pass now": after.passed,
    }


def copy_files(source: Path, target: Path) -> None:
    """Copy what the files of the package hold, without its permissions and what Python left there."""
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


def _turns_for(workspace: str, data: Path) -> Iterator[dict[str, Any]]:
    """The scripted model's turns: those for every workspace, and those that are ``only`` for this one."""
    for line in (data / "script.jsonl").read_text(encoding="utf-8").splitlines():
        turn: dict[str, Any] = json.loads(line)
        if turn.pop("only", workspace) == workspace:
            yield turn


def run_tests(directory: Path, data: Path, sandbox: PodmanSandbox | None = None) -> TestRun:
    """Run the repository's own tests in a container, or with this interpreter, in a process of their own."""
    command: dict[str, Any] = json.loads((data / "test_command.json").read_text(encoding="utf-8"))
    if sandbox is not None:
        result = sandbox.run(["python3", *command["argv"]], env=command["env"], timeout_seconds=TESTS_SECONDS)
        if result.failure:
            return TestRun(False, (), result.failure)
        exit_code, output = result.exit_code, result.stderr
    else:
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
        exit_code, output = ended.returncode, ended.stderr
    # unittest's own words: "ERROR: test_name (where)", "Ran 62 tests in ...", "FAILED (errors=1)"
    failing = tuple(re.findall(r"^(?:ERROR|FAIL): (\w+)", output, re.MULTILINE))
    said = re.findall(r"^(?:Ran \d+ tests?|OK|FAILED).*", output, re.MULTILINE)
    return TestRun(exit_code == 0 and bool(said), failing, ": ".join((*said, *failing)) or output[-500:])
