"""A whole tool call in memory: two policies, a receipt, an observer; in a fresh session and in long ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import process_time
from typing import Protocol

import peer
from measure import Row, Side, alternated, flat, less, report
from peer import FileText, ReadParams, WriteParams, Written

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem, InMemoryFilesystem
from ringfence.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.runtime import Session, ToolInvoked

AREA = "tool call"
FILES = {f"{name}.txt": f"the file {name}\n" for name in "abcdefghij"}
READ = ("read_file", json.dumps({"file_path": "a.txt"}))
WRITES = tuple(("write_file", json.dumps({"file_path": "a.txt", "content": f"{n}\n"})) for n in range(10))
CALLS = {"read_file": (READ,) * 10, "write_file": WRITES}


def read_file(params: ReadParams, *, context: ToolContext) -> ToolResult[FileText]:
    assert context.filesystem is not None
    return ToolResult.ok(FileText(params.file_path, context.filesystem.read(params.file_path).content), "read")


def write_file(params: WriteParams, *, context: ToolContext) -> ToolResult[Written]:
    assert context.filesystem is not None
    context.filesystem.write(params.file_path, params.content)
    return ToolResult.ok(Written(params.file_path), "written")


class Agent:
    """As `peer.Agent`."""

    def __init__(self, files: dict[str, str]) -> None:
        tools = [
            Tool[ReadParams, FileText](name="read_file", description="Reads.", handler=read_file),
            Tool[WriteParams, Written](name="write_file", description="Writes.", handler=write_file),
        ]
        policies = [ReadBeforeWritePolicy(), SequentialDependencyPolicy({"write_file": {"read_file"}})]
        section = MarkdownSection(title="Files", key="files", template="Files.", tools=tools, policies=policies)
        filesystem = InMemoryFilesystem()
        for path, content in files.items():
            filesystem.load(path, content.encode())
        prompt = Prompt(PromptTemplate(ns="bench", key="call", sections=[section]))
        prompt = prompt.bind(resources={Filesystem: filesystem})
        session = Session()
        session.dispatcher.subscribe(ToolInvoked, lambda event: None)
        self._open = ExitStack()
        self._open.enter_context(prompt.resources)
        self._executor = ToolExecutor(prompt=prompt, session=session)
        self.call(*READ)

    def call(self, name: str, arguments: str) -> None:
        result = self._executor.call(name, arguments, call_id="call")  # which comes with a request, here as there
        assert result.success, result.message

    def age(self, calls: int) -> None:
        for n in range(calls):
            self.call(*WRITES[n % len(WRITES)])

    def close(self) -> None:
        self._open.close()


class AnyAgent(Protocol):
    def call(self, name: str, arguments: str) -> None: ...
    def age(self, calls: int) -> None: ...
    def close(self) -> None: ...


def timed(agent: AnyAgent, calls: tuple[tuple[str, str], ...]) -> float:
    started = process_time()
    for name, arguments in calls:
        agent.call(name, arguments)
    return (process_time() - started) / len(calls)


def in_fresh_sessions(make: Callable[[dict[str, str]], AnyAgent], tool: str, *, after: int = 0) -> Side:
    """Ten calls in each of so many new sessions."""

    def side(number: int) -> float:
        took: list[float] = []
        for _ in range(number):
            agent = make(FILES)
            agent.age(after)
            took.append(timed(agent, CALLS[tool]))
            agent.close()
        return sum(took) / number

    return side


def in_one_session(agent: AnyAgent, tool: str) -> Side:
    def side(number: int) -> float:
        return sum(timed(agent, CALLS[tool]) for _ in range(number)) / number

    return side


def aged(make: Callable[[dict[str, str]], AnyAgent], calls: int) -> AnyAgent:
    agent = make(FILES)
    agent.age(calls)
    return agent


def beside_the_peer() -> Iterator[Row]:
    for tool in CALLS:
        ours, theirs = in_fresh_sessions(Agent, tool), in_fresh_sessions(peer.Agent, tool)
        checked = alternated(ours, theirs, seconds=3)
        yield less(AREA, f"{tool}, fresh session", peer.NAME, checked, at_least=40, at_most_us=25)
        suspended = alternated(ours, peer.without_contracts(theirs), seconds=3)
        yield less(AREA, f"{tool}, fresh session", peer.SUSPENDED, suspended, at_least=15, at_most_us=25)
    for calls in (1_000, 10_000):
        ours = in_one_session(aged(Agent, calls), "write_file")
        theirs = in_one_session(aged(peer.Agent, calls), "write_file")
        yield less(AREA, f"write_file after {calls:,} calls", peer.NAME, alternated(ours, theirs))


def rows() -> Iterator[Row]:
    if peer.installed():
        yield from beside_the_peer()
    spreads = alternated(
        in_one_session(aged(Agent, 10_000), "write_file"), in_fresh_sessions(Agent, "write_file", after=10), seconds=3
    )
    yield flat(AREA, "write_file after 10,000 calls", "after 10", spreads)


if __name__ == "__main__":
    report(rows())
