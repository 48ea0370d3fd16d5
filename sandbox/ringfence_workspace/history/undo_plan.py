"""What an undo or a restore is to do, computed from the history: what that does not know is left alone.

An undo compares the states of each path before a step, after it, and now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from ringfence.filesystem.paths import MAX_PATH_BYTES, directories_above, is_dotgit
from ringfence_workspace.history.commits import CommitRecord
from ringfence_workspace.history.entries import Difference, Entry, Unknown, blob_id, is_directory
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.history.store import Store
from ringfence_workspace.history.text_merge import merged
from ringfence_workspace.tree.git_index import has_same_entries, is_index

ReversalOutcome: TypeAlias = Literal["restored", "removed", "kept", "conflict"]
_ValueT = TypeVar("_ValueT")
AS_BEFORE = "it is as it was before already"
SOMEBODY_ELSE = "changed since by somebody else"
DROPPED = "changed since, by a step that `gc` has dropped or by somebody else"
NOT_EMPTY = "it holds what the history does not have"
_NOT_OURS = "git's own data, which no step has changed"
OBJECTS_STAY = "an object of git, which what others have made since may need"
GIT_STAYS = "git's own data has changed since, or is not all in the history: use git to go back"


@dataclass(slots=True)
class ReversalPlan:
    """What an undo or a restore is to do.

    ``outcomes`` by path: *restored*: brought back, or mended; *removed*, as it was not there before; *kept*, as
    it is as before already, or holds what stays; *conflict*, as a later step that stays, or somebody else, changed it.
    ``reasons`` has in words why something is kept or a conflict, and what is somebody else's.

    ``states`` are the new states of the paths to write (None: to delete), ``contents`` the bytes by object id that a
    merge made and no step has. Paths with new states and without an outcome only have other times or owners.
    """

    outcomes: dict[str, ReversalOutcome] = field(default_factory=dict[str, ReversalOutcome])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    states: dict[str, Entry | None] = field(default_factory=dict[str, "Entry | None"])
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def keep(self, path: str, reason: str, outcome: ReversalOutcome = "kept") -> None:
        self.outcomes[path], self.reasons[path] = outcome, reason

    def hold_git(self, changed: Set[str]) -> None:
        """Keep all paths below a `.git` where one of them stays: objects and what names them go together, or the
        repository is broken. ``changed`` are the `.git` directories in which others have changed something."""
        stay = {
            git_place(path)
            for path, outcome in self.outcomes.items()
            if outcome == "conflict" or (outcome == "kept" and self.reasons[path] not in (AS_BEFORE, _NOT_OURS))
        }
        held = (stay | changed) - {None}
        for path in {*self.states, *self.outcomes} if held else ():
            if git_place(path) in held:
                self.states.pop(path, None)
                if self.outcomes.get(path, "kept") != "kept":
                    self.keep(path, GIT_STAYS, "conflict")

    def keep_objects(self, grown: Set[str]) -> None:
        """Keep git's objects where others have made some since, which may need them. What names them goes."""
        for path in [path for path, state in self.states.items() if state is None and git_place(path) in grown]:
            if _is_object(path):
                del self.states[path]
                self.keep(path, OBJECTS_STAY)

    def finish(self, names: Callable[[str], Collection[str]]) -> None:
        """Keep what cannot be written. ``names`` are those in a directory now."""
        # Only programs make paths that no operation of the filesystem takes.
        for path in [path for path in self.states if len(os.fsencode(path)) > MAX_PATH_BYTES]:
            del self.states[path]
            self.keep(path, f"its path has more than {MAX_PATH_BYTES} bytes: see to it yourself")
        # Nor is a directory removed that holds what the history does not have.
        for path in sorted(self.states, reverse=True):  # what is in a directory comes before it
            if not is_directory(self.states[path]):
                inside = (f"{path}/{name}" for name in names(path))
                if any(one not in self.states or self.states[one] is not None for one in inside):
                    del self.states[path]
                    self.keep(path, NOT_EMPTY)
        self.sort()

    def sort(self) -> None:
        self.outcomes = dict(sorted(self.outcomes.items()))


