"""The one order in which all calls take the locks of what takes part in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ringfence.participants import CallLock, Transactional

_serial = attrgetter("serial")


@dataclass(frozen=True, slots=True)
class Participants:
    """What takes part in a call, by the locks, in their order."""

    by_lock: Mapping[CallLock, Transactional]
    kept: tuple[CallLock, ...]
    """Of those that are not only undone. The durable come first: what they write can fail, and then all goes back."""


def sort_locks(participants: Iterable[Transactional]) -> Participants:
    found = {participant.lock: participant for participant in participants}
    by_lock = {lock: found[lock] for lock in sorted(found, key=_serial)}
    return Participants(by_lock, locks_to_keep(by_lock))


def locks_to_keep(held: Mapping[CallLock, Transactional]) -> tuple[CallLock, ...]:
    """Of those that are held, what is not only undone, the durable first."""
    kept = [lock for lock, participant in held.items() if not participant.rollback_only]
    return (*(lock for lock in kept if held[lock].durable), *(lock for lock in kept if not held[lock].durable))
