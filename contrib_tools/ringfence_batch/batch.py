"""A batch: tasks, a ledger, and the driver that has an engine make attempts until each task has its result."""

from __future__ import annotations

import os
import shutil
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from ringfence.limits import dollars
from ringfence_batch.engine import AttemptEnded, AttemptRequest, Engine
from ringfence_batch.ledger import MIN_FREE_BYTES, DamagedFileError, Ledger, Outcome, TaskResult, check_room
from ringfence_batch.local import LocalEngine
from ringfence_batch.summary import Summary
from ringfence_batch.summary_files import write_summary
from ringfence_batch.task import BatchTask

POLL_SECONDS = 0.5
LOOK_SECONDS = 2.0
"""How often a driver looks for running tasks that were cancelled."""
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
STRAGGLER = 4.0
"""An attempt is a straggler if it runs this many times as long as the median of those that have ended."""


@dataclass(slots=True)
class Progress:
    """How far a batch is. ``outcomes`` counts the results that there are, of earlier drivers, too."""

    total: int
    outcomes: Counter[Outcome] = field(default_factory=Counter[Outcome])
    running: Mapping[str, float] = field(default_factory=dict[str, float])
    """When the attempt at each running task was begun, by the monotonic clock."""
    causes: Counter[str] = field(default_factory=Counter[str])
    retries: int = 0
    began: float = field(default_factory=monotonic)
    at_start: int = 0
    """The results that there were at the start of this driver."""
    paused: str = ""
    """Why no attempt is begun just now."""
    cost_usd: float = 0.0
    """What the tasks with a result have cost, as far as it is known."""
    stopped: str = ""
    """Why tasks without a result are not begun any more."""
    stragglers: Sequence[str] = ()
    """The running tasks that take much longer than the others did."""

    @property
    def ended(self) -> int:
        return self.outcomes.total()

    @property
    def per_hour(self) -> float:
        return (self.ended - self.at_start) / max(monotonic() - self.began, 1e-3) * 3600

    @property
    def seconds_left(self) -> float | None:
        rate = self.per_hour
        return (self.total - self.ended) / rate * 3600 if rate else None


class Batch:
    """Tasks, and the directory of their ledger.

    `run` makes attempts until each task has a result. It can be killed at any time: another `run` on the same
    directory, by this program or another, goes on. A task with a result never runs again.
    """

    def __init__(self, tasks: Sequence[BatchTask], *, out: str | os.PathLike[str], retries: int = 2) -> None:
        """``retries`` is how often a task is tried again after a failure of the infrastructure.

        Raises:
            LedgerError: `out` has other tasks under the same ids, or other files.
            OSError: the ledger cannot be written.
        """
        self.ledger = Ledger.create(Path(out), tasks)
        self.summary: Summary | None = None
        self._retries = retries

    @classmethod
    def open(cls, out: str | os.PathLike[str], *, retries: int = 2) -> Batch:
        """Open a batch that was begun before. Raises LedgerError if there is none."""
        batch = cls.__new__(cls)
        batch.ledger, batch.summary, batch._retries = Ledger(Path(out)), None, retries
        return batch

    def run(
        self,
        *,
        engine: Engine | None = None,
        jobs: int | None = None,
        task_deadline: float | None = None,
        grace_seconds: float = 60.0,
        max_cost_usd: float | None = None,
        show: Callable[[Progress], None] | None = None,
    ) -> Progress:
        """Run what has no result. Return the counts of all results. Set `summary`, and write it into the directory.

        A task whose files are damaged does not run. The summary names them.

        ``engine`` is by default one of this machine with ``jobs`` workers, by default one a processor.
        ``task_deadline`` is the most seconds that a run may take, whatever its task says. A run that has not ended
        ``grace_seconds`` after its deadline is killed. When the results together have cost more than ``max_cost_usd``,
        or the cost of one is unknown, no other attempt is begun. ``show`` is called about twice a second.

        Raises:
            LedgerError: another driver runs this batch, or there can never be room for it at `out`.
            KeyboardInterrupt: as it came, after all attempts have ended.
        """
        check_room(self.ledger.out)
        with self.ledger.driving():
            engine = engine or LocalEngine(self.ledger.out, jobs or os.cpu_count() or 1)
            try:
                limits = AttemptRequest("", is_last=False, deadline=task_deadline, grace_seconds=grace_seconds)
                driver = _Driver(self.ledger, engine, self._retries, limits, max_cost_usd)
                return driver.run(show or (lambda progress: None))
            finally:
                engine.close()
                self.ledger.keep_running([])
                self.summary = write_summary(self.ledger)


