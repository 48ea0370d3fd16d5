"""What tools keep in directories that ignore themselves does not drown what a run shows."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence

from ringfence import Prompt, PromptTemplate, Session, Tool, ToolContext, ToolResult, ToolsSection
from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem
from ringfence.prompt import Approval, ApprovalPolicy, ApprovalRequest
from ringfence.testing import held_call
from ringfence_sandbox import Workspace


def git(*arguments: str | Path, cwd: Path, data: bytes | None = None) -> None:
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, input=data, env=quiet, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src/a.py").write_text("one\n")
    git("init", "-q", cwd=root)
    git("add", ".", cwd=root)
    git("commit", "-qm", "All", cwd=root)
    return root


def write(path: str, content: str) -> dict[str, object]:
    return {"name": "write_file", "arguments": {"file_path": path, "content": content}}


SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n# This file is a cache directory tag.\n"
CACHES = {  # as the tools make them
    ".pytest_cache": {
        ".gitignore": "# Created by pytest automatically.\n*\n",
        "CACHEDIR.TAG": SIGNATURE,
        "README.md": "# pytest cache directory #\n",
        "v/cache/nodeids": "[]",
    },
    ".ruff_cache": {".gitignore": "# Automatically created by ruff.\n*\n", "0.6/1": "x", "CACHEDIR.TAG": SIGNATURE},
    "lib/.mypy_cache": {".gitignore": "# Automatically created by mypy\n*\n", "3.13/a.json": "{}"},
    ".venv": {".gitignore": "*", "bin/python": "x"},
    ".crlf": {".gitignore": "\r\n*\r\n", "x": "x"},
    "target": {"CACHEDIR.TAG": SIGNATURE, "debug/x.o": "x"},
}
NO_CACHES = {
    "node_modules": {"x/index.js": "x"},
    "half": {".gitignore": "*\n!kept\n", "kept": "x"},
    "part": {".gitignore": "*.o\n", "x": "x"},
    "tag": {"CACHEDIR.TAG": "# not the signature\n", "x": "x"},
    "gone": {".gitignore": "*\n", "x": "x"},  # a tracked file of it was removed
    "src": {".gitignore": "*\n", "x": "x"},  # it was there
}
SECTION = """
import pathlib
from ringfence import MarkdownSection, Tool, ToolResult

def check(params, *, context):
    root = pathlib.Path(context.filesystem.root)
    for directory, files in {made!r}.items():
        for path, content in files.items():
            file = root / directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, newline="")
    return ToolResult.ok(None, "1 passed")

