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
from ringfence.filesystem.edits import read_host_text
from ringfence.filesystem.paths import escape_path
from ringfence.runtime.limits import utc_now
from ringfence_cli.disk import DiskWorkspace, on_disk
from ringfence_cli.history import recovery
from ringfence_cli.options import UNAVAILABLE, BusyError, NotStartedError, is_nowhere
from ringfence_cli.outputs import JsonOutput, OutputFile, ReceiptsFile, refuse_way_out
from ringfence_cli.own_sections import results_alone, sections_of
from ringfence_cli.own_sections import spelled as section_spelled
from ringfence_cli.policies import policies_of, unfit
from ringfence_cli.printable import plural, printable, why
from ringfence_cli.report import as_json, left_out, summary
from ringfence_cli.report_file import ReportFile
from ringfence_cli.resuming import RunRecord, is_interrupted, run_to_resume
from ringfence_cli.signals import Signals
from ringfence_cli.task import EXIT_CODES, Outcome, RunOutcome, Task, apply, check, perform
from ringfence_cli.telemetry import telemetry_of
from ringfence_cli.terminal import ErrorStream, put_diff
from ringfence_cli.terms import Place, RunLimits, spelled
from ringfence_cli.watch import RunStats, Watcher
from ringfence_cli.workspace import MemoryWorkspace, RunWorkspace, protect_path
from ringfence_sandbox.calls.half_done import killed_call, killed_in, running_in
from ringfence_sandbox.disk.places import StateDirectoryError
from ringfence_sandbox.moved_roots import moved_from

if TYPE_CHECKING:
    from ringfence.adapters import AnthropicAdapter, OpenAIAdapter

OutputT = TypeVar("OutputT", OutputFile, ReceiptsFile, ReportFile)

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


def run_task(options: Options, signals: Signals) -> int:
    """The exit code. Raises click.ClickException where nothing was begun; with ``as_json`` that is said here, and one
    object is on standard output, whatever happened."""
    answer = JsonOutput(wanted=options.as_json)

    def said(outcome: Outcome, error: str) -> None:
        with suppress(OSError):  # what ended the run is said on standard error as well
            answer.put(as_json(RunOutcome(outcome, error), RunStats(), None))

    try:
        return _run(options, signals, answer, said)
    except (click.ClickException, StateDirectoryError) as raised:
        if not options.as_json:
            raise
        error = NotStartedError.of(raised) if isinstance(raised, StateDirectoryError) else raised
        said("busy" if isinstance(error, BusyError) else "not_started", error.format_message())
        ErrorStream().show(error)
        return error.exit_code
    except Exception as error:
        if not options.as_json or (isinstance(error, FileNotFoundError) and is_nowhere()):  # which is said outside
            raise
        said("failed", describe_error(error))
        ErrorStream().say(f"ringfence: {describe_error(error)}")
        return EXIT_CODES["failed"]


def _run(options: Options, signals: Signals, answer: JsonOutput, said: Callable[[Outcome, str], None]) -> int:
    errors = ErrorStream()
    with ExitStack() as files:
        telemetry = telemetry_of(errors, files)
        try:
            with signals.let_through():
                adapter = model_of(options.model, files)
                text = options.task or ""
                copied = options.place.workspace == "memory"
                if (moved := moved_from(str(options.directory), copied=copied)) is not None:
                    errors.say(f"ringfence: {printable(moved)}")
                policies = policies_of(options.directory, options.policies)
                terms = _terms(options)
                record: RunRecord | None = None
                if copied:
                    for line in recovered_before_copy(options.directory, quiet=options.quiet):
                        errors.say(line)
                    workspace: RunWorkspace = loaded(options.directory)
                else:
                    workspace = on_disk(options.directory, quiet=options.quiet)
                    files.callback(workspace.close)
                    _refuse_overtaken(options)
                    record = _record(options.directory, text, terms, files)
                    terms = record.terms
                if not text:
                    policies = policies_of(options.directory, terms.policies)
                with results_alone(terms.sections):
                    sections = sections_of(terms.sections, options.directory)
                if terms.place.workspace == "podman" and isinstance(workspace, DiskWorkspace):
                    start_container(workspace, terms.place)
                adapter.max_turns = terms.turns or MAX_TURNS
                # Opened only now, so that a new file in the directory itself is not taken for one of its own.
                patch = _opened(OutputFile, options.patch, options, files)
                receipts = _opened(ReceiptsFile, options.receipts, options, files)
                report = _opened(partial(ReportFile, directory=options.directory), options.report, options, files)
        except KeyboardInterrupt:
            said("interrupted", "interrupted: nothing was changed")
            errors.say("ringfence: interrupted: nothing was changed")
            return EXIT_CODES["interrupted"]
        except SandboxUnavailableError as error:
            said("no_sandbox", str(error))
            errors.say(f"ringfence: {error}")
            return UNAVAILABLE
        _keep_out_results(workspace, patch, receipts, report)
        if isinstance(workspace, DiskWorkspace):
            if (recovered := workspace.history.recovered) is not None:
                errors.say(recovery(recovered, options.directory))
            if receipts is not None:
                receipts.complete(workspace.history)
        if not options.quiet:
            for line in left_out(workspace.left_out):
                errors.say(line)
        tally = record.tally if record is not None else RunStats()
        words = text if record is None else record.task
        task = Task(words, workspace, adapter, terms.seconds, terms.tokens, policies, sections, record, telemetry)
        try:
            with results_alone(sections):
                check(task)
        except PromptValidationError as error:  # a policy is about a tool that this run does not have
            raise unfit(error, options.directory, terms.place.workspace) from None
        if not options.quiet:
            if not text:
                errors.say(f"goes on with {terms.said}")
            if record is not None and (before := record.interrupted_before()) is not None:
                errors.say(before)
        watchers: list[Watcher] = [one for one in (receipts, report) if one is not None]
        with results_alone(sections):
            ending = watched(task, signals, tally, watchers, None if options.quiet else errors)
        _finish(options, task, ending, tally, patch, report, errors, signals, answer)
    return ending.exit_code


