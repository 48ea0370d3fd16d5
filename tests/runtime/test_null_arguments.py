"""Null for an argument that may be left out: models write it so, above all those that have to name every argument."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tool_values import expecting, file_tools

from ringfence import serde
from ringfence.adapters import ToolExecutor
from ringfence.adapters.strict_schema import strict_schema
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import Prompt, PromptTemplate, Section, Tool
from ringfence.runtime import Session
from ringfence_sandbox import PodmanSandbox, Workspace
from ringfence_tools import (
    AstevalSection,
    HistoryToolsSection,
    PlanningToolsSection,
    PodmanSandboxSection,
    VfsToolsSection,
)

REQUIRED: Mapping[str, object] = {
    "file_path": "a.txt",
    "content": "x",
    "old_string": "x",
    "new_string": "y",
    "patch": "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-a\n+b\n",
    "pattern": "x",
    "path": "a.txt",
    "source": "a.txt",
    "target": "b.txt",
    "objective": "o",
    "steps": ["s"],
    "step_id": 1,
    "status": "done",
    "code": "1",
    "command": "true",
    "name": "n",
    "step": 1,
}


def all_tools(tmp_path: Path) -> list[Tool[Any, Any]]:
    session = Session()
    root = tmp_path / "root"
    root.mkdir()
    with PodmanSandbox(root, url="unix:///nowhere/podman.sock") as sandbox:
        sections: list[Section[Any]] = [
            PlanningToolsSection(session=session),
            AstevalSection(session=session),
            HistoryToolsSection(session=session, workspace=lambda: Workspace.open(root)),
            PodmanSandboxSection(session=session, sandbox=sandbox),
        ]
        return [*(tool for section in sections for tool in section.tools()), *expecting(file_tools(), None)]


def test_null_is_a_left_out_argument_of_every_tool(tmp_path: Path) -> None:
    seen = set[str]()
    for tool in all_tools(tmp_path):
        if tool.params_type is None:
            continue
        seen.add(tool.name)
        schema = serde.schema(tool.params_type, extra="forbid")
        needed = schema.get("required", [])
        assert isinstance(needed, list)
        given = {name: REQUIRED[name] for name in needed}
        if tool.name == "shell_execute":
            given["command"] = "true"
        if tool.name == "planning_update_step":
            given["title"] = "t"
        nulls = dict.fromkeys(name for name in tool.fields if name not in given)
        # A strict mode has the model name every argument.
        strict = strict_schema(schema)
        assert strict is None or strict["required"] == list(schema["properties"])
        assert tool.decode({**given, **nulls}) == tool.decode(given), tool.name
    assert {
        "read_file",
        "edit_file",
        "grep",
        "shell_execute",
        "evaluate_python",
        "undo",
        "planning_update_step",
    } <= seen


@pytest.mark.parametrize("blank", [None, ""])
def test_a_blank_glob_is_a_left_out_one(blank: str | None) -> None:
    session = Session()
    filesystem = InMemoryFilesystem()
    filesystem.write("a.txt", "x\n")
    section = VfsToolsSection(session=session, filesystem=filesystem)
    prompt = Prompt(PromptTemplate(ns="tests", key="nulls", sections=[section]))
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        for tool in ("glob", "grep"):
            pattern = "*" if tool == "glob" else "x"
            answer = executor.execute(tool, {"pattern": pattern, "path": blank, "glob": blank})
            assert answer.result.success
            assert "a.txt" in answer.text
        answer = executor.execute("read_file", {"file_path": "a.txt", "offset": None, "limit": None})
        assert "1 | x" in answer.text
