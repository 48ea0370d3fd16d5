"""What a batch costs beside the same runs in one process, what its driver holds, and how it scales."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Literal

from measure import Row, Spread, report, scratch_directory

from ringfence.filesystem.hidden import HiddenFiles
from ringfence_batch import AttemptEnded, Batch, BatchTask, Engine, Ledger, TaskResult
from ringfence_batch.engine import AttemptRequest
from ringfence_batch.local import LocalEngine
from ringfence_batch.sources import copy_source
from ringfence_tools.runs.agent_run import AgentTask, run_agent
from ringfence_tools.runs.model_specs import model_of
from ringfence_tools.runs.run_workspace import DiskWorkspace, MemoryWorkspace

AREA = "batch"
FEW, MANY = 10, 110
"""The cost of a task is the difference of two batches, so that the start of workers is not in it."""
EDIT = {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "one", "new_string": "two"}}
READ = {"name": "read_file", "arguments": {"file_path": "a.txt"}}
CALLS = [{"tool_calls": [READ]}, {"tool_calls": [EDIT]}, {"tool_calls": [READ]}, {"text": "Done."}]
NAP = """
import time
from ringfence import MarkdownSection, Tool, ToolResult
def nap(params, *, context):
    before = time.process_time()
    while time.process_time() - before < 0.1:
        pass
    time.sleep(0.1)
    return ToolResult.ok(None, "slept")
tool = Tool[None, None](name="nap", description="Works and waits.", handler=nap, read_only=True)
section = MarkdownSection(title="Nap", key="nap", template="", tools=[tool])
"""
DRIVER = "import batch, sys; batch.drive(int(sys.argv[1]), sys.argv[2])"
Kind = Literal["memory", "disk"]


class Tasks:
    """Tasks on a small tree, in a directory of the benchmark."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "repo/src").mkdir(parents=True)
        (place / "repo/a.txt").write_text("one\n")
        for number in range(20):
            (place / f"repo/src/{number}.py").write_text(f"print({number})\n" * 40)
        (place / "nap.py").write_text(NAP)
        self.model = self._script("calls", CALLS)
        self.naps = self._script("nap", [{"tool_calls": [{"name": "nap", "arguments": {}}]}, {"text": "Done."}])
        self._outs = count()

    def _script(self, name: str, turns: Sequence[object]) -> str:
        path = self.place / f"{name}.jsonl"
        path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        return f"script:{path}"

    def batch(self, number: int, kind: Kind = "memory", *, naps: bool = False) -> Batch:
        model, sections = (self.naps, (f"{self.place / 'nap.py'}:section",)) if naps else (self.model, ())
        repo, out = str(self.place / "repo"), self.place / f"out-{next(self._outs)}"
        return Batch(
            [BatchTask(f"t{at}", repo, "Do it.", model, kind, sections=sections) for at in range(number)], out=out
        )


def cpu() -> float:
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def batch_cpu(tasks: Tasks, kind: Kind) -> float:
    spent: list[float] = []
    for number in (FEW, MANY):
        batch, before = tasks.batch(number, kind), cpu()
        assert batch.run(jobs=1).outcomes["done"] == number
        spent.append(cpu() - before)
    return (spent[1] - spent[0]) / (MANY - FEW)


def bare_cpu(tasks: Tasks, kind: Kind) -> float:
    """The same agents, workspaces and copies, without a batch around them."""
    spent: list[float] = []
    task = BatchTask("t", str(tasks.place / "repo"), "Do it.", tasks.model, kind)
    for number in (FEW, MANY):
        before = cpu()
        for _ in range(number):
            with tempfile.TemporaryDirectory(dir=tasks.place) as name, ExitStack() as stack:
                place = Path(name)
                copy_source(task, place / "tree")
                make = MemoryWorkspace if kind == "memory" else DiskWorkspace
                opened = make(place / "tree", store=place / "store", hide=HiddenFiles())
                workspace = stack.enter_context(closing(opened))
                adapter = model_of(task.model, workspace.directory, stack)
                run_agent(AgentTask(task.task, workspace, adapter, None, None, (), ()))
        spent.append(cpu() - before)
    return (spent[1] - spent[0]) / (MANY - FEW)


def overhead(tasks: Tasks, kind: Kind, most_ms: float) -> Row:
    ours, bare = batch_cpu(tasks, kind), bare_cpu(tasks, kind)
    target, met = f"<= {most_ms:g} ms more", ours - bare <= most_ms / 1e3
    return _row(f"CPU of a task of 3 calls, {kind}", "the same run in process", ours, bare, target, met, ours / bare)


