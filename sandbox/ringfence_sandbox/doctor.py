"""Tries what a sandbox promises on this machine, for real, and says what works and what to do about the rest.

`examine_sandbox` starts a container over a small tree of its own and attacks it from inside.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.connection import INSTALL, PodmanConnection, connect
from ringfence_sandbox.container.images import DEFAULT_RECIPE, built, recipe
from ringfence_sandbox.container.isolation import SandboxLimits
from ringfence_sandbox.podman import PodmanSandbox
from ringfence_workspace.host import HostFilesystem

_TRIES = 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of `examine_sandbox`. ``advice`` says what to do if it does not work."""

    name: str
    works: bool
    found: str
    advice: str = ""


# Each is a function that must not succeed in the container; what it does where it can is harmless.
ATTACKS = """
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def function(name, *arguments):
    if getattr(libc, name)(*arguments) < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def write(path, text="1"):
    with open(path, "w") as file: file.write(text)
def reach():
    with socket.create_connection(("192.0.2.1", 9), 1): pass
attacks = {
    "writing to the image": lambda: write("/usr/bin/attack"),
    "writing to /proc/sys": lambda: write("/proc/sys/kernel/hostname", "attack"),
    "writing to /sys": lambda: write("/sys/kernel/mm/transparent_hugepage/enabled", "always"),
    "becoming root": lambda: os.setuid(0),
    "a user namespace": lambda: function("unshare", 0x10000000),
    "a mount namespace": lambda: function("unshare", 0x20000),
    "mounting": lambda: function("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "tracing the first process": lambda: function("ptrace", 16, 1, 0, 0),
    "reading the first process's memory": lambda: open("/proc/1/mem", "rb").close(),
    "the keyring": lambda: function("syscall", {"x86_64": 250}.get(os.uname().machine, 219), 0, -3, 1),
    "a socket to the hypervisor": lambda: socket.socket(40, socket.SOCK_STREAM).close(),
    "a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
    "a device": lambda: os.mknod("/tmp/attack", 0o60666, os.makedev(8, 0)),
    "the network": reach,
}
held = {}
for name, attack in attacks.items():
    try: attack()
    except Exception as error: held[name] = [True, str(error)]
    else: held[name] = [False, "it succeeded"]
print(json.dumps(held))
"""


def examine_sandbox(image: str | None = None, url: str | None = None) -> Iterator[Finding]:
    """Try on this machine what a sandbox promises, and yield each finding as it is made. No image is built."""
    program = shutil.which("podman")
    yield Finding("Podman is installed", program is not None, program or "no program `podman`", INSTALL)
    try:
        connection = connect(url)
    except SandboxUnavailableError as error:
        yield Finding("Podman's service answers", False, str(error), "see above")
        return
    with connection:
        host = connection.host
        yield Finding(
            "Podman's service answers",
            True,
            f"{connection.how}: Podman {host.version}, {host.runtime}, "
            f"{'rootless' if host.rootless else 'rootful'}, cgroups {host.cgroup_version}",
        )
        limited = "memory, processes and processor time"
        unlimited = host.describe_unlimited()
        yield Finding("Podman knows how to limit containers", not unlimited, unlimited or limited, "see above")
        wanted = image or built(connection, recipe(DEFAULT_RECIPE))
        exists = wanted is not None and bool(connection.client.images.exists(wanted))
        advice = f"`podman pull {image}`" if image else "`ringfence sandbox build`"
        yield Finding("the image is there", exists, wanted or "the default image is not built yet", advice)
        if exists:
            with tempfile.TemporaryDirectory(prefix="ringfence-doctor-") as place:
                yield from _in_a_container(connection, wanted, Path(place))


