"""What git ignores does not drown what a run shows. It stays in the history and in rollbacks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence

from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.testing import held_call
from ringfence_sandbox import Repository, Workspace

WORKSPACES = ("disk", "memory")


def git(*arguments: str | Path, cwd: Path, data: bytes | None = None) -> bytes:
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, input=data, env=quiet, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "build").mkdir()
    git("init", "-q", cwd=root)
    (root / ".gitignore").write_text("build/\n*.log\n")
    (root / "src/.gitignore").write_text("/generated.py\n")
    (root / "src/a.py").write_text("one\n")
    (root / "build/tracked.txt").write_text("tracked\n")
    git("add", "-f", ".", cwd=root)
    git("commit", "-qm", "All", cwd=root)
    (root / ".git/info/exclude").write_text("/local.txt\n")
    (root / "old.log").write_text("old\n")
    return root


def write(path: str, content: str) -> dict[str, object]:
    return {"name": "write_file", "arguments": {"file_path": path, "content": content}}


def turns(*calls: Mapping[str, object]) -> str:
    found: list[dict[str, Any]] = [{"text": "", "tool_calls": [call]} for call in calls]
    return "".join(json.dumps(turn) + "\n" for turn in (*found, {"text": "Done."}))


READ = [
    {"name": "read_file", "arguments": {"file_path": path}} for path in ("src/a.py", "build/tracked.txt", "old.log")
]
WRITES = (
    write("src/a.py", "two\n"),
    write("build/tracked.txt", "changed\n"),
    write("build/made.bin", "made\n"),
    write("build/deep/made.bin", "made\n"),
    write("src/generated.py", "generated\n"),
    write("generated.py", "not that one\n"),
    write("old.log", "new\n"),
    write("local.txt", "mine\n"),
)
SHOWN = {"src/a.py", "build/tracked.txt", "generated.py"}
IGNORED = {"build/made.bin", "build/deep", "build/deep/made.bin", "src/generated.py", "old.log", "local.txt"}


def run(
    project: Path, *options: str | Path, calls: tuple[Mapping[str, object], ...] = (*READ, *WRITES)
) -> subprocess.CompletedProcess[bytes]:
    script = project.parent / "script.jsonl"
    script.write_text(turns(*calls))
    return ringfence("run", project, "--task", "Do it.", "--model", f"script:{script}", *options)


def changed(found: Mapping[str, Any]) -> set[str]:
    return {change["path"] for change in found["changes"]}


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_a_run_counts_the_ignored_paths_and_its_patch_applies_to_a_clean_checkout(
    project: Path, tmp_path: Path, workspace: str
) -> None:
    git("clone", "-q", project, tmp_path / "clean", cwd=tmp_path)
    patch = tmp_path / "p.patch"
    done = run(project, "--workspace", workspace, "--json", "--patch", patch)
    found = json.loads(done.stdout)
    assert changed(found) == SHOWN
    assert found["ignored"] == len(IGNORED)
    assert b"6 ignored paths changed: --with-ignored shows them" in done.stderr
    git("apply", "--index", patch, cwd=tmp_path / "clean")
    assert (tmp_path / "clean/src/a.py").read_text() == "two\n"
    assert git("status", "--porcelain", cwd=tmp_path / "clean").count(b"\n") == len(SHOWN)


def test_a_report_counts_them_in_each_step(project: Path) -> None:
    report = project.parent / "report.html"
    run(project, "--report", report)
    steps = report.read_text().partition("Each of the steps")[2].partition("</details>")[0]
    assert ("generated.py" in steps, steps.count("1 ignored path"), "old.log" in steps) == (True, 4, False)
    assert steps.count("2 ignored paths") == 1
    assert "made.bin" not in steps


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_with_ignored_shows_them_all(project: Path, workspace: str) -> None:
    found = json.loads(run(project, "--workspace", workspace, "--json", "--with-ignored").stdout)
    assert changed(found) == SHOWN | IGNORED
    assert found["ignored"] == 0
    assert "+made" in found["patch"]


def test_the_history_counts_them_and_undo_brings_them_back(project: Path) -> None:
    run(project)
    for command in (("diff",), ("export",)):
        found = json.loads(ringfence(command[0], project, "--json").stdout)
        assert found["ignored"] == len(IGNORED)
        assert b"old.log" not in ringfence(*command, project).stdout
        assert b"old.log" in ringfence(*command, project, "--with-ignored").stdout
    newest = json.loads(ringfence("show", project, "8", "--json").stdout)
    assert (newest["changes"], newest["ignored"]) == ([], 1)
    assert b"1 ignored path changed: --with-ignored shows it" in ringfence("show", project, "8").stdout
    assert b"+mine" in ringfence("show", project, "8", "--with-ignored").stdout
    log = json.loads(ringfence("log", project, "--json").stdout)["log"]
    assert [(entry["number"], entry["paths"], entry["ignored"]) for entry in log[:2]] == [(8, [], 1), (7, [], 1)]
    assert b"1 ignored path" in ringfence("log", project).stdout
    assert b"old.log" in ringfence("log", project, "--with-ignored").stdout
    assert ringfence("undo", project, "8").returncode == 0
    assert (project / "old.log").read_text() == "old\n"
    assert not (project / "build/made.bin").exists()


def test_mails_of_an_export_leave_them_out(project: Path, tmp_path: Path) -> None:
    git("clone", "-q", project, tmp_path / "clean", cwd=tmp_path)
    run(project)
    mails = ringfence("export", project, "--format", "mbox").stdout
    assert b"old.log" not in mails
    git("am", cwd=tmp_path / "clean", data=mails)
    assert git("status", "--porcelain", cwd=tmp_path / "clean") == b""


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_a_run_cannot_hide_a_change_by_an_ignore_file_of_its_own(project: Path, workspace: str) -> None:
    """The ignore files of the start count, in the run and in what the history shows later."""
    hide = write("lib/.gitignore", "*\n"), write("lib/evil.py", "evil\n")
    found = json.loads(run(project, "--workspace", workspace, "--json", calls=hide).stdout)
    assert changed(found) == {"lib", "lib/.gitignore", "lib/evil.py"}
    if workspace == "disk":
        assert b"evil" in ringfence("show", project, "2").stdout
        assert b"lib/evil.py" in ringfence("log", project).stdout


@pytest.mark.parametrize("command", [("rm", "-f", ".git/index"), ("git", "rm", "-q", "--cached", "build/tracked.txt")])
def test_a_command_cannot_hide_a_change_by_taking_a_tracked_file_out_of_the_index(
    project: Path, command: tuple[str, ...]
) -> None:
    with Workspace.open(project, store=project.parent / "store") as workspace:
        start = workspace.newest
        with held_call(workspace.filesystem, opaque=True) as call:
            subprocess.run(command, cwd=project, check=True)
            (project / "build/tracked.txt").write_text("evil\n")
            call.commit()
        assert not workspace.ignored_at(start).has("build/tracked.txt")
        assert "build/tracked.txt" in workspace.log(1, with_ignored=False)[0].paths
        assert b"+evil" in workspace.show(1, with_ignored=False).patch


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_a_file_that_moves_to_an_ignored_place_is_deleted_for_the_patch(
    project: Path, tmp_path: Path, workspace: str
) -> None:
    git("clone", "-q", project, tmp_path / "clean", cwd=tmp_path)
    move = {"name": "move", "arguments": {"source": "src/a.py", "target": "build/a.py"}}
    found = json.loads(run(project, "--workspace", workspace, "--json", calls=(READ[0], move)).stdout)
    assert (changed(found), found["ignored"]) == ({"src/a.py"}, 1)
    git("apply", "--index", cwd=tmp_path / "clean", data=found["patch"].encode())
    assert not (tmp_path / "clean/src/a.py").exists()


def test_a_copy_in_memory_applies_ignored_changes_too(project: Path) -> None:
    done = run(project, "--workspace", "memory", "--apply", calls=(write("new.log", "new\n"),))
    assert done.returncode == 0, done.stderr
    assert (project / "new.log").read_text() == "new\n"
    assert b"nothing else was changed" in done.stderr


def test_a_worktree_has_the_index_and_the_excludes_of_its_repository(project: Path, tmp_path: Path) -> None:
    git("worktree", "add", "-q", tmp_path / "tree", cwd=project)
    found = ignored(tmp_path / "tree")
    assert found.has("local.txt")
    assert found.has("build/x")
    assert not found.has("build/tracked.txt")


def test_a_directory_in_a_repository_has_the_rules_above_it(project: Path) -> None:
    assert ignored(project / "src").has("x.log")
    assert not ignored(project / "src").has("a.py")
    assert not ignored(project / "build").has("x"), "the directory itself is ignored, as a project in a home directory"


def test_what_cannot_be_read_hides_nothing(project: Path) -> None:
    (project / ".git/index").write_bytes(b"DIRC of no version")
    assert not ignored(project).has("x.log")
    (project / ".git/index").unlink()
    assert ignored(project).has("x.log"), "without an index nothing is tracked"
    os.mkfifo(project / ".git/index")
    assert not ignored(project).has("x.log")


def test_the_data_of_git_the_root_and_links_to_directories_are_not_ignored(project: Path) -> None:
    (project / ".gitignore").write_text("*\n!build/\nout/\n")
    found = ignored(project)
    assert not found.has("", is_directory=True)
    assert ignored(project).has("out", is_directory=True)


def ignored(root: Path) -> IgnoredPaths:
    def read(path: str) -> bytes | None:
        return (root / path).read_bytes() if (root / path).is_file() else None

    return Repository(str(root)).ignored(read)


def test_programs_choose(project: Path) -> None:
    run(project)
    with Workspace.open(project, read_only=True) as workspace:
        assert b"old.log" in workspace.export().text
        hidden = workspace.export(with_ignored=False)
        assert b"old.log" not in hidden.text
        assert set(hidden.ignored) == IGNORED
