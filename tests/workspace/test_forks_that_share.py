"""Forks that share directories with their source: none is copied, promoted, or seen by a command on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from captured_tree import capture_tree, shape

from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "web/node_modules/x").mkdir(parents=True)
    (tree / "web/node_modules/x/index.js").write_text("x\n")
    (tree / "web/node_modules/.env").write_text("KEY=1\n")
    (tree / "web/main.js").write_text("main\n")
    os.link(tree / "web/main.js", tree / "web/node_modules/main.js")
    (tree / "node_modules").mkdir(mode=0o750)
    (tree / "node_modules/large").write_bytes(b"l" * 5000)
    (tree / "a.txt").write_text("a\n")
    (tree / "link").symlink_to("web")
    return tree


@pytest.fixture
def workspace(tree: Path) -> Iterator[Workspace]:
    with Workspace.open(tree, hide=HiddenFiles()) as opened:
        yield opened


SHARE = ["node_modules", "web/node_modules/"]


def test_a_shared_directory_is_empty_in_the_fork_and_no_change_of_it(tree: Path, workspace: Workspace) -> None:
    before = capture_tree(tree)
    with workspace.fork("a", share=SHARE) as fork:
        root, record = Path(fork.root), fork.fork_record
        assert record is not None
        assert (record.shared, record.left_out) == ({"node_modules": str(tree), "web/node_modules": str(tree)}, {})
        assert workspace.fork_named("a") == record
        assert (root / "node_modules").stat().st_mode == (tree / "node_modules").stat().st_mode
        assert sorted(shape(root)) == sorted(
            path for path in shape(tree) if not path.partition("node_modules")[2].startswith("/")
        )
        assert fork.changes_since_fork() == []
        assert fork.patch() == b""
        assert (fork.unpromoted(), workspace.promote(fork).outcomes) == ([], {})
        (root / "a.txt").write_text("b\n")
        (root / "node_modules/large").write_text("of the fork\n")
        done = workspace.promote(fork)
        assert done.outcomes == {"a.txt": "applied", "node_modules/large": "kept"}
        assert done.reasons == {"node_modules/large": "it is in a directory that the fork shares, which stays"}
        fork.restore(0)
        assert fork.changes_since_fork() == []
    (tree / "a.txt").write_text("a\n")
    after = capture_tree(tree)
    assert {path: one.content for path, one in after.items()} == {path: one.content for path, one in before.items()}


def test_a_fork_of_a_fork_shares_what_that_shares(tree: Path, workspace: Workspace) -> None:
    with (
        workspace.fork("a", share=["node_modules"]) as fork,
        fork.fork("b", share=["web/node_modules", "node_modules"]) as below,
    ):
        record = below.fork_record
        assert record is not None
        assert record.shared == {"node_modules": str(tree), "web/node_modules": fork.root}
        assert below.changes_since_fork() == []
        (Path(below.root) / "a.txt").write_text("b\n")
        assert fork.promote(below).outcomes == {"a.txt": "applied"}


def test_forks_of_which_one_shares_are_compared_without_what_is_shared(tree: Path, workspace: Workspace) -> None:
    with workspace.fork("a", share=["node_modules"]):
        pass
    (tree / "node_modules/large").write_text("another\n")
    with workspace.fork("b") as other:
        (Path(other.root) / "a.txt").write_text("b\n")
    patch = workspace.diff_forks("a", "b")
    assert b"+b\n" in patch
    assert b"node_modules" not in patch


def test_a_fork_from_an_earlier_step_shares_the_directory_as_it_is(tree: Path, workspace: Workspace) -> None:
    with workspace.transaction("write", opaque=False):
        workspace.filesystem.mkdir("new", parents=False)
        workspace.filesystem.write("new/a", "a\n")
        workspace.filesystem.mkdir("new/modules", parents=False)
        workspace.filesystem.write("node_modules/large", "changed\n")
    with workspace.fork("a", at=0, share=["node_modules"]) as fork:
        assert [path.name for path in (Path(fork.root) / "node_modules").iterdir()] == []
        assert fork.changes_since_fork() == []
        assert not (Path(fork.root) / "new").exists()
    with pytest.raises(ValueError, match="what it is in was no directory at step 0"):
        workspace.fork("b", at=0, share=["new/modules"])
    assert [fork.name for fork in workspace.forks()] == ["a"]


def test_what_cannot_be_shared_is_refused_and_nothing_is_made(tree: Path, workspace: Workspace) -> None:
    (tree / "nested/.git").mkdir(parents=True)
    for name, why in (
        ("", "a tree of its own"),
        ("../tree/../x", "is not in"),
        ("gone", "it is no directory"),
        ("a.txt", "it is no directory"),
        ("link/node_modules", "one that a link leads to"),
        ("nested/.git", "git's data of its own"),
    ):
        with pytest.raises(ValueError, match=why):
            workspace.fork("a", share=[name])
    with pytest.raises(ValueError, match="contains another directory that is shared"):
        workspace.fork("a", share=["web/node_modules", "web"])
    with pytest.raises(TypeError, match="not a text"):
        workspace.fork("a", share="node_modules")
    assert workspace.forks() == []


def test_a_hidden_directory_cannot_be_shared(tree: Path) -> None:
    with (
        Workspace.open(tree, hide=HiddenFiles(["web/node_modules"])) as workspace,
        pytest.raises(ValueError, match="it is hidden"),
    ):
        workspace.fork("a", share=["web/node_modules"])


def test_no_command_on_this_machine_runs_in_a_fork_that_shares(workspace: Workspace) -> None:
    with workspace.fork("a", share=["node_modules"]) as fork:
        with pytest.raises(ValueError, match="this fork shares node_modules, which only a container"):
            fork.run(["true"])
        with pytest.raises(ValueError, match="only a container of it shows"):
            fork.run_in_terminal(["true"])


def test_room_is_not_needed_for_what_is_shared(workspace: Workspace) -> None:
    def needed(*share: str) -> int:
        with pytest.raises(OSError, match="would need") as raised:
            workspace.check_fork_room(10**12, share=share)
        return int(raised.value.strerror.partition("would need ")[2].partition(" ")[0].replace(",", ""))

    assert needed() - needed("node_modules") == 8192 * 10**12
