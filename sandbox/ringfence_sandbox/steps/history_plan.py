"""What an undo or a restore is to do, told from the history: what that does not know is left alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from ringfence.filesystem.paths import directories_above, is_dotgit
from ringfence_sandbox.steps.undo_plan import Plan, reverse_steps
from ringfence_sandbox.store.commits import CommitRecord
from ringfence_sandbox.store.entries import Difference
from ringfence_sandbox.store.store import Store
from ringfence_sandbox.store.unknown import Unknown

SOMEBODY_ELSE = "changed since by somebody else"
DROPPED = "changed since, by a step that `gc` has dropped or by somebody else"


class Planner:
    """Plans from a store, whose newest commit has the tree as it is. ``names`` tells what is in a directory."""

    def __init__(self, store: Store, tip: str, names: Callable[[str], Collection[str]]) -> None:
        self._store = store
        self._states = store.states
        self._tip = tip
        self._names = names

    def undo(self, undone: Sequence[CommitRecord], parents: Sequence[str | None]) -> Plan:
        """To reverse these steps, newest first; ``parents`` have what was before each."""
        states, tip = self._states, self._tip
        plan = Plan()
        steps: list[list[Difference]] = []
        for record, parent in zip(undone, parents, strict=True):
            found = states.differences(parent, record.commit)
            self._keep_unknown(plan, found, record, states.unknown(parent))
            steps.append(found)
        reverse_steps(plan, steps, states, tip, self._changed_by(undone))
        plan.keep_overlong_paths()
        plan.keep_nonempty_directories(self._names)
        plan.sort()
        return plan

    def _keep_unknown(self, plan: Plan, found: Sequence[Difference], record: CommitRecord, was: Unknown) -> None:
        made, now = self._states.unknown(record.commit), self._states.unknown(self._tip)
        for path in made.new_since(was):
            if path not in plan.reasons:
                plan.keep(path, f"what step {record.number} made of it is not in the history ({made.why(path)})")
        for difference in found:
            path, before, after = difference
            if (why := was.why(path, there=before is not None)) is not None:
                words = f"what it was before is not in the history ({why} then)"
            elif (why := made.why(path, there=after is not None)) is not None:
                words = f"what step {record.number} made of it is not in the history ({why})"
            elif (why := now.why(path)) is not None:
                words = f"what it is now is not in the history ({why})"
            else:
                continue
            if difference.changes_content:
                plan.keep(path, words)

    def restore(self, record: CommitRecord) -> Plan:
        """To be as after a step. What that did not know becomes what it was when it was next known, if ever."""
        plan = Plan()
        later = self._later_than(record.commit)
        reached = not later or later[-1].parent == record.commit
        changed_by = self._changed_by([record])
        others = {path for one in later if one.number is None for path in self._store.step_of(one).paths}
        wanted, unclear = self._wanted(record, later)
        tip = self._states.unknown(self._tip)
        there = (path for path, one in wanted.items() if path in changed_by and one.after and _is_in_dotgit(path))
        above = {one for path in there for one in directories_above(path)}
        for path, reason in unclear.items():
            plan.keep(path, reason)
        for path in tip.new_since(self._states.unknown(record.commit)):
            if path not in wanted and self._states.entry(record.commit, path) is not None:
                plan.keep(path, f"what it is now is not in the history ({tip.why(path)})")
        no_directories: set[str] = set()
        for difference in sorted(wanted.values(), key=lambda one: one.path):  # what is above comes first
            path, now, state = difference
            why = tip.why(path)
            if why is not None:
                if difference.changes_content:
                    plan.keep(path, f"what it is now is not in the history ({why})")
                continue
            stays = _is_in_dotgit(path) and path not in changed_by and (now is not None or path not in above)
            if stays and now is not None and now.kind != "directory":
                no_directories.add(path)
            if not no_directories.isdisjoint(directories_above(path)):
                plan.keep(path, SOMEBODY_ELSE, "conflict")
                continue
            if not stays:
                plan.states[path] = state
            if difference.changes_content and stays:
                plan.keep(path, "git's own data, which no step has changed")
            elif difference.changes_content:
                plan.outcomes[path] = "restored" if state is not None else "removed"
                if path not in changed_by:
                    theirs = SOMEBODY_ELSE if now is not None and state is not None else _THEIRS[now is None]
                    plan.reasons[path] = theirs if reached else DROPPED
                elif path in others:
                    plan.reasons[path] = SOMEBODY_ELSE
        plan.keep_overlong_paths()
        plan.keep_nonempty_directories(self._names)
        plan.sort()
        return plan

    def _wanted(
        self, record: CommitRecord, later: Sequence[CommitRecord]
    ) -> tuple[dict[str, Difference], dict[str, str]]:
        """What differs from now, by path; and what nobody can say that of, with the reasons."""
        states = self._states
        wanted: dict[str, Difference] = {}
        unclear: dict[str, str] = {}
        asked: list[tuple[str, Unknown]] = []

        def was_unknown(path: str) -> bool:
            return all(one.why(path, there=states.entry(commit, path) is not None) for commit, one in asked)

        for commit in (record.commit, *(one.commit for one in reversed(later))):
            unknown = states.unknown(commit)
            if asked and unknown.reasons == asked[-1][1].reasons:
                continue
            for difference in states.differences(self._tip, commit):
                path = difference.path
                if path in wanted or not was_unknown(path):
                    continue
                why = unknown.why(path, there=difference.after is not None)
                if why is None:
                    wanted[path] = difference
                    unclear.pop(path, None)
                elif not asked and difference.changes_content:
                    unclear[path] = f"what it was then is not in the history ({why} then)"
            if not unknown.reasons:
                break
            asked.append((commit, unknown))
        return wanted, unclear

    def _later_than(self, commit: str) -> list[CommitRecord]:
        """Newest first."""
        found: list[CommitRecord] = []
        for record in self._store.commits():
            if record.commit == commit:
                break
            found.append(record)
        return found

    def _changed_by(self, undone: Sequence[CommitRecord]) -> dict[str, str]:
        """The paths that steps changed which came after those, and stay; and the newest of these steps, in words."""
        commits = {record.commit for record in undone}
        found: dict[str, str] = {}
        for record in self._later_than(undone[-1].commit):
            if record.number and record.commit not in commits:
                step = self._store.step_of(record)
                for path in step.paths:
                    found.setdefault(path, f"step {step.number} ({step.tool})")
        return found


_THEIRS = {False: "somebody else's, made since", True: "removed since by somebody else"}


def _is_in_dotgit(path: str) -> bool:
    return any(is_dotgit(os.fsencode(name)) for name in path.split("/"))
