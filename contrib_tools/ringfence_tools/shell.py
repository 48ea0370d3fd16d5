"""The section with file tools and a shell. Commands run in a container over the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal, Self

from ringfence.errors import (
    PromptValidationError,
    SandboxUnavailableError,
    SectionPath,
    SectionVisibility,
    ToolValidationError,
)
from ringfence.escapes import escape_path
from ringfence.filesystem.paths import resolve_model_path
from ringfence.filesystem.protocol import Filesystem
from ringfence.participants import Change
from ringfence.policies.read_before_write import ReadBeforeWritePolicy
from ringfence.prompt.section import Section
from ringfence.receipts import HostTraffic
from ringfence.resources import Binding, ResourceRegistry
from ringfence.runtime.context import ToolContext
from ringfence.runtime.policy import ToolPolicy
from ringfence.runtime.tool import Tool
from ringfence.session.events import ToolOutput
from ringfence.session.session import Session
from ringfence.session.tool_result import ToolResult
from ringfence_sandbox import CommandResult, Network, PodmanSandbox, SandboxLimits, ShellEnvironment, allowed_hosts
from ringfence_tools.handlers import check_length
from ringfence_tools.sections import CHANGING, FAILING, FINDING, READING_FIRST, governed_tools

MOUNT_POINT = PodmanSandbox.mount_point
SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 1200.0
"""Between them every time limit is put, where a section has no other one for the longest."""
COMMAND_SECONDS = 120.0
PYTHON_SECONDS = 5.0
MAX_VARIABLES, MAX_NAME_CHARACTERS, MAX_VALUE_CHARACTERS = 64, 80, 512
MAX_CHANGES = 100
MAX_REFUSED = 5
"""The most refused hosts on the line of a command."""
"""The most changed paths in one answer. The others are counted."""

_SECONDS = f"At least {SHORTEST_SECONDS:g}, at most what is allowed here."


@dataclass(frozen=True, slots=True)
class ShellExecute:
    command: str | None = field(default=None, metadata={"description": "Text for the shell. Give this or argv."})
    argv: tuple[str, ...] = field(default=(), metadata={"description": "Program and arguments, without a shell."})
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    stdin: str | None = None
    timeout_seconds: float = field(default=COMMAND_SECONDS, metadata={"description": _SECONDS})
    rollback_on_error: bool = field(
        default=False, metadata={"description": "Take back its changes if its exit code is not 0."}
    )

    def __post_init__(self) -> None:
        if (self.command is None) == (not self.argv):
            raise ToolValidationError("give either command, a text for the shell, or argv, a program and its arguments")
        words = self.argv if self.command is None else (self.command,)
        if not words[0].strip():
            raise ToolValidationError("the command is empty")
        check_length("the command", sum(map(len, words)), "write a script with write_file and run that")
        check_length("stdin", len(self.stdin or ""), "write a file and redirect it")
        if any("\0" in word for word in (*words, *self.env, *self.env.values())):
            raise ToolValidationError("a command and its environment have no zero characters")
        _check_variables(self.env)


@dataclass(frozen=True, slots=True)
class EvaluatePython:
    code: str = field(metadata={"description": "What it prints is the answer."})
    timeout_seconds: float = field(default=PYTHON_SECONDS, metadata={"description": _SECONDS})

    def __post_init__(self) -> None:
        if not self.code.strip():
            raise ToolValidationError("code is empty")
        check_length("code", len(self.code), "write it with write_file and run that with shell_execute")
        if any(character < " " and character not in "\n\t" for character in self.code):
            raise ToolValidationError("code has control characters other than newlines and tabs")


def _check_variables(env: Mapping[str, str]) -> None:
    if len(env) > MAX_VARIABLES:
        raise ToolValidationError(f"env has {len(env):,} variables, one call takes {MAX_VARIABLES}")
    for name, value in env.items():
        if not name or "=" in name or len(name) > MAX_NAME_CHARACTERS:
            raise ToolValidationError(
                f"env: {name[:100]!r} is no name of a variable: 1 to {MAX_NAME_CHARACTERS} characters, none of them '='"
            )
        if len(value) > MAX_VALUE_CHARACTERS:
            raise ToolValidationError(
                f"env: the value of {name} has {len(value):,} characters, one call takes {MAX_VALUE_CHARACTERS}: set "
                "it in the command"
            )


@dataclass(frozen=True, slots=True)
class ChangedPath:
    path: str
    """As `ringfence.escapes.escape_path` has it; empty for the root."""
    kind: Literal["created", "modified", "deleted"]


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The result of a command. ``stdout`` and ``stderr`` are bounded. A cut text says how to read the rest."""

    exit_code: int
    """124 after a timeout; 128 + N where signal N ended it."""
    stdout: str
    stderr: str
    timed_out: bool = False
    duration_seconds: float = 0.0
    out_of_memory: bool = False
    """Whether the out-of-memory killer ended any of the command's processes."""
    leftovers: int = 0
    """About how many processes the command left running. They were ended."""
    changed: tuple[ChangedPath, ...] = ()
    """The first changed paths; ``changes_left_out`` counts the others. Empty if the command was rolled back."""
    changes_left_out: int = 0
    began_in: str = ""
    """The requested directory, or the one in which the command before ended. Empty or ".": the root."""
    network: tuple[HostTraffic, ...] = ()
    """The hosts that it connected to or wanted to, where hosts are allowed by name."""
    kept_variables: tuple[str, ...] = ()
    """The variables that it began with since earlier commands had exported, changed or unset them."""

    @property
    def changed_paths(self) -> tuple[str, ...]:
        return tuple(change.path for change in self.changed)

    def with_changes(self, changes: Sequence[Change]) -> Self:
        listed = tuple(ChangedPath(escape_path(change.path), change.kind) for change in changes[:MAX_CHANGES])
        return replace(self, changed=listed, changes_left_out=len(changes) - len(listed))

    def render(self) -> str:
        parts = [f"{name}:\n{text}" for name, text in (("stdout", self.stdout), ("stderr", self.stderr)) if text]
        lines = [f"{change.kind} {change.path or 'the root'}" for change in self.changed]
        if self.changes_left_out:
            lines.append(f"[and {self.changes_left_out:,} more]")
        if lines:
            parts.append("\n".join(("changed:", *lines)))
        return "\n".join(part.rstrip("\n") for part in parts) or "it printed nothing"

    def summary(self) -> str:
        """Return exit code, time and other facts besides the output on one line."""
        facts = [f"exit code {self.exit_code} after {self.duration_seconds:.1f} s"]
        if self.out_of_memory:
            facts.append("out of memory: a process of it was killed")
        if self.network:
            connections, sent, received = (
                sum(getattr(host, name) for host in self.network) for name in ("connections", "sent", "received")
            )
            plural = "s" * (connections != 1)
            facts.append(f"network: {connections} connection{plural}, {sent:,} bytes sent, {received:,} received")
            if refused := [host.place for host in self.network if host.refused]:
                more = f" and {len(refused) - MAX_REFUSED} more" if len(refused) > MAX_REFUSED else ""
                facts.append(f"refused: {', '.join(refused[:MAX_REFUSED])}{more}")
        if self.leftovers:
            left = "a process" if self.leftovers == 1 else f"{self.leftovers} processes"
            facts.append(f"{left} that it left running had to be ended")
        return "; ".join(facts)


