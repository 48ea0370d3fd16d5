"""``ringfence run``: from the words of the command line to a task, and from its ending to streams and exit code."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import click

from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.errors import PromptValidationError, SandboxUnavailableError
from ringfence.failures import describe_error
from ringfence.filesystem.diff import moved
from ringfence.filesystem.edits import read_host_text
from ringfence.filesystem.paths import escape_path
from ringfence.participants import Change
from ringfence.runtime.limits import utc_now
from ringfence.runtime.session import Session
from ringfence_cli.history import recovery
from ringfence_cli.options import UNAVAILABLE, BusyError, NotStartedError, is_nowhere
from ringfence_cli.outputs import (
    ErrorStream,
    JsonOutput,
    OutputFile,
    ReceiptsFile,
    left_out_lines,
    put_diff,
    refuse_way_out,
)
from ringfence_cli.own_sections import absolute_section, reserve_stdout, sections_of
from ringfence_cli.policies import policies_of, unfit
from ringfence_cli.resume import RunLimits, RunRecord, absolute_policy, is_interrupted, run_to_resume
from ringfence_cli.signals import Signals
from ringfence_cli.task_log import record_task
from ringfence_cli.telemetry import telemetry_of
from ringfence_cli.workspace import in_memory, on_disk, recovered_before_copy, start_container
from ringfence_sandbox import StateDirectoryError, describe_moved_root
from ringfence_tools.agent_run import (
    EXIT_CODES,
    AgentTask,
    Outcome,
    RunOutcome,
    RunStats,
    RunWatcher,
    apply_changes,
    check_task,
    run_agent,
)
from ringfence_tools.printable import line_counts, plural, printable, unpatchable_changes, why
from ringfence_tools.run_workspace import DiskWorkspace, Place, RunWorkspace, protect_path

if TYPE_CHECKING:
    from ringfence.adapters import AnthropicAdapter, OpenAIAdapter
    from ringfence_tools.report import ReportFile

OutputT = TypeVar("OutputT", bound="OutputFile | ReportFile")

MAX_WAIT_SECONDS = 600.0
"""For a provider that says when to ask again, in one turn: nobody may be there to begin anew."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. ``task`` is None for that of the run to resume; ``model`` is a SPEC;
    ``deadline`` is in seconds. For a run to resume, what ``place`` does not say is as it was. ``either`` is the task of
    a run that is to be resumed if it was interrupted, else begun; ``task`` says which it is."""

    directory: Path
    task: str | None
    model: str
    apply: bool = False
    patch: Path | None = None
    receipts: Path | None = None
    report: Path | None = None
    deadline: float | None = None
    max_tokens: int | None = None
    max_turns: int | None = None
    quiet: bool = False
    as_json: bool = False
    place: Place = Place("memory")
    policies: Sequence[str] = ()
    sections: Sequence[str] = ()
    either: str | None = None


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that the user named."""

    patch: OutputFile | None
    receipts: ReceiptsFile | None
    report: ReportFile | None

    def refuse_one_file(self) -> None:
        if self.patch is not None and self.receipts is not None and self.patch.is_same_file(self.receipts):
            raise click.UsageError("--patch and --receipts name the same file")
        found = self.report.find() if self.report is not None else None
        for option, other in (("--patch", self.patch), ("--receipts", self.receipts)):
            if found is not None and other is not None and other.is_file(found):
                raise click.UsageError(f"{option} and --report name the same file")

    def protect_from(self, workspace: RunWorkspace) -> None:
        """Refuse what the agent writes to them."""
        files = [(self.report, "report")]
        if workspace.history is not None:  # from a copy in memory nothing is written over files that may have changed
            files += [(self.patch, "patch"), (self.receipts, "list of receipts")]
        for file, what in files:
            if file is not None:
                protect_path(workspace, file.path, f"the {what} of this run comes there")


