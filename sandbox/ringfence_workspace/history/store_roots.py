"""What a store says of itself: the version of its form, and the directory that it is of.

Stores go by the real path of their workspace. By the note another directory in its place is told from it.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ringfence_workspace.tree.kernel import birth_ns
from ringfence_workspace.tree.places import replacing, store_of, sync_directory, unusable

FORMAT = 1
"""Stores without a number are of this form too: it came before the number. Another form is not guessed at."""
_FORMAT_WORDS = "ringfence store"
_FORMAT_NAME = "format"
_NAME = "root"

_Root: TypeAlias = tuple[str, int, int]
"""A directory: its path when it was noted, its inode, and when that was made, in nanoseconds."""


def replaced(root: str, store: str) -> bool:
    """Whether another directory has come in the place of the one that a store says it is of."""
    now, noted = _look(root), _read(Path(store))
    return now is not None and noted is not None and noted[0] == now[0] and noted != now


def record_root(root: str | os.PathLike[str], store: str | None = None, *, opened: bool = False) -> None:
    """Record in a store, if it exists, which directory it belongs to. Never fails.

    ``store`` is the default one of the root if it is left out. An existing record is replaced only by who has
    ``opened`` the workspace, because the history has to record the replacement first.
    """
    root = os.path.realpath(root)
    store = store or store_of(root)
    now, noted = _look(root), _read(Path(store))
    if now is None or now == noted or (noted is not None and noted[0] == now[0] and not opened):
        return
    with suppress(OSError), replacing(Path(store, _NAME)) as file:
        file.write(json.dumps(now).encode())


def recorded_path(store: Path) -> str:
    """Return the path of the directory that a store is of. Empty if the store does not say it."""
    noted = _read(store)
    return noted[0] if noted is not None else ""


def describe_replaced_root(root: str | os.PathLike[str], *, copied: bool = False) -> str | None:
    """Describe to a person that a directory came in the place of another one; None if it did not.

    Its history and policies are then those of another directory. A root that is only ``copied`` has no use for the
    history.
    """
    root = os.fspath(root)
    real = os.path.realpath(root)
    store = store_of(real)
    if not replaced(real, store):
        return None
    if copied:
        file = f"`ringfence policies file {shlex.quote(root)}`"
        return f"{root} is another directory than the one that was here before: policies in {file} hold for it, too"
    return (
        f"{root} is another directory than the one that its history began with, in the same place: what differs is "
        "taken in as somebody else's, and a restore to a step before brings back the files of the other one; "
        f"to begin anew, without that history and its owner's policies: {_aside(store)}"
    )


def _aside(store: str) -> str:
    """The command that moves a store to where nobody looks for one, and nothing is yet."""
    places = (f"{store}.before{number or ''}" for number in itertools.chain([0], itertools.count(2)))
    return f"mv {shlex.quote(store)} {shlex.quote(next(place for place in places if not os.path.lexists(place)))}"


def _look(path: str) -> _Root | None:
    """None where there is no directory, or nobody knows when it was made: an inode alone may be another's by now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        born = birth_ns(descriptor)
        return None if born is None else (path, os.fstat(descriptor).st_ino, born)
    finally:
        os.close(descriptor)


def _read(store: Path) -> _Root | None:
    with suppress(OSError, ValueError):
        path, inode, born_ns = json.loads((store / _NAME).read_bytes())
        return path, inode, born_ns
    return None


def check_format(store: str) -> None:
    """Raises ValueError where the store is of a form that is not known here, and OSError where none can be."""
    try:
        said = Path(store, _FORMAT_NAME).read_bytes()[:100].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise unusable(store, error) from error
    if said == f"{_FORMAT_WORDS} {FORMAT}":
        return
    words, _, number = said.rpartition(" ")
    if words == _FORMAT_WORDS and number.isdigit():
        raise ValueError(
            f"the store {store} has form {number}, and this version of ringfence knows form {FORMAT}: use the version "
            "that wrote it, or give another store"
        )
    raise ValueError(
        f"{os.path.join(store, _FORMAT_NAME)} says {said!r}, which is no form of a store: restore that file, "
        "or give another store"
    )


def note_format(store: str) -> None:
    """Write the version down, for whoever opens the store next, where that is not done yet."""
    path = Path(store, _FORMAT_NAME)
    if not path.exists():
        with replacing(path) as file:
            file.write(f"{_FORMAT_WORDS} {FORMAT}\n".encode())
        sync_directory(path.parent)
