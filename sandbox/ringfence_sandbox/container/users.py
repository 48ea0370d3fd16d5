"""Who a container's user is on the host, so that what it does in a tree belongs to the tree's owner.

Never root: a container's user with the host's number 0 would be root for whatever escapes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from ringfence.errors import SandboxUnavailableError
from ringfence_sandbox.container.isolation import USER, Users
from ringfence_sandbox.container.owner_mount import IDS, exchanged, owner_mount, remove_leftovers
from ringfence_sandbox.container.podman_connection import Host

FIRST_ID = 2_000_000_000
"""Above what other programs give to containers; no account has a number from here on."""
MOUNTS = "/run/ringfence/mounts"


@contextmanager
def handed_over(root: str, host: Host) -> Generator[tuple[str, Users]]:
    """What to mount for `root` into a container that is started in the block, and who its users are.

    Raises:
        SandboxUnavailableError: what the container made would not belong to the owner of the tree.
    """
    owner = os.stat(root)
    if host.rootless:
        yield root, _rootless(root, owner)
        return
    with ExitStack() as stack:
        try:
            place = stack.enter_context(_mounted_for(root, owner))
        except OSError as error:
            if owner.st_uid == 0 or owner.st_gid == 0:
                raise SandboxUnavailableError(_no_mount(root, owner, str(error))) from error
            place, users = root, _as_owner(owner)
        else:
            users = _nobody()
        yield place, users


def _rootless(root: str, owner: os.stat_result) -> Users:
    if owner.st_uid != os.getuid():
        raise SandboxUnavailableError(
            f"{root} belongs to user {owner.st_uid}, and a rootless Podman's containers can only be user "
            f"{os.getuid()}: run as that user, or use the system's Podman (CONTAINER_HOST=unix:///run/podman/podman.sock)"
        )
    user = f"{os.getuid()}:{os.getgid()}"
    return Users(user, {"userns_mode": {"nsmode": "keep-id"}}, "rootless: the user's own number, in a user namespace")


def _mounted_for(root: str, owner: os.stat_result) -> AbstractContextManager[str]:
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "only root can mount it with other numbers")
    remove_leftovers(MOUNTS)
    users, groups = exchanged(FIRST_ID, USER, owner.st_uid), exchanged(FIRST_ID, USER, owner.st_gid)
    return owner_mount(root, MOUNTS, users, groups)


def _nobody() -> Users:
    # In one piece: Podman 4.3 cannot mount an image for maps of several.
    whole = [{"container_id": 0, "host_id": FIRST_ID, "size": IDS}]
    mapped = {"userns_mode": {"nsmode": "private"}, "idmappings": {"UIDMap": whole, "GIDMap": whole}}
    way = f"nobody on the host ({FIRST_ID + USER}), with a mount on which the owner's files are that user's"
    return Users(f"{USER}:{USER}", mapped, way)


def _as_owner(owner: os.stat_result) -> Users:
    user = f"{owner.st_uid}:{owner.st_gid}"
    return Users(user, {}, f"the owner ({user}), without a user namespace")


def _no_mount(root: str, owner: os.stat_result, why: str) -> str:
    return (
        f"{root} belongs to {owner.st_uid}:{owner.st_gid}, and what a container changes there could not be given to "
        f"root without making the container root ({why}): `chown -R` it to an ordinary user and group, or use Linux "
        "5.12 or newer with a filesystem that has idmapped mounts (ext4, xfs, btrfs), as root"
    )
