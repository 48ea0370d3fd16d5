"""What the README shows runs, in the order in which it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import fsspec
import pytest

from ringfence.runtime import Session
from ringfence_sandbox import Workspace
from ringfence_tools import (
    HistoryToolsSection,
    PlanningToolsSection,
    PodmanSandboxSection,
    VfsToolsSection,
    WorkspaceFileSystem,
)

README_PATH = Path(__file__).parent.parent / "README.md"
README = README_PATH.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def project() -> None:
    """The entry point of an installed package, where the tests run without one."""
    fsspec.register_implementation("ringfence", WorkspaceFileSystem, clobber=True)


EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_examples_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLES) == 6
    module = ModuleType("readme")  # a real one: dataclasses look their module up
    monkeypatch.setitem(sys.modules, "readme", module)
    for example in EXAMPLES:
        if "PodmanSandbox" in example:  # in tests/podman
            continue
        exec(compile(example, "README.md", "exec"), vars(module))


def without_what_differs(text: str) -> str:
    """Instants and the ids of sessions are others each time."""
    return re.sub(r"\d{4}-\d\d-\d\d[T ] ?\d\d:\d\d:\d\d|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "-", text)


def test_the_first_run_and_its_history_are_what_the_shell_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README[README.index("## On your own directory") :]
    (setup, *_), (session, *_) = (
        re.findall(rf"^```{kind}\n(.*?)^```", section, re.MULTILINE | re.DOTALL) for kind in ("sh", "console")
    )
    command = tmp_path / "bin" / "ringfence"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ringfence_cli "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    (tmp_path / "empty").mkdir()

    def answered(commands: str) -> str:
        done = subprocess.run(["sh", "-e"], input=commands, capture_output=True, text=True, cwd=tmp_path / "empty")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert answered(setup).endswith("@@ -0,0 +1 @@\n+two\n")
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)
    assert len(steps) == 4
    for typed, said in steps:
        assert without_what_differs(answered(typed)) == without_what_differs(said), typed


def test_the_python_examples_pass_the_strict_type_checker(tmp_path: Path) -> None:
    roots = [str(README_PATH.parent / root) for root in ("platform", "sandbox", "contrib_tools")]
    # What fsspec leaves untyped is not the README's, and every example imports what it uses.
    allowed = "# pyright: reportUnknownMemberType=false, reportDuplicateImport=false\n"
    (tmp_path / "readme.py").write_text(allowed + "\n".join(EXAMPLES))
    config = {"typeCheckingMode": "strict", "extraPaths": roots, "reportMissingTypeStubs": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_tools_that_the_readme_names_are_those_that_there_are_with_their_arguments(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", README, re.MULTILINE)
    said = {name: set(re.findall(r"`(\w+)`", what)) for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    session = Session()
    sections = (
        VfsToolsSection(session=session),
        PlanningToolsSection(session=session),
        HistoryToolsSection(session=session, workspace=lambda: Workspace.open("nowhere", read_only=True)),
    )
    with PodmanSandboxSection(session=session, root=tmp_path) as shell:
        tools = [tool for section in (*sections, shell) for tool in section.tools()]
    assert said == {tool.name: {one.name for one in fields(tool.params_type)} for tool in tools if tool.params_type}


def test_the_configuration_of_clients_can_be_read_and_starts_the_server() -> None:
    blocks = re.findall(r"^```json\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    known = [json.loads(block) for block in blocks if "ringfence" in block]
    known += map(tomllib.loads, re.findall(r"^```toml\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    servers = [server["ringfence"] for one in known for server in one.values()]
    assert len(servers) == 5
    for server in servers:
        if "url" not in server:
            assert (server["command"], server["args"][0], len(server["args"])) == ("ringfence", "serve", 2)