class Planner:
    """Plans from a store, whose newest commit has the tree as it is. ``names`` lists a directory."""

    def __init__(self, store: Store, tip: str, names: Callable[[str], Collection[str]]) -> None:
        self._store = store
        self._states = store.states
        self._tip = tip
        self._names = names

    def undo(
        self, undone: Sequence[CommitRecord], parents: Sequence[str | None], paths: Collection[str] | None = None
    ) -> ReversalPlan:
        """To reverse these steps, newest first; ``parents`` have what was before each. With ``paths``, only these, and
        what is below them."""
        states, plan = self._states, ReversalPlan()
        steps: list[list[Difference]] = []
        for record, parent in zip(undone, parents, strict=True):
            found = states.differences(parent, record.commit)
            if paths is not None:
                found = [one for one in found if not {one.path, *directories_above(one.path)}.isdisjoint(paths)]
            self._keep_unknown(plan, found, record, states.unknown(parent), paths)
            now = states.unknown(self._tip)
            found = [one for one in found if not _refreshed(states, *one)]
            steps.append([one for one in found if one.changes_content or now.why(one.path) is None])
        changed, grown = self._git_changed_since(undone, {one.path for step in steps for one in step})
        _Undo(plan, states, self._tip, self._changed_by(undone)).run(steps, changed, grown)
        plan.finish(self._names)
        return plan

    def _keep_unknown(
        self,
        plan: ReversalPlan,
        found: Sequence[Difference],
        record: CommitRecord,
        was: Unknown,
        paths: Collection[str] | None,
    ) -> None:
        made, now = self._states.unknown(record.commit), self._states.unknown(self._tip)
        for path in made.new_since(was):
            if path not in plan.reasons and (paths is None or not {path, *directories_above(path)}.isdisjoint(paths)):
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

    def restore(self, record: CommitRecord) -> ReversalPlan:
        """To be as after a step. What that did not know becomes what it was when it was next known, if ever."""
        plan = ReversalPlan()
        later = self._later_than(record.commit)
        wanted, unclear = self._wanted(record, later)
        states = self._states
        tip = states.unknown(self._tip)
        for path, reason in unclear.items():
            plan.keep(path, reason)
        for path in tip.new_since(states.unknown(record.commit)):
            if path not in wanted and states.entry(record.commit, path) is not None:
                plan.keep(path, f"what it is now is not in the history ({tip.why(path)})")
        others = {path for one in later if one.number is None for path in self._store.step_of(one).paths}
        reached = not later or later[-1].parent == record.commit
        _RestorePlanner(plan, tip, self._changed_by([record]), others, reached=reached).run(wanted)
        by_others = self._git_changes([one for one in later if one.number is None])
        # Where the whole `.git` is gone, nothing is left to break.
        plan.hold_git({place for _, place in by_others if states.entry(self._tip, place) is not None})
        plan.finish(self._names)
        return plan

    def apply(
        self, changes: Sequence[Difference], since: Sequence[CommitRecord], contents: Mapping[str, bytes]
    ) -> ReversalPlan:
        """To make changes that were made elsewhere, from what ``since`` has, newest first. It is the undo of their
        reversal.

        ``contents`` has bytes by object id besides the store's: of what may have to be merged."""
        plan = ReversalPlan(contents=dict(contents))
        reversed_changes = [Difference(path, after, before) for path, before, after in changes]
        _Undo(plan, self._states, self._tip, self._changed_by(since)).run([reversed_changes], set(), set())
        plan.finish(self._names)
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

    def _git_changed_since(self, undone: Sequence[CommitRecord], judged: Set[str]) -> tuple[Set[str], Set[str]]:
        """The `.git` directories in which something is not as the first of these steps left it, by another's doing;
        and those in which objects came. What these steps changed themselves, is ``judged`` by itself."""
        commits, oldest, states = {record.commit for record in undone}, undone[-1].commit, self._states
        others = [record for record in self._later_than(oldest) if record.commit not in commits]
        changed, grown = set[str](), set[str]()
        for path, place in self._git_changes(others):
            was = states.entry(oldest, path)
            if path not in judged and not _same(was, states.entry(self._tip, path)):
                (grown if was is None and _is_object(path) else changed).add(place)
        return changed, grown

    def _git_changes(self, records: Sequence[CommitRecord]) -> Iterator[tuple[str, str]]:
        """The paths of git's own data that these commits changed, each with its `.git`; not refreshed indexes."""
        for record in records:
            for path, before, after in self._states.differences(record.parent, record.commit):
                place = git_place(path)
                if place is not None and not _same(before, after) and not _refreshed(self._states, path, before, after):
                    yield path, place

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
    return git_place(path) is not None


def _is_object(path: str) -> bool:
    """Whether it is one of the objects of git, or a directory of some."""
    return path.startswith(f"{git_place(path)}/objects/")


def git_place(path: str) -> str | None:
    """Return the outermost `.git` that a path is, or is below; None if there is none."""
    names = path.split("/")
    found = next((depth for depth, name in enumerate(names, 1) if is_dotgit(os.fsencode(name))), None)
    return None if found is None else "/".join(names[:found])


