"""A worker of a batch: it copies a workspace, runs the agent, checks the result, and publishes it in the ledger."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from time import sleep

from ringfence_batch.attempt_run import RunPlace, guarded, result_of, run_once, spec_of
from ringfence_batch.engine import AttemptRequest
from ringfence_batch.ledger import Attempt, Ledger, TaskResult
from ringfence_batch.sources import copy_source, unpack_source
from ringfence_batch.task_candidates import run_candidates
from ringfence_sandbox import remove_tree

PATIENCE_SECONDS = 15.0
"""How long a worker that is ended may take to take down its container, before it is killed."""
_LOCK = "lock"


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

    def watch(seconds: float | None) -> AbstractContextManager[None]:
        return nullcontext() if seconds is None else _ended_after(seconds + request.grace_seconds, attempt)

    def make() -> TaskResult:
        if request.source is not None:
            unpack_source(Path(request.source), place / "tree")
        else:
            copy_source(task, place / "tree")
        seconds = min(filter(None, (task.limits.seconds, request.deadline)), default=None)
        if task.candidates > 1:
            return run_candidates(attempt, place, seconds, watch)
        one = RunPlace(task, place / "tree", place / "store", attempt.directory, place.parent)
        return run_once(one, spec_of(task, one.tree, one.store, seconds), watch).result

    return guarded(task, make)


@contextmanager
def _ended_after(seconds: float, attempt: Attempt) -> Generator[None]:
    """End this process, with all that it has started, if the block has not ended after this time."""

    def end() -> None:
        cause = f"it was ended after {seconds:.0f} s: it did not end at its deadline"
        with suppress(OSError):
            attempt.publish(replace(result_of(attempt.task, "task-failed", cause, seconds), attempt=attempt.number))
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
            remove_tree(place)
        finally:
            os.close(lock)


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
                remove_tree(entry.path)
                removed += 1
            finally:
                os.close(lock)
    return removed


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
