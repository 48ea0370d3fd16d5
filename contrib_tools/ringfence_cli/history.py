"""The commands for the history of a disk workspace."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec

import click

from ringfence import serde
from ringfence.errors import RingfenceError
from ringfence.escapes import display_path, escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.filesystem.paths import is_dotgit
from ringfence.receipts import change_json
from ringfence_cli.git_data import git_data_json, git_data_lines
from ringfence_cli.options import (
    AS_JSON,
    THIS_DIRECTORY,
    THIS_DIRECTORY_OR_GONE,
    WITH_IGNORED,
    Command,
    Invocation,
    PathsCommand,
    given_paths,
    nearest_workspace,
    workspace_of,
)
from ringfence_sandbox import (
    NothingToUndoError,
    ShownStep,
    StateDirectoryError,
    Workspace,
    describe_lost_rule,
    describe_replaced_root,
    find_workspace,
)
from ringfence_tools.printable import (
    ignored_line,
    one_line,
    patch_json,
    patch_stats,
    plural,
    printable,
    stat_lines,
    unpatchable_changes,
    why,
)
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, OutputFile, open_output, put, put_diff, recording
from ringfence_tools.runs.recovered_call import describe_recovery
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.task_log import forget_tasks, recorded_runs, recorded_tasks

if TYPE_CHECKING:
    from ringfence.participants import Step
    from ringfence_sandbox import Export, LogEntry, Reversal, ReversalOutcome, StepName

P = ParamSpec("P")

GIT_DATA = "git's own data, for which git takes no patch"
MAX_PATHS = 5
"""The most paths on a line of the log."""
MAX_TASK_CHARACTERS = 40
"""The most characters of a run's task on a line of the log."""
NARROW_COLUMNS = 100
"""Below this width, the log has times without year and seconds."""
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would become of each path.")


def _command_of(
    kind: type[click.Command],
    directory_argument: Callable[[Any], Any] = THIS_DIRECTORY,
) -> Callable[[Callable[Concatenate[Invocation, Path, P], int]], click.Command]:
    def made(function: Callable[Concatenate[Invocation, Path, P], int]) -> click.Command:
        @wraps(function)
        def in_workspace(invocation: Invocation, directory: Path, *args: P.args, **kwargs: P.kwargs) -> int:
            return function(invocation, workspace_of(directory), *args, **kwargs)

        return click.command(cls=kind)(directory_argument(AS_JSON(click.pass_obj(in_workspace))))

    return made


def history_command(function: Callable[Concatenate[Invocation, Path, P], int]) -> click.Command:
    """Make a command over the workspace at DIR."""
    return _command_of(HistoryCommand)(function)


def history_command_of_gone(function: Callable[Concatenate[Invocation, Path, P], int]) -> click.Command:
    """Make a command over the workspace at DIR, which may be gone."""
    return _command_of(HistoryCommand, THIS_DIRECTORY_OR_GONE)(function)


class HistoryCommand(Command):
    """A command whose DIR may be left out before its other arguments, where that can mean one thing alone."""

    def completed(self, ctx: click.Context, args: list[str]) -> list[str]:
        values = self.values(ctx, args)
        arguments = [one for one in self.params if isinstance(one, click.Argument)]
        given = [value for one in arguments if isinstance(value := values.get(str(one.name)), str)]
        if not given or len(given) == len(arguments) or given[0] in (".", "..") or "/" in given[0]:
            return args
        is_without = len(given) <= sum(one.required for one in arguments) or _can_be_step(given[0], arguments[1])
        return [".", *args] if is_without else args


def _can_be_step(word: str, argument: click.Argument) -> bool:
    """Whether a word is a value of an argument and not DIR. Raises click.UsageError if it can be both."""
    if word.isdecimal() and os.path.isdir(word):
        raise click.UsageError(f"{word} is a directory here, and can be a step: write ./{word}, or . {word}")
    return word.isdecimal() or not (isinstance(argument.type, click.IntRange) or os.path.isdir(word))


