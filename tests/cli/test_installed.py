"""The built wheel, installed as a program by uv: no checkout, and a home directory that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.mark.prove
def test_a_wheel_that_uv_installs_works_with_a_home_directory_that_cannot_be_written(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", PROJECT]
    subprocess.run(build, check=True, capture_output=True, timeout=240)
    (wheel,) = (tmp_path / "dist").iterdir()
    places = {"UV_CACHE_DIR": "cache", "UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin", "RINGFENCE_STATE_DIR": "state"}
    # Below /proc nobody can make a directory, not even root.
    environment = {
        **os.environ,
        **{name: str(tmp_path / place) for name, place in places.items()},
        "HOME": "/proc/none",
    }
    environment.pop("VIRTUAL_ENV", None)
    (tree := tmp_path / "tree").mkdir()

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            words, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    uv = Path(sys.executable).with_name("uv")
    run(uv, "tool", "install", "--quiet", "--python", sys.executable, wheel)
    program = tmp_path / "bin" / "ringfence"
    assert run(program, "--version") == f"ringfence, version {wheel.name.split('-')[1]}\n"
    run(program, "exec", ".", "--", "sh", "-c", "echo new > a.txt")
    assert "a.txt" in run(program, "log", ".")
    run(program, "undo", ".")
    assert not (tree / "a.txt").exists()
    assert "ringfence, version" in run(uv, "tool", "run", "--quiet", "--from", wheel, "ringfence", "--version")
