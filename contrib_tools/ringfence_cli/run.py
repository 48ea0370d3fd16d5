"""``ringfence run``: from the options of the command to a task, and from its outcome to streams and files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringfence.adapters.loop import MAX_TURNS
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.errors import PromptValidationError
from ringfence.escapes import display_path, escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.diff import moved
from ringfence.filesystem.edits import read_host_text
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.limits import utc_now
from ringfence.secrets import Secrets
from ringfence.session.session import Session
from ringfence_cli.options import Invocation, hidden_of, place_of
from ringfence_cli.page_process import check_view, page_of_run
from ringfence_cli.resume import Interrupted, RunRecord, is_interrupted, run_to_resume
from ringfence_cli.run_questions import RunQuestions
from ringfence_cli.terminal import Terminal, has_person
from ringfence_tools.printable import (
    how_to_apply,
    ignored_line,
    line_counts,
    plural,
    printable,
    unpatchable_changes,
    why,
)
from ringfence_tools.runs.agent_run import (
    MASKED,
    AgentTask,
    RunOutcome,
    RunStats,
    RunWatcher,
    apply_changes,
    check_task,
    run_agent,
)
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
    put_diff,
    refuse_one_file,
)
from ringfence_tools.runs.owner_policies import missing_tool_error
from ringfence_tools.runs.place import WorkspaceKind
from ringfence_tools.runs.policy_specs import is_code
from ringfence_tools.runs.receipts_file import ReceiptsFile
from ringfence_tools.runs.recovered_call import describe_recovery
from ringfence_tools.runs.reserved_stdout import reserve_stdout
from ringfence_tools.runs.run_limits import RunLimits, absolute_code, absolute_policy
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.run_workspace import DiskWorkspace, RunWorkspace, protect_path
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.span_export import telemetry_of
from ringfence_tools.runs.task_log import record_task
from ringfence_tools.runs.unused_patterns import unused_patterns

if TYPE_CHECKING:
    from ringfence_sandbox import Detect
    from ringfence_tools.runs.report import ReportFile, Split


@dataclass(frozen=True, slots=True)
class RunCommand:
    """The options of the command. ``container`` has those of `ringfence_cli.options.container`."""

    directory: Path
    task: str | None
    resume: bool
    model: str
    workspace: WorkspaceKind | None
    apply: bool | None
    patch: Path | None
    receipts: Path | None
    report: Path | None
    view: bool
    write: bool
    deadline: float | None
    max_tokens: int | None
    max_cost: float | None
    max_turns: int | None
    max_repeats: int | None
    fail_if_unchanged: bool
    sections: tuple[str, ...]
    policies: tuple[str, ...]
    with_ignored: bool
    allow_git: bool
    detect: Detect
    hide: HiddenFiles | None
    asks: tuple[str, ...]
    ask_seconds: float | None
    quiet: bool
    container: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> RunCommand:
        given = {**given}
        globs, no_hide = given.pop("hidden_globs"), given.pop("no_hide")
        hide = hidden_of(globs, no_hide, given["directory"], remembered=given["resume"])
        names = cls.__dataclass_fields__.keys() & given.keys()
        container = {name: value for name, value in given.items() if name not in names}
        return cls(**{name: given[name] for name in names}, hide=hide, container=container)

    def files_read(self) -> Iterator[tuple[str, Path]]:
        """The files that the run reads, by the option that names each."""
        if self.model.startswith("script:"):
            yield "--model", Path(self.model.removeprefix("script:"))
        if self.task is not None and self.task.startswith("@"):
            yield "--task", Path(self.task[1:])
        yield from (("--policy", Path(spec)) for spec in self.policies if spec.endswith(".toml"))
        own = (("--model", [self.model]), ("--policy", filter(is_code, self.policies)), ("--section", self.sections))
        for option, specs in own:
            files = (spec.rpartition(":")[0] for spec in specs)
            yield from ((option, Path(file)) for file in files if file.endswith(".py"))

    def spec(self, *, is_resumed: bool) -> RunSpec:
        """Return what the run is made of. For a resume, an option that is not given leaves the old limit in force."""
        workspace = self.workspace or (None if is_resumed else "disk")
        # A command that names its task means the same each time it is repeated.
        turns = self.max_turns if is_resumed and self.task is None else self.max_turns or MAX_TURNS
        limits = RunLimits(
            tuple(map(absolute_policy, self.policies)),
            self.deadline,
            self.max_tokens,
            turns,
            place_of(workspace, self.container),
            tuple(map(absolute_code, self.sections)),
            self.asks,
            self.ask_seconds,
            self.max_repeats,
            self.max_cost,
        )
        return RunSpec(
            self.directory, self.model, limits, self.hide, self.with_ignored, self.allow_git, detect=self.detect
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is ready to start. ``record`` is None for a run in memory."""

    options: RunCommand
    task: AgentTask
    limits: RunLimits
    is_resumed: bool
    record: RunRecord | None
    patch: OutputFile | None
    receipts: ReceiptsFile | None
    report: ReportFile | None
    questions: RunQuestions


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
        _finish(run, outcome, errors, invocation)
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


def read_task(text: str) -> str:
    """Return the text of ``--task`` or of the file that it names. Raises click.BadParameter if there is none."""
    if text.startswith("@"):
        try:
            text = read_host_text(Path(text[1:]))
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{text[1:]!r} cannot be read: {why(error)}", param_hint="'--task'") from None
    if not text.strip():
        raise click.BadParameter("it is empty: say what is to be done", param_hint="'--task'")
    return text


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


def _finish(run: Run, outcome: RunOutcome, errors: ErrorStream, invocation: Invocation) -> None:
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
