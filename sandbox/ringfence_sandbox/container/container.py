"""One container of a sandbox: created, started, looked at from inside, ended, and found again when its owner died."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from podman.errors import APIError

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.filesystem.paths import directories_above
from ringfence_sandbox.container.channel import EXECUTOR as EXECUTOR_SCRIPT
from ringfence_sandbox.container.channel import SOCKET_NAME, Channel, ExecutorLostError, Listener
from ringfence_sandbox.container.connection import UNREADABLE, PodmanConnection
from ringfence_sandbox.container.git_directories import NO_GIT, GitDirectories
from ringfence_sandbox.container.isolation import (
    CONTROL,
    EXECUTOR,
    PROBE,
    PROXY_PORT,
    WORKSPACE,
    Property,
    SandboxLimits,
    environment,
    options,
    system,
    verified,
)
from ringfence_sandbox.container.lent_python import IN_THE_IMAGE, LENT, NoPythonError, Python, lacks_python, lent_python
from ringfence_sandbox.container.shared_directories import LOOK, SharedDirectory, check_seen
from ringfence_sandbox.container.tree_mounts import cover, git_mounts, mounted_in, searchable, show, show_worktree
from ringfence_sandbox.container.users import mapped_for_owner
from ringfence_sandbox.network.network import AllowedHosts, Network, Resolve, allowed_hosts, resolve_name
from ringfence_workspace.call_process import OWNER_LABEL, CallProcess, is_orphan, own_label
from ringfence_workspace.commands import CommandExit
from ringfence_workspace.tree.hidden_tree import MANY, Inode
from ringfence_workspace.tree.places import podman_directory, write_once

if TYPE_CHECKING:
    from ringfence_sandbox.network.proxy import Proxy

WORKSPACE_LABEL = "io.ringfence.workspace"
_CONNECT_SECONDS = 20.0
_PROBE_SECONDS = 20.0
_REMOVAL_SECONDS = 10.0
WITHOUT_COMMANDS = "Or work without commands: --workspace disk"
"""Advice for somebody whose machine cannot shut a container in."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a container is to be, whatever Python runs its executor."""

    root: str
    image: str
    limits: SandboxLimits
    network: Network
    hidden: Mapping[str, Inode]
    git: GitDirectories
    rule: HiddenFiles | None
    worktrees: Sequence[str]
    shared: Sequence[SharedDirectory]


