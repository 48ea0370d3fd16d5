"""A linked worktree of git inside of a workspace is a workspace of its own, and the one around it leaves it alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from captured_tree import CapturedPath, capture_tree, shape
from real_git import git, needs_git, repository
from store_bytes import store_bytes

from ringfence.errors import WorkspaceLockedError
from ringfence.filesystem import HiddenFiles
from ringfence.testing import held_call
from ringfence_sandbox import HostFilesystem, Workspace, find_workspace

pytestmark = needs_git
INNER = ".claude/worktrees/x"


def make_repository(root: Path) -> Path:
    (root / "src").mkdir(parents=True)
    (root / "a.txt").write_text("a\n")
    (root / "src/b.txt").write_text("b\n")
    return repository(root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "root")


def add_worktree(root: Path, place: str = INNER) -> Path:
    git(root, "worktree", "add", "--quiet", "--detach", place)
    return root / place


@pytest.fixture
def inner(root: Path) -> Path:
    return add_worktree(root)


@pytest.fixture
def workspace(root: Path, inner: Path, tmp_path: Path) -> Iterator[Workspace]:
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        yield workspace


OPEN = """
import sys
from ringfence_sandbox import Workspace
with Workspace.open(sys.argv[1], store=sys.argv[2]) as workspace:
    workspace.filesystem.write("opened", "elsewhere")
    print("open", flush=True)
    sys.stdin.read()