def step_name(ctx: click.Context, param: click.Parameter, value: str | None) -> StepName | None:
    """Return the number of a step, or its name."""
    if value is None or not value.isdecimal():
        return value
    try:
        return int(value)
    except ValueError:  # more digits than Python takes
        raise click.BadParameter("there is no step of so high a number", ctx, param) from None


STEP = click.argument("step", callback=step_name)
SHOWN = click.argument("step", callback=step_name, required=False)
STAT = click.option("--stat", is_flag=True, help="Only list the changed files, each with the numbers of its lines.")
FROM = click.argument("a", callback=step_name, required=False)
TO = click.argument("b", callback=step_name, required=False)


@history_command
@click.option("--aborted", is_flag=True, help="List what rollbacks took away instead.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N entries.")
@WITH_IGNORED
def log(invocation: Invocation, directory: Path, aborted: bool, limit: int | None, with_ignored: bool) -> int:
    """List the steps of DIR, newest first, and what somebody else changed in between."""
    with opened(directory, invocation, changes=False) as workspace:
        entries = workspace.aborted()[:limit] if aborted else workspace.log(limit, with_ignored=with_ignored)
    tasks = recorded_tasks(directory)
    if invocation.wants_json:
        invocation.put_json({"log": [_json(entry) | {"task": tasks.get(entry.session_id)} for entry in entries]})
    else:
        put(_log_text(entries, tasks))
    return 0


@history_command
@SHOWN
@click.option("--aborted", is_flag=True, help="STEP is the number of something that a rollback took away.")
@STAT
@WITH_IGNORED
def show(
    invocation: Invocation, directory: Path, step: StepName | None, aborted: bool, stat: bool, with_ignored: bool
) -> int:
    """Show what a step of DIR changed. STEP is a number, a name or `aborted/N`, by default the newest."""
    if isinstance(step, str) and re.fullmatch(r"aborted/\d{1,9}", step):
        step, aborted = int(step.removeprefix("aborted/")), True
    if aborted and isinstance(step, str):
        raise click.UsageError("with --aborted STEP is a number, as `ringfence log --aborted` has it")
    with opened(directory, invocation, changes=False) as workspace:
        if step is None:
            step = _newest_step(workspace, aborted=aborted)
        if aborted and isinstance(step, int):
            found = workspace.aborted_step(step, with_ignored=with_ignored)
        else:
            found = workspace.show(step, with_ignored=with_ignored)
    task = recorded_tasks(directory).get(found.step.session_id)
    if invocation.wants_json:
        invocation.put_json(
            {
                "step": _json(found.step) | {"task": task},
                "changes": [change_json(change) for change in found.changes],
                "left_out": _left_out(found.left_out),
                "ignored": len(found.ignored),
                "git": git_data_json(found.git),
                **({"files": patch_stats(found.patch)} if stat else patch_json(found.patch)),
            }
        )
        return 0
    lines = [*_lines_of_step(found, task, aborted=aborted, stat=stat), ""]
    lines += stat_lines(found.patch) if stat else ()
    put("".join(f"{printable(line)}\n" for line in lines).encode())
    if not stat:
        put_diff(found.patch)
    return 0


def _lines_of_step(found: ShownStep, task: str | None, *, aborted: bool, stat: bool) -> Iterator[str]:
    """Say whose step it is, and what of it the patch does not have."""
    kind = "rolled back" if aborted else "step"
    at = found.step.created_at.isoformat(timespec="seconds")
    yield one_line(f"{kind} {found.step.number}: {_describe_call(found.step)}, {at}", 200)
    if task is not None:
        yield f"run: {one_line(task, 200)}"
    for path, reason in found.left_out.items():
        yield "not in the history: " + one_line(f"{escape_path(path)} ({reason})", 200)
    for line in unpatchable_changes(found.changes):
        yield f"not in the patch: {line}"
    if git := [path for path in found.step.paths if _git_place(path) is not None and path not in found.left_out]:
        yield f"not in the patch: {plural(len(git), 'path')} of {GIT_DATA}"
        yield from git_data_lines(found.git, aborted=aborted, stat=stat)
    if found.ignored:
        yield ignored_line(len(found.ignored))