def _refreshed(states: CommitStates, path: str, one: Entry | None, other: Entry | None) -> bool:
    """Whether two states of an index of git differ only in the stat data of files, and in caches."""
    if one is None or other is None or not is_index(path) or one.kind != "file":
        return False
    if one.oid is None or other.oid is None or (one.kind, one.meta.mode) != (other.kind, other.meta.mode):
        return False
    return has_same_entries(states.content(one.oid), states.content(other.oid))


class _RestorePlanner:
    """Adds to a plan how to be as at a commit. ``changed_by`` has the paths that later steps changed, ``others`` those
    that somebody else did. ``reached`` says whether the history has all that came since."""

    def __init__(
        self, plan: ReversalPlan, tip: Unknown, changed_by: Collection[str], others: Collection[str], *, reached: bool
    ) -> None:
        self._plan = plan
        self._tip = tip
        self._changed_by = changed_by
        self._others = others
        self._reached = reached
        self._above_git_data: Collection[str] = ()
        """The directories above git's own data that comes back."""
        self._no_directories: set[str] = set()
        """Files that stay, so that nothing can be below them."""

    def run(self, wanted: Mapping[str, Difference]) -> None:
        there = [path for path, one in wanted.items() if path in self._changed_by and one.after and _is_in_dotgit(path)]
        self._above_git_data = {one for path in there for one in directories_above(path)}
        for difference in sorted(wanted.values(), key=lambda one: one.path):  # what is above comes first
            if (why := self._tip.why(difference.path)) is None:
                self._restore(difference)
            elif difference.changes_content:
                self._plan.keep(difference.path, f"what it is now is not in the history ({why})")

    def _restore(self, difference: Difference) -> None:
        path, now, state = difference
        stays = self._stays(path, now)
        if stays and now is not None and now.kind != "directory":
            self._no_directories.add(path)
        if not self._no_directories.isdisjoint(directories_above(path)):
            self._plan.keep(path, SOMEBODY_ELSE, "conflict")
        elif not stays:
            self._plan.states[path] = state
            if difference.changes_content:
                self._bring_back(path, now, state)
        elif difference.changes_content:
            self._plan.keep(path, _NOT_OURS)

    def _stays(self, path: str, now: Entry | None) -> bool:
        """Whether it is git's own data that no step has changed, and that is in nobody's way."""
        if path in self._changed_by or not _is_in_dotgit(path):
            return False
        return now is not None or path not in self._above_git_data

    def _bring_back(self, path: str, now: Entry | None, state: Entry | None) -> None:
        self._plan.outcomes[path] = "restored" if state is not None else "removed"
        if path not in self._changed_by:
            theirs = SOMEBODY_ELSE if now is not None and state is not None else _THEIRS[now is None]
            self._plan.reasons[path] = theirs if self._reached else DROPPED
        elif path in self._others:
            self._plan.reasons[path] = SOMEBODY_ELSE


