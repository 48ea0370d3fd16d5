"""Where Podman answers: a service that is there, or one of our own that ends with us."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit

from podman import PodmanClient
from podman.domain.config import PodmanConfig  # pyright: ignore[reportMissingTypeStubs]

from ringfence.errors import SandboxUnavailableError
from ringfence.failures import describe_error
from ringfence_workspace.tree.places import StateDirectoryError, podman_directory, write_once

_PING_SECONDS = 2.0
_START_SECONDS = 20.0
_REQUEST_SECONDS = 60.0
_STOP_SECONDS = 10.0
_MOST_ULIMIT = 1_048_576
_SOCKET_NAME = "podman.sock"
_LONGEST_DIRECTORY_BYTES = 64
"""Of TMPDIR: the path of a socket has at most 107."""
_HELPERS = ("/usr/lib/podman", "/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/local/lib/podman")

_CONTROLLERS = {"memory": "memory", "pids": "processes", "cpu": "processor time"}

UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)
"""What podman-py raises for an answer that has not the form of Podman's."""
INSTALL = (
    "on Debian or Ubuntu run `sudo apt-get install --no-install-recommends podman runc uidmap`, elsewhere see "
    "https://podman.io/docs/installation; then `ringfence sandbox doctor`"
)
# Its standard input ends when we do, however that is: then it ends the service, which would stay otherwise. The first
# Podman of an ordinary user goes on in a child, and may end without it: hence the whole group.
_SERVICE = """
exec 3<&0
podman system service --time=0 "$2" </dev/null 3<&- & service=$!
(read -r _ <&3; kill "$service") & watch=$!
wait "$service"
trap '' TERM; kill 0; rm -rf "$1"
"""
_OF_PODMAN = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_.*|TZ|TMPDIR|(XDG|DBUS|CONTAINERS?|PODMAN|BUILDAH|STORAGE|REGISTRY|SSL_CERT)_.*"
    "|GODEBUG|.*_proxy",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Host:
    """What a service says of the machine that it runs on."""

    rootless: bool
    cgroup_version: str
    runtime: str
    version: str
    unlimited: Sequence[str] = ()
    """What a container's use of cannot be limited, as far as Podman knows."""

    def describe_unlimited(self) -> str:
        """A sentence about that. Empty: there is nothing."""
        if not self.unlimited:
            return ""
        return (
            f"this Podman cannot limit {', '.join(self.unlimited)}: the machine's cgroups do not let it. Use cgroups "
            "version 2 with delegation, or the system's Podman (CONTAINER_HOST=unix:///run/podman/podman.sock)"
        )


class PodmanConnection:
    """A service that answers. `close`, or ``with``, ends it where it is one of our own."""

    def __init__(self, url: str, how: str, own: OwnService | None = None) -> None:
        """``how`` says in words where it was found.

        Raises:
            SandboxUnavailableError: what answers is no Podman, or one that does not work.
        """
        self.url = url
        self.how = how
        self._own = own
        # podman-py is only partly typed.
        self.client: Any = PodmanClient(base_url=url, timeout=_REQUEST_SECONDS)
        try:
            with reading(url, how):
                self.host = _host(cast("Mapping[str, Any]", self.client.info()))
        except BaseException:
            self.client.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Once is enough."""
        self.client.close()
        if self._own is not None:
            self._own.close()

    def renew(self) -> None:
        """Start a service of our own again that was killed; another's has to be started by its owner.

        Raises:
            SandboxUnavailableError: it does not answer.
        """
        if answers(self.url):
            return
        if self._own is None:
            raise SandboxUnavailableError(f"the Podman service at {self.url} no longer answers; start it again")
        self._own.close()
        self._own = OwnService()
        self.url = self._own.url
        self.client.close()
        self.client = PodmanClient(base_url=self.url, timeout=_REQUEST_SECONDS)


@contextmanager
def reading(url: str, how: str) -> Generator[None]:
    """A block in which answers of the service are read. SandboxUnavailableError: they are none of Podman's."""
    try:
        yield
    except StateDirectoryError:
        raise
    except (OSError, *UNREADABLE) as error:  # podman-py's own are an OSError too
        raise SandboxUnavailableError(
            f"what answers at {url} ({how}) is not a working Podman: {describe_error(error)[-800:]}. See what "
            f"`podman --url {url} info` says; start that service anew, or name another one with CONTAINER_HOST"
        ) from error


def connect(url: str | None = None, environment: Mapping[str, str] = os.environ) -> PodmanConnection:
    """The first that answers of: ``url``, CONTAINER_HOST, the default of `podman system connection`, the user's own
    socket, the system's, and a service of our own.

    Raises:
        SandboxUnavailableError: there is no Podman, or what ``url`` or the environment names does not answer; or what
            answers is not Podman.
    """
    source = "the caller" if url else "CONTAINER_HOST"
    if named := url or environment.get("CONTAINER_HOST"):
        if urlsplit(named).scheme not in ("unix", "http+unix"):
            raise SandboxUnavailableError(
                f"{named}, which {source} names, is not a unix socket: the workspace's files have to be on the machine "
                "that runs the container; use unix:///path/to/podman.sock"
            )
        if not answers(named):
            raise SandboxUnavailableError(
                f"no Podman service answers at {named}, which {source} names; start it, or leave that out"
            )
        return PodmanConnection(named, source)
    for found, source in _usual(environment):
        if answers(found):
            return PodmanConnection(found, source)
    own = OwnService()
    try:
        return PodmanConnection(own.url, "started by ringfence, and ended with it", own)
    except BaseException:
        own.close()
        raise