class Container:
    """A running container. Every process in it ends with it, and it ends with its owner."""

    def __init__(
        self,
        connection: PodmanConnection,
        container: Any,
        channel: Channel,
        process: CallProcess,
        python: Python,
        wanted: _Wanted,
        *,
        users: str,
        mounts: Sequence[str],
        covered: Sequence[str],
    ) -> None:
        """``container`` is podman-py's, and runs. ``covered`` are paths in it."""
        self._connection = connection
        self._container = container
        self.channel = channel
        self.process = process
        """Its first process, as the host sees it."""
        self.python = python
        """What runs the executor, and can run other programs of ours."""
        self.users = users
        """How its users are mapped, in words."""
        self.mounts = mounts
        """What was mounted in the workspace when it was started."""
        self._covered = covered
        self.worktrees = wanted.worktrees
        """The linked worktrees in the workspace when it was started. Commands can read them."""
        self.shared = wanted.shared
        """The directories that the workspace shares as a fork, when it was started. Commands can read them."""
        self.hidden = wanted.hidden
        """What was covered in the workspace when it was started: path to inode."""
        self.git_problem = wanted.git.problem
        """Why git commands fail in it. Empty: nothing is known to be wrong."""
        self.properties: Sequence[Property] = ()
        self.proxy: Proxy | None = None
        """The way out for commands, where hosts are allowed by name."""
        self.environment: Mapping[str, str] = {}
        """What every command gets, unless it is told otherwise."""
        self.system = ""
        """The distribution and the Python of the image, in words."""

    @property
    def name(self) -> str:
        return str(self._container.name)

    @classmethod
    def start(
        cls,
        connection: PodmanConnection,
        root: str,
        *,
        image: str,
        limits: SandboxLimits,
        network: Network,
        strict: bool = True,
        hidden: Mapping[str, Inode] = MappingProxyType({}),
        git: GitDirectories = NO_GIT,
        rule: HiddenFiles | None = None,
        worktrees: Sequence[str] = (),
        shared: Sequence[SharedDirectory] = (),
        resolve: Resolve = resolve_name,
    ) -> Container:
        """Create and start one over the tree `root`, and look whether it is shut in. What is ``hidden`` is covered, and
        what ``rule`` hides in the directories of ``git`` and in ``shared`` ones. These and ``worktrees`` can only be
        read. ``resolve`` finds the addresses of hosts that ``network`` names.

        Raises:
            SandboxUnavailableError: it cannot be had, or is not shut in as it should be.
        """
        wanted = _Wanted(root, image, limits, network, hidden, git, rule, worktrees, shared)
        try:
            started = _launch(connection, wanted, IN_THE_IMAGE)
        except NoPythonError as missing:
            lent = lent_python(connection)
            if lent is None:
                raise SandboxUnavailableError(
                    f"the image {image!r} has no python3 (3.9 or newer) for the sandbox's executor, and the default "
                    "image, which could lend it one, is not built: `ringfence sandbox build`"
                ) from missing
            started = _launch(connection, wanted, lent)
        try:
            if started.channel.listener is not None:
                from ringfence_sandbox.network.proxy import Proxy

                allowed = AllowedHosts.parse(network)
                started.proxy = Proxy(started.channel.listener, allowed, resolve, started.process.pid)
            started.properties = started._verified(limits, network)
            _refuse(started.properties, strict)
            started.check_covered()
            started._check_shared()
            started._check_git(git)
        except BaseException:
            started.close()
            raise
        return started

    def _verified(self, limits: SandboxLimits, network: Network) -> Sequence[Property]:
        printed: list[bytes] = []
        try:
            ended = self.run([*self.python.argv, "-c", PROBE], printed)
            if ended.exit_code == 0:
                found = b"".join(printed).decode()
                self.environment = environment(found)
                self.system = system(found, has_python=self.python is IN_THE_IMAGE)
                return verified(found, limits, network, rootless=self._connection.host.rootless)
            said = ended.problem or f"exit code {ended.exit_code}"
        except (ExecutorLostError, ValueError, KeyError, TypeError) as error:
            said = str(error)
        raise SandboxUnavailableError(
            f"what holds in the container could not be looked at from inside: {said}; see `ringfence sandbox doctor`"
        )

    def check_covered(self) -> None:
        """Check from inside that what is hidden is covered.

        An editor that saves by a rename detaches what covers the file.

        Raises:
            SandboxUnavailableError: something is not covered.
        """
        try:
            path = self.channel.uncovered(self._covered) if self._covered else ""
        except ExecutorLostError as error:
            raise SandboxUnavailableError(f"the container was lost: {error}") from error
        if path:
            raise SandboxUnavailableError(f"{escape_path(path)} is hidden and not covered, so no command is run")

    def _check_shared(self) -> None:
        """Check from inside that shared directories are those that were found. Raises SandboxUnavailableError."""
        if self.shared:
            printed: list[bytes] = []
            try:
                self.run([*self.python.argv, "-c", LOOK, *(one.target for one in self.shared)], printed)
            except ExecutorLostError as error:
                raise SandboxUnavailableError(f"the container was lost: {error}") from error
            check_seen(self.shared, b"".join(printed))

    def _check_git(self, git: GitDirectories) -> None:
        """Find from inside whether commands can read the directories of git."""
        with suppress(ExecutorLostError):
            places = [one.target for one in git.shown]
            look = "import os, sys; [os.listdir(path) for path in sys.argv[1:]]"
            if places and self.run([*self.python.argv, "-c", look, *places], []).exit_code != 0:
                listed = ", ".join(escape_path(one.source) for one in git.shown)
                self.git_problem = f"git commands fail in the container: its user cannot read {listed} there"

    def run(self, argv: Sequence[str], printed: list[bytes]) -> CommandExit:
        """A program of our own in the container, outside of the workspace; what it prints is added to ``printed``."""
        return self.channel.run(
            argv,
            cwd="/",
            env={},
            stdin=None,
            timeout_seconds=_PROBE_SECONDS,
            on_output=lambda stream, data: printed.append(data) if stream == "stdout" else None,
        )

    def close(self) -> None:
        """End every process of it and remove it. Once is enough.

        Raises:
            SandboxUnavailableError: it cannot be shown that it has ended.
        """
        if self.proxy is not None:
            self.proxy.close()
        ended = self.channel.close() or not self.process.lives
        removed = _remove(self._connection, self._container)
        if not ended and not removed and self.process.lives:
            raise SandboxUnavailableError(
                f"the container {self.name} does not end; see to it by hand: `podman rm --force {self.name}`"
            )


