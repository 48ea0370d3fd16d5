"""A batch on a real Ray cluster of two nodes, whose workers, nodes and drivers are really killed."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from batches import outcomes, scratch, scratch_place, sleepy, task, wait_until, workers_of
from captured_tree import capture_tree
from effort import PROVING, SEED, amount
from podman_parts import connect, image_of

from ringfence_batch import Batch, BatchTask
from ringfence_batch.sources import unpack_source
from ringfence_sandbox import SandboxUnavailableError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray")
    from ray_clusters import RayCluster, ray_cluster

# A raylet that was killed is never waited for by Ray's own tools.
pytestmark = [
    pytest.mark.prove,  # a cluster takes 10 s to start on two cores that do nothing else
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

DRIVER = """
import faulthandler, ray, signal, sys
from ringfence_batch import Batch
from ringfence_batch.ray import RayEngine
faulthandler.register(signal.SIGUSR1)
batch = Batch.open(sys.argv[1], retries=int(sys.argv[3]))
engine = RayEngine(batch.ledger.out, address=sys.argv[2])
with open(sys.argv[1] + "-node", "w") as file:
    file.write(ray.get_runtime_context().get_node_id())
last = ""
def show(progress):
    global last
    numbers = f"{progress.ended} ended, {progress.retries} retries, {engine.slots} slots"
    line = f"{numbers}, running: {' '.join(progress.running)} {progress.paused}"
    if line != last:
        last = line
        print(line, file=sys.stderr, flush=True)
batch.run(engine=engine, show=show)
"""

OTHER = """
import sys
from pathlib import Path
from ringfence_batch import Batch
from ringfence_batch.ray import RayEngine
batch = Batch.open(sys.argv[1])
engine = RayEngine(batch.ledger.out, address=sys.argv[2])
next(Path(sys.argv[1]).glob(".driver-*")).rename({elsewhere!r})  # as if the nodes had another directory
batch.run(engine=engine)
"""
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/batch/on_ray.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "repo/empty").mkdir(parents=True)
    (tmp_path / "repo/a.txt").write_text("one\n")
    (tmp_path / "repo/link").symlink_to("/etc/hostname")
    (tmp_path / "repo/run.sh").touch(0o775)
    return tmp_path / "repo"


def contents(place: Path) -> dict[str, tuple[str, int, object]]:
    return {name: (path.kind, path.mode, path.content) for name, path in capture_tree(place).items()}


def has_podman() -> bool:
    try:
        with connect() as podman:
            return image_of(podman) is not None
    except SandboxUnavailableError:
        return False


def containers(batch: Batch) -> list[str]:
    """Return what containers the tasks of a batch have."""
    if not has_podman():
        return []
    with connect() as podman:
        labels = [str(container.labels) for container in podman.client.containers.list(all=True)]
    return [label for label in labels if str(scratch_place(batch)) in label]


class Driver:
    """A process that runs a batch on a cluster. It can be killed and replaced, and ends with the block."""

    def __init__(self, batch: Batch, cluster: RayCluster, *, retries: int = 50) -> None:
        self._batch, self._cluster = batch, cluster
        self._words = [sys.executable, "-c", DRIVER, batch.ledger.out, cluster.address, str(retries)]
        self.log = Path(f"{batch.ledger.out}-driver.log")
        self._process = self._begun()

    def _begun(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._words, stderr=log, start_new_session=True)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def replace(self) -> None:
        self.__exit__()
        self._process = self._begun()

    def wait_until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        """Wait, and say why nothing goes on where it does not."""
        try:
            wait_until(lambda: bool(condition()) or self._process.poll() not in (None, 0), seconds)
            assert condition()
        except AssertionError as error:
            error.add_note(self._state())
            raise

    def wait(self) -> None:
        self.wait_until(lambda: self._process.poll() == 0)

    def _state(self) -> str:
        """Describe the driver and the ledger."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)  # the stacks of its threads go into its log
            time.sleep(1)
        lines = [f"the driver's exit code is {self._process.poll()}", *self.log.read_text().splitlines()[-100:]]
        for task_id, result in self._batch.ledger.results():
            if result is None:
                attempts = (self._batch.ledger.directory(task_id) / "attempts").iterdir()
                lines.append(f"{task_id}: attempts {[(path.name, os.listdir(path)) for path in attempts]}")
        lines.append(f"workers {workers_of(self._batch.ledger.out)}, actors {self._cluster.actors()}")
        if (workers := self._batch.ledger.out / "workers.log").exists():
            lines += workers.read_text().splitlines()[-30:]
        return "\n".join(lines)


