"""The ledger of a batch: plain files that say which task has which result. They are the truth, not the driver.

    OUT/batch.json                      the form of the ledger
    OUT/tasks/ID/task.json              the task
    OUT/tasks/ID/1/                     a generation: `requeue` begins the next
    OUT/tasks/ID/1/attempts/1/          an attempt: its result, patch, receipts, report and log
    OUT/tasks/ID/1/result.json          a hard link to the result of the attempt that was first

A directory is made by whoever claims an attempt, and a link by whoever publishes a result. Both are exclusive on every
filesystem, also for the nodes of a cluster. So a worker that was thought to be dead can neither write over its
successor's result nor add a second one.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any, Literal

from ringfence import serde
from ringfence_batch.task import BatchTask

FORMAT = 1
Outcome = Literal["done", "checks-failed", "task-failed", "infra-failed", "cancelled"]


class LedgerError(ValueError):
    """OUT is no ledger, is one of other tasks, or is on a filesystem that cannot hold one."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task. ``cause`` says in one line why it is not done.

    ``seconds`` are those of the run, without the time in a queue. ``details`` is the JSON object of the run.
    """

    id: str
    outcome: Outcome
    cause: str = ""
    attempt: int = 0
    seconds: float = 0.0
    tokens: int | None = None
    turns: int = 0
    worker: str = ""
    ended_at: str = ""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claimed attempt at a task. Nobody else writes into its directory."""

    task: BatchTask
    number: int
    directory: Path

    def keep(self, result: TaskResult) -> None:
        """Write the result of an attempt that is to be followed by another one."""
        _write(self.directory / "result.json", serde.dump(result))

    def publish(self, result: TaskResult) -> bool:
        """Make this the result of the task. False if the generation has one already. Raises OSError.

        Only a task with a result is queued again, so an attempt of an older generation always finds one.
        """
        own, generation = self.directory / "result.json", self.directory.parent.parent
        _write(own, serde.dump(result), sync=True)
        try:
            os.link(own, generation / "result.json")
        except FileExistsError:
            return False
        _sync(generation)
        return True


