"""How much of a long test one run does: all of it in `make prove`, else a spread that the run's seed moves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

PROVING = os.environ.get("RINGFENCE_PROVE") == "1"
SEED = int(os.environ.get("RINGFENCE_SEED", "0"))


def kill_points(stride: int, *, start: int = 0) -> Iterator[int]:
    """Where to kill: everywhere in the long form, else first of all and at one point in ``stride``, by the seed."""
    if PROVING:
        return iter(range(start, start + 10_000))
    return chain([start], range(start + 1 + SEED % stride, start + 10_000, stride))


def spread(points: range, stride: int) -> range:
    """Of all points in the long form, else one in ``stride``, by the seed."""
    return points if PROVING else points[SEED % stride :: stride]


def amount(*, prove: int, test: int) -> int:
    return prove if PROVING else test
