"""``ringfence exec``: a command line as one transaction."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_runs import owner_file
from captured_tree import shape
from command_line import ringfence, ringfence_process
from terminals import Terminal

from ringfence.filesystem import HiddenFiles
from ringfence_sandbox import Workspace


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_text("one\n")
    return tmp_path / "tree"


def run(
    tree: Path, *words: str | Path, options: tuple[str | Path, ...] = (), given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ringfence_cli", "exec", tree, *options, "--", *words]
    return subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)


def steps(tree: Path) -> list[str]:
    with Workspace.open(tree, read_only=True) as workspace:
        return [step.tool for step in workspace.steps()]


def test_a_command_is_a_step_with_pipes_on_either_side(tree: Path) -> None:
    done = run(
        tree, "sh", "-c", "cat; echo err >&2; echo two >> a", given=b"through\n", options=("--message", "import")
    )
    assert (done.returncode, done.stdout) == (0, b"through\n")
    assert done.stderr.startswith(b"err\n")
    assert b"1 change kept as step 1" in done.stderr
    assert steps(tree) == ["import"]


@pytest.mark.parametrize(
    ("words", "options", "code"),
    [
        (["sh", "-c", "touch b; exit 7"], (), 7),
        (["sh", "-c", "touch b; kill -9 $$"], (), 137),
        (["no-such-program"], (), 127),
        (["./a"], (), 126),
        (["sh", "-c", "touch b; sleep 60"], ("--timeout", "1s"), 124),
        (["touch", "b"], ("--policy", "deny:b"), 122),
        (["touch", "b"], ("--ask", "writes"), 122),
        (["touch", "b"], ("--dry-run",), 0),
        (["touch", "b"], ("--policy", "nonsense"), 125),
        (["touch", "b"], ("--image", "x"), 125),
        ([], (), 125),
    ],
)
def test_exit_codes_and_what_is_taken_back(tree: Path, words: list[str], options: tuple[str, ...], code: int) -> None:
    before = shape(tree)
    done = run(tree, *words, options=options)
    assert done.returncode == code, done.stderr
    assert shape(tree) == before


def test_without_the_two_dashes_nothing_runs(tree: Path) -> None:
    done = ringfence_process("exec", tree, "touch", tree / "b")
    assert done.returncode == 125
    assert not (tree / "b").exists()
    assert ringfence_process("exec", tree).returncode == 125


def test_what_stands_behind_the_dashes_is_the_commands_own(tree: Path) -> None:
    assert run(tree, "echo", "--help", "--", "--json").stdout == b"--help -- --json\n"


def test_a_failure_can_be_kept_and_patch_and_receipts_are_written(tree: Path, tmp_path: Path) -> None:
    options = ("--keep-on-error", "--patch", tmp_path / "patch", "--receipts", tmp_path / "receipts", "--quiet")
    done = run(tree, "sh", "-c", "echo two >> a; exit 3", options=options)
    assert (done.returncode, done.stderr) == (3, b"")
    assert (tree / "a").read_text() == "one\ntwo\n"
    assert b"+two" in (tmp_path / "patch").read_bytes()
    [receipt] = map(json.loads, (tmp_path / "receipts").read_text().splitlines())
    assert (receipt["outcome"], receipt["exit_code"], receipt["tool"]) == ("committed", 3, "exec")


def test_json_says_whose_the_exit_code_is(tree: Path) -> None:
    kept = json.loads(run(tree, "sh", "-c", "cat; touch b", options=("--json",), given=b"in").stdout)
    assert (kept["exit_code"], kept["ended_by"], kept["stdout"], kept["step"]) == (0, "command", "in", 1)
    assert [change["path"] for change in kept["changes"]] == ["b"]
    denied = json.loads(run(tree, "touch", "c", options=("--json", "--policy", "deny:c")).stdout)
    assert (denied["exit_code"], denied["ended_by"], denied["command_exit_code"]) == (122, "ringfence", 0)
    late = json.loads(run(tree, "sleep", "60", options=("--json", "--timeout", "1s")).stdout)
    assert (late["exit_code"], late["ended_by"], late["outcome"]) == (124, "ringfence", "failed")
    unread = json.loads(run(tree, "true", options=("--json", "--policy", "nonsense")).stdout)
    assert unread["exit_code"] == 125


def test_inside_of_another_it_is_a_part_of_that(tree: Path) -> None:
    inner = f"{sys.executable} -m ringfence_cli exec . -- touch inner"
    done = run(tree, "sh", "-c", f"touch outer; {inner}")
    assert done.returncode == 0, done.stderr
    assert steps(tree) == ["exec"]
    before = shape(tree)
    assert run(tree, "sh", "-c", f"touch outer2; {inner}; exit 1").returncode == 1
    assert shape(tree) == before


def test_inside_of_another_only_what_can_be_done_there_is_taken(tree: Path) -> None:
    inside = f"{sys.executable} -m ringfence_cli exec ."
    script = f"""
        {inside} --timeout 1s --quiet -- sh -c 'sleep 60 & sleep 60'; echo $?
        {inside} --timeout 60s --quiet -- sh -c 'exit 7'; echo $?
        {inside} --json --message said -- touch inner; echo $?
        {inside} --dry-run --policy deny:x -- touch inner; echo $?
        {sys.executable} -m ringfence_cli undo .; echo $?
    """
    done = run(tree, "sh", "-c", script)
    lines = done.stdout.decode().splitlines()
    assert [line for line in lines if line.isdecimal()] == ["124", "7", "125", "125", "2"]
    assert not (tree / "inner").exists()
    refused = json.loads(next(line for line in lines if line.startswith("{")))
    assert (refused["exit_code"], refused["ended_by"]) == (125, "ringfence")
    assert "--json, --message" in refused["error"] or "--message, --json" in refused["error"]
    assert b"--dry-run, --policy" in done.stderr or b"--policy" in done.stderr
    assert b"inside of a call" in done.stderr


def test_another_holder_than_the_command_around_it_is_not_joined(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Workspace.open(tmp_path / "other"):
        inner = f"{sys.executable} -m ringfence_cli exec {tmp_path}/other -- touch {tmp_path}/other/made"
        assert run(tree, "sh", "-c", inner).returncode == 125
    assert not (tmp_path / "other/made").exists()


def test_a_pattern_that_fits_nothing_is_named(tree: Path) -> None:
    told = run(tree, "true", options=("--policy", "deny:mistyped")).stderr
    assert b"deny:mistyped fits no path now" in told
    assert run(tree, "true", options=("--policy", "deny:mistyped", "--quiet")).stderr == b""


@pytest.mark.parametrize(("script", "patched"), [("echo two >> a", True), ("echo two >> a; exit 3", False)])
def test_the_patch_of_a_dry_run_is_what_would_be_kept(tree: Path, tmp_path: Path, script: str, patched: bool) -> None:
    done = run(tree, "sh", "-c", script, options=("--dry-run", "--patch", tmp_path / "patch"))
    assert done.returncode == (0 if patched else 3)
    assert (tree / "a").read_text() == "one\n"
    assert (b"+two" in (tmp_path / "patch").read_bytes()) == patched


@pytest.mark.parametrize(
    ("words", "code", "whose"),
    [
        (["no-such-program"], 127, "ringfence"),
        (["./a"], 126, "ringfence"),
        (["sh", "-c", "no-such-program"], 127, "command"),
        (["sh", "-c", "exit 126"], 126, "command"),
        (["sh", "-c", "exit 124"], 124, "command"),
        (["sh", "-c", "kill -9 $$"], 137, "command"),
    ],
)
def test_json_says_whether_a_command_was_started(tree: Path, words: list[str], code: int, whose: str) -> None:
    told = json.loads(run(tree, *words, options=("--json",)).stdout)
    assert (told["exit_code"], told["ended_by"], bool(told["failure"])) == (code, whose, whose == "ringfence")


def test_json_says_where_all_of_a_long_output_is(tree: Path) -> None:
    told = json.loads(run(tree, "sh", "-c", "yes | head -n 50000", options=("--json",)).stdout)
    assert list(told["output_files"]) == ["stdout"]
    assert Path(told["output_files"]["stdout"]).read_bytes() == b"y\n" * 50_000
    assert json.loads(run(tree, "echo", "short", options=("--json",)).stdout)["output_files"] == {}


@pytest.mark.parametrize(
    ("words", "said"), [(["."], "`--` before the command"), ([".", "--"], "no command"), (["make", "-j"], "`--`")]
)
def test_a_command_that_is_not_there_is_said_to_be_missing(tree: Path, words: list[str], said: str) -> None:
    done = ringfence("exec", *words, cwd=tree)
    assert done.returncode == 125
    assert said in done.stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_it_and_takes_it_back(tree: Path, number: signal.Signals) -> None:
    before = shape(tree)
    script = "(setsid sh -c 'while :; do date +%N > beat; sleep 0.02; done' &); sleep 60"
    command = [sys.executable, "-m", "ringfence_cli", "exec", tree, "--", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 30
        while not (tree / "beat").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert shape(tree) == before
    time.sleep(0.1)
    assert shape(tree) == before


@pytest.mark.parametrize(("answer", "stays"), [("y\n", False), ("n\n", True), ("\n", True)])
def test_at_a_terminal_a_failure_stays_unless_a_person_says_otherwise(tree: Path, answer: str, stays: bool) -> None:
    script = "test -t 0 && test -t 1 && read line && echo got $line && touch b; exit 3"
    command = [sys.executable, "-m", "ringfence_cli", "exec", str(tree), "--", "sh", "-c", script]
    with Terminal(command) as terminal:
        terminal.type("typed\n")
        terminal.wait_for("got typed")
        terminal.wait_for("take these changes back")
        terminal.type(answer)
        assert terminal.end() == 3
    assert (tree / "b").exists() == stays
    assert steps(tree) == (["exec"] if stays else [])


def test_git_data_outside_of_the_directory_is_named_at_the_start(tree: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tree.parent / "other")], check=True)
    (tree / ".git").write_text(f"gitdir: {tree.parent}/other/.git\n")
    outside = str(tree.parent / "other/.git").encode()
    assert outside in run(tree, "true").stderr
    assert outside not in run(tree, "true", options=("--quiet",)).stderr


def test_what_cannot_be_kept_is_not_taken_back_unless_it_is_to_be_discarded(tree: Path) -> None:
    script = "truncate -s 300M large; exit 3"
    refused = run(tree, "sh", "-c", script)
    assert refused.returncode == 125
    assert b"large" in refused.stderr
    assert (tree / "large").exists()
    (tree / "large").unlink()
    assert run(tree, "sh", "-c", script, options=("--discard",)).returncode == 3
    assert not (tree / "large").exists()


def test_a_hidden_file_is_restored_and_a_change_of_it_has_to_be_allowed(tree: Path) -> None:
    (tree / ".env").write_text("KEY=1\n")
    with Workspace.open(tree, hide=HiddenFiles()) as workspace:
        assert workspace.left_out == {".env": "hidden"}
    failed = run(tree, "sh", "-c", "rm .env; exit 3")
    assert failed.returncode == 3
    denied = run(tree, "sh", "-c", "rm .env")
    assert denied.returncode == 122
    assert b".env" in denied.stderr
    assert b"--allow-hidden" in denied.stderr
    assert (tree / ".env").read_text() == "KEY=1\n"
    assert run(tree, "sh", "-c", "rm .env", options=("--allow-hidden", "/.env")).returncode == 0
    assert not (tree / ".env").exists()


def test_what_a_rollback_could_not_bring_back_is_said(tree: Path) -> None:
    with Workspace.open(tree, hide=HiddenFiles()):
        pass
    done = run(tree, "sh", "-c", "echo KEY=1 > .env; exit 3")
    assert done.returncode == 3
    assert b".env is hidden: it stays" in done.stderr
    (tree / ".env").unlink()
    told = json.loads(run(tree, "sh", "-c", "echo KEY=1 > .env; exit 3", options=("--json",)).stdout)
    assert any(".env is hidden: it stays" in note for note in told["notes"])


def test_in_a_subdirectory_it_is_over_the_workspace_above_and_begins_there(tree: Path) -> None:
    (tree / "sub/deep").mkdir(parents=True)
    with Workspace.open(tree):
        pass
    owner_file(tree).write_text('[policies.paths]\ndeny = ["denied"]\n')
    done = ringfence("exec", "--", "sh", "-c", "touch here ../up", cwd=tree / "sub")
    assert done.returncode == 0, done.stderr
    assert str(tree).encode() in done.stderr
    assert ringfence("exec", tree / "sub/deep", "--quiet", "--", "touch", "here").stderr == b""
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()) == [
        "a",
        "sub/deep/here",
        "sub/here",
        "up",
    ]
    assert ringfence("exec", "--", "touch", "denied", cwd=tree / "sub").returncode == 122
    assert steps(tree) == ["exec", "exec"]
    with pytest.raises(FileNotFoundError, match="has no history"):
        Workspace.open(tree / "sub", read_only=True)


def test_a_directory_with_a_history_of_its_own_stays_its_own(tree: Path) -> None:
    (tree / "sub").mkdir()
    for root in (tree / "sub", tree):
        with Workspace.open(root):
            pass
    assert ringfence("exec", "--", "touch", "here", cwd=tree / "sub").returncode == 0
    assert (steps(tree / "sub"), steps(tree)) == (["exec"], [])


def test_the_log_shows_the_command_of_a_step_or_the_message(tree: Path) -> None:
    assert run(tree, "sh", "-c", "echo two >> a").returncode == 0
    assert run(tree, "touch", "b", options=("--message", "made b")).returncode == 0
    newest, first, _ = ringfence("log", tree).stdout.decode().splitlines()
    assert "  exec: sh -c 'echo two >> a'  " in first
    assert "  made b  " in newest
    assert b"exec: sh -c" in ringfence("show", tree, "1").stdout
    assert json.loads(ringfence("show", tree, "1", "--json").stdout)["step"]["title"] == "sh -c 'echo two >> a'"
