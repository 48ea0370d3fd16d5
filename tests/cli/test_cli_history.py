"""`ringfence run` on a disk workspace, and the commands for its history."""

from __future__ import annotations

import html
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import command_line
import pytest
from agent_runs import render_call
from captured_tree import capture_tree, lasting
from effort import one_in
from mounts import mount_all

from ringfence import ToolValidationError
from ringfence.filesystem import InMemoryFilesystem
from ringfence.runtime import Receipt
from ringfence.testing import held_call
from ringfence_cli.live import call_text
from ringfence_sandbox import HostFilesystem, Recovered, Workspace
from ringfence_tools import HostMount
from ringfence_tools.runs.recovered_call import describe_recovery
from ringfence_tools.runs.task_log import recorded_tasks
from ringfence_workspace.tree.places import store_of


def call(name: str, **arguments: object) -> dict[str, object]:
    return {"name": name, "arguments": arguments}


READ = call("read_file", file_path="a.txt")
EDIT = call("edit_file", file_path="a.txt", old_string="two", new_string="2")
NEW = call("write_file", file_path="new/b.txt", content="new\n")
TURNS = ({"tool_calls": [READ, EDIT]}, {"tool_calls": [NEW]}, {"text": "Done."})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a.txt").write_bytes(b"one\r\ntwo\r\nthree")
    return tmp_path / "tree"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ringfence_cli", *map(str, arguments)]


