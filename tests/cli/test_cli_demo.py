"""`ringfence demo`: what it shows has really happened, and nothing is left of it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from agent_runs import Signals
from command_line import ringfence_text

from ringfence_cli.demonstration import copy_files, demonstrate, run_tests

DATA = Path(str(files("ringfence_cli") / "demo"))
DEMO = [sys.executable, "-m", "ringfence_cli", "demo"]
SECONDS = 60


def contents(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary directory is empty."""
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp")}


def test_the_repository_s_tests_fail_before_and_pass_after(temporary: dict[str, str]) -> None:
    ended = subprocess.run(DEMO, capture_output=True, text=True, env=temporary, timeout=SECONDS, check=False)
    assert ended.returncode == 0
    before = ended.stderr.index("FAILED (errors=1): test_a_night_shift_ends_on_the_next_day")
    after = ended.stderr.index("s: OK")
    denied = ended.stderr.index("edit_file", before)
    assert before < denied < ended.stderr.index("failed and rolled back", denied) < after
    assert "denied by the policy read_before_write" in ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    assert ended.stdout.startswith("diff --git a/HISTORY b/HISTORY\n")
    assert os.listdir(temporary["TMPDIR"]) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_is_kept_is_the_repository_with_the_diff(tmp_path: Path, temporary: dict[str, str]) -> None:
    kept = tmp_path / "kept"
    ended = subprocess.run([*DEMO, "--keep", kept], capture_output=True, env=temporary, timeout=SECONDS, check=False)
    assert ended.returncode == 0
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / "kept.receipts.jsonl").read_text().splitlines()]
    assert {"committed", "denied", "failed"} <= {*outcomes}
    assert b"kept.receipts.jsonl` shows each call" in ended.stderr
    assert run_tests(kept, DATA).passed
    copy_files(DATA / "sample", tmp_path / "copy")
    assert not run_tests(tmp_path / "copy", DATA).passed
    subprocess.run(["git", "apply", "-"], input=ended.stdout, cwd=tmp_path / "copy", check=True)
    assert contents(kept) == contents(tmp_path / "copy")
    original = contents(DATA / "sample")
    assert {path for path, content in contents(kept).items() if original.get(path) != content} == {
        "HISTORY",
        "timesheet/entries.py",
    }


def test_the_data_of_the_package_is_not_touched(temporary: dict[str, str]) -> None:
    before = contents(DATA)
    subprocess.run(DEMO, capture_output=True, env=temporary, timeout=SECONDS, check=True)
    assert contents(DATA) == before


def test_a_directory_that_exists_is_not_worked_in(tmp_path: Path) -> None:
    ended = ringfence_text("demo", "--keep", tmp_path)
    assert ended.returncode == 2
    assert "cannot be made" in ended.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("without", ["edit_file", "apply_patch", "read_file"])
def test_it_does_not_succeed_when_something_did_not_happen(
    tmp_path: Path, without: str, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DATA, tmp_path / "demo")
    turns = [json.loads(line) for line in (DATA / "script.jsonl").read_text().splitlines()]
    for turn in turns:
        if "tool_calls" not in turn:
            continue
        turn["tool_calls"] = [call for call in turn["tool_calls"] if call["name"] != without] or [{"name": "ls"}]
    (tmp_path / "demo" / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    with Signals() as signals:
        assert demonstrate(None, signals, tmp_path / "demo") == 1
    assert "\nNO  " in capfd.readouterr().err


def test_interrupted_it_leaves_nothing_behind(temporary: dict[str, str]) -> None:
    # At a terminal it pauses after each turn, so that there is time.
    ours, theirs = pty.openpty()
    with subprocess.Popen(DEMO, stdin=theirs, stdout=theirs, stderr=theirs, env=temporary) as process:
        os.close(theirs)
        shown, sent = b"", False
        while process.poll() is None or not shown.endswith(b"interrupted\r\n"):
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
            if b"turn 2" in shown and not sent:  # once: the end of the interpreter knows no Ctrl-C
                process.send_signal(signal.SIGINT)
                sent = True
    os.close(ours)
    assert process.returncode == 130
    assert b"interrupted" in shown
    assert b"Traceback" not in shown
    assert os.listdir(temporary["TMPDIR"]) == []


def test_of_three_candidates_the_one_that_passes_the_tests_is_promoted(temporary: dict[str, str]) -> None:
    done = ringfence_text("demo", "--candidates", env=temporary)
    assert done.returncode == 0, done.stderr
    assert "FAILED (errors=1): test_a_night_shift_ends_on_the_next_day" in done.stderr
    assert done.stdout.splitlines()[0].split()[:2] == ["candidate-2", "passed"]
    assert "yes  one of 3 candidates passed the tests: candidate-2\n" in done.stderr
    assert os.listdir(temporary["TMPDIR"]) == []
