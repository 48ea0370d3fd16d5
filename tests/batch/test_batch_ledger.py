"""The ledger of a batch: one result a task, whoever writes and whenever they die."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence_batch import Batch, BatchTask, Ledger, LedgerError, TaskResult, summarize
from ringfence_batch.ledger import Attempt, DamagedFileError


def task(task_id: str, text: str = "Mend it.") -> BatchTask:
    return BatchTask(task_id, "/repo", text, "openai:m")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "out", [task("a"), task("b")])


def claimed(ledger: Ledger, task_id: str = "a") -> Attempt:
    attempt = ledger.claim(task_id)
    assert attempt is not None
    return attempt


def test_a_result_is_that_of_the_attempt_that_published_first(ledger: Ledger) -> None:
    late, early = claimed(ledger), claimed(ledger)
    assert (late.number, early.number) == (1, 2)
    assert early.publish(TaskResult("a", "done", attempt=2))
    assert not late.publish(TaskResult("a", "task-failed", "late", attempt=1))
    assert ledger.result("a") == TaskResult("a", "done", attempt=2)
    assert ledger.claim("a") is None
    assert ledger.result("b") is None


def test_of_a_hundred_publishers_one_is_the_first(ledger: Ledger) -> None:
    attempts = [claimed(ledger) for _ in range(100)]
    begin, won = threading.Barrier(len(attempts)), list[int]()

    def publish(attempt: Attempt) -> None:
        begin.wait()
        if attempt.publish(TaskResult("a", "done", attempt=attempt.number)):
            won.append(attempt.number)

    threads = [threading.Thread(target=publish, args=(attempt,)) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result = ledger.result("a")
    assert result is not None
    assert won == [result.attempt]


def test_claims_at_one_time_are_different_attempts(ledger: Ledger) -> None:
    numbers = list[int]()
    threads = [threading.Thread(target=lambda: numbers.append(claimed(ledger).number)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 31))


def test_a_task_in_the_queue_again_takes_no_result_of_an_older_attempt(ledger: Ledger) -> None:
    old, older = claimed(ledger), claimed(ledger)
    old.publish(TaskResult("a", "infra-failed", "lost", attempt=1))
    assert ledger.requeue("a")
    assert ledger.result("a") is None
    assert not older.publish(TaskResult("a", "done", attempt=2))
    assert ledger.result("a") is None
    assert claimed(ledger).publish(TaskResult("a", "done", attempt=1))
    assert not ledger.requeue("b")


def test_cancel_is_the_result_of_a_task_without_one(ledger: Ledger) -> None:
    claimed(ledger).publish(TaskResult("a", "done", attempt=1))
    assert not ledger.cancel("a")
    assert ledger.cancel("b")
    assert {task_id: result and result.outcome for task_id, result in ledger.results()} == {
        "a": "done",
        "b": "cancelled",
    }


def test_it_is_opened_again_with_the_same_tasks_and_with_more(ledger: Ledger) -> None:
    claimed(ledger).publish(TaskResult("a", "done", attempt=1))
    again = Ledger.create(ledger.out, [task("a"), task("b"), task("c")])
    assert again.ids() == ["a", "b", "c"]
    assert again.result("a") is not None
    assert Ledger(ledger.out).task("c") == task("c")


def test_other_tasks_under_the_same_ids_are_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="other tasks under the same ids .b."):
        Ledger.create(ledger.out, [task("a"), task("b", "Something else."), task("c")])
    assert ledger.ids() == ["a", "b"]


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(LedgerError, match="other files"):
        Ledger.create(tmp_path, [task("a")])
    with pytest.raises(LedgerError, match="is no batch"):
        Ledger(tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_creation_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "out", [task("a")])
    (ledger.out / "batch.json").unlink()  # which is written last
    with pytest.raises(LedgerError):
        Ledger(ledger.out)
    assert Ledger.create(ledger.out, [task("a"), task("b")]).ids() == ["a", "b"]


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "zeros": lambda path: path.write_bytes(bytes(100)),
    "not UTF-8": lambda path: path.write_bytes(b'{"id": "\xff"}'),
    "no JSON": lambda path: path.write_text("done"),
    "no object": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
    "other keys": lambda path: path.write_text("{}"),
    "other types": lambda path: path.write_text(
        '{"id": 1, "outcome": ["done"], "workspace": {}, "task": 2, "model": 3}'
    ),
    "too deep": lambda path: path.write_text("[" * 100_000),
    "a directory": in_its_place(Path.mkdir),
    "unreadable": in_its_place(lambda path: path.symlink_to(path.name)),
}


def states(ledger: Ledger) -> dict[str, str | None]:
    return {row.id: row.outcome for row in summarize(ledger).rows}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", ["task.json", "1/result.json"])
def test_a_damaged_file_of_a_task_is_named_and_the_others_go_on(
    ledger: Ledger, name: str, damage: Callable[[Path], object]
) -> None:
    for task_id in ("a", "b"):
        assert ledger.cancel(task_id)
    path = ledger.out / "tasks/a" / name
    damage(path)
    with pytest.raises(DamagedFileError, match=f"^{path} is damaged"):
        ledger.check("a")
    batch = Batch.open(ledger.out)
    assert batch.run(jobs=1).outcomes == {"cancelled": 1, "damaged": 1}
    assert batch.summary is not None
    assert (batch.summary.exit_code, str(path) in batch.summary.damaged[0]) == (2, True)
    assert states(ledger) == {"a": "damaged", "b": "cancelled"}
    assert ledger.requeue("b")
    with pytest.raises(DamagedFileError):
        ledger.cancel("a")
    if name == "task.json":
        with pytest.raises(DamagedFileError):
            ledger.requeue("a")
    else:
        assert ledger.requeue("a")
        assert states(ledger) == {"a": None, "b": None}


def test_a_task_whose_file_is_removed_is_named_until_its_batch_is_begun_again(ledger: Ledger) -> None:
    (ledger.out / "tasks/a/task.json").unlink()
    assert states(ledger) == {"a": "damaged", "b": None}
    again = Ledger.create(ledger.out, [task("a"), task("b")])
    assert states(again) == {"a": None, "b": None}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_of_the_ledger_itself_is_named(ledger: Ledger, damage: Callable[[Path], object]) -> None:
    damage(ledger.out / "batch.json")
    for opening in (lambda: Ledger(ledger.out), lambda: Ledger.create(ledger.out, [task("a"), task("b")])):
        with pytest.raises(LedgerError, match=r"batch\.json is damaged|has form None"):
            opening()


def test_files_that_cannot_be_written_are_named(ledger: Ledger) -> None:
    for name in ("driver.lock", "index.html", "junit.xml"):
        (ledger.out / name).unlink(missing_ok=True)
        (ledger.out / name).mkdir()
        for task_id in ledger.ids():
            ledger.cancel(task_id)
        with pytest.raises(LedgerError, match=f"{ledger.out}/{name} cannot be written"):
            Batch.open(ledger.out).run(jobs=1)
        (ledger.out / name).rmdir()


@pytest.mark.parametrize("left", ["2", "2/attempts", ""])
def test_a_requeue_that_was_killed_can_be_repeated(ledger: Ledger, left: str) -> None:
    assert ledger.cancel("a")
    (ledger.out / "tasks/a" / left).mkdir(parents=True, exist_ok=True)
    assert ledger.requeue("a") == (not left), "it is queued already"
    assert states(ledger) == {"a": None, "b": None}
    assert claimed(ledger).publish(TaskResult("a", "done", attempt=1))
    assert states(ledger) == {"a": "done", "b": None}
    assert ledger.attempts("a") == 1


def test_what_runs_is_known_as_long_as_a_driver_says_so(ledger: Ledger) -> None:
    ledger.keep_running(["a"])
    assert ledger.running() == ()
    with ledger.driving():
        assert ledger.running() == ("a",)
        summary = summarize(ledger)
        assert (summary.running, summary.counts) == (["a"], [("running", 1), ("no result", 1)])
        for damage in DAMAGE.values():
            ledger.keep_running(["a"])
            damage(ledger.out / "running.json")
            assert ledger.running() == ()
            if (ledger.out / "running.json").is_dir():
                (ledger.out / "running.json").rmdir()
