"""What an undo does to each path: an algebra over the states before a step, after it, and now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from ringfence_sandbox.steps.text_merge import merged
from ringfence_sandbox.store.entries import Difference, Entry, blob_id, is_directory

ReversalOutcome: TypeAlias = Literal["restored", "removed", "kept", "conflict"]
_ValueT = TypeVar("_ValueT")
_AS_BEFORE = "it is as it was before already"


@dataclass(slots=True)
class UndoPlan:
    """``outcomes`` by path: *restored*: brought back, or mended; *removed*, as it was not there before; *kept*, as
    it is as before already, or holds what stays; *conflict*, as a later step that stays, or somebody else, changed it.
    ``reasons`` has in words why something is kept or a conflict.

    ``states`` are the new states of the paths to write (None: to delete), ``contents`` the bytes by object id that a
    merge made and no step has. Paths with new states and without an outcome only have other times or owners.
    """

    outcomes: dict[str, ReversalOutcome] = field(default_factory=dict[str, ReversalOutcome])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    states: dict[str, Entry | None] = field(default_factory=dict[str, "Entry | None"])
    contents: dict[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True, slots=True)
class TreeNow:
    """The files as they are now: one path's state, the names in a directory, and the bytes of an object id."""

    entry: Callable[[str], Entry | None]
    names: Callable[[str], Iterable[str]]
    content: Callable[[str], bytes]


def plan_undo(
    steps: Sequence[Sequence[Difference]],
    now: TreeNow,
    changed_later: Callable[[str], str | None] = lambda path: None,
) -> UndoPlan:
    """How to reverse `steps`, newest first, each given as the paths that it changed with the states before and after.

    ``changed_later`` names the step that stays and has changed a path after those, if there is one.
    """
    undo = _Undo(now, changed_later)
    for step in steps:
        for path, before, after in step:
            undo.reverse(path, before, after)
    undo.keep_what_is_needed()
    undo.drop_what_has_no_place()
    plan = undo.plan
    plan.states = {path: state for path, state in plan.states.items() if state != now.entry(path)}
    for path in [path for path, outcome in plan.outcomes.items() if outcome == "restored"]:
        if same(undo.state(path), now.entry(path)):  # what one step did, another one of these had taken back
            plan.outcomes[path], plan.reasons[path] = "kept", _AS_BEFORE
        elif undo.state(path) is None:
            plan.outcomes[path] = "removed"
    return plan


class _Undo:
    def __init__(self, now: TreeNow, changed_later: Callable[[str], str | None]) -> None:
        self.plan = UndoPlan()
        self._now = now
        self._later = changed_later

    def state(self, path: str) -> Entry | None:
        return self.plan.states[path] if path in self.plan.states else self._now.entry(path)

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
        later = self._later(path)
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
        return known if known is not None else self._now.content(entry.oid)

    def keep_what_is_needed(self) -> None:
        """A directory with something in it that stays is not deleted, nor made a file."""
        for path in sorted(self.plan.states, reverse=True):
            state, now = self.plan.states[path], self._now.entry(path)
            if not is_directory(now) or is_directory(state):
                continue
            if any(self.state(f"{path}/{name}") is not None for name in self._now.names(path)):
                self._refuse(path, "something in it stays", outcome="kept" if state is None else "conflict")

    def drop_what_has_no_place(self) -> None:
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