def _keep_out_results(
    workspace: RunWorkspace, patch: OutputFile | None, receipts: ReceiptsFile | None, report: ReportFile | None
) -> None:
    """Have the agent leave alone where this run writes what came of it."""
    _refuse_one_file(patch, receipts, report)
    # From a copy in memory nothing is written over what is on disk, and may have changed.
    others = [(patch, "patch"), (receipts, "list of receipts")] if isinstance(workspace, DiskWorkspace) else []
    for file, what in [(report, "report"), *others]:
        if file is not None:
            protect_path(workspace, file.path, f"the {what} of this run comes there")


def watched(
    task: Task, signals: Signals, tally: RunStats, watchers: Sequence[Watcher], errors: ErrorStream | None
) -> RunOutcome:
    """Perform a task, shown live on `errors` where that is given."""
    if errors is None:
        return perform(task, signals, tally, watchers)
    from ringfence_cli.live import View

    with View(errors, tally, task.workspace.directory) as view:
        return perform(task, signals, tally, [view, *watchers])


def _finish(
    options: Options,
    task: Task,
    ending: RunOutcome,
    tally: RunStats,
    patch: OutputFile | None,
    report: ReportFile | None,
    errors: ErrorStream,
    signals: Signals,
    answer: JsonOutput,
) -> None:
    """The patch is saved and printed first: whatever happens then, it is there."""
    workspace = task.workspace
    if patch is not None:
        _writing(ending, lambda: patch.replace(ending.patch))
    if not options.as_json and ending.outcome != "interrupted":
        _writing(ending, lambda: put_diff(ending.patch))
    if isinstance(workspace, DiskWorkspace):
        ending.applied = bool(ending.changes)
    elif options.apply and isinstance(workspace, MemoryWorkspace):
        apply(ending, workspace, signals)
    if report is not None:
        from ringfence_cli.report_page import About, page

        # Who reads it is somewhere else.
        there = replace(options, directory=Path(os.path.abspath(options.directory)))
        next_steps = list(_what_next(there, ending, workspace))
        # Without a URL, which may have a password in it.
        model = options.model.partition("@")[0]
        record, terms = report.record_of(tally), task.record.terms.said if task.record is not None else ""
        about = About(task.text, model, terms, report.started_at, utc_now(), next_steps, record)
        _writing(ending, lambda: report.write(page(about, ending, tally, workspace)))
    if options.as_json:
        _writing(ending, lambda: answer.put(as_json(ending, tally, workspace)))
    if task.tokens is not None and tally.turns and not tally.usage.total_tokens:  # some servers send zeros
        errors.say("ringfence: the model does not tell how many tokens it uses: --max-tokens held nothing back")
    if not options.quiet:
        if ending.outcome == "done" and isinstance(task.adapter, ScriptedAdapter) and task.adapter.unused:
            left = plural(task.adapter.unused, "turn")
            errors.say(
                f"the script has {left} after the one that ended the run: a turn without tool calls is the answer"
            )
        beside = workspace.left_out_since()
        ended = (*left_out(beside), *summary(ending, tally, beside=bool(beside)))
        for line in (*ended, *_what_next(options, ending, workspace)):
            errors.say(line)
    if task.record is not None and ending.outcome == "done":
        task.record.finish()  # who is killed before all of it was written goes on with the run, and writes it
    if ending.error is not None:
        errors.say(f"ringfence: {ending.error}")
        for path in ending.conflicts:
            errors.say(f"  {escape_path(path)}")


