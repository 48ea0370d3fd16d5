"""LangChain's suite for sandboxes of deep agents, over a workspace of ringfence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deepagents.backends.protocol import SandboxBackendProtocol
from langchain_tests.integration_tests import SandboxIntegrationTests

from ringfence.prompt import PathPolicy
from ringfence_doors.deepagents import RingfenceSandbox
from ringfence_sandbox import Workspace

ABSOLUTE = "deepagents says since 0.7 that a glob finds files alone, by absolute paths, which its rules need"
REFUSED = {
    ("TestSandbox", "test_write_existing_file_fails"): "deepagents says since 0.7 that a write overwrites",
    ("TestSandbox", "test_glob"): ABSOLUTE,
    ("TestSandbox", "test_glob_basic_pattern"): ABSOLUTE,
    ("TestSandbox", "test_glob_with_directories"): ABSOLUTE,
    ("TestSandbox", "test_glob_hidden_files_explicitly"): ABSOLUTE,
    ("TestSandbox", "test_glob_with_character_class"): ABSOLUTE,
    ("TestSandbox", "test_glob_with_question_mark"): ABSOLUTE,
}


class TestSandbox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def opened(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
        top = tmp_path_factory.mktemp("deepagents")
        (top / "root").mkdir()
        with Workspace.open(top / "root", store=top / "store") as opened:
            type(self).top = opened.root
            yield opened

    top = ""

    @property
    def sandbox_root_dir(self) -> str:
        return f"{type(self).top}/tests/"

    @pytest.fixture(scope="class")
    def sandbox(self, opened: Workspace) -> SandboxBackendProtocol:
        return RingfenceSandbox(opened)

    @pytest.fixture(autouse=True)
    def sandbox_test_root(self, sandbox: SandboxBackendProtocol, request: pytest.FixtureRequest) -> str:
        return self.sandbox_path(request.node.name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    (made / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    return made


@pytest.fixture
def workspace(root: Path, tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=tmp_path / "store") as opened:
        yield opened


def files(root: Path) -> dict[str, bytes | None]:
    found = sorted(path for path in root.rglob("*") if ".ringfence" not in str(path.relative_to(root)))
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in found}


def test_a_failed_command_leaves_no_trace_where_that_is_asked_for(root: Path, workspace: Workspace) -> None:
    before = files(root)
    result = RingfenceSandbox(workspace, rollback_on_error=True).execute("echo out; mkdir d; mv a.txt d; exit 3")
    assert files(root) == before
    assert result.exit_code == 3
    assert "rolled back: a.txt, d, d/a.txt" in result.output


def test_each_call_is_a_step_and_can_be_undone(root: Path, workspace: Workspace) -> None:
    before, sandbox = files(root), RingfenceSandbox(workspace)
    assert sandbox.write(f"{root}/d/b.txt", "b").error is None
    assert sandbox.edit(f"{root}/a.txt", "one\ntwo", "1\n2").occurrences == 1
    assert (root / "a.txt").read_bytes() == b"1\r\n2\r\n"
    assert [one.error for one in sandbox.upload_files([(f"{root}/x", b"x"), (f"{root}/y", b"y")])] == [None, None]
    assert sandbox.delete(f"{root}/d").error is None
    assert sandbox.execute("echo > z; exit 1").exit_code == 1
    assert [step.tool for step in workspace.steps()] == ["write_file", "edit_file", "upload", "rm", "run"]
    sandbox.undo(5)
    assert files(root) == before


def test_reading_and_searching_make_no_step(root: Path, workspace: Workspace) -> None:
    sandbox = RingfenceSandbox(workspace)
    assert sandbox.read(f"{root}/a.txt").file_data["content"] == "one\ntwo"
    assert sandbox.grep("two", f"{root}").matches == [{"path": f"{root}/a.txt", "line": 2, "text": "two"}]
    assert [one["path"] for one in sandbox.glob("*.txt", f"{root}").matches] == [f"{root}/a.txt"]
    assert sandbox.edit(f"{root}/a.txt", "three", "3").error is not None
    assert workspace.steps() == []


def test_what_a_policy_denies_or_lies_outside_is_an_error_and_leaves_nothing(root: Path, workspace: Workspace) -> None:
    before, sandbox = files(root), RingfenceSandbox(workspace, policies=[PathPolicy(deny=["secrets"])])
    assert "secrets must not be created" in sandbox.execute("mkdir secrets").output
    assert "secrets must not be created" in sandbox.write(f"{root}/secrets/key", "k").error
    assert "permission_denied" in sandbox.write(f"{root.parent}/b.txt", "b").error
    assert "outside" not in sandbox.read("/etc/passwd").error
    assert files(root) == before
    assert not (root.parent / "b.txt").exists()


def test_two_sandboxes_on_one_directory_take_turns(root: Path, workspace: Workspace) -> None:
    codes: list[int | None] = []

    def run(name: str) -> None:
        command = f"test ! -e busy && touch busy && echo {name} > {name} && rm busy"
        codes.append(RingfenceSandbox(workspace).execute(command).exit_code)

    threads = [threading.Thread(target=run, args=(name,)) for name in "bc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0]
    assert sorted(step.paths for step in workspace.steps()) == [("b",), ("c",)]


async def test_a_cancelled_command_is_rolled_back(root: Path, workspace: Workspace) -> None:
    before = files(root)
    running = asyncio.ensure_future(RingfenceSandbox(workspace).aexecute("echo > b; sleep 60"))
    while not (root / "b").exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert files(root) == before


def test_the_programs_of_the_page_run(run_page: Callable[[str], int]) -> None:
    assert run_page("deepagents") == 1
