"""An undo of several steps, of which an earlier undo has reversed some."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from captured_tree import shape
from command_line import ringfence

from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

Change = Callable[[HostFilesystem], object]
RUN = "a session"  # of the steps that tests make, and not of an undo
AS_BEFORE = "it is as it was before already"


def writes(path: str, content: str) -> Change:
    return lambda files: files.write(path, content)


def moves(path: str, to: str) -> Change:
    return lambda files: files.move(path, to)


STEPS: dict[str, tuple[Change, ...]] = {
    "edit, edit": (writes("a", "y\n"), writes("a", "z\n")),
    "edit, edit, edit": (writes("a", "y\n"), writes("a", "z\n"), writes("a", "w\n")),
    "edit, move": (writes("a", "y\n"), moves("a", "b")),
    "move, edit": (moves("a", "b"), writes("b", "y\n")),
    "create, edit": (writes("d/new", "y\n"), writes("d/new", "z\n")),
    "create, delete": (writes("d/new", "y\n"), lambda files: files.delete("d", recursive=True)),
    "edit, delete": (writes("a", "y\n"), lambda files: files.delete("a")),
    "delete, create": (lambda files: files.delete("a"), writes("a", "y\n")),
    "edit, back, edit": (writes("a", "y\n"), writes("a", "x\n"), writes("a", "z\n")),
    "edit, permissions": (writes("a", "y\n"), lambda files: files.chmod("a", 0o755)),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("x\n")
    (root / "other").write_text("other\n")
    return root


@pytest.fixture
def workspace(root: Path, tmp_path: Path) -> Workspace:
    return Workspace.open(root, store=tmp_path / "store")


def work(workspace: Workspace, steps: Sequence[Change]) -> None:
    for number, change in enumerate(steps):
        with held_call(workspace.filesystem, call_id=f"{number}") as held:
            change(workspace.filesystem.for_call(held))
            held.commit()


def look(root: Path) -> dict[str, tuple[str, int, str]]:
    return {path: (one.kind, one.mode, one.content) for path, one in shape(root).items()}


@pytest.mark.parametrize(("name", "times"), [(name, n) for name in STEPS for n in range(len(STEPS[name]) + 1)])
def test_an_undo_of_all_steps_goes_on_from_what_is_undone(
    workspace: Workspace, root: Path, name: str, times: int
) -> None:
    with workspace:
        before = look(root)
        work(workspace, STEPS[name])
        if times:
            workspace.undo(times, session=RUN)
        left = shape(root)
        done = workspace.undo(len(STEPS[name]), session=RUN)
        assert look(root) == before
        assert "conflict" not in done.outcomes.values()
        assert done.reasons == {path: AS_BEFORE for path, outcome in done.outcomes.items() if outcome == "kept"}
        if done.step is not None:
            workspace.undo()
            assert shape(root) == left


@pytest.mark.parametrize("contents", [*product("xyz", repeat=3)], ids="".join)
def test_a_file_at_any_of_its_states_goes_back_to_the_first(
    workspace: Workspace, root: Path, contents: tuple[str, ...]
) -> None:
    with workspace:
        work(workspace, [writes("a", f"{content}\n") for content in contents])
        steps = len(workspace.steps())
        for content in "xyz":
            (root / "a").write_text(f"{content}\n")
            done = workspace.undo(steps, session=RUN, dry_run=True) if steps else None
            known = content in ("x", *contents)
            wanted = "conflict" if not known else "kept" if content == "x" else "restored"
            assert done is None or done.outcomes == {"a": wanted}, content


def test_what_somebody_wrote_since_stays_where_a_part_is_undone(workspace: Workspace, root: Path) -> None:
    lines = [f"line {n}\n" for n in range(9)]
    (root / "a").write_text("".join(lines))
    with workspace:
        work(workspace, [writes("a", "".join(["y\n", *lines[1:]])), writes("a", "".join(["z\n", *lines[1:]]))])
        workspace.undo()
        (root / "a").write_text("".join(["y\n", *lines[1:-1], "theirs\n"]))
        assert workspace.undo(2, session=RUN).outcomes == {"a": "restored"}
        assert (root / "a").read_text() == "".join([*lines[:-1], "theirs\n"])


def edit_of_a(old: str, new: str) -> dict[str, object]:
    arguments = {"file_path": "a", "old_string": old, "new_string": new}
    return {"name": "edit_file", "arguments": arguments}


def test_undo_of_a_run_after_an_undo_of_its_newest_step(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("x\n")
    calls = [{"name": "read_file", "arguments": {"file_path": "a"}}, edit_of_a("x", "y"), edit_of_a("y", "z")]
    turns = [*({"text": "", "tool_calls": [call]} for call in calls), {"text": "Done."}]
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    model = f"script:{tmp_path / 'script.jsonl'}"
    assert ringfence("run", tree, "--task", "Do it.", "--model", model).returncode == 0
    assert (ringfence("undo", tree).returncode, (tree / "a").read_text()) == (0, "y\n")
    done = ringfence("undo", tree, "--run")
    assert (done.returncode, (tree / "a").read_text()) == (0, "x\n")
    assert b"these are changes of the run 'Do it.' (steps 1 to 2)" in done.stderr
    again = ringfence("undo", tree, "--run")
    assert (again.returncode, b"is undone already" in again.stderr) == (1, True)