def _in_a_container(connection: PodmanConnection, image: str | None, place: Path) -> Iterator[Finding]:
    root = place / "workspace"
    root.mkdir(mode=0o700)
    limits = SandboxLimits(memory_bytes=256 * _MIB, tmp_bytes=32 * _MIB, processes=64)
    with (
        HostFilesystem(root, store=place / "store") as files,
        PodmanSandbox(
            root, image=image, limits=limits, filesystem=files, connection=connection, strict=False
        ) as sandbox,
    ):
        begun = time.perf_counter()
        try:
            container = sandbox.start()
        except SandboxUnavailableError as error:
            yield Finding("a container starts", False, str(error), "see above")
            return
        took = time.perf_counter() - begun
        yield Finding("a container starts", True, f"in {took:.2f} s; for this trial with lower limits than usual")
        yield Finding("what the image has", True, container.system)
        for found in container.properties:
            name = f"{found.name}, in this trial" if found.is_limit else found.name  # not the usual one
            yield Finding(name, found.holds, found.found[:60], _ADVICE if not found.essential else _REPORT)
        attacked = sandbox.run([*container.python.argv, "-c", ATTACKS])
        if attacked.exit_code == 0:
            for name, (held, said) in json.loads(attacked.stdout).items():
                yield Finding(f"refused: {name}", held, said, _REPORT)
        else:
            yield Finding("attacks from inside", False, attacked.stderr[-300:], _REPORT)
        yield _owner(sandbox, root)
        yield from _limits(sandbox)
        yield _speed(sandbox)


_REPORT = "do not run what you do not trust here; a newer Podman, runtime or kernel may do it"
_ADVICE = (
    "the machine's cgroups do not let this Podman limit it: use cgroups version 2 with delegation, or the system's "
    "Podman (CONTAINER_HOST=unix:///run/podman/podman.sock)"
)


def _owner(sandbox: PodmanSandbox, root: Path) -> Finding:
    (root / "secret").write_text("mine\n")
    (root / "secret").chmod(0o600)
    done = sandbox.run("cat secret && echo yours > made && mkdir made.d")
    before = root.stat()
    owners = {(found.stat().st_uid, found.stat().st_gid) for found in root.iterdir()}
    works = done.exit_code == 0 and owners == {(before.st_uid, before.st_gid)}
    found = (
        f"{sandbox.start().users}; what is made belongs to {', '.join(f'{uid}:{gid}' for uid, gid in sorted(owners))}"
    )
    return Finding(
        "files belong to the tree's owner", works, found if works else f"{found}; {done.stderr[-200:]}", _REPORT
    )


def _limits(sandbox: PodmanSandbox) -> Iterator[Finding]:
    hog = sandbox.run([*sandbox.start().python.argv, "-c", "held = bytearray(1 << 30); print(len(held))"])
    yield Finding("memory is limited", hog.exit_code != 0, f"1 GiB asked for: exit code {hog.exit_code}", _ADVICE)
    forks = sandbox.run("i=0; while [ $i -lt 200 ]; do sleep 5 & i=$((i+1)); done; wait", timeout_seconds=4)
    refused = "fork" in forks.stderr
    yield Finding("processes are limited", refused, forks.stderr.strip()[:60] or "200 started", _ADVICE)
    filled = sandbox.run("head -c 64M /dev/zero > /tmp/fill; code=$?; rm -f /tmp/fill; exit $code")
    yield Finding(
        "the space for temporary files is limited",
        filled.exit_code != 0,
        filled.stderr.strip()[:60] or "64 MiB fit",
        _REPORT,
    )
    left = sandbox.run("(trap '' TERM; while :; do date > late; done) >/dev/null 2>&1 & sleep 0.1; exit 0")
    root = Path(sandbox.filesystem.root)
    before = root.joinpath("late").stat().st_mtime_ns
    time.sleep(0.1)
    ended = left.exit_code == 0 and before == root.joinpath("late").stat().st_mtime_ns
    yield Finding("a background process ends with its command", ended, "it no longer writes", _REPORT)


def _speed(sandbox: PodmanSandbox) -> Finding:
    took: list[float] = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        sandbox.run(["true"])
        took.append(time.perf_counter() - begun)
    return Finding("a command", True, f"{sorted(took)[_TRIES // 2] * 1000:.1f} ms, its transaction included")
