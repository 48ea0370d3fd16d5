"""Commands in a container over a workspace on disk: each is a transaction, and nothing of it outlives its call."""

from __future__ import annotations

import errno
import os
import shlex
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.filesystem.paths import normalise, os_error
from ringfence.limits import Cancellation
from ringfence.participants import CURRENT_CALL
from ringfence.secrets import Secrets
from ringfence.session.session import Session
from ringfence_sandbox.container.channel import ExecutorLostError
from ringfence_sandbox.container.commands import (
    UNKNOWN,
    CommandWatch,
    KeptEnvironment,
    ShownOutput,
    explained,
    no_directory,
)
from ringfence_sandbox.container.connection import PodmanConnection, connect, reading
from ringfence_sandbox.container.container import WITHOUT_COMMANDS, Container, remove_orphans
from ringfence_sandbox.container.git_directories import GitDirectories
from ringfence_sandbox.container.images import DEFAULT_RECIPE, Progress, build, built, existing, recipe, silent
from ringfence_sandbox.container.isolation import WORKSPACE, Property, SandboxLimits
from ringfence_sandbox.container.shared_directories import all_found
from ringfence_sandbox.container.tree_mounts import mounted_in
from ringfence_sandbox.network.network import Network, Resolve, allowed_hosts, resolve_name
from ringfence_sandbox.project.project_image import remembered_image
from ringfence_workspace.commands import CommandExit, CommandRequest, CommandResult, ShellEnvironment
from ringfence_workspace.forks.shared_directories import shared_in
from ringfence_workspace.host import HostFilesystem
from ringfence_workspace.pipes import Stream
from ringfence_workspace.tree.hidden_tree import Inode
from ringfence_workspace.workspace import Workspace
from ringfence_workspace.workspace_calls import WorkspaceTransaction
from ringfence_workspace.workspace_commands import CommandParams, CommandRules, OnError, check_opaque, transact

if TYPE_CHECKING:
    from typing import Self

    from ringfence.runtime.policy import Policy

KILLED = 137
_TAG = "shell_execute"


