"""What a container has mounted in its workspace and for it: mounts of the host, covers, and git's directories."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringfence.errors import SandboxUnavailableError
from ringfence.escapes import escape_path
from ringfence_sandbox.container.git_directories import Cover, GitDirectories
from ringfence_sandbox.container.isolation import WORKSPACE
from ringfence_workspace.tree.kernel import mounts_below
from ringfence_workspace.tree.places import podman_directory, write_once


def mounted_in(root: str) -> Sequence[str]:
    """The paths on the host of what is mounted in a workspace, from the outer to the inner."""
    return sorted({path for path in mounts_below(root) if path != root})


def show(root: str, path: str) -> dict[str, Any]:
    """A mount in the workspace as a container has it: to be read. What was written there could not be rolled back, and
    without it commands would write under it, where nobody looks."""
    target = f"{WORKSPACE}/{os.path.relpath(path, root)}"
    try:
        os.stat(path)
    except OSError:  # one of a user's own, such as with FUSE, which not even root sees
        return {"type": "tmpfs", "source": "tmpfs", "target": target, "size": "4k", "read_only": True}
    return {"type": "bind", "source": path, "target": target, "read_only": True}


def show_worktree(place: str, path: str) -> dict[str, Any]:
    """A linked worktree as a container has it: to be read. What was written there could not be rolled back.

    ``place`` is where the workspace is on the host, ``path`` the worktree in it."""
    return {"type": "bind", "source": os.path.join(place, path), "target": f"{WORKSPACE}/{path}", "read_only": True}


def cover(root: str, path: str) -> dict[str, Any]:
    """The mount of something empty and read-only on what is hidden. Raises SandboxUnavailableError."""
    return _empty(f"{WORKSPACE}/{path}", is_directory=os.path.isdir(os.path.join(root, path)))


def _empty(target: str, *, is_directory: bool) -> dict[str, Any]:
    try:
        target.encode()
    except UnicodeEncodeError:  # Podman would make a file with another name, and cover that
        path = escape_path(target.removeprefix(f"{WORKSPACE}/"))
        raise SandboxUnavailableError(
            f"{path} is hidden, and Podman cannot cover a name that is not UTF-8: rename it"
        ) from None
    empty = write_once(os.path.join(podman_directory(), "empty"), "")
    if is_directory:
        empty = os.path.join(podman_directory(), "empty-directory")
        os.makedirs(empty, exist_ok=True)
    return {"type": "bind", "source": empty, "target": target, "read_only": True}


def searchable(directory: str) -> bytes:
    """An archive that lets all users of a container search a directory of its image."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        entry = tarfile.TarInfo(directory)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o711
        tar.addfile(entry)
    return written.getvalue()


def git_mounts(git: GitDirectories, covers: Sequence[Cover], places: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The read-only mounts of git's directories outside of the workspace, and of what covers files in them."""
    for one in git.shown:
        yield {"type": "bind", "source": places[one.source], "target": one.target, "read_only": True}
    for covered in covers:
        mount = _empty(covered.target, is_directory=covered.is_directory)
        if covered.content:
            name = f"git-config-{hashlib.sha256(covered.content.encode()).hexdigest()[:16]}"
            mount["source"] = write_once(os.path.join(podman_directory(), name), covered.content)
        yield mount
