"""The cost of a piece of work as a number that is the same at every run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def count_calls(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, those of C included."""
    called = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal called
        called += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what others have left is none of this work's
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return called