def run_task(options: Options, signals: Signals) -> int:
    """The exit code. Raises click.ClickException where nothing was begun; with ``as_json`` one object is on standard
    output, whatever happened, and the exit code is returned."""
    answer = JsonOutput(wanted=options.as_json)

    def put_failure(outcome: Outcome, error: str) -> None:
        with suppress(OSError):  # the error is on standard error as well
            answer.put(RunOutcome(outcome, error).to_json())

    try:
        return _run(options, signals, answer, put_failure)
    except (click.ClickException, StateDirectoryError) as raised:
        if not options.as_json:
            raise
        error = NotStartedError.of(raised) if isinstance(raised, StateDirectoryError) else raised
        put_failure("busy" if isinstance(error, BusyError) else "not_started", error.format_message())
        ErrorStream().show(error)
        return error.exit_code
    except Exception as error:
        if not options.as_json or (isinstance(error, FileNotFoundError) and is_nowhere()):  # the caller describes it
            raise
        put_failure("failed", describe_error(error))
        ErrorStream().say(f"ringfence: {describe_error(error)}")
        return EXIT_CODES["failed"]


def _run(options: Options, signals: Signals, answer: JsonOutput, put_failure: Callable[[Outcome, str], None]) -> int:
    errors = ErrorStream()
    with ExitStack() as files:
        telemetry = telemetry_of(errors, files)
        try:
            with signals.let_through():
                adapter = model_of(options.model, files)
                is_copy = options.place.workspace == "memory"
                if (moved_root := describe_moved_root(options.directory, copied=is_copy)) is not None:
                    errors.say(f"ringfence: {printable(moved_root)}")
                policies = policies_of(options.directory, options.policies)
                terms = _limits_of(options)
                record: RunRecord | None = None
                if is_copy:
                    for line in recovered_before_copy(options.directory, quiet=options.quiet):
                        errors.say(line)
                    workspace: RunWorkspace = in_memory(options.directory)
                else:
                    workspace = on_disk(options.directory, quiet=options.quiet)
                    files.callback(workspace.close)
                    _refuse_overtaken(options)
                    record = _record(options.directory, options.task or "", terms, files)
                    terms = record.terms
                if not options.task:
                    policies = policies_of(options.directory, terms.policies)
                with reserve_stdout(terms.sections):
                    sections = sections_of(terms.sections, options.directory)
                if terms.place.workspace == "podman":
                    start_container(workspace, terms.place)
                adapter.max_turns = terms.turns or MAX_TURNS
                # Opened only now, so that a new file in the directory itself is not taken for one of its own.
                outputs = _open_outputs(options, files)
        except KeyboardInterrupt:
            put_failure("interrupted", "interrupted: nothing was changed")
            errors.say("ringfence: interrupted: nothing was changed")
            return EXIT_CODES["interrupted"]
        except SandboxUnavailableError as error:
            put_failure("no_sandbox", str(error))
            errors.say(f"ringfence: {error}")
            return UNAVAILABLE
        outputs.refuse_one_file()
        outputs.protect_from(workspace)
        if workspace.history is not None:
            if (recovered := workspace.history.recovered) is not None:
                errors.say(recovery(recovered, options.directory))
            if outputs.receipts is not None:
                outputs.receipts.complete(workspace.history)
        text = record.task if record is not None else options.task or ""
        task = AgentTask(text, workspace, adapter, terms.seconds, terms.tokens, policies, sections, telemetry)
        try:
            with reserve_stdout(sections):
                check_task(task)
        except PromptValidationError as error:  # a policy is about a tool that this run does not have
            raise unfit(error, options.directory, terms.place.workspace) from None
        if not options.quiet:
            for line in left_out_lines(workspace.left_out):
                errors.say(line)
            if not options.task:
                errors.say(f"goes on with {terms.describe()}")
            if record is not None and (before := record.interrupted_before()) is not None:
                errors.say(before)
        watchers: list[RunWatcher] = [one for one in (outputs.receipts, outputs.report) if one is not None]
        with reserve_stdout(sections):
            outcome = run_watched(task, signals, watchers, None if options.quiet else errors, record)
        _finish(options, task, record, outcome, outputs, errors, signals, answer)
    return outcome.exit_code


