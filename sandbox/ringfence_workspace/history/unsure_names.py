"""What is at the names that a stat cache is unsure of, before anything is made of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from ringfence.filesystem.paths import directories_above
from ringfence_workspace.history.entries import Entry
from ringfence_workspace.history.stat_cache import StatCache
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.history.trees import Folder
from ringfence_workspace.tree.confined import Confined
from ringfence_workspace.tree.kernel import lstat
from ringfence_workspace.tree.linked_worktrees import GIT


class FullScanNeededError(Exception):
    """A look at some names does not tell what the tree is: all of it has to be looked at."""


@dataclass(slots=True)
class LookedAt:
    """A directory, what the commit has of it, and what is at some names in it."""

    status: os.stat_result
    """Of before the names were looked at."""
    before: Folder
    names: dict[str, os.stat_result | None] = field(default_factory=dict[str, "os.stat_result | None"])


class UnsureNames:
    """A look at the unsure names of a cache that stands for a commit, and at all other names of their files."""

    def __init__(
        self,
        files: Confined,
        states: CommitStates,
        commit: str | None,
        cache: StatCache,
        is_reserved: Callable[[str], bool],
    ) -> None:
        self._files = files
        self._states = states
        self._commit = commit
        self._cache = cache
        self._is_reserved = is_reserved
        self._found: dict[str, LookedAt] = {}
        self._links: set[int] = set()
        """By the numbers that the commit has, the groups of links of which some name is looked at."""
        self._inodes: set[int] = set()
        """Files of more than one name, of which the cache does not know the others."""

    def found(self) -> Mapping[str, LookedAt]:
        """What is there, by directory.

        Raises:
            FullScanNeededError: it does not tell what the tree is.
        """
        if self._commit is None or not self._cache.complete:
            raise FullScanNeededError
        waiting: Mapping[str, Set[str]] = self._cache.unsure
        seen: set[int] = set()
        while waiting:
            for path, names in waiting.items():
                self._look(path, names)
            more = (self._links | self._inodes) - seen
            seen |= more
            waiting = self._other_names(self._commit, more)
        return self._found

    def _look(self, path: str, names: Set[str]) -> None:
        known = self._cache.folders.get(path)
        if known is None:
            if not any(self._is_unsure(one) for one in (path, *directories_above(path))):
                raise FullScanNeededError
            return  # one above it is new, and all of it is looked at
        assert self._commit is not None, "there is one"
        try:
            descriptor = self._files.open_directory(path)
        except OSError:
            raise FullScanNeededError from None
        try:
            looked = self._found.get(path)
            if looked is None:
                before = self._states.folder(self._commit, path)
                status, itself = os.fstat(descriptor), known.get("")
                if before is None or (itself is not None and itself[0] != status.st_ino):
                    raise FullScanNeededError
                looked = self._found[path] = LookedAt(status, before)
            for name in names - looked.names.keys() - {""}:
                if name == GIT and path:  # it may make a linked worktree of the directory
                    raise FullScanNeededError
                if path or not self._is_reserved(name):
                    looked.names[name] = self._look_at(descriptor, name, looked.before)
        finally:
            os.close(descriptor)

    def _look_at(self, descriptor: int, name: str, before: Folder) -> os.stat_result | None:
        try:
            found = lstat(descriptor, name)
        except OSError:  # it may not be searched
            raise FullScanNeededError from None
        old = before.file(os.fsencode(name))
        if isinstance(old, Entry) and old.meta.link:
            self._links.add(old.meta.link)
        is_linked = found is not None and found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode)
        if found is not None and is_linked and found.st_ino not in self._cache.linked:
            self._inodes.add(found.st_ino)
        return found

    def _is_unsure(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in self._cache.unsure.get(folder, ())

    def _other_names(self, commit: str, numbers: Set[int]) -> Mapping[str, Set[str]]:
        """The names that these files have, or had, by directory."""
        paths = [path for group in self._states.linked(commit, numbers).values() for path in group]
        if found := numbers & self._inodes:  # new links of files that had one name: any in the tree may be the other
            for folder, names in self._cache.folders.items():
                for name, stamp in names.items():
                    if stamp[0] in found and name:
                        paths.append(f"{folder}/{name}" if folder else name)
        others: dict[str, set[str]] = {}
        for path in paths:
            folder, _, name = path.rpartition("/")
            others.setdefault(folder, set()).add(name)
        return others
