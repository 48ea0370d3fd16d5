"""What is known of the forks of a workspace: a file for each in the source's store, and the same one in its own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias, cast

from ringfence_workspace.tree.kernel import birth_ns
from ringfence_workspace.tree.places import is_gone_for_good, replacing, state_directory_of, store_of, sync_directory

FORKS = "forks"
"""In a store, the folder with what is known of its forks; and before their names among all that a store keeps."""
BASE = "base"
"""The name that a fork's store keeps the commit by that it began with."""
_OWN = "fork.json"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.|lock$|json$|$)){0,63}")

ForkState: TypeAlias = Literal["ready", "unfinished", "gone", "forgotten"]


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork of a workspace: a directory with a store of its own.

    ``state`` is *ready*; *unfinished*, where a process was killed while it made or discarded the fork, which is then
    only to be discarded; *gone*, where its directory was removed by hand; or *forgotten*, where its history was
    deleted, so that nothing can tell what it has changed.
    """

    name: str
    root: str
    store: str
    source: str
    """The root of the workspace that it was made from."""
    source_store: str
    commit: str
    """The commit of the source's history that it began with."""
    step: int
    """The newest step of the source then."""
    created_at: datetime
    state: ForkState = "unfinished"
    inode: int = 0
    born_ns: int | None = None
    """Of its directory, by which another one in its place is told from it."""
    copied_ns: int = 0
    """When its files were copied: what has a later time of change was changed in it."""
    base: str = ""
    """The first commit of its own history."""
    points_back: Sequence[str] = ()
    """Its paths that still name the source: environments of Python, build caches and the like."""
    rewritten: Sequence[str] = ()
    """Its absolute symlinks that led into the source, and lead into the fork now."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """What of the source is not in it, by path, and why."""
    shared: Mapping[str, str] = field(default_factory=dict[str, str])
    """The directories that are empty in it, and in its containers those of its source: by path the root of the
    workspace that has each."""
    git_branch: str = ""
    """The branch of git that was checked out, a full ref; empty without one."""
    git_commit: str = ""
    """The commit of git that was checked out."""
    score: str = ""
    """How it was scored, in words; empty: it was not."""

    @property
    def is_there(self) -> bool:
        """Whether its directory is at its root, and not another one."""
        try:
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return (os.fstat(descriptor).st_ino, birth_ns(descriptor)) == (self.inode, self.born_ns)
        finally:
            os.close(descriptor)

    @property
    def source_is_gone(self) -> bool:
        """Whether nothing is where its source was."""
        return not os.path.isdir(self.source)

    @property
    def unfinished_root(self) -> str:
        """Where it is made before it has its name."""
        above, name = os.path.split(self.root)
        return os.path.join(above, f".{name}.unfinished")

    def to_json(self) -> bytes:
        """The bytes of its record."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps({**values, "created_at": self.created_at.isoformat()}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Fork:
        """Read what `to_json` gave. ValueError for anything else."""
        try:
            values = cast("dict[str, object]", json.loads(text))
            known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
            known["created_at"] = datetime.fromisoformat(str(values["created_at"]))
            return cls(**known)  # pyright: ignore[reportArgumentType]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no record of a fork: {error}") from error


def check_fork_name(name: str) -> None:
    """Raise ValueError for what cannot be the name of a fork."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot be the name of a fork: use 1 to 64 letters, digits, '-', '_' and '.', and begin with a "
            "letter or a digit"
        )


def fork_places(root: str, store: str, name: str, into: str | None) -> tuple[str, str]:
    """The root and the store of a new fork of the workspace at a root.

    Without ``into`` the root is beside the store. Its own store is where every command looks for it, unless the source
    has one that only who names it finds.
    """
    state = state_directory_of(store, root)
    above = f"{store}.forks" if state is None else os.path.join(state, FORKS, os.path.basename(store))
    place = os.path.join(above, "roots", name) if state is None else os.path.join(above, name)
    if into is not None:
        beside, last = os.path.split(os.path.abspath(into))
        place = os.path.join(os.path.realpath(beside), last)
    return place, store_of(place) if state is not None else os.path.join(above, "stores", name)


def record_file(source_store: str, name: str) -> Path:
    return Path(source_store, FORKS, f"{name}.json")


def save_fork(fork: Fork) -> None:
    """Write the record of a fork into the source's store, and wait for the disk. OSError."""
    path = record_file(fork.source_store, fork.name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with replacing(path) as file:
        file.write(fork.to_json())
    sync_directory(path.parent)


def save_own_fork(fork: Fork) -> None:
    """Write the record of a fork into its own store. OSError."""
    with replacing(Path(fork.store, _OWN)) as file:
        file.write(fork.to_json())


def own_fork(store: str) -> Fork | None:
    """The fork that a store is of. None: it is of none."""
    try:
        return Fork.from_json(Path(store, _OWN).read_bytes())
    except (OSError, ValueError):
        return None


def forks_of(source_store: str | os.PathLike[str]) -> Sequence[Fork]:
    """Return the forks of the workspace of a store, by name. Its directory may be gone."""
    found: list[Fork] = []
    for path in sorted(Path(source_store, FORKS).glob("*.json")):
        try:
            fork = Fork.from_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        found.append(_as_it_is(fork))
    return found


def borrowing_forks(source_store: str) -> Sequence[str]:
    """The names of the forks that borrow from a store, or through which a fork of theirs does. One whose directory may
    only be unmounted is among them."""
    return [
        fork.name
        for fork in forks_of(source_store)
        if fork.state == "ready"
        or (fork.state == "gone" and not is_gone_for_good(fork.root) and not os.path.lexists(fork.root))
        or borrowing_forks(fork.store)
    ]


def _as_it_is(fork: Fork) -> Fork:
    if fork.state == "unfinished":
        # A kill came between the last two steps of making it: it has its name, and its own store says that it is whole.
        own = own_fork(fork.store)
        return own if own is not None and own.created_at == fork.created_at and own.is_there else fork
    if not fork.is_there:
        return replace(fork, state="gone")
    own = own_fork(fork.store)
    return fork if own is not None and own.created_at == fork.created_at else replace(fork, state="forgotten")


def fork_named(source_store: str, name: str) -> Fork:
    """The fork of a name. LookupError where there is none."""
    forks = {fork.name: fork for fork in forks_of(source_store)}
    if name not in forks:
        there = f"there are: {', '.join(forks)}" if forks else "there are none"
        raise LookupError(f"there is no fork {name!r}; {there}")
    return forks[name]
