"""Which commit of a history is meant by the number or the name of a step."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import TypeAlias

from ringfence_sandbox.store.commits import CommitRecord
from ringfence_sandbox.store.named_steps import NamedSteps
from ringfence_sandbox.store.store import Store

StepName: TypeAlias = int | str
"""A step: its number, or a name that it was given."""


class StepFinder:
    """The steps of one store, by what people call them. Its callers hold the workspace's lock."""

    def __init__(self, store: Store, names: NamedSteps) -> None:
        self._store = store
        self._names = names

    def between(self, a: StepName | None, b: StepName | None) -> list[CommitRecord]:
        """The commits from `a` to `b`, oldest first, both of them included."""
        first, last = (self.record(step) if step is not None else None for step in (a, b))
        line = list(self._store.commits())
        line.reverse()
        # What `gc` left of a named step has no way to the rest of the history, and is older than that.
        alone = [record for record in (first, last) if record is not None and record not in line]
        line = [*sorted(alone, key=lambda record: self._names.number(record.commit)), *line]
        start = line.index(first) if first is not None else 0
        end = line.index(last) if last is not None else len(line) - 1
        if start > end:
            raise ValueError(f"step {a} is later than step {b}: name the earlier one first")
        return line[start : end + 1]

    def record(self, number: StepName) -> CommitRecord:
        """The commit that a number or a name stands for. LookupError where there is none."""
        if isinstance(number, str):
            return self._names.record(number)
        try:
            return self._store.record(number)
        except LookupError:
            for record in self.apart():
                if record.number == number:
                    return record
            numbers = [record.number for record in self._store.commits() if record.number is not None]
            there = f"it has {min(numbers)} to {max(numbers)}" if numbers else "it is empty"
            if numbers and 0 <= number < min(numbers):
                raise LookupError(f"step {number} has been dropped from the history by gc: {there}") from None
            raise LookupError(f"the history has no step {number}: {there}") from None

    def apart(self) -> list[CommitRecord]:
        """What `gc` has left for its name alone, newest first: no way leads there from the rest of the history."""
        line = {record.commit for record in self._store.commits()}
        alone = {*self._names.commits().values()} - line
        found = [self._store.commit(commit) for commit in alone]
        return sorted(found, key=lambda one: (one.message.info.created_at, one.number or 0), reverse=True)

    def step(self, step: StepName) -> CommitRecord:
        """`record`, but of a name the newest step of that time, where somebody else changed files after it."""
        record = self.record(step)
        return record if record.number is not None else self.record(self._names.number(record.commit))

    def undone(self, n: int | None, step: StepName | None, sessions: Collection[str] | None) -> list[CommitRecord]:
        """The steps to undo, newest first: of some sessions, unless it is None."""
        if step is not None:
            if n is not None:
                raise ValueError("give either n, for the newest n steps, or step, for that one alone")
            if (record := self.step(step)).number == 0:
                raise ValueError("the baseline is no step that could be undone; `restore` goes back to it")
            return [record]
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


def parent_of(record: CommitRecord) -> str | None:
    """The commit before a step. LookupError where it was dropped."""
    if record.parent is None and record.number != 0:
        raise LookupError(f"what was before step {record.number} has been dropped from the history")
    return record.parent
