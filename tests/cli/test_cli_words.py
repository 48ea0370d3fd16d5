"""The exact words of the command line, as a person reads them: what each command prints, in ``words/cli.txt``.

Other tests look at exit codes, files and fields of ``--json``. ``UPDATE_WORDS=1`` writes the file anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import ringfence_text

WORDS = Path(__file__).with_name("words") / "cli.txt"
VARIABLE = [
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\+00:00)?", "TIME"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"after \d+\.\d s", "after N s"),
    (r"--deadline \d+s", "--deadline Ns"),
    (r"[\d,]+ bytes were", "N bytes were"),
    (r"process \d+", "process N"),
]
DONE = {"text": "Done."}


def calls(*tool_calls: tuple[str, Mapping[str, object]], **turn: object) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in tool_calls], **turn}


READ = calls(("read_file", {"file_path": "a.txt"}), text="I look first.")
EDIT = calls(
    ("edit_file", {"file_path": "a.txt", "old_string": "two", "new_string": "2"}),
    ("write_file", {"file_path": "new/b.txt", "content": "new\n"}),
)
DENIED = calls(
    ("write_file", {"file_path": "keep.txt", "content": "x"}),
    ("edit_file", {"file_path": "a.txt", "old_string": "nowhere", "new_string": "x"}),
    ("fly", {}),
    ("planning_setup_plan", {"objective": "Mend it", "initial_steps": ["Look", "Edit"]}),
    ("planning_update_step", {"step_id": 1, "status": "done"}),
)


class Terminal:
    """Runs commands on one directory and keeps what they print."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        (directory / "tree").mkdir()
        for name in ("a.txt", "keep.txt"):
            (directory / "tree" / name).write_text("one\ntwo\n")

    def __call__(self, *words: str, turns: Sequence[Mapping[str, Any]] = ()) -> None:
        (self.directory / "script.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
        if words[0] == "run":
            words = (*words, "--model", f"script:{self.directory}/script.jsonl")
        places = {"TREE": str(self.directory / "tree"), "DIR/": f"{self.directory}/"}
        done = ringfence_text(*(re.sub("TREE|DIR/", lambda found: places[found[0]], word) for word in words))
        text = f"$ ringfence {' '.join(words)}\n{done.stdout}{done.stderr}[{done.returncode}]\n"
        for found, name in [(re.escape(str(self.directory / "tree")), "TREE"), (re.escape(str(self.directory)), "DIR")]:
            text = re.sub(found, name, text)
        for found, name in VARIABLE:
            text = re.sub(found, name, text)
        self.said.append(text)


def test_the_words_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal(tmp_path)
    tree = tmp_path / "tree"
    memory = ("run", "TREE", "--workspace", "memory", "--task", "Mend it.")
    terminal(*memory, turns=[READ, EDIT, DENIED, DONE])
    terminal(*memory, "--apply", "--quiet", turns=[READ, EDIT, DONE])
    terminal("undo", "TREE")
    terminal(*memory, turns=[DONE, DONE])
    terminal(*memory, "--max-tokens", "9", turns=[READ, DONE])
    run = ("run", "TREE", "--task")
    terminal(*run, "One.", "--max-turns", "1", "--policy", "deny:/secret", turns=[READ, DONE])
    terminal(*run, "Two.", "--max-turns", "1", turns=[READ, DONE])
    terminal(*run, "Three.", "--max-turns", "1", turns=[READ, DONE])
    terminal("run", "TREE", "--resume", turns=[EDIT])
    terminal("run", "TREE", "--resume", "--max-turns", "2", "--policy", "deny:/b.txt", turns=[EDIT, DONE])
    terminal("run", "TREE", "--resume", turns=[DONE])
    (tree / "theirs.txt").write_text("theirs\n")
    terminal("log", "TREE")
    terminal("show", "TREE", "3")
    terminal("diff", "TREE")
    terminal("checkpoint", "TREE", "here")
    terminal("undo", "TREE", "2", "--dry-run")
    terminal("restore", "TREE", "1")
    terminal("restore", "TREE", "here")
    (tree / "a.txt").write_text("by hand\n")
    terminal("undo", "TREE", "--step", "3")
    terminal("checkpoint", "TREE", "here", "--drop")
    terminal("recover", "TREE")
    terminal("gc", "TREE", "--keep", "1")
    for wrong in (
        ["show", "TREE", "77"],
        ["restore", "TREE", "nowhere"],
        ["undo", "TREE", "1", "--step", "2"],
        ["run", "TREE"],
        ["run", "TREE", "--task", " "],
        ["run", "TREE", "--task", "@DIR/missing"],
        ["run", "TREE", "--task", "x", "--apply"],
        ["run", "TREE", "--resume", "--workspace", "memory"],
        ["run", "TREE", "--task", "x", "--deadline", "10"],
        ["run", "TREE", "--task", "x", "--memory", "4g"],
        ["run", "TREE", "--task", "x", "--policy", "guard"],
        ["run", "TREE", "--task", "x", "--policy", "deletions:x"],
        ["run", "TREE", "--task", "x", "--policy", "tests:ls"],
        ["run", "TREE", "--task", "x", "--policy", "deny:*.{pem,key}"],
        ["run", "TREE", "--task", "x", "--policy", "allow:TREE/src/**"],
        ["run", "TREE", "--task", "x", "--policy", "DIR/missing.toml"],
        ["run", "TREE", "--task", "x", "--policy", "tests:make:/src/**"],
        ["run", "TREE", "--task", "x", "--patch", "TREE/no/such/place"],
        ["run", "TREE", "--task", "x", "--section", "missing:name"],
    ):
        terminal(*wrong, turns=[DONE])
    said = "\n".join(terminal.said)
    if os.environ.get("UPDATE_WORDS"):
        WORDS.parent.mkdir(exist_ok=True)
        WORDS.write_text(said)
    assert said == WORDS.read_text()
