"""How a container is shut in: what it is created with, and whether it came out so."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringfence_sandbox.container.seccomp import profile_path
from ringfence_sandbox.network.network import PREFIX, Network, allowed_hosts

if TYPE_CHECKING:
    from ringfence_sandbox.container.users import Users

PROXY_PORT = 3128
_PROXY = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), f"http://127.0.0.1:{PROXY_PORT}")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

WORKSPACE = "/workspace"
CONTROL = "/run/ringfence"
"""Where the executor's socket is in the container."""
EXECUTOR = "/run/executor.py"

CORE_BYTES = 1
"""No core has so little; and the kernel gives none to a program of the host with this limit, as it does with 0."""

_MIB = 1 << 20
_CPU_PERIOD_MICROSECONDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one container may take. What is in ``/tmp`` and ``/dev/shm`` counts as memory, and so does what commands
    have made in a workspace that is in memory itself, on a tmpfs."""

    memory_bytes: int = 1024 * _MIB
    tmp_bytes: int = 256 * _MIB
    processes: int = 512
    cpus: float = 1.0
    open_files: int = 4096
    file_bytes: int = 1024 * _MIB
    """The size of one file."""
    output_bytes: int = 64 * _MIB
    """How much of each stream of one command is kept."""
    free_disk_bytes: int = 1024 * _MIB
    """A command that leaves less space on the workspace's disk is ended."""
    free_inodes: int = 20_000

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not value > 0:  # `nan` is neither above nor below
                raise ValueError(f"the limit {name} is a number above 0, not {value!r}")
        if self.tmp_bytes > self.memory_bytes // 2:
            raise ValueError(
                f"tmp_bytes is at most half of memory_bytes, not {self.tmp_bytes} of {self.memory_bytes}: "
                "temporary files stay in memory after the command that made them, and the next one needs some too"
            )

    @property
    def shared_bytes(self) -> int:
        """For each of the other things that hold memory without a process: ``/dev/shm``, and System V's segments."""
        return min(64 * _MIB, self.memory_bytes // 8)


def options(
    *, image: str, workspace: str, control: str, executor: str, limits: SandboxLimits, network: Network, users: Users
) -> dict[str, Any]:
    """The arguments of podman-py's ``containers.create``, less name, labels and command.

    Many spellings are accepted there and do nothing; these are the ones that do.
    """
    allowed = allowed_hosts(network)
    proxy: dict[str, str] = {}
    if allowed is not None:
        direct = ",".join(host for host in _LOOPBACK if not allowed.ports(host))
        proxy = {**_PROXY, "NO_PROXY": direct, "no_proxy": direct}
    pids = limits.processes + 8  # the executor, and what comes and goes with it
    return {
        "image": image,
        "user": users.user,
        **users.options,
        "network_mode": "none" if proxy else network,
        "cap_drop": ["all"],
        "no_new_privileges": True,
        "seccomp_profile_path": profile_path(),
        "read_only": True,
        "read_write_tmpfs": False,
        "pids_limit": pids,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "cpu_period": _CPU_PERIOD_MICROSECONDS,
        "cpu_quota": max(1000, int(limits.cpus * _CPU_PERIOD_MICROSECONDS)),
        "ulimits": [
            _ulimit("nofile", resource.RLIMIT_NOFILE, limits.open_files),
            _ulimit("nproc", resource.RLIMIT_NPROC, 2 * pids),
            _ulimit("core", resource.RLIMIT_CORE, CORE_BYTES),
            _ulimit("fsize", resource.RLIMIT_FSIZE, limits.file_bytes),
        ],
        "shm_size": limits.shared_bytes,
        "sysctls": {
            "kernel.shmmax": str(limits.shared_bytes),
            "kernel.shmall": str(limits.shared_bytes // resource.getpagesize()),
            "kernel.msgmni": "64",
        },
        "mounts": [
            {"type": "bind", "source": workspace, "target": WORKSPACE},
            {"type": "bind", "source": control, "target": CONTROL, "read_only": True},
            {"type": "bind", "source": executor, "target": EXECUTOR, "read_only": True},
            {"type": "tmpfs", "source": "tmpfs", "target": "/tmp", "size": str(limits.tmp_bytes), "mode": "1777"},  # noqa: S108
        ],
        "image_volume_mode": "ignore",
        "cgroupns": "private",
        "ipc_mode": "private",
        "pid_mode": "private",
        "uts_mode": "private",
        "hostname": "sandbox",
        "environment": {"HOME": "/tmp", "container": "podman", **proxy},  # noqa: S108
        "use_config_proxy": False,
        "systemd": "false",
        "working_dir": "/",
        "log_config": {"Type": "none"},
        "stop_timeout": 0,
        "stop_signal": 9,
        "auto_remove": True,
    }


def _ulimit(name: str, limit: int, wanted: int) -> dict[str, Any]:
    """All of them are always given: with any, the server's own defaults are dropped. More than our own hard limit
    would need a privilege."""
    hard = resource.getrlimit(limit)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    return {"Name": name, "Soft": value, "Hard": value}


PROBE = """
import json, os, sys
def read(path):
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file: return file.read(65536)
    except OSError: return ""
group = [(line.split(":")[1], line.rstrip().split(":", 2)[2]) for line in read("/proc/self/cgroup").splitlines()]
def limit(controller, *names):
    top = "/sys/fs/cgroup"
    places = [top, top + "/" + controller]
    places += [top + ("/" + held if held else "") + path for held, path in group]
    for place in places:
        for name in names:
            found = read(place + "/" + name).strip()
            if found: return found
    return ""
print(json.dumps({
    "status": read("/proc/self/status"), "uids": read("/proc/self/uid_map"), "limits": read("/proc/self/limits"),
    "mounts": read("/proc/self/mounts"), "net": os.listdir("/sys/class/net"),
    "pids": limit("pids", "pids.max"),
    "memory": limit("memory", "memory.max", "memory.limit_in_bytes"),
    "swap": limit("memory", "memory.swap.max", "memory.memsw.limit_in_bytes"),
    "cpu": limit("cpu", "cpu.max", "cpu.cfs_quota_us"),
    "environment": read("/proc/self/environ"),
    "system": read("/etc/os-release"), "python": "%d.%d.%d" % sys.version_info[:3],
}))
"""
"""A program for the container's Python. What it prints is for `verified`."""


@dataclass(frozen=True, slots=True)
class Property:
    """One thing that a container promises, as it was found from inside."""

    name: str
    holds: bool
    found: str
    essential: bool = True
    """Whether a sandbox without it is refused; else it is only reported."""
    is_limit: bool = False
    """Whether it follows from the `SandboxLimits` of the container."""


def verified(printed: str, limits: SandboxLimits, network: Network, *, rootless: bool) -> Sequence[Property]:
    """What `PROBE` found, judged. ValueError where that is not what it prints."""
    return list(_judged(json.loads(printed), limits, network, rootless))


def environment(printed: str) -> Mapping[str, str]:
    """The variables that a container gives to every command, as `PROBE` found them."""
    words: list[str] = json.loads(printed)["environment"].split("\0")
    return {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def system(printed: str, *, has_python: bool) -> str:
    """The distribution and the Python of an image in words, as `PROBE` found them."""
    found = json.loads(printed)
    parts = [line.partition("=") for line in str(found["system"]).splitlines()]
    names = {key: value for key, _, value in parts}
    name = names.get("PRETTY_NAME", "").strip("\"'") or "a system without a name"
    return f"{name[:80]}, Python {found['python']}" if has_python else f"{name[:80]}, no Python"


def _judged(found: dict[str, Any], limits: SandboxLimits, network: Network, rootless: bool) -> Iterator[Property]:
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in found["status"].splitlines())}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        held = status.get(name, "unknown")
        yield Property(f"no capabilities ({name})", set(held) == {"0"}, held)
    yield Property("no new privileges", status.get("NoNewPrivs") == "1", status.get("NoNewPrivs", "unknown"))
    yield Property("system calls filtered", status.get("Seccomp") == "2", status.get("Seccomp", "unknown"))
    user = status.get("Uid", "").split()
    yield Property("not root", bool(user) and "0" not in user, " ".join(user))
    yield Property("users mapped to nobody's", *_mapped(found["uids"], user, rootless), essential=False)
    mounts = {words[1]: words for words in (line.split(" ") for line in found["mounts"].splitlines()) if len(words) > 3}
    yield _mounted("read-only root", mounts, "/", "ro")
    yield _mounted("read-only control directory", mounts, CONTROL, "ro")
    size = f"size={limits.tmp_bytes // 1024}k"
    yield _mounted(f"/tmp of {limits.tmp_bytes >> 20} MiB", mounts, "/tmp", size, is_limit=True)  # noqa: S108
    if network == "none" or network.startswith(PREFIX):
        others = sorted(set(found["net"]) - {"lo"})
        yield Property("no network", not others, ", ".join(others) or "only lo")
    hard = {line[:26].strip(): line[26:].split() for line in found["limits"].splitlines()[1:]}
    for name, most in (
        ("Max core file size", CORE_BYTES),
        ("Max file size", limits.file_bytes),
        ("Max open files", limits.open_files),
        ("Max processes", 2 * (limits.processes + 8)),
    ):
        value = hard.get(name, ["unknown", "unknown"])[1]
        yield Property(name.lower(), value.isdecimal() and int(value) <= most, value, is_limit=True)
    for name, key, most in (
        ("limit of processes", "pids", limits.processes + 8),
        ("limit of memory", "memory", limits.memory_bytes),
        ("limit of memory and swap", "swap", limits.memory_bytes),
        ("limit of processor time", "cpu", max(1000, int(limits.cpus * _CPU_PERIOD_MICROSECONDS))),
    ):
        words = str(found[key]).split()
        holds = bool(words) and words[0].isdecimal() and int(words[0]) <= most
        # Without the swap controller a kernel has no number for it: it is then the machine's own swap.
        yield Property(name, holds, " ".join(words) or "none", essential=False, is_limit=True)


def _mapped(text: str, user: Sequence[str], rootless: bool) -> tuple[bool, str]:
    """Whether there is a map, and it does not make the container's user the host's root. (Of a rootless Podman it leads
    into a namespace in which the user of the host has the number 0.)"""
    maps = [tuple(map(int, line.split())) for line in text.splitlines()]
    inside = int(user[0]) if user else -1
    outside = [first + inside - start for start, first, count in maps if start <= inside < start + count]
    mapped = maps != [(0, 0, 4294967295)] and len(outside) == 1 and (rootless or outside[0] != 0)
    return mapped, f"{inside} is {outside[0] if outside else 'nobody'}"


def _mounted(
    name: str, mounts: Mapping[str, Sequence[str]], place: str, option: str, *, is_limit: bool = False
) -> Property:
    found = mounts.get(place)
    holds = found is not None and option in found[3].split(",")
    return Property(name, holds, found[3] if found else "not mounted", is_limit=is_limit)