class _Driver:
    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        retries: int,
        limits: AttemptRequest,
        max_cost_usd: float | None,
    ) -> None:
        self._ledger, self._engine, self._retries = ledger, engine, retries
        self._limits, self._max_cost_usd = limits, max_cost_usd
        self._running: dict[str, float] = {}
        self._told: list[str] | None = None
        """The running tasks that `Ledger.running` has."""
        self._failures = Counter[str]()
        """Failed attempts by task, of this driver."""
        self._lasted: deque[float] = deque(maxlen=1000)
        self._backoff_until = self._look_at = 0.0
        self._failed_in_a_row = 0
        ids = ledger.ids()
        self.progress = Progress(len(ids), running=self._running)
        self._queue = deque[str]()
        for task_id in ids:
            try:
                ledger.check(task_id)
                result = ledger.result(task_id)
            except DamagedFileError:
                self._count("damaged", "")
                continue
            if result is None:
                self._queue.append(task_id)
            else:
                self._count_result(result)
        self.progress.at_start = self.progress.ended

    def run(self, show: Callable[[Progress], None]) -> Progress:
        while (self._queue and not self.progress.stopped) or self._running:
            self._fill()
            self._write_running()
            for ended in self._engine.poll(POLL_SECONDS):
                self._take(ended)
            self._end_cancelled()
            self.progress.stragglers = self._stragglers()
            show(self.progress)
        return self.progress

    def _write_running(self) -> None:
        if self._told != (now := sorted(self._running)):
            self._told = now
            self._ledger.keep_running(now)

    def _result(self, task_id: str) -> TaskResult | None:
        """Return the result of a task, as one that is damaged if it is."""
        try:
            return self._ledger.result(task_id)
        except DamagedFileError as error:
            return TaskResult(task_id, "damaged", str(error))

    def _end_cancelled(self) -> None:
        """End the attempts at tasks that another process has cancelled."""
        if monotonic() < self._look_at:
            return
        self._look_at = monotonic() + LOOK_SECONDS
        for task_id in list(self._running):
            if (result := self._result(task_id)) is not None and result.outcome == "cancelled":
                self._engine.cancel(task_id)

    def _fill(self) -> None:
        self.progress.paused = self._reason_to_wait()
        while (
            self._queue
            and not self.progress.paused
            and not self.progress.stopped
            and len(self._running) < self._engine.slots
        ):
            task_id = self._queue.popleft()
            self._running[task_id] = monotonic()
            is_last = self._failures[task_id] >= self._retries
            self._engine.start(replace(self._limits, id=task_id, is_last=is_last))

    def _reason_to_wait(self) -> str:
        if (left := self._backoff_until - monotonic()) > 0:
            return f"the infrastructure fails: the next attempt is in {left:.0f} s"
        if shutil.disk_usage(self._ledger.out).free < MIN_FREE_BYTES:
            return f"less than {MIN_FREE_BYTES >> 20} MiB are free at {self._ledger.out}: make room"
        return ""

    def _take(self, ended: AttemptEnded) -> None:
        if (running := self._running.pop(ended.id, None)) is None:
            return
        if ended.is_published or self._result(ended.id) is not None:  # a worker may have died just after
            self._failed_in_a_row = 0
            self._lasted.append(monotonic() - running)
            self._count_result(self._result(ended.id))
            return
        self._failures[ended.id] += 1
        self.progress.retries += 1
        if not ended.is_lost:  # one dead worker says nothing of the others
            self._failed_in_a_row += 1
            wait = min(FIRST_BACKOFF_SECONDS * 2 ** (self._failed_in_a_row - 1), LONGEST_BACKOFF_SECONDS)
            self._backoff_until = monotonic() + wait
        if self._failures[ended.id] > self._retries:
            self._end(ended.id, "infra-failed", ended.cause)
        else:
            self._queue.append(ended.id)

    def _end(self, task_id: str, outcome: Outcome, cause: str) -> None:
        """Give a task a result that no worker could write."""
        try:
            if (attempt := self._ledger.claim(task_id)) is not None:
                attempt.publish(TaskResult(task_id, outcome, cause, attempt.number))
        except DamagedFileError:  # since it was begun
            self._count("damaged", "")
        else:
            self._count_result(self._result(task_id))

    def _count_result(self, result: TaskResult | None) -> None:
        if result is None:
            return
        self._count(result.outcome, result.cause)
        self.progress.cost_usd += result.cost_usd or 0
        limit = self._max_cost_usd
        if limit is None or self.progress.stopped:
            return
        if result.cost_usd is None and result.turns:
            self.progress.stopped = f"the cost is limited, and nobody knows what {result.id} has cost"
        elif self.progress.cost_usd > limit:
            self.progress.stopped = f"the tasks have cost {dollars(self.progress.cost_usd)}, of {dollars(limit)}"

    def _count(self, outcome: Outcome, cause: str) -> None:
        self.progress.outcomes[outcome] += 1
        if outcome != "done":
            self.progress.causes[f"{outcome}: {cause}"[:200]] += 1

    def _stragglers(self) -> Sequence[str]:
        if len(self._lasted) < 5:
            return ()
        most, now = STRAGGLER * statistics.median(self._lasted), monotonic()
        return [task_id for task_id, began in self._running.items() if now - began > most]
