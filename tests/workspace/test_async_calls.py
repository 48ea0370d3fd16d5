"""Commands, transactions and looks from asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest
from captured_tree import shape

from ringfence.prompt import PathPolicy
from ringfence_sandbox import Workspace

pytestmark = pytest.mark.anyio


async def test_a_command_runs_beside_the_loop(root: Path, workspace: Workspace) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    done = await workspace.arun("sleep 0.2; echo out; touch new", shell=True)
    ticking.cancel()
    assert ticks > 1
    assert (done.stdout, done.outcome) == ("out\n", "committed")
    assert (root / "new").exists()


async def test_a_cancelled_task_has_ended_its_command_and_rolled_it_back(root: Path, workspace: Workspace) -> None:
    before = shape(root)
    script = "(setsid sh -c 'while :; do date +%N > beat; sleep 0.02; done' &) ; sleep 60"
    running = asyncio.create_task(workspace.arun(script, shell=True))
    while not (root / "beat").exists() and not running.done():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert shape(root) == before
    time.sleep(0.1)
    assert shape(root) == before


async def test_a_transaction_holds_over_an_async_block(root: Path, workspace: Workspace) -> None:
    async with workspace.atransaction("import data") as block:
        subprocess.run(["touch", "new"], cwd=root, check=True)
        workspace.filesystem.write("typed", "x")
        await asyncio.sleep(0)
        inner = await workspace.arun(["touch", "inner"])
    assert inner.step is None
    assert block.step is not None
    assert block.step.paths == ("inner", "new", "typed")
    before = shape(root)
    with pytest.raises(ZeroDivisionError):
        async with workspace.atransaction("fails"):
            (root / "new").unlink()
            _ = 1 / 0
    assert shape(root) == before
    async with workspace.atransaction("taken back") as block:
        (root / "new").unlink()
        block.rollback()
    assert shape(root) == before
    assert workspace.run(["true"]).kept


async def test_a_cancellation_in_a_transaction_rolls_it_back(root: Path, workspace: Workspace) -> None:
    before, inside = shape(root), asyncio.Event()

    async def work() -> None:
        async with workspace.atransaction("slow"):
            (root / "new").touch()
            inside.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert shape(root) == before


async def test_a_look_is_adopted(root: Path, workspace: Workspace) -> None:
    mark = await workspace.abegin_look()
    (root / "new").touch()
    found = await workspace.aadopt(mark, tool="Bash", policies=[PathPolicy(deny=["new"])])
    assert found.outcome == "denied"
    assert not (root / "new").exists()
