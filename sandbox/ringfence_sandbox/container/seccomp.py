"""The system calls of a sandbox: those of Podman's own profile that give no privileges and no other view."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringfence.errors import SandboxUnavailableError
from ringfence_workspace.tree.places import podman_directory, write_once

_STOCK = ("/etc/containers/seccomp.json", "/usr/share/containers/seccomp.json")
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ARCHITECTURES = {
    "x86_64": "SCMP_ARCH_X86_64",
    "aarch64": "SCMP_ARCH_AARCH64",
    "riscv64": "SCMP_ARCH_RISCV64",
    "ppc64le": "SCMP_ARCH_PPC64LE",
}
_GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}

REFUSED = frozenset(
    # Other processes, and what the kernel keeps for them.
    "ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp keyctl add_key request_key "
    # Other views of the machine.
    "setns mount umount umount2 mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick pivot_root chroot "
    "name_to_handle_at open_by_handle_at fanotify_init fanotify_mark quotactl quotactl_fd "
    # The kernel itself.
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register modify_ldt acct reboot syslog "
    "swapon swapoff init_module finit_module delete_module kexec_load kexec_file_load adjtimex clock_adjtime "
    "clock_settime settimeofday iopl ioperm sethostname setdomainname vhangup lookup_dcookie memfd_secret "
    "socketcall".split()
)
_NAMESPACES = 0x7E020000  # every CLONE_NEW* that clone takes
_NEW_TIME = 0x80  # of unshare only; clone has the exit signal there
_FAMILIES = (1, 2, 10, 16)  # UNIX, INET, INET6, NETLINK
# A process may ask these for any other of its user's: commands could starve the executor, or cut its limits. These are
# the arguments with which it asks for itself.
_OF_ITSELF = {
    "sched_setattr": (0,),
    "sched_setparam": (0,),
    "sched_setscheduler": (0,),
    "setpriority": (0, 0),
    "ioprio_set": (1, 0),
}
# Where the host gives core dumps to a program, that runs as its root, whatever the limit is, but for a limit of 1.
_CORE = 4
_RESOURCES = 16
_LOW_BITS = 0xFFFF_FFFF  # the kernel looks at no others of a resource
# What a command makes belongs to the owner of the tree: a set-user-id program would be the owner's, root's perhaps.
_SET_USER_ID = 0o4000
_MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
_OPEN_FLAGS_AT = {"open": 1, "openat": 2}  # the mode comes next, and counts where a file is made
_MAKES_A_FILE = 0o100 | 0o20000000  # O_CREAT, and the bit of O_TMPFILE that is not O_DIRECTORY
# Their arguments are where no filter sees them. Who meets this asks clone, or openat, instead.
_UNSEEN = ("clone3", "openat2")


def profile_path() -> str:
    """The profile as a file that Podman can read.

    Raises:
        SandboxUnavailableError: Podman's own profile is not on this machine.
    """
    stock = next((Path(place) for place in _STOCK if os.path.isfile(place)), None)
    if stock is None:
        raise SandboxUnavailableError(
            f"none of {' and '.join(_STOCK)} is there, which the sandbox's list of system calls is made of: install "
            "containers-common (Debian: golang-github-containers-common), or put Podman's seccomp.json there"
        )
    content = json.dumps(stricter(json.loads(stock.read_text()), platform.machine()), sort_keys=True)
    name = f"seccomp-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json"
    return write_once(os.path.join(podman_directory(), name), content)


def stricter(stock: dict[str, Any], machine: str) -> dict[str, Any]:
    """A profile for containers without capabilities, for the machine's own architecture alone: the calls of others
    have other numbers, and some of them take several calls' names as an argument."""
    judged = list(_by_argument())
    otherwise = REFUSED.union(*(rule["names"] for rule in judged))
    allowed: list[dict[str, Any]] = []
    for rule in stock["syscalls"]:
        includes: dict[str, list[str]] = rule.get("includes") or {}
        excludes: dict[str, list[str]] = rule.get("excludes") or {}
        here = not includes.get("arches") or _GO_NAMES.get(machine, machine) in includes["arches"]
        if rule["action"] != "SCMP_ACT_ALLOW" or includes.get("caps") or excludes.get("arches") or not here:
            continue
        if names := [name for name in rule["names"] if name not in otherwise]:
            allowed.append({"names": names, "action": "SCMP_ACT_ALLOW", "args": rule.get("args") or []})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _ENOSYS,  # as a kernel that does not know them: programs then take another way
        "architectures": [_ARCHITECTURES[machine]] if machine in _ARCHITECTURES else [],
        "syscalls": [*allowed, *judged, _refuse(sorted(REFUSED), _EPERM)],
    }


def _by_argument() -> Iterator[dict[str, Any]]:
    """The rules for calls that are refused with some arguments only."""
    yield _allow("clone", _no_bits(0, _NAMESPACES))
    yield _allow("unshare", _no_bits(0, _NAMESPACES | _NEW_TIME))
    for name in _UNSEEN:
        yield _refuse([name], _ENOSYS)
    for family in _FAMILIES:
        yield _allow("socket", _argument(0, "EQ", family))
    yield _refuse(["socket"], _EAFNOSUPPORT, _argument(0, "GT", max(_FAMILIES)))
    for name, arguments in _OF_ITSELF.items():
        yield _allow(name, *(_argument(at, "EQ", value) for at, value in enumerate(arguments)))
        for at, value in enumerate(arguments):
            yield _refuse([name], _EPERM, _argument(at, "NE", value))
    for name, at in _MODE_AT.items():
        yield _allow(name, _no_bits(at, _SET_USER_ID))
        yield _refuse([name], _EPERM, _argument(at, "MASKED_EQ", _SET_USER_ID, _SET_USER_ID))
    for name, at in _OPEN_FLAGS_AT.items():
        yield _allow(name, _no_bits(at, _MAKES_A_FILE))
        yield _allow(name, _no_bits(at + 1, _SET_USER_ID))
    # A process may lower its own limits, but for that of core dumps: that seems to be done, and is not.
    own = _argument(0, "EQ", 0)
    for resource in range(_RESOURCES):
        of_own = own, _argument(1, "MASKED_EQ", _LOW_BITS, resource)
        if resource == _CORE:
            yield _refuse(["setrlimit"], 0, _argument(0, "MASKED_EQ", _LOW_BITS, resource))
            yield _refuse(["prlimit64"], 0, *of_own, _argument(2, "NE", 0))
            yield _allow("prlimit64", *of_own, _argument(2, "EQ", 0))
        else:
            yield _allow("setrlimit", _argument(0, "MASKED_EQ", _LOW_BITS, resource))
            yield _allow("prlimit64", *of_own)
    yield _refuse(["prlimit64"], _EPERM, _argument(0, "NE", 0))


def _allow(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [*arguments]}


def _refuse(names: list[str], code: int, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": [*arguments]}


def _no_bits(index: int, bits: int) -> dict[str, Any]:
    return _argument(index, "MASKED_EQ", bits)


def _argument(index: int, operator: str, value: int, value_two: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": f"SCMP_CMP_{operator}"}
