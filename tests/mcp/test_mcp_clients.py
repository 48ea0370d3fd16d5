"""Clients from entry points: the example is installed as pip does it, by its files and its metadata."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/client"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH, with the example in it."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(EXAMPLE / "acme_client.py", site)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(site, project["entry-points"]["ringfence.clients"])
    (tmp_path / "project").mkdir()
    return site


def install(site: Path, clients: dict[str, str]) -> None:
    metadata = site / "acme_client-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-client\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in clients.items()]
    (metadata / "entry_points.txt").write_text("".join(["[ringfence.clients]\n", *lines]))


def ringfence(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "RINGFENCE_STATE_DIR": str(site.parent / "state")}
    command = [sys.executable, "-m", "ringfence_cli", *words]
    return subprocess.run(command, cwd=site.parent / "project", env=environment, capture_output=True, text=True)


def test_the_client_of_an_entry_point_is_registered_and_taken_out_again(site: Path) -> None:
    done = ringfence(site, "mcp", "install", "acme", "--exclusive")
    assert done.returncode == 0, done.stderr
    file = site.parent / "project/acme.json"
    written = json.loads(file.read_text())
    assert "serve" in written["servers"]["ringfence"]["run"]
    assert written["tools"] == {"off": ["edit", "shell"]}
    assert ringfence(site, "mcp", "uninstall", "acme", "--exclusive").returncode == 0
    assert not file.exists()


def test_a_server_that_python_starts_takes_no_module_of_the_project(site: Path) -> None:
    assert ringfence(site, "mcp", "install", "gemini").returncode == 0
    project = site.parent / "project"
    server = json.loads((project / ".gemini/settings.json").read_text())["mcpServers"]["ringfence"]
    for name in ("json.py", "ringfence.py"):
        (project / name).write_text("raise SystemExit('of the project')\n")
    command = [server["command"], *server["args"], "--help"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert "Usage" in done.stdout, done.stderr


def test_the_server_shows_the_client_of_an_entry_point_what_it_shows_its_model(site: Path) -> None:
    """One inside of the directory that is served does not count: the agent could change it."""
    code = "import sys; from pathlib import Path; from ringfence_mcp.known_clients import *; site = Path(sys.argv[1])"
    names = "(('acme-agent 2', None), ('acme-agent', site.parent / 'project'), ('acme-agent', site), ('x', None))"
    code = f"{code}; print(*(shown_characters(*given) for given in {names}))"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code, site], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["20000", "20000", "10000", "10000"], done.stderr


@pytest.mark.parametrize("value", ["nowhere:acme", "acme_client:entry", "acme_client:acme"])
def test_an_entry_point_that_is_no_client_of_its_name_is_named(value: str, site: Path) -> None:
    shutil.rmtree(site / "acme_client-1.0.dist-info")
    install(site, {"other": value, "claude": "nowhere:mine"})
    done = ringfence(site, "mcp", "install", "other")
    assert done.returncode == 2
    assert value in done.stderr
    assert ringfence(site, "mcp", "install", "claude", "--dry-run").returncode == 0
