"""Tasks of a batch whose commands run in containers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from podman_parts import PodmanConnection

from ringfence_batch import Batch, BatchTask, TaskLimits


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a.txt").write_text("one\n")
    return tmp_path / "repo"


def task(repo: Path, task_id: str, command: str, **options: Any) -> BatchTask:
    turns: list[Mapping[str, object]] = [
        {"tool_calls": [{"name": "shell_execute", "arguments": {"command": command}}]},
        {"text": "Done."},
    ]
    model = repo.parent / f"{task_id}.jsonl"
    model.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return BatchTask(task_id, str(repo), "Do it.", f"script:{model}", kind="podman", **options)


@pytest.mark.usefixtures("limits_hold")
def test_checks_and_deadlines_of_tasks_in_containers(repo: Path, tmp_path: Path, podman: PodmanConnection) -> None:
    tasks = [
        task(repo, "good", "echo two > b.txt", checks=("grep two b.txt",)),
        task(repo, "bad", "echo two > b.txt", checks=("true", "grep three b.txt")),
        task(repo, "ever", "trap '' TERM INT; sleep 1000", limits=TaskLimits(seconds=3)),
        task(repo, "nowhere", "true", image="localhost/no-such-image:1"),
    ]
    batch = Batch(tasks, out=tmp_path / "out", retries=0)
    batch.run(jobs=2)
    found = {task_id: result and (result.outcome, result.cause) for task_id, result in batch.ledger.results()}
    assert found["good"] == ("done", "")
    assert found["bad"] == ("checks-failed", "grep three b.txt: exit code 1")
    assert found["ever"] is not None
    assert found["ever"][0] == "task-failed"
    assert "deadline" in found["ever"][1]
    assert found["nowhere"] is not None
    assert found["nowhere"][0] == "infra-failed"
    assert (batch.ledger.directory("bad") / "attempts/1/check-2.log").read_text().startswith("$ grep three b.txt")
    page = (batch.ledger.directory("bad") / "attempts/1/report.html").read_text()
    assert "A check failed" in page
    assert "check-2.log" in page
    assert "ringfence undo" not in page
    labels = [container.labels for container in podman.client.containers.list(all=True)]
    assert not [label for label in labels if "ringfence-batch-" in str(label)]


def test_the_best_of_several_candidates_is_the_result_of_a_task(repo: Path, tmp_path: Path) -> None:
    for number, words in enumerate(("", "one two", "one two three"), 1):
        turns = [
            {"tool_calls": [{"name": "write_file", "arguments": {"file_path": "b.txt", "content": words}}]},
            {"text": "Done."},
        ]
        (tmp_path / f"try-{number}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    best = BatchTask(
        "best",
        str(repo),
        "Do it.",
        f"script:{tmp_path}/try-{{candidate}}.jsonl",
        kind="podman",
        checks=("test -f a.txt",),
        candidates=3,
        score="test -s b.txt && wc -w < b.txt",
    )
    batch = Batch([best], out=tmp_path / "out", retries=0)
    batch.run(jobs=1)
    result = batch.ledger.result("best")
    assert result is not None
    assert (result.outcome, result.candidate, result.cause) == ("done", 3, "")
    found = [(one.number, one.outcome, one.score, one.score_number) for one in result.candidates]
    assert found == [(1, "checks-failed", "exit code 1", None), (2, "done", "2", 2.0), (3, "done", "3", 3.0)]
    attempt = batch.ledger.directory("best") / "attempts/1"
    assert b"+one two three" in (attempt / "patch.diff").read_bytes()
    assert (attempt / "patch.diff").read_bytes() == (attempt / "candidate-3/patch.diff").read_bytes()
    assert b"+one two\n" in (attempt / "candidate-2/patch.diff").read_bytes().replace(b"\n\\ No", b"\n\n\\ No")
    assert "candidate-1" in [one.directory for one in result.candidates]
    row = json.loads((tmp_path / "out/summary.json").read_text())["tasks"][0]
    assert row["candidate"] == 3
    assert [one["score"] for one in row["candidates"]] == ["exit code 1", "2", "3"]
    assert sorted(path.name for path in repo.iterdir()) == ["a.txt"]
