"""The candidates of one attempt: forks of its copy of the workspace, a run in each, and the best of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ringfence.filesystem.hidden import HiddenFiles
from ringfence_batch.attempt_run import EndedRun, RunPlace, Watch, guarded, run_once, spec_of
from ringfence_batch.ledger import Attempt, CandidateResult, TaskResult
from ringfence_batch.task import BatchTask
from ringfence_sandbox import Fork
from ringfence_tools.runs.opened_workspace import on_disk
from ringfence_tools.runs.run_limits import divided
from ringfence_tools.runs.scoring import CANDIDATE_VARIABLE, model_of_candidate, ranked


@dataclass(slots=True)
class _Ended:
    number: int
    files: Path
    run: EndedRun

    @property
    def is_judged(self) -> bool:
        """Whether its outcome says something of the task."""
        return self.run.result.outcome != "infra-failed"


def run_candidates(attempt: Attempt, place: Path, seconds: float | None, watch: Watch) -> TaskResult:
    """Run the candidates of a task, one after the other. The result is that of the best one, and names all.

    Each gets its part of the limits. The files of the best one are in the directory of the attempt, those
    of each in a directory of its own below it.

    Raises what `run_once` raises before the first run has begun.
    """
    task, ended = attempt.task, list[_Ended]()
    tree, store = place / "tree", place / "store"
    for number, fork in enumerate(_forks(task, tree, store), 1):
        files = attempt.directory / f"candidate-{number}"
        files.mkdir()
        one = RunPlace(task, Path(fork.root), Path(fork.store), files, place.parent)
        ended.append(_Ended(number, files, _run(one, number, seconds, watch)))
    order = ranked(ended, lambda one: (one.run.score, one.run.lines))
    best = next((one for one in order if one.run.result.outcome == "done"), None)
    shown = best or next((one for one in order if one.is_judged), order[0])
    for file in shown.files.iterdir():
        shutil.copy2(file, attempt.directory / file.name)
    return _sum(shown, ended, is_best=best is not None)


def _forks(task: BatchTask, tree: Path, store: Path) -> Sequence[Fork]:
    with closing(on_disk(tree, hide=HiddenFiles(task.hide), store=store, quiet=True, detect="scan")) as opened:
        workspace = opened.history
        workspace.check_fork_room(task.candidates)
        forks = list[Fork]()
        for number in range(1, task.candidates + 1):
            with workspace.fork(f"candidate-{number}") as made:
                assert made.fork_record is not None, "it was forked"
                forks.append(made.fork_record)
    return forks


def _run(place: RunPlace, number: int, seconds: float | None, watch: Watch) -> EndedRun:
    task, ended = place.task, list[EndedRun]()
    spec = spec_of(task, place.tree, place.store, seconds)
    limits = divided(spec.limits, task.candidates, 1)
    model = model_of_candidate(task.model, number)
    spec = replace(spec, model=model, limits=limits, hide=None, seed=number)  # the fork has the rule of its source

    def work() -> TaskResult:
        with _numbered(number):
            ended.append(run_once(place, spec, watch))
        return ended[0].result

    result = guarded(task, work)
    return ended[0] if ended else EndedRun(result)


@contextmanager
def _numbered(number: int) -> Generator[None]:
    """Have a model of one's own find the number of the candidate in the environment."""
    before = os.environ.get(CANDIDATE_VARIABLE)
    os.environ[CANDIDATE_VARIABLE] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CANDIDATE_VARIABLE]
        else:
            os.environ[CANDIDATE_VARIABLE] = before


def _sum(shown: _Ended, ended: Sequence[_Ended], *, is_best: bool) -> TaskResult:
    """The result of the candidate that is shown, with what all of them took."""
    results = [one.run.result for one in ended]
    used = [result.tokens for result in results if result.tokens is not None]
    costs = [result.cost_usd for result in results if result.cost_usd is not None]
    return replace(
        shown.run.result,
        seconds=round(sum(result.seconds for result in results), 3),
        tokens=sum(used) if used else None,
        cost_usd=sum(costs) if costs else None,
        turns=sum(result.turns for result in results),
        candidate=shown.number if is_best else None,
        candidates=tuple(map(_result_of, ended)),
    )


def _result_of(one: _Ended) -> CandidateResult:
    score, result = one.run.score, one.run.result
    return CandidateResult(
        one.number,
        result.outcome,
        result.cause,
        None if score is None else score.describe(),
        None if score is None else score.number,
        one.run.lines,
        result.seconds,
        result.tokens,
        result.cost_usd,
        result.turns,
        one.files.name,
    )
