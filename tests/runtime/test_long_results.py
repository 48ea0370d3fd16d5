"""What is too long for a conversation is cut there, and read elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest

from ringfence.adapters import ScriptedAdapter, ToolExecutor
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Session
from ringfence_tools import VfsToolsSection

LINES = "".join(f"line {number}\n" for number in range(40_000))
ONE_LINE = json.dumps(list(range(60_000)))


@dataclass(frozen=True)
class Say:
    what: str = "lines"


def say(params: Say, *, context: ToolContext) -> ToolResult[None]:
    text = {"lines": LINES, "line": ONE_LINE, "odd": "\udc80\n" * 60_000, "little": "hello"}[params.what]
    return ToolResult(message=text, value=None, success=params.what != "odd")


SAY = Tool[Say, None](name="say", description="Say a lot.", handler=say)


def opened(*, files: bool = True) -> tuple[Prompt[Any], Session]:
    session = Session()
    sections: list[Any] = [MarkdownSection(title="T", key="t", template="T", tools=[SAY])]
    sections += [VfsToolsSection(session=session)] if files else []
    return Prompt(PromptTemplate(ns="tests", key="long", sections=sections)), session


def read_back(executor: ToolExecutor, path: str) -> str:
    """All of it, in as many calls as a model needs that does what it is told."""
    found: list[str] = []
    offset = 0
    while True:
        answer = executor.execute("read_file", {"file_path": path, "offset": offset})
        assert answer.result.success, answer.text
        assert len(answer.text) < 100_000
        found += re.findall(r"^ *\d+ \| (.*)$", answer.text, re.MULTILINE)
        more = re.search(r"read on with offset=(\d+)", answer.text)
        if more is None:
            return "\n".join(found)
        offset = int(more[1])


@pytest.mark.parametrize(("what", "whole"), [("lines", LINES), ("line", ONE_LINE), ("odd", "\\udc80\n" * 60_000)])
def test_the_whole_is_where_the_model_is_told(what: str, whole: str) -> None:
    prompt, session = opened()
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        answer = executor.execute("say", {"what": what}, call_id="call_1")
        assert len(answer.text) < 100_000 + 200
        told = re.search(r"read_file shows all of it: (\S+)", answer.text)
        assert told is not None
        back = read_back(executor, told[1])
        assert back.replace("\n", "") == whole.replace("\n", "").replace("\udc80", "\\udc80")


@pytest.mark.parametrize("spelling", ["./{}", "/{}", " {} "])
def test_the_path_may_be_spelled_as_any_other(spelling: str) -> None:
    prompt, session = opened()
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        executor.call("say", {}, call_id="call_1")
        assert executor.call("read_file", {"file_path": spelling.format(".ringfence/results/call_1")}).success


@pytest.mark.parametrize("call_id", ["functions.say:0", "a//b", "../../x", "a/../b", "x" * 300, " call ", "."])
def test_any_id_of_a_call_leads_to_the_whole(call_id: str) -> None:
    prompt, session = opened()
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        told = re.search(r"all of it: (.*?) \.\.\.", executor.execute("say", {}, call_id=call_id).text)
        assert told is not None
        assert "line 39999" in read_back(executor, told[1])


@pytest.mark.parametrize("name", ["write_file", "rm", "edit_file"])
def test_what_is_kept_is_no_file(name: str) -> None:
    prompt, session = opened()
    arguments = {
        "write_file": {"file_path": ".ringfence/results/other", "content": "x"},
        "rm": {"path": ".ringfence/results/call_1"},
        "edit_file": {"file_path": ".ringfence/results/call_1", "old_string": "line 1", "new_string": "x"},
    }
    with prompt.resources:
        executor = ToolExecutor(prompt=prompt, session=session)
        executor.call("say", {}, call_id="call_1")
        executor.call(name, arguments[name])
        assert "line 39999" in read_back(executor, ".ringfence/results/call_1")
        assert not executor.call("read_file", {"file_path": ".ringfence/results/call_2"}).success


def test_without_a_tool_to_read_it_the_model_is_told_to_ask_for_less() -> None:
    prompt, session = opened(files=False)
    with prompt.resources:
        answer = ToolExecutor(prompt=prompt, session=session).execute("say", {})
    assert "ask for a smaller part" in answer.text


def test_a_short_result_is_told_whole() -> None:
    prompt, session = opened()
    adapter = ScriptedAdapter([{"tool_calls": [{"name": "say", "arguments": {"what": "little"}}]}, {"text": "Done."}])
    adapter.evaluate(prompt, session=session)
    assert adapter.requests[1]["messages"][-1]["content"] == "hello"
