"""Forks: made beside a bare copy and a worktree of git, opened, and promoted beside a call that writes as much."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter

from disk import GIT, Places
from measure import Row, Side, alternated, flat, less, repeated, report, scratch_directory
from trees import loaded, sample, written

from ringfence_sandbox import Workspace

FILES = (1_000, 10_000)
CHANGED = (1, 100)


def area(files: int) -> str:
    return f"fork, {files:,} files"


def timed(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Side:
    """In time as a clock shows it: the baselines work in processes of their own. ``before`` does not count."""

    def side(number: int) -> float:
        took = 0.0
        for _ in range(number):
            before()
            started = perf_counter()
            work()
            took += perf_counter() - started
        return took / number

    return side


def made(places: Places, scratch: Path, files: int) -> Iterator[Row]:
    """The copies stay until the end: ext4 avoids what was deleted lately, at the cost of whoever writes next."""
    root, store = places.copy()
    for arguments in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=b", "-c", "user.email=b@b", "commit", "-qm", "b"),
    ):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    with Workspace.open(root, store=store) as workspace:
        numbers = count()

        def fork() -> None:
            workspace.fork(f"f{next(numbers)}").close()

        def copy() -> None:
            subprocess.run(["cp", "-a", str(root), str(scratch / f"copy-{next(numbers)}")], check=True)

        def worktree() -> None:
            place = str(scratch / f"worktree-{next(numbers)}")
            subprocess.run(["git", "worktree", "add", "-q", "--detach", place], cwd=root, check=True)

        ours, bare, gits = alternated(timed(fork), timed(copy), timed(worktree), seconds=8)
        yield flat(area(files), "a fork is made, opened and closed", "cp -a", (ours, bare))
        yield flat(area(files), "a fork is made, opened and closed", f"{GIT} worktree add", (ours, gits), at_most=1)


def opened(places: Places, files: int) -> Iterator[Row]:
    root, store = places.copy()
    with Workspace.open(root, store=store) as workspace:
        workspace.fork("a").close()
        fork = workspace.fork_named("a")

        def open_it() -> None:
            Workspace.open(fork.root, store=fork.store).close()

        def look_at_all() -> None:
            for place, _, names in os.walk(fork.root):
                for name in names:
                    os.lstat(os.path.join(place, name))

        spreads = alternated(timed(open_it), timed(look_at_all), seconds=3)
        yield less(area(files), "a fork is opened and closed", "lstat of each file", spreads, at_most_us=50_000)


def promoted(places: Places, files: int) -> Iterator[Row]:
    root, store = places.copy()
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
    turns = count()
    with Workspace.open(root, store=store) as workspace, workspace.fork("a") as fork:
        for number in CHANGED:
            some = paths[:: len(paths) // number][:number]

            def change(some: list[str] = some) -> None:
                text = f"# turn {next(turns)}\n" * 60
                with fork.transaction("write", opaque=False):
                    for path in some:
                        fork.filesystem.write(path, text)

            def call(some: list[str] = some) -> None:
                text = f"# turn {next(turns)}\n" * 60
                with workspace.transaction("write", opaque=False):
                    for path in some:
                        workspace.filesystem.write(path, text)

            def promote() -> None:
                assert workspace.promote(fork).step is not None

            def back(some: list[str] = some, change: Callable[[], None] = change) -> None:
                """The files are as at the fork here, and have changed there."""
                workspace.restore(0)
                change()

            spreads = alternated(timed(promote, back), timed(call), seconds=3)
            what = f"{number:,} changed file{'s are' if number > 1 else ' is'} promoted"
            yield flat(area(files), what, "a call that writes as many", spreads, at_most=1.5)


def in_memory(files: int) -> Row:
    loaded_files, bare = loaded(sample(files)), sample(files)
    spreads = alternated(repeated(loaded_files.fork), repeated(bare.copy))
    return less(area(files), "a fork in memory", "a copied dictionary", spreads, at_most_us=10)


def rows(sizes: Sequence[int] = FILES) -> Iterator[Row]:
    for files in sizes:
        yield in_memory(files)
        with scratch_directory() as scratch:
            places = Places(scratch, written(scratch / "sample", sample(files)))
            yield from opened(places, files)
            yield from promoted(places, files)
            yield from made(places, scratch, files)


if __name__ == "__main__":
    report(rows([int(files) for files in sys.argv[1:]] or FILES))