ENVIRONMENT: Mapping[str, str] = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "diff.autoRefreshIndex",
    "GIT_CONFIG_VALUE_0": "false",
    "PYTHONPYCACHEPREFIX": "/tmp/pycache",  # noqa: S108 - the container's own
}
"""Of every command, unless it is given another value. Without it, what `git status` and `git diff` note down for
themselves and what Python compiles would be changes of the workspace."""

INTRODUCTION = (
    f"You work on a tree of files and run commands in a container that has the same tree at {MOUNT_POINT}, where they "
    "begin. Paths are relative to it, or begin with it."
)
RUNNING = (
    "`shell_execute` runs a command: tests, a build, git. Each gets a shell of its own: a directory that it changes "
    "to, variables and background processes end with it; what it leaves in the tree stays."
)
RUNNING_ON = (
    "`shell_execute` runs a command: tests, a build, git. Each begins in the directory of the tree where the last one "
    "ended, with the variables that it exported; what is not exported, functions, aliases and background processes end "
    "with it. What it leaves in the tree stays."
)
SHORT_OF_IT = "`evaluate_python` runs a short program, which prints what you want to know."
READING_OUTPUT = (
    "Of long output you see both ends, and a path between them: `read_file` and `grep` have the rest there."
)
READING_AGAIN = (
    "What a command made or changed counts as changed by somebody else: read it before you change it yourself."
)
COMMANDS_FAILING = (
    "A command that takes too long is ended, and what it did is rolled back. One with another exit code than 0 has "
    "failed by its own account: what it did stays, unless you set rollback_on_error."
)
CONFINED = f"Commands can write in {MOUNT_POINT} and /tmp alone, and have limits of memory, processes and time."
SECRETS = (
    "Commands have {} in their environment. You never see these values: [NAME] stands in the place of each. Use the "
    "variables in commands, and write neither values nor masks into files."
)
BY_NAME = (
    "They have no network but {}, through the proxy in HTTP_PROXY and HTTPS_PROXY. A program that ignores these "
    "variables reaches nothing."
)
NO_NETWORK = "They have no network: nothing can be downloaded."


