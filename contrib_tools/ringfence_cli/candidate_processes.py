"""The processes of candidates, a number of them at once, and what each has told."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, Literal, TypeAlias

from ringfence import serde
from ringfence_cli.candidate_worker import CandidateRequest
from ringfence_sandbox import Fork
from ringfence_tools.printable import line_counts, one_line
from ringfence_tools.runs.scoring import CANDIDATE_VARIABLE, Score
from ringfence_tools.runs.signals import Signals

POLL_SECONDS = 0.25
PATIENCE_SECONDS = 15.0
"""How long a candidate that is ended may take to roll back and to take down its container, before it is killed."""
CandidateState: TypeAlias = Literal["waits", "works", "is scored", "ended"]


@dataclass(slots=True)
class Candidate:
    """One fork, what its run has told so far, and how it ended."""

    number: int
    fork: Fork
    request: CandidateRequest
    state: CandidateState = "waits"
    calls: int = 0
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The JSON object of its run. Empty before its end."""
    score: Score | None = None
    began: float = 0.0

    @property
    def outcome(self) -> str:
        return self.run.get("outcome", "interrupted")

    @property
    def counts(self) -> tuple[int, int]:
        """How many lines its patch adds and removes."""
        patch, encoded = self.run.get("patch"), self.run.get("patch_base64")
        return line_counts(base64.b64decode(encoded) if encoded else (patch or "").encode())

    @property
    def is_eligible(self) -> bool:
        """Whether it may be the best: its run was done, and its command exited with 0."""
        return self.outcome == "done" and self.score is not None and self.score.passed

    def describe(self) -> str:
        """Return its state, or how it came out, in words."""
        if self.state != "ended":
            return self.state
        return self.score.describe() if self.score is not None else self.outcome.replace("_", " ")


class _CandidateProcess:
    """The process of a candidate that runs. A thread puts each line that it tells into a queue, and None at its end."""

    def __init__(self, candidate: Candidate, told: SimpleQueue[tuple[_CandidateProcess, bytes]]) -> None:
        self.candidate = candidate
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        fork = candidate.fork
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ringfence_cli.candidate_worker", fork.root, fork.source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, CANDIDATE_VARIABLE: str(candidate.number)},
            start_new_session=True,  # so that all of its processes can be ended, and Ctrl-C is for the driver
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        with suppress(BrokenPipeError):  # it has just died
            self._stdin.write(json.dumps(serde.dump(candidate.request)).encode() + b"\n")
            self._stdin.flush()
        Thread(target=self._read, args=(told,), daemon=True).start()

    def _read(self, told: SimpleQueue[tuple[_CandidateProcess, bytes]]) -> None:
        with self._stdout:
            for line in self._stdout:
                told.put((self, line))
        told.put((self, b""))

    def last_words(self) -> str:
        """Return the last line on its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((one_line(line, 200) for line in reversed(lines) if line.strip()), "")

    def end(self, patience_seconds: float) -> None:
        """End it with all that it has started, after it had some time to do so itself."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._errors.close()


class CandidateProcesses:
    """Runs candidates in processes of this machine, at most ``jobs`` at once."""

    def __init__(self, candidates: Sequence[Candidate], jobs: int, show: Callable[[Sequence[Candidate]], None]) -> None:
        """``show`` is called when a candidate has told something, and several times a second."""
        self._candidates, self._jobs, self._show = candidates, jobs, show
        self._waiting = deque(candidates)
        self._running: list[_CandidateProcess] = []
        self._told = SimpleQueue[tuple[_CandidateProcess, bytes]]()

    def run(self, signals: Signals) -> bool:
        """Run until each has ended. False after an interrupt, which ends those that run: each rolls back its running
        call, and its fork stays."""
        try:
            while (self._waiting or self._running) and not signals.arrived:
                while self._waiting and len(self._running) < self._jobs:
                    self._start(self._waiting.popleft())
                self._poll(POLL_SECONDS)
        finally:
            self._end_all()
        return not signals.arrived

    def _start(self, candidate: Candidate) -> None:
        candidate.state, candidate.began = "works", monotonic()
        self._running.append(_CandidateProcess(candidate, self._told))

    def _poll(self, seconds: float) -> None:
        with suppress(Empty):
            process, line = self._told.get(timeout=seconds)
            self._take(process, line)
        self._show(self._candidates)

    def _take(self, process: _CandidateProcess, line: bytes) -> None:
        candidate = process.candidate
        if not line:
            with suppress(subprocess.TimeoutExpired):  # it has nothing more to say, and may still hang
                process.process.wait(PATIENCE_SECONDS)
            if candidate.state != "ended":
                why = process.last_words() or f"exit code {process.process.returncode}"
                candidate.run = {"outcome": "failed", "error": f"its process ended: {why}"}
                candidate.state = "ended"
            self._running.remove(process)
            process.end(0)
            return
        record: dict[str, Any] = json.loads(line)
        if "run" in record:
            candidate.state, candidate.run = "ended", record["run"]
            candidate.score = None if record["score"] is None else serde.parse(Score, record["score"])
        else:
            candidate.state, candidate.calls = record["state"], record["calls"]

    def _end_all(self) -> None:
        for process in self._running:
            process.process.terminate()  # all at once, so that they end side by side
        until = monotonic() + PATIENCE_SECONDS
        while self._running and monotonic() < until:
            with suppress(Empty):
                self._take(*self._told.get(timeout=POLL_SECONDS))
        for process in self._running:
            process.end(0)
        for candidate in self._candidates:
            candidate.state = "ended"