class NoWork:
    """An engine whose attempts do nothing: what is left is the driver and the ledger."""

    slots = 2

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._begun: list[str] = []

    def start(self, request: AttemptRequest) -> None:
        self._begun.append(request.id)

    def poll(self, seconds: float) -> Sequence[AttemptEnded]:
        ended, self._begun = self._begun, []
        for task_id in ended:
            if attempt := self._ledger.claim(task_id):
                attempt.publish(TaskResult(task_id, "done", attempt=attempt.number))
        return [AttemptEnded(task_id, "done", is_published=True) for task_id in ended]

    def cancel(self, task_id: str) -> None: ...

    def close(self) -> None: ...


def drive(number: int, place: str) -> None:
    """In a process of its own: print the CPU of a task, and the most memory."""
    batch, before = Tasks(Path(place)).batch(number), cpu()
    assert batch.run(engine=NoWork(batch.ledger)).outcomes["done"] == number
    print((cpu() - before) / number, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def driver(place: Path) -> Iterator[Row]:
    found: list[list[float]] = []
    for number in (100, 10_000):
        (place / str(number)).mkdir()
        words = [sys.executable, "-c", DRIVER, str(number), str(place / str(number))]
        done = subprocess.run(words, cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE, text=True)
        found.append([float(word) for word in done.stdout.split()])
    (few, small), (many, large) = found
    yield _row("CPU of the driver a task, 10,000 tasks", "100 tasks", many, few, "<= 1.2x more", many <= few * 1.2)
    yield Row(
        AREA,
        "memory of the driver, 10,000 tasks",
        "100 tasks",
        large / small,
        "<= 200 MB",
        large <= 200e6,
        Spread(large, large, large),
        Spread(small, small, small),
        "B",
    )


def seconds(batch: Batch, engine: Engine) -> float:
    before = perf_counter()
    progress = batch.run(engine=engine)
    assert progress.outcomes["done"] == progress.total
    return perf_counter() - before


def scaling(tasks: Tasks) -> Row:
    took: list[float] = []
    for jobs in (2, 1):
        few, many = (tasks.batch(number, naps=True) for number in (FEW, MANY // 2))
        took.append(
            -seconds(few, LocalEngine(few.ledger.out, jobs)) + seconds(many, LocalEngine(many.ledger.out, jobs))
        )
    two, one = took
    what = "tasks that wait half of the time, 2 workers"
    return _row(what, "1 worker", two, one, ">= 1.6x", one / two >= 1.6, one / two)


def on_ray(tasks: Tasks) -> Row:
    """What an attempt costs that finds a result, so that nothing but Ray, a worker and a look at the ledger is left."""
    import ray

    from ringfence_batch.ray import RayEngine

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        nothing = ray.remote(lambda: None)
        with closing(RayEngine(tasks.batch(1).ledger.out, 1)) as engine:
            while not engine.slots:
                engine.poll(1)

            def attempt() -> None:
                engine.start(AttemptRequest("t0", is_last=True))
                while not engine.poll(1):
                    pass

            ours, bare = elapsed(attempt), elapsed(lambda: ray.get(nothing.remote()))
    finally:
        ray.shutdown()
    return _row("time of an attempt at a task that has a result, on Ray", "a task of Ray's own", ours, bare, "", None)


def elapsed(function: Callable[[], object]) -> float:
    """The median of many, after some that warm up what they use."""
    took: list[float] = []
    for _ in range(MANY):
        before = perf_counter()
        function()
        took.append(perf_counter() - before)
    return statistics.median(took[FEW:])


def _row(
    what: str, beside: str, ours: float, bare: float, target: str, met: bool | None, ratio: float | None = None
) -> Row:
    ratio = ours / bare if ratio is None else ratio
    return Row(AREA, what, beside, ratio, target, met, Spread(ours, ours, ours), Spread(bare, bare, bare))


def rows() -> Iterator[Row]:
    with scratch_directory() as place:
        tasks = Tasks(place / "tasks")
        yield overhead(tasks, "memory", 15)
        yield overhead(tasks, "disk", 40)
        yield from driver(place)
        yield scaling(tasks)
        try:
            yield on_ray(tasks)
        except ImportError:
            print("without the row about Ray, which is not installed", file=sys.stderr)


if __name__ == "__main__":
    report(rows())