def test_a_pack_of_the_workspace_is_what_workers_copy(repo: Path, tmp_path: Path, cluster: RayCluster) -> None:
    gone = BatchTask("gone", str(tmp_path / "nowhere"), "Mend it.", "openai:m")
    batch = Batch([task(repo, "one"), task(repo, "two", kind="disk"), gone], out=tmp_path / "out")
    with Driver(batch, cluster) as driver:
        driver.wait()
    assert outcomes(batch) == {"one": "done", "two": "done", "gone": "task-failed"}
    (pack,) = (tmp_path / "out/sources").iterdir()
    unpack_source(pack, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(repo)
    assert not workers_of(batch.ledger.out)
    assert not scratch(batch)


def attempts_of_the_ended(batch: Batch, seen: dict[str, int]) -> int:
    """Note how many attempts each task has that has a result. No result may come with another attempt later."""
    for task_id in batch.ledger.ids():
        directory = batch.ledger.directory(task_id)
        if (directory / "result.json").exists():
            result = batch.ledger.result(task_id)
            assert result is not None
            count = batch.ledger.attempts(task_id)
            assert seen.setdefault(task_id, count) == count
            assert (directory / "result.json").samefile(directory / f"attempts/{result.attempt}/result.json")
    return len(seen)


def test_kills_at_random_on_a_cluster_leave_one_result_a_task_and_nothing_else(
    repo: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    chance, count = random.Random(SEED), amount(test=60, prove=1000)
    before = capture_tree(repo)
    kinds = ["podman" if PROVING and has_podman() else "memory", *["memory"] * 9]
    tasks = [
        replace(sleepy(repo, f"task-{number}", 0.05 if PROVING else 0.5), kind=kinds[number % 10])
        for number in range(count)
    ]
    batch = Batch(tasks, out=tmp_path / "out")
    seen, hit = dict[str, int](), Counter[str]()
    kills = ["node", "driver", "actor", "actor", "worker", "worker"] * amount(test=1, prove=8)
    chance.shuffle(kills)
    with Driver(batch, cluster) as driver:
        for number, kind in enumerate(kills, 1):
            goal = number * count // (len(kills) + 2)  # not from here on: tasks end while a node is added, too
            driver.wait_until(lambda: attempts_of_the_ended(batch, seen) >= goal)  # noqa: B023
            if attempts_of_the_ended(batch, seen) == count:
                break
            hit[kind] += 1
            if kind == "driver":
                driver.replace()
            elif kind == "node":
                # A driver dies with its own node: that is another kind of kill.
                own = Path(f"{batch.ledger.out}-node").read_text()
                cluster.kill_node(chance.choice([node for node in cluster.nodes if node.node_id != own]))
                cluster.nodes.append(cluster.add_node())
            else:
                victims = partial(workers_of, batch.ledger.out) if kind == "worker" else cluster.actors
                driver.wait_until(lambda: victims() or attempts_of_the_ended(batch, seen) == count)  # noqa: B023
                try:
                    os.kill(chance.choice(victims()), signal.SIGKILL)
                except (IndexError, ProcessLookupError):  # it has just ended by itself
                    hit[kind] -= 1
        driver.wait()
    logging.getLogger(__name__).info("kills: %s", dict(hit))
    assert attempts_of_the_ended(batch, seen) == count
    assert set(outcomes(batch).values()) == {"done"}
    wait_until(lambda: not workers_of(batch.ledger.out))
    assert not scratch(batch)
    assert not containers(batch)
    assert capture_tree(repo) == before


def test_actors_that_died_while_they_were_idle_are_given_no_task(
    repo: Path, tmp_path: Path, cluster: RayCluster
) -> None:
    batch = Batch([sleepy(repo, "slow", 3)], out=tmp_path / "out")
    with Driver(batch, cluster, retries=1) as driver:
        driver.wait_until(lambda: "4 slots, running: slow" in driver.log.read_text())
        for pid in cluster.actors():
            os.kill(pid, signal.SIGKILL)
        driver.wait()
    assert outcomes(batch) == {"slow": "done"}


def test_the_command_line_ends_a_batch_on_a_cluster_at_sigterm(repo: Path, tmp_path: Path, cluster: RayCluster) -> None:
    batch = Batch([task(repo, "a"), sleepy(repo, "slow", 60)], out=tmp_path / "out")
    words = ["batch", "resume", str(batch.ledger.out), "--engine", "ray", "--jobs", "1", "--quiet"]
    own = os.environ | {"RAY_ADDRESS": cluster.address}
    with subprocess.Popen([sys.executable, "-m", "ringfence_cli", *words], env=own) as driver:
        wait_until((batch.ledger.directory("slow") / "attempts/1").exists, 120)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 130  # not the handler that Ray puts there
    assert outcomes(batch) == {"a": "done", "slow": None}


def test_the_example_runs(repo: Path, tmp_path: Path, cluster: RayCluster) -> None:
    record = task(repo, "one").to_json()
    (tmp_path / "tasks.jsonl").write_text(json.dumps({name: value for name, value in record.items() if value}) + "\n")
    words = [EXAMPLE, tmp_path / "tasks.jsonl", "--out", tmp_path / "out", "--address", cluster.address]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 tasks have ended" in done.stderr


def test_a_node_that_does_not_share_the_directory_is_refused(repo: Path, tmp_path: Path, cluster: RayCluster) -> None:
    batch = Batch([task(repo, "one")], out=tmp_path / "out")
    driver = OTHER.format(elsewhere=str(tmp_path / "elsewhere"))
    words = [sys.executable, "-c", driver, batch.ledger.out, cluster.address]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert "put OUT on a filesystem that all nodes share" in done.stderr
    assert outcomes(batch) == {"one": None}
