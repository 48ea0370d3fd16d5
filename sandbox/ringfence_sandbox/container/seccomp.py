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
from ringfence_sandbox.disk.places import podman_directory
from ringfence_sandbox.disk.state_files import write_once

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
# A process may ask these for any other of its user's: commands could starve the executor, or cut its limits.
_OF_ITSELF = ("sched_setattr", "sched_setparam", "sched_setscheduler")
# Where the host gives core dumps to a program, that runs as its root, whatever the limit is, but for a limit of 1.
_CORE = 4
_RESOURCES = 16
_LOW_BITS = 0xFFFF_FFFF  # the kernel looks at no others of a resource
# What a command makes belongs to the owner of the tree: a set-user-id program would be the owner's, root's perhaps.
_SET_USER_ID = 0o4000
_MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
_OPEN_FLAGS_AT = {"open": 1, "openat": 2}  # the mode comes next, and counts where a file is made
_MAKES_A_FILE = 0o100 | 0o20000000  # O_CREAT, and the bit of O_TMPFILE that is not O_DIRECTORY
_BY_ARGUMENT = frozenset(
    {
        "clone",
        "unshare",
        "socket",
        "setpriority",
        "ioprio_set",
        "setrlimit",
        "prlimit64",
        *_OF_ITSELF,
        *_MODE_AT,
        *_OPEN_FLAGS_AT,
    }
)
_UNSEEN = frozenset({"clone3", "openat2"})  # their arguments are where no filter sees them


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
    allowed: list[dict[str, Any]] = []
    for rule in stock["syscalls"]:
        includes: dict[str, list[str]] = rule.get("includes") or {}
        excludes: dict[str, list[str]] = rule.get("excludes") or {}
        here = not includes.get("arches") or _GO_NAMES.get(machine, machine) in includes["arches"]
        if rule["action"] != "SCMP_ACT_ALLOW" or includes.get("caps") or excludes.get("arches") or not here:
            continue
        names = [name for name in rule["names"] if name not in REFUSED | _BY_ARGUMENT | _UNSEEN]
        if names:
            allowed.append({"names": names, "action": "SCMP_ACT_ALLOW", "args": rule.get("args") or []})
    by_argument = [
        _rule("SCMP_ACT_ALLOW", "clone", [_argument("SCMP_CMP_MASKED_EQ", _NAMESPACES, 0)]),
        _rule("SCMP_ACT_ALLOW", "unshare", [_argument("SCMP_CMP_MASKED_EQ", _NAMESPACES | _NEW_TIME, 0)]),
        *(_rule("SCMP_ACT_ALLOW", "socket", [_argument("SCMP_CMP_EQ", family)]) for family in _FAMILIES),
        *(_rule("SCMP_ACT_ALLOW", name, [_argument("SCMP_CMP_EQ", 0)]) for name in _OF_ITSELF),
        _rule("SCMP_ACT_ALLOW", "setpriority", [_argument("SCMP_CMP_EQ", 0), _argument("SCMP_CMP_EQ", 0, index=1)]),
        _rule("SCMP_ACT_ALLOW", "ioprio_set", [_argument("SCMP_CMP_EQ", 1), _argument("SCMP_CMP_EQ", 0, index=1)]),
        _rule("SCMP_ACT_ERRNO", "ioprio_set", [_argument("SCMP_CMP_NE", 1)], _EPERM),
        _rule("SCMP_ACT_ERRNO", "ioprio_set", [_argument("SCMP_CMP_NE", 0, index=1)], _EPERM),
        *(_rule("SCMP_ACT_ERRNO", name, [_argument("SCMP_CMP_NE", 0)], _EPERM) for name in _OF_ITSELF),
        _rule("SCMP_ACT_ERRNO", "setpriority", [_argument("SCMP_CMP_NE", 0)], _EPERM),
        _rule("SCMP_ACT_ERRNO", "setpriority", [_argument("SCMP_CMP_NE", 0, index=1)], _EPERM),
        *(_rule("SCMP_ACT_ALLOW", name, [_no_bits(_SET_USER_ID, at)]) for name, at in _MODE_AT.items()),
        *(_rule("SCMP_ACT_ERRNO", name, [_bit(_SET_USER_ID, at)], _EPERM) for name, at in _MODE_AT.items()),
        *(_rule("SCMP_ACT_ALLOW", name, [_no_bits(_MAKES_A_FILE, at)]) for name, at in _OPEN_FLAGS_AT.items()),
        *(_rule("SCMP_ACT_ALLOW", name, [_no_bits(_SET_USER_ID, at + 1)]) for name, at in _OPEN_FLAGS_AT.items()),
        *_limits_but_of_cores(),
        # Who meets this asks clone, or openat, instead.
        *(_rule("SCMP_ACT_ERRNO", name, [], _ENOSYS) for name in sorted(_UNSEEN)),
        _rule("SCMP_ACT_ERRNO", "socket", [_argument("SCMP_CMP_GT", max(_FAMILIES))], _EAFNOSUPPORT),
    ]
    refused = {"names": sorted(REFUSED), "action": "SCMP_ACT_ERRNO", "errnoRet": _EPERM, "args": []}
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": _ENOSYS,  # as a kernel that does not know them: programs then take another way
        "architectures": [_ARCHITECTURES[machine]] if machine in _ARCHITECTURES else [],
        "syscalls": [*allowed, *by_argument, refused],
    }


def _limits_but_of_cores() -> Iterator[dict[str, Any]]:
    """A process may lower its own limits, but for that of core dumps: that seems to be done, and is not."""
    own = _argument("SCMP_CMP_EQ", 0)
    for resource in range(_RESOURCES):
        action = "SCMP_ACT_ERRNO" if resource == _CORE else "SCMP_ACT_ALLOW"
        code = 0 if resource == _CORE else None
        yield _rule(action, "setrlimit", [_argument("SCMP_CMP_MASKED_EQ", _LOW_BITS, resource)], code)
        which = _argument("SCMP_CMP_MASKED_EQ", _LOW_BITS, resource, index=1)
        if resource == _CORE:
            asked = _argument("SCMP_CMP_EQ", 0, index=2)
            yield _rule("SCMP_ACT_ALLOW", "prlimit64", [own, which, asked])
            which_new = [own, which, _argument("SCMP_CMP_NE", 0, index=2)]
            yield _rule(action, "prlimit64", which_new, code)
        else:
            yield _rule(action, "prlimit64", [own, which])
    yield _rule("SCMP_ACT_ERRNO", "prlimit64", [_argument("SCMP_CMP_NE", 0)], _EPERM)


def _rule(action: str, name: str, arguments: list[dict[str, Any]], code: int | None = None) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": [name], "action": action, "args": arguments}
    return rule if code is None else {**rule, "errnoRet": code}


def _no_bits(bits: int, index: int) -> dict[str, Any]:
    return _argument("SCMP_CMP_MASKED_EQ", bits, 0, index=index)


def _bit(bit: int, index: int) -> dict[str, Any]:
    return _argument("SCMP_CMP_MASKED_EQ", bit, bit, index=index)


def _argument(operator: str, value: int, value_two: int = 0, *, index: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": operator}