def _describe_call(step: Step) -> str:
    """Say whose step it is."""
    if not step.number:
        return "the workspace as found"
    client = f" of {step.client}" if step.client else ""
    session = f", session {step.session_id}" if step.session_id else ""
    title = f": {step.title}" if step.title else ""
    return f"{step.tool}{title}{client}, call {step.call_id}{session}"


def _newest_step(workspace: Workspace, *, aborted: bool) -> int:
    """Return the number of the newest step, or of what a rollback took away last. Raises LookupError."""
    entries = workspace.aborted() if aborted else reversed(workspace.steps())
    number = next((entry.number for entry in entries), None)
    if number is None:
        raise LookupError("no rollback took anything away" if aborted else "the history has no step yet")
    return number


@history_command
@FROM
@TO
@STAT
@WITH_IGNORED
def diff(
    invocation: Invocation, directory: Path, a: StepName | None, b: StepName | None, stat: bool, with_ignored: bool
) -> int:
    """Print the patch from the state after step A (by default the oldest) to that after B (by default the newest)."""
    return _export(invocation, directory, a, b, "diff", None, with_ignored, stat=stat)


@history_command
@FROM
@TO
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["diff", "mbox"]),
    default="diff",
    show_default=True,
    help="One patch for `git apply`, or a mail a step for `git am`.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Save it there.")
@WITH_IGNORED
def export(
    invocation: Invocation,
    directory: Path,
    a: StepName | None,
    b: StepName | None,
    fmt: Literal["diff", "mbox"],
    output: Path | None,
    with_ignored: bool,
) -> int:
    """Write the changes of DIR from step A (by default the oldest) to B (by default the newest) for git."""
    return _export(invocation, directory, a, b, fmt, output, with_ignored)


def _export(
    invocation: Invocation,
    directory: Path,
    a: StepName | None,
    b: StepName | None,
    fmt: Literal["diff", "mbox"],
    output: Path | None,
    with_ignored: bool,
    *,
    stat: bool = False,
) -> int:
    with opened(directory, invocation, changes=False) as workspace:
        exported = workspace.export(fmt, a=a, b=b, with_ignored=with_ignored)
    if output is not None:
        _save(output, exported.text, directory, invocation.signals)
    if invocation.wants_json:
        left_out = _left_out({**dict.fromkeys(exported.left_out, GIT_DATA), **exported.unknown})
        content = {"files": patch_stats(exported.text)} if stat else {"format": fmt, **patch_json(exported.text)}
        invocation.put_json({**content, "left_out": left_out, "ignored": len(exported.ignored)})
    elif stat:
        put("".join(f"{printable(line)}\n" for line in stat_lines(exported.text)).encode())
    elif output is None:
        put_diff(exported.text)
    errors = ErrorStream()
    for line in _not_exported(exported):
        errors.say(line)
    return 0


def _save(output: Path, text: bytes, directory: Path, signals: Signals) -> None:
    try:
        with ExitStack() as stack:
            with signals.let_through():  # a pipe waits for its reader
                file = open_output(OutputFile, output, directory, stack)
            assert file is not None
            file.replace(text)
    except KeyboardInterrupt:
        raise click.Abort("interrupted: nothing was written") from None
    except InterruptedError:
        raise click.Abort("interrupted: not all of it was written") from None
    except OSError as error:
        raise click.UsageError(f"{str(output)!r} cannot be written: {why(error)}") from None


