"""Inspect's own checks of sandboxes, over a copy of a directory, and over one in a container."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    sandbox,
)
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from ringfence_doors.inspect_ai import RingfenceConfig, RingfenceSandboxEnvironment
from ringfence_sandbox import Workspace

OUTSIDE = "a file outside of the workspace is refused"
ROOT = "root may read and write every file"
USER = "a command cannot choose its user"
HERE = {
    "test_read_and_write_file_including_directory_absolute": OUTSIDE,
    "test_read_file_is_directory": OUTSIDE,
    "test_write_text_file_is_directory": OUTSIDE,
    "test_write_binary_file_is_directory": OUTSIDE,
    "test_cwd_custom": OUTSIDE,
    "test_cwd_absolute": OUTSIDE,
    "test_exec_as_user": USER,
}
IN_CONTAINER = {"test_exec_as_user": USER}
OF_ROOT = (
    "test_read_file_not_allowed",
    "test_write_text_file_without_permissions",
    "test_write_binary_file_without_permissions",
)
if os.geteuid() == 0:
    HERE |= dict.fromkeys(OF_ROOT, ROOT)
    IN_CONTAINER |= dict.fromkeys(OF_ROOT, ROOT)


@pytest.fixture(params=["here", "container"])
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    is_here = request.param == "here"
    if reason := (HERE if is_here else IN_CONTAINER).get(request.node.originalname):
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    made = await RingfenceSandboxEnvironment.sample_init("checks", RingfenceConfig(podman=not is_here), {})
    try:
        if not is_here:
            await made["default"].exec(["true"])
        yield made["default"]
    except SandboxUnavailableError as error:
        pytest.skip(f"there is no container here: {error}")
    finally:
        await RingfenceSandboxEnvironment.sample_cleanup("checks", None, made, False)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    made = tmp_path / "source"
    (made / "d").mkdir(parents=True)
    (made / "a.txt").write_text("one\n")
    return made


@pytest.fixture
async def opened(source: Path) -> AsyncIterator[RingfenceSandboxEnvironment]:
    config = RingfenceConfig(source=str(source), rollback_on_error=True, policies=("deny:/secrets",))
    made = await RingfenceSandboxEnvironment.sample_init("tests", config, {})
    yield made["default"]
    await RingfenceSandboxEnvironment.sample_cleanup("tests", None, made, False)


def files(root: str | Path) -> dict[str, tuple[int, float, bytes]]:
    found = (path for path in Path(root).rglob("*") if ".ringfence" not in str(path.relative_to(root)))
    return {
        str(path.relative_to(root)): (
            path.stat().st_mode,
            path.stat().st_mtime,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in found
    }


async def test_a_failed_command_leaves_no_trace_and_an_undo_reverses_the_others(
    opened: RingfenceSandboxEnvironment, source: Path
) -> None:
    root, own = opened.calls.root, files(source)
    before = files(root)
    failed = await opened.exec(["sh", "-c", "mv a.txt d; echo > b; chmod 700 d; echo out; exit 3"])
    assert (failed.success, failed.returncode, failed.stdout) == (False, 3, "out\n")
    assert "rolled back: a.txt, b, d, d/a.txt" in failed.stderr
    assert files(root) == before
    with pytest.raises(TimeoutError):
        await opened.exec(["sh", "-c", "echo > b; sleep 60"], timeout=1)
    assert files(root) == before
    await opened.exec(["sh", "-c", "cat > a.txt; rmdir d"], input="two\n")
    await opened.write_file("e/f.txt", "f")
    opened.undo(2)
    assert (await opened.read_file("a.txt"), (Path(root) / "d").is_dir()) == ("one\n", True)
    assert not (Path(root) / "e").exists()
    assert files(source) == own


async def test_what_a_policy_denies_or_lies_outside_is_refused(opened: RingfenceSandboxEnvironment) -> None:
    before = files(opened.calls.root)
    with pytest.raises(PermissionError, match="secrets must not be created"):
        await opened.exec(["mkdir", "secrets"])
    with pytest.raises(PermissionError, match="secrets must not be created"):
        await opened.write_file("secrets/key", "k")
    with pytest.raises(PermissionError, match="outside"):
        await opened.write_file("../b.txt", "b")
    assert files(opened.calls.root) == before


async def test_a_cancelled_command_is_rolled_back(opened: RingfenceSandboxEnvironment) -> None:
    before = files(opened.calls.root)
    running = asyncio.ensure_future(opened.exec(["sh", "-c", "echo > b; sleep 60"]))
    while not (Path(opened.calls.root) / "b").exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert files(opened.calls.root) == before


async def test_two_commands_at_once_take_turns(opened: RingfenceSandboxEnvironment) -> None:
    line = "test ! -e busy && touch busy && echo {0} > {0} && rm busy"
    done = await asyncio.gather(*(opened.exec(["sh", "-c", line.format(name)]) for name in "xy"))
    assert [one.returncode for one in done] == [0, 0]
    assert sorted(step.paths for step in opened.calls.workspace.steps()) == [("x",), ("y",)]


async def test_too_much_output_is_an_error(opened: RingfenceSandboxEnvironment) -> None:
    with pytest.raises(OutputLimitExceededError):
        await opened.exec(["sh", "-c", "head -c 11000000 /dev/zero | tr '\\0' a"])


@solver
def change() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().exec(["sh", "-c", f"echo {state.input_text} > a.txt"])
        await sandbox().exec(["sh", "-c", "rm a.txt; exit 1"])
        state.output.completion = await sandbox().read_file("a.txt")
        return state

    return solve


def evaluated(source: Path, **options: object) -> list[EvalSample]:
    config = RingfenceConfig(source=str(source), rollback_on_error=True, **options)
    task = Task([Sample("two"), Sample("three")], solver=change(), sandbox=SandboxEnvironmentSpec("ringfence", config))
    [log] = eval(task, model="mockllm/model", display="none")
    assert log.status == "success", log.error
    assert log.samples is not None
    return log.samples


def test_samples_have_copies_of_their_own_and_their_receipts_are_in_the_log(source: Path) -> None:
    own = files(source)
    samples = evaluated(source)
    assert [sample.output.completion for sample in samples] == ["two\n", "three\n"]
    for sample in samples:
        receipts = [event.data for event in sample.events if event.event == "info" and event.source == "ringfence"]
        assert [receipt["outcome"] for receipt in receipts] == ["committed", "failed"]
        assert [change["path"] for receipt in receipts for change in receipt["changes"]] == ["a.txt", "a.txt"]
    assert files(source) == own


def test_what_is_kept_can_be_undone_after_the_evaluation(source: Path, tmp_path: Path) -> None:
    evaluated(source, keep=str(tmp_path / "kept"))
    roots = [*(tmp_path / "kept").glob("*/workspace")]
    assert sorted((root / "a.txt").read_text() for root in roots) == ["three\n", "two\n"]
    for root in roots:
        with Workspace.open(root) as workspace:
            workspace.undo()
        assert (root / "a.txt").read_text() == "one\n"


def test_the_programs_of_the_page_run(
    run_page: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path / "logs"))
    assert run_page("inspect-ai") == 1