def run_watched(
    task: AgentTask,
    signals: Signals,
    watchers: Sequence[RunWatcher],
    errors: ErrorStream | None,
    record: RunRecord | None = None,
) -> RunOutcome:
    """Run the agent, shown live on `errors` where that is given."""
    stats = record.stats if record is not None else RunStats()
    earlier = record.earlier_sessions if record is not None else ()

    def prepare(session: Session) -> None:
        if record is not None and isinstance(task.workspace, DiskWorkspace):
            record.start(session, signals, task.workspace)

    with ExitStack() as live:
        if errors is not None:
            from ringfence_cli.live import View

            watchers = [live.enter_context(View(errors, stats, task.workspace.directory)), *watchers]
        outcome = run_agent(
            task, watchers=watchers, stats=stats, gate=signals, prepare=prepare, earlier_sessions=earlier
        )
    if record is not None and outcome.outcome != "done":
        record.interrupt()
    return outcome


def _finish(
    options: Options,
    task: AgentTask,
    record: RunRecord | None,
    outcome: RunOutcome,
    outputs: Outputs,
    errors: ErrorStream,
    signals: Signals,
    answer: JsonOutput,
) -> None:
    """The patch is saved and printed first: whatever happens then, it is there."""
    workspace = task.workspace
    if outputs.patch is not None:
        _write(outcome, partial(outputs.patch.replace, outcome.patch))
    if not options.as_json and outcome.outcome != "interrupted":
        _write(outcome, partial(put_diff, outcome.patch))
    if workspace.history is not None:
        outcome.applied = bool(outcome.changes)
    elif options.apply:
        apply_outcome(outcome, task, signals)
    if outputs.report is not None:
        _write(outcome, lambda: _write_report(options, task, record, outcome, outputs.report))
    if options.as_json:
        _write(outcome, lambda: answer.put(outcome.to_json()))
    stats = outcome.stats
    if task.tokens is not None and stats.turns and not stats.usage.total_tokens:  # some servers send zeros
        errors.say("ringfence: the model does not tell how many tokens it uses: --max-tokens held nothing back")
    if not options.quiet:
        if outcome.outcome == "done" and isinstance(task.adapter, ScriptedAdapter) and task.adapter.unused:
            remaining = plural(task.adapter.unused, "turn")
            errors.say(
                f"the script has {remaining} after the one that ended the run: a turn without tool calls is the answer"
            )
        uncovered = workspace.left_out_since()
        lines = (*left_out_lines(uncovered), *summary(outcome, has_uncovered=bool(uncovered)))
        for line in (*lines, *_next_steps(options, record, outcome, workspace)):
            errors.say(line)
    if record is not None and outcome.outcome == "done":
        record.finish()  # after a kill before all of it was written, --resume writes it
    if outcome.error is not None:
        errors.say(f"ringfence: {outcome.error}")
        for path in outcome.conflicts:
            errors.say(f"  {escape_path(path)}")


def apply_outcome(outcome: RunOutcome, task: AgentTask, signals: Signals) -> None:
    """Signals wait until it is done."""
    if outcome.outcome == "done" and signals.arrived:
        outcome.fail_interrupted()
        return
    apply_changes(outcome, task.workspace)
    if outcome.applied:
        with suppress(OSError):  # then its step has no task in `log`
            record_task(task.workspace.directory, outcome.session_ids[-1], task.text)


def _write_report(
    options: Options, task: AgentTask, record: RunRecord | None, outcome: RunOutcome, report: ReportFile | None
) -> None:
    from ringfence_tools.report import About, render_page

    assert report is not None
    # Who reads it is somewhere else.
    directory = os.path.abspath(options.directory)
    next_steps = list(_next_steps(replace(options, directory=Path(directory)), record, outcome, task.workspace))
    # Without a URL, which may have a password in it.
    model = options.model.partition("@")[0]
    terms = record.terms.describe() if record is not None else ""
    about = About(task.text, model, terms, directory, report.started_at, utc_now(), next_steps)
    report.write(render_page(about, outcome, task.workspace, report.record(outcome.stats)))


