"""``ringfence run``: from the options of the command to a task that an agent works on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ringfence.errors import PromptValidationError
from ringfence.failures import describe_error
from ringfence.secrets import Secrets
from ringfence.session.session import Session
from ringfence_cli.options import Invocation, place_of
from ringfence_cli.page_process import check_view, page_of_run
from ringfence_cli.resume import Interrupted, RunRecord, is_interrupted, run_to_resume
from ringfence_cli.run_command import Run, RunCommand, read_task
from ringfence_cli.run_ending import finish
from ringfence_cli.run_questions import RunQuestions
from ringfence_cli.terminal import Terminal, has_person
from ringfence_tools.runs.agent_run import AgentTask, RunOutcome, RunStats, RunWatcher, check_task, run_agent
from ringfence_tools.runs.asking import NOBODY_AT_START
from ringfence_tools.runs.command_errors import BusyError
from ringfence_tools.runs.open_run import open_run
from ringfence_tools.runs.outputs import (
    MAX_LISTED,
    ErrorStream,
    OutputFile,
    clear,
    left_out_lines,
    open_output,
    refuse_one_file,
)
from ringfence_tools.runs.owner_policies import missing_tool_error
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.recovered_call import describe_recovery
from ringfence_tools.runs.reserved_stdout import reserve_stdout
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_workspace import DiskWorkspace, RunWorkspace, protect_path
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.span_export import telemetry_of
from ringfence_tools.runs.unused_patterns import unused_patterns

if TYPE_CHECKING:
    from ringfence_tools.runs.report import ReportFile, Split


def run_task(options: RunCommand, invocation: Invocation) -> int:
    """Return the exit code.

    Raises:
        click.ClickException, click.Abort, SandboxUnavailableError: nothing was begun.
    """
    written = (("--patch", options.patch), ("--receipts", options.receipts), ("--report", options.report))
    refuse_one_file(options.files_read(), written)
    if not options.resume or options.task is not None or is_interrupted(options.directory):
        clear(options.directory, options.patch, options.report)  # else they are of the run that has ended
    if not options.resume and options.task is None:
        raise click.UsageError("give --task, for a new run, or --resume, for the one that was interrupted")
    if options.resume and options.workspace == "memory":
        raise click.UsageError("--resume is for --workspace disk or podman: a copy in memory ends with its run")
    if options.workspace != "memory" and options.apply is not None:
        raise click.UsageError(
            "--apply and --no-apply are for --workspace memory: on disk the files change as the agent works, and "
            "`ringfence undo` reverses that"
        )
    check_view(is_wanted=options.view, can_write=options.write)
    errors = ErrorStream()
    with ExitStack() as pages:  # they outlive the run, whose workspace is then free
        return _run(options, invocation, errors, pages).exit_code


def _run(options: RunCommand, invocation: Invocation, errors: ErrorStream, pages: ExitStack) -> RunOutcome:
    signals = invocation.signals
    with ExitStack() as stack:
        telemetry = telemetry_of(errors, stack)
        try:
            with signals.let_through():
                run = _open(options, errors, stack)
        except KeyboardInterrupt:
            raise click.Abort("interrupted: nothing was changed") from None
        run = replace(run, task=replace(run.task, telemetry=telemetry))
        with reserve_stdout(run.task.sections):
            try:
                check_task(run.task)
            except PromptValidationError as error:  # a policy is about a tool that this run does not have
                raise missing_tool_error(error, options.directory, run.limits.place.workspace) from None
        if not options.quiet:
            _announce(run, errors)
        watchers: list[RunWatcher] = [one for one in (run.receipts, run.report) if one is not None]
        if options.view:
            has_history = run.task.workspace.history is not None
            run.questions.page, more = page_of_run(
                errors,
                signals,
                options.directory,
                run.receipts,
                pages,
                has_history=has_history,
                can_write=options.write and has_history,
            )
            watchers += more
        with reserve_stdout(run.task.sections):
            shown = None if options.quiet else errors
            outcome = run_watched(run.task, signals, watchers, shown, run.record, run.questions.terminal)
        finish(run, outcome, errors, invocation)
    return outcome


def _open(options: RunCommand, errors: ErrorStream, stack: ExitStack) -> Run:
    """Open workspace, model and files of a run. ``stack`` closes them."""
    start = _begin(options)
    questions = RunQuestions(Terminal(errors) if has_person() else None)
    run = stack.enter_context(
        open_run(
            options.spec(is_resumed=start.is_resumed),
            errors.say,
            quiet=options.quiet,
            ask=questions,
            resumed=start.limits,
        )
    )
    record = None
    if isinstance(run.workspace, DiskWorkspace):
        record = stack.enter_context(closing(RunRecord(run.workspace, start.task, start.before, run.limits)))
    # Opened only now, so that a new file in the directory itself is not taken for one of its own.
    patch, receipts, report = _open_files(options, run.workspace, errors, stack)
    task = run.task(start.task)
    return Run(options, task, run.limits, start.is_resumed, record, patch, receipts, report, questions)


@dataclass(slots=True)
class _Start:
    """The task of a run, and the interrupted run that it goes on with, once the workspace is open."""

    options: RunCommand
    task: str
    is_resumed: bool
    before: Interrupted | None = None

    def limits(self, given: RunLimits) -> RunLimits:
        """Return the limits of the run. No other process can begin or end one in the directory from now on.

        Raises:
            BusyError: another process has begun or ended one meanwhile.
            click.UsageError: there is none to go on with, or its limits are used up.
        """
        directory = self.options.directory
        if self.options.resume and self.task and is_interrupted(directory, self.task) != self.is_resumed:
            raise BusyError(f"meanwhile another process has begun or ended a run in {directory}: repeat the command")
        if not self.is_resumed:
            return given
        try:
            self.before = run_to_resume(directory)
        except (OSError, ValueError) as error:
            raise click.UsageError(describe_error(error)) from None
        if self.before is None:
            raise click.UsageError(f"there is no interrupted run in {directory}: give a new one its --task")
        self.task = self.before.task
        return self.before.remaining.resumed(given)


def _begin(options: RunCommand) -> _Start:
    given = Secrets(place_of(None, options.container).secret_values())
    text = given.mask(read_task(options.task)) if options.task is not None else ""
    is_resumed = options.resume and (not text or is_interrupted(options.directory, text))
    return _Start(options, text, is_resumed)


def _open_files(
    options: RunCommand, workspace: RunWorkspace, errors: ErrorStream, stack: ExitStack
) -> tuple[OutputFile | None, ReceiptsFile | None, ReportFile | None]:
    """Open the files that the run writes for its user, and keep the agent from writing them."""
    directory, history = options.directory, workspace.history
    patch = open_output(OutputFile, options.patch, directory, stack)
    receipts = open_output(ReceiptsFile, options.receipts, directory, stack)
    report = None
    if options.report is not None:
        from ringfence_tools.runs.report import ReportFile

        report = open_output(
            partial(ReportFile, directory=directory, split=_split(workspace)), options.report, directory, stack
        )
        protect_path(workspace, options.report, "the report of this run comes there")
    if history is None:  # from a copy in memory nothing is written over files that may have changed
        return patch, receipts, report
    if options.patch is not None:
        protect_path(workspace, options.patch, "the patch of this run comes there")
    if options.receipts is not None:
        protect_path(workspace, options.receipts, "the list of receipts of this run comes there")
    if history.recovered is not None:
        errors.say(describe_recovery(history.recovered, directory))
    if receipts is not None:
        receipts.complete(history)
    return patch, receipts, report


def _split(workspace: RunWorkspace) -> Split:
    """Return the split of changes into shown ones and ignored ones."""
    return lambda changes: (changes, ()) if workspace.with_ignored else workspace.ignored.split(changes)


def _announce(run: Run, errors: ErrorStream) -> None:
    for line in run.limits.place.unmasked():
        errors.say(line)
    if run.limits.asks and run.questions.terminal is None and not run.options.view:
        errors.say(NOBODY_AT_START)
    for line in left_out_lines(run.task.workspace.left_out):
        errors.say(line)
    for line in unused_patterns(run.task.policies, run.options.hide, run.options.directory)[:MAX_LISTED]:
        errors.say(line)
    if run.is_resumed:
        errors.say(f"goes on with {run.limits.describe()}")
    if run.record is not None and (before := run.record.interrupted_before()) is not None:
        errors.say(before)


def run_watched(
    task: AgentTask,
    signals: Signals,
    watchers: Sequence[RunWatcher],
    errors: ErrorStream | None,
    record: RunRecord | None = None,
    terminal: Terminal | None = None,
) -> RunOutcome:
    """Run the agent, shown live on `errors` where that is given. A question at the ``terminal`` interrupts the view."""
    stats = record.stats if record is not None else RunStats()

    def prepare(session: Session) -> None:
        if record is not None:
            record.start(session, signals)

    with ExitStack() as live:
        if errors is not None:
            from ringfence_cli.live import View

            view = live.enter_context(View(errors, stats, task.workspace.directory))
            watchers = [view, *watchers]
            if terminal is not None:
                terminal.screen = view
        earlier = record.earlier_sessions if record is not None else ()
        outcome = run_agent(
            task, watchers=watchers, stats=stats, gate=signals, prepare=prepare, earlier_sessions=earlier
        )
    if record is not None:
        record.record_usage()
        if outcome.outcome != "done":
            record.interrupt()
    return outcome
