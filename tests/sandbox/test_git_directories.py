"""Which of git's directories outside of a workspace its container shows, and when it shows none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from real_git import git, needs_git, repository

from ringfence.filesystem import HiddenFiles
from ringfence_sandbox.container.git_directories import NO_GIT, GitDirectories

pytestmark = needs_git


@pytest.fixture
def main(tmp_path: Path) -> Path:
    (tmp_path / "main/sub").mkdir(parents=True)
    (tmp_path / "main/sub/b.txt").write_text("b\n")
    return repository(tmp_path / "main")


@pytest.fixture
def worktree(main: Path) -> Path:
    git(main, "worktree", "add", "--quiet", str(main.parent / "tree"))
    return main.parent / "tree"


def of(root: Path, hide: HiddenFiles | None = None) -> tuple[list[tuple[str, str]], str]:
    found = GitDirectories.of(str(root), hide)
    return [(one.source, one.target) for one in found.shown], found.problem


def test_an_ordinary_repository_and_a_directory_without_one_need_nothing(main: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert GitDirectories.of(str(main)) == GitDirectories.of(str(tmp_path / "plain")) == NO_GIT


def test_a_worktree_shows_the_directory_that_it_shares(main: Path, worktree: Path) -> None:
    assert of(worktree) == ([(f"{main}/.git", f"{main}/.git")], "")


def test_relative_names_lead_from_where_the_container_has_the_workspace(main: Path, worktree: Path) -> None:
    (worktree / ".git").write_text("gitdir: ../main/.git/worktrees/tree\n")
    assert of(worktree) == ([(f"{main}/.git", "/main/.git")], "")


def test_objects_that_are_borrowed_in_turn_are_shown(main: Path, tmp_path: Path) -> None:
    for source, name in (("main", "second"), ("second", "third")):
        git(tmp_path, "clone", "--quiet", "--shared", str(tmp_path / source), name)
    with open(main / ".git/objects/info/alternates", "w") as file:
        file.write(f"# in a circle\n\n{tmp_path}/second/.git/objects\n{tmp_path}/gone/.git/objects\n")
    objects = [f"{tmp_path}/{name}/.git/objects" for name in ("second", "main")]
    assert of(tmp_path / "third") == ([(path, path) for path in objects], "")


def test_a_part_of_a_repository_has_no_git(main: Path, tmp_path: Path) -> None:
    words = f"no git command works in the container: DIR is in the repository {main}: give that as DIR"
    assert of(main / "sub") == ([], f"{words}, or do without git")
    (main / "sub/.git").mkdir()  # as for git
    assert of(main / "sub")[1].startswith(words)
    copy = shutil.copytree(main / "sub", tmp_path / "copy")
    assert GitDirectories.of(str(copy), copied_from=main / "sub").problem.startswith(words)
    copy = shutil.copytree(main / "sub", main / "results")
    assert GitDirectories.of(str(copy), copied_from=tmp_path) == NO_GIT


@pytest.mark.parametrize("name", ["usr", "etc", "proc", "workspace"])
def test_nothing_of_the_container_is_replaced(main: Path, worktree: Path, name: str) -> None:
    os.rename(main, main.parent / name)
    (worktree / ".git").write_text(f"gitdir: ../{name}/.git/worktrees/tree\n")
    shown, problem = of(worktree)
    assert shown == []
    assert problem.endswith(f"{name}/.git would be at /{name}/.git, which is the container's own")


def private_directory(root: Path) -> None:
    (root.parent / "private").mkdir()
    (root / ".git").write_text(f"gitdir: {root.parent}/private\n")


def private_link(root: Path) -> None:
    (root / ".git").unlink()
    (root / ".git").symlink_to(root.parent)


def private_objects(root: Path) -> None:
    (root.parent / "private/objects").mkdir(parents=True)
    (root.parent / "main/.git/objects/info/alternates").write_text(f"{root.parent}/private/objects\n")


def private_common_directory(root: Path) -> None:
    (root.parent / "main/.git/worktrees/tree/commondir").write_text(str(root.parent))


def own_directory(root: Path) -> None:
    shutil.copytree(root.parent / "main/.git", root / "data")
    (root / ".git").write_text(f"gitdir: {root}/data\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (private_directory, "no directory of git's"),
        (private_link, "no directory of git's"),
        (private_common_directory, "no directory of git's"),
        (private_objects, "which has none of git's"),
        (own_directory, "is in DIR, and git's files name it by an absolute path"),
    ],
)
def test_nothing_else_of_the_host_is_shown(worktree: Path, change: object, words: str) -> None:
    assert callable(change)
    change(worktree)
    shown, problem = of(worktree)
    assert shown == []
    assert problem.startswith("git commands fail in the container: ")
    assert words in problem


def test_a_directory_of_git_that_contains_the_workspace_is_not_shown(main: Path) -> None:
    git(main, "worktree", "add", "--quiet", ".git/tree")
    assert of(main / ".git/tree") == (
        [],
        f"git commands fail in the container: {main}/.git, which is git's own, contains DIR",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_directory_of_another_user_is_not_shown(main: Path, worktree: Path) -> None:
    os.chown(main / ".git", 12345, 12345)
    assert of(worktree)[0] == []
    assert "belongs to another user than DIR" in of(worktree)[1]


def test_what_is_hidden_in_an_ordinary_repository_is_hidden_here(main: Path, worktree: Path) -> None:
    (main / ".git/vault").mkdir()
    for name in ("vault/a", "id_rsa", "shown"):
        (main / ".git" / name).touch()
    (main / ".git/server.key").write_text("-----BEGIN PRIVATE KEY-----")
    rule = HiddenFiles(["/.git/vault", "/.git/config"])
    covers = GitDirectories.of(str(worktree), rule).covers(rule)
    hidden = {one.target.removeprefix(f"{main}/.git/"): one.is_directory for one in covers}
    assert hidden == {"vault": True, "config": False, "id_rsa": False, "server.key": False}
    assert GitDirectories.of(str(worktree), HiddenFiles(["/.git"])) == NO_GIT


def test_the_settings_of_a_submodule_are_those_that_say_how_files_are_compared(main: Path, tmp_path: Path) -> None:
    outer = repository(shutil.copytree(main / "sub", tmp_path / "outer"))
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(main), "inner")
    git(outer / "inner", "config", "core.autoCRLF", "input")
    git(outer / "inner", "config", "core.hooksPath", "/evil")
    found = GitDirectories.of(str(outer / "inner"))
    assert [(one.source, one.target) for one in found.shown] == [(f"{outer}/.git/modules/inner", "/.git/modules/inner")]
    (config,) = found.covers(None)
    assert config.target == "/.git/modules/inner/config"
    assert "autoCRLF = input" in config.content
    assert not any(words in config.content for words in ("worktree", "remote", "evil"))
    assert found.covers(HiddenFiles(["/.git/config"]))[0].content == ""