class PodmanSandbox:
    """A container over the tree at ``root``, started by the first command and used by all of them.

    Outside of a tool call each `run` is a transaction of its own; in one (which has to be opaque) it belongs to it.
    Files that a command makes belong to the owner of the tree. There is no network unless it is asked for.
    """

    mount_point: ClassVar[str] = WORKSPACE
    """The path of the tree in the container."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        image: str | None = None,
        project: str | os.PathLike[str] | None = None,
        limits: SandboxLimits | None = None,
        network: Network = "none",
        filesystem: HostFilesystem | None = None,
        session: Session | None = None,
        connection: PodmanConnection | None = None,
        url: str | None = None,
        strict: bool = True,
        secrets: Mapping[str, str] | Secrets | None = None,
        progress: Progress | None = None,
        resolve: Resolve = resolve_name,
    ) -> None:
        """``filesystem`` is one that is open over ``root`` already; without it the root is opened as a `Workspace`,
        until `close`. So it is with ``connection``; ``url`` is where to connect otherwise. ``image`` is never fetched;
        without it, it is that of `ringfence sandbox build` for ``project``, which is the root unless that is a copy of
        the project, or the one that comes with ringfence, which is built when it is first needed; ``progress`` gets
        lines about that, and about git's directories outside of the root, which commands can read. ``session`` is told
        in receipts.
        ``secrets`` are variables of each command, by name. Their values are masked in what it prints.
        With ``network="allow:HOST,*.HOST"`` commands reach these hosts alone, through a proxy in this process;
        ``resolve`` finds their addresses. ``strict=False`` also takes a machine where memory and processor time cannot
        be limited, or users not be mapped.

        Raises:
            WorkspaceLockedError, FileNotFoundError: the root cannot be opened.
            ValueError: the network is of no kind, or the filesystem has another root.
        """
        allowed_hosts(network)
        self._image, self._project = image, project
        self.limits = limits or SandboxLimits()
        self.network: Network = network
        """Where it is not ``none``, commands have effects that no rollback undoes."""
        self._resolve = resolve
        self._url = url
        self._strict = strict
        self._progress = progress
        self.secrets = secrets if isinstance(secrets, Secrets) else Secrets(secrets)
        self._session = session or Session(secrets=self.secrets)
        self._swept = self._has_started = False
        self._turn = threading.RLock()
        self._resources = _Resources()
        if filesystem is None:
            self.workspace: Workspace | None = Workspace.open(root)
            self._resources.workspace = self.workspace
            filesystem = self.workspace.filesystem
        else:
            self.workspace = None
            if os.path.realpath(root) != filesystem.root:
                raise ValueError(f"the filesystem is over {filesystem.root}, not over {os.path.realpath(root)}")
        self.filesystem: HostFilesystem = filesystem
        self.secrets.add_hidden(filesystem)
        self._resources.connection = connection
        self._resources.owns_connection = connection is None
        # Before any command: none may choose what the next container shows.
        self._git = GitDirectories.of(filesystem.root, filesystem.hidden, copied_from=project)
        self._shared = shared_in(filesystem.history)
        self._finalizer = weakref.finalize(self, self._resources.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the container, and let go of what the sandbox opened itself. Once is enough."""
        with self._turn:
            self._finalizer()

    # -- the container

    def start(self) -> Container:
        """The running container; started if there is none, or if it was lost.

        Raises:
            SandboxUnavailableError: it cannot be had; the message says what to do.
        """
        with self._turn:
            self._check_open()
            container = self._resources.container
            lives = container is not None and not container.channel.closed and container.process.lives
            tree = self.filesystem.hidden_tree
            hidden: Mapping[str, Inode] = {} if tree is None else tree.covers()
            worktrees, shared = self.filesystem.linked_worktrees, all_found(self._shared)
            if container is not None and lives and container.mounts == mounted_in(self.filesystem.root):
                with suppress(SandboxUnavailableError):
                    if (container.hidden, container.worktrees, container.shared) == (hidden, worktrees, shared):
                        container.check_covered()
                        return container
            self._end_container()
            connection = self._connection()
            with reading(connection.url, connection.how):
                image, is_new = self._existing(connection)
            self._resources.container = Container.start(
                connection,
                self.filesystem.root,
                image=image,
                limits=self.limits,
                network=self.network,
                strict=self._strict,
                hidden=hidden,
                git=self._git,
                rule=self.filesystem.hidden,
                worktrees=worktrees,
                shared=shared,
                resolve=self._resolve,
            )
            self._describe(self._resources.container, image if is_new else "")
            return self._resources.container

    def _describe(self, container: Container, new_image: str) -> None:
        if self._progress is not None and new_image:
            self._progress(f"commands run in {new_image}: {container.system}")
        if self._progress is not None and not self._has_started and self._git.shown and not container.git_problem:
            listed = ", ".join(escape_path(one.source) for one in self._git.shown)
            self._progress(f"commands can read git's data outside of DIR: {listed}")
        self._has_started = True

    def _existing(self, connection: PodmanConnection) -> tuple[str, bool]:
        """The image that was asked for, that of the project, or the default one; and whether it was built for that."""
        if self._image is not None:
            return existing(connection, self._image), False
        if (remembered := remembered_image(self._project or self.filesystem.root)) is None:
            default = recipe(DEFAULT_RECIPE)
            # A container's first look from inside would find it, too, but after minutes of building.
            is_new = built(connection, default) is None
            lacking = connection.host.describe_unlimited() if self._strict else ""
            if lacking and is_new:
                raise SandboxUnavailableError(f"{lacking}. {WITHOUT_COMMANDS}")
            return build(connection, default, progress=self._progress or silent), is_new
        if not connection.client.images.exists(remembered.image):
            raise SandboxUnavailableError(
                f"the image of {remembered.root} is gone: `ringfence sandbox build {shlex.quote(remembered.root)}` "
                "builds it anew, --image names another one"
            )
        return remembered.image, False

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ValueError("the sandbox is closed")

    @property
    def properties(self) -> Sequence[Property]:
        """What was found when the container was looked at from inside; nothing before it was started."""
        return self._resources.container.properties if self._resources.container is not None else ()

    @property
    def git_problem(self) -> str:
        """Why git commands fail in the container. Empty: nothing is known to be wrong."""
        container = self._resources.container
        return self._git.problem if container is None else container.git_problem

    def _connection(self) -> PodmanConnection:
        if self._resources.connection is None:
            self._resources.connection = connect(self._url)
        self._resources.connection.renew()
        if not self._swept:
            remove_orphans(self._resources.connection)
            self._swept = True
        return self._resources.connection

    def _end_container(self) -> None:
        container, self._resources.container = self._resources.container, None
        if container is not None:
            container.close()

    # -- commands

    def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_seconds: float = 30.0,
        shell: bool | None = None,
        policies: Sequence[Policy] = (),
        on_error: OnError = "keep",
        dry_run: bool = False,
        leave_running: bool = False,
        tag: str = _TAG,
        title: str | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
        environment: ShellEnvironment | None = None,
        cancellation: Cancellation | None = None,
    ) -> CommandResult:
        """Run a command: text for the shell, or a program and its arguments. When this returns, all of it has ended.

        ``cwd`` is a directory of the workspace, ``env`` is added to the container's own; ``on_output`` gets the names
        of streams and pieces of output as they come; ``cancellation`` ends it early. Outside of tool calls what the
        command did is kept, unless it was not let come to its end (`CommandResult.failure`). The other keywords are
        those of `Workspace.run`; but a command that ends with another exit code than 0 is kept unless
        ``on_error="rollback"``, ``shell`` need not be said, and nothing can be left running.

        With ``environment`` the command begins where another one left off, unless ``cwd`` and ``env`` say otherwise,
        and `CommandResult.environment` is what it leaves itself: give that to the next one. Only the shell leaves one,
        and only a command that came to its end.

        Raises:
            SandboxUnavailableError: there is no container to run it in.
            ValueError, TypeError: the command cannot be asked for so.
            FileNotFoundError, NotADirectoryError: ``cwd`` is no directory of the workspace.
            TransactionError: it is run in a tool call whose tool is not declared opaque.
            CallDeniedError: a policy denied it before it ran.
        """
        if leave_running:
            raise ValueError("nothing of a container outlives its call: leave_running is for Workspace.run")
        if shell is not None and shell is not isinstance(command, str):
            raise TypeError("with shell=True the command is one text, and with shell=False a list of arguments")
        rules = CommandRules(policies, on_error, dry_run)
        request = CommandRequest.of(
            command,
            cwd=cwd,
            env=env or {},
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            environment=environment,
        )
        call = CURRENT_CALL.get()
        self._check_open()
        if call is not None:
            check_opaque(call)
            call.join(self.filesystem)
            if rules == CommandRules(on_error="keep"):  # it is a part of the call, and ends with it
                with self._turn:
                    return self._run(request, on_output, cancellation)
        if self._resources.container is None:
            self.start()  # before files are looked at, which is in vain without it
        own = WorkspaceTransaction(
            self.filesystem,
            self._session,
            tag,
            policies=policies,
            params=CommandParams.of(request),
            title=self.secrets.mask(request.title if title is None else title),
            dry_run=dry_run,
        )

        def execute() -> CommandResult:
            with self._turn:  # once the transaction has begun, as in a tool call: always in this order
                return self._run(request, on_output, cancellation)

        result = transact(own, rules, execute)
        said = [result.stderr, *(f"[{words}]" for words in own.report.messages())]
        return result if result.kept else replace(result, stderr="\n".join(said))

    def _run(
        self, request: CommandRequest, on_output: Callable[[str, bytes], None] | None, cancellation: Cancellation | None
    ) -> CommandResult:
        directory, moved = self._beginning(request)
        before = self._resources.container
        container = self.start()
        self.secrets.add_hidden(self.filesystem, late=True)  # people may have changed one
        replaced = "the container had ended, and this is a new one" if before not in (None, container) else ""
        # Whoever recovers the workspace after us ends the container before anything is rolled back.
        heartbeat = self.filesystem.note_process(container.process)
        kept = KeptEnvironment(request, directory, container.environment, self.secrets)
        output = self.filesystem.outputs.of_command(os.urandom(8).hex(), self.limits.output_bytes)
        shown = ShownOutput(output, self.secrets, on_output)

        def take(stream: Stream, data: bytes) -> None:
            if stream == "report":
                kept.take(data)
            else:
                shown.take(stream, data)

        begun = time.monotonic()
        proxy, used, failure = container.proxy, None, ""
        watch = CommandWatch(self.filesystem.root, self.limits, container.channel.kill, cancellation)
        try:
            with watch:
                if proxy is not None:
                    proxy.start()
                ended = container.channel.run(
                    kept.argv,
                    cwd=directory,
                    env=kept.env,
                    stdin=request.stdin,
                    timeout_seconds=request.timeout_seconds,
                    on_output=take,
                    report=kept.reports,
                    heartbeat=heartbeat,
                )
            if ended.timed_out:
                seconds = request.timeout_seconds
                failure = f"timed out after {seconds:g} second{'' if seconds == 1 else 's'}"
        except ExecutorLostError as lost:
            self._end_container()
            ended = CommandExit(KILLED, duration_seconds=time.monotonic() - begun)
            failure = f"the container was lost ({lost}); the next command gets a new one"
        finally:
            if proxy is not None:
                used = proxy.stop()
            shown.close()
        failure = watch.reason or failure
        left = request.environment if failure else kept.next_environment()
        not_started = self.secrets.mask(explained(request, ended))
        said = [replaced, moved, not_started, failure]
        said += ["out of memory: a process was killed"] * ended.killed_by_oom
        said += used.refusals() if used is not None else []
        said += [UNKNOWN] * (request.environment is not None and left is None)
        stderr = "\n".join([output.stderr.text(), *(f"[{words}]" for words in said if words)]).lstrip("\n")
        return CommandResult(
            ended.exit_code,
            output.stdout.text(),
            self.secrets.mask(stderr),
            ended.timed_out,
            ended.duration_seconds,
            failure=failure,
            out_of_memory=ended.killed_by_oom,
            leftovers=ended.leftovers,
            environment=left or request.environment,
            network=self.secrets.mask(used),
            not_started=not_started,
            output_files=output.files(),
        )

    def _beginning(self, request: CommandRequest) -> tuple[str, str]:
        """Where in the container a command begins, and in words why that is not where the last one ended."""
        if request.cwd or request.environment is None:
            return self._directory(request.cwd), ""
        try:
            return self._directory(request.environment.cwd), ""
        except (OSError, ValueError):
            gone = escape_path(request.environment.cwd)
            return WORKSPACE, f"{gone} is no longer a directory of the workspace: this command began in the root"

    def _directory(self, cwd: str) -> str:
        """A directory of the workspace as the container sees it."""
        inside = cwd.removeprefix(WORKSPACE) if f"{cwd}/".startswith(f"{WORKSPACE}/") else cwd
        try:
            place = self.filesystem.resolve(normalise(inside))
            if not self.filesystem.stat(place).is_directory:
                raise os_error(errno.ENOTDIR, place)
        except (OSError, ValueError) as error:
            raise no_directory(cwd, error) from None
        return f"{WORKSPACE}/{place}" if place else WORKSPACE


@dataclass(slots=True)
class _Resources:
    """What a sandbox has to let go of, also when nobody refers to it any more and when the interpreter ends."""

    container: Container | None = None
    connection: PodmanConnection | None = None
    owns_connection: bool = True
    workspace: Workspace | None = None
    process: int = field(default_factory=os.getpid)
    """Whose it is: one that is forked off runs what the interpreter runs at its end, too."""

    def close(self) -> None:
        if os.getpid() != self.process:
            if self.workspace is not None:
                self.workspace.close()
            return
        with ExitStack() as stack:
            if self.workspace is not None:
                stack.callback(self.workspace.close)
            if self.connection is not None and self.owns_connection:
                stack.callback(self.connection.close)
            if self.container is not None:
                stack.callback(self.container.close)