def summary(outcome: RunOutcome, *, has_uncovered: bool = False) -> Iterator[str]:
    """Lines for a person, after the diff; ``has_uncovered``: the run changed files that are not in the history."""
    stats = outcome.stats
    yield f"{outcome.outcome.replace('_', ' ')} after {stats.seconds:.1f} s: {stats.describe()}"
    if (plan := outcome.plan) is not None:
        done = sum(step.status == "done" for step in plan.steps)
        yield f"plan: {done} of {plural(len(plan.steps), 'step')} done"
    if not outcome.changes:
        nothing = "nothing else" if has_uncovered else "nothing"
        yield f"{nothing} was changed since it was resumed" if outcome.is_part else f"{nothing} was changed"
    else:
        files = [change for change in outcome.changes if not _is_directory(change)]
        added, removed = line_counts(outcome.patch)
        yield f"{plural(len(files) - len(moved(outcome.changes)), 'file')} changed, +{added} -{removed} lines"
    for line in unpatchable_changes(outcome.changes):
        yield printable(f"not in the patch: {line}")


def _is_directory(change: Change) -> bool:
    version = change.after or change.before
    return version is not None and version.kind == "directory"


def _next_steps(
    options: Options, record: RunRecord | None, outcome: RunOutcome, workspace: RunWorkspace
) -> Iterator[str]:
    """What a person can do now."""
    quoted = shlex.quote(str(options.directory))
    if workspace.is_part:
        yield f"{workspace.is_part}: what it changed is told from where it was resumed"
    for path in outcome.mixed:
        yield f"others changed the same lines of {escape_path(path)} meanwhile: its diff has their changes, too"
    if outcome.applied and workspace.history is None:
        yield f"applied to {options.directory}"
    if steps := workspace.own_steps():
        newest = workspace.history.steps() if workspace.history is not None else steps
        are_newest = steps == newest[-len(steps) :]  # else another process has made some in between
        undone = f"{len(steps)}" if are_newest else f"--step {steps[-1].number}"
        which = "it" if len(steps) == 1 else "them" if are_newest else "the last one"
        undo = f"`ringfence undo {quoted} {undone}` takes {which} back"
        yield f"{plural(len(steps), 'step')} in {options.directory}: {undo}"
    # A script that fails is wrong itself: its failure is the error.
    of_script = outcome.outcome == "provider_failed" and options.model.startswith("script:")
    if record is not None and outcome.outcome != "done" and not of_script and is_interrupted(options.directory):
        anew = "".join(f" {option}" for option in record.remaining().used_up())
        yield f"`ringfence run {quoted} --resume{anew} --model ...` goes on from there"
    if workspace.history is not None or outcome.applied or not outcome.changes:
        return
    yield f"{options.directory} is as it was"
    if options.patch is not None:
        yield f"the patch is in {options.patch}: apply it there with `git apply`"
    elif outcome.outcome == "interrupted":
        yield "what was committed before is not kept; --patch FILE keeps it"
    elif outcome.outcome == "done":
        yield "--apply writes the changes there, --patch FILE saves them for `git apply`"