def ringfence(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    ended = command_line.ringfence(*arguments)
    assert b"Traceback" not in ended.stderr
    return ended


def run_words(tree: Path, *arguments: str | Path, turns: tuple[Mapping[str, Any], ...] = TURNS) -> list[str]:
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return ["run", str(tree), "--task", "Do it.", "--model", f"script:{script}", *map(str, arguments)]


def run_command(tree: Path, *arguments: str | Path, turns: tuple[Mapping[str, Any], ...] = TURNS) -> list[str]:
    return command(*run_words(tree, *arguments, turns=turns))


def run(
    tree: Path, *arguments: str | Path, turns: tuple[Mapping[str, Any], ...] = TURNS
) -> subprocess.CompletedProcess[bytes]:
    return command_line.ringfence(*run_words(tree, *arguments, turns=turns))


def as_json(*arguments: str | Path) -> dict[str, Any]:
    ended = ringfence(*arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_run_changes_the_files_and_says_how_to_take_it_back(tree: Path) -> None:
    before = lasting(capture_tree(tree))
    ended = run(tree)
    assert ended.returncode == 0
    assert (tree / "a.txt").read_bytes() == b"one\r\n2\r\nthree"
    assert b"-two\r\n+2\r\n" in ended.stdout
    assert f"`ringfence undo {tree} 2`" in ended.stderr.decode()
    assert ringfence("undo", tree, "2").returncode == 0
    assert lasting(capture_tree(tree)) == before


def test_the_patch_of_a_run_is_against_its_own_start(tree: Path, tmp_path: Path) -> None:
    run(tree)
    (tree / "a.txt").write_bytes(b"one\r\ntwo\r\n3")
    ended = run(tree, "--patch", tmp_path / "patch", "--json")
    record = json.loads(ended.stdout)
    assert (record["applied"], record["steps"], record["exit_code"]) == (True, 1, 0)
    assert [change["path"] for change in record["changes"]] == ["a.txt"]
    assert b"+3" not in (tmp_path / "patch").read_bytes()


def test_the_log_names_steps_and_others(tree: Path) -> None:
    run(tree)
    (tree / "their.txt").write_text("theirs")
    with Workspace.open(tree):
        pass
    log = as_json("log", tree)["log"]
    assert [entry["number"] for entry in log] == [None, 2, 1, 0]
    assert all(entry["commit"] and entry["created_at"] for entry in log)
    assert [entry["task"] for entry in log] == [None, "Do it.", "Do it.", None]


def test_a_command_that_looks_at_the_history_loads_neither_prompts_nor_adapters(tree: Path) -> None:
    run(tree)
    program = (
        "import atexit, sys\nfrom ringfence_cli.main import main\n"
        "not_needed = ('rich', 'pydantic', 'ringfence.adapters', 'ringfence.prompt', 'ringfence_tools')\n"
        "light = {'ringfence_tools', 'ringfence_tools.printable', 'ringfence_tools.runs'}\n"
        "rooms = ('command_errors', 'outputs', 'recovered_call', 'signals', 'task_log')\n"
        "light |= {f'ringfence_tools.runs.{name}' for name in rooms}\n"
        "loaded = lambda: [name for name in sys.modules if name.startswith(not_needed) and name not in light]\n"
        "atexit.register(lambda: print(loaded(), file=sys.stderr))\nmain()\n"
    )
    for arguments in (["log", tree], ["show", tree, "1"], ["diff", tree], ["undo", tree, "--dry-run"]):
        ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (0, ["[]"]), ended.stderr


def test_steps_are_shown_and_compared(tree: Path) -> None:
    run(tree)
    shown = ringfence("show", tree, "1").stdout
    assert shown.startswith(b"step 1: edit_file, call ")
    assert b"-two\r\n+2\r\n" in shown
    assert as_json("show", tree, "2")["changes"][1]["path"] == "new/b.txt"
    assert ringfence("diff", tree, "1", "2").stdout == ringfence("export", tree, "1", "2").stdout
    assert b"new/b.txt" not in ringfence("diff", tree, "0", "1").stdout
    assert "+2" in as_json("diff", tree)["patch"]


def test_a_step_is_known_by_the_task_of_its_run_as_long_as_it_is_in_the_history(tree: Path) -> None:
    run(tree)
    task = "Say it again, Sam,\nin words that are as many as no line has room for: " + "again " * 20
    again = {"tool_calls": [call("write_file", file_path="c.txt", content="c\n")]}
    run(tree, "--task", task, turns=(again, TURNS[-1]))
    lines = ringfence("log", tree).stdout.decode().splitlines()
    assert lines[0].endswith("c.txt  (run: Say it again, Sam, in words that are ...)")
    assert b"\nrun: Say it again, Sam, in words" in ringfence("show", tree, "3").stdout
    assert as_json("show", tree, "3")["step"]["task"] == task
    ringfence("gc", tree, "--keep", "0")
    assert list(recorded_tasks(tree).values()) == [task]


def test_undo_previews_reverses_and_is_reversed(tree: Path) -> None:
    run(tree)
    after = lasting(capture_tree(tree))
    said = as_json("undo", tree, "2", "--dry-run")
    assert said["step"] is None
    assert lasting(capture_tree(tree)) == after
    done = as_json("undo", tree, "2")
    assert done["paths"] == said["paths"]
    assert [(path["outcome"], path["path"]) for path in done["paths"]] == [
        ("restored", "a.txt"),
        ("removed", "new"),
        ("removed", "new/b.txt"),
    ]
    assert (done["step"]["number"], done["step"]["tool"]) == (3, "undo")
    assert ringfence("undo", tree).stdout.decode().splitlines()[0] == "restored  a.txt"
    assert lasting(capture_tree(tree)) == after
    assert ringfence("restore", tree, "0").returncode == 0
    assert not (tree / "new").exists()


def test_a_directory_within_a_workspace_names_the_one_that_has_the_history(tree: Path) -> None:
    run(tree)
    (tree / "below").mkdir()
    done = ringfence("log", tree / "below")
    assert done.returncode == 1
    assert f"it is in {tree.resolve()}, which has one" in done.stderr.decode()


def test_another_directory_in_the_place_of_one_can_begin_a_history_of_its_own(tree: Path) -> None:
    for kept in ("before", "before2"):
        run(tree)
        shutil.rmtree(tree)
        tree.mkdir()
        (tree / "a.txt").write_bytes(b"one\r\ntwo\r\nthree")
        said = ringfence("log", tree).stderr.decode()
        subprocess.run(said.partition("to begin anew, without that history and its owner's policies: ")[2], shell=True)
        assert b"has no history yet" in ringfence("log", tree).stderr
        assert [path.suffix for path in Path(store_of(str(tree.resolve()))).parent.glob(f"*.{kept}")] == [f".{kept}"]


def test_another_directory_in_the_place_of_one_is_said_and_what_it_had_is_in_the_history(tree: Path) -> None:
    run(tree)
    shutil.rmtree(tree)
    tree.mkdir()
    (tree / "a.txt").write_bytes(b"anew")
    preview = ringfence("restore", tree, "0", "--dry-run")
    assert b"another directory came in the place of the one before" in preview.stderr
    assert preview.stderr.count(b"to begin anew") == 1
    entries = as_json("log", tree)["log"]
    assert (entries[0]["kind"], entries[0]["tool"]) == ("external", "another directory")
    assert ringfence("restore", tree, "0").returncode == 0
    assert (tree / "a.txt").read_bytes() == b"one\r\ntwo\r\nthree"
    ringfence("undo", tree)
    assert (tree / "a.txt").read_bytes() == b"anew"


def test_of_another_directory_that_is_only_copied_nothing_is_said_of_the_history(tree: Path) -> None:
    run(tree)
    shutil.rmtree(tree)
    tree.mkdir()
    ended = run(tree, "--workspace", "memory")
    assert f"policies in `ringfence policies file {tree}` hold for it, too".encode() in ended.stderr
    assert b"history" not in ended.stderr


def test_a_step_can_be_shown_and_undone_by_its_name(tree: Path) -> None:
    run(tree)
    ringfence("checkpoint", tree, "good")
    assert ringfence("show", tree, "good").stdout == ringfence("show", tree, "2").stdout
    assert b"no step is called 'bad'; there are: good" in ringfence("show", tree, "bad").stderr
    assert ringfence("undo", tree, "--step", "good").stdout.splitlines()[-1] == b"removed   new/b.txt"


def test_a_step_that_gc_has_dropped_is_said_to_be(tree: Path) -> None:
    run(tree)
    ringfence("gc", tree, "--keep", "0")
    assert b"step 1 has been dropped from the history by gc: it has 2 to 2" in ringfence("show", tree, "1").stderr
    assert b"the history has no step 7: it has 2 to 2" in ringfence("show", tree, "7").stderr


def test_what_git_has_of_its_own_is_one_line_of_a_preview_and_of_the_log(tree: Path) -> None:
    run(tree)
    for name in ("index", "HEAD", "refs/heads/main"):
        (tree / ".git" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / ".git" / name).write_bytes(b"by hand")
    (tree / "mine.txt").write_bytes(b"by hand")
    preview = ringfence("restore", tree, "0", "--dry-run")
    lines = [line for line in preview.stdout.splitlines() if b".git" in line]
    assert lines == [b"kept      .git  (6 paths: git's own data, which no step has changed)"]
    assert b"removed   mine.txt" in preview.stdout
    newest = ringfence("log", tree).stdout.splitlines()[0]
    assert newest.endswith(b"somebody else  mine.txt, 6 paths in .git")
    assert ".git/index" in as_json("log", tree)["log"][0]["paths"]
    paths = [path["path"] for path in as_json("restore", tree, "0", "--dry-run")["paths"]]
    assert {".git/index", ".git/refs/heads/main"} <= {*paths}


def test_an_undo_of_what_is_as_it_was_before_already_is_no_conflict(tree: Path) -> None:
    before = (tree / "a.txt").read_bytes()
    assert run(tree).returncode == 0
    (tree / "a.txt").write_bytes(before)
    assert {one["path"]: one["outcome"] for one in as_json("undo", tree, "2")["paths"]}["a.txt"] == "kept"


def test_what_somebody_changed_stays(tree: Path) -> None:
    run(tree)
    (tree / "a.txt").write_bytes(b"theirs")
    said = json.loads(ringfence("undo", tree, "--step", "1", "--json").stdout)
    assert said["paths"] == [{"path": "a.txt", "outcome": "conflict", "reason": "changed since by somebody else"}]
    assert ringfence("undo", tree, "--step", "2").returncode == 0


def test_a_restore_says_what_is_somebody_elses(tree: Path) -> None:
    run(tree)
    (tree / "mine.txt").write_bytes(b"a person's")
    reasons = {one["path"]: one["reason"] for one in as_json("restore", tree, "0", "--dry-run")["paths"]}
    assert (reasons["mine.txt"], reasons["new/b.txt"]) == ("somebody else's, made since", None)
    assert b"took away" not in ringfence("restore", tree, "0", "--dry-run").stderr
    assert b"took away 1 change" in ringfence("restore", tree, "0").stderr


def test_a_conflict_with_a_later_step_is_exit_code_1(tree: Path) -> None:
    again = call("edit_file", file_path="a.txt", old_string="2", new_string="zwei")
    run(tree, turns=({"tool_calls": [READ, EDIT]}, {"tool_calls": [again]}, TURNS[2]))
    ended = ringfence("undo", tree, "--step", "1", "--json")
    (path,) = json.loads(ended.stdout)["paths"]
    assert (ended.returncode, path["outcome"], "step 2" in path["reason"]) == (1, "conflict", True)
    assert (tree / "a.txt").read_bytes() == b"one\r\nzwei\r\nthree"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_takes_what_is_exported(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "copy")
    run(tree)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path / "copy")]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "start"]):
        subprocess.run([*git, *arguments], check=True)
    assert ringfence("export", tree, "--format", "mbox", "--output", tmp_path / "mbox").stdout == b""
    subprocess.run([*git, "am", "--quiet", "--keep-cr", str(tmp_path / "mbox")], check=True)
    shutil.rmtree(tmp_path / "copy/.git")
    assert {path: one[3] for path, one in lasting(capture_tree(tmp_path / "copy")).items()} == {
        path: one[3] for path, one in lasting(capture_tree(tree)).items()
    }


