"""A workspace's tools in the OpenAI Agents SDK and in pydantic-ai, each driven by its own loop."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from provider_server import ProviderServer
from tool_values import OrderedCalls

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import InMemoryFilesystem
from ringfence.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext, ToolResult
from ringfence.runtime import Receipt, Session
from ringfence_tools import VfsToolsSection, agents_tools, pydantic_toolset


@dataclass(frozen=True)
class Nothing:
    pass


class World:
    def __init__(self) -> None:
        self.session = Session()
        self.files = InMemoryFilesystem()
        self.files.write("a.txt", "one\ntwo\n")
        self.started, self.go_on = threading.Event(), threading.Event()

        def wait(params: Nothing, *, context: ToolContext) -> ToolResult[None]:
            assert context.filesystem is not None
            context.filesystem.write("waited", "yes")
            self.started.set()
            assert self.go_on.wait(10)
            return ToolResult(message="waited", value=None)

        tool = Tool[Nothing, None](name="wait", description="Wait.", handler=wait)
        waiting = MarkdownSection(title="W", key="w", template="W", tools=[tool])
        section = VfsToolsSection(session=self.session, filesystem=self.files)
        self.prompt = Prompt(PromptTemplate(ns="tests", key="other", sections=[section, waiting]))

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(receipt.tool, receipt.outcome) for receipt in self.session[Receipt].all()]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with made.prompt.resources:
        yield made


TURNS = [
    {
        "tool_calls": [
            {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "two", "new_string": "2"}},
            {"name": "read_file", "arguments": {"file_path": "a.txt"}},
            {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "two", "new_string": "2"}},
            {"name": "edit_file", "arguments": {"file_path": "a.txt", "old_string": "three", "new_string": "3"}},
            {"name": "write_file", "arguments": {"file_path": "b.txt", "content": "b", "sudo": True}},
        ]
    },
    {"text": "Two is 2 now."},
]
OUTCOMES = [
    ("edit_file", "denied"),  # not read yet
    ("read_file", "committed"),
    ("edit_file", "committed"),
    ("edit_file", "failed"),
    ("write_file", "rejected"),
]


def test_the_agents_sdk_drives_transactions(world: World) -> None:
    import agents
    from openai import AsyncOpenAI

    async def run(url: str) -> Any:
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            agent = agents.Agent(
                name="a",
                instructions="Work.",
                model=agents.OpenAIResponsesModel("m", client),
                tools=list(agents_tools(ToolExecutor(prompt=world.prompt, session=world.session))),
            )
            config = agents.RunConfig(tracing_disabled=True)
            return await agents.Runner.run(agent, "Make two a 2.", run_config=config)

    with ProviderServer(TURNS) as server:
        result = asyncio.run(run(server.openai_url))
    assert result.final_output == "Two is 2 now."
    assert world.outcomes == OUTCOMES
    assert world.files.read("a.txt").content == "one\n2\n"
    first, second = (asked.body for asked in server.asked)
    assert {tool["name"] for tool in first["tools"]} >= {"ls", "read_file", "apply_patch"}
    answers = [item["output"] for item in second["input"] if item.get("type") == "function_call_output"]
    assert "denied by the policy" in answers[0]
    assert "do not fit" in answers[4]


def test_pydantic_ai_drives_transactions(world: World) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    turns: Iterator[Any] = iter(TURNS)
    asked: list[tuple[list[ModelMessage], AgentInfo]] = []

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked.append((list(messages), info))
        turn = next(turns)
        calls = [ToolCallPart(call["name"], call["arguments"]) for call in turn.get("tool_calls", ())]
        return ModelResponse(parts=[*calls, *([TextPart(turn["text"])] if "text" in turn else [])])

    toolset = pydantic_toolset(ToolExecutor(prompt=world.prompt, session=world.session))
    result = asyncio.run(Agent(FunctionModel(model), toolsets=[toolset]).run("Make two a 2."))
    assert result.output == "Two is 2 now."
    assert world.outcomes == OUTCOMES
    assert world.files.read("a.txt").content == "one\n2\n"
    assert {tool.name for tool in asked[0][1].function_tools} >= {"ls", "read_file", "apply_patch"}
    answers = [part.content for part in asked[1][0][-1].parts if isinstance(part, ToolReturnPart)]
    assert "denied by the policy" in str(answers[0])


def test_pydantic_ai_s_own_test_model_calls_every_tool(world: World) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.test import TestModel

    world.go_on.set()
    toolset = pydantic_toolset(ToolExecutor(prompt=world.prompt, session=world.session), toolset_id="files")
    asyncio.run(Agent(TestModel(), toolsets=[toolset]).run("Try everything."))
    assert len(world.outcomes) == 10


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_run_that_is_cancelled_waits_for_the_end_of_its_call(world: World, cancels: int) -> None:
    calls = OrderedCalls(ToolExecutor(prompt=world.prompt, session=world.session))

    async def run() -> None:
        one = asyncio.create_task(calls.run("wait", "{}", None))
        two = asyncio.create_task(calls.run("write_file", {"file_path": "b.txt", "content": "b"}, None))
        await asyncio.to_thread(world.started.wait, 10)
        for _ in range(cancels):
            one.cancel()
            two.cancel()
            await asyncio.sleep(0.02)
        assert not one.done()
        world.go_on.set()
        assert await asyncio.gather(one, two, return_exceptions=True)
        assert one.cancelled()
        assert two.cancelled()

    asyncio.run(run())
    assert world.outcomes == [("wait", "committed")]
    assert not world.files.exists("b.txt")


def test_calls_that_are_asked_for_at_once_run_in_their_order(world: World) -> None:
    calls = OrderedCalls(ToolExecutor(prompt=world.prompt, session=world.session))

    async def run() -> list[str]:
        files = [{"file_path": f"{number}", "content": "x"} for number in range(20)]
        return await asyncio.gather(*(calls.run("write_file", each, None) for each in files))

    answers = asyncio.run(run())
    assert [answer.split()[1] for answer in answers] == [str(number) for number in range(20)]
    params: list[Any] = [receipt.params for receipt in world.session[Receipt].all()]
    assert [each.file_path for each in params] == [str(number) for number in range(20)]


@pytest.mark.parametrize(
    ("module", "call", "needed"),
    [
        ("agents", "agents_tools(executor)", "openai-agents"),
        ("pydantic_ai", "pydantic_toolset(executor)", "pydantic-ai"),
    ],
)
def test_without_the_package_it_says_what_to_install(module: str, call: str, needed: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from ringfence import Prompt, Session, ToolExecutor\n"
        "from ringfence_tools import agents_tools, pydantic_toolset\n"
        "executor = ToolExecutor(prompt=Prompt(ns='n', key='k'), session=Session())\n"
        f"try: {call}\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    extra = needed.removeprefix("openai-")
    assert re.search(rf"ringfence's extra '{extra}' needs: pip install .*\[{extra}\]", done.stdout)


ADAPTERS: list[Callable[..., Any]] = [agents_tools, pydantic_toolset]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_thin(adapter: Callable[..., Any]) -> None:
    module = sys.modules[adapter.__module__]
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as source:
        assert len(source.readlines()) < 150
