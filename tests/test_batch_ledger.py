"""The ledger of a batch: one result a task, whoever writes and whenever they die."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ringfence_batch.ledger import Attempt, Ledger, LedgerError, TaskResult
from ringfence_batch.task import BatchTask


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
