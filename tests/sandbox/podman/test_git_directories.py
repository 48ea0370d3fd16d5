"""Git in a container: commands read the history, also where git's own directories are outside of the workspace."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from captured_tree import shape
from command_line import ringfence_text
from real_git import git, repository

from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace

SECRET = "a-secret-value-of-the-host"
SUBJECT = "as it was"


@pytest.fixture
def main(tmp_path: Path) -> Path:
    (tmp_path / "main/sub").mkdir(parents=True)
    (tmp_path / "main/a.txt").write_text("one\n")
    (tmp_path / "main/sub/b.txt").write_text("b\n")
    (tmp_path / "main/private.txt").write_text(SECRET)
    (tmp_path / "main/.gitignore").write_text("private.txt\n")
    return repository(tmp_path / "main")


def worktree_of_a_shared_clone(main: Path) -> Path:
    git(main.parent, "clone", "--quiet", "--shared", str(main), "clone")
    git(main.parent / "clone", "worktree", "add", "--quiet", str(main.parent / "tree"))
    old = main.parent / "clone/.git/worktrees/tree/gitdir"
    os.utime(old, (10**9, 10**9))  # git writes one of yesterday anew
    return main.parent / "tree"


def submodule(main: Path) -> Path:
    outer = repository(shutil.copytree(main / "sub", main.parent / "outer"))
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(main), "libs/inner")
    git(outer / "libs/inner", "remote", "set-url", "origin", f"https://user:{SECRET}@example.org/main")
    return outer / "libs/inner"


def separate_directory(main: Path) -> Path:
    git(main.parent, "clone", "--quiet", "--separate-git-dir", str(main.parent / "data"), str(main), "separate")
    return main.parent / "separate"


def symbolic_link_to_where_only_root_looks(main: Path) -> Path:
    root = separate_directory(main)
    (root / ".git").unlink()
    (main.parent / "root").mkdir()
    os.rename(main.parent / "data", main.parent / "root/data")
    (root / ".git").symlink_to("../root/data")
    return root


LOOK = """
git status --porcelain; git log --format=%s; git diff --stat; git blame --porcelain sub/b.txt | grep ^summary
git describe --always --dirty --exclude='*' | grep -o dirty; cd sub; git status --porcelain
"""
FOUND = f"""\
 M a.txt
{SUBJECT}
 a.txt | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)
summary {SUBJECT}
dirty
 M a.txt
"""


FORMS = [worktree_of_a_shared_clone, submodule, separate_directory, symbolic_link_to_where_only_root_looks]


@pytest.mark.parametrize("make", FORMS)
def test_commands_read_the_history_and_cannot_change_it(main: Path, make_sandbox: Any, make: Any) -> None:
    root = make(main)
    (root / "a.txt").write_text("two\n")
    os.utime(root / "sub/b.txt", (10**9, 10**9))
    data = Path(git(root, "rev-parse", "--path-format=absolute", "--git-common-dir").strip())
    (data / ".env").write_text(SECRET)
    (data / "kept").write_text(SECRET)
    before = shape(data), shape(main)
    said: list[str] = []
    with Workspace.open(root, store=main.parent / "store", hide=HiddenFiles(["/.git/kept"])) as workspace:
        sandbox = make_sandbox(root, filesystem=workspace.filesystem, progress=said.append)
        looked = sandbox.run(LOOK)
        assert (looked.stdout, looked.changed_paths, sandbox.git_problem) == (FOUND, (), "")
        assert [str(data) in line for line in said] == [True]
        places = sandbox.run("cat /proc/mounts; env").stdout
        targets = [line.split()[1] for line in places.splitlines() if line.endswith(" 0 0")]
        inside = next(target for target in targets if target.endswith(("/data", "/.git", "/inner")))
        seen = sandbox.run(f"cat {inside}/.env {inside}/kept; ls -A {inside}/..; cat {main}/* {data}/../*")
        assert SECRET not in seen.stdout
        written = sandbox.run(f"git -c user.name=a -c user.email=a commit -am no; echo x > {inside}/HEAD")
        assert written.stderr.count("Read-only file system") == 2
        if make is submodule:
            assert SECRET not in sandbox.run(f"cat {inside}/config").stdout
    assert (shape(data), shape(main)) == before


def test_a_run_in_a_part_of_a_repository_says_that_git_does_not_work(main: Path) -> None:
    script = main.parent / "script.jsonl"
    script.write_text(json.dumps({"text": "Done."}) + "\n")
    command = "run", main / "sub", "--workspace", "podman", "--task", "Do it.", "--model", f"script:{script}", "--json"
    ended = ringfence_text(*command)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "no git command works in the container" in line]
    assert len(lines) == 1
    assert f"DIR is in the repository {main}" in lines[0]
    assert ".git" in [one["path"] for one in json.loads(ended.stdout)["left_out"]]
