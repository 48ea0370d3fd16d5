"""``ringfence demo --candidates``: a task done three times by a scripted model, and the best promoted."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from ringfence_cli.demonstration import DATA, copy_files, run_tests
from ringfence_cli.options import Invocation
from ringfence_sandbox import Workspace
from ringfence_tools.printable import why
from ringfence_tools.runs.command_errors import INTERRUPTED
from ringfence_tools.runs.outputs import ErrorStream

COUNT, BEST = 3, "candidate-2"
STATE = "RINGFENCE_STATE_DIR"


def demonstrate_candidates(keep: Path | None, run: click.Command, invocation: Invocation) -> int:
    """Run the demonstration by the command ``run``. Return exit code 0 only if everything happened as it should.

    Without ``keep``, histories and forks of the demonstration are in a directory that is removed at the end.

    Raises:
        click.UsageError: `keep` cannot be made.
        click.Abort, click.ClickException: as ``run``.
    """
    errors = ErrorStream()
    with ExitStack() as stack:
        if keep is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-demo-")))
            stack.callback(_set_state, os.environ.get(STATE))
            _set_state(str(place / "state"))
            directory = place / "timesheet"
        else:
            directory = keep
        happened = _demonstrate(directory, run, invocation, errors)
    for what, has_happened in happened.items():
        errors.say(f"{'yes' if has_happened else 'NO '}  {what}")
    if keep is None:
        errors.say("its directory is removed again: `ringfence demo --candidates --keep DIR` leaves it to look at")
    return 0 if all(happened.values()) else 1


def _set_state(place: str | None) -> None:
    if place is None:
        os.environ.pop(STATE, None)
    else:
        os.environ[STATE] = place


def _demonstrate(directory: Path, run: click.Command, invocation: Invocation, errors: ErrorStream) -> dict[str, bool]:
    """Return each expected event and whether it happened."""
    try:
        directory.mkdir()
    except OSError as error:
        raise click.BadParameter(f"{str(directory)!r} cannot be made: {why(error)}", param_hint="'--keep'") from None
    copy_files(DATA / "sample", directory)
    errors.say(f"A copy of timesheet, which adds up hours, is in {directory}. Its own tests, run there:")
    before = run_tests(directory, DATA)
    errors.say(f"  {before.said}\n")
    tests = json.loads((DATA / "test_command.json").read_text(encoding="utf-8"))
    variables = [f"{name}={value}" for name, value in tests["env"].items()]
    words = [str(directory), "--task", f"@{DATA / 'task.txt'}"]
    words += ["--model", f"script:{DATA / 'candidates'}/{{candidate}}.jsonl", "--candidates", str(COUNT)]
    words += ["--score", shlex.join(["env", *variables, sys.executable, *tests["argv"]]), "--promote", "best"]
    errors.say(f"$ ringfence run {shlex.join(words)}\n")
    exit_code = run.main(words, prog_name="ringfence run", standalone_mode=False, obj=invocation)
    if exit_code == INTERRUPTED:
        raise click.Abort
    errors.say("\nIts own tests, run again:")
    after = run_tests(directory, DATA)
    errors.say(f"  {after.said}\n")
    with Workspace.open(directory, read_only=True) as workspace:
        passed = [fork.name for fork in workspace.forks() if fork.score == "passed"]
        steps = workspace.steps()
    return {
        f"a test failed before: {', '.join(before.failing)}": not before.passed and len(before.failing) == 1,
        f"one of {COUNT} candidates passed the tests: {', '.join(passed)}": passed == [BEST],
        "it was promoted, as one step": exit_code == 0 and len(steps) == 1,
        "all tests pass now": after.passed,
    }
