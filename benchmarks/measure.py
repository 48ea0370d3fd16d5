"""Two sides of a comparison, timed in turns in one process, and the row that comes of it."""

from __future__ import annotations

import gc
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal, TypeAlias

BATCH_SECONDS = 0.003
"""A batch is at least this long, so that the clock and one interruption by the system matter little."""
ROW_SECONDS = 1.0
LEAST_ROUNDS, MOST_ROUNDS = 5, 200

Side: TypeAlias = Callable[[int], float]
"""Runs that often and says how many seconds one run took, whatever has to be built for it not counted."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the rounds: seconds, or bytes."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what ringfence takes beside what the baseline takes, and whether that is good enough."""

    area: str
    what: str
    beside: str
    ratio: float
    """How many times less ringfence takes; in a row about growth, how many times more than what came before."""
    target: str
    met: bool | None
    ours: Spread
    baseline: Spread
    unit: Literal["s", "B"] = "s"


@contextmanager
def scratch_directory() -> Generator[Path]:
    """One that goes with the run, also when that is ended by SIGTERM, which Python leaves to the system."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-", ignore_cleanup_errors=True) as place:
        yield Path(place)


def repeated(function: Callable[[], object]) -> Side:
    """In processor time: nothing here waits for anything but other programs, which are not what is measured."""

    def side(number: int) -> float:
        started = process_time()
        for _ in range(number):
            function()
        return (process_time() - started) / number

    return side


def alternated(*sides: Side, seconds: float = ROW_SECONDS, at_least: int = LEAST_ROUNDS) -> list[Spread]:
    """A B A B ..., so that whatever else the machine does hits all sides alike."""
    numbers = [_enough(side) for side in sides]
    # Collections stay on, since garbage is part of a side's cost; what was built for the benchmark is not garbage.
    gc.collect()
    gc.freeze()
    rounds: list[list[float]] = [[] for _ in sides]
    ends = perf_counter() + seconds
    while len(rounds[0]) < at_least or (perf_counter() < ends and len(rounds[0]) < MOST_ROUNDS):
        for side, number, times in zip(sides, numbers, rounds, strict=True):
            times.append(side(number))
    gc.unfreeze()
    return [Spread(statistics.median(times), min(times), max(times)) for times in rounds]


def _enough(side: Side) -> int:
    number = 1
    while (took := side(number) * number) < BATCH_SECONDS:
        number = max(number + 1, min(number * 10, int(number * BATCH_SECONDS / took * 1.2)))
    return number


def less(
    area: str,
    what: str,
    beside: str,
    spreads: Iterable[Spread],
    *,
    at_least: float | None = None,
    at_most_us: float | None = None,
) -> Row:
    """A row about how many times less ringfence takes than its baseline, given as (ours, baseline)."""
    ours, baseline = spreads
    ratio = baseline.median / ours.median
    wanted: list[tuple[str, bool]] = []
    if at_least is not None:
        wanted.append((f">= {at_least:,g}x", ratio >= at_least))
    if at_most_us is not None:
        wanted.append((f"<= {at_most_us:g} us", ours.median <= at_most_us / 1e6))
    met = all(ok for _, ok in wanted) if wanted else None
    return Row(area, what, beside, ratio, ", ".join(text for text, _ in wanted), met, ours, baseline)


def flat(area: str, what: str, beside: str, spreads: Iterable[Spread], *, at_most: float | None = 1.2) -> Row:
    """A row about what must not cost more than the same with less behind it, given as (more, less)."""
    ours, baseline = spreads
    ratio = ours.median / baseline.median
    target, met = (f"<= {at_most:g}x more", ratio <= at_most) if at_most is not None else ("more", None)
    return Row(area, what, beside, ratio, target, met, ours, baseline)


def report(rows: Iterable[Row]) -> None:
    """To table.py, which started this process."""
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)


def reported(line: str) -> Row:
    fields = json.loads(line)
    return Row(**{**fields, "ours": Spread(**fields["ours"]), "baseline": Spread(**fields["baseline"])})
