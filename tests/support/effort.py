"""How much of a long test one run does: all of it in `make prove`, else a spread that the run's seed moves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain

import pytest

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


def one_in(stride: int, cases: Iterable[object]) -> list[object]:
    """The parameters of a slow test: all in the long form and for a case that is named by its id, else one in
    ``stride``, by the seed. Of a product whose last part has ``stride`` members, each member of each part is there."""
    return [
        case
        if (number + number // stride + SEED) % stride == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.prove)
        for number, case in enumerate(cases)
    ]


def amount(*, prove: int, test: int) -> int:
    return prove if PROVING else test
