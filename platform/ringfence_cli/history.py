"""What the commands for the history of a disk workspace do."""

from __future__ import annotations

import base64
import itertools
import os
import shlex
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ringfence import serde
from ringfence.errors import RingfenceError, WorkspaceLockedError
from ringfence.failures import describe_error
from ringfence.filesystem.paths import display_path, escape_path, is_dotgit
from ringfence.runtime.receipts import change_json
from ringfence_cli.beside_patch import beside_patch
from ringfence_cli.not_started import BusyError, NotStartedError
from ringfence_cli.noted_tasks import forget_tasks, noted_tasks
from ringfence_cli.outputs import OutputFile, json_line, refuse_way_out
from ringfence_cli.printable import how_to_look, one_line, plural, printable, why
from ringfence_cli.recording import Recording
from ringfence_cli.signals import Signals
from ringfence_cli.terminal import ErrorStream, put, put_diff
from ringfence_sandbox import Workspace
from ringfence_sandbox.moved_roots import moved_from
from ringfence_sandbox.steps.history_plan import DROPPED
from ringfence_sandbox.store.commit_messages import REPLACED

if TYPE_CHECKING:
    from ringfence.participants import Step
    from ringfence_sandbox.calls.recovery import Recovered
    from ringfence_sandbox.workspace import LogEntry, Reversal, StepName

GITS_OWN = "git's own data, for which git takes no patch"
MAX_PATHS = 5
"""That a line of the log names."""
MAX_TASK_CHARACTERS = 40
"""Of a run's task, there."""


@contextmanager
def opened(directory: Path, signals: Signals, *, changes: bool, dry_run: bool = False) -> Generator[Workspace]:
    """The workspace; only one that ``changes`` is locked, recovered and looked through. A dry run does not recover:
    what a call left that was killed has to be taken back first.

    Raises:
        click.ClickException: what went wrong, in words.
    """
    if (moved := moved_from(str(directory))) is not None:
        ErrorStream().say(f"ringfence: {printable(moved)}")
    before: str | None = None
    try:
        with signals.let_through():
            with Workspace.open(directory, read_only=True) as looking:
                if looking.waiting is not None:
                    call_id, tool = looking.waiting
                    recover = f"`ringfence recover {_quoted(directory)}`"
                    back = f"{recover}, or whatever changes the workspace next, takes it back"
                    said = f"the tool call {call_id} ({tool}) was killed, and what it had done is still there: {back}"
                    if dry_run:
                        raise click.ClickException(said)
                    if not changes:
                        ErrorStream().say(f"ringfence: {printable(said)}")
                if not changes and looking.damage is not None:
                    ErrorStream().say(f"ringfence: {printable(looking.damage)}")
                if not changes:
                    yield looking
                    return
            with Recording() as recording:
                workspace = Workspace.open(directory, progress=recording)
            with workspace:
                if workspace.recovered is not None:
                    ErrorStream().say(recovery(workspace.recovered, directory))
                before = workspace.newest
                yield workspace
    except KeyboardInterrupt:
        said = _interrupted(directory, before)
        ErrorStream().say(f"ringfence: {printable(said)}")
        raise click.Abort(said) from None
    except LookupError as error:
        raise NotStartedError(str(error.args[0]) if error.args else describe_error(error)) from None
    except ValueError as error:
        raise NotStartedError(str(error)) from None
    except WorkspaceLockedError as error:
        raise BusyError(str(error)) from None
    except (RingfenceError, OSError) as error:
        raise click.ClickException(describe_error(error)) from None


def _interrupted(directory: Path, before: str | None) -> str:
    """What became of a command that was interrupted when `before` was the newest commit, or before that was known."""
    with suppress(RingfenceError, OSError, LookupError, ValueError), Workspace.open(directory, read_only=True) as now:
        (newest,) = now.log(1)
        if before not in (None, newest.commit) and newest.number is not None:
            back = f"`ringfence undo {_quoted(directory)}` takes it back"
            return f"interrupted after step {newest.number} ({newest.tool}) was committed: {back}"
    return "interrupted; `ringfence log` has what is done"


