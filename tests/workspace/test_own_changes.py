"""What a session's steps have changed is told without the files that only others have changed in between."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import Session
from ringfence.runtime import tool_transaction
from ringfence_sandbox import HostFilesystem, Workspace

LINES = [f"line {number}\n" for number in range(30)]


class Agent:
    """Makes steps of one session; ``workspace`` has others' edits in it, too."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.session = Session()
        self.start = workspace.newest

    @property
    def participants(self) -> tuple[HostFilesystem]:
        return (self.workspace.filesystem,)

    def step(self, *changes: Callable[[HostFilesystem], object]) -> None:
        with tool_transaction(self.session, self):
            for change in changes:
                change(self.workspace.filesystem)

    def line(self, path: str, number: int, text: str) -> None:
        def change(files: HostFilesystem) -> None:
            lines = files.read(path, limit=-1).content.splitlines(keepends=True)
            files.write(path, "".join([*lines[:number], text, *lines[number + 1 :]]))

        self.step(change)

    def told(self) -> tuple[dict[str, str], list[str]]:
        own = self.workspace.own_since(self.start, [str(self.session.session_id)])
        return {change.path: change.kind for change in own.changes}, [*own.mixed]

    def patch(self) -> bytes:
        return self.workspace.own_since(self.start, [str(self.session.session_id)]).patch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/d").mkdir(parents=True)
    (tmp_path / "root/a.txt").write_text("".join(LINES))
    (tmp_path / "root/d/b.txt").write_text("b\n")
    return tmp_path / "root"


@pytest.fixture
def agent(root: Path) -> Iterator[Agent]:
    with Workspace.open(root, store=root.parent / "store") as workspace:
        yield Agent(workspace)


def by_hand(root: Path, number: int, text: str, name: str = "a.txt") -> None:
    lines = (root / name).read_text().splitlines(keepends=True)
    (root / name).write_text("".join([*lines[:number], text, *lines[number + 1 :]]))


def test_what_only_others_have_changed_is_theirs(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    (root / "d/b.txt").write_text("by hand\n")
    agent.step(lambda files: files.read("d/b.txt"), lambda files: files.write("own.txt", "x\n"))
    assert agent.told() == ({"a.txt": "modified", "own.txt": "created"}, [])
    assert b"by hand" not in agent.patch()


def test_a_file_that_others_have_changed_too_has_both_and_is_named(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    by_hand(root, 15, "by hand\n")
    agent.line("a.txt", 10, "ten\n")
    assert agent.told() == ({"a.txt": "modified"}, ["a.txt"])
    assert [line in agent.patch() for line in (b"+five\n", b"+by hand\n", b"+ten\n")] == [True, True, True]


def test_what_others_change_after_the_newest_step_of_a_file_is_theirs(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    by_hand(root, 15, "by hand\n")
    (root / "own.txt").write_text("by hand\n")
    agent.step(lambda files: files.read("a.txt"), lambda files: files.write("own.txt", "x\n"))
    with tool_transaction(Session(), agent, opaque=True):  # which looks through all files
        pass
    assert agent.told() == ({"a.txt": "modified", "own.txt": "created"}, ["a.txt", "own.txt"])
    assert b"by hand" not in agent.patch()


def test_what_others_have_made_or_removed_is_theirs(root: Path, agent: Agent) -> None:
    (root / "new.txt").write_text("by hand\n")
    (root / "d/b.txt").unlink()
    agent.step(lambda files: files.glob("**"), lambda files: files.write("own.txt", "x\n"))
    with tool_transaction(Session(), agent, opaque=True):  # which looks through all files
        pass
    assert agent.told() == ({"own.txt": "created"}, [])


def test_a_file_of_somebody_else_s_that_is_moved_is_created_where_it_is_moved_to(root: Path, agent: Agent) -> None:
    (root / "new.txt").write_text("by hand\n")
    agent.step(lambda files: files.move("new.txt", "moved.txt"), lambda files: files.write("own.txt", "x\n"))
    assert agent.told() == ({"moved.txt": "created", "own.txt": "created"}, [])


def test_what_was_taken_back_is_not_told(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    agent.step(lambda files: files.write("own.txt", "x\n"))
    (root / "d/b.txt").write_text("by hand\n")
    agent.workspace.undo(step=1)
    assert agent.told() == ({"own.txt": "created"}, [])


def test_a_file_where_others_have_removed_a_directory_takes_what_was_in_it_along(root: Path, agent: Agent) -> None:
    shutil.rmtree(root / "d")
    agent.step(lambda files: files.write("d", "x\n"))
    assert agent.told() == ({"d": "modified", "d/b.txt": "deleted"}, ["d", "d/b.txt"])
    assert b"deleted file" in agent.patch()


def test_a_file_in_a_directory_where_others_have_removed_a_file_takes_that_along(root: Path, agent: Agent) -> None:
    (root / "a.txt").unlink()
    (root / "a.txt").mkdir()
    agent.step(lambda files: files.write("a.txt/in", "x\n"))
    assert agent.told() == ({"a.txt": "deleted", "a.txt/in": "created"}, ["a.txt"])
    assert b"deleted file" in agent.patch()


def test_of_two_steps_of_which_others_have_removed_one_the_newest_counts(root: Path, agent: Agent) -> None:
    agent.step(lambda files: files.write("e/in", "x\n"))
    shutil.rmtree(root / "e")
    agent.step(lambda files: files.write("e", "x\n"))
    assert agent.told() == ({"e": "created"}, ["e"])


def test_steps_of_another_session_are_others(agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    other = Agent(agent.workspace)
    other.line("a.txt", 15, "fifteen\n")
    assert b"fifteen" not in agent.patch()
    assert b"+five\n" in agent.patch()
    assert b"+five\n" not in other.patch()


def test_a_history_that_does_not_go_back_so_far_is_said(agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    agent.line("a.txt", 6, "six\n")
    agent.workspace.gc(0)
    with pytest.raises(LookupError):
        agent.told()


EDITS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["a.txt", "b.txt", "c.txt"]), st.integers(0, 4)), min_size=1, max_size=12
)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@given(EDITS)
def test_git_applies_it_where_it_began_and_each_file_is_as_the_newest_step_left_it(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[bool, str, int]]
) -> None:
    place = tmp_path_factory.mktemp("own")
    root, then = place / "root", place / "then"
    root.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (root / name).write_text("".join(LINES))
    shutil.copytree(root, then)
    expected = {path.name: path.read_text() for path in root.iterdir()}
    with Workspace.open(root, store=place / "store") as workspace:
        agent = Agent(workspace)
        for turn, (is_own, name, number) in enumerate(edits):
            if is_own:
                agent.line(name, number * 6, f"agent {turn}\n")
                expected[name] = (root / name).read_text()
            else:
                by_hand(root, number * 6 + 3, f"by hand {turn}\n", name)
        patch, (kinds, mixed) = agent.patch(), agent.told()
    if patch:
        subprocess.run(["git", "apply", "-"], cwd=then, input=patch, check=True)
    assert {path.name: path.read_text() for path in then.iterdir()} == expected
    assert {*mixed} <= {*kinds} == {name for is_own, name, _ in edits if is_own}
    assert {name for name in kinds if "by hand" in expected[name]} <= {*mixed}
