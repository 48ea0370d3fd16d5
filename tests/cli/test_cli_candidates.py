"""`ringfence run --candidates`: forks, a score, and the best promoted or left to a person."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence, ringfence_text

from ringfence_tools.runs.scoring import Score, number_of, ranked


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.txt").write_text("a\n")
    return tree


def scripts(directory: Path, *contents: str) -> str:
    """Return the SPEC of a model of which each candidate writes its content into a file."""
    for number, content in enumerate(contents, 1):
        write = {"name": "write_file", "arguments": {"file_path": "new.txt", "content": content}}
        turns: list[dict[str, Any]] = [{"tool_calls": [write]}, {"text": "Done."}]
        (directory / f"{number}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return f"script:{directory}/{{candidate}}.jsonl"


def test_the_candidate_of_the_highest_number_is_promoted_as_one_step(tree: Path, tmp_path: Path) -> None:
    model = scripts(tmp_path, "9\n", "80.5\n", "100\nno number\n")
    words = ("run", tree, "--task", "x", "--model", model, "--candidates", "3", "--jobs", "2")
    score = "touch scored; cat new.txt; exit $(grep -c no new.txt)"
    done = ringfence_text(*words, "--score", score, "--promote", "best")
    assert done.returncode == 0, done.stderr
    assert "candidate-1: works\n" in done.stderr
    assert "candidate-2 is promoted:\n1 applied\n" in done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    assert lines[:3] == [["candidate-2", "80.5"], ["candidate-1", "9"], ["candidate-3", "exit"]]
    assert (tree / "new.txt").read_text() == "80.5\n"
    assert not (tree / "scored").exists()
    listed = ringfence_text("forks", tree).stdout.splitlines()
    assert [line.rpartition("  ")[2] for line in listed] == ["9", "80.5", "exit code 1"]
    compared = ringfence_text("forks", tree, "--diff", "candidate-1", "candidate-2").stdout
    assert "-9\n+80.5\n" in compared
    assert ringfence("undo", tree).returncode == 0
    assert not (tree / "new.txt").exists()


def test_no_module_of_the_current_directory_runs_in_the_process_of_a_candidate(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for name in ("json", "ringfence", "ringfence_cli"):
        (tmp_path / f"here/{name}.py").write_text("raise SystemExit('a module of the current directory ran')\n")
    words = ("run", tree, "--task", "x", "--model", scripts(tmp_path, "one\n", "two\n"), "--candidates", "2")
    command = [sys.executable, "-P", "-m", "ringfence_cli", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "module of the current directory" not in done.stderr


def test_without_promote_a_person_is_told_which_is_best_and_nothing_changes(tree: Path, tmp_path: Path) -> None:
    model = scripts(tmp_path, "one\n")
    (tmp_path / "2.jsonl").write_text('{"no": "turn"')
    words = ("run", tree, "--task", "x", "--model", model, "--candidates", "2", "--max-tokens", "100", "--json")
    refused = ringfence("run", tree, "--task", "x", "--model", model, "--candidates", "2", "--score", "true")
    assert refused.returncode == 2  # the script of the second cannot be read: nothing is begun
    assert ringfence_text("forks", tree).stdout == ""
    scripts(tmp_path, "one\n", "two\n")
    found = json.loads(ringfence(*words, "--score", "grep one new.txt").stdout)
    assert (found["exit_code"], found["best"], found["promotion"]) == (0, "candidate-1", None)
    assert [one["score"]["exit_code"] for one in found["candidates"]] == [0, 1]
    assert [one["run"]["outcome"] for one in found["candidates"]] == ["done", "done"]
    assert not (tree / "new.txt").exists()
    none = ringfence_text(*words[:-1], "--score", "false", "--promote", "best")
    assert none.returncode == 1
    assert f"no candidate passed: {tree} is as it was" in none.stderr
    assert [line.split()[0] for line in none.stdout.splitlines()] == ["candidate-3", "candidate-4"]


def test_what_cannot_be_is_refused_before_a_fork_is_made(tree: Path, tmp_path: Path) -> None:
    model = scripts(tmp_path, "one\n", "two\n")
    task = ("run", tree, "--task", "x", "--model", model)
    for options, expected in (
        (("--score", "true"), "--score: for --candidates N"),
        (("--candidates", "2", "--promote", "best"), "--promote best needs --score COMMAND"),
        (("--candidates", "2", "--patch", "p"), "--patch: not with --candidates"),
        (("--candidates", "2", "--workspace", "memory"), "--candidates is for --workspace disk or podman"),
        (("--candidates", "2", "--share", "a"), "--share needs --workspace podman"),
        (("--share", "a"), "--share: for --candidates N"),
    ):
        done = ringfence_text(*task, *options)
        assert done.returncode == 2
        assert expected in done.stderr
    (tree / "own.pth").write_text(f"{tree}\n")
    done = ringfence_text(*task, "--candidates", "2", "--score", "true")
    assert done.returncode == 2
    assert "own.pth names it" in " ".join(done.stderr.split())
    assert ringfence_text("forks", tree).stderr == "0 forks\n"
    found = json.loads(ringfence(*task, "--candidates", "2", "--score", "true", "--score-anyway", "--json").stdout)
    assert (found["best"], found["candidates"][0]["fork"]["score"]) == ("candidate-1", "passed")
    done = ringfence_text(*task, "--score-anyway")
    assert "--score-anyway: for --candidates N" in done.stderr


def test_an_interrupt_leaves_the_source_as_it_was_and_names_the_forks(tree: Path, tmp_path: Path) -> None:
    model = scripts(tmp_path, "one\n", "two\n")
    command = [sys.executable, "-m", "ringfence_cli", "run", str(tree), "--task", "x", "--model", model]
    command += ["--candidates", "2", "--score", "sleep 60", "--promote", "best"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stderr:
        name, _, state = line.partition(b": ")
        if state == b"is scored\n":
            break
    else:
        raise AssertionError("none was scored")
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"as it was, and the forks stay" in errors
    # In either order: the second one may have been interrupted before it changed a line.
    assert {line.split()[0] for line in said.splitlines()} == {b"candidate-1", b"candidate-2"}
    scored = next(line.decode() for line in said.splitlines() if line.startswith(name))
    assert scored.split()[1:5] == ["interrupted", "+1", "-0", "interrupted"]
    assert [path.name for path in tree.iterdir()] == ["a.txt"]
    assert len(ringfence_text("forks", tree).stdout.splitlines()) == 2


def test_candidates_rank_by_exit_code_then_number_then_size() -> None:
    found = {
        "fails": (Score(1, 99.0), 1),
        "small": (Score(0), 1),
        "large": (Score(0), 5),
        "number": (Score(0, 0.5), 9),
        "less than none": (Score(0, -1.0), 1),
        "not scored": (None, 0),
    }
    order = ["number", "small", "large", "less than none", "fails", "not scored"]
    assert list(ranked(found, found.__getitem__)) == order


@pytest.mark.parametrize(("line", "expected"), [("0.5", 0.5), ("-3", -3.0), ("12 passed", None), ("nan", None)])
def test_a_number_is_all_of_a_line(line: str, expected: float | None) -> None:
    assert number_of(line) == expected