def recovery(recovered: Recovered, directory: Path) -> str:
    """What opening did about a crash, for a person."""
    call = f"the tool call {recovered.call_id} ({recovered.tool})" if recovered.call_id else "a change"
    said = {
        "rolled back": f"recovered: {call} was interrupted by a crash, and is rolled back",
        "finished": f"recovered: {call} was committed before a crash, and is whole"
        if recovered.tool
        else "found at the opening:",
        "set aside": f"{call} of another directory that was here before is set aside",
    }[recovered.outcome]
    more = [
        f"{display_path(path)} was changed meanwhile, not by the call, and stays as it is"
        for path in recovered.conflicts
    ]
    return how_to_look("\n  ".join([said, *more, *recovered.notes]), directory)


def log(directory: Path, signals: Signals, as_json: bool, aborted: bool, limit: int | None) -> int:
    with opened(directory, signals, changes=False) as workspace:
        entries = workspace.aborted()[:limit] if aborted else workspace.log(limit)
    tasks = noted_tasks(directory)
    if as_json:
        put(json_line({"log": [_entry(entry, tasks) for entry in entries]}))
    else:
        put("".join(f"{printable(_line(entry, tasks))}\n" for entry in entries).encode())
    return 0


def show(directory: Path, signals: Signals, as_json: bool, step: StepName, aborted: bool) -> int:
    with opened(directory, signals, changes=False) as workspace:
        found = workspace.aborted_step(step) if aborted and isinstance(step, int) else workspace.show(step)
    task = noted_tasks(directory).get(found.step.session_id)
    if as_json:
        changes = [change_json(change) for change in found.changes]
        told = {**_step(found.step), "task": task}
        left_out = _left_out(found.left_out)
        put(json_line({"step": told, "changes": changes, "left_out": left_out, **text_or_bytes("patch", found.patch)}))
    else:
        title = _title(found.step)
        if aborted:
            title = title.replace("step", "taken back", 1)
        run = f"run: {one_line(task, 200)}\n" if task is not None else ""
        left_out = "".join(
            f"not in the history: {printable(one_line(f'{escape_path(path)} ({reason})', 200))}\n"
            for path, reason in found.left_out.items()
        )
        beside = "".join(f"not in the patch: {printable(line)}\n" for line in beside_patch(found.changes))
        put(f"{printable(one_line(title, 200))}\n{run}{left_out}{beside}\n".encode())
        put_diff(found.patch)
    return 0


def diff(directory: Path, signals: Signals, as_json: bool, a: StepName | None, b: StepName | None) -> int:
    return export(directory, signals, as_json, a, b, "diff", None)


def export(
    directory: Path,
    signals: Signals,
    as_json: bool,
    a: StepName | None,
    b: StepName | None,
    fmt: Literal["diff", "mbox"],
    output: Path | None,
) -> int:
    with opened(directory, signals, changes=False) as workspace:
        exported = workspace.export(fmt, a=a, b=b)
    if output is not None:
        try:
            refuse_way_out(output, directory)
            with signals.let_through():  # a pipe waits for its reader
                file = OutputFile(output)
            with closing(file):
                file.replace(exported.text)
        except KeyboardInterrupt:
            ErrorStream().say("ringfence: interrupted: nothing was written")
            raise click.Abort from None
        except InterruptedError:
            ErrorStream().say("ringfence: interrupted: not all of it was written")
            raise click.Abort from None
        except OSError as error:
            raise click.UsageError(f"{str(output)!r} cannot be written: {why(error)}") from None
    if as_json:
        left_out = _left_out({**dict.fromkeys(exported.left_out, GITS_OWN), **exported.unknown})
        put(json_line({"format": fmt, **text_or_bytes("patch", exported.text), "left_out": left_out}))
    elif output is None:
        put_diff(exported.text)
    for line in beside_patch(exported.changes):
        ErrorStream().say(printable(f"not in the patch: {line}"))
    if exported.left_out:
        count = plural(len(exported.left_out), "path")
        ErrorStream().say(f"left out: {count} of {GITS_OWN}")
    for path, reason in list(exported.unknown.items())[:MAX_PATHS]:
        ErrorStream().say(
            printable(f"left out: {escape_path(path)}, which the history does not know on one side ({reason})")
        )
    if len(exported.unknown) > MAX_PATHS:
        ErrorStream().say(f"left out: {len(exported.unknown) - MAX_PATHS} more of these; --json lists all")
    return 0


