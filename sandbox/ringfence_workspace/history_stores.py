"""The stores on this machine: which directory each is of, how large it is, and how to be rid of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ringfence.errors import RingfenceError, WorkspaceLockedError
from ringfence_workspace.forks.fork_records import borrowing_forks, own_fork
from ringfence_workspace.history.store import FOLDER, Store
from ringfence_workspace.history.store_roots import recorded_path, replaced
from ringfence_workspace.locking import describe_holder
from ringfence_workspace.transaction.interrupted_calls import unfinished_call
from ringfence_workspace.tree.places import is_gone_for_good, state_directory, store_of

_ONLY_COPIES = ("kept", "outputs")
"""The folders of a store with files that exist nowhere else: what conflicts and full outputs left."""
_UNUSED = timedelta(days=1)
"""How long nobody has used a store that is deleted by itself."""


@dataclass(frozen=True, slots=True)
class HistoryStore:
    """The history of one workspace, and what else is kept for it.

    ``root`` is the real path of the directory, empty if the store does not say it. ``root_is_gone`` says that nothing
    is there, ``root_is_replaced`` that another directory is. ``source`` is what it is a fork of, empty if it is none.
    """

    path: Path
    root: str
    root_is_gone: bool
    root_is_replaced: bool
    size_bytes: int
    used_at: datetime
    source: str = ""


def stores() -> Sequence[HistoryStore]:
    """Return the stores of the state directory, the largest first.

    Raises:
        StateDirectoryError: the state directory is unknown.
        OSError: it cannot be read.
    """
    place = Path(state_directory(), "stores")
    paths = [place / name for name in os.listdir(place)] if place.exists() else ()
    found = [_described(path) for path in paths if (path / FOLDER).exists()]
    return sorted(found, key=lambda store: (-store.size_bytes, store.root))


def forget_store(store: HistoryStore, *, keep: Collection[str] = ()) -> None:
    """Delete a store, except for the files in it that `keep` names.

    Its steps cannot be undone afterwards. The files of its workspace stay as they are.

    Raises:
        WorkspaceLockedError: a process has the workspace open.
        ValueError: a killed call is still to be rolled back, for which the store is needed, or forks borrow from it.
        OSError: a part of the store cannot be deleted.
    """
    call = None if store.root_is_gone else unfinished_call(store.root, os.fspath(store.path))
    if call is not None and not call.is_running:
        raise ValueError(f"in {store.root}, {call}; do that first")
    borrowing = borrowing_forks(os.fspath(store.path))
    if borrowing:
        raise ValueError(f"a fork of {store.root} borrows from it: discard {', '.join(borrowing)} first")
    with _locked(store):
        # In this order an interrupted deletion leaves a store without steps, and no damaged one.
        with suppress(FileNotFoundError):
            os.replace(store.path / FOLDER, store.path / f"{FOLDER}.forgotten")
        for entry in list(os.scandir(store.path)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in keep:
                os.unlink(entry.path)
        with suppress(OSError):  # it has what is to be kept
            store.path.rmdir()


def begin_temporary_store(root: str, store: str) -> None:
    """Mark a store of a directory in the temporary directory, and delete those of such directories that were removed.
    Nothing is done for another directory. Never fails.

    A store stays for a day after its last use. It stays if a step has a name, if it has files that exist nowhere else,
    and if the parent of its directory is gone, too: a filesystem may only be unmounted.
    """
    if not root.startswith(f"{os.path.realpath(tempfile.gettempdir())}/") or store != store_of(root):
        return
    with suppress(OSError):
        _marks().mkdir(mode=0o700, parents=True, exist_ok=True)
        for mark in list(_marks().iterdir()):
            path = Path(state_directory(), "stores", mark.name)
            # What cannot be looked at, or is in use, stays.
            with suppress(OSError, ValueError, LookupError, RingfenceError):
                if not path.exists():
                    mark.unlink()
                elif is_gone_for_good(recorded_path(path)) and not _is_worth_keeping(path):
                    gone = _described(path)
                    if gone.used_at < datetime.now(UTC) - _UNUSED:
                        forget_store(gone)
        (_marks() / os.path.basename(store)).touch(0o600)


def _marks() -> Path:
    return Path(state_directory(), "temporary")


def _is_worth_keeping(path: Path) -> bool:
    with Store.open(path / FOLDER, writable=False) as history:
        return bool(history.kept()) or any(any(path.glob(f"{name}/*")) for name in _ONLY_COPIES)


def _described(path: Path) -> HistoryStore:
    size, used = 0, path.lstat().st_mtime
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # a file that ends just now
                found = os.lstat(os.path.join(directory, name))
                size, used = size + found.st_blocks * 512, max(used, found.st_mtime)
    root = recorded_path(path)
    is_gone = bool(root) and not os.path.isdir(root)
    is_replaced = replaced(root, os.fspath(path))
    fork = own_fork(os.fspath(path))
    source = "" if fork is None else fork.source
    return HistoryStore(path, root, is_gone, is_replaced, size, datetime.fromtimestamp(used, UTC), source)


@contextmanager
def _locked(store: HistoryStore) -> Generator[None]:
    """Hold the lock of the store, so that nobody opens the workspace meanwhile."""
    with (store.path / "holder").open("ab") as holder:
        try:
            fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = describe_holder(os.fspath(store.path))
            raise WorkspaceLockedError(store.root or str(store.path), busy) from None
        yield
