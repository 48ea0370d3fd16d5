"""What people and programs do with the steps of a workspace; git itself reads the store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import sleep

import pytest
from captured_tree import capture_tree, lasting
from counting import count_calls
from real_git import git, needs_git, repository
from running_calls import within

from ringfence.errors import TransactionError
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace

LINES = "".join(f"line {n}\n" for n in range(1, 10))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "d/empty").mkdir(parents=True)
    (root / "a.txt").write_text(LINES)
    (root / "crlf.txt").write_bytes(b"one\r\ntwo\r\n")
    (root / "d/b.sh").write_text("b\n")
    (root / "d/b.sh").chmod(0o755)
    os.symlink("a.txt", root / "link")
    (root / ".git").mkdir()
    (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
    return root


def call(workspace: Workspace, change: Callable[[HostFilesystem], object]) -> None:
    with held_call(workspace.filesystem, call_id=f"call-{len(workspace.steps()) + 1}") as held:
        change(workspace.filesystem.for_call(held))
        held.commit()


def snapshot_and_restore(fs: HostFilesystem) -> None:
    fs.write("a", "1")
    snapshot = fs.snapshot()
    fs.write("a", "2")
    fs.restore(snapshot)


REWRITES: dict[str, Callable[[HostFilesystem], object]] = {
    "moved over": lambda fs: (fs.write("a", "1"), fs.write("b", "2"), fs.move("b", "a", overwrite=True)),
    "moved with its directory": lambda fs: (
        fs.write("d/a", "1"),
        fs.write("e/a", "2"),
        fs.move("d", "f"),
        fs.move("e", "d"),
    ),
    "appended to": lambda fs: (fs.write("a", "1"), fs.write("a", "2", mode="append")),
    "deleted": lambda fs: (fs.write("a", "1"), fs.delete("a"), fs.move("a.txt", "a")),
    "restored": snapshot_and_restore,
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_step_has_what_the_call_wrote_last(workspace: Workspace, root: Path, name: str) -> None:
    call(workspace, REWRITES[name])
    left = lasting(capture_tree(root))
    call(workspace, lambda fs: [fs.delete(path) for path in ("a", "d/a") if fs.exists(path)])
    workspace.undo()
    assert lasting(capture_tree(root)) == left


def everything(fs: HostFilesystem) -> None:
    fs.write("a.txt", LINES.replace("line 1\n", "line one\n"))
    fs.write_bytes("crlf.txt", b"one\r\n2\r\n")
    fs.chmod("d/b.sh", 0o640)
    fs.delete("d/empty")
    fs.write("d/empty", "a file now\n")
    fs.delete("link")
    fs.symlink("link", "d")
    fs.write("n/o/p", "new\n")
    fs.mkdir("n/empty")
    fs.move(".git", "n/git")


def test_undo_brings_everything_back_and_can_be_undone(workspace: Workspace, root: Path) -> None:
    before = lasting(capture_tree(root))
    call(workspace, everything)
    after = lasting(capture_tree(root))
    done = workspace.undo()
    gone = {path for path, outcome in done.outcomes.items() if outcome == "removed"}
    assert gone == done.outcomes.keys() & after.keys() - before.keys()
    assert set(done.outcomes.values()) == {"restored", "removed"}
    assert done.step is not None
    assert (done.step.number, done.step.tool) == (2, "undo")
    assert lasting(capture_tree(root)) == before
    workspace.undo()
    assert lasting(capture_tree(root)) == after
    workspace.undo(3)
    assert lasting(capture_tree(root)) == before
    assert [step.tool for step in workspace.steps()] == ["a test", "undo", "undo", "undo"]


def test_a_preview_changes_nothing(workspace: Workspace, root: Path) -> None:
    call(workspace, everything)
    before = capture_tree(root)
    said = workspace.undo(dry_run=True)
    restored = workspace.restore(0, dry_run=True)
    assert capture_tree(root) == before
    assert said.step is None
    assert len(workspace.steps()) == 1
    assert said.outcomes == restored.outcomes == workspace.undo().outcomes


@pytest.mark.parametrize("was", ["new", "other"])
def test_a_preview_knows_which_directories_stay(workspace: Workspace, root: Path, was: str) -> None:
    call(workspace, lambda fs: fs.write(was, "a file"))
    call(workspace, lambda fs: (fs.delete(was), fs.write("new/deep/file", "x"), fs.write("other", "a file")))
    os.mkfifo(root / "new/deep/pipe")
    previews = [workspace.undo(dry_run=True), workspace.restore(1, dry_run=True)]
    done = workspace.undo()
    assert {**done.outcomes, "other": ""} == {
        "new": "kept",
        "new/deep": "kept",
        "new/deep/file": "removed",
        "other": "",
    }
    assert [(said.outcomes, said.reasons) for said in previews] == [(done.outcomes, done.reasons)] * 2


def test_a_later_edit_of_another_line_survives(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: fs.write("a.txt", LINES.replace("line 2\n", "line two\n")))
    (root / "a.txt").write_text((root / "a.txt").read_text().replace("line 8\n", "theirs\n"))
    assert workspace.undo().outcomes == {"a.txt": "restored"}
    assert (root / "a.txt").read_text() == LINES.replace("line 8\n", "theirs\n")


def test_what_somebody_changed_since_is_kept(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: (fs.write("d/b.sh", "ours\n"), fs.write("new/x", "x")))
    (root / "d/b.sh").write_text("theirs\n")
    (root / "new/their").write_text("theirs\n")
    done = workspace.undo()
    assert done.outcomes == {"d/b.sh": "conflict", "new": "kept", "new/x": "removed"}
    assert done.reasons == {"d/b.sh": "changed since by somebody else", "new": "something in it stays"}
    assert (root / "d/b.sh").read_text() == "theirs\n"
    assert os.listdir(root / "new") == ["their"]


def test_one_step_is_undone_among_others_unless_a_later_one_changed_the_same(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: (fs.write("d/b.sh", "first\n"), fs.write("x", "x\n")))
    call(workspace, lambda fs: (fs.write("d/b.sh", "second\n"), fs.write("y", "y\n")))
    done = workspace.undo(step=1)
    assert done.outcomes == {"d/b.sh": "conflict", "x": "removed"}
    assert done.reasons == {"d/b.sh": "changed since by step 2 (a test)"}
    assert (root / "d/b.sh").read_text() == "second\n"
    assert sorted(path.name for path in root.glob("[xy]")) == ["y"]


def test_what_two_steps_made_and_took_away_again_is_kept_when_both_are_undone(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: (fs.write("x", "x"), fs.write("d/b.sh", "ours\n")))
    call(workspace, lambda fs: (fs.delete("x"), fs.write("d/b.sh", "b\n")))
    os.utime(root / "d/b.sh", ns=(10**18, 10**18))
    done = workspace.undo(2)
    assert done.outcomes == {"d/b.sh": "kept", "x": "kept"}
    assert done.reasons == dict.fromkeys(("d/b.sh", "x"), "it is as it was before already")
    assert not done.has_changed
    assert done.step is None


def test_an_undo_of_nothing_makes_no_step(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: fs.write("x", "x"))
    (root / "x").write_text("theirs")
    done = workspace.undo()
    assert (done.outcomes, done.step) == ({"x": "conflict"}, None)


@pytest.mark.parametrize(
    ("n", "step", "error"), [(2, None, LookupError), (0, None, ValueError), (None, 0, ValueError), (1, 1, ValueError)]
)
def test_what_cannot_be_undone_is_said(
    workspace: Workspace, n: int | None, step: int | None, error: type[Exception]
) -> None:
    call(workspace, lambda fs: fs.write("x", "x"))
    with pytest.raises(error):
        workspace.undo(n, step=step)
    with pytest.raises(LookupError, match="no step 7: it has 0 to 1"):
        workspace.restore(7)


def test_a_call_that_has_changed_files_cannot_change_the_history(workspace: Workspace) -> None:
    call(workspace, lambda fs: fs.write("x", "x"))
    with held_call(workspace.filesystem) as held:
        workspace.filesystem.for_call(held).write("y", "y")
        with within(held), pytest.raises(TransactionError, match="a tool call of its own"):
            workspace.undo()


def time_alone(root: Path) -> None:
    os.utime(root / "x", ns=(10**18, 10**18))


def nothing(root: Path) -> None: ...


@pytest.mark.parametrize(("before", "kept"), [(nothing, False), (time_alone, True)])
def test_what_somebody_writes_after_a_restore_that_made_no_step_is_theirs(
    workspace: Workspace, root: Path, before: Callable[[Path], None], kept: bool
) -> None:
    call(workspace, lambda fs: fs.write("x", "1\n"))
    if not kept:
        call(workspace, lambda fs: fs.write("x", "2\n"))
    before(root)
    with held_call(workspace.filesystem) as held, within(held):
        workspace.restore(1)
        held.commit() if kept else held.rollback()
    (root / "x").write_text("theirs\n")
    call(workspace, lambda fs: fs.write("y", "y"))
    assert workspace.steps()[-1].paths == ("y",)
    workspace.undo()
    assert (root / "x").read_text() == "theirs\n"


def test_a_restore_goes_back_to_any_step_and_loses_nothing(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: fs.write("x", "1"))
    first = lasting(capture_tree(root))
    call(workspace, everything)
    (root / "their").write_text("theirs")
    latest = lasting(capture_tree(root))
    done = workspace.restore(1)
    assert done.step is not None
    assert lasting(capture_tree(root)) == first
    workspace.undo()
    assert lasting(capture_tree(root)) == latest


def test_a_restore_says_where_somebody_had_changed_what_a_step_had(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: (fs.write("a.txt", "ours\n"), fs.write("made", "ours\n"), fs.write("only ours", "x")))
    (root / "a.txt").write_text("theirs\n")
    (root / "made").unlink()
    call(workspace, lambda fs: fs.write("made", "ours again\n"))
    done = workspace.restore(0)
    assert done.outcomes == {"a.txt": "restored", "made": "removed", "only ours": "removed"}
    assert done.reasons == dict.fromkeys(("a.txt", "made"), "changed since by somebody else")


@needs_git
def test_a_restore_leaves_a_person_s_git_commits_alone(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: fs.write("x", "1"))
    repository(root)
    call(workspace, lambda fs: (fs.write("x", "2"), fs.write("lib/.git/hooks/made", "by an agent")))
    done = workspace.restore(1)
    assert (root / "x").read_text() == "1"
    assert not (root / "lib").exists(), "what a step changed is taken back"
    assert git(root, "log", "--format=%s") == "as it was\n"
    git(root, "fsck", "--full", "--strict")
    assert done.outcomes["x"] == "restored"
    assert done.outcomes[".git/index"] == "kept"


def test_a_restore_makes_removed_directories_of_git_data_anew(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: fs.write("x", "1"))
    call(workspace, lambda fs: fs.write(".git/HEAD", "ref: refs/heads/other\n"))
    shutil.rmtree(root / ".git")
    assert workspace.restore(1).outcomes == {".git": "restored", ".git/HEAD": "restored"}
    assert (root / ".git/HEAD").read_text() == "ref: refs/heads/main\n"


def test_a_restore_leaves_a_git_file_that_replaced_the_directory(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: (fs.write("x", "1"), fs.write(".git/HEAD", "ref: refs/heads/other\n")))
    (root / ".git").rename(root.with_name("absorbed"))
    (root / ".git").write_text("gitdir: ../absorbed\n")
    assert workspace.restore(0).outcomes == {".git": "kept", ".git/HEAD": "conflict", "x": "removed"}
    assert (root / ".git").read_text() == "gitdir: ../absorbed\n"


def test_directories_that_cannot_be_written_are_opened_for_the_moment(workspace: Workspace, root: Path) -> None:
    call(workspace, lambda fs: (fs.delete("d/b.sh"), fs.chmod("d", 0o500)))
    (root / "d").chmod(0o500)
    assert workspace.undo().outcomes == {"d": "restored", "d/b.sh": "restored"}
    workspace.undo()
    assert capture_tree(root)["d"].mode == 0o500


def test_a_directory_that_cannot_be_written_becomes_the_file_that_it_was(workspace: Workspace, root: Path) -> None:
    (root / "a.txt").chmod(0o644)
    call(workspace, lambda fs: (fs.delete("a.txt"), fs.write("a.txt/x", "x"), fs.chmod("a.txt", 0o500)))
    workspace.restore(0)
    assert capture_tree(root)["a.txt"].mode == 0o644


def test_a_step_is_shown_with_its_patch_and_states_are_compared(workspace: Workspace) -> None:
    call(workspace, lambda fs: fs.write("x", "1\n"))
    call(workspace, lambda fs: fs.write("x", "2\n"))
    shown = workspace.show(2)
    assert (shown.step.number, [change.path for change in shown.changes]) == (2, ["x"])
    assert b"-1\n+2\n" in shown.patch
    assert workspace.diff(1, 2) == shown.patch
    assert b"+2\n" in workspace.diff()
    assert workspace.diff(2) == b""
    with pytest.raises(ValueError, match="name the earlier one first"):
        workspace.diff(2, 1)


def test_gc_keeps_the_newest_steps_and_what_they_need(workspace: Workspace, root: Path) -> None:
    for n in range(6):
        call(workspace, lambda fs, n=n: fs.write_bytes("x", os.urandom(5000) + b"%d" % n))
    before = (root / "x").read_bytes()
    assert workspace.gc(2) > 10_000
    assert [step.number for step in workspace.steps()] == [4, 5, 6]
    workspace.undo(2)
    workspace.undo()
    assert (root / "x").read_bytes() == before
    with pytest.raises(LookupError, match="dropped"):
        workspace.show(4)
    with pytest.raises(LookupError, match="step 1 has been dropped from the history by gc: it has 4 to 8"):
        workspace.restore(1)


def test_the_numbers_go_on_after_gc_has_dropped_all_steps(workspace: Workspace, root: Path) -> None:
    for n in range(3):
        call(workspace, lambda fs, n=n: fs.write("x", f"{n}"))
    (root / "theirs").write_text("theirs\n")
    workspace.gc(0)
    call(workspace, lambda fs: fs.write("y", "y"))
    assert [step.number for step in workspace.steps()] == [3, 4]


def test_a_store_that_was_deleted_starts_anew(root: Path) -> None:
    with Workspace.open(root, store=root.parent / "store") as first:
        call(first, lambda fs: fs.write("x", "x"))
    shutil.rmtree(root.parent / "store")
    with Workspace.open(root, store=root.parent / "store") as again:
        assert [entry.kind for entry in again.log()] == ["baseline"]
        assert again.damage is None


@pytest.mark.parametrize("opaque", [False, True])
def test_permission_bits_of_the_root_are_a_step_and_undone(workspace: Workspace, root: Path, opaque: bool) -> None:
    root.chmod(0o755)
    before = capture_tree(root)
    with held_call(workspace.filesystem, opaque=opaque) as held:
        root.chmod(0o700) if opaque else workspace.filesystem.for_call(held).chmod("", 0o700)
        held.commit()
    assert workspace.steps()[-1].paths == ("",)
    assert workspace.undo().outcomes == {"": "restored"}
    assert capture_tree(root) == before
    assert [entry.paths for entry in workspace.log(2)] == [("",), ("",)]


def test_an_undo_does_not_read_every_file_of_a_tree_that_is_linked_to_a_cache(tmp_path: Path) -> None:
    """As uv and pnpm do. One file has another name here, too, which comes back with it."""
    costs: dict[str, int] = {}
    for name, place in (("plain", shutil.copy), ("linked", os.link)):
        root, cache = tmp_path / name, tmp_path / f"{name} cache"
        cache.mkdir()
        for number in range(1000):
            (cache / str(number)).write_text(f"{number}\n")
            (root / f"{number // 20}").mkdir(parents=True, exist_ok=True)
            place(cache / str(number), root / f"{number // 20}" / f"{number}")
        place(root / "0/0", root / "1/other name")
        sleep(0.1)  # what has only just changed is read again
        with Workspace.open(root, store=tmp_path / f"{name} store") as workspace:
            call(workspace, lambda fs: fs.write("0/0", "changed"))
            costs[name] = count_calls(lambda workspace=workspace: workspace.undo(1))
        assert (root / "0/0").read_text() == (root / "1/other name").read_text() == "0\n"
    assert (tmp_path / "linked/0/0").samefile(tmp_path / "linked/1/other name")
    assert costs["linked"] - costs["plain"] < 5 * 1000


def rewrite(workspace: Workspace, numbers: Iterable[int]) -> None:
    for number in numbers:
        call(workspace, lambda fs, number=number: fs.write("a.txt", f"{number}\n"))


LOOKS: dict[str, Callable[[Workspace], object]] = {
    "an early step": lambda workspace: workspace.show(1, with_ignored=False),
    "the newest entries": lambda workspace: workspace.log(5, with_ignored=False),
    "a patch": lambda workspace: workspace.export(with_ignored=False),
    "what an undo would do": lambda workspace: workspace.undo(1, dry_run=True, with_ignored=False),
}


def test_what_is_read_of_a_history_hardly_grows_with_its_length(root: Path, tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {name: [] for name in LOOKS}
    steps = 0
    for length in (9, 132):
        with Workspace.open(root, store=tmp_path / "store") as workspace:
            rewrite(workspace, range(steps, length))
            steps = length
        for name, look in LOOKS.items():
            with Workspace.open(root, store=tmp_path / "store") as workspace:
                counts[name].append(count_calls(partial(look, workspace)))
    # Fifteen times as long: with its logarithm, for a step that is looked for by its number.
    assert {name: after < 3 * before for name, (before, after) in counts.items()} == dict.fromkeys(LOOKS, True), counts


def test_after_gc_steps_are_found_by_number_where_links_lead_to_what_was_dropped(
    root: Path, workspace: Workspace
) -> None:
    rewrite(workspace, range(19))
    workspace.gc(5)
    for number in range(15, 20):
        assert workspace.show(number).step.number == number
    with pytest.raises(LookupError, match="dropped"):
        workspace.show(8)
    rewrite(workspace, [20])
    assert workspace.show(20).step.number == 20
