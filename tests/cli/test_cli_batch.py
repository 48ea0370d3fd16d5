"""`ringfence batch`, as people and CI jobs use it: exit codes, what is on disk afterwards, interrupts, cancelling."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from batches import EDIT, READ, SLEEP, wait_until
from captured_tree import capture_tree
from command_line import ringfence, ringfence_text
from terminals import Terminal

from ringfence_batch import Batch, read_tasks


class Place:
    """A directory with a workspace, scripts and a file of tasks. ``out`` is for results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out = directory / "out"
        self.tasks = directory / "tasks.jsonl"
        (directory / "repo").mkdir()
        (directory / "repo/a.txt").write_text("one\n")
        self.script("good", {"tool_calls": [READ, EDIT]}, {"text": "Done."})
        self.script("short", {"tool_calls": [READ]})
        self.script("slow", {"tool_calls": [{"name": "nap", "arguments": {}}]}, {"text": "Done."})
        (directory / "nap.py").write_text(SLEEP.format(seconds=60))

    def script(self, name: str, *turns: Mapping[str, object]) -> None:
        (self.directory / f"{name}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))

    def task(self, task_id: str, model: str = "good", **more: Any) -> dict[str, Any]:
        return {"id": task_id, "workspace": "repo", "task": "Mend it.", "model": f"script:{model}.jsonl", **more}

    def slow(self, task_id: str) -> dict[str, Any]:
        return self.task(task_id, "slow", sections=["nap.py:section"])

    def write(self, *tasks: Mapping[str, Any] | str) -> None:
        self.tasks.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in tasks))

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        return ringfence_text("batch", "run", self.tasks, "--out", self.out, "--jobs", "1", "--retries", "0", *options)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        words = ["batch", "run", str(self.tasks), "--out", str(self.out), "--quiet", *options]
        return subprocess.Popen([sys.executable, "-m", "ringfence_cli", *words])

    def status(self) -> dict[str, Any]:
        return json.loads(ringfence("batch", "status", self.out, "--json").stdout)

    def attempts(self) -> dict[str, int]:
        return {task["id"]: task["attempts"] for task in self.status()["tasks"]}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_batch_that_is_done_exits_with_0_and_leaves_its_sources_alone(place: Place) -> None:
    before = capture_tree(place.directory / "repo")
    place.write(place.task("a"), place.task("b"))
    done = place.run("--json")
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert said == json.loads((place.out / "summary.json").read_text())
    assert said["outcomes"] == {"done": 2}
    assert "+two" in (place.out / said["tasks"][0]["directory"] / "patch.diff").read_text()
    assert capture_tree(place.directory / "repo") == before


def test_wrong_tasks_are_all_named_and_nothing_is_begun(place: Place) -> None:
    tasks: list[dict[str, Any] | str] = [place.task(f"t{number}") for number in range(10_000)]
    tasks[17], tasks[4_000], tasks[9_999] = "{", place.task("t1"), place.task("x", unknown=1)
    place.write(*tasks)
    done = place.run()
    assert done.returncode == 2
    for line in (18, 4_001, 10_000):
        assert f"{place.tasks}:{line}: " in done.stderr
    assert "3 tasks" in done.stderr
    assert not place.out.exists()
    place.write("{")
    assert json.loads(place.run("--json").stdout)["exit_code"] == 2


def test_a_batch_with_a_failed_task_exits_with_1_and_says_why(place: Place) -> None:
    place.write(place.task("a"), place.task("used-up", limits={"turns": 1}))
    done = place.run()
    assert done.returncode == 1
    assert "1  task-failed" in done.stderr
    assert "(used-up)" in done.stderr


