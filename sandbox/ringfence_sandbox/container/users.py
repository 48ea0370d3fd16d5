"""Who a container's user is on the host, so that what it does in a tree belongs to the tree's owner.

Never root: a container's user with the host's number 0 would be root for whatever escapes. So a container's users are
nobody on the host, and an idmapped mount (mount_setattr, Linux 5.12 and newer, as root) shows them the owner's files as
their own, and gives what they make to the owner.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringfence.errors import SandboxUnavailableError
from ringfence_workspace.call_process import is_orphan, own_label
from ringfence_workspace.tree.kernel import libc, raised

if TYPE_CHECKING:
    from ringfence_sandbox.container.connection import Host

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on every architecture
_CLONE = 1
_EMPTY_PATH = 0x1000
_FROM_EMPTY_PATH = 0x04
_IDMAP, _NOSUID, _NODEV = 0x100000, 0x2, 0x4
_MNT_DETACH, _NOFOLLOW = 2, 8
_AT_FDCWD = -100
IDS = 65536

IdMap = tuple[int, int, int]
"""First id inside, first id outside, how many."""


def swapped_ids(ids: int, shown: int, owner: int) -> Sequence[IdMap]:
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
def owner_mount(tree: str, users: Sequence[IdMap], groups: Sequence[IdMap]) -> Generator[str]:
    """The path of a directory in `MOUNTS` on which `tree` is mounted with other numbers. The mount ends with the block;
    a container that has it by then keeps it.

    Raises:
        OSError: the kernel, the filesystem or the privileges do not allow it.
    """
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "only root can mount it with other numbers")
    os.makedirs(MOUNTS, mode=0o700, exist_ok=True)
    for name in os.listdir(MOUNTS):  # of the killed
        if is_orphan(name.rpartition("-")[0]):
            with suppress(OSError):  # not mounted: killed before it was
                _unmount(os.path.join(MOUNTS, name))
            with suppress(OSError):
                os.rmdir(os.path.join(MOUNTS, name))
    target = os.path.join(MOUNTS, f"{own_label()}-{os.urandom(4).hex()}")
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


@contextmanager
def _namespace(users: Sequence[IdMap], groups: Sequence[IdMap]) -> Generator[int]:
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


USER = 1000
"""Who commands run as, as the container numbers its users."""
FIRST_ID = 2_000_000_000
"""Above what other programs give to containers; no account has a number from here on."""
MOUNTS = "/run/ringfence/mounts"


@dataclass(frozen=True, slots=True)
class Users:
    """Which numbers on the host a container's users are; none where the service itself does it (rootless)."""

    user: str
    """Whom commands run as."""
    options: Mapping[str, Any]
    """What of it the container is created with."""
    description: str
    """In words."""


@contextmanager
def mapped_for_owner(root: str, host: Host, also: Sequence[str] = ()) -> Generator[tuple[Mapping[str, str], Users]]:
    """What to mount for `root` and each directory of ``also`` into a container that is started in the block, and who
    its users are. What of ``also`` cannot be mounted for them is left out.

    Raises:
        SandboxUnavailableError: what the container made would not belong to the owner of the tree.
    """
    owner = os.stat(root)
    unmapped = {tree: tree for tree in (root, *also)}
    if host.rootless:
        if owner.st_uid != os.getuid():
            raise SandboxUnavailableError(
                f"{root} belongs to user {owner.st_uid}, and a rootless Podman's containers can only be user "
                f"{os.getuid()}: run as that user, or use the system's Podman "
                "(CONTAINER_HOST=unix:///run/podman/podman.sock)"
            )
        description = "rootless: the user's own number, in a user namespace"
        yield unmapped, Users(f"{os.getuid()}:{os.getgid()}", {"userns_mode": {"nsmode": "keep-id"}}, description)
        return
    maps = [swapped_ids(FIRST_ID, USER, number) for number in (owner.st_uid, owner.st_gid)]
    with ExitStack() as stack:
        try:
            places = {root: stack.enter_context(owner_mount(root, *maps))}
        except OSError as error:
            user = f"{owner.st_uid}:{owner.st_gid}"
            if 0 in (owner.st_uid, owner.st_gid):
                raise SandboxUnavailableError(
                    f"{root} belongs to {user}, and what a container changes there could not be given to root without "
                    f"making the container root ({error}): `chown -R` it to an ordinary user and group, or use Linux "
                    "5.12 or newer with a filesystem that has idmapped mounts (ext4, xfs, btrfs), as root"
                ) from error
            places, users = unmapped, Users(user, {}, f"the owner ({user}), without a user namespace")
        else:
            # In one piece: Podman 4.3 cannot mount an image for maps of several.
            whole = [{"container_id": 0, "host_id": FIRST_ID, "size": IDS}]
            mapped = {"userns_mode": {"nsmode": "private"}, "idmappings": {"UIDMap": whole, "GIDMap": whole}}
            description = (
                f"nobody on the host ({FIRST_ID + USER}), with a mount on which the owner's files are that user's"
            )
            users = Users(f"{USER}:{USER}", mapped, description)
            for tree in also:
                with suppress(OSError):
                    places[tree] = stack.enter_context(owner_mount(tree, *maps))
        yield places, users
