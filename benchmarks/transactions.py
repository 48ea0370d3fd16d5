"""What taking a workspace back costs, beside the plainest way to do it: a dictionary of files that is copied before.

The dictionary checks no path, keeps no time, locks nothing and does not know what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import cycle

from measure import Row, alternated, less, repeated, report
from trees import loaded, sample

from ringfence.filesystem import InMemoryFilesystem
from ringfence.participants import CallInfo, Transactional, sort_participants
from ringfence.receipts import Receipt
from ringfence.runtime import Session, tool_transaction
from ringfence.runtime.transaction import Transaction

BESIDE = "dict copy"
CONTENTS = cycle([b"a" * 1_000, b"b" * 1_000])
RECEIPT = Receipt("", "", "bench", None, "committed", "", datetime.now(UTC), 0.0, "", "")
CALL = CallInfo("bench", "bench")


class Undone(Exception):
    """Ends a transaction that is to be rolled back."""


@dataclass(frozen=True)
class Targets:
    """How many times less than the dictionary copy takes."""

    mark: float | None = None
    commit: float | None = None
    rollback: float | None = None


@dataclass(frozen=True)
class Holding:
    participants: tuple[Transactional, ...]


class Ours:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.filesystem: InMemoryFilesystem = loaded(files)
        self.session = Session()
        self.holding = Holding((self.filesystem,))
        self.locks = sort_participants((self.filesystem,))

    def mark(self) -> None:
        self.filesystem.commit(self.filesystem.begin(CALL), RECEIPT)

    def snapshot(self) -> None:
        self.filesystem.snapshot()  # and dropped: that releases it

    def transaction(self, writes: list[str], *, keep: bool) -> None:
        content = next(CONTENTS)
        call = Transaction("bench", "bench", None)
        call.acquire(self.locks)
        call.begin()
        files = self.filesystem.for_call(call)
        for path in writes:
            files.write_bytes(path, content)
        if keep:
            call.seal()
            call.commit(RECEIPT)
        else:
            call.rollback()
        call.release()

    def tool_transaction(self, writes: list[str], *, keep: bool) -> None:
        content = next(CONTENTS)
        try:
            with tool_transaction(self.session, self.holding):
                for path in writes:
                    self.filesystem.write_bytes(path, content)
                if not keep:
                    raise Undone
        except Undone:
            pass


class DictCopy:
    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)

    def mark(self) -> None:
        self.files.copy()

    def transaction(self, writes: list[str], *, keep: bool) -> None:
        content = next(CONTENTS)
        kept = self.files.copy()
        for path in writes:
            self.files[path] = content
        if not keep:
            self.files = kept


def rows_at(count: int, targets: Targets) -> Iterator[Row]:
    area = f"undo in memory, {count:,}"
    files = sample(count)
    ours, theirs = Ours(files), DictCopy(files)
    paths = list(files)
    one, ten = paths[:1], paths[:: max(1, count // 10)][:10]

    def row(
        what: str,
        mine: Callable[[], object],
        plain: Callable[[], object],
        at_least: float | None,
        at_most_us: float | None = None,
    ) -> Row:
        spreads = alternated(repeated(mine), repeated(plain))
        return less(area, what, BESIDE, spreads, at_least=at_least, at_most_us=at_most_us)

    yield row("mark and release", ours.mark, theirs.mark, targets.mark, 1)
    yield row("public snapshot() and release", ours.snapshot, theirs.mark, None, 5)
    for what, writes, keep, at_least in (
        ("1 write, commit", one, True, targets.commit),
        ("10 writes, rollback", ten, False, targets.rollback),
    ):
        plain = partial(theirs.transaction, writes, keep=keep)
        yield row(f"Transaction: {what}", partial(ours.transaction, writes, keep=keep), plain, at_least)
        yield row(f"tool_transaction: {what}", partial(ours.tool_transaction, writes, keep=keep), plain, None)


def rows() -> Iterator[Row]:
    yield from rows_at(100, Targets())
    yield from rows_at(10_000, Targets(mark=300, commit=12, rollback=4))
    yield from rows_at(100_000, Targets(mark=5_000, commit=400, rollback=100))


if __name__ == "__main__":
    report(rows())