def _left_out(reasons: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"path": escape_path(path), "reason": reason} for path, reason in reasons.items()]


def undo(directory: Path, signals: Signals, as_json: bool, n: int | None, step: StepName | None, dry_run: bool) -> int:
    with opened(directory, signals, changes=True, dry_run=dry_run) as workspace:
        done = workspace.undo(n, step=step, dry_run=dry_run)
    code = _reversed(done, directory, as_json, dry_run)
    if code and not as_json:
        back = f"`ringfence restore {_quoted(directory)} STEP` goes back to a step whatever changed since"
        ErrorStream().say(f"what is in conflict stays as it is: edit it, or {back} (--dry-run shows what)")
    return code or int(bool(done.outcomes) and not done.has_changed)


def restore(directory: Path, signals: Signals, as_json: bool, step: StepName, dry_run: bool) -> int:
    with opened(directory, signals, changes=True, dry_run=dry_run) as workspace:
        done = workspace.restore(step, dry_run=dry_run)
        since = itertools.takewhile(lambda entry: step != entry.number and step not in entry.names, workspace.log())
        if any(entry.kind == "external" and entry.tool == REPLACED for entry in since):
            note = "since then another directory came in the place of the one before, with all that is somebody else's"
            done = replace(done, notes=(*done.notes, note))
    code = _reversed(done, directory, as_json, dry_run)
    # Of what `gc` has dropped nobody knows whose it was.
    known = (path for path, reason in done.reasons.items() if reason != DROPPED)
    others = sum(done.outcomes[path] in ("restored", "removed") for path in known)
    if others and done.step is not None and not as_json:
        count = plural(others, "change")
        ErrorStream().say(f"it took away {count} of somebody else's, which --dry-run would have shown before")
    return code


def _reversed(done: Reversal, directory: Path, as_json: bool, dry_run: bool) -> int:
    if as_json:
        paths = [
            {"path": escape_path(path), "outcome": outcome, "reason": done.reasons.get(path)}
            for path, outcome in done.outcomes.items()
        ]
        step = _step(done.step) if done.step is not None else None
        put(
            json_line(
                {"dry_run": dry_run, "paths": paths, "step": step, "notes": [escape_path(note) for note in done.notes]}
            )
        )
    else:
        put("".join(_outcomes(done)).encode())
        errors = ErrorStream()
        counts = Counter(done.outcomes.values())
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        errors.say((f"nothing was changed; it would be {said}" if dry_run else said) if said else "nothing differs")
        for note in done.notes:
            errors.say(printable(escape_path(note)))
        if done.step is not None:
            errors.say(f"step {done.step.number}: `ringfence undo {_quoted(directory)}` takes it back")
    return 1 if "conflict" in done.outcomes.values() else 0


