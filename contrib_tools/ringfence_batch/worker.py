"""A worker of a batch: it copies a workspace, runs the agent, checks the result, and publishes it in the ledger."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

import click

from ringfence.errors import RingfenceError, SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.receipts import Receipt
from ringfence_batch.engine import AttemptRequest
from ringfence_batch.ledger import Attempt, Ledger, TaskResult
from ringfence_batch.ledger import Outcome as TaskOutcome
from ringfence_batch.sources import SourceError, copy_source, describe_left_out, local_source, unpack_source
from ringfence_batch.task import BatchTask
from ringfence_tools.planning import Plan
from ringfence_tools.printable import how_to_apply, one_line
from ringfence_tools.runs.agent_run import MASKED, RunOutcome, RunWatcher, run_agent
from ringfence_tools.runs.open_run import open_run
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.report import CheckEnded, Judgement, ReportFile, RunDescription, render_page
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.run_workspace import NO_HIDE, DiskWorkspace, RunWorkspace

CHECK_SECONDS = 600.0
"""The longest time of one check, unless the task's limit for commands says otherwise."""
PATIENCE_SECONDS = 15.0
"""How long a worker that is ended may take to take down its container, before it is killed."""
STARTS = 2
"""How many containers are started at once on one machine: Podman makes about ten a second."""
PATCH = "patch.diff"
HEADINGS: Mapping[TaskOutcome, str] = {
    "done": "The task is done",
    "checks-failed": "A check failed",
    "task-failed": "The task failed",
    "infra-failed": "The infrastructure failed",
}
_LOCK = "lock"
logger = logging.getLogger(__name__)
_OUTCOMES: Mapping[str, TaskOutcome] = {
    "done": "done",
    "failed": "task-failed",
    "limit_reached": "task-failed",
    "provider_failed": "infra-failed",
    "no_sandbox": "infra-failed",
}


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How an attempt ended. ``is_published`` is False for one that is to be tried again."""

    result: TaskResult
    is_published: bool


def work(ledger: Ledger, request: AttemptRequest, scratch: Path) -> AttemptOutcome | None:
    """Make one attempt at a task, in a directory below `scratch`. None if the task has a result already.

    An interrupt, or the death of the process, leaves an attempt without a result. A run that has not ended
    after its deadline and the time of grace ends this process, with the result that says so.

    Raises:
        OSError: the ledger cannot be written.
    """
    attempt = ledger.claim(request.id)
    if attempt is None:
        return None
    with _workplace(scratch, attempt) as place:
        result = _attempt(attempt, place, request)
    result = replace(result, attempt=attempt.number, worker=f"{socket.gethostname()}:{os.getpid()}")
    if result.outcome == "infra-failed" and not request.is_last:
        attempt.keep(result)
        return AttemptOutcome(result, False)
    attempt.publish(result)
    return AttemptOutcome(result, True)


def _attempt(attempt: Attempt, place: Path, request: AttemptRequest) -> TaskResult:
    task = attempt.task
    try:
        if request.source is not None:
            unpack_source(Path(request.source), place / "tree")
        else:
            copy_source(task, place / "tree")
        with ExitStack() as stack:
            return _run(attempt, place, request, stack)
    except (SourceError, SandboxUnavailableError) as error:
        return _result(task, "infra-failed", str(error))
    except click.ClickException as error:
        return _result(task, "infra-failed", error.message)
    except (OSError, RingfenceError, ValueError) as error:  # no model was asked: a SPEC is wrong, say
        return _result(task, "infra-failed", describe_error(error))
    except Exception as error:
        logger.exception("an attempt at %s failed", task.id)
        return _result(task, "infra-failed", describe_error(error))


def _run(attempt: Attempt, place: Path, request: AttemptRequest, stack: ExitStack) -> TaskResult:
    task = attempt.task
    seconds = min(filter(None, (task.limits.seconds, request.deadline)), default=None)
    spec = _spec(task, place, seconds)
    run = stack.enter_context(open_run(spec, logger.info, quiet=True, while_starting=_start_of_container(place.parent)))
    workspace = run.workspace
    _drop_options(workspace)
    workspace.left_out = (*workspace.left_out, *describe_left_out(task, place / "tree"))
    receipts = Receipts(attempt.directory / "receipts.jsonl")
    report = stack.enter_context(closing(ReportFile(attempt.directory / "report.html", None)))
    began = monotonic()
    with ExitStack() as deadline:
        if seconds is not None:
            deadline.enter_context(_ended_after(seconds + request.grace_seconds, attempt))
        outcome = run_agent(run.task(task.task), watchers=[receipts, report])
    if outcome.outcome == "interrupted":
        raise KeyboardInterrupt
    (attempt.directory / PATCH).write_bytes(workspace.secrets.mask(outcome.patch))
    kind: TaskOutcome = _OUTCOMES.get(outcome.outcome, "task-failed")
    cause, checks = one_line(outcome.error or "", 1000), list[CheckEnded]()
    if kind == "done":
        cause, checks = _check(task, workspace, attempt)
        kind = "checks-failed" if cause else "done"
    judgement = Judgement(kind, HEADINGS[kind], cause, checks)
    report.write(_page(attempt, outcome, workspace, report, judgement))
    return _result(task, kind, cause, monotonic() - began, outcome)


def _page(
    attempt: Attempt, outcome: RunOutcome, workspace: RunWorkspace, report: ReportFile, judgement: Judgement
) -> bytes:
    task, now = attempt.task, datetime.now(UTC)
    steps = [*_next_steps(attempt, outcome)]
    model = task.model.partition("@")[0]  # a URL may have a password in it
    about = RunDescription(task.task, model, "", task.workspace, report.started_at, now, steps, judgement)
    return render_page(about, outcome, workspace, report.record(outcome.stats))


def _next_steps(attempt: Attempt, outcome: RunOutcome) -> Iterator[str]:
    """What a reader can do with the changes. No command but `git apply` touches the source."""
    task = attempt.task
    if outcome.changes or outcome.ignored:
        yield f"the agent worked on a copy, which was removed: {escape_path(task.workspace)} itself was only read"
    if outcome.is_masked:
        yield MASKED
    if outcome.patch:
        source = local_source(task)
        if source is not None and source.is_dir():
            command = how_to_apply(attempt.directory / PATCH, source)
            yield f"`{command}` applies the changes there"
        else:
            yield f"{PATCH} beside this page has the changes, for `git apply` in files of your own"


def _spec(task: BatchTask, place: Path, seconds: float | None) -> RunSpec:
    """Return the spec of a run on the copy of the task's workspace. Its history is beside it."""
    given = task.limits
    container = Place(
        task.kind,
        task.image,
        task.network,
        memory_bytes=given.memory_bytes,
        cpus=given.cpus,
        command_seconds=given.command_seconds,
        secrets=task.secrets,
    )
    limits = RunLimits(
        task.policies,
        seconds,
        given.tokens,
        given.turns,
        container,
        task.sections,
        repeats=given.repeats,
        cost_usd=given.cost_usd,
    )
    return RunSpec(
        place / "tree",
        task.model,
        limits,
        HiddenFiles(task.hide),
        allow_git=task.allow_git,
        store=place / "store",
        project=local_source(task),
        detect="scan",  # a machine has watches for few of so many trees
    )


