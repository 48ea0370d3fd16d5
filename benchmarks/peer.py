"""The peer, weakincentives, in the role of the baseline: a tool call the way its own adapters make it."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

NAME = "weakincentives"
SUSPENDED = f"{NAME}, contracts off"
VERSION = "0.23.0"
SANDLOCK = "sandlock"
SANDLOCK_VERSION = "0.9.0"


def installed() -> bool:
    """Whether this process can be its own baseline; else the rows beside the peer are left out."""
    return importlib.util.find_spec(NAME) is not None


def sandlock_installed() -> bool:
    return importlib.util.find_spec(SANDLOCK) is not None


def sandlocked(root: str, command: str) -> bool:
    """Runs a command that is kept where it ends with 0, and else taken back. Whether it was kept."""
    from sandlock import Sandbox

    sandbox = Sandbox(workdir=root, cwd=root, fs_readable=["/"], fs_writable=[root])
    return bool(sandbox.run(["sh", "-c", command]).success)


@dataclass(frozen=True)
class ReadParams:
    file_path: str


@dataclass(frozen=True)
class WriteParams:
    file_path: str
    content: str


@dataclass(frozen=True)
class FileText:
    path: str
    content: str

    def render(self) -> str:
        return self.content


@dataclass(frozen=True)
class Written:
    path: str

    def render(self) -> str:
        return self.path


class DictFiles:
    """The published package has no filesystem in memory. This one costs next to nothing, which favours the peer."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def exists(self, path: str) -> bool:
        return path in self.files

    def read(self, path: str) -> str:
        return self.files[path]

    def write(self, path: str, content: str) -> None:
        self.files[path] = content

    def snapshot(self, *, tag: str | None = None) -> dict[str, str]:
        return dict(self.files)

    def restore(self, snapshot: dict[str, str]) -> None:
        self.files = dict(snapshot)


def read_file(params: ReadParams, *, context: Any) -> Any:
    from weakincentives.prompt import ToolResult

    return ToolResult.ok(FileText(params.file_path, context.filesystem.read(params.file_path)), message="read")


def write_file(params: WriteParams, *, context: Any) -> Any:
    from weakincentives.prompt import ToolResult

    context.filesystem.write(params.file_path, params.content)
    return ToolResult.ok(Written(params.file_path), message="written")


class Agent:
    """A session in which "a.txt" has been read, and an executor for its tools, under two policies and an observer."""

    def __init__(self, files: dict[str, str]) -> None:
        from weakincentives.adapters._tool_messages import serialize_tool_message
        from weakincentives.adapters.tool_executor import ToolExecutor
        from weakincentives.adapters.utilities import format_dispatch_failures, parse_tool_arguments
        from weakincentives.filesystem import Filesystem
        from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, Tool
        from weakincentives.prompt.policy import ReadBeforeWritePolicy, SequentialDependencyPolicy
        from weakincentives.runtime.events import ToolInvoked
        from weakincentives.runtime.session import Session

        tools = [
            Tool[ReadParams, FileText](name="read_file", description="Reads.", handler=read_file),
            Tool[WriteParams, Written](name="write_file", description="Writes.", handler=write_file),
        ]
        policies = [ReadBeforeWritePolicy(), SequentialDependencyPolicy({"write_file": frozenset({"read_file"})})]
        section = MarkdownSection(title="Files", key="files", template="Files.", tools=tools, policies=policies)
        template: PromptTemplate[object] = PromptTemplate(ns="bench", key="call", sections=[section])
        prompt = Prompt(template).bind(resources={Filesystem: DictFiles(dict(files))})
        self.session = Session()
        self.session.dispatcher.subscribe(ToolInvoked, lambda event: None)
        self._open = contextlib.ExitStack()
        self._open.enter_context(prompt.resources)
        rendered = prompt.render(session=self.session)
        self._executor = ToolExecutor(
            adapter_name="bench",
            adapter=None,
            prompt=prompt,
            prompt_name="call",
            rendered=rendered,
            session=self.session,
            tool_registry={tool.name: tool for tool in rendered.tools},
            serialize_tool_message_fn=serialize_tool_message,
            format_dispatch_failures=format_dispatch_failures,
            parse_arguments=parse_tool_arguments,
        )
        self.call("read_file", '{"file_path": "a.txt"}')

    def call(self, name: str, arguments: str) -> None:
        request = SimpleNamespace(id="call", function=SimpleNamespace(name=name, arguments=arguments))
        self._executor.execute([request], None)

    def age(self, calls: int) -> None:
        """What that many calls leave in the session. To make them would take the peer from minutes to hours."""
        from weakincentives.runtime.events import ToolInvoked

        self.call("write_file", '{"file_path": "a.txt", "content": "aged"}')
        event = self.session[ToolInvoked].latest()
        self.session[ToolInvoked].seed([event] * calls)
        self.session[Written].seed([Written("a.txt") for _ in range(calls)])

    def close(self) -> None:
        self._open.close()


def without_contracts(side: Callable[[int], float]) -> Callable[[int], float]:
    def suspended(number: int) -> float:
        from weakincentives.dbc import dbc_suspended

        with dbc_suspended():
            return side(number)

    return suspended


def on_disk(root: object, store: object) -> Any:
    """Its filesystem on disk, which commits all of the tree with git before each call."""
    from weakincentives.filesystem import HostFilesystem

    return HostFilesystem(_root=str(root), _git_dir=str(store))