def _what_next(options: Options, ending: RunOutcome, workspace: RunWorkspace) -> Iterator[str]:
    quoted = shlex.quote(str(options.directory))
    if isinstance(workspace, DiskWorkspace) and workspace.is_part:
        yield f"{workspace.is_part}: what it changed is told from where it was resumed"
    if isinstance(workspace, DiskWorkspace):
        for path in ending.mixed:
            yield f"others changed the same lines of {escape_path(path)} meanwhile: its diff has their changes, too"
        if steps := workspace.own_steps():
            are_newest = steps == workspace.history.steps()[-len(steps) :]  # else others have made some in between
            undone = f"{len(steps)}" if are_newest else f"--step {steps[-1].number}"
            which = "it" if len(steps) == 1 else "them" if are_newest else "the last one"
            undo = f"`ringfence undo {quoted} {undone}` takes {which} back"
            yield f"{plural(len(steps), 'step')} in {options.directory}: {undo}"
        # A script that fails is wrong itself: what it says is the error.
        of_script = ending.outcome == "provider_failed" and options.model.startswith("script:")
        if ending.outcome != "done" and not of_script and is_interrupted(options.directory):
            anew = "".join(f" {option}" for option in ending.used_up)
            yield f"`ringfence run {quoted} --resume{anew} --model ...` goes on from there"
        return
    if not ending.changes:
        return
    if ending.applied:
        yield f"applied to {options.directory}"
        return
    yield f"{options.directory} is as it was"
    if options.patch is not None:
        yield f"the patch is in {options.patch}: apply it there with `git apply`"
    elif ending.outcome == "interrupted":
        yield "what was committed before is not kept; --patch FILE keeps it"
    elif ending.outcome == "done":
        yield "--apply writes the changes there, --patch FILE saves them for `git apply`"


def _refuse_one_file(patch: OutputFile | None, receipts: OutputFile | None, report: ReportFile | None) -> None:
    if patch is not None and receipts is not None and patch.is_same_file(receipts):
        raise click.UsageError("--patch and --receipts name the same file")
    for option, other in (("--patch", patch), ("--receipts", receipts)):
        if report is not None and other is not None and report.is_same_file(other):
            raise click.UsageError(f"{option} and --report name the same file")


def _writing(ending: RunOutcome, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        ending.fail(f"not everything could be written: {describe_error(error)}")


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


def loaded(directory: Path) -> MemoryWorkspace:
    try:
        return MemoryWorkspace(directory)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'DIR'") from None


def recovered_before_copy(directory: Path, *, quiet: bool = False) -> Iterator[str]:
    """Before a directory is copied: what a killed call left there is taken back, as every opening does; what to say of
    that, or of what a call has half done there all the same."""
    if killed_call(os.path.realpath(directory)) is not None:
        with closing(on_disk(directory, quiet=quiet)) as workspace:
            if (recovered := workspace.history.recovered) is not None:
                yield recovery(recovered, directory)
    elif (said := killed_in(str(directory)) or running_in(str(directory))) is not None:
        yield f"ringfence: {said}"


def start_container(workspace: DiskWorkspace, place: Place) -> None:
    """SandboxUnavailableError: commands cannot be run."""
    try:
        workspace.start_container(place)
    except (OSError, ValueError) as error:
        raise NotStartedError(f"the container cannot be started: {describe_error(error)}") from None


def _terms(options: Options) -> RunLimits:
    """What the command line says. For a resume a limit that it does not name is the run's."""
    turns = options.max_turns if options.max_turns is not None or options.task is None else MAX_TURNS
    policies = tuple(map(spelled, options.policies))
    sections = tuple(map(section_spelled, options.sections))
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
            task, terms = before.task, before.left.resumed(terms)
        return files.enter_context(closing(RunRecord(directory, task, before, terms)))
    except (OSError, ValueError) as error:
        raise click.UsageError(describe_error(error)) from None


def _opened(kind: Callable[[Path], OutputT], path: Path | None, options: Options, files: ExitStack) -> OutputT | None:
    if path is None:
        return None
    try:
        refuse_way_out(path, options.directory)
        return files.enter_context(closing(kind(path)))
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {why(error)}") from None
