"""One run of the agent of an attempt: on a copy of the workspace, or on a candidate; checked, scored and reported."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click

from ringfence.errors import RingfenceError, SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.receipts import Receipt
from ringfence_batch.ledger import Outcome as TaskOutcome
from ringfence_batch.ledger import TaskResult
from ringfence_batch.sources import SourceError, describe_left_out, local_source
from ringfence_batch.task import BatchTask
from ringfence_tools.planning import Plan
from ringfence_tools.printable import how_to_apply, line_counts, one_line
from ringfence_tools.runs.agent_run import MASKED, RunOutcome, RunWatcher, run_agent
from ringfence_tools.runs.open_run import open_run
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.report import CheckEnded, Judgement, ReportFile, RunDescription, render_page
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.run_workspace import NO_HIDE, DiskWorkspace, RunWorkspace
from ringfence_tools.runs.scoring import Score, score_of

CHECK_SECONDS = 600.0
"""The longest time of one check, unless the task's limit for commands says otherwise."""
STARTS = 2
"""How many containers are started at once on one machine: Podman makes about ten a second."""
PATCH = "patch.diff"
HEADINGS: Mapping[TaskOutcome, str] = {
    "done": "The task is done",
    "checks-failed": "A check failed",
    "task-failed": "The task failed",
    "infra-failed": "The infrastructure failed",
}
logger = logging.getLogger(__name__)
_OUTCOMES: Mapping[str, TaskOutcome] = {
    "done": "done",
    "failed": "task-failed",
    "limit_reached": "task-failed",
    "provider_failed": "infra-failed",
    "no_sandbox": "infra-failed",
}


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where one run works and writes. ``files`` gets its patch, page, receipts and logs."""

    task: BatchTask
    tree: Path
    store: Path
    files: Path
    scratch: Path
    """The directory of this machine that workers of a batch share."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """How a run ended, its score, and how many lines it changed."""

    result: TaskResult
    score: Score | None = None
    lines: int = 0


Watch = Callable[[float | None], AbstractContextManager[None]]
"""What is around a run that may take so many seconds."""


def guarded(task: BatchTask, work: Callable[[], TaskResult]) -> TaskResult:
    """Return the result, or that of an infrastructure that failed."""
    try:
        return work()
    except (SourceError, SandboxUnavailableError) as error:
        return result_of(task, "infra-failed", str(error))
    except click.ClickException as error:
        return result_of(task, "infra-failed", error.message)
    except (OSError, RingfenceError, ValueError) as error:  # no model was asked: a SPEC is wrong, say
        return result_of(task, "infra-failed", describe_error(error))
    except Exception as error:
        logger.exception("an attempt at %s failed", task.id)
        return result_of(task, "infra-failed", describe_error(error))


def run_once(place: RunPlace, spec: RunSpec, watch: Watch) -> EndedRun:
    """Run the agent, the checks and the score, and write the files of the run.

    Raises:
        KeyboardInterrupt: it was interrupted.
        Exception: see `guarded`.
    """
    task = place.task
    with ExitStack() as stack:
        run = stack.enter_context(
            open_run(spec, logger.info, quiet=True, while_starting=_start_of_container(place.scratch))
        )
        workspace = run.workspace
        _drop_options(workspace)
        workspace.left_out = (*workspace.left_out, *describe_left_out(task, place.tree))
        receipts = Receipts(place.files / "receipts.jsonl")
        report = stack.enter_context(closing(ReportFile(place.files / "report.html", None)))
        began = monotonic()
        with watch(spec.limits.seconds):
            outcome = run_agent(run.task(task.task), watchers=[receipts, report])
        if outcome.outcome == "interrupted":
            raise KeyboardInterrupt
        (place.files / PATCH).write_bytes(workspace.secrets.mask(outcome.patch))
        kind: TaskOutcome = _OUTCOMES.get(outcome.outcome, "task-failed")
        cause, checks, score = one_line(outcome.error or "", 1000), list[CheckEnded](), None
        if kind == "done":
            cause, checks = _check(place, workspace)
            if not cause and task.score is not None:
                score = _score(place, workspace, task.score, checks)
                cause = "" if score.passed else one_line(f"{checks[-1].command}: {score.describe()}", 1000)
            kind = "checks-failed" if cause else "done"
        judgement = Judgement(kind, HEADINGS[kind], cause, checks)
        report.write(_page(place, outcome, workspace, report, judgement))
        result = result_of(task, kind, cause, monotonic() - began, outcome)
        return EndedRun(result, score, sum(line_counts(outcome.patch)))


def _page(
    place: RunPlace, outcome: RunOutcome, workspace: RunWorkspace, report: ReportFile, judgement: Judgement
) -> bytes:
    task, now = place.task, datetime.now(UTC)
    steps = [*_next_steps(place, outcome)]
    model = task.model.partition("@")[0]  # a URL may have a password in it
    about = RunDescription(task.task, model, "", task.workspace, report.started_at, now, steps, judgement)
    return render_page(about, outcome, workspace, report.record(outcome.stats))


def _next_steps(place: RunPlace, outcome: RunOutcome) -> Iterator[str]:
    """What a reader can do with the changes. No command but `git apply` touches the source."""
    task = place.task
    if outcome.changes or outcome.ignored:
        yield f"the agent worked on a copy, which was removed: {escape_path(task.workspace)} itself was only read"
    if outcome.is_masked:
        yield MASKED
    if outcome.patch:
        source = local_source(task)
        if source is not None and source.is_dir():
            command = how_to_apply(place.files / PATCH, source)
            yield f"`{command}` applies the changes there"
        else:
            yield f"{PATCH} beside this page has the changes, for `git apply` in files of your own"


def spec_of(task: BatchTask, tree: Path, store: Path, seconds: float | None) -> RunSpec:
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
        tree,
        task.model,
        limits,
        HiddenFiles(task.hide),
        allow_git=task.allow_git,
        store=store,
        project=local_source(task),
        detect="scan",  # a machine has watches for few of so many trees
    )


def _drop_options(workspace: RunWorkspace) -> None:
    """Take an option that no task has out of the reasons why a path is left out."""
    workspace.left_out = [replace(one, reason=one.reason.removesuffix(NO_HIDE)) for one in workspace.left_out]
    workspace.refused = {path: reason.removesuffix(NO_HIDE) for path, reason in workspace.refused.items()}


def _check(place: RunPlace, workspace: RunWorkspace) -> tuple[str, list[CheckEnded]]:
    """Run the checks in the container until one fails. Return why it failed, or nothing, and how each ended."""
    task, found = place.task, list[CheckEnded]()
    if not task.checks:
        return "", found
    assert isinstance(workspace, DiskWorkspace)
    assert workspace.sandbox is not None
    for number, command in enumerate(task.checks, 1):
        ended = workspace.sandbox.run(command, timeout_seconds=task.limits.command_seconds or CHECK_SECONDS)
        said = workspace.secrets.mask(f"$ {command}\n{ended.stdout}{ended.stderr}[{ended.exit_code}]\n")
        log = f"check-{number}.log"
        (place.files / log).write_text(said, errors="replace")
        how = workspace.secrets.mask(ended.failure or f"exit code {ended.exit_code}")
        found.append(CheckEnded(workspace.secrets.mask(command), how, log))
        if ended.failure or ended.exit_code:
            return one_line(f"{found[-1].command}: {how}", 1000), found
    return "", found


def _score(place: RunPlace, workspace: RunWorkspace, command: str, checks: list[CheckEnded]) -> Score:
    """Score the work in the container. What the command changes is rolled back."""
    assert isinstance(workspace, DiskWorkspace), "the kind is podman"
    score = score_of(workspace, command, place.task.limits.command_seconds)
    shown = workspace.secrets.mask(command)
    text = f"$ {shown}\n{score.last_line}\n[{score.exit_code}]\n"
    (place.files / "score.log").write_text(text, errors="replace")
    checks.append(CheckEnded(shown, f"score: {score.describe()}", "score.log"))
    return score


def result_of(
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