tool = Tool[None, None](name="check", description="Run the checks.", handler=check, opaque=True)
section = MarkdownSection(title="Check", key="check", template="Text.", tools=[tool])
"""
CHECK = {"name": "check", "arguments": {}}
EDITS = ({"name": "read_file", "arguments": {"file_path": "src/a.py"}}, write("src/a.py", "two\n"))


def run(
    project: Path, made: Mapping[str, Mapping[str, str]], *options: str | Path, calls: tuple[Mapping[str, object], ...]
) -> subprocess.CompletedProcess[bytes]:
    section, script = project.parent / "checks.py", project.parent / "script.jsonl"
    section.write_text(SECTION.format(made=made))
    turns: list[dict[str, Any]] = [*({"text": "", "tool_calls": [call]} for call in calls), {"text": "Done."}]
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    named = ("--section", f"{section}:section", "--model", f"script:{script}")
    return ringfence("run", project, "--task", "Do it.", *named, *options)


def changed(found: Mapping[str, Any]) -> set[str]:
    return {change["path"] for change in found["changes"]}


def test_what_tools_keep_in_directories_that_ignore_themselves_is_not_in_the_patch(project: Path) -> None:
    report = project.parent / "report.html"
    calls = (CHECK, *EDITS, CHECK)
    done = run(project, CACHES, "--json", "--report", report, calls=calls)
    found = json.loads(done.stdout)
    assert changed(found) == {"src/a.py", "lib"}
    assert found["ignored"] == sum(1 for name in CACHES for _ in (project / name).rglob("*")) + len(CACHES)
    first = {one["path"]: one["reason"] for one in found["look_first"]}
    assert first.keys() == CACHES.keys()
    assert first["target"] == "a new directory that ignores itself, 4 paths"
    page = report.read_text()
    assert (".pytest_cache" in page, "nodeids" in page, "a.json" in page) == (True, False, False)
    git("apply", "--check", "-R", cwd=project, data=found["patch"].encode())


def test_the_history_counts_them_too(project: Path) -> None:
    run(project, {name: CACHES[name] for name in (".pytest_cache", "target")}, calls=(CHECK, *EDITS))
    for command in ("diff", "export", "log"):
        assert b".pytest_cache" not in ringfence(command, project).stdout
        assert b".pytest_cache" in ringfence(command, project, "--with-ignored").stdout
    assert b"nodeids" not in ringfence("export", project, "--format", "mbox").stdout
    assert json.loads(ringfence("show", project, "1", "--json").stdout)["changes"] == []
    assert b"+two" in ringfence("diff", project).stdout
    undone = json.loads(ringfence("undo", project, "2", "--json").stdout)
    assert [one["path"] for one in undone["paths"]] == ["src/a.py"]
    assert not (project / ".pytest_cache").exists()


def test_a_later_call_that_changes_or_removes_one_is_counted(project: Path) -> None:
    run(project, {"target": CACHES["target"]}, calls=(CHECK,))
    with Workspace.open(project, store=project.parent / "store") as workspace:
        with held_call(workspace.filesystem, opaque=True) as call:
            for name, content in (("CACHEDIR.TAG", SIGNATURE), ("x", "x")):
                (project / "cache").mkdir(exist_ok=True)
                (project / "cache" / name).write_text(content)
            call.commit()
        assert workspace.show(1, with_ignored=False).changes == []
        with held_call(workspace.filesystem, opaque=True) as call:
            for path in (project / "cache").iterdir():
                path.unlink()
            (project / "cache").rmdir()
            call.commit()
        assert workspace.show(2, with_ignored=False).changes == []


@pytest.mark.parametrize("name", NO_CACHES)
def test_other_directories_that_tools_make_are_shown(project: Path, name: str) -> None:
    (project / "gone").mkdir()
    (project / "gone/tracked").write_text("tracked\n")
    git("add", "-f", "gone", cwd=project)
    (project / "gone/tracked").unlink()
    (project / "gone").rmdir()
    found = json.loads(run(project, {name: NO_CACHES[name]}, "--json", calls=(CHECK,)).stdout)
    assert {f"{name}/{path}" for path in NO_CACHES[name]} <= changed(found)


REPLACED = {  # what was there -> what a program does in its place
    "src/a.py": "rm src/a.py; mkdir src/a.py; echo '*' > src/a.py/.gitignore; echo x > src/a.py/x",
    "src/tagged": f"rm src/tagged; mkdir src/tagged; printf '{SIGNATURE}' > src/tagged/CACHEDIR.TAG",
    "src/link": "rm src/link; mkdir src/link; echo '*' > src/link/.gitignore",
    "src/untracked": "rm src/untracked; mkdir -p src/untracked/x; echo '*' > src/untracked/.gitignore",
    "src/dangling": "rm src/dangling; mkdir src/dangling; echo '*' > src/dangling/.gitignore",
    "cache-link": "mkdir -p cache; echo '*' > cache/.gitignore; ln -s cache cache-link",
}


@pytest.fixture
def full_project(project: Path) -> Path:
    (project / "src/tagged").write_text("tagged\n")
    (project / "src/link").symlink_to("a.py")
    (project / "src/dangling").symlink_to("nowhere")
    git("add", ".", cwd=project)
    git("commit", "-qm", "More", cwd=project)
    (project / "src/untracked").write_text("untracked\n")
    return project


def replace_in(workspace: Workspace, path: str) -> None:
    with held_call(workspace.filesystem, opaque=True) as call:
        subprocess.run(["sh", "-ec", REPLACED[path]], cwd=workspace.root, check=True)
        call.commit()


@pytest.mark.parametrize("path", REPLACED)
def test_what_gave_way_to_a_directory_that_ignores_itself_is_shown(full_project: Path, path: str) -> None:
    with Workspace.open(full_project, store=full_project.parent / "store") as workspace:
        start = workspace.newest
        replace_in(workspace, path)
        changes = workspace.show(1, with_ignored=False).changes
        assert path in {change.path for change in changes}
        assert path in workspace.log(with_ignored=False)[0].paths
        assert path in {change.path for change in workspace.ignored_at(start).split(workspace.show(1).changes)[0]}
        assert f"a/{path} b/{path}".encode() in workspace.export(with_ignored=False).text


def test_a_directory_in_the_place_of_a_tracked_file_that_was_gone_is_shown(project: Path) -> None:
    (project / "src/a.py").unlink()
    with Workspace.open(project, store=project.parent / "store") as workspace:
        with held_call(workspace.filesystem, opaque=True) as call:
            (project / "src/a.py").mkdir()
            (project / "src/a.py/.gitignore").write_text("*\n")
            call.commit()
        changes = workspace.show(1, with_ignored=False).changes
        assert {change.path for change in changes} == {"src/a.py", "src/a.py/.gitignore"}


def test_a_link_to_an_ignore_file_hides_nothing(project: Path) -> None:
    (project / "rules").write_text("*\n")
    with Workspace.open(project, store=project.parent / "store") as workspace:
        start = workspace.newest
        with held_call(workspace.filesystem, opaque=True) as call:
            (project / "new").mkdir()
            (project / "new/.gitignore").symlink_to("../rules")
            call.commit()
        shown, _ = workspace.ignored_at(start).split(workspace.show(1).changes)
        assert [change.path for change in shown] == ["new", "new/.gitignore"]


def test_what_a_later_call_replaces_by_such_a_directory_is_shown_of_that_call(project: Path) -> None:
    with Workspace.open(project, store=project.parent / "store") as workspace:
        start = workspace.newest
        for command in ("echo one > new", "rm new; mkdir new; echo '*' > new/.gitignore"):
            with held_call(workspace.filesystem, opaque=True) as call:
                subprocess.run(["sh", "-ec", command], cwd=project, check=True)
                call.commit()
        assert {change.path for change in workspace.show(2, with_ignored=False).changes} == {"new"}
        assert workspace.log(with_ignored=False)[0].paths == ("new",)
        shown, _ = workspace.ignored_at(start).split(workspace.show(2).changes)
        assert [change.path for change in shown] == ["new"]


def test_what_a_file_tool_writes_is_shown_also_in_a_directory_that_ignores_itself(project: Path) -> None:
    calls = (CHECK, write("target/evil.py", "evil\n"))
    found = json.loads(run(project, {"target": CACHES["target"]}, "--json", calls=calls).stdout)
    assert changed(found) == {"target/evil.py"}
    assert b"+evil" in ringfence("show", project, "2").stdout
    assert b"+evil" in ringfence("diff", project).stdout


def test_a_directory_that_no_longer_ignores_itself_is_shown(project: Path) -> None:
    store = project.parent / "store"
    with Workspace.open(project, store=store) as workspace:
        start = workspace.newest
        for content in ("*\n", "x.o\n"):
            with held_call(workspace.filesystem, opaque=True) as call:
                (project / "lib").mkdir(exist_ok=True)
                (project / "lib/.gitignore").write_text(content)
                (project / "lib/evil.py").write_text("evil\n")
                call.commit()
        assert not workspace.ignored_at(start).has("lib/evil.py")
        assert b"+evil" in workspace.export(with_ignored=False).text


def test_an_approval_counts_them(project: Path) -> None:
    asked: list[ApprovalRequest] = []

    def ask(request: ApprovalRequest) -> Approval:
        asked.append(request)
        return Approval(True)

    with Workspace.open(project, store=project.parent / "store") as workspace:
        ignored = workspace.ignored_at(workspace.newest)

        def make(params: None, *, context: ToolContext) -> ToolResult[None]:
            for path, content in (("target/CACHEDIR.TAG", SIGNATURE), ("target/x", "x"), ("y", "y")):
                (project / path).parent.mkdir(exist_ok=True)
                (project / path).write_text(content)
            return ToolResult.ok(None, "made")

        tool = Tool[None, None](name="make", description="Make it.", handler=make, opaque=True)
        policy = ApprovalPolicy(ask, ["commands"], ignored=lambda: ignored)
        section = ToolsSection(title="Work", key="work", tools=[tool])
        template = PromptTemplate(ns="tests", key="made", sections=[section], policies=[policy])
        prompt = Prompt(template).bind(resources={Filesystem: workspace.filesystem})
        with prompt.resources:
            assert ToolExecutor(prompt=prompt, session=Session()).call("make", {}, call_id="call").success
    (request,) = asked
    assert [change.path for change in request.changes] == ["y"]
    assert [change.path for change in request.ignored] == ["target", "target/CACHEDIR.TAG", "target/x"]