def _drop_options(workspace: RunWorkspace) -> None:
    """Take an option that no task has out of the reasons why a path is left out."""
    workspace.left_out = [replace(one, reason=one.reason.removesuffix(NO_HIDE)) for one in workspace.left_out]
    workspace.refused = {path: reason.removesuffix(NO_HIDE) for path, reason in workspace.refused.items()}


def _check(task: BatchTask, workspace: RunWorkspace, attempt: Attempt) -> tuple[str, list[CheckEnded]]:
    """Run the checks in the container until one fails. Return why it failed, or nothing, and how each ended."""
    found = list[CheckEnded]()
    if not task.checks:
        return "", found
    assert isinstance(workspace, DiskWorkspace)
    assert workspace.sandbox is not None
    for number, command in enumerate(task.checks, 1):
        ended = workspace.sandbox.run(command, timeout_seconds=task.limits.command_seconds or CHECK_SECONDS)
        said = workspace.secrets.mask(f"$ {command}\n{ended.stdout}{ended.stderr}[{ended.exit_code}]\n")
        log = f"check-{number}.log"
        (attempt.directory / log).write_text(said, errors="replace")
        how = workspace.secrets.mask(ended.failure or f"exit code {ended.exit_code}")
        found.append(CheckEnded(workspace.secrets.mask(command), how, log))
        if ended.failure or ended.exit_code:
            return one_line(f"{found[-1].command}: {how}", 1000), found
    return "", found


