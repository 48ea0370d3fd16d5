"""What an undo does to each path: an algebra over the states before a step, after it, and now."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from ringfence.filesystem.paths import MAX_PATH_BYTES
from ringfence_sandbox.steps.text_merge import merged
from ringfence_sandbox.store.entries import Difference, Entry, blob_id, is_directory
from ringfence_sandbox.store.states import States

ReversalOutcome: TypeAlias = Literal["restored", "removed", "kept", "conflict"]
_ValueT = TypeVar("_ValueT")
_AS_BEFORE = "it is as it was before already"


NOT_EMPTY = "it holds what the history does not have"


@dataclass(slots=True)
class Plan:
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

    def keep_overlong_paths(self) -> None:
        """Leave what has a path that no operation of the filesystem takes: only programs make such."""
        for path in [path for path in self.states if len(os.fsencode(path)) > MAX_PATH_BYTES]:
            del self.states[path]
            self.keep(path, f"its path has more than {MAX_PATH_BYTES} bytes: see to it yourself")

    def keep_nonempty_directories(self, names: Callable[[str], Collection[str]]) -> None:
        """A directory is not removed that holds what the history does not have. ``names`` are those in one now."""
        for path in sorted(self.states, reverse=True):  # what is in a directory comes before it
            if not is_directory(self.states[path]):
                inside = (f"{path}/{name}" for name in names(path))
                if any(one not in self.states or self.states[one] is not None for one in inside):
                    del self.states[path]
                    self.keep(path, NOT_EMPTY)

    def sort(self) -> None:
        self.outcomes = dict(sorted(self.outcomes.items()))


def reverse_steps(
    plan: Plan, steps: Sequence[Sequence[Difference]], states: States, tip: str, changed_later: Mapping[str, str]
) -> None:
    """Add to a plan how to reverse `steps`, newest first, each given as what it changed; what the plan keeps, stays.

    ``tip`` is the commit that has the tree as it is. ``changed_later`` names the step that stays and has changed a path
    after those, by path.
    """
    undo = _Undo(plan, states, tip, changed_later)
    for step in steps:
        for path, before, after in step:
            undo.reverse(path, before, after)
    undo.keep_occupied_directories()
    undo.drop_orphans()
    plan.states = {path: state for path, state in plan.states.items() if state != undo.now(path)}
    for path in [path for path, outcome in plan.outcomes.items() if outcome == "restored"]:
        if same(undo.state(path), undo.now(path)):  # what one step did, another one of these had taken back
            plan.keep(path, _AS_BEFORE)
        elif undo.state(path) is None:
            plan.outcomes[path] = "removed"


class _Undo:
    def __init__(self, plan: Plan, states: States, tip: str, changed_later: Mapping[str, str]) -> None:
        self.plan = plan
        self._states = states
        self._tip = tip
        self._later = changed_later

    def now(self, path: str) -> Entry | None:
        return self._states.entry(self._tip, path)

    def state(self, path: str) -> Entry | None:
        return self.plan.states[path] if path in self.plan.states else self.now(path)

    def reverse(self, path: str, before: Entry | None, after: Entry | None) -> None:
        plan, now = self.plan, self.state(path)
        if plan.outcomes.get(path, "restored") != "restored":
            return
        if same(before, after):
            # Only times or owners: they go back if nobody touched it since.
            if now == after:
                plan.states[path] = before
        elif same(now, after):
            plan.states[path], plan.outcomes[path] = before, "restored"
        elif same(now, before):
            if plan.outcomes.setdefault(path, "kept") == "kept":
                plan.reasons[path] = _AS_BEFORE
        else:
            state = self._together(before, after, now)
            if state is not None:
                plan.states[path], plan.outcomes[path] = state, "restored"
            else:
                self._refuse(path)

    def _refuse(self, path: str, why: str | None = None, *, outcome: ReversalOutcome = "conflict") -> None:
        later = self._later.get(path)
        self.plan.states.pop(path, None)
        self.plan.outcomes[path] = "conflict" if later else outcome
        self.plan.reasons[path] = why or f"changed since by {later or 'somebody else'}"

    def _together(self, before: Entry | None, after: Entry | None, now: Entry | None) -> Entry | None:
        """The state now without what the step did, where both can be told apart."""
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
        return replace(now, oid=oid, meta=replace(now.meta, mode=mode, mtime_ns=times.meta.mtime_ns))

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

    def keep_occupied_directories(self) -> None:
        """A directory with something in it that stays is not deleted, nor made a file."""
        for path in sorted(self.plan.states, reverse=True):
            state, now = self.plan.states[path], self.now(path)
            if not is_directory(now) or is_directory(state):
                continue
            if any(self.state(f"{path}/{name}") is not None for name in self._states.names(self._tip, path)):
                self._refuse(path, "something in it stays", outcome="kept" if state is None else "conflict")

    def drop_orphans(self) -> None:
        """Nothing is written where somebody else removed the directory, or put a file in its place."""
        for path in sorted(self.plan.states):
            parent = path.rpartition("/")[0]
            if self.plan.states[path] is not None and parent and not is_directory(self.state(parent)):
                self._refuse(path, "the directory that it was in is gone")


def same(one: Entry | None, other: Entry | None) -> bool:
    """Whether kind, bytes and permissions are the same."""
    return one is other if one is None or other is None else one.same_content(other)


def _either(origin: _ValueT, one: _ValueT, other: _ValueT) -> _ValueT | None:
    """What became of a value that at most one of the two changed; None if both did, differently."""
    if one == origin:
        return other
    return one if other in (origin, one) else None