def _write(outcome: RunOutcome, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        outcome.fail(f"not everything could be written: {describe_error(error)}")


def files_read(
    model: str, task: str | None, policies: Iterable[str], sections: Iterable[str]
) -> Iterator[tuple[str, Path]]:
    """What a command line has a run read, by the option that names it."""
    kind, _, name = model.partition(":")
    if kind == "script":
        yield "--model", Path(name)
    if task is not None and task.startswith("@"):
        yield "--task", Path(task[1:])
    for spec in policies:
        if spec.endswith(".toml"):
            yield "--policy", Path(spec)
    for spec in sections:
        yield "--section", Path(spec.rpartition(":")[0])


def model_of(spec: str, files: ExitStack) -> LoopAdapter:
    """The model that a SPEC means; ``files`` closes its connections."""
    kind, _, name = spec.partition(":")
    if kind not in ("openai", "anthropic", "script") or not name:
        raise click.BadParameter(
            f"there is no model {spec!r}; there is openai:MODEL and anthropic:MODEL, each with @BASE_URL for a "
            "compatible server, and script:FILE, a written model (JSON Lines of turns)",
            param_hint="'--model'",
        )
    try:
        if kind == "script":
            return ScriptedAdapter(name)
        return files.enter_context(provider_of(kind, name))
    except OSError as error:
        raise click.BadParameter(f"{name!r} cannot be read: {why(error)}", param_hint="'--model'") from None
    except (ValueError, ImportError, RecursionError) as error:
        raise click.BadParameter(str(error), param_hint="'--model'") from None


def provider_of(kind: str, name: str) -> OpenAIAdapter | AnthropicAdapter:
    """Raises ValueError and ImportError, which say what is missing."""
    from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ThrottlePolicy

    patient = ThrottlePolicy(max_total_delay=MAX_WAIT_SECONDS)
    model, at, url = name.partition("@")
    if at and not (model and _is_base_url(url)):
        raise ValueError(
            f"{name!r}: it is MODEL@BASE_URL, and a base URL begins with http://HOST, https://HOST or https://HOST:PORT"
        )
    if kind == "anthropic":
        return AnthropicAdapter(model, base_url=url or None, throttle=patient)
    # Compatible servers all have Chat Completions, and few have Responses.
    return OpenAIAdapter(model, base_url=url or None, api="chat" if url else "responses", throttle=patient)


def _is_base_url(url: str) -> bool:
    """Asked here, since an SDK finds out as late as its first request, or raises what is no ValueError."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is no number
        return False


def task_of(text: str, signals: Signals) -> str:
    if text.startswith("@"):
        try:
            with signals.let_through():  # it may be a pipe
                text = read_host_text(Path(text[1:]))
        except KeyboardInterrupt:
            ErrorStream().say("ringfence: interrupted: nothing was changed")
            raise click.Abort from None
        except (OSError, ValueError) as error:
            raise click.BadParameter(f"{text[1:]!r} cannot be read: {why(error)}", param_hint="'--task'") from None
    if not text.strip():
        raise click.BadParameter("it is empty: say what is to be done", param_hint="'--task'")
    return text


def _limits_of(options: Options) -> RunLimits:
    """What the command line says. For a resume a limit that it does not name is the run's."""
    turns = options.max_turns if options.max_turns is not None or options.task is None else MAX_TURNS
    policies = tuple(map(absolute_policy, options.policies))
    sections = tuple(map(absolute_section, options.sections))
    return RunLimits(policies, options.deadline, options.max_tokens, turns, options.place, sections)


def _refuse_overtaken(options: Options) -> None:
    """Now that no other process can begin or end a run here: what was found to do may not be what there is to do."""
    if options.either is not None and is_interrupted(options.directory, options.either) != (options.task is None):
        raise BusyError(
            f"meanwhile another process has begun or ended a run in {options.directory}: repeat the command"
        )


def _record(directory: Path, task: str, terms: RunLimits, files: ExitStack) -> RunRecord:
    """Where a run is written down, so that it can go on when it was interrupted; without a task, the one that was, on
    what is left of its terms."""
    try:
        before = None if task else run_to_resume(directory)
        if not task and before is None:
            raise click.UsageError(f"there is no interrupted run in {directory}: give a new one its --task")
        if before is not None:
            task, terms = before.task, before.remaining.resumed(terms)
        return files.enter_context(closing(RunRecord(directory, task, before, terms)))
    except (OSError, ValueError) as error:
        raise click.UsageError(describe_error(error)) from None


def _open_outputs(options: Options, files: ExitStack) -> Outputs:
    def opened(kind: Callable[[Path], OutputT], path: Path | None) -> OutputT | None:
        if path is None:
            return None
        try:
            refuse_way_out(path, options.directory)
            return files.enter_context(closing(kind(path)))
        except OSError as error:
            raise click.UsageError(f"{str(path)!r} cannot be written: {why(error)}") from None

    patch, receipts = opened(OutputFile, options.patch), opened(ReceiptsFile, options.receipts)
    if options.report is None:
        return Outputs(patch, receipts, None)
    from ringfence_tools.report import ReportFile

    return Outputs(patch, receipts, opened(partial(ReportFile, directory=options.directory), options.report))