def _outcomes(done: Reversal) -> Iterator[str]:
    """A line a path, but one for all of git's own data that fares alike: git changes much of it at once."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for path, outcome in done.outcomes.items():
        alike.setdefault((_git_place(path) or path, outcome, done.reasons.get(path, "")), []).append(path)
    for (place, outcome, reason), paths in alike.items():
        count = plural(len(paths), "path") if len(paths) > 1 else ""
        said = printable(escape_path(": ".join(part for part in (count, reason) if part)))
        yield f"{outcome:9} {printable(display_path(place if count else paths[0]))}{said and f'  ({said})'}\n"


def _git_place(path: str) -> str | None:
    """The `.git` that a path is, or is in."""
    names = path.split("/")
    found = next((depth for depth, name in enumerate(names, 1) if is_dotgit(os.fsencode(name))), None)
    return None if found is None else "/".join(names[:found])


def checkpoint(directory: Path, signals: Signals, as_json: bool, name: str, drop: bool) -> int:
    with opened(directory, signals, changes=True) as workspace:
        if drop:
            workspace.drop_checkpoint(name)
        named = None if drop else workspace.checkpoint(name)
    if as_json:
        put(json_line({"checkpoint": serde.dump(named) if named is not None else None}))
    elif named is not None:
        back = f"`ringfence restore {_quoted(directory)} {name}` goes back to it"
        ErrorStream().say(f"{named.said} is called {named.name}: {back}")
    return 0


def recover(directory: Path, signals: Signals, as_json: bool) -> int:
    with opened(directory, signals, changes=True) as workspace:
        recovered = workspace.recovered
    if as_json:
        put(json_line({"recovered": serde.dump(recovered) if recovered is not None else None}))
    elif recovered is None:
        ErrorStream().say("there was nothing to recover")
    return 0


def gc(directory: Path, signals: Signals, as_json: bool, keep: int) -> int:
    with opened(directory, signals, changes=True) as workspace:
        freed = workspace.gc(keep)
        with suppress(OSError):  # what is noted of runs that have no step any more does no harm
            forget_tasks(directory, but={entry.session_id for entry in workspace.log()})
    if as_json:
        put(json_line({"freed_bytes": freed}))
    else:
        ErrorStream().say(f"{freed:,} bytes were given back")
    return 0


def _quoted(directory: Path) -> str:
    return shlex.quote(str(directory))


def text_or_bytes(name: str, data: bytes) -> dict[str, object]:
    """Bytes for JSON: as text, or, since files need not be UTF-8, in base64."""
    try:
        return {name: data.decode(), f"{name}_base64": None}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(data).decode()}


def _line(entry: LogEntry, tasks: Mapping[str, str]) -> str:
    who = {"baseline": "as it was found", "external": entry.tool or "somebody else"}.get(entry.kind, entry.tool)
    number = "-" if entry.number is None else str(entry.number)
    at = entry.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    counted = entry.kind == "baseline" or not entry.paths
    paths = plural(len(entry.paths), "path") if counted else _paths(entry.paths)
    names = "".join(f"  [{name}]" for name in entry.names)
    task = tasks.get(entry.session_id)
    run = f"  (run: {one_line(task, MAX_TASK_CHARACTERS)})" if task is not None else ""
    apart = "  (gc has dropped what came after it)" if entry.apart else ""
    return f"{number:>4}  {at}  {one_line(who, 64)}  {paths}{names}{run}{apart}"


def _paths(paths: tuple[str, ...]) -> str:
    """Some of them, those of git's own data counted."""
    places = Counter(place for path in paths if (place := _git_place(path)) is not None)
    folded = [place for place, count in places.items() if count > 1]
    named = [one_line(display_path(path), 120) for path in paths if _git_place(path) not in folded]
    more = f" and {len(named) - MAX_PATHS} more" if len(named) > MAX_PATHS else ""
    git = [f"{places[place]} paths in {one_line(escape_path(place), 120)}" for place in folded[:MAX_PATHS]]
    git += [f"{len(folded) - MAX_PATHS} more of git's own data"] if len(folded) > MAX_PATHS else []
    return ", ".join([part for part in (", ".join(named[:MAX_PATHS]) + more, *git) if part])


def _title(step: Step) -> str:
    session = f", session {step.session_id}" if step.session_id else ""
    who = f"{step.tool}, call {step.call_id}{session}" if step.number else "the workspace as found"
    return f"step {step.number}: {who}, {step.created_at.isoformat(timespec='seconds')}"


def _step(step: Step) -> Mapping[str, object]:
    return {**serde.dump(step), "paths": _shown(step.paths)}


def _entry(entry: LogEntry, tasks: Mapping[str, str]) -> Mapping[str, object]:
    return {**serde.dump(entry), "paths": _shown(entry.paths), "task": tasks.get(entry.session_id)}


def _shown(paths: Iterable[str]) -> list[str]:
    return [escape_path(path) for path in paths]
