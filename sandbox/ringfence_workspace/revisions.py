"""The files of one revision of a git repository on disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dulwich.errors import NotGitRepository
from dulwich.object_store import BaseObjectStore, iter_tree_contents
from dulwich.objects import Commit, ObjectID
from dulwich.objectspec import parse_commit
from dulwich.repo import Repo

from ringfence.filesystem.paths import is_dotgit


def resolve_revision(repository: str | os.PathLike[str], revision: str) -> str:
    """Return the id of a commit, tag or branch. Raises LookupError: there is no such repository or revision."""
    with _opened(repository) as repo:
        return _commit(repo, repository, revision).id.decode()


def checkout_revision(repository: str | os.PathLike[str], revision: str, into: Path) -> str:
    """Write the files of a commit, tag or branch to `into`, which does not exist yet. Return the commit's id.

    There is no ``.git`` in them, submodules are empty directories, and no filter or hook of the repository runs.

    Raises:
        LookupError: there is no such repository or revision.
        ValueError: a name in the tree leads elsewhere.
    """
    with _opened(repository) as repo:
        commit = _commit(repo, repository, revision)
        into.mkdir()
        links = set[Path]()
        for entry in iter_tree_contents(repo.object_store, commit.tree):
            assert entry.path is not None
            assert entry.mode is not None
            assert entry.sha is not None
            names = entry.path.split(b"/")
            path = into.joinpath(*map(os.fsdecode, names))
            # Only a tree that was made by hand has such names.
            if any(name in (b"", b".", b"..") or is_dotgit(name) for name in names) or not links.isdisjoint(
                path.parents
            ):
                raise ValueError(f"the tree has the path {os.fsdecode(entry.path)!r}, which git does not check out")
            if stat.S_ISLNK(entry.mode):
                links.add(path)
            _write(path, entry.mode, repo.object_store, entry.sha)
        return commit.id.decode()


def _opened(repository: str | os.PathLike[str]) -> Repo:
    try:
        return Repo(os.fspath(repository))
    except NotGitRepository:
        raise LookupError(f"{os.fspath(repository)} is no git repository, and a revision is of one") from None


def _commit(repo: Repo, repository: str | os.PathLike[str], revision: str) -> Commit:
    try:
        return parse_commit(repo, revision)
    except (KeyError, ValueError):
        raise LookupError(f"there is no revision {revision!r} in {os.fspath(repository)}") from None


def _write(path: Path, mode: int, store: BaseObjectStore, sha: ObjectID) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        os.symlink(store[sha].as_raw_string(), os.fsencode(path))
    elif stat.S_ISREG(mode):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o777 if mode & 0o100 else 0o666), "wb") as file:
            file.write(store[sha].as_raw_string())
    else:
        path.mkdir()
