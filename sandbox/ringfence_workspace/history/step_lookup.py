"""Which commit of a history is meant by the number or the name of a step. `gc` keeps the steps that have names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TypeAlias

from ringfence_workspace.history.commits import CommitRecord
from ringfence_workspace.history.store import Store

StepName: TypeAlias = int | str
"""A step: its number, or a name that it was given."""
_PREFIX = "steps/"
"""Before the names of steps among all that a store keeps."""
_NAME = re.compile(r"(?!\d+$)[A-Za-z0-9](?:[A-Za-z0-9_-]|\.(?!\.|lock$|$)){0,63}")


@dataclass(frozen=True, slots=True)
class NamedStep:
    """A state with a name.

    ``number`` is the newest step when the name was given. It is 0 if there was none, or if that step was dropped.
    ``with_others``: the state also has what others had changed after that step.
    """

    name: str
    number: int
    commit: str
    created_at: datetime
    with_others: bool = False

    @property
    def description(self) -> str:
        """What the name is given to, in words."""
        return f"step {self.number}" + (", with what others have changed since," if self.with_others else "")


class StepLookup:
    """The steps of one store, by number and by name. Its callers hold the workspace's lock."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ends(self, a: StepName | None, b: StepName | None) -> tuple[CommitRecord, CommitRecord]:
        """The commits of `a` (None: the oldest) and `b` (None: the newest). ValueError where `a` is the later one."""
        first = self.record(a) if a is not None else self._store.oldest()
        last = self.record(b) if b is not None else next(self._store.commits())
        if a is not None and b is not None and self._position(first) > self._position(last):
            raise ValueError(f"step {a} is later than step {b}: name the earlier one first")
        return first, last

    def after(self, first: CommitRecord, last: CommitRecord) -> Iterator[CommitRecord]:
        """The commits from ``last`` back to the one after ``first``, newest first. What `gc` left of a named step has
        no way to the rest of the history, and is older than that."""
        record = last
        while record.commit != first.commit:
            yield record
            if record.parent is None:
                break
            record = self._store.commit(record.parent)

    def _position(self, record: CommitRecord) -> tuple[int, int]:
        """Of two commits, that of the later one is greater: the newest step, and how many changes of others since."""
        others = 0
        while record.number is None and record.parent is not None:
            record, others = self._store.commit(record.parent), others + 1
        return record.number or 0, others

    def record(self, step: StepName) -> CommitRecord:
        """The commit that a number or a name stands for. LookupError where there is none."""
        if isinstance(step, str):
            commits = self._named()
            if step not in commits:
                there = f"there are: {', '.join(sorted(commits))}" if commits else "no step has a name, only its number"
                raise LookupError(f"no step is called {step!r}; {there}")
            return self._store.commit(commits[step])
        try:
            return self._store.record(step)
        except LookupError:
            for record in self.detached_records():
                if record.number == step:
                    return record
            numbers = [record.number for record in self._store.commits() if record.number is not None]
            there = f"it has {min(numbers)} to {max(numbers)}" if numbers else "it is empty"
            if numbers and 0 <= step < min(numbers):
                raise LookupError(f"step {step} has been dropped from the history by gc: {there}") from None
            raise LookupError(f"the history has no step {step}: {there}") from None

    def detached_records(self) -> list[CommitRecord]:
        """What `gc` has left for its name alone, newest first: no way leads there from the rest of the history."""
        line = {record.commit for record in self._store.commits()}
        alone = {*self._named().values()} - line
        found = [self._store.commit(commit) for commit in alone]
        return sorted(found, key=lambda one: (one.message.info.created_at, one.number or 0), reverse=True)

    def step(self, step: StepName) -> CommitRecord:
        """`record`, but of a name the newest step of that time, where somebody else changed files after it."""
        record = self.record(step)
        return record if record.number is not None else self.record(self._number(record.commit))

    def steps_to_undo(
        self,
        n: int | None,
        step: StepName | Collection[int] | None,
        sessions: Collection[str] | None,
    ) -> list[CommitRecord]:
        """The steps to undo, newest first: of some sessions, unless it is None."""
        if step is not None:
            if n is not None:
                raise ValueError("give either n, for the newest n steps, or step, for that one alone")
            return self._steps_of([step] if isinstance(step, int | str) else sorted(set(step), reverse=True))
        n = 1 if n is None else n
        if n < 1:
            raise ValueError(f"the number of steps to undo is 1 or more, it cannot be {n}")
        steps = (record for record in self._store.commits() if record.number)
        own = (record for record in steps if sessions is None or record.message.info.session_id in sessions)
        found = list(islice(own, n))
        if len(found) < n and sessions is not None:
            yours = f"of the steps of the history, {len(found) or 'none'} were made by you"
            raise LookupError(f"{yours}, so {n} cannot be undone: name a step")
        if len(found) < n:
            there = f"{len(found)} step{'s' if len(found) > 1 else ''}" if found else "no step yet"
            raise LookupError(f"the history has {there}, so {n} cannot be undone")
        return found

    def _steps_of(self, names: Sequence[StepName]) -> list[CommitRecord]:
        if not names:
            raise ValueError("step is empty: give at least one step to undo")
        records = [self.step(one) for one in names]
        if any(record.number == 0 for record in records):
            raise ValueError("the baseline is no step that could be undone; `restore` goes back to it")
        return records

    def _named(self) -> Mapping[str, str]:
        """Commits by the names of steps."""
        kept = self._store.kept().items()
        return {name[len(_PREFIX) :]: commit for name, commit in kept if name.startswith(_PREFIX)}

    def names(self) -> Mapping[str, Sequence[str]]:
        """The names of each commit that has any."""
        names: dict[str, list[str]] = {}
        for name, commit in sorted(self._named().items()):
            names.setdefault(commit, []).append(name)
        return names

    def named(self) -> Sequence[NamedStep]:
        """The named steps, by name."""
        return [self._step(name, commit) for name, commit in sorted(self._named().items())]

    def give(self, name: str, commit: str) -> NamedStep:
        """Give a commit a name. ValueError for what is no name, or is taken."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"{name!r} cannot be the name of a step: use 1 to 64 letters, digits, '-', '_' and '.'; begin with a "
                "letter or a digit, and do not use digits alone"
            )
        if (taken := self._named().get(name)) is not None:
            words = f"{self._step(name, taken).description} is called {name!r} already"
            raise ValueError(f"{words}: choose another name, or free this one with checkpoint --drop")
        self._store.keep(f"{_PREFIX}{name}", commit)
        return self._step(name, commit)

    def drop(self, name: str) -> None:
        """Take a name away. LookupError where there is none of it."""
        self.record(name)
        self._store.unkeep(f"{_PREFIX}{name}")

    def _number(self, commit: str | None) -> int:
        """The number of the newest step at a commit, which may be somebody else's change."""
        while commit is not None:
            record = self._store.commit(commit)
            if record.number is not None:
                return record.number
            commit = record.parent
        return 0

    def _step(self, name: str, commit: str) -> NamedStep:
        info = self._store.commit(commit).message.info
        return NamedStep(name, self._number(commit), commit, info.created_at, info.kind == "external")


def parent_of(record: CommitRecord) -> str | None:
    """The commit before a step. LookupError where it was dropped."""
    if record.parent is None and record.number != 0:
        raise LookupError(f"what was before step {record.number} has been dropped from the history")
    return record.parent
