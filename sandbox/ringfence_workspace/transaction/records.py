"""The undo log of one transaction: what was at each path before the first change of it, and what the call put there.

A record is written ahead of the change. A directory that is moved, or deleted with all that is in it, ends an `Epoch`,
since from then on the same names mean other files. `restore.py` goes back over epochs, the newest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from ringfence_workspace.tree.state import Json, State


@dataclass(slots=True)
class UndoRecord:
    """One path. ``afters`` are all states that the call gave it, oldest first; None: nothing is there."""

    path: str
    before: State | None
    afters: list[State | None] = field(default_factory=list[State | None])
    slots: list[int] = field(default_factory=list[int])
    """Where the call has made what it gave the path, and what that displaced is now."""

    def to_json(self) -> dict[str, Json]:
        before = None if self.before is None else self.before.to_json()
        afters: list[Json] = [one and one.to_json() for one in self.afters]
        return {"undo": self.path, "before": before, "after": afters, "slots": [*self.slots]}


@dataclass(frozen=True, slots=True)
class DirectoryMove:
    """A directory that was renamed; one that was deleted is ``new``, a path in the directory of displaced files."""

    old: str
    new: str
    inode: int

    def to_json(self) -> dict[str, Json]:
        return {"move": [self.old, self.new, self.inode]}


@dataclass(slots=True)
class Epoch:
    """Records by path, and the move of a directory that came after them."""

    records: dict[str, UndoRecord] = field(default_factory=dict[str, UndoRecord])
    move: DirectoryMove | None = None

    @property
    def is_empty(self) -> bool:
        return not self.records and self.move is None


def replayed(epochs: list[Epoch], record: Mapping[str, object]) -> None:
    """Add what a record of the log says to the epochs that it goes on from."""
    match record:
        case {"undo": str(path), "before": before, "after": list(), "slots": list()}:
            afters = [State.from_json(one) for one in cast("list[object]", record["after"])]
            slots = cast("list[int]", record["slots"])
            known = epochs[-1].records.get(path)
            if known is not None:  # of an operation that failed, or the time that somebody else has given a directory
                known.before = State.from_json(before)
                known.afters += afters
                known.slots += slots
            else:
                epochs[-1].records[path] = UndoRecord(path, State.from_json(before), afters, [*slots])
        case {"after": str(path), "state": state, "slots": list()}:
            if path in epochs[-1].records:
                epochs[-1].records[path].afters.append(State.from_json(state))
                epochs[-1].records[path].slots += cast("list[int]", record["slots"])
        case {"move": [str(old), str(new), int(inode)]}:
            epochs[-1].move = DirectoryMove(old, new, inode)
            epochs.append(Epoch())
        case {"epoch": None}:
            epochs.append(Epoch())
        case {"restored": int(count)}:
            epochs[count:] = [Epoch()]
        case {"unmoved": str()}:  # the rename failed
            epochs.pop()
            epochs[-1].move = None
        case _:
            pass


def last_slot(epochs: Sequence[Epoch]) -> int:
    """The greatest number that the log names of what is displaced; -1: none."""
    slots = [slot for epoch in epochs for record in epoch.records.values() for slot in record.slots]
    moved = [epoch.move.new.partition("/")[2] for epoch in epochs if epoch.move is not None]
    return max([*slots, *(int(name) for name in moved if name.isdecimal())], default=-1)


def is_below(path: str, directory: str) -> bool:
    return not directory or path.startswith(f"{directory}/")


def rebased(path: str, old: str, new: str) -> str:
    """A path below `old`, or `old` itself, as it is called once `old` is `new`."""
    return new + path[len(old) :]