def test_an_export_is_not_written_through_a_link_that_leads_out_of_the_directory(tree: Path, tmp_path: Path) -> None:
    run(tree)
    (tmp_path / "victim").write_text("theirs")
    (tree / "link").symlink_to(tmp_path / "victim")
    assert ringfence("export", tree, "--output", tree / "link").returncode == 2
    assert (tmp_path / "victim").read_text() == "theirs"


# Says when it opens the file that its second argument names.
OPENING = """
import sys
pipe = sys.argv.pop(1)
sys.addaudithook(lambda event, about: print("opens", flush=True) if event == "open" and about[0] == pipe else None)
from ringfence_cli.main import main
main()
"""


def sleeps(pid: int) -> bool:
    """Whether it waits in a call of the system."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_an_export_into_a_pipe_that_nobody_reads_can_be_interrupted(tree: Path, tmp_path: Path) -> None:
    assert run(tree).returncode == 0
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", OPENING, tmp_path / "pipe", "export", tree, "--output", tmp_path / "pipe"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"opens\n"
        while not sleeps(process.pid):
            time.sleep(0.01)
        process.terminate()
        assert (process.communicate()[1], process.returncode) == (b"ringfence: interrupted: nothing was written\n", 130)


@pytest.mark.parametrize("number", one_in(2, [signal.SIGINT, signal.SIGTERM]))
def test_an_export_into_a_full_pipe_can_be_interrupted(tree: Path, tmp_path: Path, number: signal.Signals) -> None:
    long = [call("write_file", file_path=name, content="a line\n" * 6_000) for name in ("x", "y")]
    made = run_command(tree, turns=({"tool_calls": long}, {"text": "Done."}))
    subprocess.run(made, capture_output=True, check=True, timeout=60)
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as pipe:
        process = subprocess.Popen(command("export", tree, "--output", tmp_path / "pipe"), stderr=subprocess.PIPE)
        select.select([pipe], [], [])
        process.send_signal(number)
        said = process.communicate()[1]
    assert (process.returncode, said) == (130, b"ringfence: interrupted: not all of it was written\n")


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not installed")
def test_an_export_that_there_is_no_room_for_leaves_no_part_of_itself(tree: Path, tmp_path: Path) -> None:
    assert run(tree).returncode == 0
    patch = tmp_path / "patch"
    command = [sys.executable, "-m", "ringfence_cli", "export", str(tree), "--output", str(patch)]
    ended = subprocess.run(["prlimit", "--fsize=64", *command], capture_output=True, check=False, timeout=60)
    assert (ended.returncode, b"File too large" in ended.stderr) == (2, True), ended.stderr
    assert patch.read_bytes() == b""


def test_the_log_has_the_oldest_entry_that_gc_leaves_whatever_it_is(tree: Path) -> None:
    run(tree)
    os.utime(tree / "a.txt", (1, 1))
    ringfence("undo", tree)
    ringfence("gc", tree, "--keep", "1")
    _, said = ringfence("log", tree).stdout.decode().splitlines()
    assert said.endswith("  somebody else  0 paths")


def test_the_log_has_as_many_of_the_newest_entries_as_are_asked_for(tree: Path) -> None:
    denied = [call("write_file", file_path=path, content="x") for path in ("no/1", "no/2")]
    command = run_command(tree, "--policy", "deny:no", turns=({"tool_calls": [READ, EDIT, NEW, *denied]}, TURNS[-1]))
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    assert [entry["number"] for entry in as_json("log", tree, "--limit", "2")["log"]] == [2, 1]
    assert [entry["number"] for entry in as_json("log", tree, "--aborted", "--limit", "1")["log"]] == [2]
    assert ringfence("log", tree, "--limit", "0").returncode == 2
    assert len(as_json("log", tree, "--limit", str(10**20))["log"]) == 3


@pytest.mark.parametrize("name", ["log", "show 1", "diff", "undo", "restore 0", "recover", "export", "gc"])
def test_without_a_history_every_command_says_so(tree: Path, name: str) -> None:
    verb, *more = name.split()
    ended = ringfence(verb, tree, *more)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"no history yet" in ended.stderr


@pytest.mark.parametrize("name", ["log", "undo", "recover", "run --resume --model script:x"])
def test_where_no_store_can_be_a_command_says_what_to_do(
    tree: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", "/dev/null")
    (tree.parent / "x").write_text(json.dumps({"text": "Done."}))
    monkeypatch.chdir(tree.parent)
    verb, *more = name.split()
    ended = ringfence(verb, tree, *more)
    assert ended.returncode == (2 if verb == "run" else 1)
    assert b"the store cannot be there (Not a directory): see to that, or name another place" in ended.stderr


def test_an_undo_that_is_reversed_itself_is_named(tree: Path) -> None:
    run(tree)
    assert b"is an undo" not in ringfence("undo", tree).stderr
    said = b"step 3 is an undo, and counts as one of the newest: --step N reverses one step alone, --run all of a run"
    assert said in ringfence("undo", tree, "2", "--dry-run").stderr
    assert said.decode() in as_json("undo", tree, "--dry-run")["notes"]
    for words in (("--step", "2"), ("--run",)):
        assert b"is an undo" not in ringfence("undo", tree, *words, "--dry-run").stderr


def test_show_without_a_step_shows_the_newest(tree: Path) -> None:
    Workspace.open(tree).close()
    missing = ringfence("show", tree)
    assert (missing.returncode, b"the history has no step yet" in missing.stderr) == (2, True)
    missing = ringfence("show", tree, "--aborted")
    assert (missing.returncode, b"no rollback took anything away" in missing.stderr) == (2, True)
    run(tree)
    newest = ringfence("show", tree)
    assert (newest.returncode, newest.stdout.startswith(b"step 2: ")) == (0, True)
    assert newest.stdout == ringfence("show", tree, "2").stdout
    assert as_json("show", tree, "--stat") == as_json("show", tree, "2", "--stat")


def test_what_there_is_not_is_exit_code_2(tree: Path) -> None:
    run(tree)
    for line in (
        *("show 7", "diff 2 1", "undo 7", "export --output no/where", "undo --step 0", "undo 0", "restore 9"),
        *("undo 2 --step 1", f"restore {'9' * 5_000}"),
    ):
        verb, *more = line.split()
        ended = ringfence(verb, tree, *more)
        assert (ended.returncode, ended.stdout, bool(ended.stderr)) == (2, b"", True), line


def test_another_holder_is_named_and_looking_goes_on(tree: Path) -> None:
    run(tree)
    with Workspace.open(tree):
        for verb in ("undo", "gc", "recover"):
            ended = ringfence(verb, tree)
            assert ended.returncode == 2
            assert f"is open in process {os.getpid()}" in ended.stderr.decode()
        assert run(tree).returncode == 2
        for verb in ("log", "diff", "export"):
            assert ringfence(verb, tree).returncode == 0


def killed(tree: Path) -> None:
    """Leaves a call half done."""
    program = (
        "import os, sys\n"
        "from ringfence.testing import held_call\n"
        "from ringfence_sandbox import Workspace\n"
        "with Workspace.open(sys.argv[1]) as workspace, held_call(workspace.filesystem, call_id='c9') as call:\n"
        "    workspace.filesystem.for_call(call).write('a.txt', 'half')\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tree)])
    assert ended.returncode == -signal.SIGKILL
    assert (tree / "a.txt").read_text() == "half"


def test_a_killed_run_is_recovered(tree: Path) -> None:
    run(tree)
    before = capture_tree(tree)
    killed(tree)
    left, waits = capture_tree(tree), b"the tool call c9 (a test) was killed, and what it had done is still there"
    assert waits in ringfence("log", tree).stderr
    preview = ringfence("undo", tree, "--dry-run")
    assert (preview.returncode, waits in preview.stderr, capture_tree(tree) == left) == (1, True, True)
    recovered = as_json("recover", tree)["recovered"]
    assert (recovered["outcome"], recovered["call_id"]) == ("rolled back", "c9")
    assert capture_tree(tree) == before
    assert ringfence("recover", tree).stderr == b"there was nothing to recover\n"


def copying(verb: str, tree: Path) -> subprocess.CompletedProcess[bytes]:
    if verb == "run":
        return run(tree, "--workspace", "memory")
    return command_line.served_once(tree, "--workspace", "memory")


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_what_a_killed_call_left_is_taken_back_before_it_is_copied(tree: Path, verb: str) -> None:
    before = capture_tree(tree)
    killed(tree)
    ended = copying(verb, tree)
    assert (ended.returncode, b"recovered: the tool call c9 (a test) was interrupted" in ended.stderr) == (0, True)
    assert capture_tree(tree) == before
    assert b"recovered" not in copying(verb, tree).stderr


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_what_a_running_call_has_half_done_is_copied_without_what_it_has_displaced_and_said(
    tree: Path, verb: str
) -> None:
    said = b"the tool call c9 (a test) of another process is at work there: the copy has its changes"
    with Workspace.open(tree) as workspace:
        assert said not in copying(verb, tree).stderr
        with held_call(workspace.filesystem, call_id="c9") as held:
            workspace.filesystem.for_call(held).write("b.txt", "half")
            ended = copying(verb, tree)
            (preview,) = mount_all(InMemoryFilesystem(), [HostMount(tree)])
    assert (ended.returncode, said in ended.stderr) == (0, True)
    assert preview.entries == ("a.txt", "b.txt")


@pytest.mark.parametrize("verb", ["run", "serve"])
def test_who_copies_a_directory_of_a_workspace_hears_what_a_call_has_half_done_there(tree: Path, verb: str) -> None:
    (tree / "below").mkdir()
    with Workspace.open(tree) as workspace, held_call(workspace.filesystem, call_id="c9") as held:
        workspace.filesystem.for_call(held).write("below/b.txt", "half")
        assert b"the tool call c9 (a test) of another process is at work" in copying(verb, tree / "below").stderr
    killed(tree)
    assert f"c9 (a test) was killed, and what it had done is still there: `ringfence recover {tree}`" in (
        copying(verb, tree / "below").stderr.decode()
    )
    assert (tree / "a.txt").read_text() == "half"


def test_what_a_call_has_half_done_in_another_directory_that_was_here_before_is_not_said_to_be_here(tree: Path) -> None:
    killed(tree)
    tree.rename(tree.with_name("before"))
    tree.mkdir()
    (tree / "a.txt").write_text("another")
    for ended in (ringfence("log", tree), command_line.served_once(tree, "--read-only")):
        assert b"is still there" not in ended.stderr
    assert as_json("recover", tree)["recovered"]["outcome"] == "set aside"


def test_a_server_that_only_looks_says_what_a_killed_call_has_left(tree: Path) -> None:
    killed(tree)
    left, waits = capture_tree(tree), b"the tool call c9 (a test) was killed, and what it had done is still there"
    assert waits in command_line.served_once(tree, "--read-only").stderr
    assert capture_tree(tree) == left


def test_a_server_that_only_looks_says_that_it_runs_no_commands(tree: Path) -> None:
    said = b"it is read-only: shell_execute and evaluate_python, which change things, are left out"
    assert said in command_line.served_once(tree, "--workspace", "podman", "--read-only").stderr
    assert said not in command_line.served_once(tree, "--read-only").stderr


@pytest.mark.parametrize("verb", ["log", "undo"])
def test_a_current_directory_that_is_no_more_is_said_with_what_to_do(tree: Path, verb: str) -> None:
    (tree / "gone").mkdir()
    line = 'cd "$1" && rmdir "$1" && exec "$2" -m ringfence_cli "$3" .'
    ended = subprocess.run(["sh", "-c", line, "sh", tree / "gone", sys.executable, verb], capture_output=True)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert ended.stderr == b"Error: the current directory was removed: change to one that is there\n"


def test_a_directory_that_a_killed_call_left_half_done_is_not_mounted(tree: Path) -> None:
    (tree / "below").mkdir()
    killed(tree)
    for path in (tree, tree / "below", tree / "a.txt"):
        with pytest.raises(ToolValidationError, match=f"c9.*still there: `ringfence recover {tree}` rolls it back"):
            mount_all(InMemoryFilesystem(), [HostMount(path)])
    ringfence("recover", tree)
    mount_all(InMemoryFilesystem(), [HostMount(tree)])


def test_recovery_says_of_an_edit_made_since_that_it_stays_and_where_the_file_before_the_call_is(tree: Path) -> None:
    before = (tree / "a.txt").read_bytes()
    killed(tree)
    (tree / "a.txt").write_text("mine")
    _, stays, kept = ringfence("recover", tree).stderr.decode().splitlines()
    assert stays == "  a.txt was changed meanwhile, not by the call, and stays as it is"
    place = re.fullmatch(
        "  what a.txt was before the call is kept at (.*): copy it back from there if it is wanted", kept
    )
    assert place is not None
    assert Path(place[1]).read_bytes() == before
    assert (tree / "a.txt").read_text() == "mine"


def test_what_recovery_has_kept_is_said_with_the_command_that_shows_it(tmp_path: Path) -> None:
    with Workspace.open(tmp_path) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        (tmp_path / "made").write_text("half")
        note = call.rollback().notes[0]
    said = describe_recovery(Recovered("rolled back", "c9", "a test", notes=(note,)), Path("my \\1"))
    assert said.endswith("; what they were is kept: `ringfence show 'my \\1' 1 --aborted` has it")


def test_a_line_of_a_run_says_how_to_look_at_what_a_rollback_has_kept(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    with Workspace.open(tmp_path) as workspace, held_call(workspace.filesystem, opaque=True) as call:
        (tmp_path / "made").write_text("half")
        note = call.rollback().notes[0]
    receipt = Receipt("r", "c9", "a test", None, "failed", note, now, 0.1, "s", "p")
    said = "what they were is kept: `ringfence show 'my x' 1 --aborted` has it"
    assert call_text(receipt, Path("my x")).plain.endswith(said)
    page = html.unescape(render_call(receipt, "", Path("my x")))
    assert said.replace("`ringfence", "<code>ringfence").replace("` has", "</code> has") in page


def test_an_interrupted_run_keeps_its_steps_and_says_how_to_undo_them(tree: Path, tmp_path: Path) -> None:
    turns = tuple(
        {"tool_calls": [call("write_file", file_path=f"{turn}-{n}.txt", content="x\n") for n in range(50)]}
        for turn in range(200)
    )
    before = lasting(capture_tree(tree))
    receipts = tmp_path / "receipts"
    arguments = run_command(tree, "--receipts", receipts, turns=turns)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until = time.monotonic() + 30
    while time.monotonic() < until and not (receipts.exists() and receipts.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    steps = len(as_json("log", tree)["log"]) - 1
    assert f"{steps} step" in errors.decode()
    assert f"`ringfence undo {tree} {steps}` reverses " in errors.decode()
    assert ringfence("undo", tree, str(steps)).returncode == 0
    assert lasting(capture_tree(tree)) == before


INTERRUPTED_AT_ITS_END = """
import os, signal, sys
from ringfence_cli.main import main
from ringfence_sandbox import Workspace

