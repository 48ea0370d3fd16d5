"""The process of one candidate: ``python -m ringfence_cli.candidate_worker DIR SOURCE``.

It runs the agent in the fork DIR of SOURCE, and then the score. A line of JSON on standard input asks for it, and lines
of JSON on standard output tell how far it is. Where standard input ends, the process that asked has died, and the run
is interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ringfence import serde
from ringfence.errors import PromptValidationError, RingfenceError, SandboxUnavailableError
from ringfence.failures import describe_error
from ringfence.receipts import Receipt
from ringfence_cli.resume import RunRecord
from ringfence_cli.run import run_watched
from ringfence_tools.planning import Plan
from ringfence_tools.runs.agent_run import RunOutcome, RunWatcher
from ringfence_tools.runs.command_errors import BusyError
from ringfence_tools.runs.open_run import open_run
from ringfence_tools.runs.outputs import ErrorStream
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.run_workspace import DiskWorkspace
from ringfence_tools.runs.scoring import Score, score_of
from ringfence_tools.runs.signals import Signals
from ringfence_tools.runs.span_export import telemetry_of

Tell = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class CandidateRequest:
    """What the process of a candidate is asked for."""

    task: str
    model: str
    limits: RunLimits
    score: str | None
    seed: int
    with_ignored: bool = False
    allow_git: bool = False
    detect: str = "auto"

    def spec(self, directory: Path, source: Path) -> RunSpec:
        """Return the spec of the run in a fork. A container has the image that was built for its source."""
        return RunSpec(
            directory,
            self.model,
            self.limits,
            None,  # the fork has the rule of its source
            self.with_ignored,
            self.allow_git,
            project=source,
            detect=self.detect,  # pyright: ignore[reportArgumentType]  # it went through JSON
            seed=self.seed,
        )


class _Teller(RunWatcher):
    """Tells of each turn and each call."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._calls = 0

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        self._calls += 1
        self._tell({"state": "works", "calls": self._calls})


def work(request: CandidateRequest, spec: RunSpec, signals: Signals, tell: Tell) -> tuple[RunOutcome, Score | None]:
    """Run a candidate and score it. A run that is not done has no score.

    Raises:
        KeyboardInterrupt: it was interrupted before the run began.
        click.ClickException, SpecError, RingfenceError, OSError: the run cannot begin, or the score cannot run.
    """
    with ExitStack() as stack:
        errors = ErrorStream()
        with signals.let_through():
            run = stack.enter_context(open_run(spec, errors.say, quiet=True))
            workspace = run.workspace
            assert isinstance(workspace, DiskWorkspace), "a candidate is on disk"
            record = stack.enter_context(closing(RunRecord(workspace, request.task, None, run.limits)))
            task = replace(run.task(request.task), telemetry=telemetry_of(errors, stack))
        outcome = run_watched(task, signals, [_Teller(tell)], None, record)
        score = None
        if outcome.outcome == "done":
            record.finish()
            if request.score is not None:
                tell({"state": "is scored", "calls": record.stats.calls})
                try:
                    with signals.let_through():
                        score = score_of(workspace, request.score, run.limits.place.command_seconds)
                except KeyboardInterrupt:  # what it has changed is told all the same
                    outcome.outcome, outcome.error = "interrupted", "interrupted while it was scored"
        workspace.history.keep_score(describe(outcome, score))
        outcome.applied = bool(outcome.changes or outcome.ignored)
        return outcome, score


def describe(outcome: RunOutcome, score: Score | None) -> str:
    """Return in words how a candidate came out: its score, or why it has none."""
    return score.describe() if score is not None else outcome.outcome.replace("_", " ")


def main(directory: str, source: str) -> None:
    """Answer one request, and end."""
    with os.fdopen(os.dup(1), "w") as answers, Signals() as signals:
        os.dup2(2, 1)  # what a tool of the user prints is no answer

        def tell(record: Mapping[str, object]) -> None:
            answers.write(json.dumps(record) + "\n")
            answers.flush()

        request = serde.parse(CandidateRequest, json.loads(sys.stdin.readline()))
        threading.Thread(target=_end_with_driver, daemon=True).start()
        tell(_answer(request, request.spec(Path(directory), Path(source)), signals, tell))


def _answer(request: CandidateRequest, spec: RunSpec, signals: Signals, tell: Tell) -> Mapping[str, Any]:
    score = None
    try:
        outcome, score = work(request, spec, signals, tell)
    except KeyboardInterrupt:
        outcome = RunOutcome("interrupted", "interrupted before its run began")
    except BusyError as error:
        outcome = RunOutcome("busy", error.format_message())
    except (click.ClickException, PromptValidationError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        outcome = RunOutcome("not_started", message)
    except SandboxUnavailableError as error:
        outcome = RunOutcome("no_sandbox", str(error))
    except (RingfenceError, OSError, ValueError) as error:
        outcome = RunOutcome("failed", describe_error(error))
    return {"run": outcome.to_json(), "score": None if score is None else serde.dump(score)}


def _end_with_driver() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