class Ledger:
    """The ledger in a directory. Any number of processes may have it open."""

    def __init__(self, out: Path) -> None:
        """
        Raises:
            LedgerError: `out` is no ledger.
        """
        self.out = out
        self._tasks = out / "tasks"
        try:
            record = json.loads((out / "batch.json").read_bytes())
        except (OSError, ValueError):
            begin = f"`ringfence batch run TASKS --out {shlex.quote(str(out))}`"
            raise LedgerError(f"{out} is no batch: {begin} begins one") from None
        if record.get("format") != FORMAT:
            raise LedgerError(f"{out} has form {record.get('format')}, and this version of ringfence knows {FORMAT}")

    @classmethod
    def create(cls, out: Path, tasks: Sequence[BatchTask]) -> Ledger:
        """Open the ledger in `out` with these tasks. It is made if it is not there, and may have some of them.

        Raises:
            LedgerError: it has other tasks under the same ids, or the directory has other files.
            OSError: it cannot be written.
        """
        # Its tasks alone are what a killed process has begun to write.
        if out.exists() and not (out / "batch.json").exists() and any(entry.name != "tasks" for entry in out.iterdir()):
            raise LedgerError(f"{out} has other files, and is no batch: name a directory that does not exist yet")
        if (out / "batch.json").exists() and cls(out).is_driven():
            raise LedgerError(f"another process runs the batch in {out}: wait until it has ended")
        (out / "tasks").mkdir(parents=True, exist_ok=True)
        check_filesystem(out)
        changed = [
            task.id for task in tasks if (known := _task_in(out / "tasks" / task.id)) and known.hash != task.hash
        ]
        if changed:
            ids = ", ".join(changed[:20]) + (f" and {len(changed) - 20} more" if len(changed) > 20 else "")
            raise LedgerError(f"{out} was begun with other tasks under the same ids ({ids}): name another directory")
        for task in tasks:
            directory = out / "tasks" / task.id
            directory.mkdir(exist_ok=True)
            (directory / "1/attempts").mkdir(parents=True, exist_ok=True)
            if not (directory / "task.json").exists():
                _write(directory / "task.json", task.to_json())
        _write(out / "batch.json", {"format": FORMAT}, sync=True)
        _sync(out / "tasks")
        return cls(out)

    @contextmanager
    def driving(self) -> Generator[None]:
        """Hold the lock of the driver. Raises LedgerError if another process has it."""
        with (self.out / "driver.lock").open("wb") as lock:
            for is_last in (False, False, True):  # `is_driven` holds it for an instant
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if is_last:
                        message = f"another process runs the batch in {self.out}: wait until it has ended"
                        raise LedgerError(message) from None
                    sleep(0.05)
            yield

    def is_driven(self) -> bool:
        """Whether a process runs the batch just now."""
        try:
            with (self.out / "driver.lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def ids(self) -> Sequence[str]:
        """The ids of all tasks, sorted."""
        return sorted(entry.name for entry in os.scandir(self._tasks) if os.path.exists(f"{entry.path}/task.json"))

    def task(self, task_id: str) -> BatchTask:
        """Raises LedgerError if there is no such task."""
        if (task := _task_in(self._tasks / task_id)) is None:
            raise LedgerError(f"there is no task {task_id} in {self.out}")
        return task

    def directory(self, task_id: str) -> Path:
        """The directory of the newest generation of a task."""
        place = self._tasks / task_id
        return place / str(_newest(place))

    def result(self, task_id: str) -> TaskResult | None:
        """Return the result of the newest generation, or None."""
        try:
            text = (self.directory(task_id) / "result.json").read_bytes()
        except FileNotFoundError:
            return None
        return serde.parse(TaskResult, text)

    def results(self) -> Iterator[tuple[str, TaskResult | None]]:
        return ((task_id, self.result(task_id)) for task_id in self.ids())

    def claim(self, task_id: str) -> Attempt | None:
        """Begin the next attempt at a task. None if the task has a result."""
        generation = self.directory(task_id)
        number = 1 + max((int(name) for name in os.listdir(generation / "attempts") if name.isdigit()), default=0)
        while not (generation / "result.json").exists():
            directory = generation / "attempts" / str(number)
            try:
                directory.mkdir()
            except FileExistsError:
                number += 1
                continue
            return Attempt(self.task(task_id), number, directory)
        return None

    def attempts(self, task_id: str) -> int:
        """How many attempts the newest generation of a task has."""
        return len(os.listdir(self.directory(task_id) / "attempts"))

    def cancel(self, task_id: str, cause: str = "cancelled") -> bool:
        """Give a task without a result that of a cancelled one. False if it has a result."""
        attempt = self.claim(task_id)
        return attempt is not None and attempt.publish(TaskResult(task_id, "cancelled", cause, attempt.number))

    def requeue(self, task_id: str) -> bool:
        """Have a task with a result run again. Older attempts cannot publish any more. False if it has no result."""
        if self.result(task_id) is None:
            return False
        place = self._tasks / task_id
        with suppress(FileExistsError):  # somebody else was first
            (place / str(_newest(place) + 1) / "attempts").mkdir(parents=True)
        return True


def check_filesystem(out: Path) -> None:
    """Raise LedgerError where directories and links are not exclusive, or files are not seen at once."""
    nonce = secrets.token_hex(8)
    probe = out / f".probe-{nonce}"
    try:
        probe.mkdir()
        try:
            (probe / "one").write_text(nonce)
            os.link(probe / "one", probe / "two")
            for again in ((probe / "one").mkdir, lambda: os.link(probe / "one", probe / "two")):
                with suppress(FileExistsError):
                    again()
                    raise LedgerError(f"{out} is on a filesystem where names are not exclusive: name another directory")
            if (probe / "two").read_text() != nonce:
                raise LedgerError(f"{out} is on a filesystem where files are not seen at once: name another directory")
        finally:
            for name in ("one", "two"):
                (probe / name).unlink(missing_ok=True)
            probe.rmdir()
    except OSError as error:
        raise LedgerError(f"{out} cannot hold a batch ({error.strerror}): name another directory") from error


def _newest(place: Path) -> int:
    return max(int(name) for name in os.listdir(place) if name.isdigit())


def _task_in(directory: Path) -> BatchTask | None:
    try:
        text = (directory / "task.json").read_bytes()
    except FileNotFoundError:
        return None
    return serde.parse(BatchTask, text, extra="forbid")


def _write(path: Path, record: Mapping[str, Any], *, sync: bool = False) -> None:
    """Write a file whole: a reader finds all of it, or none."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(record, file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
