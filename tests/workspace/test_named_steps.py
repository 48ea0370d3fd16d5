"""Steps with names: what can be done with them, and that nothing drops them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command_line import ringfence_text

from ringfence.testing import held_call
from ringfence_sandbox import Workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "x").write_text("0\n")
    return root


def write(workspace: Workspace, text: str, path: str = "x") -> None:
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write(path, text)
        held.commit()


def test_a_name_stands_for_its_step(workspace: Workspace, root: Path) -> None:
    write(workspace, "1\n")
    named = workspace.checkpoint("good")
    assert (named.name, named.number) == ("good", 1)
    write(workspace, "2\n")
    assert workspace.diff("good").splitlines()[-2:] == [b"-1", b"+2"]
    assert workspace.diff(0, "good").splitlines()[-2:] == [b"-0", b"+1"]
    workspace.restore("good")
    assert (root / "x").read_text() == "1\n"
    assert [entry.names for entry in workspace.log() if entry.number == 1] == [("good",)]
    assert workspace.named_steps() == [named]


def test_a_name_covers_what_others_changed_until_then(workspace: Workspace, root: Path) -> None:
    write(workspace, "1\n")
    (root / "theirs").write_text("theirs\n")
    assert workspace.checkpoint("good").number == 1
    (root / "theirs").unlink()
    write(workspace, "2\n")
    workspace.restore("good")
    assert (root / "theirs").read_text() == "theirs\n"


def test_names_are_there_at_the_next_opening_and_for_readers(root: Path) -> None:
    store = root.parent / "store"
    with Workspace.open(root, store=store) as first:
        write(first, "1\n")
        first.checkpoint("one")
    with Workspace.open(root, store=store, read_only=True) as reader:
        assert [named.name for named in reader.named_steps()] == ["one"]
        with pytest.raises(PermissionError, match="read-only"):
            reader.checkpoint("two")
    with Workspace.open(root, store=store) as again:
        again.drop_checkpoint("one")
        assert again.named_steps() == []
        with pytest.raises(LookupError, match="no step has a name"):
            again.drop_checkpoint("one")


def test_gc_keeps_a_named_step_and_what_was_before_it_is_dropped(workspace: Workspace, root: Path) -> None:
    for number in range(1, 8):
        write(workspace, f"{number}\n" + os.urandom(2000).hex())
        if number == 3:
            wanted = (root / "x").read_text()
            workspace.checkpoint("third")
    assert workspace.gc(2) > 0
    assert [step.number for step in workspace.steps()] == [5, 6, 7]
    assert b"-3" in workspace.diff("third", 7)
    with pytest.raises(ValueError, match="only a diff is left"):
        workspace.export("mbox", a="third")
    with pytest.raises(ValueError, match="name the earlier one first"):
        workspace.diff(7, "third")
    workspace.restore("third")
    assert (root / "x").read_text() == wanted
    workspace.drop_checkpoint("third")
    assert workspace.gc(0) > 0


def test_of_what_gc_has_dropped_a_restore_does_not_say_that_it_was_somebody_else_s(
    workspace: Workspace, root: Path
) -> None:
    workspace.checkpoint("first")
    for path in ("x", "y", "z"):
        write(workspace, "1\n", path)
    workspace.gc(0)
    done = workspace.restore("first", dry_run=True)
    dropped = "changed since, by a step that `gc` has dropped or by somebody else"
    assert (done.reasons, done.outcomes["z"]) == ({"x": dropped, "y": dropped}, "removed")


def test_what_gc_leaves_for_its_name_alone_is_in_the_log_and_known_by_its_number(
    workspace: Workspace, root: Path
) -> None:
    for number in range(1, 6):
        write(workspace, f"{number}\n")
        if number == 2:
            workspace.checkpoint("early")
    workspace.gc(1)
    assert [(entry.number, entry.names, entry.apart) for entry in workspace.log()] == [
        (5, (), False),
        (4, (), False),
        (2, ("early",), True),
    ]
    assert len(workspace.log(2)) == 2
    whole = workspace.log()
    pages = [workspace.log(1, before=entry.commit) for entry in whole]
    assert pages == [[whole[1]], [whole[2]], []]
    assert workspace.restore(2).outcomes == {"x": "restored"}
    with pytest.raises(LookupError, match="step 3 has been dropped"):
        workspace.restore(3)


def test_a_log_goes_on_before_any_entry_and_has_what_a_file_was_there(workspace: Workspace) -> None:
    for number in range(1, 4):
        write(workspace, f"{number}\n")
    newest, *older = workspace.log()
    assert workspace.log(2, before=newest.commit) == older[:2]
    assert workspace.read_at(older[0].commit, "x") == b"2\n"
    assert workspace.read_at(older[0].commit, "nothing") is None
    with pytest.raises(LookupError):
        workspace.log(before="0" * 40)


@pytest.mark.parametrize("name", ["", "7", "a b", "../x", "a/b", ".x", "-x", "a..b", "x.lock", "x.", "é", "x" * 65])
def test_what_could_be_a_number_or_a_path_is_no_name(workspace: Workspace, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        workspace.checkpoint(name)
    assert workspace.named_steps() == []


def test_a_name_is_given_once(workspace: Workspace) -> None:
    workspace.checkpoint("one")
    with pytest.raises(ValueError, match="step 0 is called 'one' already"):
        workspace.checkpoint("one")
    with pytest.raises(LookupError, match="no step is called 'two'; there are: one"):
        workspace.restore("two")


def test_a_name_given_after_an_edit_by_hand_is_said_to_be_of_that_too(root: Path, workspace: Workspace) -> None:
    assert workspace.checkpoint("one").description == "step 0"
    (root / "x").write_text("by hand\n")
    named = workspace.checkpoint("two")
    assert named.description == "step 0, with what others have changed since,"
    assert workspace.named_steps()[1] == named


def test_the_commands_give_names_and_take_them(root: Path) -> None:
    with Workspace.open(root) as workspace:
        write(workspace, "1\n")
    tree = str(root)
    assert "goes back to it" in ringfence_text("checkpoint", tree, "good").stderr
    assert "[good]" in ringfence_text("log", tree).stdout
    (root / "x").write_text("2\n")
    assert json.loads(ringfence_text("diff", tree, "good", "--json").stdout)["patch"] == ""
    later = ringfence_text("checkpoint", tree, "later").stderr
    assert "step 1, with what others have changed since, is called later: `ringfence restore" in later
    assert ringfence_text("restore", tree, "good").returncode == 0
    assert (root / "x").read_text() == "1\n"
    assert ringfence_text("restore", tree, "0").returncode == 0
    assert (root / "x").read_text() == "0\n"
    dropped = json.loads(ringfence_text("checkpoint", tree, "good", "--drop", "--json").stdout)
    assert dropped == {"checkpoint": None}
    bad = ringfence_text("restore", tree, "good")
    assert (bad.returncode, "no step is called" in bad.stderr) == (2, True)