def _not_exported(exported: Export) -> Iterator[str]:
    for line in unpatchable_changes(exported.changes):
        yield f"not in the patch: {line}"
    if exported.ignored:
        yield ignored_line(len(exported.ignored))
    if exported.left_out:
        yield f"left out: {plural(len(exported.left_out), 'path')} of {GIT_DATA}"
    for path, reason in itertools.islice(exported.unknown.items(), MAX_PATHS):
        yield f"left out: {escape_path(path)}, which the history does not know on one side ({reason})"
    if len(exported.unknown) > MAX_PATHS:
        yield f"left out: {len(exported.unknown) - MAX_PATHS} more of these; --json lists all"


class HistoryPathsCommand(PathsCommand, HistoryCommand):
    """A command for the history that takes paths behind ``--``."""


@_command_of(HistoryPathsCommand)
@click.argument("n", type=click.IntRange(min=1), required=False)
@click.option("--step", callback=step_name, metavar="K", help="Reverse step K alone, a number or a name.")
@click.option("--run", is_flag=True, help="Reverse all steps of the newest run.")
@DRY_RUN
@WITH_IGNORED
def undo(
    invocation: Invocation,
    directory: Path,
    n: int | None,
    step: StepName | None,
    run: bool,
    dry_run: bool,
    with_ignored: bool,
) -> int:
    """Reverse the newest N steps of DIR, by default one. What others changed since stays; it can be undone.

    With `-- PATH...` only what these steps changed at these paths, and below them, is reversed.
    """
    if (n is not None) + (step is not None) + run > 1:
        raise click.UsageError("give one of N, for the newest N steps, --step, for one alone, and --run, for a run's")
    is_newest = not run and step is None
    with opened(directory, invocation, changes=True, dry_run=dry_run, refuses_new_steps=is_newest) as workspace:
        sessions, named = None, ""
        among = _undos_among(workspace.steps()[-(n or 1) :]) if is_newest else ""
        if run:
            n, sessions, named = _newest_run(workspace, directory)
        paths = given_paths(directory)
        try:
            done = workspace.undo(
                n, step=step, session=sessions, paths=paths, dry_run=dry_run, with_ignored=with_ignored
            )
        except NothingToUndoError as error:
            raise click.ClickException(_describe_nothing(error, workspace.steps())) from None
        if sessions is not None:
            is_undone = bool(done.outcomes) and set(done.outcomes.values()) == {"kept"}
            what = f"{named} is undone already" if is_undone else f"these are changes of {named}"
            done = replace(done, notes=(what, *done.notes))
        elif among:
            done = replace(done, notes=(among, *done.notes))
    prints, code = not invocation.wants_json, _report(done, directory, invocation, dry_run)
    if code and prints:
        back = f"`ringfence restore {_quoted(directory)} STEP` goes back to a step whatever changed since"
        ErrorStream().say(f"what is in conflict stays as it is: edit it, or {back} (--dry-run shows what)")
    return code or int(bool(done.outcomes) and not done.has_changed)


def _describe_nothing(error: NothingToUndoError, steps: Sequence[Step]) -> str:
    """Say which step changed something at the paths instead, if one did."""
    for step in reversed(steps):
        if any(path == given or path.startswith(f"{given}/") for path in step.paths for given in error.paths):
            return f"{error}; step {step.number} ({one_line(step.tool, 64)}) did: --step {step.number}"
    return f"{error}, and so did all other steps"


def _describe_new(step: Step) -> str:
    """Say that a step was made that a person cannot have meant."""
    whose = one_line(": ".join(filter(None, (step.tool, step.title))), 100)
    by = f" of {step.client}" if step.client else ""
    again = f"again it undoes that, and --step {step.number} that alone"
    return f"nothing was undone: step {step.number} ({whose}{by}) was made while this waited. {again}"


def _undos_among(steps: Sequence[Step]) -> str:
    """Say which of the steps to reverse are undos themselves: their reversal brings back what they took away."""
    numbers = [str(step.number) for step in steps if step.tool == "undo"]
    if not numbers:
        return ""
    which = f"step {numbers[0]} is an undo" if len(numbers) == 1 else f"steps {', '.join(numbers)} are undos"
    return f"{which}, and counts as one of the newest: --step N reverses one step alone, --run all of a run"


