"""The message for a missing package of an extra."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ringfence.extras import missing

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
EXTRAS: dict[str, list[str]] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_installs_what_the_extra_needs_from_any_environment(extra: str) -> None:
    message, _, command = missing("a.module", extra).partition(": pip install ")
    assert message == f"the package a is not installed, which ringfence's extra {extra!r} needs"
    assert sorted(shlex.split(command)) == sorted(EXTRAS[extra])


def test_sources_that_nobody_has_installed_say_where_it_is_written() -> None:
    code = f"import sys; sys.path.insert(0, {str(PYPROJECT.parent / 'platform')!r})\n"
    code += "from ringfence.extras import missing; print(missing('openai', 'openai'))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert "pyproject.toml says" in done.stdout
