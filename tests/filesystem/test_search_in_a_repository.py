"""glob and grep leave out what git ignores in the whole repository, and never a file that it tracks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence import Prompt, PromptTemplate, Session
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem
from ringfence_sandbox import HostFilesystem
from ringfence_tools import HostMount, VfsToolsSection

Search = Callable[..., str]


def git(*arguments: str | Path, cwd: Path) -> None:
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=cwd, env=quiet, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for path in ("sub/src/a.py", "sub/build/tracked.py", "sub/tracked.log", "other.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("needle\n")
    git("init", "-q", cwd=root)
    (root / ".gitignore").write_text("/sub/build/\n*.log\n")
    git("add", "-f", ".", cwd=root)
    git("commit", "-qm", "All", cwd=root)
    (root / ".git/info/exclude").write_text("local.py\n")
    for path in ("sub/build/made.py", "sub/x.log", "sub/src/local.py"):
        (root / path).write_text("needle\n")
    return root


FOUND = {"src/a.py", "build/tracked.py", "tracked.log"}


@pytest.fixture(params=["disk", "memory"])
def search(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Search]]:
    opened: list[HostFilesystem] = []

    def over(root: Path) -> Search:
        session = Session()
        if request.param == "memory":
            section = VfsToolsSection(session=session, mounts=[HostMount(root)])
        else:
            opened.append(HostFilesystem(root, store=root.parent / f"store of {root.name}"))
            section = VfsToolsSection(session=session, filesystem=opened[-1])
        prompt = Prompt(PromptTemplate(ns="tests", key="search", sections=[section])).bind(
            resources={Filesystem: section.filesystem}
        )

        def call(tool: str, **arguments: object) -> str:
            with prompt.resources:
                return ToolExecutor(prompt=prompt, session=session).call(tool, arguments, call_id="call").text()

        return call

    yield over
    for filesystem in opened:
        filesystem.close()


def paths(answer: str, *, among: Path) -> set[str]:
    known = {file.relative_to(among).as_posix() for file in among.rglob("*") if file.is_file()}
    return {word for line in answer.splitlines()[1:] if (word := line.partition(":")[0]) in known}


@pytest.mark.parametrize("call", [("glob", "**/*"), ("grep", "needle")])
@pytest.mark.parametrize("place", ["", "sub"])
def test_the_rules_of_the_whole_repository_count_and_tracked_files_are_found(
    search: Callable[[Path], Search], repository: Path, call: tuple[str, str], place: str
) -> None:
    root = repository / place
    answer = search(root)(call[0], pattern=call[1])
    found = {path for path in paths(answer, among=root) if path.rpartition("/")[2] != ".gitignore"}
    assert found == (FOUND if place else {f"sub/{path}" for path in FOUND} | {"other.py"})
    assert "left out, as git ignores them" in answer
    assert "other" not in answer or not place


def test_a_worktree_and_a_subdirectory_of_one_have_its_index(
    search: Callable[[Path], Search], repository: Path, tmp_path: Path
) -> None:
    git("worktree", "add", "-q", tmp_path / "tree", cwd=repository)
    (tmp_path / "tree/sub/src/local.py").write_text("needle\n")
    (tmp_path / "tree/sub/new.log").write_text("needle\n")
    answer = search(tmp_path / "tree/sub")("grep", pattern="needle")
    assert paths(answer, among=tmp_path / "tree/sub") == FOUND


def test_what_git_does_not_track_any_more_is_left_out(search: Callable[[Path], Search], repository: Path) -> None:
    git("rm", "-q", "--cached", "sub/tracked.log", cwd=repository)
    answer = search(repository / "sub")("grep", pattern="needle")
    assert paths(answer, among=repository / "sub") == FOUND - {"tracked.log"}


def test_a_change_of_the_index_counts_at_once(repository: Path, tmp_path: Path) -> None:
    with HostFilesystem(repository, store=tmp_path / "store") as filesystem:
        rules = filesystem.repository_rules
        assert rules is not None
        assert rules.tracks("sub/tracked.log")
        git("rm", "-q", "--cached", "sub/tracked.log", cwd=repository)
        rules = filesystem.repository_rules
        assert rules is not None
        assert not rules.tracks("sub/tracked.log")


def test_an_ignored_directory_that_is_named_is_searched_whole(
    search: Callable[[Path], Search], repository: Path
) -> None:
    answer = search(repository / "sub")("grep", pattern="needle", path="build")
    assert paths(answer, among=repository / "sub") == {"build/tracked.py", "build/made.py"}


def test_gits_own_data_is_left_out_also_where_its_index_cannot_be_read(
    search: Callable[[Path], Search], repository: Path
) -> None:
    (repository / ".git/index").write_bytes(b"DIRC of no version")
    answer = search(repository)("glob", pattern="**/*")
    assert "sub/x.log" in answer
    assert ".git/" not in answer


def test_a_directory_that_its_repository_ignores_has_its_own_rules_alone(
    search: Callable[[Path], Search], repository: Path
) -> None:
    (repository / "sub/build/.gitignore").write_text("made.py\n")
    answer = search(repository / "sub/build")("grep", pattern="needle")
    assert paths(answer, among=repository / "sub/build") == {"tracked.py"}
