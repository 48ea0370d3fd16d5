"""What a session's steps have changed is told without what others have changed in between, in the same files too."""

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


def by_hand(root: Path, number: int, text: str) -> None:
    lines = (root / "a.txt").read_text().splitlines(keepends=True)
    (root / "a.txt").write_text("".join([*lines[:number], text, *lines[number + 1 :]]))


def test_another_line_of_the_same_file_is_theirs(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    by_hand(root, 15, "by hand\n")
    agent.line("a.txt", 10, "ten\n")
    assert agent.told() == ({"a.txt": "modified"}, [])
    assert b"+five\n" in agent.patch()
    assert b"+ten\n" in agent.patch()
    assert b"by hand" not in agent.patch()


def test_the_same_line_cannot_be_told_apart_and_is_said(root: Path, agent: Agent) -> None:
    by_hand(root, 5, "by hand\n")
    agent.line("a.txt", 5, "five\n")
    assert agent.told() == ({"a.txt": "modified"}, ["a.txt"])
    assert b"-line 5\n+five\n" in agent.patch()


def test_what_others_have_made_or_removed_is_theirs(root: Path, agent: Agent) -> None:
    (root / "new.txt").write_text("by hand\n")
    (root / "d/b.txt").unlink()
    agent.step(lambda files: files.glob("**"), lambda files: files.write("own.txt", "x\n"))
    with tool_transaction(Session(), agent, opaque=True):  # which looks through all files
        pass
    assert agent.told() == ({"own.txt": "created"}, [])


def test_what_others_had_changed_in_a_file_that_is_moved_is_theirs(root: Path, agent: Agent) -> None:
    by_hand(root, 15, "by hand\n")
    agent.step(lambda files: files.move("a.txt", "c.txt"))
    assert agent.told() == ({"a.txt": "deleted", "c.txt": "created"}, [])
    assert b"rename to c.txt" in agent.patch()
    assert b"by hand" not in agent.patch()


def test_a_file_of_somebody_else_s_that_is_moved_has_theirs(root: Path, agent: Agent) -> None:
    (root / "new.txt").write_text("by hand\n")
    agent.step(lambda files: files.move("new.txt", "moved.txt"), lambda files: files.write("own.txt", "x\n"))
    assert agent.told() == ({"moved.txt": "created", "own.txt": "created"}, [])


def test_a_file_that_somebody_puts_into_a_directory_that_is_moved_is_theirs(root: Path, agent: Agent) -> None:
    (root / "d/mine.txt").write_text("by hand\n")
    agent.step(lambda files: files.move("d", "e"))
    assert agent.told() == ({"d": "deleted", "d/b.txt": "deleted", "e": "created", "e/b.txt": "created"}, [])


def test_permission_bits_are_whose_change_they_are(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    (root / "a.txt").chmod(0o755)
    agent.line("a.txt", 10, "ten\n")
    agent.step(lambda files: files.chmod("d/b.txt", 0o755))
    assert b"old mode 100644\nnew mode 100755\n" in agent.patch()
    assert b"a.txt\nold mode" not in agent.patch()


def test_what_was_taken_back_is_not_told(root: Path, agent: Agent) -> None:
    agent.line("a.txt", 5, "five\n")
    agent.step(lambda files: files.write("own.txt", "x\n"))
    by_hand(root, 15, "by hand\n")
    agent.workspace.undo(step=1)
    assert agent.told() == ({"own.txt": "created"}, [])


def test_what_others_did_to_the_agent_s_own_files_is_theirs(root: Path, agent: Agent) -> None:
    agent.step(lambda files: files.move("a.txt", "c.txt"), lambda files: files.write("own.txt", "x\n"))
    (root / "c.txt").rename(root / "theirs.txt")
    (root / "own.txt").unlink()
    agent.step(lambda files: files.write("c.txt", "new\n"), lambda files: files.write("own.txt", "y\n"))
    kinds, mixed = agent.told()
    assert (kinds, mixed) == ({"a.txt": "deleted", "c.txt": "created", "own.txt": "created"}, [])


def test_a_file_where_others_have_removed_a_directory_takes_what_was_in_it_along(root: Path, agent: Agent) -> None:
    shutil.rmtree(root / "d")
    agent.step(lambda files: files.write("d", "x\n"))
    assert agent.told() == ({"d": "modified", "d/b.txt": "deleted"}, ["d/b.txt"])
    assert b"deleted file" in agent.patch()


def test_a_file_in_a_directory_where_others_have_removed_a_file_takes_that_along(root: Path, agent: Agent) -> None:
    (root / "a.txt").unlink()
    (root / "a.txt").mkdir()
    agent.step(lambda files: files.write("a.txt/in", "x\n"))
    assert agent.told() == ({"a.txt": "deleted", "a.txt/in": "created"}, ["a.txt"])
    assert b"deleted file" in agent.patch()


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


EDITS = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), min_size=1, max_size=12)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@given(EDITS)
def test_git_applies_it_where_it_began_and_nothing_of_others_comes_along(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[bool, int]]
) -> None:
    place = tmp_path_factory.mktemp("own")
    root, then, expected = place / "root", place / "then", LINES.copy()
    root.mkdir()
    (root / "a.txt").write_text("".join(LINES))
    shutil.copytree(root, then)
    with Workspace.open(root, store=place / "store") as workspace:
        agent = Agent(workspace)
        for turn, (is_own, number) in enumerate(edits):
            if is_own:
                expected[number * 6] = f"agent {turn}\n"
                agent.line("a.txt", number * 6, f"agent {turn}\n")
            else:
                by_hand(root, number * 6 + 3, f"by hand {turn}\n")
        patch, mixed = agent.patch(), agent.told()[1]
    if patch:
        subprocess.run(["git", "apply", "-"], cwd=then, input=patch, check=True)
    assert ((then / "a.txt").read_text(), mixed) == ("".join(expected), [])
