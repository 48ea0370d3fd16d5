"""Where the state of workspaces is kept, outside of them, under the user's state directory, and how it is written."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ringfence_workspace.tree.kernel import birth_ns, boot_id

if TYPE_CHECKING:
    from ringfence_workspace.tree.state import Json


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Generator[BinaryIO, None, None]:
    """A new file for `path`, which stands there, synced, when the block has ended without an error.

    The directory is the caller's to sync. Without ``sync`` a loss of power may leave something else there.
    """
    beside = path.with_name(f"tmp_{path.name}")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise not_written(error, str(path)) from error
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sync_directory(path: str | Path) -> None:
    """Have the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_once(path: str, content: str) -> str:
    """The path of a file with this content, whose name has the content's hash in it: written if it is not there."""
    if not os.path.exists(path):
        directory = os.path.dirname(path)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)  # also for who is not us in a container that has it mounted
        os.replace(file.name, path)
    return path


def kept_damaged(path: str, content: bytes) -> str:
    """The path of a copy of what a file of a store was before a part of it is cut off; an earlier one that is the same,
    if there is one. OSError: it could not be written."""
    copies = (f"{path}.damaged-{n}" for n in itertools.count(1))
    copy = next(copy for copy in copies if not os.path.exists(copy) or Path(copy).read_bytes() == content)
    try:
        with open(copy, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise not_written(error, copy) from error
    return copy


def not_written(error: OSError, path: str) -> OSError:
    """The error of a file of a store, with the file's name and what to do, where the system's says neither."""
    if error.errno is None or error.strerror != os.strerror(error.errno):
        return error
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    words = f"{os.strerror(error.errno)}: here the history is kept; {'make room, or ' if full else ''}{ELSEWHERE}"
    return OSError(error.errno, words, error.filename or path)


_ANOTHER = "name another place for it in the environment variable RINGFENCE_STATE_DIR"
ELSEWHERE = f"{_ANOTHER}, or a program with store="
"""What to do about a store that cannot be where it is, in words."""
_RELATIVE = (
    "the state of workspaces cannot be kept below a relative path, since it would not be found from another directory: "
    "give an absolute one in the environment variable RINGFENCE_STATE_DIR"
)


class StateDirectoryError(OSError):
    """The directory of all stores is unknown, or cannot be made."""


def state_directory() -> str:
    """The directory of all stores: RINGFENCE_STATE_DIR, else the user's state directory.

    Raises:
        StateDirectoryError: from another working directory it would be another one, with no history and no log.
    """
    chosen = os.environ.get("RINGFENCE_STATE_DIR")
    if not chosen:
        home = os.environ.get("XDG_STATE_HOME", "")  # which is to be ignored where it is relative
        if not os.path.isabs(home):
            home = os.path.join(os.path.expanduser("~"), ".local", "state")
        chosen = os.path.join(home, "ringfence")
    if not os.path.isabs(chosen):
        raise StateDirectoryError(errno.EINVAL, _RELATIVE, chosen)
    return os.path.normpath(chosen)


def is_only_host_declared() -> bool:
    """Whether RINGFENCE_ONLY_THIS_HOST says that no other host opens the workspaces that this one does."""
    return os.environ.get("RINGFENCE_ONLY_THIS_HOST") == "1"


def store_of(root: str) -> str:
    """The store of the workspace with the real path `root`."""
    return _store_below(state_directory(), root)


def _store_below(state: str, root: str) -> str:
    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    return os.path.join(state, "stores", name)


def is_gone_for_good(root: str) -> bool:
    """Whether a directory was removed. If the one above it is gone, too, a filesystem may only be unmounted."""
    return bool(root) and not os.path.lexists(root) and os.path.isdir(os.path.dirname(root))


def state_directory_of(store: str, root: str) -> str | None:
    """The state directory below which a store is that of the workspace with the real path `root`; None where it is
    another one's, or not there."""
    state = os.path.dirname(os.path.dirname(store))
    return state if store == _store_below(state, root) and os.path.isdir(store) else None


def store_directory(root: str | os.PathLike[str]) -> Path:
    """The directory of a workspace's history, and of what else is kept for its root. It need not exist.

    Raises:
        StateDirectoryError: as `state_directory`.
    """
    return Path(store_of(os.path.realpath(root)))


def podman_directory() -> str:
    """The directory of what containers of all workspaces share, made if it is not there. StateDirectoryError where it
    cannot be made."""
    place = os.path.join(state_directory(), "podman")
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
    except OSError as error:
        words = f"what containers need cannot be there ({error.strerror}): see to that, or {_ANOTHER}"
        raise StateDirectoryError(error.errno, words, place) from error
    return place


def made_outside(root: str, store: str) -> str:
    """The real path of a store, made if it is not there. ValueError where that is in the workspace;
    OSError where it cannot be made or written."""
    real = os.path.realpath(store)
    if real == root or real.startswith(root.rstrip("/") + "/"):
        raise ValueError(
            f"the store {store} is inside of the workspace {root}: what it keeps would be part of the tree; {ELSEWHERE}"
        )
    try:
        os.makedirs(real, mode=0o700, exist_ok=True)
    except OSError as error:
        raise unusable(real, error) from error
    if not os.access(real, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise unusable(real, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    return real


def unusable(store: str, error: OSError) -> OSError:
    """The error of a store that cannot be where it is to be, with what to do."""
    words = f"the store cannot be there ({error.strerror}): see to that, or {ELSEWHERE}"
    return OSError(error.errno, words, store)


def root_record(root: int) -> dict[str, Json]:
    """How an opened root is known again: inode and birth time; the device within one boot only."""
    found = os.fstat(root)
    return {"root": [found.st_ino, birth_ns(root), found.st_dev, boot_id()]}
