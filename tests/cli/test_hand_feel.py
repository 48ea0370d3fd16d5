"""The history's commands in the hand: without DIR, for a whole run, in short, and completed by the shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from command_line import ringfence

from ringfence_cli.main import ringfence as ringfence_group
from ringfence_sandbox import Workspace


def write(path: str, content: str) -> dict[str, object]:
    return {"name": "write_file", "arguments": {"file_path": path, "content": content}}


def run(tree: Path, *calls: dict[str, object], more: tuple[str, ...] = ()) -> int:
    script = tree.parent / "script.jsonl"
    turns = [{"text": "", "tool_calls": calls}, {"text": "Done."}]
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    task = more or ("--task", "Do it.")
    return ringfence("run", tree, *task, "--model", f"script:{script}").returncode


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "old.txt").write_text("old\n")
    assert run(tree, write("a.txt", "a\n")) == 0
    assert run(tree, write("b.txt", "b\nb\n"), write("c.txt", "c\n")) == 0
    return tree


def said(tree: Path, *words: str) -> bytes:
    done = ringfence(*words, cwd=tree)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_dir_a_command_is_about_the_current_directory(tree: Path) -> None:
    assert said(tree, "show", "1") == said(tree, "show", ".", "1")
    assert said(tree, "show") == said(tree, "show", ".") == said(tree, "show", "3")
    assert b"a.txt" not in said(tree, "diff", "1")
    assert b"c.txt" not in said(tree, "diff", "1", "2")
    assert b"a.txt" in said(tree, "diff", "--stat")
    said(tree, "checkpoint", "here")
    assert said(tree, "diff", "here") == b""
    assert b"c.txt" in said(tree, "undo", "1", "--dry-run")
    said(tree, "restore", "1")
    assert sorted(path.name for path in tree.iterdir()) == ["a.txt", "old.txt"]


def test_a_directory_is_still_dir(tree: Path) -> None:
    assert b"a.txt" in said(tree.parent, "diff", "tree", "--stat")
    assert b"c.txt" in said(tree.parent, "undo", "tree", "--dry-run")
    assert b"Missing argument 'STEP'" in ringfence("restore", ".", cwd=tree).stderr
    assert b"Missing argument 'NAME'" in ringfence("checkpoint", "../tree", cwd=tree).stderr


def test_a_word_that_can_be_both_is_refused(tree: Path) -> None:
    (tree / "2").mkdir()
    for command in ("undo", "diff"):
        done = ringfence(command, "2", cwd=tree)
        assert (done.returncode, b"write ./2, or . 2" in done.stderr) == (2, True)
    done = ringfence("undo", "no-such-directory", "--json", cwd=tree)
    assert "does not exist" in json.loads(done.stdout)["error"]


def test_undo_of_a_run_reverses_all_its_steps_and_those_of_no_other(tree: Path) -> None:
    said(tree, "undo", "--run")
    assert sorted(path.name for path in tree.iterdir()) == ["a.txt", "old.txt"]
    assert ringfence("undo", "--run", "1", cwd=tree).returncode == 2


def test_undo_of_a_run_names_it_and_says_when_it_is_undone(tree: Path) -> None:
    first = ringfence("undo", "--run", cwd=tree)
    assert b"the run 'Do it.' (steps 2 to 3)" in first.stderr
    again = ringfence("undo", "--run", cwd=tree)
    assert (again.returncode, b"the run 'Do it.' (steps 2 to 3) is undone already" in again.stderr) == (1, True)


def test_undo_and_restore_only_count_ignored_paths(tree: Path) -> None:
    (tree / ".gitignore").write_text("build/\n")
    subprocess.run(["git", "init", "-q", tree], check=True)
    assert run(tree, write("d.txt", "d\n"), write("build/1.o", "x"), write("build/2.o", "x")) == 0
    for words in (("undo", "--run"), ("restore", "3")):
        shown = ringfence(*words, "--dry-run", cwd=tree)
        assert (b"d.txt" in shown.stdout, b"build" in shown.stdout) == (True, False)
        assert b"3 ignored paths of them: --with-ignored shows them" in shown.stderr
        found = json.loads(said(tree, *words, "--dry-run", "--json"))
        paths = {path["path"] for path in found["paths"]}
        assert (found["ignored"], "d.txt" in paths, paths & {"build", "build/1.o"}) == (3, True, set())
        assert b"build/1.o" in said(tree, *words, "--dry-run", "--with-ignored")
    said(tree, "undo", "--run")
    assert not (tree / "build").exists()


def test_undo_of_a_run_reverses_its_earlier_parts_too(tree: Path) -> None:
    script = tree.parent / "broken.jsonl"
    script.write_text(json.dumps({"text": "", "tool_calls": [write("d.txt", "d\n")]}) + "\n")  # and no turn after it
    assert ringfence("run", tree, "--task", "More.", "--model", f"script:{script}").returncode == 3
    assert run(tree, write("e.txt", "e\n"), more=("--resume",)) == 0
    said(tree, "undo", "--run")
    assert sorted(path.name for path in tree.iterdir()) == ["a.txt", "b.txt", "c.txt", "old.txt"]


def test_there_is_no_run_to_undo_where_none_was(tmp_path: Path) -> None:
    Workspace.open(tmp_path).close()
    done = ringfence("undo", "--run", cwd=tmp_path)
    assert (done.returncode, b"no step of a run" in done.stderr) == (2, True)


def test_a_diff_in_short_has_a_line_for_each_file(tree: Path) -> None:
    move = {"name": "move", "arguments": {"source": "old.txt", "target": "new.txt"}}
    assert run(tree, {"name": "read_file", "arguments": {"file_path": "old.txt"}}, move) == 0
    (tree / "bytes").write_bytes(b"\0")
    ringfence("checkpoint", "now", cwd=tree)  # takes the file in
    files = {one.pop("path"): one for one in json.loads(said(tree, "diff", "--stat", "--json"))["files"]}
    assert files["new.txt"] == {"old_path": "old.txt", "added": 0, "removed": 0, "is_binary": False}
    assert files["bytes"]["is_binary"]
    lines = [line.split() for line in said(tree, "diff", "--stat").decode().splitlines()]
    assert sorted(lines) == [
        ["5", "files", "changed,", "+4", "-0", "lines"],
        ["a.txt", "+1", "-0"],
        ["b.txt", "+2", "-0"],
        ["bytes", "binary"],
        ["c.txt", "+1", "-0"],
        ["old.txt", "->", "new.txt", "+0", "-0"],
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands_and_options(shell: str) -> None:
    module = [sys.executable, "-m", "ringfence"]

    def completed(**variables: str) -> str:
        done = subprocess.run(module, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        return done.stdout

    assert "_RINGFENCE_COMPLETE" in completed(_RINGFENCE_COMPLETE=f"{shell}_source")
    words = {"COMP_WORDS": "ringfence run --with", "COMP_CWORD": "2" if shell != "fish" else "--with"}
    assert "--with-ignored" in completed(_RINGFENCE_COMPLETE=f"{shell}_complete", **words)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("exec --tim", "plain,--timeout"),
        ("exec pro", "dir,pro"),
        ("exec . -- make --", "file,--"),
        ("exec -- ma", "file,ma"),
        ("apply --dry", "plain,--dry-run"),
        ("apply fix.pa", "file,fix.pa"),
        ("undo --st", "plain,--step"),
        ("undo -- src/ge", "file,src/ge"),
        ("undo . 1 -- --", "file,--"),
    ],
)
def test_a_shell_completes_what_stands_on_either_side_of_the_two_dashes(line: str, found: str) -> None:
    *words, last = line.split()
    shell = ShellComplete(ringfence_group, {}, "ringfence", "_RINGFENCE_COMPLETE")
    assert [f"{item.type},{item.value}" for item in shell.get_completions(words, last)] == [found]


def test_in_a_directory_below_the_commands_go_up_to_the_workspace_and_name_it(tree: Path) -> None:
    below = tree / "below/more"
    below.mkdir(parents=True)
    for words in (["log"], ["show", "1"], ["diff", "--stat"], ["export"], ["undo", "--dry-run"], ["recover"]):
        above, here = ringfence(*words, cwd=tree), ringfence(*words, cwd=below)
        assert here.returncode == 0, here.stderr
        assert here.stdout == above.stdout
        assert f"in {tree.resolve()}," in here.stderr.decode()
        assert b"in its history" not in above.stderr
    given = ringfence("log", "below", cwd=tree)
    assert given.returncode == 1
    assert f"it is in {tree.resolve()}, which has one" in given.stderr.decode()
    assert ringfence("undo", cwd=below).returncode == 0


def test_a_step_is_shown_by_its_files_alone(tree: Path) -> None:
    listed = ringfence("show", "1", "--stat", cwd=tree).stdout.decode()
    assert listed.splitlines()[0].startswith("step 1: ")
    assert "a.txt" in listed
    assert listed.splitlines()[-1].startswith("1 file changed, +")
    assert "diff --git" not in listed
    shown = json.loads(ringfence("show", "1", "--stat", "--json", cwd=tree).stdout)
    assert [one["path"] for one in shown["files"]] == ["a.txt"]
    assert "patch" not in shown