class PodmanSandboxSection(Section[None]):
    """The file tools over a directory as it is on disk, and commands in one container over the same files.

    It is the `Filesystem` resource of every prompt that has the section. The container is started by the first command;
    a prompt with the section can be made, and its files be worked on, where there is no Podman. A context manager, or
    `close`.
    """

    def __init__(
        self,
        *,
        session: Session,
        root: str | PathLike[str] | None = None,
        image: str | None = None,
        limits: SandboxLimits | None = None,
        network: Network = "none",
        secrets: Mapping[str, str] | None = None,
        sandbox: PodmanSandbox | None = None,
        policies: Sequence[ToolPolicy] | None = None,
        keep_environment: bool = False,
        longest_seconds: float = LONGEST_SECONDS,
        shared_session: bool = False,
        accepts_overrides: bool = False,
    ) -> None:
        """``root``, ``image``, ``limits``, ``network`` and ``secrets`` are as in `PodmanSandbox`. Secrets are masked in
        all that the session records.

        Args:
            sandbox: one that is there already, instead of these five; whoever made it closes it.
            policies: the policies of the tools. The default is `ReadBeforeWritePolicy`.
            keep_environment: whether commands begin in the directory where the last one ended and with the variables
                that it exported, as in one shell: ``session[ShellEnvironment]``, which rolls back with a failed call.
            longest_seconds: the longest time limit of a command. A model cannot exceed it.
            shared_session: as in `VfsToolsSection`. Commands are not governed.
            accepts_overrides: whether the texts of the section and its tools may be replaced from outside.

        Raises:
            PromptValidationError: ``sandbox`` comes with options of another one, neither sandbox nor root is given,
                or ``longest_seconds`` is below 1.
            WorkspaceLockedError, FileNotFoundError: the root cannot be opened.
        """
        if (sandbox is None) == (root is None):
            raise PromptValidationError("PodmanSandboxSection takes either root=, a directory, or sandbox=")
        if not longest_seconds >= SHORTEST_SECONDS:
            raise PromptValidationError(f"longest_seconds is at least {SHORTEST_SECONDS:g}, not {longest_seconds:g}")
        self.session = session
        self._own: PodmanSandbox | None = None
        if root is not None:
            sandbox = self._own = PodmanSandbox(
                root, image=image, limits=limits, network=network, session=session, secrets=secrets
            )
        elif image is not None or limits is not None or network != "none" or secrets is not None:
            raise PromptValidationError(
                "image, limits, network and secrets are those of the sandbox that was given: leave them"
            )
        assert sandbox is not None
        self.sandbox = sandbox
        self._mask_in(session)
        self.keep_environment = keep_environment
        self.longest_seconds = longest_seconds
        external = _external_effects(sandbox)
        shell = Tool[ShellExecute, CommandOutcome](
            name="shell_execute",
            description="Run a command in the container. Says its exit code, output and changes.",
            handler=self.shell_execute,
            accepts_overrides=accepts_overrides,
            opaque=True,
            external_effects=external,
        )
        python = Tool[EvaluatePython, CommandOutcome](
            name="evaluate_python",
            description="Run a Python program in the container. An exit code other than 0 fails.",
            handler=self.evaluate_python,
            accepts_overrides=accepts_overrides,
            opaque=True,
            external_effects=external,
        )
        tools, policy = governed_tools(MOUNT_POINT, accepts_overrides, shared_session)
        super().__init__(
            title="Workspace and shell",
            key="podman.shell",
            tools=(*tools, shell, python),
            policies=(policy,) if policies is None else policies,
            accepts_overrides=accepts_overrides,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close container and workspace, unless ``sandbox`` was given. May be called again."""
        if self._own is not None:
            self._own.close()

    @property
    def filesystem(self) -> Filesystem:
        return self.sandbox.filesystem

    def resources(self) -> ResourceRegistry:
        return ResourceRegistry.of(Binding.instance(Filesystem, self.filesystem))

    def render_body(
        self, params: None, *, visibility: SectionVisibility, path: SectionPath, session: Session | None
    ) -> str:
        governed = any(isinstance(policy, ReadBeforeWritePolicy) for policy in self.policies())
        usual = min(COMMAND_SECONDS, self.longest_seconds)
        longest = f"A command may take {usual:g} seconds"
        if usual < self.longest_seconds:
            longest += f", or up to {self.longest_seconds:g} if its timeout_seconds says so"
        network = ""
        if self.sandbox.network == "none":
            network = f" {NO_NETWORK}"
        elif allowed_hosts(self.sandbox.network) is not None:
            network = f" {BY_NAME.format(self.sandbox.network.partition(':')[2])}"
        secrets = sorted(self.sandbox.secrets.variables)
        rules = (
            FINDING,
            *([READING_FIRST, READING_AGAIN] if governed else []),
            CHANGING,
            RUNNING_ON if self.keep_environment else RUNNING,
            SHORT_OF_IT,
            READING_OUTPUT,
            COMMANDS_FAILING,
            f"{CONFINED} {longest}.{network}",
            *([SECRETS.format(", ".join(f"${name}" for name in secrets))] if secrets else []),
            FAILING,
        )
        return "\n".join((INTRODUCTION, "", *(f"- {rule}" for rule in rules)))

    def clone(self, **changes: Any) -> Self:
        """Return a copy of the section. It shares files and container, which close with this section."""
        twin = super().clone(**changes)
        twin.session = changes.get("session", self.session)
        twin._own = None
        twin._mask_in(twin.session)
        return twin

    def _mask_in(self, session: Session) -> None:
        if session.secrets is None:
            session.secrets = self.sandbox.secrets
        elif session.secrets is not self.sandbox.secrets:
            for name, value in self.sandbox.secrets.variables.items():
                session.secrets.add(name, value)

    def shell_execute(self, params: ShellExecute, *, context: ToolContext) -> ToolResult[CommandOutcome]:
        began_with = None
        if self.keep_environment:
            began_with = context.session[ShellEnvironment].latest() or ShellEnvironment()
        # "." and other spellings of the root: the root itself, wherever the last command ended.
        cwd = params.cwd and (resolve_model_path(self.sandbox.filesystem, params.cwd, mount_point=MOUNT_POINT) or ".")
        ended = self._run(
            context,
            params.argv if params.command is None else params.command,
            params.timeout_seconds,
            cwd=cwd,
            env=params.env,
            stdin=params.stdin,
            environment=began_with,
        )
        reason = "as rollback_on_error asks" if params.rollback_on_error else None
        kept = () if began_with is None else tuple(sorted(began_with.variables))
        result = _result(ended, cwd or ("" if began_with is None else began_with.cwd), reason, kept)
        if result.success and began_with is not None and ended.environment not in (None, began_with):
            context.session[ShellEnvironment].seed(ended.environment)
            if ended.environment.cwd != began_with.cwd:
                place = f"{MOUNT_POINT}/{escape_path(ended.environment.cwd)}".rstrip("/")
                return replace(result, message=f"{result.message}; the next begins in {place}")
        return result

    def evaluate_python(self, params: EvaluatePython, *, context: ToolContext) -> ToolResult[CommandOutcome]:
        ended = self._run(context, ("python3", "-c", params.code), params.timeout_seconds)
        return _result(ended, "", "since the program failed")

    def _run(
        self,
        context: ToolContext,
        command: str | Sequence[str],
        timeout_seconds: float,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        environment: ShellEnvironment | None = None,
    ) -> CommandResult:
        seconds = wanted = min(max(SHORTEST_SECONDS, timeout_seconds), self.longest_seconds)
        if context.deadline is not None:  # a command that ends later is of no use
            seconds = max(SHORTEST_SECONDS, min(seconds, context.deadline.remaining().total_seconds()))
        exported = environment.variables if environment is not None else ()
        usual = {name: value for name, value in ENVIRONMENT.items() if name not in exported}

        def publish(stream: str, data: bytes) -> None:
            context.beat()
            if context.call is not None and context.session.dispatcher.has_handlers(ToolOutput):
                context.session.notify(ToolOutput(context.call.call_id, data.decode("utf-8", "replace")))

        try:
            ended = self.sandbox.run(
                command,
                cwd=cwd,
                env={**usual, **(env or {})},
                stdin=stdin,
                timeout_seconds=seconds,
                on_output=publish,
                environment=environment,
                cancellation=context.cancellation,
            )
        except SandboxUnavailableError as error:
            raise ToolValidationError(f"no command can be run here: {error}") from None
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ToolValidationError(str(error)) from None
        if ended.timed_out and seconds == wanted < self.longest_seconds:
            return replace(ended, failure=f"{ended.failure}; timeout_seconds may be up to {self.longest_seconds:g}")
        return ended


def _external_effects(sandbox: PodmanSandbox) -> str:
    """What commands have with which they may do what no rollback takes back."""
    had = [f"a network ({sandbox.network})"] if sandbox.network != "none" else []
    had += [f"the secret {name}" for name in sorted(sandbox.secrets.variables)]
    return f"its commands have {' and '.join(had)}" if had else ""


def _result(
    ended: CommandResult, began_in: str, rollback_reason: str | None, kept_variables: tuple[str, ...] = ()
) -> ToolResult[CommandOutcome]:
    """``rollback_reason`` is why a command with another exit code than 0 is rolled back; None keeps its changes."""
    outcome = CommandOutcome(
        ended.exit_code,
        ended.stdout,
        ended.stderr,
        ended.timed_out,
        ended.duration_seconds,
        ended.out_of_memory,
        ended.leftovers,
        began_in=began_in,
        network=() if ended.network is None else ended.network.hosts,
        kept_variables=kept_variables,
    )
    if ended.failure:
        return ToolResult(f"{outcome.summary()}; {ended.failure}; what it did is rolled back", outcome, success=False)
    if ended.exit_code != 0 and rollback_reason is not None:
        message = f"{outcome.summary()}; what it did is rolled back, {rollback_reason}"
        return ToolResult(message, outcome, success=False)
    return ToolResult.ok(outcome, outcome.summary())
