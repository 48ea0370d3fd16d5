"""``ringfence batch``: many tasks from files, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from ringfence_cli.options import AS_JSON, VIEW, Interruptible, Invocation, seconds, usd
from ringfence_tools.runs.command_errors import INTERRUPTED, NotStartedError
from ringfence_tools.runs.signals import ALIKE

if TYPE_CHECKING:
    from ringfence_batch import Batch, BatchTask, Ledger
    from ringfence_batch.engine import Engine
    from ringfence_batch.summary import Summary
    from ringfence_tools.runs.outputs import ErrorStream

CommandT = TypeVar("CommandT", bound=Callable[..., object])
MakeEngine: TypeAlias = "Callable[[Path, int | None], Engine]"
"""Makes an engine for a ledger. The number is how many attempts run at once; None: as the engine will."""
MAX_LISTED = 20
OUT = click.argument("out", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="OUT")
IDS = click.argument("ids", nargs=-1, metavar="[ID]...")
_RUNNING = (
    click.option(
        "--jobs", type=click.IntRange(min=1), metavar="N", help="Run N tasks at once.  [default: one a processor]"
    ),
    click.option(
        "--engine",
        default="local",
        show_default=True,
        metavar="NAME",
        help="Run them in processes of this machine (local), on the Ray cluster that RAY_ADDRESS names (ray), or with "
        "an engine of your own: the NAME of an installed plug-in.",
    ),
    click.option(
        "--retries",
        type=click.IntRange(min=0),
        default=2,
        show_default=True,
        metavar="N",
        help="Try a task again after a failure of the infrastructure.",
    ),
    click.option(
        "--task-deadline",
        callback=seconds,
        metavar="TIME",
        help="The most that a task may take from when its workspace is ready, whatever its own limit: 90s, 15m, 2h.",
    ),
    click.option(
        "--max-cost",
        callback=usd,
        metavar="USD",
        help="Begin no more tasks when those with a result have cost more: 5, 0.50.",
    ),
    VIEW,
    click.option("--quiet", is_flag=True, help="Say nothing on standard error but errors."),
    click.option("--json", "as_json", is_flag=True, expose_value=False, help="Print what OUT/summary.json has."),
)


def _running(command: CommandT) -> CommandT:
    for option in reversed(_RUNNING):
        command = option(command)
    return command


@click.group(cls=Interruptible)
def batch() -> None:
    """Many tasks, each on a copy of its workspace: run them, and see how far they are."""


@batch.command()
@click.argument("tasks", type=click.Path(exists=True, path_type=Path), metavar="TASKS")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="OUT",
    help="The directory of the results. One that has some of these tasks goes on.",
)
@_running
@click.pass_obj
def run(invocation: Invocation, tasks: Path, out: Path, **given: Any) -> int:
    """Run the tasks of a file, or of all files in a directory, that have no result in OUT yet.

    TASKS is JSON Lines (*.jsonl), or a task each in *.toml and *.json. OUT/index.html is for people. Exit codes: 0 all
    done, 1 some task or check failed, 2 nothing was begun (usage, wrong tasks, an OUT of others) or a file of OUT is
    damaged, 3 a model's provider failed, 4 other infrastructure failed, 130 interrupted: the rest can be resumed.
    """

    def begin() -> Batch:
        from ringfence_batch import Batch, check_tasks, read_tasks

        found = read_tasks(tasks)
        if given["engine"] == "local":  # other machines have files and variables of their own
            check_tasks(found)
            if not given["quiet"]:
                _advise(found)
        return Batch(found, out=out, retries=given["retries"])

    return _drive(invocation, begin, out, given)


@batch.command()
@OUT
@_running
@click.pass_obj
def resume(invocation: Invocation, out: Path, **given: Any) -> int:
    """Run the tasks of OUT that have no result. Those with a result do not run again.

    Exit codes are those of `ringfence batch run`.
    """

    def begin() -> Batch:
        from ringfence_batch import Batch

        return Batch.open(out, retries=given["retries"])

    return _drive(invocation, begin, out, given)


@batch.command()
@OUT
@AS_JSON
@click.pass_obj
def status(invocation: Invocation, out: Path) -> int:
    """Tell how far the batch in OUT is. It may run meanwhile, or not.

    Exit codes: 0, or 2 if OUT is no batch, or a file of it is damaged.
    """
    from ringfence_batch.summary import DAMAGED, summarize

    ledger = _open(out)
    summary, is_running = summarize(ledger), ledger.is_driven()
    exit_code = DAMAGED if summary.damaged else 0
    if invocation.wants_json:
        invocation.put_json(summary.to_json() | {"is_running": is_running})
        return exit_code
    from ringfence_tools.printable import printable
    from ringfence_tools.runs.outputs import put

    lines = [*_lines(summary), "it runs" if is_running else "nothing runs it"]
    if summary.without_result and not is_running:
        lines[-1] += f": {_resuming(out)} goes on"
    put("".join(f"{printable(line)}\n" for line in lines).encode())
    return exit_code


@batch.command()
@OUT
@IDS
@click.option(
    "--outcome",
    "outcomes",
    type=click.Choice(["done", "checks-failed", "task-failed", "infra-failed", "cancelled"]),
    multiple=True,
    help="Those with this outcome; may be given several times.",
)
@AS_JSON
@click.pass_obj
def requeue(invocation: Invocation, out: Path, ids: tuple[str, ...], outcomes: tuple[str, ...]) -> int:
    """Have tasks with a result run again, when the batch is resumed. Their earlier results are kept in OUT.

    Without ID, all tasks with the --outcome.
    """
    if not ids and not outcomes:
        raise click.UsageError("name tasks, or give --outcome for all with that one")
    ledger = _open(out)

    def act(task_id: str) -> bool:
        if outcomes and ((result := ledger.result(task_id)) is None or result.outcome not in outcomes):
            return False
        return ledger.requeue(task_id)

    return _act(invocation, "requeued", _known(ledger, ids), act, f": {_resuming(out)} runs them")


@batch.command()
@OUT
@IDS
@AS_JSON
@click.pass_obj
def cancel(invocation: Invocation, out: Path, ids: tuple[str, ...]) -> int:
    """Give tasks that have no result that of a cancelled one. What runs of them is ended.

    Without ID, all tasks that have no result.
    """
    ledger = _open(out)
    known = _known(ledger, ids)
    return _act(invocation, "cancelled", known, lambda task_id: ledger.cancel(task_id, "by `ringfence batch cancel`"))


def _advise(tasks: Sequence[BatchTask]) -> None:
    """Tell a person what of tasks that can be used may still be wrong."""
    from ringfence_batch.check import describe_stale_images, describe_unused_patterns
    from ringfence_tools.runs.outputs import MAX_LISTED, ErrorStream

    errors = ErrorStream()
    for lines in (describe_unused_patterns(tasks), describe_stale_images(tasks)):
        for line in lines[:MAX_LISTED]:
            errors.say(line)


def _resuming(out: Path, engine: str = "local") -> str:
    chosen = "" if engine == "local" else f" --engine {shlex.quote(engine)}"
    return f"`ringfence batch resume {shlex.quote(str(out))}{chosen}`"


def _act(invocation: Invocation, what: str, ids: Sequence[str], act: Callable[[str], bool], then: str = "") -> int:
    """Do something with each task, and tell of it. Name the damaged files, and go on. Return the exit code."""
    from ringfence_batch.ledger import DamagedFileError
    from ringfence_batch.summary import DAMAGED
    from ringfence_tools.printable import plural, printable
    from ringfence_tools.runs.outputs import ErrorStream

    chosen, damaged = list[str](), list[str]()
    for task_id in ids:
        try:
            if act(task_id):
                chosen.append(task_id)
        except DamagedFileError as error:
            damaged.append(str(error))
    if invocation.wants_json:
        invocation.put_json({what: chosen, "damaged": damaged})
    errors = ErrorStream()
    for line in damaged:
        errors.say(f"ringfence: {printable(line)}")
    errors.say(f"{what} {plural(len(chosen), 'task')}{then if chosen else ''}")
    return DAMAGED if damaged else 0


def _open(out: Path) -> Ledger:
    from ringfence_batch import Ledger, LedgerError

    try:
        return Ledger(out)
    except LedgerError as error:
        raise NotStartedError(str(error)) from None


def _known(ledger: Ledger, ids: Sequence[str]) -> Sequence[str]:
    """Return the ids, or those of all tasks. Raises NotStartedError for ids of no task, and names all of them."""
    known = ledger.ids()
    if unknown := sorted({*ids} - {*known}):
        raise NotStartedError(f"{ledger.out} has no task {', '.join(unknown)}: nothing was done")
    return list(dict.fromkeys(ids)) or known


def _drive(invocation: Invocation, begin: Callable[[], Batch], out: Path, given: dict[str, Any]) -> int:
    """Run a batch until its tasks have results, and tell of them. Return the exit code."""
    from ringfence_cli.page_process import check_view

    check_view(is_wanted=given["view"], can_write=False)
    with ExitStack() as pages:
        return _drive_with(invocation, begin, out, given, pages)


def _drive_with(
    invocation: Invocation, begin: Callable[[], Batch], out: Path, given: dict[str, Any], pages: ExitStack
) -> int:
    from ringfence_batch import LedgerError, TaskFileError
    from ringfence_batch.summary import summarize
    from ringfence_cli.batch_view import shown
    from ringfence_cli.page_process import PageProcess
    from ringfence_tools.runs.outputs import ErrorStream

    errors = ErrorStream()
    try:
        make_engine, is_interrupted, stopped = _engine_class(given["engine"]), False, ""
        try:
            opened = begin()
        except OSError as error:
            raise NotStartedError(f"{out} cannot be written: {error}") from None
        if given["view"]:
            pages.enter_context(PageProcess(errors, invocation.signals, {"batch": os.path.abspath(out)}))
        with ExitStack() as stack:
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ALIKE)}
            engine = stack.enter_context(closing(make_engine(out, given["jobs"]))) if make_engine is not None else None
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray puts its own there
            show = stack.enter_context(shown(None if given["quiet"] else errors))
            try:
                progress = opened.run(
                    engine=engine,
                    jobs=given["jobs"],
                    task_deadline=given["task_deadline"],
                    max_cost_usd=given["max_cost"],
                    show=show,
                )
                stopped = progress.stopped
            except KeyboardInterrupt:
                is_interrupted = True
    except (LedgerError, TaskFileError, ConnectionError) as error:
        raise NotStartedError(str(error)) from None
    summary = opened.summary or summarize(opened.ledger)
    return _tell(invocation, errors, summary, out, given, stopped, is_interrupted=is_interrupted)


def _tell(
    invocation: Invocation,
    errors: ErrorStream,
    summary: Summary,
    out: Path,
    given: dict[str, Any],
    stopped: str,
    *,
    is_interrupted: bool,
) -> int:
    """Tell how a batch came out. Return the exit code."""
    if invocation.wants_json:
        invocation.put_json(summary.to_json())
    for line in summary.damaged if given["quiet"] else _lines(summary):
        errors.say(line)
    resuming = _resuming(out, given["engine"])
    if is_interrupted:
        errors.say(f"ringfence: interrupted: {resuming} goes on")
        return INTERRUPTED
    if summary.without_result:  # queued again meanwhile, or not begun
        errors.say(
            f"ringfence: {stopped}: {resuming} with a higher --max-cost runs the rest"
            if stopped
            else f"ringfence: {resuming} runs those without a result"
        )
    elif not given["quiet"]:
        errors.say(f"see {out / 'index.html'}")
    return summary.exit_code


def _engine_class(name: str) -> MakeEngine | None:
    """Return the engine that is not the usual one. Raises click.UsageError if there is none, or it cannot be loaded."""
    if name == "local":
        return None
    from ringfence_tools.runs.plug_ins import plug_ins

    found = plug_ins("ringfence.engines")
    if name != "ray" and name not in found:
        names = ", ".join(("local", "ray", *sorted(found)))
        raise click.BadParameter(f"there is no engine {name!r}; there are {names}", param_hint="'--engine'")
    module, _, attribute = found.get(name, "ringfence_batch.ray:RayEngine").partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise click.UsageError(str(error)) from None
    except (Exception, SystemExit) as error:
        from ringfence.failures import describe_error

        message = f"the plug-in {name} ({module}:{attribute}) cannot be loaded: {describe_error(error)}"
        raise click.BadParameter(message, param_hint="'--engine'") from error


def _lines(summary: Summary) -> Iterator[str]:
    from ringfence.limits import dollars
    from ringfence_tools.printable import plural

    cost = f", {dollars(summary.cost_usd)}" if summary.cost_usd is not None else ""
    yield f"{plural(len(summary.rows), 'task')} in {summary.out}{cost}"
    for outcome, count in summary.counts:
        yield f"{count:>9,}  {outcome}"
    if summary.causes:
        yield "why:"
    for outcome, cause, count in summary.causes[:MAX_LISTED]:
        ids = [row.id for row in summary.rows if (row.outcome, row.kind) == (outcome, cause)]
        yield f"{count:>9,}  {outcome}: {cause} ({', '.join(ids[:3])}{', …' if count > 3 else ''})"
    if len(summary.causes) > MAX_LISTED:
        yield f"           {plural(len(summary.causes) - MAX_LISTED, 'more cause')}: --json lists all"
