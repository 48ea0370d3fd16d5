"""What the README shows runs, in the order in which it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

README_PATH = Path(__file__).parent.parent / "README.md"
README = README_PATH.read_text(encoding="utf-8")


EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_examples_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLES) == 2
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
