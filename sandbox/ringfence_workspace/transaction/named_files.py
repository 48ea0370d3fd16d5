"""A look at some files alone, where a call names what it changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress

from ringfence.filesystem.paths import directories_above
from ringfence_workspace.history.entries import Entry, Meta, is_directory, link_number
from ringfence_workspace.history.scan import Exclusion, Hides, ScanLimits, ScanResult, read_steadily
from ringfence_workspace.history.stat_cache import stamp_of
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.tree.confined import Confined


class NamedFiles:
    """What of some paths, and of what is below them, differs from a commit. The cost is that of these."""

    def __init__(
        self,
        files: Confined,
        states: CommitStates,
        commit: str,
        keep: Callable[[bytes], str],
        *,
        limits: ScanLimits,
        hides: Hides,
    ) -> None:
        self._files = files
        self._states = states
        self._commit = commit
        self._keep = keep
        self._limits = limits
        self._hides = hides
        self._device = os.fstat(files.root).st_dev
        self._found = ScanResult()
        self._seen: set[str] = set()

    def look(self, paths: Iterable[str]) -> ScanResult:
        """Look at these paths, at the other names of files that they name, and at new directories above them."""
        waiting = [*paths]
        while waiting:
            path = waiting.pop()
            if path not in self._seen and not self._files.is_reserved(path):
                self._seen.add(path)
                waiting += self._look_at(path)
                for above in directories_above(path):
                    if self._is_new(above) or self._is_gone(above):
                        self._compare(above)
        return self._found

    def _look_at(self, path: str) -> Iterable[str]:
        """Look at a path. Return what else is to be looked at: what is below it, and other names of the file."""
        before, here, now = self._compare(path)
        names = set[str]()
        if is_directory(before):
            names.update(self._states.names(self._commit, path))
        if here is not None and stat.S_ISDIR(here.st_mode):
            with suppress(PermissionError):
                names.update(self._files.names(path))
        below = [f"{path}/{name}" if path else name for name in sorted(names)]
        return () if path in self._found.excluded else [*below, *self._other_names(before), *self._other_names(now)]

    def _compare(self, path: str) -> tuple[Entry | None, os.stat_result | None, Entry | None]:
        """What was at a path, and what is there now."""
        before, here = self._states.entry(self._commit, path), self._files.look(path)
        now = None if here is None else self._entry(path, here)
        if path not in self._found.excluded and now != before:
            self._found.changes[path] = now
        return before, here, now

    def _is_new(self, path: str) -> bool:
        return self._states.entry(self._commit, path) is None

    def _is_gone(self, path: str) -> bool:
        here = self._files.look(path)
        return here is None or not stat.S_ISDIR(here.st_mode)

    def _other_names(self, entry: Entry | None) -> Iterable[str]:
        if entry is None or not entry.meta.link:
            return ()
        return self._states.linked(self._commit, {entry.meta.link}).get(entry.meta.link, ())

    def _entry(self, path: str, here: os.stat_result) -> Entry | None:
        """What is at a path now. None also for what is left out."""
        self._found.stamps[path] = stamp_of(here)
        if stat.S_ISDIR(here.st_mode):
            return Entry("directory", Meta.of(here))
        with self._files.parent(path) as (directory, name):
            if self._hides(directory, name, path, here):
                return self._exclude(path, "hidden")
            if not (stat.S_ISREG(here.st_mode) or stat.S_ISLNK(here.st_mode)):
                return self._exclude(path, "special file")
            if here.st_size > self._limits.max_file_bytes:
                return self._exclude(path, "too large")
            try:
                content, _, here, _ = read_steadily(directory, name, here, self._limits.max_file_bytes)
            except FileNotFoundError:
                return None
            except OSError:
                return self._exclude(path, "unreadable")
        self._found.stamps[path] = stamp_of(here)
        kind = "symlink" if stat.S_ISLNK(here.st_mode) else "file"
        return Entry(kind, Meta.of(here, link_number(here, self._device)), self._keep(content))

    def _exclude(self, path: str, reason: Exclusion) -> None:
        self._found.excluded[path] = reason