def _newest_run(workspace: Workspace, directory: Path) -> tuple[int, Collection[str], str]:
    """Return the number of steps of the newest run, the ids of its sessions and its name. Raises LookupError."""
    runs = recorded_runs(directory)
    steps = [step for step in workspace.steps() if step.session_id in runs]
    if not steps:
        raise LookupError("the history has no step of a run: `ringfence log` lists what it has")
    sessions = {session for session, first in runs.items() if first == runs[steps[-1].session_id]}
    numbers = [step.number for step in steps if step.session_id in sessions]
    which = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    task = one_line(recorded_tasks(directory)[steps[-1].session_id], 60)
    return len(numbers), sessions, f"the run {task!r} ({which})"


@click.command(cls=Command)
@click.argument("patch", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@THIS_DIRECTORY
@DRY_RUN
@click.option("--policy", "policies", multiple=True, metavar="SPEC", help="As for `ringfence exec`.")
@AS_JSON
@click.pass_obj
def apply(invocation: Invocation, patch: Path, directory: Path, dry_run: bool, policies: tuple[str, ...]) -> int:
    """Apply PATCH, a unified diff or `-` for standard input, to the files of DIR as one step, or not at all."""
    from ringfence_tools.patching import apply_to
    from ringfence_tools.runs.owner_policies import policies_of

    directory = nearest_workspace(directory)
    rules = policies_of(directory, policies)
    text = sys.stdin.buffer.read() if patch == Path("-") else patch.read_bytes()
    try:
        with (
            invocation.signals.let_through(),
            recording() as progress,
            Workspace.open(directory, progress=progress) as workspace,
            workspace.transaction("apply", opaque=False, policies=rules) as block,
        ):
            files = apply_to(workspace.filesystem, text)
            if dry_run:
                block.rollback()
    except KeyboardInterrupt:
        raise click.Abort("interrupted: nothing was applied") from None
    except ValueError as error:
        raise NotStartedError(str(error)) from None
    if invocation.wants_json:
        step = _json(block.step) if block.step is not None else None
        changes = [change_json(change) for change in block.changes]
        invocation.put_json({"dry_run": dry_run, "changes": changes, "step": step})
        return 0
    put("".join(f"{printable(file.render())}\n" for file in files).encode())
    if dry_run:
        ErrorStream().say("nothing was changed")
    elif block.step is not None:
        ErrorStream().say(f"step {block.step.number}: `ringfence undo {_quoted(directory)}` reverses it")
    return 0


@history_command
@STEP
@DRY_RUN
@WITH_IGNORED
def restore(invocation: Invocation, directory: Path, step: StepName, dry_run: bool, with_ignored: bool) -> int:
    """Bring the files of DIR back to what they were after STEP, a number or a name; 0 is the beginning.

    What others have changed since goes as well: --dry-run shows it before. It can be undone.
    """
    with opened(directory, invocation, changes=True, dry_run=dry_run) as workspace:
        done = workspace.restore(step, dry_run=dry_run, with_ignored=with_ignored)
        since = itertools.takewhile(lambda entry: step != entry.number and step not in entry.names, workspace.log())
        if any(entry.is_replacement for entry in since):
            note = "since then another directory came in the place of the one before, with all that is somebody else's"
            done = replace(done, notes=(*done.notes, note))
    prints, code = not invocation.wants_json, _report(done, directory, invocation, dry_run)
    external = len(done.lost_external_changes)
    if external and done.step is not None and prints:
        count = plural(external, "change")
        ErrorStream().say(f"it took away {count} of somebody else's, which --dry-run would have shown before")
    return code


@history_command
@click.argument("name")
@click.option("--drop", is_flag=True, help="Take the name away again.")
def checkpoint(invocation: Invocation, directory: Path, name: str, drop: bool) -> int:
    """Give the files of DIR as they are a NAME, for `restore` and `diff`. `gc` keeps what has one."""
    with opened(directory, invocation, changes=True) as workspace:
        if drop:
            workspace.drop_checkpoint(name)
        named = None if drop else workspace.checkpoint(name)
    if invocation.wants_json:
        invocation.put_json({"checkpoint": serde.dump(named) if named is not None else None})
    elif named is not None:
        back = f"`ringfence restore {_quoted(directory)} {name}` goes back to it"
        ErrorStream().say(f"{named.description} is called {named.name}: {back}")
    return 0


@history_command
def recover(invocation: Invocation, directory: Path) -> int:
    """Roll back a call that a crash interrupted in DIR, if there is one. Every opening does so."""
    with opened(directory, invocation, changes=True) as workspace:
        recovered = workspace.recovered
    if invocation.wants_json:
        invocation.put_json({"recovered": serde.dump(recovered) if recovered is not None else None})
    elif recovered is None:
        ErrorStream().say("there was nothing to recover")
    return 0


@history_command
@click.option("--keep", type=click.IntRange(min=0), default=100, show_default=True, metavar="N", help="Steps to keep.")
def gc(invocation: Invocation, directory: Path, keep: int) -> int:
    """Drop from the history of DIR what its newest and its named steps do not need. The files stay as they are."""
    with opened(directory, invocation, changes=True) as workspace:
        freed = workspace.gc(keep)
        with suppress(OSError):  # the notes of runs without a step do no harm
            forget_tasks(directory, but={entry.session_id for entry in workspace.log()})
    if invocation.wants_json:
        invocation.put_json({"freed_bytes": freed})
    else:
        ErrorStream().say(f"{freed:,} bytes were given back")
    return 0


@contextmanager
def opened(
    directory: Path,
    invocation: Invocation,
    *,
    changes: bool,
    dry_run: bool = False,
    refuses_new_steps: bool = False,
    look_first: bool = True,
) -> Generator[Workspace]:
    """Open the workspace; one that is changed is locked, recovered and scanned.

    Without ``look_first`` it is not scanned, for a block that begins with that itself. A dry run does not recover: the
    changes of a killed call have to be rolled back first. ``refuses_new_steps``: the block is about the newest steps,
    as they were before this waited for a guard.

    Raises:
        click.ClickException: there is no such step, a call was killed and this is a dry run, or a new step is refused.
        click.Abort: it was interrupted.
        RingfenceError, OSError: it cannot be opened, or what the block does fails.
    """
    errors = ErrorStream()
    if (replaced := describe_replaced_root(directory)) is not None:
        errors.say(f"ringfence: {replaced}")
    if (lost := describe_lost_rule(directory)) is not None:
        errors.say(f"ringfence: {lost}")
    before: str | None = None
    try:
        with invocation.signals.let_through():
            with Workspace.open(directory, read_only=True) as workspace:
                if (killed := _describe_killed(workspace, directory)) and dry_run:
                    raise click.ClickException(killed)
                if not changes:
                    for warning in filter(None, (killed, workspace.damage)):
                        errors.say(f"ringfence: {warning}")
                    yield workspace
                    return
                newest = max((step.number for step in workspace.steps()), default=0) if refuses_new_steps else None
            with recording() as progress:
                workspace = Workspace.open(directory, progress=progress, look_first=look_first)
            with workspace:
                if newest is not None and (new := [step for step in workspace.steps() if step.number > newest]):
                    raise click.ClickException(_describe_new(new[-1]))
                if workspace.recovered is not None:
                    errors.say(describe_recovery(workspace.recovered, directory))
                before = workspace.newest
                yield workspace
    except KeyboardInterrupt:
        raise click.Abort(_interrupted(directory, before)) from None
    except LookupError as error:
        raise NotStartedError(str(error.args[0])) from None
    except ValueError as error:
        raise NotStartedError(str(error)) from None
    except StateDirectoryError as error:
        raise click.ClickException(describe_error(error)) from None


def _describe_killed(workspace: Workspace, directory: Path) -> str | None:
    call = workspace.unfinished
    if call is None or call.is_running:
        return None
    return (
        f"the tool call {call.call_id} ({call.tool}) was killed, and what it had done is still there: "
        f"`ringfence recover {_quoted(directory)}`, or whatever changes the workspace next, takes it back"
    )


@contextmanager
def opened_to_change(directory: Path, invocation: Invocation, *, dry_run: bool = False) -> Generator[Workspace]:
    """`opened` to be forked or promoted to, both of which look first, where the directory may have no history yet: then
    it begins with the files as they are, without the usual ones with secrets.

    Raises what `opened` does.
    """
    if find_workspace(directory) != Path(os.path.realpath(directory)):
        try:
            with invocation.signals.let_through(), recording() as progress:
                Workspace.open(directory, hide=HiddenFiles(), progress=progress).close()
        except KeyboardInterrupt:
            raise click.Abort("interrupted: nothing was changed") from None
    with opened(directory, invocation, changes=True, dry_run=dry_run, look_first=False) as workspace:
        yield workspace


def _interrupted(directory: Path, before: str | None) -> str:
    """Describe the effect of an interrupted command. ``before`` is the newest commit at its start, or None."""
    with suppress(RingfenceError, OSError, LookupError, ValueError), Workspace.open(directory, read_only=True) as now:
        (newest,) = now.log(1)
        if before not in (None, newest.commit) and newest.number is not None:
            back = f"`ringfence undo {_quoted(directory)}` reverses it"
            return f"interrupted after step {newest.number} ({newest.tool}) was committed: {back}"
    return f"interrupted; `ringfence log {_quoted(directory)}` has what is done"


def _report(done: Reversal, directory: Path, invocation: Invocation, dry_run: bool) -> int:
    """Print the outcome of an undo or a restore. Return the exit code."""
    if invocation.wants_json:
        paths = [
            {"path": escape_path(path), "outcome": outcome, "reason": done.reasons.get(path)}
            for path, outcome in _shown_outcomes(done).items()
        ]
        ignored = len(done.outcomes) - len(paths)
        step = _json(done.step) if done.step is not None else None
        notes = [escape_path(note) for note in done.notes]
        invocation.put_json({"dry_run": dry_run, "paths": paths, "ignored": ignored, "step": step, "notes": notes})
    else:
        put("".join(_outcomes(done)).encode())
        ignored = len(done.outcomes) - len(_shown_outcomes(done))
        errors = ErrorStream()
        counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(done.outcomes.values()).items())
        would = "nothing was changed; it would be " if dry_run else ""
        errors.say(f"{would}{counts}" if counts else "nothing differs")
        if ignored:
            errors.say(
                f"{plural(ignored, 'ignored path')} of them: --with-ignored shows {'it' if ignored == 1 else 'them'}"
            )
        for note in done.notes:
            errors.say(escape_path(note))
        if done.step is not None:
            errors.say(f"step {done.step.number}: `ringfence undo {_quoted(directory)}` reverses it")
    return 1 if "conflict" in done.outcomes.values() else 0


