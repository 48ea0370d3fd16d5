"""Going back over deeds, latest first: the one way back, for a rollback and for a recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ringfence_sandbox.hands import Conflict, Hands
from ringfence_sandbox.holding import Holding
from ringfence_sandbox.records import Deed, Json

Note = Callable[[Mapping[str, Json]], None]
"""Writes a record into the journal, if there is room."""


@dataclass(slots=True)
class Undone:
    """``left`` has what could not be undone for want of permission, space or luck; it may be tried again."""

    conflicts: set[str] = field(default_factory=set[str])
    displaced: dict[str, int] = field(default_factory=dict[str, int])
    """Of the conflicts, the slots that hold what was at the path before the call."""
    left: list[Deed] = field(default_factory=list[Deed])
    errors: list[OSError] = field(default_factory=list[OSError])


@dataclass(slots=True)
class TakenBack:
    """How going back behind an opaque call went: paths that somebody else has changed and that stayed, and notes."""

    conflicts: set[str] = field(default_factory=set[str])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Hold:
    """Where displaced files are, and how to have a directory for them."""

    held: Holding | None
    make: Callable[[], Holding]


@dataclass(frozen=True, slots=True)
class Became:
    """Inodes of deeds that others take the place of, so that the deeds can be undone after that; noted first."""

    deeds: Sequence[Deed]
    note: Note
    others: dict[int, int] = field(default_factory=dict[int, int])

    def __call__(self, old: int, new: int) -> None:
        if any(deed.is_about(old) for deed in self.deeds):
            self.note({"became": [old, new]})
            self.others[old] = new

    def settle(self) -> None:
        for deed in self.deeds:
            deed.become(self.others)


def undo_deeds(hands: Hands, deeds: list[Deed], down_to: int, noted: Callable[[Deed], None]) -> Undone:
    """Undo the deeds from the last to number `down_to`; ``noted`` hears of each that is settled, which then leaves
    the list. What somebody else changed meanwhile is left alone."""
    undone = Undone()
    while len(deeds) > down_to:
        deed = deeds[-1]
        if any(_depends(deed, left) for left in undone.left):
            undone.left.append(deeds.pop())
            continue
        try:
            hands.undo(deed)
        except Conflict as conflict:
            undone.conflicts.add(str(conflict))
            if deed.kind in ("swap", "take"):
                undone.displaced[deed.path] = deed.slot
        except OSError as error:
            undone.left.append(deeds.pop())
            undone.errors.append(error)
            continue
        noted(deed)
        deeds.pop()
    deeds.extend(reversed(undone.left))
    return undone


def _depends(deed: Deed, left: Deed) -> bool:
    """Whether `deed` can only be undone after `left`, a later one."""
    if deed.slot >= 0 and deed.slot == left.slot:
        return True
    pairs = [(one, other) for one in (deed.path, deed.to or deed.path) for other in (left.path, left.to or left.path)]
    if left.kind == "times":
        return any(_within(other, one) for one, other in pairs)
    return any(_within(one, other) or _within(other, one) for one, other in pairs)


def _within(path: str, directory: str) -> bool:
    return not directory or f"{path}/".startswith(f"{directory}/")
