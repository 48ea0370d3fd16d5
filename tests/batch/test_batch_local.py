"""A batch on this machine: results, retries, deadlines, and processes that are really killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batches import READ, TURNS, outcomes, scratch, script, sleepy, task, wait_until, workers_of
from captured_tree import capture_tree
from effort import SEED, amount

from ringfence_batch import Batch, BatchTask, LedgerError, Progress, TaskLimits


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo/src").mkdir(parents=True)
    (tmp_path / "repo/a.txt").write_text("one\n")
    (tmp_path / "repo/src/b.py").write_text("print(1)\n")
    return tmp_path / "repo"


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_each_task_works_on_a_copy_and_leaves_its_result(repo: Path, tmp_path: Path, kind: Any) -> None:
    before = capture_tree(repo)
    batch = Batch([task(repo, "a", kind=kind), task(repo, "b", kind=kind)], out=tmp_path / "out")
    progress = batch.run(jobs=2)
    assert progress.outcomes == {"done": 2}
    assert outcomes(batch) == {"a": "done", "b": "done"}
    assert capture_tree(repo) == before
    attempt = batch.ledger.directory("a") / "attempts/1"
    assert "+two" in (attempt / "patch.diff").read_text()
    receipts = [json.loads(line) for line in (attempt / "receipts.jsonl").read_text().splitlines()]
    assert [receipt["tool"] for receipt in receipts] == ["read_file", "edit_file"]
    assert b"edit_file" in (attempt / "report.html").read_bytes()
    assert not scratch(batch)


def test_no_module_of_the_current_directory_runs_in_the_process_of_a_task(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("json", "ringfence", "ringfence_batch"):
        (tmp_path / f"here/{name}.py").write_text("raise SystemExit('a module of the current directory ran')\n")
    monkeypatch.chdir(tmp_path / "here")
    assert Batch([task(repo, "a")], out=tmp_path / "out").run(jobs=1).outcomes == {"done": 1}


def test_archives_urls_and_revisions_are_sources(repo: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "repo.tar.gz", "w:gz") as archive:
        archive.add(repo, "repo-1.0")
    git = ["git", "-C", str(repo), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    submodule = f"160000,{'1' * 40},sub/module"
    for words in (["init", "-q"], ["add", "-A"], ["update-index", "--add", "--cacheinfo", submodule]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    (repo / "a.txt").write_text("later\n")
    model = script(repo, "model", *TURNS)
    tasks = [
        BatchTask("archive", str(tmp_path / "repo.tar.gz"), "Mend it.", model),
        BatchTask("url", f"file://{tmp_path / 'repo.tar.gz'}", "Mend it.", model),
        BatchTask("revision", str(repo), "Mend it.", model, revision="HEAD"),
        BatchTask("missing", str(tmp_path / "nowhere"), "Mend it.", model),
        BatchTask("no-revision", str(repo), "Mend it.", model, revision="v9"),
    ]
    batch = Batch(tasks, out=tmp_path / "out", retries=0)
    batch.run(jobs=1)
    expected = dict.fromkeys(("archive", "url", "revision"), "done") | dict.fromkeys(
        ("missing", "no-revision"), "infra-failed"
    )
    assert outcomes(batch) == expected
    missing = batch.ledger.result("missing")
    assert missing is not None
    assert str(tmp_path / "nowhere") in missing.cause
    revision = batch.ledger.result("revision")
    assert revision is not None
    assert {one["path"] for one in revision.details["left_out"]} == {".git", "sub/module"}
    page = (batch.ledger.directory("revision") / "attempts/1/report.html").read_text()
    assert "a submodule" in page


def test_outcomes_tell_a_failed_task_from_failed_infrastructure(repo: Path, tmp_path: Path) -> None:
    tasks = [
        task(repo, "done"),
        task(repo, "used-up", {"tool_calls": [READ]}, {"text": "Done."}, limits=TaskLimits(turns=1)),
        task(repo, "provider", {"tool_calls": [READ]}),  # the script ends: the provider fails
        task(repo, "wrong", policies=("nonsense",)),
    ]
    batch = Batch(tasks, out=tmp_path / "out", retries=1)
    progress = batch.run(jobs=2)
    assert outcomes(batch) == {
        "done": "done",
        "used-up": "task-failed",
        "provider": "infra-failed",
        "wrong": "infra-failed",
    }
    assert batch.ledger.attempts("provider") == 2  # tried again once
    assert progress.retries == 2


def test_what_has_a_result_never_runs_again(repo: Path, tmp_path: Path) -> None:
    batch = Batch([task(repo, "a")], out=tmp_path / "out")
    batch.run(jobs=1)
    again = Batch.open(tmp_path / "out")
    assert again.run(jobs=1).ended == 1
    assert again.ledger.attempts("a") == 1
    assert again.ledger.requeue("a")
    again.run(jobs=1)
    assert outcomes(again) == {"a": "done"}


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_hide_adds_to_the_files_that_are_always_hidden(repo: Path, tmp_path: Path, kind: Any) -> None:
    (repo / ".env").write_text("TOKEN=a-secret-value\n")
    (repo / "b.cfg").write_text("another-secret\n")
    reads = [{"name": "read_file", "arguments": {"file_path": path}} for path in (".env", "b.cfg")]
    batch = Batch(
        [task(repo, "a", {"tool_calls": reads}, {"text": "Done."}, kind=kind, hide=("*.cfg",))], out=tmp_path / "out"
    )
    batch.run(jobs=1)
    attempt = batch.ledger.directory("a") / "attempts/1"
    receipts = [json.loads(line) for line in (attempt / "receipts.jsonl").read_text().splitlines()]
    assert [receipt["outcome"] == "committed" for receipt in receipts] == [False, False]
    assert b"another-secret" not in (attempt / "report.html").read_bytes()


def test_a_task_that_never_ends_is_ended_after_its_deadline(repo: Path, tmp_path: Path) -> None:
    batch = Batch([sleepy(repo, "endless", 600), task(repo, "quick")], out=tmp_path / "out")
    batch.run(jobs=2, task_deadline=2, grace_seconds=1)
    assert outcomes(batch) == {"endless": "task-failed", "quick": "done"}
    assert not scratch(batch)


DRIVER = """
import sys
from ringfence_batch import Batch
Batch.open(sys.argv[1], retries=50).run(jobs=3)
"""


def test_kills_at_random_leave_one_result_a_task_and_nothing_else(repo: Path, tmp_path: Path) -> None:
    chance, count = random.Random(SEED), amount(test=20, prove=10_000)
    before = capture_tree(repo)
    tasks = [sleepy(repo, f"task-{number}", 0.05) for number in range(count)]
    batch = Batch(tasks, out=tmp_path / "out")
    published = dict[str, float]()
    while any(outcome is None for outcome in outcomes(batch).values()):
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(batch.ledger.out)], stdout=subprocess.DEVNULL)
        for _ in range(chance.randrange(1, 4) * amount(test=1, prove=20)):
            time.sleep(chance.uniform(0.1, 0.9))
            kill_a_worker(driver.pid, chance)
        time.sleep(chance.uniform(0.1, 0.5))
        if chance.random() < 0.7:
            driver.kill()
        driver.wait()
        for task_id in batch.ledger.ids():
            place = batch.ledger.directory(task_id) / "result.json"
            if place.exists():  # a result is never written again
                assert published.setdefault(task_id, place.stat().st_mtime_ns) == place.stat().st_mtime_ns
    assert set(outcomes(batch).values()) == {"done"}
    wait_until(lambda: not workers_of(batch.ledger.out))
    batch.run(jobs=1)  # which removes what the killed ones left
    assert not scratch(batch)
    assert capture_tree(repo) == before


def kill_a_worker(driver: int, chance: random.Random) -> None:
    children = Path(f"/proc/{driver}/task/{driver}/children").read_text().split()
    if children:
        with suppress(ProcessLookupError):
            os.kill(int(chance.choice(children)), signal.SIGKILL)


def test_a_second_driver_is_refused(repo: Path, tmp_path: Path) -> None:
    batch = Batch([sleepy(repo, "slow", 1.5)], out=tmp_path / "out")
    began = threading.Event()

    def show(progress: Progress) -> None:
        began.set()

    thread = threading.Thread(target=lambda: batch.run(jobs=1, show=show))
    thread.start()
    assert began.wait(20)
    with pytest.raises(LedgerError, match="another process"):
        Batch.open(tmp_path / "out").run(jobs=1)
    thread.join()
    assert outcomes(batch) == {"slow": "done"}


def test_a_damaged_archive_is_no_failed_task_and_a_file_url_is_a_copy_of_links(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "half.tgz").write_bytes(b"\x1f\x8b\x08\x00\x00")
    (tmp_path / "half.zip").write_bytes(b"PK\x05\x06")
    (tmp_path / "outside").write_text("outside\n")
    (repo / "out").symlink_to(tmp_path / "outside")
    link = {"name": "read_file", "arguments": {"file_path": "out"}}
    tasks = [
        *(replace(task(repo, f"half{end}"), workspace=str(tmp_path / f"half{end}")) for end in (".tgz", ".zip")),
        replace(task(repo, "url", {"tool_calls": [link]}, {"text": "Done."}), workspace=repo.as_uri()),
    ]
    batch = Batch(tasks, out=tmp_path / "results", retries=0)
    batch.run(jobs=1)
    assert outcomes(batch) == {"half.tgz": "infra-failed", "half.zip": "infra-failed", "url": "done"}
    assert "outside\\n" not in (batch.ledger.directory("url") / "attempts/1/receipts.jsonl").read_text()