def test_a_batch_begins_no_more_tasks_when_it_has_cost_too_much(place: Place) -> None:
    place.script("dear", {"text": "Done.", "usage": {"input_tokens": 9, "cost_usd": 0.75}})
    place.write(*(place.task(name, "dear") for name in ("a", "b", "c", "d")), place.task("e", "good"))
    ended = place.run("--max-cost", "1")
    assert ended.returncode == 1
    assert "the tasks have cost $1.50, of $1.00" in ended.stderr
    assert "with a higher --max-cost runs the rest" in ended.stderr
    assert place.attempts() == {"a": 1, "b": 1, "c": 0, "d": 0, "e": 0}
    assert place.status()["cost_usd"] == 1.5
    assert [task["cost_usd"] for task in place.status()["tasks"]] == [0.75, 0.75, None, None, None]
    assert place.run("--max-cost", "100").returncode == 0
    place.write(place.task("x", "good"), place.task("y", "dear"))
    other = place.directory / "other"
    ended = ringfence_text("batch", "run", place.tasks, "--out", other, "--jobs", "1", "--max-cost", "1")
    assert "nobody knows what x has cost" in ended.stderr
    place.write(place.task("z", "dear", limits={"cost_usd": 0.5}))
    ended = ringfence_text("batch", "run", place.tasks, "--out", place.directory / "third")
    assert "task-failed: the budget is used up" in ended.stderr


def test_a_source_that_is_damaged_later_says_nothing_of_the_task(place: Place) -> None:
    with zipfile.ZipFile(place.directory / "repo.zip", "w") as zipped:
        zipped.writestr("a.txt", "one\n")
    place.write(place.task("a", workspace="repo.zip"))
    Batch(read_tasks(place.tasks), out=place.out)
    (place.directory / "repo.zip").write_text("no archive")
    wrong = place.run()
    assert (wrong.returncode, "repo.zip cannot be used" in wrong.stderr) == (2, True)
    resumed = ringfence_text("batch", "resume", place.out, "--jobs", "1", "--retries", "0")
    assert resumed.returncode == 4
    assert "1  infra-failed" in resumed.stderr
    assert "repo.zip cannot be copied" in resumed.stderr


def test_a_directory_that_is_no_batch_or_one_of_other_tasks_is_refused(place: Place) -> None:
    place.write(place.task("a"))
    Batch(read_tasks(place.tasks), out=place.out)
    place.write(place.task("a", task="Something else."))
    done = place.run()
    assert done.returncode == 2
    assert "other tasks" in done.stderr
    for words in (["status"], ["resume"], ["cancel"], ["requeue", "--outcome", "done"]):
        refused = ringfence_text("batch", words[0], place.directory / "repo", *words[1:])
        assert refused.returncode == 2
        assert "is no batch" in refused.stderr
    assert sorted(path.name for path in (place.directory / "repo").iterdir()) == ["a.txt"]


def test_what_has_a_result_runs_again_only_when_it_is_queued_again(place: Place) -> None:
    place.write(place.task("a"), place.task("b", "short"))
    assert place.run().returncode == 3
    assert place.run().returncode == 3  # nothing is left to run
    assert place.attempts() == {"a": 1, "b": 1}
    place.script("short", {"text": "Done."})
    assert ringfence("batch", "requeue", place.out).returncode == 2
    unknown = ringfence_text("batch", "requeue", place.out, "a", "nobody")
    assert (unknown.returncode, "nobody" in unknown.stderr) == (2, True)
    assert place.status()["without_result"] == 0
    queued = ringfence("batch", "requeue", place.out, "--outcome", "infra-failed", "--json")
    assert json.loads(queued.stdout) == {"requeued": ["b"], "damaged": []}
    assert (place.status()["without_result"], place.status()["is_running"]) == (1, False)
    assert ringfence("batch", "resume", place.out, "--jobs", "1").returncode == 0
    assert (place.out / "tasks/b/1/result.json").exists()  # the earlier result is kept
    assert place.attempts() == {"a": 1, "b": 1}


