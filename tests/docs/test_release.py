"""The workflows of the repository: what they call is there, and their shell steps do what the release needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from pages import PROJECT

import ringfence

WORKFLOWS = sorted((PROJECT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+|[0-9a-f]{40})")


def program(name: str) -> str:
    if (found := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed; make workflows fetches it")
    return found


def script(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = ["sh", str(PROJECT / ".ci" / name), *map(str, arguments)]
    inherited = {**os.environ, **environment}
    return subprocess.run(words, env=inherited, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda one: one.stem)
def test_a_workflow_calls_scripts_and_targets_that_are_there(workflow: Path) -> None:
    text = workflow.read_text()
    for name in re.findall(r"run: (?:sh )?\.ci/([\w-]+)", text):
        assert (PROJECT / ".ci" / name).is_file()
    targets = re.findall(r"^([\w-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    for called in re.findall(r"run: make (.+)", text):
        assert set(called.split()) <= set(targets)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda one: one.stem)
def test_a_workflow_gives_no_permission_that_a_job_does_not_name_and_pins_its_actions(workflow: Path) -> None:
    text = workflow.read_text()
    assert "\npermissions: {}\n" in text
    used = re.findall(r"uses: (\S+)", text)
    assert all(PINNED.fullmatch(one) for one in used), used
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert text.count("runs-on:") == text.count("timeout-minutes:")


def test_actionlint_and_zizmor_find_nothing_in_the_workflows() -> None:
    lint, audit = program("actionlint"), program("zizmor")
    for words in (
        [lint, *WORKFLOWS],
        [audit, "--offline", "--quiet", "--persona", "regular", PROJECT / ".github", PROJECT / "action.yml"],
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_tag_that_is_not_the_version_is_not_built(tmp_path: Path) -> None:
    done = script("build-dist", tmp_path / "dist", TAG="v0.0.0")
    assert done.returncode == 1
    assert "v0.0.0" in done.stderr
    assert not any((tmp_path / "dist").iterdir())


def test_a_citation_has_the_version_and_the_licence_of_the_package() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = (PROJECT / "CITATION.cff").read_text().splitlines()
    assert {f"version: {project['version']}", f"license: {project['license']}"} <= set(lines)


def test_the_program_says_the_version_of_the_package() -> None:
    assert ringfence.__version__ == tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]


def test_the_entry_of_the_registry_bears_the_version_and_starts_the_server() -> None:
    entry = json.loads((PROJECT / "server.json").read_text())
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    (package,) = entry["packages"]
    assert {entry["version"], package["version"]} == {version}
    assert 1 <= len(entry["description"]) <= 100
    assert len(entry["title"]) <= 100
    assert (package["registryType"], package["identifier"], package["transport"]) == (
        "pypi",
        "ringfence",
        {"type": "stdio"},
    )
    words = [one.get("value", one.get("valueHint")) for one in package["packageArguments"]]
    assert words == ["serve", "directory"]
    assert {one["type"] for one in package["packageArguments"]} == {"positional"}


def test_a_release_fills_in_the_owner_by_which_the_registry_knows_the_package(tmp_path: Path) -> None:
    for name in ("README.md", "server.json"):
        shutil.copy(PROJECT / name, tmp_path)
    for wrong in ("", "-a", "a/b", "a|b", "$(id)"):
        assert script("name-owner", tmp_path, OWNER=wrong).returncode == 1
    done = script("name-owner", tmp_path, OWNER="Some-One")
    assert done.returncode == 0, done.stderr
    entry = json.loads((tmp_path / "server.json").read_text())
    assert re.fullmatch(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+", entry["name"])
    assert entry["name"] == "io.github.Some-One/ringfence"
    assert entry["repository"] == {"url": "https://github.com/Some-One/ringfence", "source": "github"}
    assert f"<!-- mcp-name: {entry['name']} -->" in (tmp_path / "README.md").read_text()


@pytest.mark.prove
def test_what_is_built_can_be_installed_and_has_a_bill_of_materials(tmp_path: Path) -> None:
    built = script("build-dist", tmp_path / "dist")
    assert built.returncode == 0, built.stderr
    assert {path.suffix for path in (tmp_path / "dist").iterdir()} == {".whl", ".gz"}
    bill = tmp_path / "ringfence.cdx.json"
    asked = {"SBOM": str(bill)} if shutil.which("cyclonedx-py") is not None else {}
    tried = script("try-wheel", tmp_path / "dist", **asked)
    assert tried.returncode == 0, tried.stderr
    if asked:
        parts = json.loads(bill.read_text())
        assert parts["metadata"]["component"]["name"] == "ringfence"
        assert {"click", "pydantic", "dulwich"} <= {part["name"] for part in parts["components"]}
        assert "pip" not in {part["name"] for part in parts["components"]}
