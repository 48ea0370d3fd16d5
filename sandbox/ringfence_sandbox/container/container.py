"""One container of a sandbox: created, started, looked at from inside, ended, and found again when its owner died."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from podman.errors import APIError

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence.failures import describe_error
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.filesystem.paths import directories_above
from ringfence_sandbox.container.channel import EXECUTOR as EXECUTOR_SCRIPT
from ringfence_sandbox.container.channel import SOCKET_NAME, CommandExit, ExecutorLostError, Listener
from ringfence_sandbox.container.connection import UNREADABLE, PodmanConnection
from ringfence_sandbox.container.git_directories import NO_GIT, GitDirectories
from ringfence_sandbox.container.images import DEFAULT_RECIPE, SOURCES, recipe
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
from ringfence_sandbox.container.tree_mounts import cover, git_mounts, mounted_in, searchable, show, show_worktree
from ringfence_sandbox.container.users import mapped_for_owner
from ringfence_sandbox.network.network import AllowedHosts, Network, Resolve, allowed_hosts, resolve_name
from ringfence_workspace.call_process import OWNER_LABEL, CallProcess, is_orphan, own_label
from ringfence_workspace.tree.hidden_tree import MANY, Inode
from ringfence_workspace.tree.places import podman_directory, write_once

if TYPE_CHECKING:
    from ringfence_sandbox.network.proxy import Proxy

WORKSPACE_LABEL = "io.ringfence.workspace"
_CONNECT_SECONDS = 20.0
_PROBE_SECONDS = 20.0
_REMOVAL_SECONDS = 10.0
_OPTIONS = ("-I", "-S", "-B")
WITHOUT_COMMANDS = "Or work without commands: --workspace disk"
"""Advice for somebody whose machine cannot shut a container in."""
LENT = "/run/python"
"""Where it is in the container."""
_LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_FILTER: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}  # not in the first versions of 3.11
_PROGRAMS = {"debian": "usr/bin/python3", "registry": "usr/local/bin/python3"}


@dataclass(frozen=True, slots=True)
class Python:
    """How it is started, and the directory of the host that has to be mounted for it at `LENT`, if any."""

    argv: tuple[str, ...]
    directory: str = ""


IN_THE_IMAGE = Python(("python3", *_OPTIONS))


class NoPythonError(Exception):
    """An image has no python3."""


def lacks_python(error: str) -> bool:
    """Whether a runtime says that it found no python3 to start."""
    return "python3" in error and ("not found" in error or "no such file" in error)


def lent_python(connection: PodmanConnection) -> Python | None:
    """The default image's Python, for containers of other images: to be mounted read-only, and started by its own
    loader, since nothing of it is where it would look for it. None where that image is not built."""
    machine = platform.machine()
    for source in SOURCES:
        image = recipe(DEFAULT_RECIPE).tag(source)
        if machine in _LOADERS and connection.client.images.exists(image):
            places = [f"{LENT}/{place}/{machine}-linux-gnu" for place in ("lib", "usr/lib")]
            libraries = ":".join([*places, f"{LENT}/usr/local/lib"])
            loader = f"{places[0]}/{_LOADERS[machine]}"
            argv = (loader, "--library-path", libraries, f"{LENT}/{_PROGRAMS[source]}", *_OPTIONS)
            return Python(argv, _copied(connection, image, machine))
    return None


def _copied(connection: PodmanConnection, image: str, machine: str) -> str:
    """A directory of the host with the image's Python, made once. (An image itself cannot be mounted into a container
    with users of its own.)"""
    parent = podman_directory()
    place = os.path.join(parent, f"python-{image.rpartition(':')[2]}")
    if os.path.isdir(place):
        return place
    wanted = re.compile(
        rf"(lib|usr/lib)/{machine}-linux-gnu/[^/]+|usr/(local/)?(bin/python3[^/]*|lib/(python3\.\d+/.*|libpython[^/]*))"
    )
    unwanted = re.compile(r".*/(site-packages|dist-packages|test|tests|__pycache__)/.*")
    container = connection.client.containers.create(image=image, command=["true"], labels={OWNER_LABEL: own_label()})
    try:
        with tempfile.TemporaryFile() as file, tempfile.TemporaryDirectory(dir=parent) as new:
            for chunk in container.export():
                file.write(chunk)
            file.seek(0)
            with tarfile.open(fileobj=file) as tar:
                for member in tar:
                    name = member.name.removeprefix("./")
                    if ".." in name.split("/"):
                        continue
                    if (member.isreg() or member.issym()) and wanted.fullmatch(name) and not unwanted.fullmatch(name):
                        member.mode, member.uid, member.gid = 0o755, os.getuid(), os.getgid()
                        tar.extract(member, new, **_FILTER)
            for directory, _, _ in os.walk(new):
                os.chmod(directory, 0o755)  # noqa: S103 - for the container's users
            with suppress(OSError):  # somebody else was quicker
                os.rename(new, place)
                os.mkdir(new)
    finally:
        container.remove(force=True)
    return place


class Container:
    """A running container. Every process in it ends with it, and it ends with its owner."""

    def __init__(
        self,
        connection: PodmanConnection,
        root: str,
        python: Python,
        image: str,
        limits: SandboxLimits,
        network: Network,
        hidden: Mapping[str, Inode],
        git: GitDirectories,
        rule: HiddenFiles | None,
        worktrees: Sequence[str],
    ) -> None:
        """Create and start one. NoPythonError, SandboxUnavailableError: it does not start."""
        self._connection = connection
        self.python = python
        """What runs the executor, and can run other programs of ours."""
        self.mounts = mounted_in(root)
        """What was mounted in the workspace when it was started."""
        self.worktrees = worktrees
        """The linked worktrees in the workspace when it was started. Commands can read them."""
        self.hidden = hidden
        """What was covered in the workspace when it was started: path to inode."""
        self._covered = [f"{WORKSPACE}/{path}" for path in hidden]
        self.git_problem = git.problem
        """Why git commands fail in it. Empty: nothing is known to be wrong."""
        self.properties: Sequence[Property] = ()
        self.proxy: Proxy | None = None
        """The way out for commands, where hosts are allowed by name."""
        self.environment: Mapping[str, str] = {}
        """What every command gets, unless it is told otherwise."""
        self.system = ""
        """The distribution and the Python of the image, in words."""
        self._container: Any = None
        mapped = mapped_for_owner(root, connection.host, [one.source for one in git.shown])
        with Listener(podman_directory()) as listener, mapped as (places, users):
            self.users = users.description
            """How its users are mapped, in words."""
            wanted = options(
                image=image,
                workspace=places[root],
                control=listener.directory,
                executor=_script(),
                limits=limits,
                network=network,
                users=users,
            )
            shown = {path: os.path.relpath(path, root) for path in self.mounts}
            bare = [path for path, at in shown.items() if hidden.keys().isdisjoint((at, *directories_above(at)))]
            wanted["mounts"] += [show_worktree(places[root], path) for path in worktrees]
            wanted["mounts"] += [show(root, path) for path in bare] + [cover(root, path) for path in hidden]
            shown_git = git.within(places)
            covers = shown_git.covers(rule)
            self._covered += [one.target for one in covers if not one.content]
            wanted["mounts"] += git_mounts(shown_git, covers, places)
            if python.directory:
                wanted["mounts"].append({"type": "bind", "source": python.directory, "target": LENT, "read_only": True})
            proxy_port = [str(PROXY_PORT)] if allowed_hosts(network) is not None else []
            try:
                self._container = connection.client.containers.create(
                    command=[],
                    entrypoint=[*python.argv, EXECUTOR, f"{CONTROL}/{SOCKET_NAME}", *proxy_port],
                    name=f"ringfence-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}-{os.urandom(4).hex()}",
                    labels={OWNER_LABEL: own_label(), WORKSPACE_LABEL: root},
                    **wanted,
                )
                if any(one.target.startswith("/root/") for one in shown_git.shown):
                    self._container.put_archive("/", searchable("root"))
                self._container.start()
                pid = int(self._container.inspect()["State"]["Pid"])
                self.process = CallProcess.running(pid, f"the container {self.name}")
                """Its first process, as the host sees it."""
                self.channel = listener.accept(_CONNECT_SECONDS, pid=pid)
            except BaseException as error:
                why = _last_words(self._container)
                _remove(connection, self._container)
                if isinstance(error, APIError) and python is IN_THE_IMAGE and lacks_python(str(error)):
                    raise NoPythonError(image) from error
                if isinstance(error, (OSError, ExecutorLostError, *UNREADABLE)):  # podman-py's are an OSError too
                    if len(hidden) > MANY:
                        raise SandboxUnavailableError(_too_many(hidden)) from error
                    raise SandboxUnavailableError(_not_started(error, why)) from error
                raise

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
        resolve: Resolve = resolve_name,
    ) -> Container:
        """Create and start one over the tree `root`, and look whether it is shut in. What is ``hidden`` is covered, and
        what ``rule`` hides in the directories of ``git``. ``worktrees`` can only be read. ``resolve`` finds the
        addresses of hosts that ``network`` names.

        Raises:
            SandboxUnavailableError: it cannot be had, or is not shut in as it should be.
        """
        make = partial(
            cls,
            connection,
            root,
            image=image,
            limits=limits,
            network=network,
            hidden=hidden,
            git=git,
            rule=rule,
            worktrees=worktrees,
        )
        try:
            started = make(IN_THE_IMAGE)
        except NoPythonError as missing:
            lent = lent_python(connection)
            if lent is None:
                raise SandboxUnavailableError(
                    f"the image {image!r} has no python3 (3.9 or newer) for the sandbox's executor, and the default "
                    "image, which could lend it one, is not built: `ringfence sandbox build`"
                ) from missing
            started = make(lent)
        try:
            if started.channel.listener is not None:
                from ringfence_sandbox.network.proxy import Proxy

                allowed = AllowedHosts.parse(network)
                started.proxy = Proxy(started.channel.listener, allowed, resolve, started.process.pid)
            started.properties = started._verified(limits, network)
            _refuse(started.properties, strict)
            started.check_covered()
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
