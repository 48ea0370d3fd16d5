"""Stores go by the path of their workspace. A note in each says which directory that was, so that one that got another
path is known again, and its owner told where its history and policies are."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ringfence_sandbox.disk.kernel import birth_ns
from ringfence_sandbox.disk.places import state_directory, store_of
from ringfence_sandbox.disk.state_files import replacing

_NAME = "root"


@dataclass(frozen=True, slots=True)
class _Root:
    """A directory: its path when it was noted, its inode, and when that was made, in nanoseconds. ``before`` is the
    store that it had under another path."""

    path: str
    inode: int
    born_ns: int
    before: str = ""

    def is_still_there(self) -> bool:
        now = _look(self.path)
        return now is not None and (now.inode, now.born_ns) == (self.inode, self.born_ns)


def replaced(root: str, store: str) -> bool:
    """Whether another directory has come in the place of the one that a store says it is of."""
    now, noted = _look(root), _read(Path(store))
    if now is None or noted is None or noted.path != now.path:
        return False
    return (noted.inode, noted.born_ns) != (now.inode, now.born_ns)


def record_root(root: str | os.PathLike[str], store: str | None = None, *, opened: bool = False) -> None:
    """Record in a store, if it exists, which directory it belongs to. Never fails.

    ``store`` is the default one of the root if it is left out. An existing record is replaced only by who has
    ``opened`` the workspace, because the history has to record the replacement first.
    """
    root = os.path.realpath(root)
    store = store or store_of(root)
    now, noted = _look(root), _read(Path(store))
    if now is None or (noted is not None and noted.path == now.path and not (opened and replaced(root, store))):
        return
    before = "" if noted is not None and noted.inode == now.inode else _search(now)
    with suppress(OSError), replacing(Path(store, _NAME)) as file:
        file.write(json.dumps([now.path, now.inode, now.born_ns, before]).encode())
    with suppress(OSError):
        if store == store_of(now.path):
            link = _link(now)
            os.makedirs(os.path.dirname(link), mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                os.unlink(link)
            os.symlink(store, link)


def recorded_path(store: Path) -> str:
    """Return the path of the directory that a store is of. Empty if the store does not say it."""
    noted = _read(store)
    return noted.path if noted is not None else ""


def is_gone(store: Path) -> bool:
    """Whether there is no directory at the path that a store is of."""
    noted = _read(store)
    return noted is not None and _look(noted.path) is None


def drop_link(store: Path) -> None:
    """Remove the link that leads from a directory, wherever it is now, to a store that is to be deleted."""
    noted = _read(store)
    if noted is not None:
        with suppress(OSError):
            if os.readlink(_link(noted)) == str(store):
                os.unlink(_link(noted))


def describe_moved_root(root: str | os.PathLike[str], *, copied: bool = False) -> str | None:
    """Describe to a person that a directory was moved, or came in the place of another one; None if neither is so.

    Its history and policies are then kept for another path, or are those of another directory. A root that is only
    ``copied`` has no use for the history.
    """
    root = os.fspath(root)
    now, store = _look(os.path.realpath(root)), store_of(os.path.realpath(root))
    if now is None:
        return None
    if replaced(now.path, store):
        if copied:
            file = f"`ringfence policies file {shlex.quote(root)}`"
            return f"{root} is another directory than the one that was here before: policies in {file} hold for it, too"
        return (
            f"{root} is another directory than the one that its history began with, in the same place: what differs is "
            "taken in as somebody else's, and a restore to a step before brings back the files of the other one; "
            f"to begin anew, without that history and its owner's policies: {_aside(store, 'before')}"
        )
    noted = _read(Path(store))
    before = _search(now) if noted is None else noted.before
    was = _read(Path(before)) if before else None
    if was is None or was.inode != now.inode or was.is_still_there():
        return None
    take = f"mv {shlex.quote(before)} {shlex.quote(store)}"
    if os.path.exists(store):
        take = f"{_aside(store, 'new')}; {take}"
    return (
        f"{root} was {was.path} before: its history, and the policies in its owner's file, are kept for that path, and "
        f"do not hold here. To take them along: {take}"
    )


def _aside(store: str, why: str) -> str:
    """The command that moves a store to where nobody looks for one, and nothing is yet."""
    places = itertools.chain([f"{store}.{why}"], (f"{store}.{why}{number}" for number in itertools.count(2)))
    return f"mv {shlex.quote(store)} {shlex.quote(next(place for place in places if not os.path.lexists(place)))}"


def _search(now: _Root) -> str:
    """The store of a directory that had another path."""
    with suppress(OSError):
        store = os.readlink(_link(now))
        noted = _read(Path(store))
        if noted is not None and (noted.inode, noted.born_ns) == (now.inode, now.born_ns) and noted.path != now.path:
            return store
    return ""


def _link(root: _Root) -> str:
    """The link to the store that a directory has, whatever its path is. Nobody needs to look at every store for it."""
    return os.path.join(state_directory(), "roots", f"{root.inode}-{root.born_ns}")


def _look(path: str) -> _Root | None:
    """None where there is no directory, or nobody knows when it was made: an inode alone may be another's by now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        born = birth_ns(descriptor)
        return None if born is None else _Root(path, os.fstat(descriptor).st_ino, born)
    finally:
        os.close(descriptor)


def _read(store: Path) -> _Root | None:
    try:
        path, inode, born_ns, before = json.loads((store / _NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return _Root(str(path), inode, born_ns, str(before))
