"""What `import ringfence` takes in a new process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import peer
from measure import Row, Side, Spread, alternated, less, report

AREA = "import"
PACKAGE, EVERYTHING = "import ringfence", "from ringfence import *"
"""The first is the target. As a name is imported when it is first asked for, the second is what all of it takes."""
AT_MOST_SECONDS = 0.1
UNWANTED = ("openai", "anthropic", "podman", "dulwich", "rich", "click", "fsspec", "pydantic")


def starting(code: str) -> Side:
    """A process of its own each time, in processor time; it reads bytecode, which the first of them writes."""

    def side(number: int) -> float:
        started = of_children()
        for _ in range(number):
            subprocess.run([sys.executable, "-c", code], check=True)
        return (of_children() - started) / number

    return side


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def unwanted_modules(code: str) -> list[str]:
    code = f"{code}\nimport sys; print(*(name for name in {UNWANTED!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def rows() -> Iterator[Row]:
    peers = [f"import {peer.NAME}"] if peer.installed() else []
    bare, package, everything, *theirs = alternated(*map(starting, ["pass", PACKAGE, EVERYTHING, *peers]), seconds=10)
    unwanted = unwanted_modules(EVERYTHING)
    met = package.median - bare.median <= AT_MOST_SECONDS and not unwanted
    target = f"<= {AT_MOST_SECONDS * 1e3:g} ms more, no SDK, no pydantic"
    what = f"{PACKAGE} (all of it loads {', '.join(unwanted)})" if unwanted else PACKAGE
    yield Row(AREA, what, "python -c pass", package.median / bare.median, target, met, package, bare)
    yield Row(AREA, EVERYTHING, "python -c pass", everything.median / bare.median, "", None, everything, bare)
    for spread in theirs:
        nets = over(everything, bare), over(spread, bare)
        yield less(AREA, f"{EVERYTHING}, without python's own start", peer.NAME, nets)


def over(spread: Spread, bare: Spread) -> Spread:
    return replace(
        spread,
        median=spread.median - bare.median,
        low=spread.low - bare.median,
        high=spread.high - bare.median,
    )


if __name__ == "__main__":
    report(rows())
