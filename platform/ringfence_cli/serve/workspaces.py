"""The workspaces that a server can serve, and the tool sections of each kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ringfence.filesystem.protocol import Filesystem
from ringfence.prompt.policy import Policy, PolicyDecision
from ringfence.prompt.section import Section
from ringfence.prompt.tool import Tool, ToolContext
from ringfence.runtime.session import Session
from ringfence.runtime.tool_result import ToolResult
from ringfence_cli.history import recovery
from ringfence_cli.outputs import left_out_lines
from ringfence_cli.workspace import in_memory, on_disk, start_container
from ringfence_sandbox import HostFilesystem, Workspace, unfinished_calls
from ringfence_tools.history import HistoryToolsSection
from ringfence_tools.run_workspace import Place, ProtectedPathsPolicy, RunWorkspace
from ringfence_tools.sections import VfsToolsSection

Sections = Callable[[Session], Sequence[Section[Any]]]


@dataclass(frozen=True, slots=True)
class ServedWorkspace:
    """The workspace that all clients of a server share."""

    directory: Path
    filesystem: Filesystem
    sections: Sections
    """Makes the tool sections for the session of one client."""
    policies: Sequence[Policy]
    """The policies for every tool. The sections may have more."""
    close: Callable[[], None]
    read_only: bool = False
    notes: Sequence[str] = ()
    """Lines for a person when the server starts."""
    writable: RunWorkspace | None = None
    """The workspace on disk, if clients may change it."""


def open_workspace(
    place: Place, directory: Path, *, read_only: bool, policies: Sequence[Policy] = ()
) -> ServedWorkspace:
    """Open the files, a copy in memory, or a read-only view. ``policies`` are those of the workspace's owner.

    Raises:
        click.ClickException: the workspace cannot be opened.
        SandboxUnavailableError: commands cannot be run.
    """
    if place.workspace == "memory":
        return _open_copy(directory, policies, read_only=read_only)
    if read_only:
        return _open_read_only(directory, without_commands=place.workspace == "podman")
    return _open_writable(place, directory, policies)


def _open_copy(directory: Path, policies: Sequence[Policy], *, read_only: bool) -> ServedWorkspace:
    """Copy the files into memory. No change of a client reaches the disk."""
    workspace = in_memory(directory)
    return ServedWorkspace(
        directory,
        workspace.filesystem,
        lambda session: [workspace.section(session)],
        [ProtectedPathsPolicy(workspace), *([ReadOnlyPolicy()] if read_only else []), *policies],
        workspace.close,
        read_only,
        [*left_out_lines(workspace.left_out), "it is a copy in memory, and ends with the server"],
    )


def _open_writable(place: Place, directory: Path, policies: Sequence[Policy]) -> ServedWorkspace:
    """Open the files on disk, with commands if there is a container. Every call that changes a file is a step."""
    workspace = on_disk(directory)
    if place.workspace == "podman":
        try:
            start_container(workspace, place)
        except BaseException:
            workspace.close()
            raise
    history = workspace.history

    def sections(session: Session) -> Sequence[Section[Any]]:
        steps = HistoryToolsSection(session=session, workspace=lambda: nullcontext(history))
        return [workspace.section(session), steps]

    recovered = [recovery(history.recovered, directory)] if history.recovered is not None else []
    return ServedWorkspace(
        directory,
        workspace.filesystem,
        sections,
        [ProtectedPathsPolicy(workspace), *policies],
        workspace.close,
        notes=[*recovered, *left_out_lines(workspace.left_out)],
        writable=workspace,
    )


def _open_read_only(directory: Path, *, without_commands: bool) -> ServedWorkspace:
    """View the files on disk without a lock. An agent may change them meanwhile."""
    directory = Path(os.path.abspath(directory))  # a tool may change the working directory
    filesystem = HostFilesystem(directory, read_only=True)

    def sections(session: Session) -> Sequence[Section[Any]]:
        # Opened for each call, because an agent may add steps meanwhile.
        history = partial(Workspace.open, directory, read_only=True)
        return [
            VfsToolsSection(session=session, filesystem=filesystem, mount_point=filesystem.root),
            HistoryToolsSection(session=session, workspace=history, read_only=True),
        ]

    notes = [f"ringfence: {call}" for call in unfinished_calls(directory) if not call.is_running]
    if without_commands:
        notes.append("it is read-only: shell_execute and evaluate_python, which change things, are left out")
    return ServedWorkspace(
        directory, filesystem, sections, [ReadOnlyPolicy()], filesystem.close, read_only=True, notes=notes
    )


class ReadOnlyPolicy:
    """Deny every tool that changes something."""

    name = "read_only"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.read_only:
            return PolicyDecision.allow()
        return PolicyDecision.deny(f"this server was started read-only, and {tool.name} changes things")

    def on_result(self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext) -> None:
        """Keep no state."""
