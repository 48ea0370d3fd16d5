"""Points of a history that have names: people and agents go back to them, and `gc` keeps them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from ringfence_sandbox.store.commits import CommitRecord
from ringfence_sandbox.store.store import Store

_PREFIX = "steps/"
"""Before the names of steps among all that a store keeps."""
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.|lock$|$)){0,63}")


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A point with a name. ``number`` is that of the newest step of that time, 0 for the baseline (or where it has been
    dropped); ``with_others`` says whether somebody else had changed files after it, which the point has, too."""

    name: str
    number: int
    commit: str
    created_at: datetime
    with_others: bool = False

    @property
    def said(self) -> str:
        """What the name is given to, in words."""
        return f"step {self.number}" + (", with what others have changed since," if self.with_others else "")


class NamedSteps:
    """The named steps of one store. Its callers hold the workspace's lock."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def commits(self) -> Mapping[str, str]:
        """Commits by the names of steps."""
        kept = self._store.kept().items()
        return {name[len(_PREFIX) :]: commit for name, commit in kept if name.startswith(_PREFIX)}

    def by_commit(self) -> Mapping[str, Sequence[str]]:
        """The names of each commit that has any."""
        names: dict[str, list[str]] = {}
        for name, commit in sorted(self.commits().items()):
            names.setdefault(commit, []).append(name)
        return names

    def all(self) -> Sequence[NamedStep]:
        return [self._step(name, commit) for name, commit in sorted(self.commits().items())]

    def record(self, name: str) -> CommitRecord:
        """The commit of a name. LookupError where there is none of it."""
        commits = self.commits()
        if name not in commits:
            there = f"there are: {', '.join(sorted(commits))}" if commits else "no step has a name, only its number"
            raise LookupError(f"no step is called {name!r}; {there}")
        return self._store.commit(commits[name])

    def give(self, name: str, commit: str) -> NamedStep:
        """Give a commit a name. ValueError for what is no name, or is taken."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"{name!r} cannot be the name of a step: use 1 to 64 letters, digits, '-', '_' and '.'; begin with a "
                "letter or a digit, and do not use digits alone"
            )
        if (taken := self.commits().get(name)) is not None:
            said = f"{self._step(name, taken).said} is called {name!r} already"
            raise ValueError(f"{said}: choose another name, or free this one with checkpoint --drop")
        self._store.keep(f"{_PREFIX}{name}", commit)
        return self._step(name, commit)

    def drop(self, name: str) -> None:
        """Take a name away. LookupError where there is none of it."""
        self.record(name)
        self._store.unkeep(f"{_PREFIX}{name}")

    def number(self, commit: str | None) -> int:
        """The number of the newest step at a commit, which may be somebody else's change."""
        while commit is not None:
            record = self._store.commit(commit)
            if record.number is not None:
                return record.number
            commit = record.parent
        return 0

    def _step(self, name: str, commit: str) -> NamedStep:
        info = self._store.commit(commit).message.info
        return NamedStep(name, self.number(commit), commit, info.created_at, info.kind == "external")