"""


@contextmanager
def opened_elsewhere(place: Path, store: Path) -> Generator[None]:
    """Open a workspace in another process, which writes a file in it."""
    command = [sys.executable, "-c", OPEN, str(place), str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield
        process.communicate()
    assert process.returncode == 0


def opened_here(place: Path, store: Path) -> Workspace:
    return Workspace.open(place, store=store)


@pytest.mark.parametrize("first", ["outer", "inner"])
@pytest.mark.parametrize("opened", [opened_here, opened_elsewhere])
@pytest.mark.parametrize("part", ["", "src"])
def test_both_can_be_open_at_once(
    root: Path, inner: Path, tmp_path: Path, first: str, opened: Callable[[Path, Path], Workspace], part: str
) -> None:
    one, other = (root, inner / part) if first == "outer" else (inner / part, root)
    with opened(one, tmp_path / "one"), Workspace.open(other, store=tmp_path / "other") as workspace:
        workspace.filesystem.write("a.txt", "changed")
        with pytest.raises(WorkspaceLockedError):
            Workspace.open(one, store=tmp_path / "third")
    assert (other / "a.txt").read_text() == "changed"


def test_a_part_of_an_open_worktree_is_locked_and_so_is_what_is_around_an_open_part(
    inner: Path, tmp_path: Path
) -> None:
    for one, other in ((inner, inner / "src"), (inner / "src", inner)):
        with Workspace.open(one, store=tmp_path / "one"), pytest.raises(WorkspaceLockedError):
            Workspace.open(other, store=tmp_path / "other")


def write(workspace: Workspace, path: str, content: str) -> None:
    with held_call(workspace.filesystem) as call:
        workspace.filesystem.for_call(call).write(path, content)
        call.commit()


FILES_OF_GIT = {
    "gitdir: /somewhere/.git/worktrees/x\n": True,
    "gitdir: ../../.git/worktrees/x": True,
    "gitdir: .git/worktrees/x": True,
    "gitdir: /srv/project.git/worktrees/x\n": True,
    "gitdir: ../.bare/worktrees/x\n": True,
    "gitdir: ../../.git/modules/x\n": False,
    "gitdir: ../../.git/modules/worktrees/x\n": False,
    "gitdir: /elsewhere/separate\n": False,
    "/somewhere/.git/worktrees/x\n": False,
    "": False,
}


@pytest.mark.parametrize("content", FILES_OF_GIT)
def test_only_a_worktree_is_not_covered_and_no_submodule(tmp_path: Path, content: str) -> None:
    place = tmp_path / "root/libs/x"
    place.mkdir(parents=True)
    (place / ".git").write_text(content)
    (tmp_path / "root/libs/.git").mkdir()
    with Workspace.open(tmp_path / "root", store=tmp_path / "store") as workspace:
        assert workspace.left_out == ({"libs/x": "linked worktree"} if FILES_OF_GIT[content] else {})


def test_a_workspace_that_is_a_linked_worktree_is_covered(inner: Path, tmp_path: Path) -> None:
    with Workspace.open(inner, store=tmp_path / "store") as workspace:
        assert workspace.left_out == {}
        write(workspace, "a.txt", "changed")
        workspace.undo()
    assert (inner / "a.txt").read_text() == "a\n"


WRITES: dict[str, Callable[[HostFilesystem], object]] = {
    "a file": lambda fs: fs.write(f"{INNER}/a.txt", "x"),
    "a file by a link": lambda fs: (fs.symlink("link", INNER), fs.write("link/a.txt", "x")),
    "a new file": lambda fs: fs.write(f"{INNER}/new/file", "x"),
    "more of a file": lambda fs: fs.write(f"{INNER}/a.txt", "x", mode="append"),
    "its .git": lambda fs: fs.delete(f"{INNER}/.git"),
    "delete a file": lambda fs: fs.delete(f"{INNER}/a.txt"),
    "delete a directory": lambda fs: fs.delete(f"{INNER}/src", recursive=True),
    "delete it": lambda fs: fs.delete(INNER, recursive=True),
    "delete what it is in": lambda fs: fs.delete(".claude", recursive=True),
    "move it": lambda fs: fs.move(INNER, "y"),
    "move what it is in": lambda fs: fs.move(".claude", "y"),
    "move into it": lambda fs: fs.move("a.txt", f"{INNER}/new"),
    "move over a file of it": lambda fs: fs.move("a.txt", f"{INNER}/a.txt", overwrite=True),
    "move out of it": lambda fs: fs.move(f"{INNER}/a.txt", "new"),
    "a directory": lambda fs: fs.mkdir(f"{INNER}/new"),
    "a link": lambda fs: fs.symlink(f"{INNER}/new", "a.txt"),
    "permissions": lambda fs: fs.chmod(f"{INNER}/a.txt", 0o600),
    "its permissions": lambda fs: fs.chmod(INNER, 0o700),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostFilesystem]:
    """A workspace with a worktree in it, for tests that leave all as it was."""
    root = tmp_path_factory.mktemp("shared")
    add_worktree(make_repository(root))
    with HostFilesystem(root, store=tmp_path_factory.mktemp("store")) as files:
        yield files


@pytest.mark.parametrize("name", WRITES)
def test_file_tools_of_the_outer_one_change_nothing_in_it(shared: HostFilesystem, name: str) -> None:
    root = Path(shared.root)
    before = capture_tree(root)
    with held_call(shared) as call:
        files = shared.for_call(call)
        files.write("src/b.txt", "changed")
        with pytest.raises(PermissionError, match="open that directory") as caught:
            WRITES[name](files)
        assert caught.value.filename == INNER
        call.rollback()
    assert capture_tree(root) == before


def test_file_tools_of_the_outer_one_refuse_a_worktree_that_was_made_since_it_was_opened(
    root: Path, workspace: Workspace
) -> None:
    add_worktree(root, "later")
    with pytest.raises(PermissionError, match="open that directory"):
        workspace.filesystem.write("later/a.txt", "x")


def test_file_tools_of_the_outer_one_read_it(workspace: Workspace) -> None:
    files = workspace.filesystem
    assert files.read(f"{INNER}/src/b.txt").content == "b\n"
    assert f"{INNER}/a.txt" in [match.path for match in files.glob("**/a.txt")]
    files.symlink("link", INNER)
    files.move("link", "another")
    files.delete("another")
    files.write("other/.git", "gitdir: elsewhere\n")
    files.move("other", "moved")
    files.delete("moved", recursive=True)


def without_inner(tree: dict[str, CapturedPath]) -> dict[str, CapturedPath]:
    return {path: one for path, one in tree.items() if not f"{path}/".startswith(f"{INNER}/")}


def within(tree: dict[str, CapturedPath]) -> dict[str, CapturedPath]:
    return {path: one for path, one in tree.items() if path.startswith(f"{INNER}/")}


def sh(root: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=root, check=True)


def test_a_rollback_of_a_command_that_wrote_in_it_changes_nothing_there(root: Path, workspace: Workspace) -> None:
    before = capture_tree(root)
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root / INNER, "echo x > a.txt; rm src/b.txt; mkdir new; mv ../../../src/b.txt new/moved; chmod 700 .")
        sh(root, "echo x > a.txt; touch .claude/worktrees/beside")
        inside = within(capture_tree(root))
        call.rollback()
    after = capture_tree(root)
    assert within(after) == inside
    assert {path: one.lasting for path, one in without_inner(after).items()} == {
        path: one.lasting for path, one in without_inner(before).items()
    }


def test_what_others_do_in_it_while_a_command_runs_is_no_change_of_the_command(
    root: Path, workspace: Workspace
) -> None:
    with held_call(workspace.filesystem, opaque=True) as call:
        (root / INNER / "new").write_text("somebody's")
        (root / "a.txt").write_text("changed")
        assert [change.path for change in call.changed()] == ["a.txt"]
        call.commit()
    assert [step.paths for step in workspace.steps()] == [("a.txt",)]


@pytest.mark.parametrize(
    "script",
    ["mv .claude elsewhere", f"mv {INNER} elsewhere", f"rm {INNER}/.git", f"rm -r {INNER}", "rm -r .claude"],
)
def test_a_worktree_that_a_command_moved_or_removed_is_left_where_it_is_and_the_rest_is_rolled_back(
    root: Path, workspace: Workspace, script: str
) -> None:
    (root / ".claude/settings").write_text("mine\n")
    (root / INNER / "uncommitted").write_text("precious\n")
    with held_call(workspace.filesystem, opaque=True) as call:
        sh(root, f"{script}; echo x > a.txt")
        assert any(INNER in change.path for change in call.changed()) or ".git" in script
        report = call.rollback()
    assert (root / "a.txt").read_text() == "a\n"
    assert (root / ".claude/settings").read_text() == "mine\n"
    kept = [path for path in root.rglob("uncommitted") if path.read_text() == "precious\n"]
    if "mv" in script:
        assert len(kept) == 1
        assert "elsewhere" in str(kept[0])
        assert any("is a linked worktree of git: it stays" in note for note in report.notes)
    else:
        assert len(kept) == (".git" in script)
    if ".git" not in script:
        assert any(note.startswith(f"{INNER} is not as before") for note in report.notes)


def test_a_worktree_that_a_command_makes_is_the_commands_work_and_not_covered_from_then_on(
    root: Path, tmp_path: Path
) -> None:
    before = shape(root)
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        with held_call(workspace.filesystem, opaque=True) as call:
            add_worktree(root)
            (root / INNER / "hidden work").write_text("seen by policies")
            assert f"{INNER}/hidden work" in [change.path for change in call.changed()]
            assert call.rollback().conflicts == ()
        assert shape(root) == before
        with held_call(workspace.filesystem, opaque=True) as call:
            add_worktree(root)
            call.commit()
        with held_call(workspace.filesystem, opaque=True) as call:
            (root / INNER / "a.txt").write_text("changed")
            assert call.changed() == []
            call.rollback()
        assert (root / INNER / "a.txt").read_text() == "changed"
        assert workspace.left_out_since == {INNER: "linked worktree"}
        inside = within(capture_tree(root))
        undone = workspace.undo()
        assert undone.outcomes[f"{INNER}/src/b.txt"] == "kept"
        assert "linked worktree" in undone.reasons[f"{INNER}/src/b.txt"]
        assert within(capture_tree(root)) == inside


def test_a_worktree_that_somebody_makes_and_opens_while_a_command_runs_stays(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "src", root / INNER)  # an ordinary directory before
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        with held_call(workspace.filesystem, opaque=True) as call:
            shutil.rmtree(root / INNER)
            with opened_elsewhere(add_worktree(root), tmp_path / "inner"):
                inside = within(capture_tree(root))
                (root / "a.txt").write_text("changed")
                report = call.rollback()
                assert within(capture_tree(root)) == inside
        assert (root / "a.txt").read_text() == "a\n"
        assert f"{INNER} is a linked worktree of git: it stays as it is, and no history has it" in report.notes


@pytest.mark.parametrize("back", ["undo", "undo a step that is not the newest", "restore"])
def test_a_history_that_covered_it_before_changes_nothing_in_it(root: Path, tmp_path: Path, back: str) -> None:
    (root / INNER / "src").mkdir(parents=True)
    (root / INNER / "src/b.txt").write_text("b\n")
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        write(workspace, f"{INNER}/src/b.txt", "first")
        write(workspace, f"{INNER}/src/new", "first")
        write(workspace, "a.txt", "first")
    shutil.rmtree(root / INNER)
    add_worktree(root)
    shutil.copytree(root / INNER / "src", root / INNER / "copy")
    (root / INNER / "src/b.txt").write_text("first")  # as the history knows it
    (root / INNER / "src/new").write_text("first")
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.left_out == {INNER: "linked worktree"}
        inside = within(capture_tree(root))
        if back == "restore":
            workspace.restore(0)
        else:
            workspace.undo(3 if back == "undo" else None, step=None if back == "undo" else 1)
        assert within(capture_tree(root)) == inside
        assert (root / "a.txt").read_text() == ("first" if "newest" in back else "a\n")
        with held_call(workspace.filesystem, opaque=True) as call:
            sh(root, f"echo x > {INNER}/a.txt; echo x > src/b.txt")
            inside = within(capture_tree(root))
            call.rollback()
        assert within(capture_tree(root)) == inside
    assert (root / "src/b.txt").read_text() == "b\n"


def test_after_a_kill_nothing_is_changed_in_it(root: Path, inner: Path, tmp_path: Path) -> None:
    script = """