def test_a_cancelled_task_that_runs_is_ended_and_the_rest_goes_on(place: Place) -> None:
    place.write(place.slow("slow"), place.task("z"))
    with place.start("--jobs", "1") as driver:
        wait_until((place.out / "tasks/slow/1/attempts/1").exists)
        assert place.status()["is_running"]
        busy = place.run()
        assert (busy.returncode, "another process" in busy.stderr) == (2, True)
        status = place.status()
        assert (status["running"], status["without_result"]) == (["slow"], 2)
        cancelled = ringfence("batch", "cancel", place.out, "slow", "--json")
        assert json.loads(cancelled.stdout) == {"cancelled": ["slow"], "damaged": []}
        assert driver.wait(30) == 1
    assert place.status()["outcomes"] == {"done": 1, "cancelled": 1}


def test_damaged_files_are_named_the_rest_goes_on_and_the_exit_code_is_2(place: Place) -> None:
    place.write(*(place.task(name) for name in ("bad-result", "bad-task", "cancelled", "open")))
    ledger = Batch(read_tasks(place.tasks), out=place.out).ledger
    for name in ("bad-result", "bad-task", "cancelled"):
        assert ledger.cancel(name)
    result, task = place.out / "tasks/bad-result/1/result.json", place.out / "tasks/bad-task/task.json"
    result.write_text('{"id": "bad-res')
    task.unlink()

    def command(*words: object) -> str:
        done = ringfence_text("batch", words[0], place.out, *words[1:])
        assert done.returncode == 2
        assert [str(path) in done.stdout + done.stderr for path in (result, task)] == [True, True]
        return done.stderr

    command("resume", "--jobs", "1")
    command("status")
    assert place.status()["outcomes"] == {"done": 1, "cancelled": 1, "damaged": 2}
    assert "requeued 1 task" in command("requeue", "--outcome", "cancelled")
    assert "cancelled 1 task" in command("cancel")
    assert ringfence("batch", "requeue", place.out, "bad-result").returncode == 0
    place.run()  # which writes the missing file
    assert place.status()["outcomes"] == {"done": 2, "cancelled": 2}


def test_a_batch_that_is_told_to_end_exits_with_130_and_goes_on_where_it_was(place: Place) -> None:
    place.write(place.task("a"), place.slow("slow"), place.task("z"))
    with place.start("--jobs", "1") as driver:
        wait_until((place.out / "tasks/a/1/result.json").exists)
        wait_until((place.out / "tasks/slow/1/attempts/1").exists)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(30) == 130
    assert place.status()["outcomes"] == {"done": 1}
    assert json.loads((place.out / "summary.json").read_text())["without_result"] == 2
    (place.directory / "nap.py").write_text(SLEEP.format(seconds=0))
    assert ringfence("batch", "resume", place.out, "--jobs", "1").returncode == 0
    assert place.attempts() == {"a": 1, "slow": 2, "z": 1}


def test_a_terminal_shows_how_far_a_batch_is_until_ctrl_c(place: Place) -> None:
    (place.directory / "no\x1b[31mcode.py").write_text("section = None")
    place.write(place.task("a"), place.task("b", sections=["no\x1b[31mcode.py:section"]), place.slow("slow"))
    words = ["batch", "run", str(place.tasks), "--out", str(place.out), "--jobs", "1", "--retries", "0"]
    with Terminal([sys.executable, "-m", "ringfence_cli", *words]) as terminal:
        terminal.wait_for("2 of 3 have a result, 1 done, 1 infra-failed; 1 running")
        terminal.wait_for("1  infra-failed:")
        terminal.type("\x03")
        terminal.wait_for("no result")
        terminal.wait_for(f"`ringfence batch resume {place.out}` goes on")
        assert terminal.end() == 130
    assert "\x1b[31mcode" not in terminal.raw
    assert "\\x1b[31mcode" in terminal.raw


def test_an_engine_that_is_not_installed_is_named_before_anything_is_begun(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ringfence_batch.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    place.write(place.task("a"))
    done = place.run("--engine", "ray")
    assert (done.returncode, "'ray'" in done.stderr, place.out.exists()) == (2, True, False)
