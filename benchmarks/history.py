"""What taking a whole tree into the history costs, and finding out what others changed in it.

Beside the peer, git, and the least that could be done: reading, hashing and compressing the bytes.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from time import perf_counter, sleep

import peer
from disk import GIT, Git, Places
from measure import Row, Side, alternated, flat, less, report, scratch_directory
from trees import DJANGO, Tree, trees

from ringfence_sandbox import Workspace

FIRST_TARGETS = {"10,000 files": (6, 3.5, 1.6), DJANGO: (4.5, 4, 1.6)}
SCAN_TARGETS = {1: 1.2, 100: 2, 1_000: 5}


def each_anew(make: Callable[[Path, Path], object], places: Places) -> Side:
    """On a copy of the tree that no store has seen; copying it does not count, nor does closing."""

    def side(number: int) -> float:
        took = 0.0
        for _ in range(number):
            root, store = places.copy()
            started = perf_counter()
            made = make(root, store)
            took += perf_counter() - started
            if isinstance(made, Workspace):
                made.close()
            # The copy stays until the end: ext4 avoids what was deleted lately, at the cost of whoever writes next.
        return took / number

    return side


def peers_first(root: Path, store: Path) -> None:
    peer.on_disk(root, store).snapshot()


def least(root: Path, store: Path) -> None:
    for top, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(top, name), "rb") as file:
                content = file.read()
            hashlib.sha1(content, usedforsecurity=False).digest()
            zlib.compress(content, 1)


def first(tree: Tree, places: Places) -> Iterator[Row]:
    area, what = f"first snapshot, {tree.name}", "a workspace is opened"
    beside_peer, beside_git, beside_least = FIRST_TARGETS.get(tree.name, (None, None, None))
    others = [(GIT, Git, beside_git)]
    if peer.installed():
        others.insert(0, (peer.NAME, peers_first, beside_peer))
    makers = (lambda root, store: Workspace.open(root, store=store), *(make for _, make, _ in others), least)
    took, *theirs, floor = alternated(*(each_anew(make, places) for make in makers), seconds=8, at_least=2)
    for (beside, _, at_least), spread in zip(others, theirs, strict=True):
        yield less(area, what, beside, (took, spread), at_least=at_least)
    yield flat(area, what, "read, hash, compress", (took, floor), at_most=beside_least)


class Changed:
    """A tree in which a program changes some files before each look at it."""

    def __init__(self, root: Path, paths: list[str]) -> None:
        self._files = [root / path for path in paths]
        self._turns = count()

    def change(self, number: int) -> None:
        text = f"# turn {next(self._turns)}\n" * 60
        for file in self._files[:: max(1, len(self._files) // number)][:number]:
            file.write_text(text)


def after_changes(changed: Changed, number: int, look: Callable[[], object]) -> Side:
    def side(times: int) -> float:
        took = 0.0
        for _ in range(times):
            changed.change(number)
            started = perf_counter()
            look()
            took += perf_counter() - started
        return took / times

    return side


def scans(tree: Tree, places: Places) -> Iterator[Row]:
    area, paths = f"scan, {tree.name}", tree.paths
    has_targets = tree.name in FIRST_TARGETS
    root, store = places.copy()
    workspace = Workspace.open(root, store=store)
    changed = Changed(root, paths)
    if peer.installed():
        peers_root, peers_store = places.copy()
        theirs, theirs_changed = peer.on_disk(peers_root, peers_store), Changed(peers_root, paths)
        theirs.snapshot()
        for number, at_least in SCAN_TARGETS.items():
            spreads = alternated(
                after_changes(changed, number, workspace._look),
                after_changes(theirs_changed, number, theirs.snapshot),
                seconds=3,
            )
            what = f"snapshot by scan, {number:,} changed"
            yield less(area, what, peer.NAME, spreads, at_least=at_least if has_targets else None)
    git_root, git_store = places.copy()
    git = Git(git_root, git_store)
    sleep(2.1)  # what was written within the last tick is read again, here as there
    workspace._look()
    git.run("status", "--porcelain")
    spreads = alternated(timed_look(workspace), timed_look(git), seconds=3)
    workspace.close()
    yield flat(area, "scan of an unchanged tree", "git status", spreads, at_most=1.7 if has_targets else None)


def timed_look(one: Workspace | Git) -> Side:
    look = one._look if isinstance(one, Workspace) else lambda: one.run("status", "--porcelain")

    def side(number: int) -> float:
        started = perf_counter()
        for _ in range(number):
            look()
        return (perf_counter() - started) / number

    return side


def rows() -> Iterator[Row]:
    with scratch_directory() as scratch:
        for tree in trees(scratch):
            places = Places(scratch, tree.root)
            yield from first(tree, places)
            yield from scans(tree, places)


if __name__ == "__main__":
    report(rows())
