"""The end of ``ringfence run``: from the outcome of a run to streams and files, and to what a person can do now."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.escapes import display_path, escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.diff import moved
from ringfence.limits import utc_now
from ringfence_cli.options import Invocation
from ringfence_cli.resume import is_interrupted
from ringfence_cli.run_command import Run, RunCommand
from ringfence_tools.printable import how_to_apply, ignored_line, line_counts, plural, printable, unpatchable_changes
from ringfence_tools.runs.agent_run import MASKED, AgentTask, RunOutcome, apply_changes
from ringfence_tools.runs.outputs import MAX_LISTED, ErrorStream, left_out_lines, put_diff
from ringfence_tools.runs.run_workspace import RunWorkspace
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.task_log import record_task

if TYPE_CHECKING:
    from ringfence_tools.runs.report import ReportFile


def finish(run: Run, outcome: RunOutcome, errors: ErrorStream, invocation: Invocation) -> None:
    """Write the results. The patch comes first, so that a later error does not cost it."""
    options, task, record, workspace = run.options, run.task, run.record, run.task.workspace

    def write(function: Callable[[], object]) -> None:
        try:
            function()
        except OSError as error:
            outcome.fail(f"not everything could be written: {describe_error(error)}")

    if (patch := run.patch) is not None:
        write(lambda: patch.replace(outcome.patch))
    if not invocation.wants_json and outcome.outcome != "interrupted":
        write(lambda: put_diff(outcome.patch, _whole_diff(run), outcome.readable_patch))
    if workspace.history is not None:
        outcome.applied = bool(outcome.changes or outcome.ignored)
    elif options.apply:
        apply_outcome(outcome, task, invocation.signals)
    if options.fail_if_unchanged:
        _fail_if_unchanged(outcome)
    if (report := run.report) is not None:
        write(lambda: report.write(_render_report(run, outcome, report)))
    if invocation.wants_json:
        write(lambda: invocation.put_json(outcome.to_json()))
    _print_ending(run, outcome, errors)
    if record is not None and outcome.outcome in {"done", "unchanged"}:
        record.finish()  # after a kill before all of it was written, --resume writes it
    if outcome.error is not None:
        errors.say(f"ringfence: {outcome.error}")
        for path in outcome.conflicts:
            errors.say(f"  {escape_path(path)}")


def _fail_if_unchanged(outcome: RunOutcome) -> None:
    # Of a part alone, nobody knows what the parts before it have changed.
    if outcome.outcome == "done" and not (outcome.changes or outcome.ignored or outcome.is_part):
        outcome.fail("the model ended its work, and nothing was changed", "unchanged")


def _print_ending(run: Run, outcome: RunOutcome, errors: ErrorStream) -> None:
    """Tell a person how the run ended, and what they can do now."""
    task, stats = run.task, outcome.stats
    if task.tokens is not None and stats.turns and not stats.usage.total_tokens:  # some servers send zeros
        errors.say("ringfence: the model does not tell how many tokens it uses: --max-tokens held nothing back")
    if run.options.quiet:
        return
    if outcome.outcome == "done" and isinstance(task.adapter, ScriptedAdapter) and task.adapter.unused:
        remaining = plural(task.adapter.unused, "turn")
        errors.say(
            f"the script has {remaining} after the one that ended the run: a turn without tool calls is the answer"
        )
    uncovered = task.workspace.left_out_since()
    for line in (*left_out_lines(uncovered), *summary(outcome, has_uncovered=bool(uncovered))):
        errors.say(line)
    for line in _next_steps(run, run.options.directory, outcome):
        errors.say(line)


def _whole_diff(run: Run) -> str:
    """Say where the whole diff of a run is, which a terminal does not get."""
    if run.options.patch is not None:
        return f"{run.options.patch} has all"
    steps = run.task.workspace.own_steps()
    if not steps or run.task.workspace.history is None:
        return "--patch FILE saves all"
    quoted = shlex.quote(str(run.options.directory))
    return f"`ringfence diff {quoted} {steps[0].number - 1} {steps[-1].number}` shows all"


def apply_outcome(outcome: RunOutcome, task: AgentTask, signals: Signals) -> None:
    """Apply the changes, unless an interrupt waits; one that comes meanwhile waits until it is done."""
    if outcome.outcome == "done" and signals.arrived:
        outcome.fail_interrupted()
        return
    apply_changes(outcome, task.workspace)
    if outcome.applied:
        with suppress(OSError):  # then its step has no task in `log`
            record_task(task.workspace.directory, outcome.session_ids[-1], task.text)


def _render_report(run: Run, outcome: RunOutcome, report: ReportFile) -> bytes:
    from ringfence_tools.runs.report import RunDescription, render_page

    directory = Path(os.path.abspath(run.options.directory))  # who reads it is somewhere else
    next_steps = list(_next_steps(run, directory, outcome))
    about = RunDescription(
        run.task.text,
        run.options.model.partition("@")[0],  # a URL may have a password in it
        run.limits.describe() if run.record is not None else "",
        str(directory),
        report.started_at,
        utc_now(),
        next_steps,
    )
    return render_page(about, outcome, run.task.workspace, report.record(outcome.stats))


def summary(outcome: RunOutcome, *, has_uncovered: bool = False) -> Iterator[str]:
    """Lines for a person, after the diff; ``has_uncovered``: the run changed files that are not in the history."""
    stats = outcome.stats
    yield f"{outcome.outcome.replace('_', ' ')} after {stats.seconds:.1f} s: {stats.describe()}"
    if (plan := outcome.plan) is not None:
        done = sum(step.status == "done" for step in plan.steps)
        yield f"plan: {done} of {plural(len(plan.steps), 'step')} done"
    if outcome.ignored:
        yield ignored_line(len(outcome.ignored))
    if not outcome.changes:
        nothing = "nothing else" if has_uncovered or outcome.ignored else "nothing"
        yield f"{nothing} was changed since it was resumed" if outcome.is_part else f"{nothing} was changed"
    else:
        versions = [change.after or change.before for change in outcome.changes]
        files = sum(version is not None and version.kind != "directory" for version in versions)
        added, removed = line_counts(outcome.patch)
        yield f"{plural(files - len(moved(outcome.changes)), 'file')} changed, +{added} -{removed} lines"
    for line in unpatchable_changes(outcome.changes):
        yield printable(f"not in the patch: {line}")
    for one in outcome.look_first[:MAX_LISTED]:
        yield f"look here first: {display_path(one.path)} ({one.reason})"
    if len(outcome.look_first) > MAX_LISTED:
        yield f"look here first: {len(outcome.look_first) - MAX_LISTED} more; --json lists all"


def _next_steps(run: Run, directory: Path, outcome: RunOutcome) -> Iterator[str]:
    """What a person can do now; ``directory`` as they would name it."""
    options, workspace, quoted = run.options, run.task.workspace, shlex.quote(str(directory))
    if workspace.is_part:
        yield f"{workspace.is_part}: what it changed is told from where it was resumed"
    for path in outcome.mixed:
        yield f"edited by others too: {escape_path(path)}; its diff may have their changes"
    if outcome.is_masked:
        yield MASKED
    if outcome.applied and workspace.history is None:
        yield f"applied to {directory}"
    yield from _undoing(workspace, directory)
    # A script that fails is wrong itself: its failure is the error.
    of_script = outcome.outcome == "provider_failed" and options.model.startswith("script:")
    if run.record is not None and outcome.outcome != "done" and not of_script and is_interrupted(directory):
        anew = "".join(f" {option}" for option in run.record.remaining().used_up())
        yield f"`ringfence run {quoted} --resume{anew} --model ...` goes on from there"
    if workspace.history is None and not outcome.applied and (outcome.changes or outcome.ignored):
        yield f"{directory} is as it was"
        yield from _saving(options, directory, outcome)


def _undoing(workspace: RunWorkspace, directory: Path) -> Iterator[str]:
    """Say how to reverse the steps of the run, if there are any."""
    steps = workspace.own_steps()
    if not steps:
        return
    newest = workspace.history.steps() if workspace.history is not None else steps
    are_newest = steps == newest[-len(steps) :]  # else another process has made some in between
    undone = f"{len(steps)}" if are_newest else f"--step {steps[-1].number}"
    which = "it" if len(steps) == 1 else "them" if are_newest else "the newest"
    undo = f"`ringfence undo {shlex.quote(str(directory))} {undone}`"
    yield f"{plural(len(steps), 'step')} in {directory}: {undo} reverses {which}"


def _saving(options: RunCommand, directory: Path, outcome: RunOutcome) -> Iterator[str]:
    """Say where changes are that were made in memory alone."""
    if options.patch is not None:
        yield f"the patch is in {options.patch}: `{how_to_apply(options.patch, directory)}` applies it"
    elif outcome.outcome == "interrupted":
        yield "what was committed before is not kept; --patch FILE keeps it"
    elif outcome.outcome == "done":
        yield "--apply writes the changes there, --patch FILE saves them for `git apply`"