import os, pathlib, sys
from ringfence.testing import held_call
from ringfence_sandbox import Workspace
workspace = Workspace.open(sys.argv[1], store=sys.argv[2])
with held_call(workspace.filesystem, opaque=True):
    pathlib.Path(sys.argv[3], "a.txt").write_text("changed")
    pathlib.Path(sys.argv[1], "a.txt").write_text("changed")
    os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", script, str(root), str(tmp_path / "store"), str(inner)]
    assert subprocess.run(command, check=False).returncode == -9
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.filesystem.recovered is not None
    assert (inner / "a.txt").read_text() == "changed"
    assert (root / "a.txt").read_text() == "a\n"


def test_the_history_of_the_outer_one_is_none_of_the_worktree(root: Path, inner: Path) -> None:
    Workspace.open(root).close()
    assert find_workspace(root / "src") == root
    assert find_workspace(inner / "src") is None
    Workspace.open(inner).close()
    assert find_workspace(inner / "src") == inner


def test_what_is_hidden_in_it_stays_hidden_from_the_outer_one(root: Path, inner: Path, tmp_path: Path) -> None:
    (inner / "src/.env").write_text("TOKEN=a-secret-value\n")
    with Workspace.open(root, store=tmp_path / "store", hide=HiddenFiles()) as workspace:
        with held_call(workspace.filesystem, opaque=True) as call:
            call.commit()
        assert workspace.filesystem.hidden_paths == (f"{INNER}/src/.env",)
        with pytest.raises(PermissionError):
            workspace.filesystem.read(f"{INNER}/src/.env")
    assert b"a-secret-value" not in store_bytes(tmp_path / "store")


def test_a_worktree_that_a_command_has_made_can_be_opened(root: Path, workspace: Workspace, tmp_path: Path) -> None:
    with held_call(workspace.filesystem, opaque=True) as call:
        later = add_worktree(root, "later")
        call.commit()
        with Workspace.open(later, store=tmp_path / "later") as another:
            assert another.left_out == {}
