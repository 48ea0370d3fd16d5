"""What a server serves: the one place where a kind of workspace becomes sections of tools."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.policy import Policy, PolicyDecision
from ringfence.prompt.section import Section
from ringfence.prompt.tool import Tool, ToolContext
from ringfence.runtime.session import Session
from ringfence.runtime.tool_result import ToolResult
from ringfence_cli.disk import DiskWorkspace, on_disk
from ringfence_cli.history import recovery
from ringfence_cli.report import left_out
from ringfence_cli.run import loaded, start_container
from ringfence_cli.terms import Place
from ringfence_cli.workspace import LeftOutPolicy, MemoryWorkspace
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_sandbox.calls.half_done import killed_in
from ringfence_tools.files import VfsToolsSection
from ringfence_tools.history import HistoryToolsSection

History = Callable[[], AbstractContextManager[Workspace]]


class ServedWorkspace(Protocol):
    """One workspace, which all clients of a server share."""

    directory: Path
    read_only: bool
    policies: Sequence[Policy]
    """For every tool, besides those of the sections."""

    @property
    def filesystem(self) -> Filesystem: ...

    def sections(self, session: Session) -> Sequence[Section[Any]]:
        """The tools, for the session of one client."""
        ...

    def notes(self) -> Iterator[str]:
        """What a person should know when the server starts."""
        ...

    def close(self) -> None: ...


def open_workspace(
    place: Place, directory: Path, *, read_only: bool, policies: Sequence[Policy] = ()
) -> ServedWorkspace:
    """``policies`` are those of the workspace's owner.

    Raises:
        click.ClickException: in words for a person.
        SandboxUnavailableError: commands cannot be run.
    """
    if place.workspace == "memory":
        return MemoryServed(loaded(directory), policies, read_only=read_only)
    if read_only:
        return ReadOnlyWorkspace(directory, without_commands=place.workspace == "podman")
    workspace = on_disk(directory)
    if place.workspace == "podman":
        try:
            start_container(workspace, place)
        except BaseException:
            workspace.close()
            raise
    return WritableWorkspace(workspace, policies)


class ReadOnlyPolicy:
    """Only tools that change nothing run."""

    name = "read_only"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.read_only:
            return PolicyDecision.allow()
        return PolicyDecision.deny(f"this server was started read-only, and {tool.name} changes things")

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        """It remembers nothing."""


class MemoryServed:
    """A copy in memory: what clients do to it, nothing on disk hears of."""

    def __init__(self, workspace: MemoryWorkspace, owned: Sequence[Policy] = (), *, read_only: bool) -> None:
        self.directory = workspace.directory
        self.read_only = read_only
        looking = [ReadOnlyPolicy()] if read_only else []
        self.policies: Sequence[Policy] = [LeftOutPolicy(workspace), *looking, *owned]
        self._workspace = workspace

    @property
    def filesystem(self) -> Filesystem:
        return self._workspace.filesystem

    def sections(self, session: Session) -> Sequence[Section[Any]]:
        return [_files(session, self.filesystem, self._workspace.mount_point)]

    def notes(self) -> Iterator[str]:
        yield from left_out(self._workspace.left_out)
        yield "it is a copy in memory, and ends with the server"

    def close(self) -> None:
        """What is in memory goes by itself."""


class WritableWorkspace:
    """The files as they are, and with a container over them commands. Every call that changes any file is a step, and
    can be undone."""

    def __init__(self, workspace: DiskWorkspace, owned: Sequence[Policy] = ()) -> None:
        self.directory = workspace.directory
        self.read_only = False
        self.policies: Sequence[Policy] = [LeftOutPolicy(workspace), *owned]
        self.workspace = workspace

    @property
    def filesystem(self) -> Filesystem:
        return self.workspace.filesystem

    def sections(self, session: Session) -> Sequence[Section[Any]]:
        opened = self.workspace.history
        history = HistoryToolsSection(session=session, workspace=lambda: nullcontext(opened))
        return [self.workspace.section(session), history]

    def notes(self) -> Iterator[str]:
        if (recovered := self.workspace.history.recovered) is not None:
            yield recovery(recovered, self.directory)
        yield from left_out(self.workspace.left_out)

    def close(self) -> None:
        self.workspace.close()


class ReadOnlyWorkspace:
    """The files as they are, to look at: not locked, so that an agent may work there meanwhile."""

    def __init__(self, directory: Path, *, without_commands: bool = False) -> None:
        self.directory = Path(os.path.abspath(directory))  # also when a tool goes to another working directory
        self.read_only = True
        self._without_commands = without_commands
        self.filesystem: Filesystem = HostFilesystem(directory, read_only=True)
        self.policies: Sequence[Policy] = [ReadOnlyPolicy()]

    def sections(self, session: Session) -> Sequence[Section[Any]]:
        # Opened anew for every call: an agent that works there makes steps.
        history: History = partial(Workspace.open, self.directory, read_only=True)
        return [
            _files(session, self.filesystem, self.filesystem.root),
            HistoryToolsSection(session=session, workspace=history, read_only=True),
        ]

    def notes(self) -> Iterator[str]:
        if (killed := killed_in(str(self.directory))) is not None:
            yield f"ringfence: {killed}"
        if self._without_commands:
            yield "it is read-only: shell_execute and evaluate_python, which change things, are left out"

    def close(self) -> None:
        assert isinstance(self.filesystem, HostFilesystem)
        self.filesystem.close()


def _files(session: Session, filesystem: Filesystem, mount_point: str) -> VfsToolsSection:
    return VfsToolsSection(session=session, filesystem=filesystem, mount_point=mount_point)
