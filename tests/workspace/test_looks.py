"""Calls that somebody else runs: a look before them, and their changes adopted or taken back after them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from captured_tree import shape
from killing import killed_at
from real_git import git

from ringfence.errors import TransactionError
from ringfence.participants import Change
from ringfence.prompt import (
    ApprovalPolicy,
    ApprovalRequest,
    DeletionLimitPolicy,
    PathPolicy,
    PolicyDecision,
    Tool,
    ToolContext,
)
from ringfence_sandbox import Workspace

NOTHING = [PathPolicy(allow=["/nothing"])]


def sh(root: Path, script: str) -> None:
    subprocess.run(["sh", "-ec", script], cwd=root, check=True)


def test_what_somebody_elses_call_changed_is_one_step_that_says_whose(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    sh(root, "echo more >> a.txt; mkdir n; echo x > n/f; rm d/b.txt")
    found = workspace.adopt(
        mark,
        tool="Bash",
        call_id="call-7",
        session_id="session-3",
        agent="reviewer",
        prompt_id="prompt-2",
        parent_call="call-1",
        approved_by="a person",
        client="claude",
        params={"command": "make"},
    )
    assert found.kept
    assert found.mark is None
    assert found.step == workspace.steps()[-1]
    step = found.step
    assert step is not None
    assert (step.tool, step.call_id, step.session_id, step.client) == ("Bash", "call-7", "session-3", "claude")
    assert [change.path for change in found.changes] == [*step.paths] == ["a.txt", "d/b.txt", "n", "n/f"]
    assert found.changed_paths == step.paths
    record = found.receipt.to_json()
    names = ("agent", "prompt_id", "parent_call", "approved_by", "outcome", "commit", "params")
    values = ("reviewer", "prompt-2", "call-1", "a person", "committed", step.commit, {"command": "make"})
    assert tuple(record[name] for name in names) == values
    assert found.receipt.began_at is not None
    assert found.receipt.began_at <= found.receipt.started_at
    before = shape(root)
    assert workspace.undo().has_changed
    assert workspace.undo().has_changed
    assert shape(root) == before


def test_a_denied_call_is_taken_back_and_kept_aside(root: Path, workspace: Workspace) -> None:
    before, mark = shape(root), workspace.begin_look()
    sh(root, "echo more >> a.txt; mkdir n; echo x > n/f; rm -r d")
    found = workspace.adopt(mark, tool="Bash", call_id="c", policies=[PathPolicy(deny=["n"])])
    assert (found.outcome, found.step, found.conflicts) == ("denied", None, ())
    assert found.receipt.policies[0].policy == "paths"
    assert [change.path for change in found.changes] == ["a.txt", "d", "d/b.txt", "n", "n/f"]
    assert shape(root) == before
    assert found.aborted is not None
    kept = workspace.aborted_step(found.aborted)
    assert kept.step.call_id == "c"
    assert b"+more" in kept.patch
    assert workspace.steps() == []


def test_a_call_that_changed_nothing_is_no_step(workspace: Workspace) -> None:
    found = workspace.adopt(workspace.begin_look(), tool="Bash", policies=NOTHING)
    assert (found.outcome, found.step, found.changes) == ("committed", None, ())


@pytest.mark.parametrize("mark", ["", "no such", "1-0123456789abcdef", "../../x"])
def test_an_unknown_mark_changes_nothing(root: Path, workspace: Workspace, mark: str) -> None:
    sh(root, "echo more >> a.txt")
    before = shape(root)
    with pytest.raises(ValueError, match="no look"):
        workspace.adopt(mark, tool="Bash", policies=NOTHING)
    assert shape(root) == before
    assert workspace.steps() == []


def test_a_call_without_a_name_is_not_adopted(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    sh(root, "echo more >> a.txt")
    with pytest.raises(ValueError, match="tool is empty"):
        workspace.adopt(mark, tool=" ")
    assert workspace.steps() == []
    denied = workspace.adopt(mark, tool="Bash", policies=NOTHING)
    assert (denied.outcome, denied.changed_paths) == ("denied", ())


@pytest.mark.parametrize("policies", [(), NOTHING], ids=["kept", "denied"])
def test_a_mark_is_adopted_once(root: Path, workspace: Workspace, policies: Sequence[PathPolicy]) -> None:
    mark = workspace.begin_look()
    sh(root, "echo more >> a.txt")
    workspace.adopt(mark, tool="Bash", policies=policies)
    sh(root, "echo a person >> a.txt")
    before, steps = shape(root), workspace.steps()
    with pytest.raises(ValueError, match="no look"):
        workspace.adopt(mark, tool="Bash", policies=NOTHING)
    assert (shape(root), workspace.steps()) == (before, steps)
    dropped = workspace.begin_look()
    workspace.drop_look(dropped)
    with pytest.raises(ValueError, match="no look"):
        workspace.adopt(dropped, tool="Bash")
    with pytest.raises(ValueError, match="no look"):
        workspace.drop_look(dropped)


def test_one_look_is_the_end_of_one_call_and_the_beginning_of_the_next(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    for number, policies in enumerate([(), NOTHING, ()]):
        sh(root, f"echo {number} >> a.txt; touch f{number}")
        found = workspace.adopt(mark, tool="Bash", policies=policies, begin_next=True)
        assert found.kept == (number != 1)
        assert {change.path for change in found.changes} == {"a.txt", f"f{number}"}
        assert found.mark is not None
        mark = found.mark
    assert sorted(path.name for path in root.glob("f*")) == ["f0", "f2"]


def test_looks_go_by_a_watch_and_not_by_all_files(root: Path, workspace: Workspace) -> None:
    for number in range(2):
        mark = workspace.begin_look()
        sh(root, f"echo new > new{number}.txt; echo {number} > a.txt")
        done = workspace.adopt(mark, tool="bash")
        assert done.receipt.detection == "watch"
        assert [change.path for change in done.changes] == ["a.txt", f"new{number}.txt"]


def test_what_steps_and_others_did_meanwhile_is_not_part_of_it(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    sh(root, "echo early > early")
    workspace.run(["touch", "by-run"])  # its first look finds what was changed before it
    with workspace.transaction("typed", opaque=False):
        workspace.filesystem.write("typed", "x")
    sh(root, "echo late > late")
    found = workspace.adopt(mark, tool="Bash", policies=[PathPolicy(deny=["early", "by-run", "typed"])])
    assert found.kept
    assert [change.path for change in found.changes] == ["late"]


def test_of_two_looks_that_overlap_nothing_is_counted_twice(root: Path, workspace: Workspace) -> None:
    first = workspace.begin_look()
    sh(root, "touch by-first")
    second = workspace.begin_look()
    sh(root, "touch by-both")
    done = workspace.adopt(first, tool="Bash", call_id="first")
    sh(root, "touch by-second")
    also = workspace.adopt(second, tool="Bash", call_id="second", policies=NOTHING)
    assert [change.path for change in done.changes] == ["by-both"]
    assert [change.path for change in also.changes] == ["by-second"]
    assert sorted(path.name for path in root.glob("by-*")) == ["by-both", "by-first"]


def test_a_persons_edit_between_two_calls_is_not_the_next_calls(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    sh(root, "touch one")
    workspace.adopt(mark, tool="Bash")
    sh(root, "echo a person > mine; echo a person >> a.txt")
    before, mark = shape(root), workspace.begin_look()
    sh(root, "rm mine; echo agent >> a.txt")
    assert workspace.adopt(mark, tool="Bash", policies=NOTHING).outcome == "denied"
    assert shape(root) == before


def test_a_look_at_named_files_leaves_all_others_alone(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look(paths=["a.txt", "new/deep/x", "d"])
    sh(
        root,
        "echo more >> a.txt; mkdir -p new/deep; echo x > new/deep/x; echo beside > new/beside;"
        "echo y > other; rm d/b.txt",
    )
    found = workspace.adopt(mark, tool="Edit", paths=["a.txt", "new/deep/x", "d"], policies=NOTHING)
    assert [change.path for change in found.changes] == ["a.txt", "d/b.txt", "new", "new/deep", "new/deep/x"]
    assert (root / "other").read_text() == "y\n"
    assert (root / "new/beside").read_text() == "beside\n"
    assert (root / "d/b.txt").read_text() == "b\n"
    assert "more" not in (root / "a.txt").read_text()
    assert not (root / "new/deep").exists()
    mark = workspace.begin_look(paths=["a.txt"])
    sh(root, "echo more >> a.txt; echo z > other")
    kept = workspace.adopt(mark, tool="Edit", paths=["a.txt"])
    assert kept.step is not None
    assert kept.step.paths == ("a.txt",)
    for paths in (["../x"], "a.txt"):
        with pytest.raises((PermissionError, TypeError)):
            workspace.begin_look(paths=paths)


def test_a_named_file_takes_its_other_names_along(root: Path, workspace: Workspace) -> None:
    os.link(root / "a.txt", root / "d/again")
    workspace.look()
    before, mark = shape(root), workspace.begin_look(paths=["a.txt"])
    sh(root, "echo more >> a.txt")
    found = workspace.adopt(mark, tool="Edit", paths=["a.txt"], policies=NOTHING)
    assert [change.path for change in found.changes] == ["a.txt", "d/again"]
    assert shape(root) == before
    assert (root / "a.txt").stat().st_ino == (root / "d/again").stat().st_ino


def test_a_look_whose_end_never_comes_leaves_the_change_to_the_next_look(root: Path, tmp_path: Path) -> None:
    def work(kill: Callable[[str], None]) -> None:
        workspace = Workspace.open(root, store=tmp_path / "store")
        (tmp_path / "mark").write_text(workspace.begin_look())
        sh(root, "echo more >> a.txt")
        kill("now")

    assert killed_at(0, work)
    before = shape(root)
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.recovered is None
        assert shape(root) == before
        [external, _] = workspace.log()
        assert external.paths == ("a.txt",)
        late = workspace.adopt((tmp_path / "mark").read_text(), tool="Bash", policies=NOTHING)
        assert (late.outcome, late.changes) == ("committed", ())
        assert workspace.restore(0).has_changed


def test_an_opening_that_does_not_look_goes_on_with_earlier_marks(root: Path, tmp_path: Path) -> None:
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        whole, named = workspace.begin_look(), workspace.begin_look(paths=["mine.txt"])
        sh(root, "echo more >> a.txt; echo 1 > mine.txt")
    before = shape(root)
    with Workspace.open(root, store=tmp_path / "store", look_first=False) as workspace:
        assert workspace.adopt(named, tool="Write").changed_paths == ("mine.txt",)
        assert [change.path for change in workspace.adopt(whole, tool="Bash", policies=NOTHING).changes] == ["a.txt"]
        assert workspace.undo(1).has_changed
    assert shape(root) != before


class Ends(PathPolicy):
    """Ends the process, or its thread of control, when it is asked."""

    def __init__(self, how: Callable[[], object]) -> None:
        super().__init__(deny=["never"])
        self.how = how

    def check_effects(
        self, tool: Tool[object, object], params: object, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        self.how()
        return PolicyDecision.allow()


def test_a_kill_while_it_is_judged_takes_nothing_back(root: Path, tmp_path: Path) -> None:
    def work(kill: Callable[[str], None]) -> None:
        with Workspace.open(root, store=tmp_path / "store") as workspace:
            mark = workspace.begin_look()
            sh(root, "echo more >> a.txt")
            workspace.adopt(mark, tool="Bash", policies=[Ends(lambda: kill("now"))])

    assert killed_at(0, work)
    with Workspace.open(root, store=tmp_path / "store") as workspace:
        assert workspace.recovered is None
    assert (root / "a.txt").read_text().endswith("more\n")


def test_an_interrupt_while_it_is_judged_takes_nothing_back(root: Path, workspace: Workspace) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    mark = workspace.begin_look()
    sh(root, "echo more >> a.txt")
    with pytest.raises(KeyboardInterrupt):
        workspace.adopt(mark, tool="Bash", policies=[Ends(interrupt)])
    assert (root / "a.txt").read_text().endswith("more\n")
    found = workspace.adopt(mark, tool="Bash")
    assert found.step is not None
    assert found.step.paths == ("a.txt",)


def test_a_person_is_asked_with_the_patch(root: Path, workspace: Workspace) -> None:
    asked: list[bytes] = []

    def ask(request: ApprovalRequest) -> None:
        asked.append(request.diff)

    mark = workspace.begin_look()
    sh(root, "echo more >> a.txt")
    assert workspace.adopt(mark, tool="Bash", policies=[ApprovalPolicy(ask)]).outcome == "denied"
    assert b"+more" in asked[0]


def test_limits_count_by_the_session_that_calls_name(root: Path, workspace: Workspace) -> None:
    sh(root, "touch x y z")
    limit = [DeletionLimitPolicy(max_files=1)]

    def remove(name: str, session_id: str) -> str:
        mark = workspace.begin_look()
        sh(root, f"rm {name}")
        return workspace.adopt(mark, tool="Bash", session_id=session_id, policies=limit).outcome

    assert [remove("x", "one"), remove("y", "one"), remove("z", "two")] == ["committed", "denied", "committed"]


def test_a_look_in_a_call_that_has_changed_files_is_refused(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    with pytest.raises(TransactionError), workspace.transaction("typed", opaque=False):
        workspace.filesystem.write("x", "x")
        workspace.begin_look()
    with pytest.raises(TransactionError), workspace.transaction("outer"):
        workspace.adopt(mark, tool="Bash")
    assert workspace.adopt(mark, tool="Bash").kept
    with Workspace.open(root, store=root.parent / "store", read_only=True) as reader, pytest.raises(PermissionError):
        reader.begin_look()


def test_gc_keeps_what_a_mark_needs(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    for number in range(3):
        workspace.run(["touch", f"f{number}"])
    workspace.gc(0)
    sh(root, "echo more >> a.txt")
    assert workspace.adopt(mark, tool="Bash").kept


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


@pytest.fixture
def repository(root: Path) -> Path:
    git(root, "init", "-q", ".")
    commit(root, "first")
    return root


def test_a_denied_commit_is_taken_back_whole_and_its_objects_stay(repository: Path, workspace: Workspace) -> None:
    before, mark = _git_state(repository), workspace.begin_look()
    sh(repository, "echo two >> a.txt; git checkout -qb other; git config alias.x '!touch y'; git stash list")
    commit(repository, "second")
    made = git(repository, "rev-parse", "HEAD").strip()
    found = workspace.adopt(mark, tool="Bash", policies=[PathPolicy(deny=["a.txt"])])
    assert (found.outcome, found.conflicts) == ("denied", ())
    assert _git_state(repository) == before
    git(repository, "cat-file", "-e", made)
    git(repository, "fsck", "--strict")
    assert git(repository, "status", "--porcelain") == ""


def _git_state(root: Path) -> object:
    place = root / ".git"
    files = [path for path in place.rglob("*") if path.is_file() and "objects" not in path.parts]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_git_command_at_work_is_waited_for(repository: Path, workspace: Workspace) -> None:
    before, mark = _git_state(repository), workspace.begin_look()
    sh(repository, "echo two >> a.txt")
    commit(repository, "second")
    lock = repository / ".git/index.lock"
    lock.touch()
    threading.Timer(0.15, lock.unlink).start()
    assert workspace.adopt(mark, tool="Bash", policies=NOTHING).conflicts == ()
    assert _git_state(repository) == before


@pytest.mark.prove
def test_a_git_command_that_stays_at_work_keeps_git_and_is_named(repository: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    sh(repository, "echo two >> a.txt")
    commit(repository, "second")
    head = git(repository, "rev-parse", "HEAD")
    (repository / ".git/index.lock").touch()
    found = workspace.adopt(mark, tool="Bash", policies=NOTHING)
    assert found.outcome == "denied"
    assert ".git/refs/heads/master" in found.conflicts or ".git/refs/heads/main" in found.conflicts
    assert git(repository, "rev-parse", "HEAD") == head
    assert "two" not in (repository / "a.txt").read_text()


def test_several_threads_adopt_one_mark_once(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look()
    sh(root, "echo more >> a.txt")
    outcomes: list[str] = []

    def adopt() -> None:
        try:
            outcomes.append("a step" if workspace.adopt(mark, tool="Bash").step else "nothing")
        except ValueError:
            outcomes.append("refused")

    threads = [threading.Thread(target=adopt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["a step", "refused", "refused", "refused"]


def test_a_large_file_that_no_history_has_is_moved_and_stays(root: Path, tmp_path: Path) -> None:
    from ringfence_sandbox import ScanLimits

    (root / "large").write_bytes(b"x" * 2000)
    with Workspace.open(root, store=tmp_path / "store", limits=ScanLimits(max_file_bytes=1000)) as workspace:
        mark = workspace.begin_look()
        sh(root, f"mv large d/moved; echo more >> a.txt; {sys.executable} -c pass")
        found = workspace.adopt(mark, tool="Bash", policies=NOTHING)
        assert found.outcome == "denied"
        assert "more" not in (root / "a.txt").read_text()
        assert [path.stat().st_size for path in (root / "large", root / "d/moved") if path.exists()] == [2000]


def test_a_look_at_named_files_limits_the_call_that_is_adopted(root: Path, workspace: Workspace) -> None:
    mark = workspace.begin_look(paths=["a.txt"])
    (root / "a.txt").write_text("the call's\n")
    (root / "by-somebody-else").write_text("theirs\n")
    found = workspace.adopt(mark, tool="Edit", policies=NOTHING)
    assert [change.path for change in found.changes] == ["a.txt"]
    assert (root / "by-somebody-else").read_text() == "theirs\n"
