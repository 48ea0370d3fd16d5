"""What the README shows runs, in the order in which it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import fsspec
import pytest

from ringfence_tools import WorkspaceFileSystem

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def project() -> None:
    """What the mounted URL of the examples holds."""
    fsspec.register_implementation("ringfence", WorkspaceFileSystem, clobber=True)
    memory = fsspec.filesystem("memory")
    memory.pipe("/project/hello.txt", b"hello\n")


def test_the_python_examples_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    module = ModuleType("readme")  # a real one: dataclasses look their module up
    monkeypatch.setitem(sys.modules, "readme", module)
    for example in examples:
        exec(compile(example, "README.md", "exec"), vars(module))


def test_the_file_tools_that_the_readme_names_are_those_that_there_are() -> None:
    from ringfence.runtime import Session
    from ringfence_tools import VfsToolsSection

    said = re.search(r"are there: (.*?) over any", README, re.DOTALL)
    assert said is not None
    offered = {tool.name for tool in VfsToolsSection(session=Session()).tools()}
    assert offered == set(re.findall(r"`(\w+)`", said[1]))
