"""`ringfence run --ask` at a real terminal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from terminals import Terminal

from ringfence_sandbox import Workspace

QUESTION = "keep it?"


def write(path: str, content: str) -> dict[str, Any]:
    return {"tool_calls": [{"name": "write_file", "arguments": {"file_path": path, "content": content}}]}


def command(tree: Path, turns: list[Mapping[str, Any]], *options: str) -> list[str]:
    tree.mkdir(exist_ok=True)
    script = tree.parent / "script.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in [*turns, {"text": "Done."}]))
    receipts = ["--receipts", str(tree.parent / "receipts.jsonl")]
    fixed = ["--task", "x", "--model", f"script:{script}", *receipts]
    return [sys.executable, "-m", "ringfence_cli", "run", str(tree), *fixed, "--ask", "writes", *options]


def at_terminal(tmp_path: Path, turns: list[Mapping[str, Any]], *options: str, columns: int = 120) -> Terminal:
    return Terminal(command(tmp_path / "tree", turns, *options), columns=columns)


def receipts(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "receipts.jsonl").read_text().splitlines()]


def test_a_yes_keeps_what_the_diff_shows(tmp_path: Path) -> None:
    with at_terminal(tmp_path, [write("a", "new\n")]) as terminal:
        shown = terminal.wait_for(QUESTION)
        assert "approval of write_file" in shown
        assert "  | +new" in shown
        assert "+1 -0 lines" in shown
        terminal.type("yes\n")
        assert terminal.end() == 0
    assert (tmp_path / "tree/a").read_text() == "new\n"


def test_a_no_rolls_back_and_the_model_reads_why_and_a_call_that_is_repeated_is_no_new_question(
    tmp_path: Path,
) -> None:
    turns = [write("a", "new\n"), write("a", "new\n"), write("a", "other\n")]
    with at_terminal(tmp_path, turns) as terminal:
        terminal.wait_for(QUESTION)
        terminal.type("n\n")
        terminal.wait_for("why?")
        terminal.type("use spaces\n")
        assert "+other" in terminal.wait_for(QUESTION)
        terminal.type("y\n")
        assert terminal.end() == 0
    assert (tmp_path / "tree/a").read_text() == "other\n"
    first, second, third = receipts(tmp_path)
    assert first["message"].endswith("a person said no: use spaces")
    assert second["message"].endswith("asked about before, and a person said no: use spaces")
    assert [one["outcome"] for one in (first, second, third)] == ["denied", "denied", "committed"]


@pytest.mark.prove
def test_always_is_for_this_path_and_tool(tmp_path: Path) -> None:
    read = {"tool_calls": [{"name": "read_file", "arguments": {"file_path": "a"}}]}
    with at_terminal(tmp_path, [write("a", "1\n"), read, write("a", "2\n"), write("b", "3\n")]) as terminal:
        terminal.wait_for(QUESTION)
        assert "always covers write_file of this path" in terminal.shown
        terminal.type("always\n")
        assert "+3" in terminal.wait_for(QUESTION)
        terminal.type("y\n")
        assert terminal.end() == 0
    assert (tmp_path / "tree/a").read_text() == "2\n"


def test_nothing_in_a_diff_acts_on_the_terminal_or_passes_for_a_question(tmp_path: Path) -> None:
    attack = "\x1b[2J\x1b]0;title\x07\u202eevil\nkeep it? yes\n"
    with at_terminal(tmp_path, [write("a\x1b[2Jb", attack)]) as terminal:
        terminal.wait_for(QUESTION)  # the one in the diff
        terminal.wait_for(QUESTION)
        assert "\x1b[2J" not in terminal.raw
        assert "\x1b]" not in terminal.raw
        assert "\u202e" not in terminal.raw
        assert r"\x1b[2J\x1b]0;title\x07\u202eevil" in terminal.shown
        assert "\n  | +keep it? yes\n" in terminal.shown
        terminal.type("no\n\n")
        assert terminal.end() == 0
    assert not list((tmp_path / "tree").iterdir())


@pytest.mark.prove
def test_what_was_typed_before_the_question_is_no_answer(tmp_path: Path) -> None:
    slow = {"tool_calls": [{"name": "glob", "arguments": {"pattern": "*"}}]}
    with at_terminal(tmp_path, [slow, write("a", "new\n")]) as terminal:
        terminal.type("yes\nyes\n")
        terminal.wait_for(QUESTION)
        time.sleep(0.3)
        assert terminal.process.poll() is None
        terminal.type("what\n")
        terminal.wait_for("answer with a word")
        terminal.wait_for(QUESTION)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert "they ended the input" in receipts(tmp_path)[-1]["message"]


@pytest.mark.prove
def test_a_long_diff_is_cut_and_all_shows_it(tmp_path: Path) -> None:
    with at_terminal(tmp_path, [write("a", "".join(f"line {n}\n" for n in range(600)))], columns=60) as terminal:
        shown = terminal.wait_for(QUESTION)
        assert "line 599" not in shown
        assert "206 more lines" in shown
        terminal.type("all\n")
        assert "line 599" in terminal.wait_for(QUESTION)
        terminal.type("y\n")
        assert terminal.end() == 0


def test_ignored_paths_are_counted_and_not_in_the_diff(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/.gitignore").write_text("build\n")
    patch = "".join(f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+of {path}\n" for path in ("a", "build/b"))
    with at_terminal(tmp_path, [{"tool_calls": [{"name": "apply_patch", "arguments": {"patch": patch}}]}]) as terminal:
        shown = terminal.wait_for(QUESTION)
        assert "+of a" in shown
        assert "+of build/b" not in shown
        assert "  2 ignored paths:\n  | build, build/b\n" in shown
        assert "changes: 1 path, +1 -0 lines" in shown
        terminal.type("yes\n")
        assert terminal.end() == 0
    assert (tmp_path / "tree/build/b").exists()


def test_ctrl_c_at_the_question_rolls_back_and_ends_the_run(tmp_path: Path) -> None:
    with at_terminal(tmp_path, [write("a", "new\n")]) as terminal:
        terminal.wait_for(QUESTION)
        assert (tmp_path / "tree/a").exists()
        terminal.type("\x03")
        assert terminal.end() == 130
    assert not (tmp_path / "tree/a").exists()
    assert receipts(tmp_path)[-1]["outcome"] == "interrupted"


def test_nobody_answers_in_time(tmp_path: Path) -> None:
    with at_terminal(tmp_path, [write("a", "new\n")], "--ask-timeout", "1s") as terminal:
        terminal.wait_for(QUESTION)
        assert terminal.end() == 0
    assert not (tmp_path / "tree/a").exists()
    assert "nobody answered within 1 s" in receipts(tmp_path)[-1]["message"]


def test_without_a_terminal_it_is_denied_and_said_at_the_start(tmp_path: Path) -> None:
    run = command(tmp_path / "tree", [write("a", "new\n")])
    ended = subprocess.run(run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.startswith("nobody can answer here")
    assert not (tmp_path / "tree/a").exists()
    assert "there is no terminal" in receipts(tmp_path)[-1]["message"]


def test_log_and_show_work_while_it_waits_and_an_edit_meanwhile_stays(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    with at_terminal(tmp_path, [write("a", "1\n"), write("b", "2\n")]) as terminal:
        terminal.wait_for(QUESTION)
        terminal.type("y\n")
        terminal.wait_for(QUESTION)
        for line in (["log"], ["show"]):
            look = [sys.executable, "-m", "ringfence_cli", *line, str(tree), *(["1"] if line == ["show"] else [])]
            ended = subprocess.run(look, capture_output=True, text=True, timeout=30, check=True)
            assert "write_file" in ended.stdout
        (tree / "b").write_text("a person's\n")
        terminal.type("no really\n")
        assert terminal.end() == 0
    assert (tree / "b").read_text() == "a person's\n"
    assert "b was changed by somebody else meanwhile" in receipts(tmp_path)[-1]["message"]


def test_a_kill_while_it_waits_is_a_rollback(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    with at_terminal(tmp_path, [write("a", "new\n")]) as terminal:
        terminal.wait_for(QUESTION)
        assert (tree / "a").exists()
        terminal.process.send_signal(signal.SIGKILL)
        terminal.end()
    with Workspace.open(tree) as workspace:
        assert workspace.recovered is not None
        assert workspace.steps() == []
    assert not (tree / "a").exists()


def test_a_resumed_run_asks_as_before(tmp_path: Path) -> None:
    with at_terminal(tmp_path, [write("a", "new\n")]) as terminal:
        terminal.wait_for(QUESTION)
        terminal.type("\x03")
        assert terminal.end() == 130
    run = command(tmp_path / "tree", [write("a", "new\n")])
    run[run.index("--task") : run.index("--task") + 2] = ["--resume"]
    run[run.index("--ask") : run.index("--ask") + 2] = []
    ended = subprocess.run(run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True)
    assert "nobody can answer here" in ended.stderr
    assert "--ask writes" in ended.stderr
    assert not (tmp_path / "tree/a").exists()


@pytest.mark.parametrize("what", ["shell_execute", "../x"])
def test_what_would_ask_about_nothing_is_refused(tmp_path: Path, what: str) -> None:
    run = [*command(tmp_path / "tree", []), "--ask", what]
    ended = subprocess.run(run, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert what in ended.stderr


@pytest.mark.parametrize("columns", [60, 80])
def test_each_line_of_an_agent_s_text_has_a_bar_at_the_width_of_the_terminal(tmp_path: Path, columns: int) -> None:
    spoof = "changes: 0 paths, +0 -0 lines"
    content = "".join(f"{text}{' ' * 71}  {spoof}{' ' * 71}{spoof}\n" for text in ("fine", "日本" * 9, "e\u0301" * 9))
    turns = [write("o" * 50 + "/" + "k" * 60 + spoof, f"{content}\t\t\t\t\t\t\t\t\t\t\t  {spoof}\n❤️{'👩‍👩‍👧' * 40}\n")]
    with at_terminal(tmp_path, turns, columns=columns) as terminal:
        terminal.wait_for(QUESTION)
        screen = terminal.screen
        terminal.type("all\n")
        terminal.wait_for(QUESTION)
        terminal.type("no\n\n")
        assert terminal.end() == 0
    asked = screen[next(n for n, line in enumerate(screen) if line.startswith("approval of")) :]
    free = [line for line in asked if not line.startswith(("  | ", "  |>"))]
    assert free[1] == "  changes: 2 paths, +5 -0 lines"
    rest = "always covers write_file of these paths; all shows everything keep it? yes,"
    assert " ".join(" ".join(free[2:]).split()).startswith(rest)
    assert sum(spoof in line for line in asked if line.startswith("  |>")) >= 4, "it is there, behind a bar"


def test_question_and_answer_stay_on_the_screen(tmp_path: Path) -> None:
    turns = [write("a", "".join(f"line {n}\n" for n in range(9))), write("b", "other\n")]
    plan = {"objective": "Do it", "initial_steps": ["one", "two", "three"]}
    turns.insert(0, {"tool_calls": [{"name": "planning_setup_plan", "arguments": plan}]})
    with at_terminal(tmp_path, turns) as terminal:
        for _ in range(2):
            terminal.wait_for(QUESTION)
            time.sleep(0.3)
            terminal.type("yes\n")
        assert terminal.end() == 0
    screen = terminal.screen
    first = next(n for n, line in enumerate(screen) if line.startswith("approval of"))
    asked = screen[first : next(n for n, line in enumerate(screen) if "keep it?" in line) + 1]
    assert [line for line in asked if line.startswith("  | +line")] == [f"  | +line {n}" for n in range(9)]
    assert asked[-1].endswith("then no) yes")
