"""``ringfence run --candidates``: a task done several times, each in a fork, scored, and the best promoted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import click

from ringfence.errors import RingfenceError
from ringfence.failures import describe_error
from ringfence.secrets import Secrets
from ringfence_cli.candidate_processes import Candidate, CandidateProcesses
from ringfence_cli.candidate_worker import CandidateRequest
from ringfence_cli.candidates_view import candidates_shown, table_lines
from ringfence_cli.forks import fork_json, promotion_json, say_promotion
from ringfence_cli.history import opened_to_change
from ringfence_cli.options import CandidateOptions, Invocation, place_of
from ringfence_cli.page_process import check_view, page_of_workspace
from ringfence_cli.run_command import RunCommand, read_task
from ringfence_sandbox import Fork, Promotion, Workspace
from ringfence_tools.runs.command_errors import INTERRUPTED, NotStartedError
from ringfence_tools.runs.model_specs import model_of
from ringfence_tools.runs.open_run import resolve_rules
from ringfence_tools.runs.opened_workspace import on_disk
from ringfence_tools.runs.outputs import ErrorStream, put
from ringfence_tools.runs.owner_policies import owner_file
from ringfence_tools.runs.run_limits import divided
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.scoring import Score, model_of_candidate, ranked, runs_source


def run_candidates(options: RunCommand, wanted: CandidateOptions, invocation: Invocation) -> int:
    """Return the exit code: 0 if there is a best candidate, and if it was to be promoted, it is.

    Raises:
        click.ClickException, SpecError: nothing was begun.
        click.Abort: it was interrupted before a candidate ran. The forks that were made stay.
    """
    _refuse_others(options, wanted)
    check_view(is_wanted=options.view, can_write=options.write)
    with ExitStack() as pages:
        return _run_candidates(options, wanted, invocation, pages)


def _run_candidates(options: RunCommand, wanted: CandidateOptions, invocation: Invocation, pages: ExitStack) -> int:
    errors = ErrorStream()
    masks = Secrets(place_of(None, options.container).secret_values())
    task = masks.mask(read_task(options.task or ""))
    spec, jobs = options.spec(is_resumed=False), min(wanted.jobs or os.cpu_count() or 1, wanted.count)
    forks = _make_forks(spec, options, wanted, invocation, errors)
    if options.view:
        pages.enter_context(page_of_workspace(errors, invocation.signals, options.directory, can_write=options.write))
    requests = [_request(spec, wanted, jobs, task, number) for number in range(1, wanted.count + 1)]
    candidates = [Candidate(number, fork, requests[number - 1]) for number, fork in enumerate(forks, 1)]
    with candidates_shown(None if options.quiet else errors) as show:
        is_whole = CandidateProcesses(candidates, jobs, show).run(invocation.signals)
    order = ranked(candidates, lambda one: (one.score if one.outcome == "done" else None, sum(one.counts)))
    best = next((one for one in order if one.is_eligible), None)
    done: Promotion | None = None
    problem = ""
    if is_whole and best is not None and wanted.promotes:
        try:
            with opened_to_change(options.directory, invocation) as workspace:
                done = workspace.promote(best.fork.name)
        except (RingfenceError, click.ClickException, OSError) as error:  # what the candidates did is told in any case
            problem = error.format_message() if isinstance(error, click.ClickException) else describe_error(error)
    ending = _Ending(options, wanted, order, best, done, is_whole=is_whole, problem=problem)
    return ending.report(invocation, errors)


def _refuse_others(options: RunCommand, wanted: CandidateOptions) -> None:
    if options.task is None:
        raise click.UsageError("give --task: what each candidate is to do")
    others = (
        ("--resume", options.resume),
        ("--apply", options.apply is not None),
        ("--patch", options.patch is not None),
        ("--receipts", options.receipts is not None),
        ("--report", options.report is not None),
        ("--ask", bool(options.asks)),
        ("--fail-if-unchanged", options.fail_if_unchanged),
    )
    if refused := [option for option, is_given in others if is_given]:
        raise click.UsageError(f"{' and '.join(refused)}: not with --candidates, of which each is a run in its fork")
    if options.workspace == "memory":
        raise click.UsageError("--candidates is for --workspace disk or podman: a candidate is a fork, on disk")
    if wanted.share and options.workspace != "podman":
        raise click.UsageError("--share needs --workspace podman: only a container has a directory of DIR to be read")


def _make_forks(
    spec: RunSpec, options: RunCommand, wanted: CandidateOptions, invocation: Invocation, errors: ErrorStream
) -> Sequence[Fork]:
    """Make the forks. Those that are made stay where a later one cannot be made."""
    policies, hide = resolve_rules(spec, errors.say, quiet=options.quiet)
    del policies  # each candidate has its own
    with ExitStack() as stack:
        for number in range(1, wanted.count + 1):
            model_of(model_of_candidate(spec.model, number), spec.directory, stack)
    forks: list[Fork] = []
    try:
        with (
            invocation.signals.let_through(),
            closing(on_disk(spec.directory, hide=hide, quiet=options.quiet, detect=spec.detect)) as opened,
        ):
            workspace = opened.history
            workspace.check_fork_room(wanted.count, share=wanted.share)
            for name in _free_names(workspace, wanted.count):
                with workspace.fork(name, share=wanted.share) as made:
                    fork = made.fork_record
                assert fork is not None, "it was forked"
                forks.append(fork)
                if len(forks) == 1 and (reason := _cannot_score(fork, spec, wanted)):
                    workspace.discard_fork(name)
                    raise click.UsageError(reason)
    except KeyboardInterrupt:
        names = f"; these forks stay: {', '.join(fork.name for fork in forks)}" if forks else ""
        raise click.Abort(f"interrupted: nothing was changed{names}") from None
    except (OSError, ValueError) as error:
        raise NotStartedError(f"the candidates cannot be made: {describe_error(error)}") from None
    return forks


def _free_names(workspace: Workspace, count: int) -> Iterator[str]:
    taken = {fork.name for fork in workspace.forks()}
    number = 0
    while count:
        number += 1
        if (name := f"candidate-{number}") not in taken:
            count -= 1
            yield name


def _cannot_score(fork: Fork, spec: RunSpec, wanted: CandidateOptions) -> str:
    """Say why a score on this machine would not be that of the candidate. Empty: it would be."""
    if wanted.score is None or wanted.scores_anyway or spec.place.workspace == "podman":
        return ""
    if not (found := runs_source(fork.points_back)):
        return ""
    return (
        f"--score would run the code of {fork.source}, not that of a candidate: {found[0]} names it. With --workspace "
        "podman all are at the same place. --score-anyway is for a command that runs the code of its directory"
    )


def _request(spec: RunSpec, wanted: CandidateOptions, jobs: int, task: str, number: int) -> CandidateRequest:
    model = model_of_candidate(spec.model, number)
    limits = divided(spec.limits, wanted.count, jobs)
    file = owner_file(spec.directory)
    if os.path.lexists(file):  # a fork has no such file
        limits = replace(limits, policies=(os.path.abspath(file), *limits.policies))
    return CandidateRequest(
        task, model, limits, wanted.score, number, spec.with_ignored, spec.allow_git, str(spec.detect)
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    """What a person or a program is told when all candidates have ended. ``order`` has the best first."""

    options: RunCommand
    wanted: CandidateOptions
    order: Sequence[Candidate]
    best: Candidate | None
    promotion: Promotion | None
    is_whole: bool
    problem: str = ""
    """Why the best one could not be promoted, in words."""

    @property
    def exit_code(self) -> int:
        if not self.is_whole:
            return INTERRUPTED
        if self.problem:
            return NotStartedError.exit_code
        if self.promotion is not None and self.promotion.conflicts:
            return 1
        if self.wanted.score is None:
            return 0 if any(one.outcome == "done" for one in self.order) else 1
        return 0 if self.best is not None else 1

    def report(self, invocation: Invocation, errors: ErrorStream) -> int:
        if invocation.wants_json:
            invocation.put_json(self._json())
            return self.exit_code
        put("".join(f"{line}\n" for line in table_lines(self.order)).encode(errors="backslashreplace"))
        if self.promotion is not None and self.best is not None:
            errors.say(f"{self.best.fork.name} is promoted:" if self.exit_code == 0 else "not promoted:")
            say_promotion(self.promotion, self.options.directory)
        if self.problem:
            errors.say(f"not promoted: {self.problem}")
        if not self.options.quiet:
            for line in self._next_steps():
                errors.say(line)
        return self.exit_code

    def _next_steps(self) -> Iterator[str]:
        here = shlex.quote(str(self.options.directory))
        if not self.is_whole:
            yield f"interrupted: {self.options.directory} is as it was, and the forks stay"
        elif self.wanted.score is not None and self.best is None:
            yield f"no candidate passed: {self.options.directory} is as it was"
        if self.promotion is None:
            name = "NAME" if self.best is None or not self.is_whole else self.best.fork.name
            yield f"`ringfence promote {here} {name}` makes its changes here, too"
        if len(self.order) > 1:
            yield f"`ringfence forks {here} --diff A B` compares two of them"
        yield f"`ringfence discard {here} NAME` deletes one; until then each stays"

    def _json(self) -> dict[str, object]:
        return {
            "exit_code": self.exit_code,
            **({"error": self.problem} if self.problem else {}),
            "candidates": [_json_of(one) for one in self.order],
            "best": None if self.best is None else self.best.fork.name,
            "promotion": None if self.promotion is None else promotion_json(self.promotion),
        }


def _json_of(one: Candidate) -> dict[str, object]:
    return {
        "name": one.fork.name,
        "number": one.number,
        "outcome": one.outcome,
        "passed": one.is_eligible,
        "score": None if one.score is None else _score_json(one.score),
        "fork": fork_json(replace(one.fork, score=one.describe() if one.run else "")),
        "run": dict(one.run),
    }


def _score_json(score: Score) -> dict[str, object]:
    return {
        "exit_code": score.exit_code,
        "number": score.number,
        "last_line": score.last_line,
        "failure": score.failure,
    }
