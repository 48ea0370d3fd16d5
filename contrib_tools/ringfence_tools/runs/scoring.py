"""The score of a candidate: a command that runs where its agent worked, and how candidates rank by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypeVar

from ringfence_tools.printable import one_line
from ringfence_tools.runs.run_workspace import DiskWorkspace

SCORE_SECONDS = 600.0
"""The longest time that a score may take, unless the place has a limit for commands."""
MAX_LINE_CHARACTERS = 200
TAG = "score"
PLACEHOLDER = "{candidate}"
"""In the SPEC of a model: the number of the candidate."""
CANDIDATE_VARIABLE = "RINGFENCE_CANDIDATE"
"""The variable of the environment that has the number of the candidate, for a model of one's own."""
CandidateT = TypeVar("CandidateT")


@dataclass(frozen=True, slots=True)
class Score:
    """How the command ended. ``number`` is on the last line of its output, if that is a number and nothing else."""

    exit_code: int
    number: float | None = None
    last_line: str = ""
    failure: str = ""
    """Why the command was not let come to its end. Empty otherwise."""

    @property
    def passed(self) -> bool:
        return self.exit_code == 0 and not self.failure

    def describe(self) -> str:
        """Return the score in words: the number, "passed", or why it failed."""
        if self.failure:
            return one_line(self.failure, MAX_LINE_CHARACTERS)
        number = "" if self.number is None else f"{self.number:g}"
        if self.passed:
            return number or "passed"
        return f"exit code {self.exit_code}" + (f", {number}" if number else "")


def score_of(workspace: DiskWorkspace, command: str, seconds: float | None = None) -> Score:
    """Run a command of the shell in the container of a workspace, or where it has none on this machine.

    What the command changes is rolled back.

    Raises ParticipantBusyError, OSError and RestoreFailedError as `Workspace.run` does.
    """
    limit = seconds or SCORE_SECONDS
    if workspace.sandbox is not None:
        ended = workspace.sandbox.run(command, timeout_seconds=limit, dry_run=True, tag=TAG)
    else:
        words = ["/bin/sh", "-c", command]
        ended = workspace.history.run(words, timeout_seconds=limit, dry_run=True, tag=TAG)
    lines = [line.strip() for line in ended.stdout.splitlines() if line.strip()]
    last = workspace.secrets.mask(lines[-1]) if lines else ""
    failure = workspace.secrets.mask(ended.failure or ended.not_started)
    return Score(ended.exit_code, number_of(last), one_line(last, MAX_LINE_CHARACTERS), failure)


def model_of_candidate(spec: str, number: int) -> str:
    """Return the SPEC of a model for the candidate of a number."""
    return spec.replace(PLACEHOLDER, str(number))


def number_of(line: str) -> float | None:
    """Return the number that a line is. None: it is none, or no finite one."""
    try:
        number = float(line)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def ranked(
    candidates: Iterable[CandidateT], score: Callable[[CandidateT], tuple[Score | None, int]]
) -> Sequence[CandidateT]:
    """Return candidates, the best first. ``score`` returns the score of one, and how many lines it changed.

    Those whose command exited with 0 come before those where it failed, and these before those without a score. Among
    these a higher number comes first, and no number counts as 0; of equals the smaller change comes first.
    """

    def key(candidate: CandidateT) -> tuple[int, float, int]:
        found, lines = score(candidate)
        if found is None:
            return 2, 0.0, lines
        return int(not found.passed), -(found.number or 0.0), lines

    return sorted(candidates, key=key)


def runs_source(points_back: Iterable[str]) -> Sequence[str]:
    """Return the files of a fork by which an environment of Python in it runs the code of the source."""
    return [path for path in points_back if path.endswith(".pth") or PurePath(path).name == "direct_url.json"]
