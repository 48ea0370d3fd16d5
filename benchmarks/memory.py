"""What 1,000 transactions on 10,000 files leave in memory, beside what the first 100 left."""

from __future__ import annotations

import gc
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator

from measure import Row, Spread, report
from transactions import Ours
from trees import sample

AREA = "memory, 10,000 files"
KIB = 1024


class Worked:
    """Transactions of ten writes to a hundred files all over a workspace, as many rolled back as committed."""

    def __init__(self) -> None:
        files = sample(10_000)
        self.ours = Ours(files)
        self.groups = [list(files)[start::1_000] for start in range(10)]
        self.done = 0

    def transactions(self, number: int) -> None:
        for n in range(self.done, self.done + number):
            # The files keep their size, so that nothing can grow but what is left behind.
            self.ours.tool_transaction(self.groups[n % 10], keep=n % 20 < 10)
        self.done += number
        gc.collect()


def allocated() -> float:
    return tracemalloc.get_traced_memory()[0]


def highest_resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)


def row(what: str, held: Callable[[], float], most_growth: int) -> Row:
    worked = Worked()
    worked.transactions(100)
    before = held()
    worked.transactions(1_000)
    after = held()
    growth = after - before
    return Row(
        AREA,
        f"growth in 1,000 transactions, {what}",
        "all, before",
        after / before,
        f"<= {most_growth // KIB} KiB",
        growth <= most_growth,
        Spread(growth, growth, growth),
        Spread(before, before, before),
        "B",
    )


def rows() -> Iterator[Row]:
    yield row("resident at its highest", highest_resident, 1024 * KIB)
    tracemalloc.start()
    yield row("held by Python", allocated, 64 * KIB)


if __name__ == "__main__":
    report(rows())
