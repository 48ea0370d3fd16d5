"""A reader of a command's output who goes away, as `head` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence_sandbox import Workspace


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["mcp", "install", "gemini"],
        ["policies", "file"],
        ["stores"],
        ["log"],
        ["show", "1", "--json"],
        ["diff", "--stat"],
        ["export"],
    ],
    ids=" ".join,
)
def test_a_command_ends_quietly_when_nobody_reads_its_output(tmp_path: Path, words: list[str]) -> None:
    with Workspace.open(tmp_path) as workspace, workspace.transaction("write_file"):
        workspace.filesystem.write("a.txt", "x\n" * 50_000)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ringfence_cli", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"HOME": str(tmp_path)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path, env=env, check=False)
    os.close(writing)
    assert done.returncode == (1 if words == ["--help"] else 0)  # click's own
    assert not any(word in done.stderr.decode() for word in ("Errno", "Exception", "Broken", "Error"))
    assert (tmp_path / ".gemini/settings.json").exists() is (words[0] == "mcp")
