"""How much of a long test one run does: all of it in `make prove`, else a spread that the run's seed moves."""

from __future__ import annotations

import os
from collections.abc import Iterator

PROVING = os.environ.get("RINGFENCE_PROVE") == "1"
SEED = int(os.environ.get("RINGFENCE_SEED", "0"))


def kill_points(stride: int, *, start: int = 0) -> Iterator[int]:
    """Where to kill: at every point in the long form, else at one in ``stride``, the first of them by the seed."""
    first = start if PROVING else start + SEED % stride
    return iter(range(first, first + 10_000, 1 if PROVING else stride))


def amount(*, prove: int, test: int) -> int:
    return prove if PROVING else test
