"""The workspaces that a server can serve, and the tool sections of each kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ringfence.filesystem.memory import InMemoryFilesystem
from ringfence.filesystem.protocol import Filesystem
from ringfence.limits import Cancellation
from ringfence.policies.approval import Ask
from ringfence.prompt.section import Section
from ringfence.runtime.context import ToolContext
from ringfence.runtime.policy import BasePolicy, Policy, PolicyDecision
from ringfence.runtime.tool import Tool
from ringfence.secrets import Secrets, masked_logs
from ringfence.session.session import Session
from ringfence_sandbox import HostFilesystem, Workspace, unfinished_calls
from ringfence_tools.contents import LeftOut
from ringfence_tools.history import HistoryToolsSection
from ringfence_tools.runs.agent_run import MakeSection
from ringfence_tools.runs.asking import nobody
from ringfence_tools.runs.open_run import OpenedRun, open_run, resolve_rules
from ringfence_tools.runs.outputs import left_out_lines
from ringfence_tools.runs.own_code import sections_of
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.recovered_call import describe_recovery
from ringfence_tools.runs.reserved_stdout import reserve_stdout
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.run_workspace import HIDDEN, RunWorkspace, own_policies
from ringfence_tools.runs.unused_patterns import unused_patterns
from ringfence_tools.sections import VfsToolsSection


@dataclass(frozen=True, slots=True)
class ServedWorkspace:
    """The workspace that all clients of a server share."""

    directory: Path
    filesystem: Filesystem
    sections: Callable[[Session, bool], Iterable[Section[Any]]]
    """Makes the tool sections for a session, and for whether clients share it that cannot be told apart."""
    policies: Sequence[Policy]
    """The policies for every tool. The sections may have more."""
    close: Callable[[], None]
    read_only: bool = False
    notes: Sequence[str] = ()
    """Lines for a person when the server starts."""
    opened: RunWorkspace | None = None
    """The workspace behind it, unless this is a view of the files on disk."""
    secrets: Secrets = field(default_factory=Secrets)
    """What is masked in all that clients get."""
    recovered: str = ""
    """What opening did about a crash, for the first answer."""
    own_sections: Sequence[MakeSection] = ()
    """The sections of the owner's own among them."""


def open_workspace(
    spec: RunSpec,
    say: Callable[[str], None] = lambda line: None,
    *,
    read_only: bool = False,
    ask: Ask = nobody,
    cancellation: Cancellation | None = None,
) -> ServedWorkspace:
    """Open the files on disk, a copy of them in memory, or a read-only view. The arguments are as for `open_run`.

    Raises:
        CallCancelledError: ``cancellation`` was cancelled while the tree was recorded.
        SpecError: a SPEC of a policy or a section cannot be used.
        click.ClickException: the workspace or a part of the spec cannot be used.
        SandboxUnavailableError: commands cannot be run.
    """
    if read_only and not spec.is_copy:
        return _open_view(spec, say)
    with ExitStack() as stack:
        run = stack.enter_context(open_run(spec, say, ask=ask, cancellation=cancellation))
        return _served(run, spec, stack.pop_all().close, read_only=read_only)


def _served(run: OpenedRun, spec: RunSpec, close: Callable[[], None], *, read_only: bool) -> ServedWorkspace:
    directory, place, workspace = spec.directory, spec.place, run.workspace
    notes, recovered = [*left_out_lines(workspace.left_out), *place.unmasked()], ""
    history = workspace.history
    if history is None:
        notes.append("it is a copy in memory, and ends with the server")
    elif history.recovered is not None:
        recovered = describe_recovery(history.recovered, directory)
        notes.insert(0, recovered)
    notes += unused_patterns(run.policies, spec.hide, directory)

    def sections(session: Session, shared: bool) -> Iterable[Section[Any]]:
        yield workspace.section(session, shared_session=shared)
        if history is not None:
            opened = partial(nullcontext, history)
            yield HistoryToolsSection(session=session, workspace=opened, shared_session=shared)
        yield from (make(session) for make in run.sections)

    policies = [*own_policies(workspace), *([ReadOnlyPolicy()] if read_only else []), *run.policies]
    return ServedWorkspace(
        directory,
        workspace.filesystem,
        sections,
        policies,
        close,
        read_only,
        notes,
        workspace,
        workspace.secrets,
        recovered,
        run.sections,
    )


def preview_workspace(
    place: Place, directory: Path, *, read_only: bool, extra_sections: Sequence[MakeSection] = ()
) -> ServedWorkspace:
    """Make a workspace that has the tools of an open one, and no files.

    Raises:
        OSError: with commands, the directory cannot be read.
    """
    filesystem = InMemoryFilesystem()

    def sections(session: Session, shared: bool) -> Iterable[Section[Any]]:
        expects = shared and (place.workspace == "memory" or not read_only)  # as an open workspace does
        if place.workspace == "podman" and not read_only:
            from ringfence_sandbox import PodmanSandbox
            from ringfence_tools.shell import PodmanSandboxSection

            view = HostFilesystem(directory, read_only=True)
            sandbox = PodmanSandbox(directory, filesystem=view)
            yield PodmanSandboxSection(session=session, sandbox=sandbox, shared_session=shared)
        else:
            yield VfsToolsSection(session=session, filesystem=filesystem, shared_session=expects)
        if place.workspace != "memory":
            history = partial(Workspace.open, directory, read_only=True)
            yield HistoryToolsSection(session=session, workspace=history, read_only=read_only, shared_session=expects)
        yield from (make(session) for make in extra_sections)

    return ServedWorkspace(directory, filesystem, sections, (), lambda: None, read_only)


def _open_view(spec: RunSpec, say: Callable[[str], None]) -> ServedWorkspace:
    """View the files on disk without a lock. An agent may change them meanwhile."""
    policies, hide = resolve_rules(spec, say)
    with reserve_stdout(spec.limits.sections):
        own_sections = sections_of(spec.limits.sections, spec.directory)
    place, directory = spec.place, Path(os.path.abspath(spec.directory))  # a tool may change the working directory
    filesystem = HostFilesystem(directory, read_only=True, hide=hide)

    def sections(session: Session, shared: bool) -> Iterable[Section[Any]]:
        yield VfsToolsSection(session=session, filesystem=filesystem, mount_point=filesystem.root)
        # Opened for each call, because an agent may add steps meanwhile.
        history = partial(Workspace.open, directory, read_only=True)
        yield HistoryToolsSection(session=session, workspace=history, read_only=True)
        yield from (make(session) for make in own_sections)

    notes = [f"ringfence: {call}" for call in unfinished_calls(directory) if not call.is_running]
    notes += left_out_lines([LeftOut(path, HIDDEN) for path in filesystem.hidden_paths])
    if place.workspace == "podman":
        notes.append("it is read-only: shell_execute and evaluate_python, which change things, are left out")
    notes += unused_patterns(policies, spec.hide, directory)
    secrets = Secrets(place.secret_values())
    secrets.add_hidden(filesystem)
    stack = ExitStack()
    stack.callback(filesystem.close)
    stack.enter_context(masked_logs(secrets))
    return ServedWorkspace(
        directory,
        filesystem,
        sections,
        [ReadOnlyPolicy()],
        stack.close,
        True,
        notes,
        secrets=secrets,
        own_sections=own_sections,
    )


class ReadOnlyPolicy(BasePolicy):
    """Deny every tool that changes something."""

    name = "read_only"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.read_only:
            return PolicyDecision.allow()
        return PolicyDecision.deny(f"this server was started read-only, and {tool.name} changes things")
