"""Going back over deeds, latest first: the one way back, for a rollback and for a recovery."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ringfence_sandbox.calls.deed_runner import Conflict, DeedRunner
from ringfence_sandbox.calls.holding import Holding
from ringfence_sandbox.calls.states import since_opaque
from ringfence_sandbox.disk.records import Deed, Json

Note = Callable[[Mapping[str, Json]], None]
"""Writes a record into the journal, if there is room."""
Settled = Callable[[Sequence[Deed], str | None], None]
"""Hears of deeds that are undone, or of one that stays and of the path where somebody else's is in its way."""


@dataclass(slots=True)
class Undone:
    """``left`` has what could not be undone for want of permission, space or luck; it may be tried again."""

    conflicts: set[str] = field(default_factory=set[str])
    displaced: dict[str, int] = field(default_factory=dict[str, int])
    """Of the conflicts, the slots that hold what was at the path before the call."""
    moved: list[Deed] = field(default_factory=list[Deed])
    """Of the moves, those whose file stays where the call had moved it: something else is where it was."""
    left: list[Deed] = field(default_factory=list[Deed])
    errors: list[OSError] = field(default_factory=list[OSError])

    def met(self, conflict: str, deed: Deed) -> None:
        """Somebody else's was in the way of a deed."""
        self.conflicts.add(conflict)
        if deed.kind in ("swap", "take"):
            self.displaced[deed.path] = deed.slot
        elif deed.kind == "move" and conflict == deed.path:
            self.moved.append(deed)


@dataclass(slots=True)
class RolledBack:
    """How going back behind an opaque call went: paths that somebody else has changed and that stayed, and notes."""

    conflicts: set[str] = field(default_factory=set[str])
    displaced: dict[str, int] = field(default_factory=dict[str, int])
    """Of the conflicts, the slots with what was at the path before the call, where nothing else has it."""
    notes: list[str] = field(default_factory=list[str])
    became: dict[int, int] = field(default_factory=dict[int, int])
    """Inodes of deeds before the call that others have taken the place of."""
    remade: bool = False
    """Whether anything was put back to its place that may be another inode there than before."""

    def settle(self, deeds: Sequence[Deed]) -> None:
        """Have the deeds before the call know theirs again, so that they can be undone. Those before an earlier opaque
        call stay: they are undone after the way back from that one, which knows the inodes of its own beginning."""
        for deed in since_opaque(deeds):
            deed.become(self.became)


@dataclass(frozen=True, slots=True)
class Hold:
    """Where displaced files are, and how to have a directory for them."""

    held: Holding | None
    make: Callable[[], Holding]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """The places of held files, with their inodes."""
        if self.held is not None:
            for place, found in self.held.entries():
                if not stat.S_ISDIR(found.st_mode):
                    yield place, found.st_ino


_REPEATABLE = frozenset({"put", "swap", "times"})
"""Undone already, such a deed is known by its slot (or a time), whatever somebody has put at its path since."""
_NOTED_AT_ONCE = 64


def undo_deeds(runner: DeedRunner, deeds: list[Deed], down_to: int, noted: Settled) -> Undone:
    """Undo the deeds from the last to number `down_to`; ``noted`` hears of those that are settled, one or several at a
    time, in order. They leave the list. What somebody else changed meanwhile is left alone."""
    undone = Undone()
    settled: list[Deed] = []
    try:
        while len(deeds) > down_to:
            deed = deeds[-1]
            if undone.left and any(_depends(deed, left) for left in undone.left):
                undone.left.append(deeds.pop())
                continue
            # Whoever recovers from a kill undoes again what is undone and not noted yet. That must not be taken for
            # somebody else's doing, so all but what can be told at any time is noted when it is done.
            at_once = deed.kind not in _REPEATABLE
            if settled and (at_once or len(settled) == _NOTED_AT_ONCE):
                noted(settled, None)
                settled.clear()
            try:
                runner.undo(deed)
            except Conflict as conflict:
                if settled:
                    noted(settled, None)
                    settled.clear()
                undone.met(str(conflict), deed)
                noted([deeds.pop()], str(conflict))
                continue
            except OSError as error:
                undone.left.append(deeds.pop())
                undone.errors.append(error)
                continue
            settled.append(deed)
            deeds.pop()
            if at_once:
                noted(settled, None)
                settled.clear()
    finally:
        runner.let_go()
        if settled:
            noted(settled, None)
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