def _result(
    task: BatchTask, outcome: TaskOutcome, cause: str = "", seconds: float = 0.0, run: RunOutcome | None = None
) -> TaskResult:
    details: dict[str, Any] = {}
    if run is not None:
        details = {name: value for name, value in run.to_json().items() if name != "patch"}
    return TaskResult(
        task.id,
        outcome,
        cause,
        seconds=round(seconds, 3),
        tokens=run.usage.total_tokens if run is not None else None,
        cost_usd=run.usage.cost_usd if run is not None else None,
        turns=run.stats.turns if run is not None else 0,
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
        details=details,
    )


class Receipts(RunWatcher):
    """Appends a line of JSON for every tool call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(receipt.to_json()) + "\n")


@contextmanager
def _ended_after(seconds: float, attempt: Attempt) -> Generator[None]:
    """End this process, with all that it has started, if the block has not ended after this time."""

    def end() -> None:
        cause = f"it was ended after {seconds:.0f} s: it did not end at its deadline"
        with suppress(OSError):
            attempt.publish(replace(_result(attempt.task, "task-failed", cause, seconds), attempt=attempt.number))
        os.killpg(0, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _workplace(scratch: Path, attempt: Attempt) -> Generator[Path]:
    """A directory for the copy of the workspace, locked as long as this process lives, and removed at the end."""
    name = f"{attempt.task.id}-{attempt.number}-{os.getpid()}"
    place, hidden = scratch / name, scratch / f".{name}"
    hidden.mkdir(mode=0o700)
    # A file: a lock of the directory itself would keep the workspace below it from being opened.
    lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(place)  # once it is locked, so that no `reap` takes it for that of a dead worker
        yield place
    finally:
        try:
            shutil.rmtree(place, onerror=_make_writable)
        finally:
            os.close(lock)


def _make_writable(function: Any, path: str, _error: object) -> None:
    """Remove what is in a directory that nobody may write, such as Go's cache of modules."""
    os.chmod(os.path.dirname(path), 0o700)
    with suppress(OSError):
        os.chmod(path, 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def reap(scratch: Path) -> int:
    """Remove the directories of workers that are dead. Return how many there were."""
    removed = 0
    try:
        entries = list(os.scandir(scratch))
    except FileNotFoundError:  # another engine of this machine has just removed it
        return 0
    for entry in entries:
        with suppress(OSError):
            if entry.name.startswith("."):  # just being made
                continue
            lock = os.open(f"{entry.path}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, onerror=_make_writable)
                removed += 1
            finally:
                os.close(lock)
    return removed


@contextmanager
def _start_of_container(scratch: Path) -> Generator[None]:
    """Wait until fewer than `STARTS` containers are being started on this machine."""
    with ExitStack() as stack:
        slots = [stack.enter_context((scratch / f".start-{number}").open("wb")) for number in range(STARTS)]
        while True:
            for slot in slots:
                with suppress(BlockingIOError):
                    fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            sleep(0.05)


def main(out: str, scratch: str) -> None:
    """Take tasks from standard input, a line of JSON each, and answer each on standard output.

    Where standard input ends, the driver has died: what runs is interrupted, since another driver begins it anew.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what users' tools print is no answer
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver is asked first, and ends its workers
    requests = SimpleQueue[str]()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    ledger, place = Ledger(Path(out)), Path(scratch)
    while True:
        request = AttemptRequest(**json.loads(requests.get()))
        ended = work(ledger, request, place)
        answer = {"id": request.id, "published": ended is None or ended.is_published}
        if ended is not None:
            answer |= {"outcome": ended.result.outcome, "cause": ended.result.cause}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _read(requests: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os.kill(os.getpid(), signal.SIGTERM)
    sleep(PATIENCE_SECONDS)
    os.killpg(0, signal.SIGKILL)  # another driver may have begun the task anew


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt
