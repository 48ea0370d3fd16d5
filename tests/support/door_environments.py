"""Environments for the suites of other frameworks: each framework, oldest or newest, apart from `.venv`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pages import PROJECT

Age = Literal["oldest", "newest"]
ENVIRONMENTS = PROJECT / ".doors"


@dataclass(frozen=True)
class DoorSuite:
    """A suite in `tests/doors/suites`, what it needs, and how many of its tests pass."""

    name: str
    """Of the extra, too."""
    passes: int

    @property
    def group(self) -> str:
        return f"door-{self.name}"

    @property
    def file(self) -> Path:
        return PROJECT / "tests/doors/suites" / f"{self.name.replace('-', '_')}_suite.py"

    def oldest(self) -> list[str]:
        """The requirements of the extra, each at its lower bound."""
        extras: dict[str, list[str]] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        return [re.sub(r">=([\w.]+).*", r"==\1", requirement) for requirement in extras[self.name]]


def make_environment(suite: DoorSuite, age: Age) -> Path:
    """Make the environment anew, and return its Python. Raises AssertionError with what uv printed."""
    environment = ENVIRONMENTS / f"{suite.name}-{age}"
    uv = Path(sys.executable).with_name("uv")
    _run([uv, "venv", "--quiet", "--no-config", "--clear", "--python", sys.executable, environment])
    command: list[object] = [uv, "pip", "install", "--quiet", "--python", environment, "--group", suite.group]
    command += ["--editable", f".[{suite.name}]", *(suite.oldest() if age == "oldest" else ["--upgrade"])]
    _run(command)
    return environment / "bin/python"


def _run(command: list[object]) -> None:
    with tempfile.TemporaryDirectory() as directory:  # uv leaves locks there, of what it builds
        environment = {**os.environ, "TMPDIR": directory}
        done = subprocess.run(
            [*map(str, command)], cwd=PROJECT, capture_output=True, text=True, check=False, env=environment
        )
    assert done.returncode == 0, done.stderr


def run_suite(python: Path, suite: DoorSuite, directory: Path) -> str:
    """Run a suite, and return the last line that pytest printed. Raises AssertionError where it fails."""
    folder = suite.file.parent
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode=importlib"]
    command += ["-o", f"pythonpath={PROJECT / 'tests/support'}"]
    command += ["-o", "asyncio_mode=auto"]  # of pytest-asyncio, where a suite needs that
    command += ["--rootdir", folder, "--confcutdir", folder, "--basetemp", directory, suite.file]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, cwd=PROJECT, env=environment
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout.splitlines()[-1]
