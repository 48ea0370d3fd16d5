"""The live view of a run and the tables of the history, at a real terminal of any width and without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from agent_runs import HIDDEN
from command_line import ringfence, ringfence_process
from effort import one_in
from rich.cells import cell_len
from terminals import screen_of

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OWN = '''\
import time
from dataclasses import dataclass
from ringfence import Tool, ToolContext, ToolResult, ToolsSection
from ringfence.runtime import ToolOutput

def build(params: None, *, context: ToolContext) -> ToolResult[None]:
    """Build it."""
    for number in range(9):
        context.session.notify(ToolOutput(context.call.call_id, f"\\x1b[31mpart\\x1b[0m {number} {'x' * 99}\\n"))
    time.sleep(1.3)
    return ToolResult("built")

@dataclass
class Command:
    command: str

def slow(params: Command, *, context: ToolContext) -> ToolResult[None]:
    """Run it."""
    time.sleep(1.3)
    return ToolResult("ran")

tools = [Tool("build", "Build it.", build), Tool("slow", "Run it.", slow)]
section = ToolsSection(title="Own", key="own", tools=tools)
'''
LONG = "a-rather-long-name-of-a-file-" * 3
TURNS: list[dict[str, Any]] = [
    {
        "text": "I shall first build the program and then write what came of it " * 3,
        "tool_calls": [
            {"name": "build", "arguments": {}},
            {"name": "ls", "arguments": {}},
            {"name": "write_file", "arguments": {"file_path": f"{LONG}.txt", "content": "x\n" * 500}},
            {"name": "read_file", "arguments": {"file_path": f"{LONG}.missing"}},
        ],
    },
    {"text": "Done."},
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in TURNS))
    return tmp_path / "tree"


def arguments(tree: Path) -> list[str]:
    own, script = tree.parent / "own.py", tree.parent / "script.jsonl"
    return ["run", str(tree), "--task", "Do it.", "--model", f"script:{script}", "--section", f"{own}:section"]


def quick(tree: Path) -> list[str]:
    """The same run without the call that takes long."""
    calls = [call for call in TURNS[0]["tool_calls"] if call["name"] != "build"]
    (tree.parent / "script.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in ({"tool_calls": calls}, TURNS[1]))
    )
    return arguments(tree)


def at_a_terminal(columns: int, *words: str) -> str:
    """Return all that the command wrote, with the escapes of the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm-256color"
    command, shown = [sys.executable, "-m", "ringfence_cli", *words], b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # how Linux says that nobody has the other end any more
                break
    os.close(ours)
    return shown.decode()


def test_a_running_call_is_shown_with_the_end_of_its_output_and_every_line_fits(tree: Path) -> None:
    columns = 60
    shown = at_a_terminal(columns, *arguments(tree))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", shown))]
    assert any(re.fullmatch(r"  build  0:0\d", line) for line in lines)
    assert any(line.startswith("    part 8 xxx") for line in lines)
    assert not any(line.startswith("    part 3 ") for line in lines), "the end alone"
    live = lines[: next(at for at, line in enumerate(lines) if line.startswith("diff --git"))]
    assert max(map(len, live)) <= columns
    assert "  build -> ok: built" in lines
    said = " ".join(" ".join(live).split())
    assert "-> committed: created" in said
    assert "failed and rolled back: " in said


@pytest.mark.parametrize(
    ("columns", "command", "shown"),
    one_in(
        2,
        [
            (60, "日本語" * 30, r"  slow command='(日本語)+.*…  0:0\d"),
            (200, "word " * 30, r"  slow command='(word ){29}word'  0:0\d"),
        ],
    ),
)
def test_a_running_call_has_its_time_and_as_much_of_its_command_as_fits(
    tree: Path, columns: int, command: str, shown: str
) -> None:
    (tree / ".env").write_text("A=1\n")
    turns = [{"tool_calls": [{"name": "slow", "arguments": {"command": command}}]}, {"text": "Done."}]
    (tree.parent / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    raw = at_a_terminal(columns, *arguments(tree))
    lines = re.split(r"[\r\n]+", ESCAPE.sub("", raw))
    assert any(re.fullmatch(shown, line) for line in lines), raw
    assert max(map(cell_len, lines)) <= columns
    assert HIDDEN in " ".join(" ".join(screen_of(raw, columns)).split()), "no word is broken"


def test_a_long_diff_is_cut_at_a_terminal_and_says_how_to_see_all(tree: Path) -> None:
    shown = ESCAPE.sub("", at_a_terminal(80, *quick(tree)))
    assert shown.count("\n+x\r") + shown.count("\r+x\r") < 400
    (command,) = re.findall(r"more lines of the diff: `ringfence (.*?)` shows all", " ".join(shown.split()))
    assert ringfence(*command.split()).stdout.count(b"\n+x") == 500
    assert ESCAPE.sub("", at_a_terminal(80, *command.split())).count("+x") == 500, "who asks for it gets all of it"


def test_without_a_terminal_a_long_call_has_its_line_before_its_end_and_the_diff_is_whole(tree: Path) -> None:
    done = ringfence_process(*arguments(tree))
    said = done.stderr.decode().splitlines()
    assert said.index("  build ...") + 1 == said.index("  build -> ok: built")
    assert not any(line.endswith(" ...") and "ls" in line for line in said), "a short one has one line"
    assert done.stdout.count(b"\n+x") == 500


def test_the_log_is_a_table_that_fits(tree: Path) -> None:
    ringfence(*quick(tree))
    for columns in (60, 200):
        lines = ESCAPE.sub("", at_a_terminal(columns, "log", str(tree))).replace("\r", "").splitlines()
        assert lines[0].split() == ["step", "at", "by", "changed"]
        assert max(len(line.rstrip()) for line in lines) <= columns
        assert LONG in "".join("".join(lines).split())
    assert LONG in ringfence("log", tree).stdout.decode().splitlines()[0], "one line for programs"
