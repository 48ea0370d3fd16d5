"""What an earlier version wrote opens still: stores, open calls among them, saved sessions, interrupted runs, batches.

`stores/earlier.img.xz` is a disk with ext4, since a log names files by their inode. Its directories were made at
/srv/earlier, and its batch at /srv/earlier-batch.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from command_line import ringfence_text as ringfence
from mounts import mounted

from ringfence import Session
from ringfence.prompt import PolicyState, SectionVisibility, ToolResult
from ringfence.runtime import RejectedToolParams, Snapshot, ToolInvoked, VisibilityOverrides
from ringfence_sandbox import Workspace, store_directory
from ringfence_tools import Plan, PlanningToolsSection, VfsToolsSection

IMAGE = Path(__file__).parent / "stores/earlier.img.xz"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The disk, mounted, with each store where this version looks for it."""
    (tmp_path / "image").write_bytes(lzma.decompress(IMAGE.read_bytes()))
    place = tmp_path / "disk"
    place.mkdir()
    with mounted(place, "-o", "loop", str(tmp_path / "image")):
        monkeypatch.setenv("RINGFENCE_STATE_DIR", str(place / "state"))
        for store in list((place / "state/stores").iterdir()):
            for file in (store / "root", *store.glob("run*.jsonl")):
                file.write_text(file.read_text().replace("/srv/earlier", str(place)))
            store.rename(store_directory(json.loads((store / "root").read_text())[0]))
        yield place


def tree(root: Path) -> dict[str, object]:
    """Every path: its mode, and a link's target or a file's bytes and how many names it has."""
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        stat = path.lstat()
        held = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (stat.st_mode, held, path.is_file() and stat.st_nlink)
    return found


def test_a_history_opens_and_its_steps_can_be_undone(disk: Path) -> None:
    with Workspace.open(disk / "closed") as workspace:
        assert [step.call_id for step in workspace.steps()] == ["call-1", "call-2", "call-3"]
        assert workspace.recovered is None
        for number in (3, 2, 1):
            assert workspace.undo(number).step is not None
    assert (disk / "closed/a.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert (disk / "closed/d/empty").is_dir()
    assert not (disk / "closed/second").exists()


@pytest.mark.parametrize("kind", ["typed", "opaque"])
def test_a_call_that_was_killed_is_rolled_back(disk: Path, kind: str) -> None:
    with Workspace.open(disk / kind) as workspace:
        assert workspace.recovered is not None
        assert workspace.recovered.call_id == "open"
    assert tree(disk / kind) == tree(disk / "closed")


def test_an_interrupted_run_goes_on(disk: Path) -> None:
    script = disk / "rest.jsonl"
    edit = {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "two", "new_string": "three"}}
    script.write_text(f'{json.dumps({"tool_calls": [edit]})}\n{{"text": "Done."}}\n')
    done = ringfence("run", str(disk / "run"), "--resume", "--model", f"script:{script}", "--json")
    assert done.returncode == 0, done.stderr
    # It knows what the run had read, and which step of the plan was done.
    assert (disk / "run/a.txt").read_text() == "three\n"
    assert json.loads(done.stdout)["plan"]["steps"][0]["status"] == "done"


def test_a_saved_session_opens(disk: Path) -> None:
    session = Session()
    sections = PlanningToolsSection(session=session), VfsToolsSection(session=session)
    tools = [tool for section in sections for tool in section.tools()]
    types = [kind for tool in tools for kind in (tool.params_type, tool.result_type) if kind is not None]
    text = (disk / "session.json").read_text()
    slices = Snapshot.from_json(
        text, types=[*session.slice_types, ToolResult, PolicyState, RejectedToolParams, *types]
    ).slices
    assert [step.status for step in slices[Plan][-1].steps] == ["done", "pending"]
    assert len(slices[ToolInvoked]) == 7
    assert slices[PolicyState]
    assert slices[VisibilityOverrides][-1].get(("task",)) is SectionVisibility.SUMMARY


def test_a_batch_goes_on(disk: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch"
    shutil.copytree(disk / "batch", batch)
    for file in [*batch.rglob("*.json"), *batch.rglob("*.jsonl")]:
        file.write_text(file.read_text().replace("/srv/earlier-batch", str(batch)))
    done = ringfence("batch", "resume", str(batch / "out"), "--retries", "0", "--json")
    outcomes = {task["id"]: task["outcome"] for task in json.loads(done.stdout)["tasks"]}
    assert outcomes == {"done": "done", "done-on-disk": "done", "fails": "infra-failed", "killed": "done"}, done.stderr