def _shown_outcomes(done: Reversal) -> Mapping[str, ReversalOutcome]:
    """Return the outcomes without those of ignored paths. A conflict is always shown."""
    return {path: what for path, what in done.outcomes.items() if what == "conflict" or path not in done.ignored}


def _outcomes(done: Reversal) -> Iterator[str]:
    """Yield a line for each path. Paths of git's own data with the same outcome share a line."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for path, outcome in _shown_outcomes(done).items():
        alike.setdefault((_git_place(path) or path, outcome, done.reasons.get(path, "")), []).append(path)
    for (place, outcome, reason), paths in alike.items():
        count = plural(len(paths), "path") if len(paths) > 1 else ""
        why = printable(escape_path(": ".join(part for part in (count, reason) if part)))
        yield f"{outcome:9} {printable(display_path(place if count else paths[0]))}{why and f'  ({why})'}\n"


def _git_place(path: str) -> str | None:
    """Return the `.git` directory that contains the path, or None."""
    names = path.split("/")
    found = next((depth for depth, name in enumerate(names, 1) if is_dotgit(os.fsencode(name))), None)
    return None if found is None else "/".join(names[:found])


def _log_cells(entry: LogEntry, tasks: Mapping[str, str]) -> tuple[str, str, str, str]:
    """Return number, time, tool and changes of an entry."""
    who = {"baseline": "as it was found", "external": entry.tool or "somebody else"}.get(entry.kind, entry.tool)
    who = f"{who}: {entry.title}" if entry.title and entry.tool else who
    who = f"{who} ({entry.client})" if entry.client else who
    number = "-" if entry.number is None else str(entry.number)
    at = entry.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    counted = entry.kind == "baseline" or not entry.paths
    paths = plural(len(entry.paths), "path") if counted else _some_paths(entry.paths)
    if entry.ignored:
        paths = ", ".join(filter(None, (paths if entry.paths else "", plural(entry.ignored, "ignored path"))))
    names = "".join(f"  [{name}]" for name in entry.names)
    task = tasks.get(entry.session_id)
    run = f"  (run: {one_line(task, MAX_TASK_CHARACTERS)})" if task is not None else ""
    dropped = "  (gc has dropped what came after it)" if entry.apart else ""
    return number, at, one_line(who, 64), f"{paths}{names}{run}{dropped}"


def _log_text(entries: Sequence[LogEntry], tasks: Mapping[str, str]) -> bytes:
    """Return the log: a line for each entry or, on a terminal, a table of its width."""
    if not sys.stdout.isatty():
        rows = (map(printable, _log_cells(entry, tasks)) for entry in entries)
        return "".join(f"{number:>4}  {at}  {who}  {what}\n" for number, at, who, what in rows).encode()
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    is_narrow = console.width < NARROW_COLUMNS
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)
    table.add_column("by", max_width=console.width // 4)
    table.add_column("changed", overflow="fold")
    session = None
    for entry in entries:
        # The task of a run stands beside its newest step.
        cells = _log_cells(entry, {} if entry.session_id == session else tasks)
        number, at, who, what = map(printable, cells)
        session = entry.session_id
        table.add_row(number, at[len("YYYY-") : -len(":SS")] if is_narrow else at, who, what)
    with console.capture() as captured:
        console.print(table)
    return captured.get().encode(sys.stdout.encoding, "backslashreplace")


def _some_paths(paths: tuple[str, ...]) -> str:
    """Return the first paths of a step. Paths of git's own data are counted."""
    places = Counter(place for path in paths if (place := _git_place(path)) is not None)
    folded = [place for place, count in places.items() if count > 1]
    named = [one_line(display_path(path), 120) for path in paths if _git_place(path) not in folded]
    more = f" and {len(named) - MAX_PATHS} more" if len(named) > MAX_PATHS else ""
    git = [f"{places[place]} paths in {one_line(escape_path(place), 120)}" for place in folded[:MAX_PATHS]]
    git += [f"{len(folded) - MAX_PATHS} more of git's own data"] if len(folded) > MAX_PATHS else []
    return ", ".join([part for part in (", ".join(named[:MAX_PATHS]) + more, *git) if part])


def _json(step: Step | LogEntry) -> dict[str, object]:
    return {**serde.dump(step), "paths": [escape_path(path) for path in step.paths]}


def _left_out(reasons: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"path": escape_path(path), "reason": reason} for path, reason in reasons.items()]


def _quoted(directory: Path) -> str:
    return shlex.quote(str(directory))