name = sys.argv.pop(1)
method = getattr(Workspace, name)


def interrupted(workspace, *arguments, **named):
    os.kill(os.getpid(), signal.SIGTERM)
    return method(workspace, *arguments, **named)


setattr(Workspace, name, interrupted)
main()
"""


@pytest.mark.parametrize("at", ["_made", "_write"])
@pytest.mark.parametrize("verb", ["undo", "restore"])
def test_an_undo_that_is_interrupted_says_whether_it_was_committed(tree: Path, verb: str, at: str) -> None:
    run(tree)
    program = [sys.executable, "-c", INTERRUPTED_AT_ITS_END, at]
    step = ["0"] if verb == "restore" else []
    ended = subprocess.run([*program, verb, tree, *step, "--json"], capture_output=True, timeout=60)
    assert ended.returncode == json.loads(ended.stdout)["exit_code"] == 130
    said = json.loads(ended.stdout)["error"]
    assert said in ended.stderr.decode()
    assert (f"step 3 ({verb}) was committed: `ringfence undo {tree}` reverses it" in said) == (at == "_made")
    assert len(as_json("log", tree)["log"]) == (4 if at == "_made" else 3)


def test_a_filesystem_on_its_own_leaves_the_history_alone(tree: Path) -> None:
    run(tree)
    with HostFilesystem(tree) as filesystem:
        filesystem.write("a.txt", "outside of calls")
    assert [entry["number"] for entry in as_json("log", tree)["log"]] == [2, 1, 0]


def test_names_are_utf_8_whatever_the_locale_takes_them_for(tree: Path) -> None:
    (tree / "caf\xe9.txt").write_text("one\n")
    read, edit = (
        call("read_file", file_path="caf\xe9.txt"),
        call("write_file", file_path="caf\xe9.txt", content="two\n"),
    )
    begin = run_command(tree, turns=({"tool_calls": [read, edit]}, {"text": "Done."}))
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    begun = subprocess.run(begin, capture_output=True, timeout=60, env=ascii_only)
    assert (begun.returncode, (tree / "caf\xe9.txt").read_text()) == (0, "two\n"), begun.stderr
    assert ringfence("undo", tree).returncode == 0
    assert (tree / "caf\xe9.txt").read_text() == "one\n"
    command = [sys.executable, "-c", f"from ringfence_sandbox import Workspace; Workspace.open({str(tree)!r})"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ascii_only)
    assert "PYTHONUTF8=1" in refused.stderr


def test_what_is_left_out_is_told_in_one_shape(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    (tree / ".git").mkdir()
    (tree / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (told,) = json.loads(run(tree, "--json").stdout)["left_out"]
    assert (told["path"], told["reason"].partition(":")[0]) == ("pipe", "special file")
    assert as_json("show", tree, "0")["left_out"] == [{"path": "pipe", "reason": "special file"}]
    (tree / ".git/HEAD").write_text("ref: refs/heads/other\n")
    with Workspace.open(tree):
        pass
    (left_out,) = as_json("diff", tree, "0")["left_out"]
    assert (left_out["path"], "git's own data" in left_out["reason"]) == (".git/HEAD", True)


def test_what_no_patch_can_say_is_said_beside_it(tree: Path) -> None:
    (tree / "new").mkdir()
    (tree / "new/b.txt").write_text("b\n")
    (tree / "empty").mkdir()
    ended = subprocess.run(
        run_command(tree, turns=({"tool_calls": [call("rm", path="empty")]}, {"text": "Done."})),
        capture_output=True,
        timeout=60,
    )
    said = b"not in the patch: empty (directory removed)"
    assert (ended.returncode, said in ended.stderr) == (0, True), ended.stderr
    assert said in ringfence("diff", tree, "0").stderr
    assert said in ringfence("export", tree).stderr
