"""LangChain's suites for tools, over the tools of a prompt on a workspace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import ToolCall
from langchain_core.tools import BaseTool
from langchain_tests.integration_tests import ToolsIntegrationTests
from langchain_tests.unit_tests import ToolsUnitTests

from ringfence import Prompt, Session, ToolExecutor
from ringfence_doors.langchain import langchain_tools
from ringfence_sandbox import Workspace
from ringfence_tools import VfsToolsSection


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    (tmp_path / "root").mkdir()
    with Workspace.open(tmp_path / "root", store=tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def tools(workspace: Workspace) -> Iterator[dict[str, BaseTool]]:
    session = Session()
    section = VfsToolsSection(session=session, filesystem=workspace.filesystem)
    prompt = Prompt[None](ns="tests", key="langchain", sections=[section])
    with prompt.resources:
        yield {tool.name: tool for tool in langchain_tools(ToolExecutor(prompt=prompt, session=session))}


class OfWriteFile:
    made: BaseTool

    @pytest.fixture(autouse=True)
    def _make(self, tools: dict[str, BaseTool]) -> None:
        self.made = tools["write_file"]

    @property
    def tool_constructor(self) -> BaseTool:
        return self.made

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"file_path": "a.txt", "content": "a\n"}


class TestUnit(OfWriteFile, ToolsUnitTests):
    pass


class TestIntegration(OfWriteFile, ToolsIntegrationTests):
    pass


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, args=arguments, id="1", type="tool_call")


def test_the_artifact_is_the_receipt_and_a_failed_call_leaves_no_trace(
    tools: dict[str, BaseTool], workspace: Workspace
) -> None:
    done = tools["write_file"].invoke(call("write_file", file_path="d/a.txt", content="a"))
    assert (done.artifact["outcome"], [one["path"] for one in done.artifact["changes"]]) == (
        "committed",
        ["d", "d/a.txt"],
    )
    failed = tools["write_file"].invoke(call("write_file", file_path="d", content="a"))
    assert (failed.artifact["outcome"], failed.artifact["changes"]) == ("failed", [])
    assert "directory" in failed.content
    assert [step.tool for step in workspace.steps()] == ["write_file"]
    workspace.undo()
    assert not workspace.filesystem.exists("d")


async def test_two_calls_at_once_take_turns(tools: dict[str, BaseTool], workspace: Workspace) -> None:
    calls = [call("write_file", file_path=name, content=name) for name in "abc"]
    answers = await asyncio.gather(*(tools["write_file"].ainvoke(one) for one in calls))
    assert [answer.artifact["outcome"] for answer in answers] == ["committed"] * 3
    assert [step.paths for step in workspace.steps()] == [("a",), ("b",), ("c",)]


def test_the_programs_of_the_page_run(run_page: Callable[[str], int]) -> None:
    assert run_page("langchain") == 1
