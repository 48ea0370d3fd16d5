"""Batches whose infrastructure fails for a while: a provider with waves of errors, disks that are full."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from batches import EDIT, outcomes, scratch, task
from captured_tree import capture_tree
from mounts import small_disk
from provider_server import Asked, Failure, ProviderServer, Reply

from ringfence_batch import Batch, BatchTask, LedgerError, Progress, TaskLimits

BUSY = {"error": {"message": "too much", "type": "rate_limit_error"}}
LATER = {"retry-after": "45"}  # longer than a run has
LIMITED = Failure(429, BUSY, LATER)
BROKEN = Failure(500, {"error": {"message": "broken", "type": "server_error"}}, LATER)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.txt").write_text("one\n")
    return tmp_path / "repo"


class Waves(ProviderServer):
    """Answers any number of conversations: an edit, then the end. But first with these failures."""

    def __init__(self, failures: Iterator[Failure | None]) -> None:
        super().__init__([])
        self._failures = failures
        self._next = threading.Lock()

    def reply(self, asked: Asked) -> Reply:
        with self._next:
            failure = next(self._failures, None)
        if failure is not None:
            return failure
        said = json.dumps(asked.body)
        is_edited = '"role": "tool"' in said or "function_call_output" in said
        return {"text": "Done."} if is_edited else {"tool_calls": [EDIT]}


def test_a_provider_that_fails_in_waves_delays_tasks_and_fails_none(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-mine")
    paused = set[str]()

    def show(progress: Progress) -> None:
        paused.add(progress.paused.partition(":")[0])

    with Waves(iter([LIMITED, LIMITED, None, None, None, BROKEN, BROKEN])) as server:
        model, limits = f"openai:m@{server.openai_url}", TaskLimits(seconds=30)
        tasks = [BatchTask(f"t{number}", str(repo), "Mend it.", model, limits=limits) for number in range(6)]
        batch = Batch(tasks, out=tmp_path / "out", retries=10)
        progress = batch.run(jobs=2, show=show)
    assert progress.outcomes == {"done": 6}
    assert progress.retries == 4
    assert "the infrastructure fails" in paused


def test_a_disk_of_results_that_is_full_pauses_a_batch_until_there_is_room(repo: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1028m") as disk:
        (disk / "full").write_bytes(bytes(5 << 20))
        batch = Batch([task(repo, "a"), task(repo, "b")], out=disk / "out")
        said = list[str]()

        def show(progress: Progress) -> None:
            if progress.paused and not said:
                said.append(progress.paused)
                subprocess.run(["mount", "-o", "remount,size=2g", disk], check=True)

        batch.run(jobs=1, show=show)
        assert str(disk / "out") in said[0]
        assert outcomes(batch) == {"a": "done", "b": "done"}


def test_a_disk_that_can_never_have_enough_room_ends_a_batch_at_once(repo: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "8m") as disk:
        with pytest.raises(LedgerError, match="8 MiB.*1,024 MiB free"):
            Batch([task(repo, "a")], out=disk / "out")
        subprocess.run(["mount", "-o", "remount,size=2g", disk], check=True)
        Batch([task(repo, "a")], out=disk / "out")
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        with pytest.raises(LedgerError, match="name another directory"):
            Batch.open(disk / "out").run(jobs=1)


def test_a_disk_of_copies_that_is_full_is_a_failure_of_the_infrastructure(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "large.bin").write_bytes(bytes(6 << 20))
    before = capture_tree(repo)
    with small_disk(tmp_path / "small", "4m") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        batch = Batch([task(repo, "a")], out=tmp_path / "out", retries=1)
        batch.run(jobs=1)
        result = batch.ledger.result("a")
        assert result is not None
        assert (result.outcome, result.attempt) == ("infra-failed", 2)
        assert "space" in result.cause
        assert not scratch(batch)
    assert capture_tree(repo) == before
