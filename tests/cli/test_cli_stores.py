"""`ringfence stores`, and what drops a history or an interrupted run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agent_runs import owner_file, record_of
from command_line import ringfence, ringfence_text

from ringfence_sandbox import Workspace, store_directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("one\n")
    return root


def begin_history(root: Path) -> None:
    with Workspace.open(root):
        pass


def listed() -> dict[str, bool]:
    """Return whether the directory is gone, by the directory of each history."""
    ended = ringfence("stores", "--json")
    return {store["root"]: store["root_is_gone"] for store in json.loads(ended.stdout)["stores"]}


def test_histories_are_listed_with_their_directories(root: Path, tmp_path: Path) -> None:
    begin_history(root)
    (gone := tmp_path / "gone").mkdir()
    begin_history(gone)
    gone.rmdir()
    assert listed() == {str(root): False, str(gone): True}
    said = ringfence_text("stores").stdout
    assert f"{gone}  (gone)" in said
    assert str(root) in said


def test_a_directory_that_another_one_replaced_is_not_gone(root: Path) -> None:
    begin_history(root)
    root.rename(root.with_name("moved"))
    root.mkdir()
    assert listed() == {str(root): False}
    assert f"{root}  (replaced)" in ringfence_text("stores").stdout
    assert ringfence("stores", "forget", "--gone").returncode == 0
    assert listed() == {str(root): False}
    assert ringfence("stores", "forget", root).returncode == 0
    assert listed() == {}


def test_forget_names_what_it_deletes_or_would(root: Path, tmp_path: Path) -> None:
    begin_history(root)
    root.rename(tmp_path / "elsewhere")
    would = ringfence_text("stores", "forget", "--gone", "--dry-run")
    assert (f"{root}  (gone)" in would.stdout, "would forget 1 history" in would.stderr) == (True, True)
    assert listed() == {str(root): True}
    done = ringfence_text("stores", "forget", "--gone")
    assert (f"{root}  (gone)" in done.stdout, "forgot 1 history" in done.stderr) == (True, True)
    assert listed() == {}


def test_forget_deletes_the_histories_of_directories_that_are_gone(root: Path, tmp_path: Path) -> None:
    begin_history(root)
    (gone := tmp_path / "gone").mkdir()
    begin_history(gone)
    store = store_directory(gone)
    gone.rmdir()
    assert ringfence("stores", "forget", "--gone").returncode == 0
    assert listed() == {str(root): False}
    assert not store.exists()


def test_forget_leaves_the_files_and_the_rules_of_a_directory(root: Path) -> None:
    begin_history(root)
    owner_file(root).write_text("[policies]\nprotected = true\n")
    assert ringfence("stores", "forget", root).returncode == 0
    assert listed() == {}
    assert (root / "a.txt").read_text() == "one\n"
    assert owner_file(root).exists()
    begin_history(root)  # a new one
    assert len(_steps(root)) == 1


def _steps(root: Path) -> list[object]:
    return json.loads(ringfence("log", root, "--json").stdout)["log"]


def test_forget_names_a_directory_without_a_history_and_deletes_none(root: Path, tmp_path: Path) -> None:
    begin_history(root)
    ended = ringfence_text("stores", "forget", root, tmp_path / "other")
    assert (ended.returncode, f"{tmp_path / 'other'} has no history" in ended.stderr) == (2, True)
    assert list(listed()) == [str(root)]
    assert ringfence("stores", "forget").returncode == 2


def test_an_open_workspace_keeps_its_history(root: Path) -> None:
    with Workspace.open(root):
        program = [sys.executable, "-m", "ringfence_cli", "stores", "forget", str(root)]
        ended = subprocess.run(program, capture_output=True, text=True)
        assert (ended.returncode, f"process {os.getpid()} " in " ".join(ended.stderr.split())) == (2, True)
    assert list(listed()) == [str(root)]


WRITE_AND_DIE = """
import os, signal, sys
from ringfence.testing import held_call
from ringfence_sandbox import Workspace
files = Workspace.open(sys.argv[1]).filesystem
with held_call(files) as call:
    files.for_call(call).write("a.txt", "two")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_call_is_rolled_back_before_its_history_is_forgotten(root: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(root)], check=False)
    assert (root / "a.txt").read_text() == "two"
    ended = ringfence_text("stores", "forget", root)
    assert (ended.returncode, "ringfence recover" in " ".join(ended.stderr.split())) == (2, True)
    assert ringfence("recover", root).returncode == 0
    assert (root / "a.txt").read_text() == "one\n"
    assert ringfence("stores", "forget", root).returncode == 0


class TestTemporaryDirectories:
    """The history of a removed temporary directory is deleted when that of another one begins."""

    @pytest.fixture
    def scratch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "scratch/in/one").mkdir(parents=True)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
        return tmp_path / "scratch/in/one"

    @staticmethod
    def age(root: Path) -> None:
        for directory, _, names in os.walk(store_directory(root)):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                os.utime(path, (0, 0))

    @pytest.fixture
    def other(self, scratch: Path) -> Path:
        other = scratch.parent.parent / "other"
        other.mkdir()
        return other

    def test_it_goes(self, scratch: Path, other: Path) -> None:
        begin_history(scratch)
        self.age(scratch)
        scratch.rmdir()
        begin_history(other)
        assert list(listed()) == [str(other)]

    def test_it_stays_when_a_history_of_another_kind_begins(self, scratch: Path, root: Path) -> None:
        begin_history(scratch)
        self.age(scratch)
        scratch.rmdir()
        begin_history(root)
        assert {*listed()} == {str(scratch), str(root)}

    def test_one_that_was_used_today_stays(self, scratch: Path, other: Path) -> None:
        begin_history(scratch)
        scratch.rmdir()
        begin_history(other)
        assert str(scratch) in listed()

    def test_one_with_a_named_step_stays(self, scratch: Path, other: Path) -> None:
        begin_history(scratch)
        assert ringfence("checkpoint", scratch, "good").returncode == 0
        self.age(scratch)
        scratch.rmdir()
        begin_history(other)
        assert str(scratch) in listed()

    def test_one_whose_parent_is_gone_stays(self, scratch: Path, other: Path) -> None:
        begin_history(scratch)
        self.age(scratch)
        shutil.rmtree(scratch.parent)
        begin_history(other)
        assert str(scratch) in listed()

    def test_one_elsewhere_stays(self, root: Path, tmp_path: Path, scratch: Path) -> None:
        begin_history(root)
        self.age(root)
        shutil.rmtree(root)
        begin_history(scratch)
        assert str(root) in listed()


def test_an_interrupted_run_is_dropped(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "model.jsonl"
    call = {"name": "write_file", "arguments": {"file_path": "b.txt", "content": "b\n"}}
    script.write_text(json.dumps({"tool_calls": [call]}) + "\n")  # then it ends: the provider fails
    model = f"script:{script}"
    ringfence("run", root, "--task", "Write.", "--model", model)
    assert record_of(root).exists()
    refused = ringfence_text("run", root, "--forget", "--task", "Write.", "--model", model)
    assert (refused.returncode, "without --task" in refused.stderr, record_of(root).exists()) == (2, True, True)
    ended = ringfence_text("run", root, "--forget")
    assert (ended.returncode, "(Write.)" in ended.stderr) == (0, True)
    assert not record_of(root).exists()
    assert len(_steps(root)) > 1
    assert ringfence("run", root, "--resume", "--model", model).returncode == 2
    assert ringfence("run", root, "--forget").returncode == 2
