"""What a step changed of git's own data: where its refs stood, and its settings, hooks and logs as text.

No patch has these: git takes none for what is in a `.git`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ringfence.filesystem.diff import patch_of
from ringfence.participants import Change
from ringfence_workspace.history.store import Store
from ringfence_workspace.history.undo_plan import git_place

_REF = re.compile(r"refs/.+|(?!FETCH_)[A-Z_]*HEAD")
_PACKED = "packed-refs"
_PACKED_LINE = re.compile(r"([0-9a-f]{40,64}) (refs/.+)")
_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NO_TEXT = re.compile(r"objects(?:/.*)?|(?:.*/)?index|packed-refs")
"""What is told in another way, or is for git alone."""
_Read: TypeAlias = "Callable[[str], bytes | None]"
"""Reads a path at one side of a step; None where no file is there."""


@dataclass(frozen=True, slots=True)
class MovedRef:
    """A ref of git that a step moved, made or deleted."""

    repository: str
    """Its `.git`, relative to the root."""
    name: str
    """As git has it, such as "refs/heads/main", or "HEAD"."""
    before: str
    """The id that it had, or the ref that it stood for as "ref: NAME"; "" where there was none."""
    after: str
    missing: bool = False
    """Whether ``after`` is an id that the repository does not have, since its objects have gone too."""


@dataclass(frozen=True, slots=True)
class GitDataChanges:
    """What a step changed of git's own data, but for objects and indexes."""

    refs: Sequence[MovedRef] = ()
    texts: bytes = b""
    """The settings, hooks, logs and other texts as one patch, to be read: git does not apply it."""


def git_data_changes(
    store: Store, root: str | os.PathLike[str], parent: str | None, commit: str, changes: Sequence[Change]
) -> GitDataChanges:
    """Return what the changes of a commit are for git. ``parent`` is the commit before it, None for an empty tree."""
    in_git = [(place, change) for change in changes if (place := git_place(change.path)) is not None]
    if not in_git:
        return GitDataChanges()
    before, after = (partial(_read, store, one) for one in (parent, commit))
    refs = [
        moved
        for place in dict.fromkeys(place for place, _ in in_git)
        for moved in _moved_refs(Path(root), place, [one.path for at, one in in_git if at == place], before, after)
    ]
    texts = [change for place, change in in_git if _is_text(place, change, before, after)]
    return GitDataChanges(refs, patch_of(texts, lambda path: before(path) or b"", lambda path: after(path) or b""))


def _read(store: Store, commit: str | None, path: str) -> bytes | None:
    entry = None if commit is None else store.states.entry(commit, path)
    return None if entry is None or entry.oid is None else store.states.content(entry.oid)


def _is_text(place: str, change: Change, before: _Read, after: _Read) -> bool:
    name = change.path[len(place) + 1 :]
    if not name or _NO_TEXT.fullmatch(name) or _REF.fullmatch(name):
        return False
    return all(b"\0" not in (read(change.path) or b"") for read in (before, after))


def _moved_refs(root: Path, place: str, paths: Sequence[str], before: _Read, after: _Read) -> Iterator[MovedRef]:
    packed = [_packed_refs(read(f"{place}/{_PACKED}")) for read in (before, after)]
    names = {name for path in paths if _REF.fullmatch(name := path[len(place) + 1 :])}
    names.update(name for name in {*packed[0], *packed[1]} if packed[0].get(name) != packed[1].get(name))
    for name in sorted(names):
        old, new = (
            _value(read(f"{place}/{name}")) or known.get(name, "")
            for read, known in zip((before, after), packed, strict=True)
        )
        if old != new:
            yield MovedRef(place, name, old, new, bool(_ID.fullmatch(new)) and not _has_object(root / place, new))


def _value(content: bytes | None) -> str:
    """What a file of a ref says, on one line."""
    lines = (content or b"").decode("utf-8", "surrogateescape").splitlines()
    return lines[0] if lines else ""


def _packed_refs(content: bytes | None) -> Mapping[str, str]:
    lines = (content or b"").decode("utf-8", "surrogateescape").splitlines()
    return {found[2]: found[1] for line in lines if (found := _PACKED_LINE.fullmatch(line)) is not None}


def _has_object(repository: Path, name: str) -> bool:
    from dulwich.errors import NotGitRepository
    from dulwich.objects import ObjectID
    from dulwich.repo import Repo

    try:
        with Repo(str(repository.parent)) as repo:
            return ObjectID(name.encode()) in repo.object_store
    except (NotGitRepository, OSError, ValueError, KeyError, NotImplementedError):
        return False
