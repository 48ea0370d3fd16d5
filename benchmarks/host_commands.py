"""A shell command that is kept or taken back, over trees of many files: `Workspace.run`, peers, and git.

Each side has a tree of its own. The command that is kept appends to a file and makes one; the one that fails appends,
removes and makes. Processor time is this process's and that of all it waited for; what a clock shows stands beside it.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol

import peer
from measure import Row, Spread, flat, less, report, scratch_directory
from trees import sample, written

from ringfence_sandbox import Workspace

SIZES = (1_000, 10_000, 100_000)
SECONDS = 6.0
LEAST_ROUNDS, MOST_ROUNDS = 3, 40
ROUNDS_OF_A_P99 = 200
WHATS = {True: "command that is kept", False: "command that is rolled back"}


class Undoes(Protocol):
    """A way to run a command that can be taken back."""

    name: str

    def run(self, command: str, *, keep: bool) -> None: ...

    def close(self) -> None: ...


class Ours:
    name = "ringfence"

    def __init__(self, root: Path, store: Path) -> None:
        self._open = ExitStack()
        self.workspace = self._open.enter_context(Workspace.open(root, store=store))

    def run(self, command: str, *, keep: bool) -> None:
        done = self.workspace.run(command, shell=True)
        assert done.outcome == ("committed" if keep else "failed"), done

    def close(self) -> None:
        self._open.close()


class Bare:
    name = "the command alone"

    def __init__(self, root: Path, store: Path) -> None:
        self._root = root

    def run(self, command: str, *, keep: bool) -> None:
        subprocess.run(command, shell=True, cwd=self._root, check=keep)

    def close(self) -> None: ...


class Git:
    """A commit after a command that is kept; the tree as it was committed after one that fails."""

    name = "git"

    def __init__(self, root: Path, store: Path) -> None:
        self._root = root
        self._git = ["git", f"--git-dir={store}", f"--work-tree={root}", "-c", "user.name=b", "-c", "user.email=b@b"]
        self._do("init", "-q")
        self._commit()

    def _do(self, *arguments: str) -> None:
        subprocess.run([*self._git, *arguments], check=True, capture_output=True, cwd=self._root)

    def _commit(self) -> None:
        self._do("add", "-A")
        self._do("commit", "-q", "--allow-empty", "-m", "step")

    def run(self, command: str, *, keep: bool) -> None:
        subprocess.run(command, shell=True, cwd=self._root, check=keep)
        if keep:
            self._commit()
        else:
            self._do("reset", "-q", "--hard")
            self._do("clean", "-qfd")

    def close(self) -> None: ...


class Peer:
    """Its snapshot before the command, and its restore after one that fails."""

    name = peer.NAME

    def __init__(self, root: Path, store: Path) -> None:
        self._root = root
        self._files = peer.on_disk(root, store)
        self._files.snapshot()

    def run(self, command: str, *, keep: bool) -> None:
        before = self._files.snapshot()
        subprocess.run(command, shell=True, cwd=self._root, check=keep)
        if not keep:
            self._files.restore(before)

    def close(self) -> None:
        self._files.cleanup()


class Sandlock:
    """It runs the command on a view of its own, and writes that back. It keeps no history and has no undo."""

    name = peer.SANDLOCK

    def __init__(self, root: Path, store: Path) -> None:
        self._root = str(root)

    def run(self, command: str, *, keep: bool) -> None:
        done = peer.sandlocked(self._root, command)
        assert done is keep

    def close(self) -> None: ...


@dataclass(frozen=True)
class Spent:
    """Of one command, in seconds."""

    processor: float
    clock: float


def spent(run: Callable[[], None]) -> Spent:
    def processor() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    before, started = processor(), perf_counter()
    run()
    return Spent(processor() - before, perf_counter() - started)


def in_turns(sides: list[Undoes], command: str, *, keep: bool) -> list[list[Spent]]:
    """A B C A B C ..., so that whatever else the machine does hits all sides alike."""
    rounds: list[list[Spent]] = [[] for _ in sides]
    ends = perf_counter() + SECONDS
    while len(rounds[0]) < LEAST_ROUNDS or (perf_counter() < ends and len(rounds[0]) < MOST_ROUNDS):
        for side, times in zip(sides, rounds, strict=True):
            times.append(spent(lambda side=side: side.run(command, keep=keep)))
    return rounds


def spread(times: list[float]) -> Spread:
    return Spread(statistics.median(times), min(times), max(times))


def rows_at(number: int, scratch: Path) -> Iterator[Row]:
    area, files = f"host command, {number:,}", sample(number)
    kinds: list[Callable[[Path, Path], Undoes]] = [Ours, Bare]
    if shutil.which("git") is not None:
        kinds.append(Git)
    if peer.installed():
        kinds.append(Peer)
    if peer.sandlock_installed():
        kinds.append(Sandlock)
    first, second, *_ = files
    commands = {
        True: f"echo more >> {first}; echo new > made.txt",
        False: f"echo more >> {first}; rm -f {second}; echo new > other.txt; exit 3",
    }
    with ExitStack() as opened:
        sides: list[Undoes] = []
        for at, kind in enumerate(kinds):
            side = kind(written(scratch / f"tree-{at}", files), scratch / f"store-{at}")
            opened.callback(side.close)
            sides.append(side)
        for side in sides:  # what has to be done once, a watch for one, is not a command's
            side.run(commands[True], keep=True)
        for keep, what in WHATS.items():
            ours, *others = in_turns(sides, commands[keep], keep=keep)
            for side, times in zip(sides[1:], others, strict=True):
                measured = [spread([each.processor for each in mine]) for mine in (ours, times)]
                at_least = 1 if side.name == peer.SANDLOCK else None
                yield less(area, what, side.name, measured, at_least=at_least)
                clocks = [spread([each.clock for each in mine]) for mine in (ours, times)]
                yield less(area, f"{what}, by the clock", side.name, clocks)
            yield p99(area, f"p99 of a {what}", sides[0], commands[keep], keep=keep)


def p99(area: str, what: str, side: Undoes, command: str, *, keep: bool) -> Row:
    clocks = sorted(spent(lambda: side.run(command, keep=keep)).clock for _ in range(ROUNDS_OF_A_P99))
    slowest = clocks[-max(1, len(clocks) // 100)]
    return flat(area, what, "its median", (Spread(slowest, slowest, clocks[-1]), spread(clocks)), at_most=3)


def rows() -> Iterator[Row]:
    for number in SIZES:
        with scratch_directory() as scratch:
            yield from rows_at(number, scratch)


if __name__ == "__main__":
    report(rows())
