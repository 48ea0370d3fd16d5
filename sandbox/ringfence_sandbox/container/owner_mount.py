"""A second mount of a tree on which its owner has another number: what a container does there, the owner has done.

A container's users are nobody on the host. Files of the tree belong to somebody, root often. This mount (mount_setattr
with MOUNT_ATTR_IDMAP, Linux 5.12 and newer, as root) shows files of the owner as a container's user's, and gives files
of that user to the owner.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from ringfence_sandbox.disk.call_process import is_orphan, own_label
from ringfence_sandbox.disk.kernel import libc, raised

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_CLONE = 1
_EMPTY_PATH = 0x1000
_FROM_EMPTY_PATH = 0x04
_IDMAP, _NOSUID, _NODEV = 0x100000, 0x2, 0x4
_MNT_DETACH, _NOFOLLOW = 2, 8
_AT_FDCWD = -100
IDS = 65536
_NEVER = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})

Mapping = tuple[int, int, int]
"""First id inside, first id outside, how many."""


def exchanged(ids: int, shown: int, owner: int) -> Sequence[Mapping]:
    """All ids moved up by `ids`, but those of `owner` and `shown` exchanged: what `owner` has on disk is shown as
    ``ids + shown``."""
    if owner == shown:
        return [(0, ids, IDS)]
    low, high = sorted((shown, owner))
    parts = [
        (0, ids, low),
        (low, ids + high, 1),
        (low + 1, ids + low + 1, high - low - 1),
        (high, ids + low, 1),
        (high + 1, ids + high + 1, IDS - high - 1),
    ]
    return [part for part in parts if part[2]]


@contextmanager
def owner_mount(tree: str, place: str, users: Sequence[Mapping], groups: Sequence[Mapping]) -> Generator[str]:
    """The path of a directory in `place` on which `tree` is mounted with other numbers. The mount ends with the block;
    a container that has it by then keeps it.

    Raises:
        OSError: the kernel, the filesystem or the privileges do not allow it.
    """
    os.makedirs(place, mode=0o700, exist_ok=True)
    target = os.path.join(place, f"{own_label()}-{os.urandom(4).hex()}")
    os.mkdir(target, 0o700)
    try:
        with _namespace(users, groups) as namespace:
            _mount(tree, target, namespace)
        try:
            yield target
        finally:
            _unmount(target)
    finally:
        os.rmdir(target)


def remove_leftovers(place: str) -> None:
    """Unmount what the killed have left in `place`."""
    for name in os.listdir(place) if os.path.isdir(place) else ():
        if is_orphan(name.rpartition("-")[0]):
            target = os.path.join(place, name)
            with suppress(OSError):  # not mounted: killed before it was
                _unmount(target)
            with suppress(OSError):
                os.rmdir(target)


@contextmanager
def _namespace(users: Sequence[Mapping], groups: Sequence[Mapping]) -> Generator[int]:
    """A descriptor of a user namespace with these maps: a mount takes its maps from one."""
    child = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", "echo; read -r _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        if child.stdout.read(1) != b"\n":
            raise OSError(errno.EPERM, "`unshare --user` makes no user namespace")
        for name, maps in (("uid_map", users), ("gid_map", groups)):
            with open(f"/proc/{child.pid}/{name}", "w") as file:
                file.write("".join(f"{inside} {outside} {count}\n" for inside, outside, count in maps))
        descriptor = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _mount(tree: str, target: str, namespace: int) -> None:
    call = libc().syscall
    descriptor: int = call(_OPEN_TREE, _AT_FDCWD, os.fsencode(tree), _CLONE | os.O_CLOEXEC)
    if descriptor < 0:
        raise raised(tree)
    try:
        wanted = struct.pack("=QQQQ", _IDMAP | _NOSUID | _NODEV, 0, 0, namespace)
        size = ctypes.c_size_t(len(wanted))
        if call(_MOUNT_SETATTR, descriptor, b"", _EMPTY_PATH, wanted, size) != 0:
            raise raised(tree)
        if call(_MOVE_MOUNT, descriptor, b"", _AT_FDCWD, os.fsencode(target), _FROM_EMPTY_PATH) != 0:
            raise raised(target)
    finally:
        os.close(descriptor)


def _unmount(target: str) -> None:
    if libc().umount2(os.fsencode(target), _MNT_DETACH | _NOFOLLOW) != 0:
        raise raised(target)
