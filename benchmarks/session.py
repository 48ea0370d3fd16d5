"""A session's dispatch and snapshot, with little in it and with much."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import process_time
from typing import Any

import peer
from measure import Row, Side, alternated, flat, less, repeated, report

from ringfence.runtime import Session

AREA = "session"


@dataclass(frozen=True)
class Noted:
    text: str
    line: int


def holding(make: Callable[[], Any], items: int) -> Any:
    session = make()
    session[Noted].seed(tuple(Noted("something worth keeping", line) for line in range(items)))
    return session


def dispatching(make: Callable[[], Any], items: int) -> Side:
    """Each batch in a session of its own, since dispatching makes it longer."""

    def side(number: int) -> float:
        session = holding(make, items)
        gc.collect()  # else collections meet what was just made, in one side more than in the other
        events = [Noted("new", line) for line in range(number)]
        started = process_time()
        for event in events:
            session.dispatch(event)
        return (process_time() - started) / number

    return side


def snapshotting(make: Callable[[], Any], items: int) -> Side:
    return repeated(holding(make, items).snapshot)


def rows() -> Iterator[Row]:
    if peer.installed():
        from weakincentives.runtime.session import Session as PeerSession

        ours, theirs = dispatching(Session, 1_000), dispatching(PeerSession, 1_000)
        yield less(AREA, "dispatch at 1,000 items", peer.NAME, alternated(ours, theirs), at_least=1_000)
        ours, theirs = snapshotting(Session, 100_000), snapshotting(PeerSession, 100_000)
        yield less(AREA, "snapshot at 100,000 items", peer.NAME, alternated(ours, theirs), at_most_us=5)
    spreads = alternated(dispatching(Session, 100_000), dispatching(Session, 1_000))
    yield flat(AREA, "dispatch at 100,000 items", "at 1,000", spreads)
    spreads = alternated(snapshotting(Session, 100_000), snapshotting(Session, 10))
    yield flat(AREA, "snapshot at 100,000 items", "at 10", spreads)


if __name__ == "__main__":
    report(rows())
