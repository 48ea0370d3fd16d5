"""What a program reads of `ringfence run --json`: one object, whatever ended the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence_text

from ringfence_sandbox import Workspace


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def run(tree: Path, *arguments: str, turns: str = '{"text": "Done."}\n') -> tuple[int, Mapping[str, Any], str]:
    (tree.parent / "script.jsonl").write_text(turns)
    words = ("run", str(tree), "--model", f"script:{tree.parent / 'script.jsonl'}", "--json", *arguments)
    done = ringfence_text(*words)
    record = json.loads(done.stdout)
    assert record["exit_code"] == done.returncode
    return done.returncode, record, done.stderr


def test_a_busy_workspace_is_told_from_a_task_that_failed(tree: Path) -> None:
    with Workspace.open(tree):
        code, record, said = run(tree, "--task", "x")
    assert (code, record["outcome"]) == (2, "busy")
    assert record["error"] in said
    assert "process" in record["error"]


def test_a_current_directory_that_was_removed_is_said(tree: Path) -> None:
    (tree.parent / "script.jsonl").write_text('{"text": "Done."}')
    model = f"script:{tree.parent / 'script.jsonl'}"
    line = 'cd "$1"; rmdir "$1"; exec "$2" -m ringfence_cli run . --task x --model "$3" --json'
    ended = subprocess.run(["sh", "-c", line, "sh", tree, sys.executable, model], capture_output=True, timeout=60)
    record = json.loads(ended.stdout)
    assert (ended.returncode, record["exit_code"], record["outcome"]) == (2, 2, "not_started")
    assert record["error"] == "the current directory was removed: change to one that is there"


@pytest.mark.parametrize("place", ["/proc/nowhere", "relative"])
def test_a_store_that_cannot_be_made_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("RINGFENCE_STATE_DIR", place)
    code, record, said = run(tree, "--task", "x")
    assert (code, record["outcome"], record["steps"]) == (2, "not_started", 0)
    assert place in record["error"]
    assert "Invalid value for 'DIR'" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "x", "--policy", "guard"], "there is no policy 'guard'"),
        (["--task", "x", "--model", "gpt"], "there is no model 'gpt'"),
        (["--task", " "], "it is empty"),
        (["--resume"], "no interrupted run"),
        (["--task", "x", "--patch", "/nowhere/there"], "'/nowhere/there' cannot be written: No such file"),
        (["--task", "x", "--policy", "tests:make:/src/**"], "does not have: make"),
    ],
)
def test_what_nothing_was_begun_with_is_an_object_too(tree: Path, arguments: list[str], words: str) -> None:
    code, record, said = run(tree, *arguments)
    assert (code, record["outcome"], record["changes"]) == (2, "not_started", [])
    assert words in record["error"]
    assert words in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run {tree} --task x --model script:x --deadline 5", "'5' is not a duration"),
        ("run {tree} --task x --model script:x --max-turns 0", "0 is not in the range"),
        ("run {tree} --task x --model script:x --workspace docker", "'docker' is not one of"),
        ("run {tree}/missing --task x --model script:x", "missing' does not exist"),
        ("run {tree} --task x", "Missing option '--model'"),
        ("run {tree} --model script:x", "give --task"),
        ("log {tree}/missing", "missing' does not exist"),
        ("show {tree} 7", "has no history yet"),
        ("undo {tree} 1 --step 2", "give one of N"),
        ("sandbox doctor --imag x", "No such option"),
    ],
)
def test_every_exit_is_an_object_wrong_usage_too(tree: Path, arguments: str, words: str) -> None:
    command = arguments.format(tree=tree).split()
    done = ringfence_text(*command, "--json")
    record = json.loads(done.stdout)
    assert (record["exit_code"], words in record["error"]) == (done.returncode, True), record
    assert record.get("outcome") == ("not_started" if "run" in command else None)
    assert done.stderr


@pytest.mark.parametrize(
    "arguments", ["undo {tree} --step --json", "log {tree} --limit --json", "show {tree} -- --json"]
)
def test_an_object_is_for_who_asked_for_it(tree: Path, arguments: str) -> None:
    done = ringfence_text(*arguments.format(tree=tree).split())
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert done.stderr


def test_without_a_sandbox_the_object_says_so(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CONTAINER_HOST", "unix:///nonexistent/podman.sock")
    code, record, _ = run(tree, "--task", "x", "--workspace", "podman")
    assert (code, record["outcome"]) == (4, "no_sandbox")
    assert record["error"]


def test_a_run_that_was_not_begun_leaves_no_patch_and_no_report_of_an_earlier_one(tree: Path) -> None:
    patch, report, receipts = (tree.parent / name for name in ("out.patch", "out.html", "out.jsonl"))
    files = ("--patch", str(patch), "--report", str(report), "--receipts", str(receipts))
    write = '{"tool_calls": [{"name": "write_file", "arguments": {"file_path": "a", "content": "x"}}]}\n{"text": "."}\n'
    assert run(tree, "--task", "x", *files, turns=write)[0] == 0
    told, called = patch.read_bytes(), receipts.read_bytes()
    with Workspace.open(tree):
        assert run(tree, "--task", "x", *files)[1]["outcome"] == "busy"
    assert (b"+++ b/a" in told, patch.read_bytes(), report.exists()) == (True, b"", False)
    for option in ("--patch", "--report"):
        assert run(tree, "--task", "x", option, str(receipts), "--receipts", str(receipts))[0] == 2
    assert receipts.read_bytes() == called


@pytest.mark.parametrize(
    ("wrong", "stays"), [(["--no-such-option"], True), (["--deadline", "soon"], True), (["--image", "x"], False)]
)
def test_a_command_line_that_is_not_understood_touches_nothing_and_one_that_makes_no_sense_begins_nothing(
    tree: Path, wrong: list[str], stays: bool
) -> None:
    patch = tree.parent / "out.patch"
    patch.write_bytes(b"of an earlier run")
    assert run(tree, "--task", "x", "--patch", str(patch), *wrong)[0] == 2
    assert patch.read_bytes() == (b"of an earlier run" if stays else b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--patch", "{}/kept", "--report", "{}/kept"], "--patch and --report"),
        (["--patch", "{}/kept", "--receipts", "{}/link"], "--patch and --receipts"),
        (["--report", "{}/script.jsonl"], "--model and --report"),
        (["--patch", "{}/tree/../script.jsonl"], "--model and --patch"),
        (["--task", "@{}/kept", "--receipts", "{}/kept"], "--task and --receipts"),
        (["--policy", "{}/own.toml", "--patch", "{}/own.toml"], "--policy and --patch"),
        (["--patch", "{}/new", "--receipts", "{}/new"], "--patch and --receipts"),
    ],
)
def test_a_file_that_is_named_twice_is_not_touched(tree: Path, arguments: list[str], words: str) -> None:
    beside = tree.parent
    (beside / "kept").write_text("precious")
    (beside / "own.toml").write_text("[policies]\nprotected = true\n")
    (beside / "link").symlink_to("kept")
    code, record, _ = run(tree, "--task", "x", *(name.format(beside) for name in arguments))
    assert (code, record["error"]) == (2, f"{words} name the same file")
    assert {path.name: path.read_bytes() for path in beside.iterdir() if path.is_file()} == {
        **dict.fromkeys(("kept", "link"), b"precious"),
        "own.toml": b"[policies]\nprotected = true\n",
        "script.jsonl": b'{"text": "Done."}\n',
    }


@pytest.mark.parametrize("option", ["--patch", "--receipts", "--report"])
@pytest.mark.parametrize("stream", ["standard output", "standard error"])
def test_a_file_that_a_stream_goes_into_is_not_written_over(tree: Path, option: str, stream: str) -> None:
    (tree.parent / "script.jsonl").write_text('{"text": "Done."}')
    out, model = tree.parent / "out", f"script:{tree.parent / 'script.jsonl'}"
    command = [sys.executable, "-m", "ringfence_cli", "run", tree, "--task", "x", "--model", model, option, out]
    with out.open("wb") as file, (tree.parent / "other").open("w+b") as other:
        streams = (file, other) if stream == "standard output" else (other, file)
        ended = subprocess.run(command, stdout=streams[0], stderr=streams[1], check=False)
    said = out.read_text() + (tree.parent / "other").read_text()
    assert (ended.returncode, f"{option} names the file that {stream} goes into" in said) == (2, True), said


CALLS = """\
{"tool_calls": [{"name": "write_file", "arguments": {"file_path": "a", "content": "x"}}]}
{"tool_calls": [{"name": "edit_file", "arguments": {"file_path": "a", "old_string": "y", "new_string": "z"}}]}
{"text": "Done."}
"""


def test_the_words_count_a_call_under_the_same_outcome_as_the_object(tree: Path) -> None:
    _, record, said = run(tree, "--task", "x", turns=CALLS)
    counts = {outcome: count for outcome, count in record["tool_calls"].items() if count}
    assert counts == {"total": 2, "committed": 1, "failed": 1}
    assert "2 tool calls (1 committed, 1 failed)" in said


ENDLESS = '{"tool_calls": [{"name": "ls", "arguments": {}}], "usage": {"input_tokens": 100, "output_tokens": 50}}\n' * 5


def test_what_a_turn_cost_that_broke_the_budget_is_told(tree: Path) -> None:
    code, record, _ = run(tree, "--task", "x", "--max-tokens", "120", turns=ENDLESS)
    assert (code, record["outcome"], record["turns"]) == (5, "limit_reached", 1)
    used = {"input_tokens": 100, "output_tokens": 50, "cached_tokens": None}
    assert record["usage"] == used | {"cache_write_tokens": None, "cost_usd": None, "prices": None}
    assert record["tool_calls"]["total"] == 0


def test_a_run_that_uses_up_its_turns_has_reached_a_limit(tree: Path) -> None:
    code, record, said = run(tree, "--task", "x", "--max-turns", "3", turns=ENDLESS)
    assert (code, record["outcome"], record["turns"]) == (5, "limit_reached", 3)
    assert "3 turns without a final answer" in said
    assert ": 1 turn without a final answer" in run(tree, "--task", "x", "--max-turns", "1", turns=ENDLESS)[2]


def test_a_run_that_repeats_itself_has_reached_a_limit(tree: Path) -> None:
    code, record, said = run(tree, "--task", "x", "--max-repeats", "3", turns=ENDLESS)
    assert (code, record["outcome"], record["turns"]) == (5, "limit_reached", 3)
    assert "ls was called 3 times alike" in said


def test_a_run_that_ends_with_a_call_as_text_is_not_done(tree: Path) -> None:
    written = json.dumps({"text": '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'})
    code, record, said = run(tree, "--task", "x", turns=f"{written}\n" * 3)
    assert (code, record["outcome"], record["text"]) == (3, "provider_failed", None)
    assert "wrote a tool call as text" in said