def _usual(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    # A file that is not there, or that is not what it should be, names nothing.
    with suppress(OSError, AttributeError, KeyError, TypeError, ValueError):
        active = cast("Any", PodmanConfig()).active_service
        url = str(active.url.geturl()) if active else ""
        if url.startswith("unix:"):
            yield url, "the default of `podman system connection`"
    run = environment.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    yield f"unix://{run}/podman/podman.sock", "the user's own socket"
    yield "unix:///run/podman/podman.sock", "the system's socket"


def socket_path(url: str) -> str:
    parts = urlsplit(url)
    return unquote(parts.netloc + parts.path)


def answers(url: str) -> bool:
    """Whether a Podman service answers at a unix socket now."""
    # Looked at first by ourselves: podman-py leaves a socket open that nobody answers.
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PING_SECONDS)
        try:
            probe.connect(socket_path(url))
        except OSError:
            return False
    with suppress(Exception), PodmanClient(base_url=url, timeout=_PING_SECONDS) as client:
        return bool(client.ping())
    return False


class OwnService:
    """`podman system service` in a session of its own, which ends with this process, on a socket that only we reach."""

    def __init__(self) -> None:
        """
        Raises:
            SandboxUnavailableError: there is no Podman, or it does not start.
            StateDirectoryError: there is no place for its configuration.
        """
        if shutil.which("podman") is None:
            raise SandboxUnavailableError(f"there is no Podman on this machine: {INSTALL}")
        configuration = _configuration()  # before there is anything that would be left over
        is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_DIRECTORY_BYTES
        self._directory = tempfile.mkdtemp(prefix="ringfence-podman-", dir="/tmp" if is_long else None)  # noqa: S108
        self.url = f"unix://{self._directory}/{_SOCKET_NAME}"
        self._said = Path(self._directory, "said")
        with self._said.open("wb") as output:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", _SERVICE, "sh", self._directory, self.url],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**_environment(), "CONTAINERS_CONF": configuration},
                cwd=self._directory,  # what watches over containers leaves a file there when one is out of memory
                start_new_session=True,  # Ctrl-C is for us, not for what cleans up after us
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not answers(self.url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                words = self._said.read_text(errors="replace").strip()[-1000:]
                raise SandboxUnavailableError(
                    f"Podman is installed, but its service does not start: {words or 'it does not say why'}\n"
                    "see what `podman info` says"
                )
            time.sleep(0.01)

    def close(self) -> None:
        """Once is enough."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    """The variables that Podman reads, and no others: whoever looks at the service finds no secret of ours."""
    return {name: value for name, value in os.environ.items() if _OF_PODMAN.fullmatch(name)}


def _configuration() -> str:
    """The path of a containers.conf for a service of our own. It stays: what cleans up after a container reads it."""
    # More than our own hard limit would need a capability that small machines and containers do not have. (A build of
    # Podman 4.3 takes the higher of the two for both.)
    lowest = min(_bounded(resource.getrlimit(limit)[1]) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    limits = [f'"{name}={lowest}:{lowest}"' for name in ("nofile", "nproc")]
    engine = {"events_logger": "file"}
    if not os.path.isdir("/run/systemd/system"):
        engine["cgroup_manager"] = "cgroupfs"
    if not os.path.exists("/sys/fs/cgroup/cgroup.controllers") and shutil.which("runc"):
        engine["runtime"] = "runc"  # crun refuses a hierarchy that is half of version 1
    lines = ["[containers]", f"default_ulimits = [{', '.join(limits)}]", "log_size_max = 1048576"]
    lines += ["[engine]", "exit_command_delay = 10", *(f'{name} = "{value}"' for name, value in engine.items())]
    if any(os.path.exists(f"{place}/netavark") for place in _HELPERS):
        lines += ["[network]", 'network_backend = "netavark"']
    content = "\n".join(lines) + "\n"
    name = f"containers-{hashlib.sha256(content.encode()).hexdigest()[:12]}.conf"
    return write_once(os.path.join(podman_directory(), name), content)


def _bounded(limit: int) -> int:
    return _MOST_ULIMIT if limit == resource.RLIM_INFINITY else min(limit, _MOST_ULIMIT)


def _host(info: Mapping[str, Any]) -> Host:
    host = info["host"]
    controllers = host.get("cgroupControllers", _CONTROLLERS)  # not every version says
    return Host(
        rootless=bool(host["security"]["rootless"]),
        cgroup_version=str(host["cgroupVersion"]),
        runtime=str(host["ociRuntime"]["name"]),
        version=str(info["version"]["Version"]),
        unlimited=[words for name, words in _CONTROLLERS.items() if name not in controllers],
    )
