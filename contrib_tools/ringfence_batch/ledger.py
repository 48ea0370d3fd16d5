"""The ledger of a batch: plain files that say which task has which result. They are the truth, not the driver.

    OUT/batch.json                      the form of the ledger
    OUT/running.json                    the tasks that run just now, as long as a driver has driver.lock
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
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any, Literal, cast

from ringfence import serde
from ringfence_batch.task import BatchTask
from ringfence_tools.printable import one_line, why

FORMAT = 1
MIN_FREE_BYTES = 1 << 30
"""With less room than this at OUT, no attempt is begun."""
Outcome = Literal["done", "checks-failed", "task-failed", "infra-failed", "cancelled", "damaged"]
"""A task is "damaged" if a file of it in the ledger cannot be read. No file of the ledger says so."""


class LedgerError(ValueError):
    """OUT is no ledger, is one of other tasks, or is on a filesystem that cannot hold one."""


class DamagedFileError(LedgerError):
    """A file of a task in the ledger that cannot be read, or that is missing. Others of the ledger are as they were."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        super().__init__(f"{path} is damaged ({one_line(reason, 200)}): {advice}")


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """How one candidate of a task ended. ``score`` is in words, and None if it was not scored; ``score_number`` is
    None if the score is no number."""

    number: int
    outcome: Outcome
    cause: str = ""
    score: str | None = None
    score_number: float | None = None
    lines: int = 0
    """How many lines its patch adds and removes."""
    seconds: float = 0.0
    tokens: int | None = None
    cost_usd: float | None = None
    turns: int = 0
    directory: str = ""
    """Its files, from the directory of the attempt."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task. ``cause`` says in one line why it is not done.

    ``seconds`` are those of the run, without the time in a queue. ``details`` is the JSON object of the run. With
    several candidates it is the result of the best one, whose number ``candidate`` is, or None if none passed.
    ``seconds``, ``tokens``, ``cost_usd`` and ``turns`` are then those of all.
    """

    id: str
    outcome: Outcome
    cause: str = ""
    attempt: int = 0
    seconds: float = 0.0
    tokens: int | None = None
    cost_usd: float | None = None
    turns: int = 0
    worker: str = ""
    ended_at: str = ""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    candidate: int | None = None
    candidates: tuple[CandidateResult, ...] = ()


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
        place = out / "batch.json"
        try:
            record: Any = json.loads(place.read_bytes())
            if not isinstance(record, dict):
                raise ValueError("it is no JSON object")
        except FileNotFoundError:
            raise LedgerError(f"{out} is no batch: {_begin(out)} begins one") from None
        except (OSError, ValueError, RecursionError) as error:
            advice = f"put the line {json.dumps({'format': FORMAT})} there"
            raise DamagedFileError(place, why(error), advice) from None
        form = cast("dict[str, Any]", record).get("format")
        if form != FORMAT:
            raise LedgerError(f"{out} has form {form!r}, and this version of ringfence knows {FORMAT}")

    @classmethod
    def create(cls, out: Path, tasks: Sequence[BatchTask]) -> Ledger:
        """Open the ledger in `out` with these tasks. It is made if it is not there, and may have some of them.

        Raises:
            LedgerError: it has other tasks under the same ids, or the directory has other files.
            OSError: it cannot be written.
        """
        is_ledger = os.path.lexists(out / "batch.json")
        # Its tasks alone are what a killed process has begun to write.
        if out.exists() and not is_ledger and any(entry.name != "tasks" for entry in out.iterdir()):
            raise LedgerError(f"{out} has other files, and is no batch: name a directory that does not exist yet")
        if is_ledger and cls(out).is_driven():
            raise LedgerError(f"another process runs the batch in {out}: wait until it has ended")
        (out / "tasks").mkdir(parents=True, exist_ok=True)
        check_filesystem(out)
        check_room(out)
        changed = [task.id for task in tasks if _is_other(out / "tasks" / task.id, task)]
        if changed:
            ids = ", ".join(changed[:20]) + (f" and {len(changed) - 20} more" if len(changed) > 20 else "")
            raise LedgerError(f"{out} was begun with other tasks under the same ids ({ids}): name another directory")
        for task in tasks:
            directory = out / "tasks" / task.id
            directory.mkdir(exist_ok=True)
            (directory / "1/attempts").mkdir(parents=True, exist_ok=True)
            if not os.path.lexists(directory / "task.json"):
                _write(directory / "task.json", task.to_json())
        _write(out / "batch.json", {"format": FORMAT}, sync=True)
        _sync(out / "tasks")
        return cls(out)

    @contextmanager
    def driving(self) -> Generator[None]:
        """Hold the lock of the driver. Raises LedgerError if another process has it."""
        try:
            lock = (self.out / "driver.lock").open("wb")
        except OSError as error:
            raise LedgerError(f"{self.out / 'driver.lock'} cannot be written ({why(error)}): remove it") from None
        with lock:
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
        except BlockingIOError:
            return True
        except OSError:  # there is none, or no driver could have it open
            return False
        return False

    def keep_running(self, ids: Sequence[str]) -> None:
        """Write which tasks run just now, for other processes. It is of use while this one is `driving`."""
        with suppress(OSError):  # nothing depends on it
            _write(self.out / "running.json", {"ids": list(ids)})

    def running(self) -> Sequence[str]:
        """Return which tasks run just now, as the driver of another process says."""
        if not self.is_driven():
            return ()
        try:
            return serde.parse(_RunningTasks, (self.out / "running.json").read_bytes()).ids
        except (OSError, ValueError, RecursionError):
            return ()

    def ids(self) -> Sequence[str]:
        """The ids of all tasks, sorted, also of those whose files are damaged. Raises LedgerError."""
        try:
            return sorted(entry.name for entry in os.scandir(self._tasks))
        except OSError as error:
            raise LedgerError(f"{self._tasks} cannot be read ({why(error)}): {_begin(self.out)} makes it") from None

    def task(self, task_id: str) -> BatchTask:
        """Raises DamagedFileError."""
        place = self._tasks / task_id / "task.json"
        try:
            return serde.parse(BatchTask, place.read_bytes(), extra="forbid")
        except (OSError, ValueError, RecursionError) as error:
            advice = f"remove it, and {_begin(self.out)} writes it from its TASKS"
            raise DamagedFileError(place, why(error), advice) from None

    def directory(self, task_id: str) -> Path:
        """The directory of the newest generation of a task. Raises DamagedFileError."""
        place = self._tasks / task_id
        try:
            newest = max((int(name) for name in os.listdir(place) if name.isdecimal()), default=1)
        except OSError as error:
            raise DamagedFileError(place, why(error), f"remove it, and {_begin(self.out)} makes it anew") from None
        return place / str(newest)

    def result(self, task_id: str) -> TaskResult | None:
        """Return the result of the newest generation, or None. Raises DamagedFileError."""
        place = self.directory(task_id) / "result.json"
        try:
            return serde.parse(TaskResult, place.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            again = f"`ringfence batch requeue {shlex.quote(str(self.out))} {task_id}` has the task run again"
            raise DamagedFileError(place, why(error), again) from None

    def results(self) -> Iterator[tuple[str, TaskResult | None]]:
        """Yield each task with its result, or None. Raises DamagedFileError."""
        return ((task_id, self.result(task_id)) for task_id in self.ids())

    def check(self, task_id: str) -> None:
        """Raise DamagedFileError if the files of a task cannot be read."""
        self.task(task_id)
        self.result(task_id)

    def claim(self, task_id: str) -> Attempt | None:
        """Begin the next attempt at a task. None if the task has a result. Raises OSError and DamagedFileError."""
        task, generation = self.task(task_id), self.directory(task_id)
        (generation / "attempts").mkdir(parents=True, exist_ok=True)  # a `requeue` may have been killed
        number = 1 + max((int(name) for name in os.listdir(generation / "attempts") if name.isdecimal()), default=0)
        while not os.path.lexists(generation / "result.json"):
            directory = generation / "attempts" / str(number)
            try:
                directory.mkdir()
            except FileExistsError:
                number += 1
                continue
            return Attempt(task, number, directory)
        return None

    def attempts(self, task_id: str) -> int:
        """How many attempts the newest generation of a task has."""
        try:
            return len(os.listdir(self.directory(task_id) / "attempts"))
        except (OSError, DamagedFileError):
            return 0

    def cancel(self, task_id: str, cause: str = "cancelled") -> bool:
        """Give a task without a result that of a cancelled one. False if it has a result.

        Raises OSError and DamagedFileError.
        """
        self.check(task_id)
        attempt = self.claim(task_id)
        return attempt is not None and attempt.publish(TaskResult(task_id, "cancelled", cause, attempt.number))

    def requeue(self, task_id: str) -> bool:
        """Have a task with a result run again. Older attempts cannot publish any more. False if it has no result.

        A damaged result is one: what it was is kept. Raises OSError and DamagedFileError.
        """
        self.task(task_id)
        place, newest = self._tasks / task_id, self.directory(task_id)
        if not os.path.lexists(newest / "result.json"):
            return False
        with suppress(FileExistsError):  # somebody else was first
            (place / str(int(newest.name) + 1) / "attempts").mkdir(parents=True)
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


def check_room(out: Path) -> None:
    """Raise LedgerError where there can never be as much room as a batch needs."""
    total = shutil.disk_usage(out).total
    if total < MIN_FREE_BYTES:
        raise LedgerError(
            f"{out} is on a filesystem of {total >> 20:,} MiB, and a batch begins nothing with less than "
            f"{MIN_FREE_BYTES >> 20:,} MiB free: name another directory"
        )


@dataclass(frozen=True, slots=True)
class _RunningTasks:
    ids: tuple[str, ...]


def _begin(out: Path) -> str:
    return f"`ringfence batch run TASKS --out {shlex.quote(str(out))}`"


def _is_other(directory: Path, task: BatchTask) -> bool:
    """Whether the ledger has another task under the id of this one. A damaged one is named later."""
    try:
        return serde.parse(BatchTask, (directory / "task.json").read_bytes(), extra="forbid").hash != task.hash
    except (OSError, ValueError, RecursionError):
        return False


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
