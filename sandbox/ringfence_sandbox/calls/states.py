"""The states of a tree that snapshots hold, as deeds that lead from one to the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringfence_sandbox.disk.records import Deed


class Token:
    """Held by a snapshot; while one lives, displaced files are kept."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class State:
    """A state of the tree: the one before it, and the deeds that lead from there to here."""

    parent: State | None
    deeds: list[Deed] = field(default_factory=list[Deed])
    times: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Of the directories that changed on the way here; known once the state has been left."""
    apart: set[int] = field(default_factory=set[int])
    """The numbers of deeds that stayed done, or undone, when the state was last left or entered, because of somebody
    else's change."""
    came_back: dict[int, set[tuple[str, object]]] = field(default_factory=dict[int, set[tuple[str, object]]])
    """By the number of the deed that had taken it, what was in a directory when it came back."""
    opaque: bool = False
    """Whether an opaque call has ended here that changed something: that is not among the deeds."""


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Where a call began: a number of deeds, and the state at that time."""

    deeds: int
    state: State
    outermost: bool
    call_id: str
    tool: str
    opaque: bool


def way(tip: State, to: State) -> tuple[list[State], list[State]]:
    """The states to leave, latest first, and those to enter, in order, to come from one state to another."""
    above = {id(one) for one in line(tip)}
    down: list[State] = []
    at: State | None = to
    while at is not None and id(at) not in above:
        down.append(at)
        at = at.parent
    up = list(itertools.takewhile(lambda one: one is not at, line(tip)))
    return up, down[::-1]


def line(state: State | None) -> Iterator[State]:
    """A state and those before it, latest first."""
    while state is not None:
        yield state
        state = state.parent


def led_to(path: str, deeds: Sequence[Deed]) -> str | None:
    """Where a directory is after `deeds`; None where they took it away."""
    for deed in deeds:
        if deed.kind in ("move", "take") and f"{path}/".startswith(f"{deed.path}/"):
            if deed.kind == "take":
                return None
            path = deed.to + path[len(deed.path) :]
    return path


def since_opaque(deeds: Sequence[Deed]) -> Sequence[Deed]:
    """Those after the last opaque one."""
    last = max((number for number, deed in enumerate(deeds) if deed.kind == "opaque"), default=-1)
    return deeds[last + 1 :]
