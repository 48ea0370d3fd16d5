"""Open what a run is made of: model, workspace, policies and sections."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass

import click

from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.provider import SdkAdapter
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.limits import Cancellation
from ringfence.policies.approval import Ask
from ringfence.runtime.policy import Policy
from ringfence.secrets import masked_logs
from ringfence_sandbox import describe_replaced_root
from ringfence_tools.printable import printable
from ringfence_tools.runs.agent_run import AgentTask, MakeSection, SessionObserver
from ringfence_tools.runs.asking import approval_of, nobody
from ringfence_tools.runs.hiding import hidden_as_before
from ringfence_tools.runs.model_specs import model_of
from ringfence_tools.runs.opened_workspace import (
    check_commands_here,
    in_memory,
    on_disk,
    recovered_before_copy,
    start_container,
)
from ringfence_tools.runs.own_code import sections_of
from ringfence_tools.runs.owner_policies import policies_of
from ringfence_tools.runs.policy_specs import parse_specs
from ringfence_tools.runs.reserved_stdout import reserve_stdout
from ringfence_tools.runs.run_limits import RunLimits
from ringfence_tools.runs.run_spec import RunSpec
from ringfence_tools.runs.run_workspace import RunWorkspace


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """The opened parts of a run."""

    limits: RunLimits
    """The limits in force. A resume merges those of the run with those that are given."""
    workspace: RunWorkspace
    policies: tuple[Policy, ...]
    sections: tuple[MakeSection, ...]
    adapter: LoopAdapter | None
    """None if the spec has no model."""

    def task(self, text: str, telemetry: SessionObserver | None = None) -> AgentTask:
        """Return a task for `run_agent`. The spec has a model."""
        assert self.adapter is not None
        limits, workspace = self.limits, self.workspace
        return AgentTask(
            text,
            workspace,
            self.adapter,
            limits.seconds,
            limits.tokens,
            limits.cost_usd,
            self.policies,
            self.sections,
            telemetry,
        )


@contextmanager
def open_run(
    spec: RunSpec,
    say: Callable[[str], None],
    *,
    quiet: bool = False,
    ask: Ask = nobody,
    resumed: Callable[[RunLimits], RunLimits] | None = None,
    cancellation: Cancellation | None = None,
    while_starting: AbstractContextManager[object] = nullcontext(),  # noqa: B008  # has no state
) -> Generator[OpenedRun]:
    """Open a run and close it at the end. ``say`` gets lines for a person; with ``quiet``, only the important ones.

    ``ask`` answers the questions of the limits. ``resumed`` returns the limits in force for those that are given. It is
    called once a workspace on disk is open, when no other process can begin or end a run there. ``while_starting`` is
    entered while the container starts.

    Raises:
        SpecError: a SPEC of a model, a policy or a section cannot be used.
        CallCancelledError: ``cancellation`` was cancelled while the tree was recorded.
        click.ClickException: the workspace or a part of the spec cannot be used.
        SandboxUnavailableError: commands cannot be run.
    """
    directory, limits = spec.directory, spec.limits

    def ignored() -> IgnoredPaths:
        return workspace.ignored

    with ExitStack() as stack:
        adapter = model_of(spec.model, directory, stack, spec.seed) if spec.model else None
        policies, hide = resolve_rules(spec, say, ask, ignored, quiet=quiet)
        if spec.is_copy:
            for line in recovered_before_copy(directory, quiet=quiet) if spec.store is None else ():
                say(line)
            workspace: RunWorkspace = in_memory(directory, hide, spec.store)
        else:
            opened = on_disk(
                directory,
                hide=hide,
                store=spec.store,
                quiet=quiet,
                cancellation=cancellation,
                detect=spec.detect,
            )
            workspace = disk = stack.enter_context(closing(opened))
            if resumed is not None:
                limits = resumed(limits)
                policies = _policies_of(spec, limits, ask, ignored)
            if limits.place.workspace == "podman":
                with while_starting:
                    start_container(disk, limits.place, project=spec.project, quiet=quiet)
            else:
                check_commands_here(disk)
        workspace.with_ignored, workspace.allows_git = spec.with_ignored, spec.allow_git
        stack.enter_context(masked_logs(workspace.secrets))
        with reserve_stdout(limits.sections):
            sections = sections_of(limits.sections, directory)
        if adapter is not None:
            check_cost(adapter, limits)
            adapter.max_turns, adapter.max_repeats = limits.turns or MAX_TURNS, limits.repeats
        yield OpenedRun(limits, workspace, policies, sections, adapter)


def check_cost(adapter: LoopAdapter, limits: RunLimits) -> None:
    """Raise click.UsageError if the cost is limited, and the cost of the model's turns is unknown."""
    if limits.cost_usd is not None and isinstance(adapter, SdkAdapter) and (why := adapter.why_no_cost()) is not None:
        raise click.UsageError(f"--max-cost can limit nothing: {why}. --max-tokens limits any model that counts tokens")


def resolve_rules(
    spec: RunSpec,
    say: Callable[[str], None],
    ask: Ask = nobody,
    ignored: Callable[[], IgnoredPaths] | None = None,
    *,
    quiet: bool = False,
) -> tuple[tuple[Policy, ...], HiddenFiles | None]:
    """Return the policies of a spec, and the rule by which files are hidden. Nothing is opened.

    Raises:
        click.ClickException, SpecError: the policies or the questions cannot be used.
        StateDirectoryError: the state directory is unknown.
    """
    directory = spec.directory
    if spec.store is not None:
        return _policies_of(spec, spec.limits, ask, ignored), spec.hide
    if (replaced := describe_replaced_root(directory, copied=spec.is_copy)) is not None:
        say(f"ringfence: {printable(replaced)}")
    policies = _policies_of(spec, spec.limits, ask, ignored)
    return policies, hidden_as_before(directory, spec.hide, say, quiet=quiet)


def _policies_of(
    spec: RunSpec, limits: RunLimits, ask: Ask, ignored: Callable[[], IgnoredPaths] | None
) -> tuple[Policy, ...]:
    directory, specs = spec.directory, limits.policies
    policies = policies_of(directory, specs) if spec.store is None else parse_specs(specs, directory)
    if not limits.asks:
        return policies
    apart = None if spec.with_ignored else ignored
    return (*policies, approval_of(limits.asks, limits.ask_seconds, ask, directory, apart))