class _Undo:
    """Adds to a plan how to reverse steps. ``tip`` is the commit that has the tree as it is. ``changed_later`` names,
    by path, the step that stays and has changed it after those."""

    def __init__(self, plan: ReversalPlan, states: CommitStates, tip: str, changed_later: Mapping[str, str]) -> None:
        self.plan = plan
        self._states = states
        self._tip = tip
        self._later = changed_later

    def run(self, steps: Sequence[Sequence[Difference]], git_changed: Set[str], git_grown: Set[str]) -> None:
        """Reverse steps, newest first, each given as what it changed; what the plan keeps, stays. So does what is
        below a `.git` of ``git_changed``, and the objects below one of ``git_grown``."""
        undone = self._undone_already(steps)
        for number, step in enumerate(steps):
            for difference in step:
                if number >= undone.get(difference.path, 0) or not difference.changes_content:
                    self._reverse(*difference)
                elif difference.path not in self.plan.outcomes:
                    self.plan.keep(difference.path, AS_BEFORE)
        self._keep_as_before()
        self.plan.hold_git(git_changed)
        self.plan.keep_objects(git_grown)
        self._keep_occupied_directories()
        self._drop_orphans()
        self._keep_as_before()

    def _keep_as_before(self) -> None:
        plan = self.plan
        plan.states = {path: state for path, state in plan.states.items() if state != self.now(path)}
        for path in [path for path, outcome in plan.outcomes.items() if outcome == "restored"]:
            if _same(self.state(path), self.now(path)):  # what one step did, another one of these had undone
                plan.keep(path, AS_BEFORE)
            elif self.state(path) is None:
                plan.outcomes[path] = "removed"

    def now(self, path: str) -> Entry | None:
        return self._states.entry(self._tip, path)

    def state(self, path: str) -> Entry | None:
        return self.plan.states[path] if path in self.plan.states else self.now(path)

    def _is(self, path: str, now: Entry | None, other: Entry | None) -> bool:
        return _same(now, other) or _refreshed(self._states, path, now, other)

    def _undone_already(self, steps: Sequence[Sequence[Difference]]) -> dict[str, int]:
        """How many of the steps, newest first, an earlier undo has reversed, by path.

        The path is now as one of the steps left it, or as one of them found it."""
        found: dict[str, int] = {}
        for number, step in enumerate(steps):
            for path, before, after in step:
                if path not in found and not _same(before, after):
                    now = self.now(path)
                    if self._is(path, now, after):
                        found[path] = number
                    elif self._is(path, now, before):
                        found[path] = number + 1
        return found

    def _reverse(self, path: str, before: Entry | None, after: Entry | None) -> None:
        plan, now = self.plan, self.state(path)
        if plan.outcomes.get(path, "restored") != "restored" and plan.reasons[path] != AS_BEFORE:
            return
        if _same(before, after):
            # Only times or owners: they go back if nobody touched it since.
            if now == after:
                plan.states[path] = before
        elif self._is(path, now, after):
            self._bring_back(path, before)
        elif not self._is(path, now, before):
            state = self._together(path, before, after, now)
            if state is not None:
                self._bring_back(path, state)
            else:
                self._refuse(path)

    def _bring_back(self, path: str, state: Entry | None) -> None:
        self.plan.states[path], self.plan.outcomes[path] = state, "restored"
        self.plan.reasons.pop(path, None)

    def _refuse(self, path: str, why: str | None = None, *, outcome: ReversalOutcome = "conflict") -> None:
        later = self._later.get(path)
        self.plan.states.pop(path, None)
        self.plan.outcomes[path] = "conflict" if later else outcome
        self.plan.reasons[path] = why or f"changed since by {later or 'somebody else'}"

    def _together(self, path: str, before: Entry | None, after: Entry | None, now: Entry | None) -> Entry | None:
        """The state now without what the step did, where both can be told apart."""
        if _is_in_dotgit(path):  # merged text would name objects that go
            return None
        if before is None or after is None or now is None or not before.kind == after.kind == now.kind:
            return None
        mode = _either(after.meta.mode, now.meta.mode, before.meta.mode)
        if mode is None:
            return None
        oid = _either(after.oid, now.oid, before.oid)
        if oid is None and now.kind == "file":
            oid = self._merged(before, after, now)
        if oid is None and now.kind != "directory":
            return None
        times = before if oid == before.oid and oid != now.oid else now
        return now._replace(oid=oid, meta=now.meta._replace(mode=mode, mtime_ns=times.meta.mtime_ns))

    def _merged(self, before: Entry, after: Entry, now: Entry) -> str | None:
        content = merged(*(self._content(entry) for entry in (after, now, before)))
        if content is None:
            return None
        oid = blob_id(content)
        self.plan.contents[oid] = content
        return oid

    def _content(self, entry: Entry) -> bytes:
        assert entry.oid is not None, "a file has an object id"
        known = self.plan.contents.get(entry.oid)
        return known if known is not None else self._states.content(entry.oid)

    def _keep_occupied_directories(self) -> None:
        """A directory with something in it that stays is not deleted, nor made a file."""
        for path in sorted(self.plan.states, reverse=True):
            state, now = self.plan.states[path], self.now(path)
            if not is_directory(now) or is_directory(state):
                continue
            if any(self.state(f"{path}/{name}") is not None for name in self._states.names(self._tip, path)):
                self._refuse(path, "something in it stays", outcome="kept" if state is None else "conflict")

    def _drop_orphans(self) -> None:
        """Nothing is written where somebody else removed the directory, or put a file in its place."""
        for path in sorted(self.plan.states):
            parent = path.rpartition("/")[0]
            if self.plan.states[path] is not None and parent and not is_directory(self.state(parent)):
                self._refuse(path, "the directory that it was in is gone")


def _same(one: Entry | None, other: Entry | None) -> bool:
    """Whether kind, bytes and permissions are the same."""
    return one is other if one is None or other is None else one.same_content(other)


def _either(origin: _ValueT, one: _ValueT, other: _ValueT) -> _ValueT | None:
    """What became of a value that at most one of the two changed; None if both did, differently."""
    if one == origin:
        return other
    return one if other in (origin, one) else None
