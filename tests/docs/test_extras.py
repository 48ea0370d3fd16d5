"""The message for a missing package of an extra."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ringfence.extras import install_command, missing

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS: dict[str, list[str]] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]


FILE = "file:///a%20b/ringfence-0.1.0-py3-none-any.whl"
WHEEL = json.dumps({"url": FILE, "archive_info": {}})
CHECKOUT = json.dumps({"url": "file:///a%20b/checkout", "dir_info": {}})
EDITABLE = json.dumps({"url": "file:///checkout", "dir_info": {"editable": True}})
GIT = json.dumps({"url": "https://h/r.git", "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "0f"}})
COMMIT = json.dumps({"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": "0f"}})


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        (None, "'ringfence[mcp]'"),
        (WHEEL, f"'ringfence[mcp] @ {FILE}'"),
        (CHECKOUT, "'/a b/checkout[mcp]'"),
        (EDITABLE, "-e '/checkout[mcp]'"),
        (GIT, "'ringfence[mcp] @ git+https://h/r.git@v1'"),
        (COMMIT, "'ringfence[mcp] @ git+https://h/r.git@0f'"),
    ],
)
def test_the_command_is_for_where_the_program_runs_and_came_from(
    tmp_path: Path, source: str | None, requirement: str
) -> None:
    assert install_command(tmp_path, source, extra="mcp") == f"pip install {requirement}"
    injected = requirement.removeprefix("-e ")
    pipx = tmp_path / "my-ringfence"
    pipx.mkdir()
    (pipx / "pipx_metadata.json").write_text("{}")
    assert install_command(pipx, source, extra="mcp") == f"pipx inject my-ringfence {injected}"
    (tmp_path / "uv-receipt.toml").write_text('[tool]\nrequirements = [{ name = "ringfence" }]\n')
    assert install_command(tmp_path, source, extra="mcp") == f"uv tool install {requirement}"


def test_an_installation_of_uv_keeps_the_extras_that_it_has(tmp_path: Path) -> None:
    receipt = tmp_path / "uv-receipt.toml"
    receipt.write_text('[tool]\nrequirements = [{ name = "x" }, { name = "ringfence", extras = ["openai", "mcp"] }]\n')
    assert install_command(tmp_path, extra="anthropic") == "uv tool install 'ringfence[anthropic,mcp,openai]'"
    for other in ("no toml", "tool = 5", "[tool]\nrequirements = [5]\n"):
        receipt.write_text(other)
        assert install_command(tmp_path, extra="mcp") == "uv tool install 'ringfence[mcp]'"


def test_packages_of_no_extra_are_added_to_what_is_there(tmp_path: Path) -> None:
    assert install_command(tmp_path, packages=["a", "b"]) == "pip install a b"
    (tmp_path / "pipx_metadata.json").write_text("{}")
    assert install_command(tmp_path, packages=["a", "b"]) == f"pipx inject {tmp_path.name} a b"
    (tmp_path / "uv-receipt.toml").write_text('[tool]\nrequirements = [{ name = "ringfence", extras = ["mcp"] }]\n')
    assert install_command(tmp_path, packages=["a", "b"]) == "uv tool install 'ringfence[mcp]' --with a --with b"


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_message_names_the_package_the_extra_and_the_command(extra: str, tmp_path: Path) -> None:
    message, _, command = missing("a.module", extra, tmp_path).partition(": pip install ")
    assert message == f"the package a is not installed, which ringfence's extra {extra!r} needs"
    assert command.endswith(f"[{extra}]'")
    assert len(message.split()) + len(command.split()) < 25


def test_sources_that_nobody_has_installed_say_where_it_is_written() -> None:
    code = f"import sys; sys.path.insert(0, {str(PYPROJECT.parent / 'platform')!r})\n"
    code += "from ringfence.extras import missing; print(missing('openai', 'openai'))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert "pyproject.toml says" in done.stdout