def _launch(connection: PodmanConnection, wanted: _Wanted, python: Python) -> Container:
    """Create and start a container whose executor answers.

    Raises:
        NoPythonError: the image has no Python, and none was lent.
        SandboxUnavailableError: it does not start for another reason.
    """
    root, container, mounts = wanted.root, None, mounted_in(wanted.root)
    also = [*(one.source for one in wanted.git.shown), *(one.place for one in wanted.shared)]
    mapped = mapped_for_owner(root, connection.host, also)
    hidden_there = {path: one.root for one in wanted.shared for path in one.hidden(wanted.rule)}
    with Listener(podman_directory()) as listener, mapped as (places, users):
        settings = options(
            image=wanted.image,
            workspace=places[root],
            control=listener.directory,
            executor=_script(),
            limits=wanted.limits,
            network=wanted.network,
            users=users,
        )
        git = wanted.git.within(places)
        covers = git.covers(wanted.rule)
        settings["mounts"] += [*_workspace_mounts(wanted, mounts, places), *git_mounts(git, covers, places)]
        settings["mounts"] += [one.mount(places) for one in wanted.shared]
        settings["mounts"] += [cover(there, path) for path, there in hidden_there.items()]
        if python.directory:
            settings["mounts"].append({"type": "bind", "source": python.directory, "target": LENT, "read_only": True})
        proxy_port = [str(PROXY_PORT)] if allowed_hosts(wanted.network) is not None else []
        try:
            container = connection.client.containers.create(
                command=[],
                entrypoint=[*python.argv, EXECUTOR, f"{CONTROL}/{SOCKET_NAME}", *proxy_port],
                name=f"ringfence-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}-{os.urandom(4).hex()}",
                labels={OWNER_LABEL: own_label(), WORKSPACE_LABEL: root},
                **settings,
            )
            if any(one.target.startswith("/root/") for one in git.shown):
                container.put_archive("/", searchable("root"))
            container.start()
            pid = int(container.inspect()["State"]["Pid"])
            return Container(
                connection,
                container,
                process=CallProcess.running(pid, f"the container {container.name}"),
                channel=listener.accept(_CONNECT_SECONDS, pid=pid),
                python=python,
                wanted=wanted,
                users=users.description,
                mounts=mounts,
                covered=[f"{WORKSPACE}/{path}" for path in (*wanted.hidden, *hidden_there)]
                + [one.target for one in covers if not one.content],
            )
        except BaseException as error:
            why = _last_words(container)
            _remove(connection, container)
            if isinstance(error, APIError) and python is IN_THE_IMAGE and lacks_python(str(error)):
                raise NoPythonError(wanted.image) from error
            if isinstance(error, (OSError, ExecutorLostError, *UNREADABLE)):  # podman-py's are an OSError too
                many = len(wanted.hidden) > MANY
                said = _too_many(wanted.hidden) if many else _not_started(error, why)
                raise SandboxUnavailableError(said) from error
            raise


def _workspace_mounts(
    wanted: _Wanted, mounts: Sequence[str], places: Mapping[str, str]
) -> Iterator[Mapping[str, object]]:
    """What is mounted below the workspace: linked worktrees, other filesystems, and what covers hidden files."""
    root = wanted.root
    for path in wanted.worktrees:
        yield show_worktree(places[root], path)
    for path in mounts:
        at = os.path.relpath(path, root)
        if wanted.hidden.keys().isdisjoint((at, *directories_above(at))):
            yield show(root, path)
    for path in wanted.hidden:
        yield cover(root, path)


def remove_orphans(connection: PodmanConnection) -> Sequence[str]:
    """Remove the containers whose owners have died; their names."""
    removed: list[str] = []
    with suppress(Exception):  # what the service answers may be nonsense, which whoever needs an answer says
        # podman-py wants plain text here; a list matches nothing.
        for container in connection.client.containers.list(all=True, filters={"label": OWNER_LABEL}):
            labels: Mapping[str, str] = container.labels or {}
            if is_orphan(labels.get(OWNER_LABEL, "")) and _remove(connection, container):
                removed.append(str(container.name))
    return removed


def _remove(connection: PodmanConnection, container: Any) -> bool:
    """Whether it is gone: its own end removes it too, at the same time perhaps."""
    if container is None:
        return True
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, SandboxUnavailableError):
            connection.renew()
            # By its id: the object knows only the service that it came from.
            connection.client.api.delete(f"/containers/{container.id}", params={"force": True, "v": True})
            if not connection.client.containers.exists(container.id):
                return True
        time.sleep(0.02)
    return False


def _script() -> str:
    content = EXECUTOR_SCRIPT.read_text()
    name = f"executor-{hashlib.sha256(content.encode()).hexdigest()[:12]}.py"
    return write_once(os.path.join(podman_directory(), name), content)


def _refuse(properties: Sequence[Property], strict: bool) -> None:
    lacking = [found for found in properties if not found.holds and (found.essential or strict)]
    if lacking:
        said = "; ".join(f"{found.name}: {found.found}" for found in lacking)
        raise SandboxUnavailableError(
            f"the container is not shut in as it should be: {said}. `ringfence sandbox doctor` says what to do. "
            f"{WITHOUT_COMMANDS}"
        )


def _last_words(container: Any) -> str:
    """Why a container that ended did, as far as Podman knows."""
    if container is not None:
        with suppress(OSError, *UNREADABLE):
            state = container.inspect()["State"]
            return f"{state.get('Status')}, exit code {state.get('ExitCode')} {state.get('Error') or ''}".strip()
    return ""


def _too_many(hidden: Collection[str]) -> str:
    """Advice for somebody who hides more than a container can cover."""
    top = Counter(path.partition("/")[0] for path in hidden if "/" in path)
    most = [f"{escape_path(name)} ({count:,})" for name, count in top.most_common(3)]
    where = f", most below {', '.join(most)}" if most else ""
    return (
        f"the container does not start: {len(hidden):,} hidden files are too many to cover{where}. Hide "
        "directories as a whole, such as --hide /DIRECTORY, or work on a copy without them"
    )


def _not_started(error: BaseException, why: str) -> str:
    text = describe_error(error) if isinstance(error, UNREADABLE) else str(error)
    return f"the container does not start: {text[-800:]}{f' ({why})' if why else ''}; see `ringfence sandbox doctor`"
