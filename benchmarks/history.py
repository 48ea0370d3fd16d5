"""What taking a whole tree into the history costs, and finding out what others changed in it.

Beside the peer, git, and the least that could be done: reading, hashing and compressing the bytes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from zipfile import ZipFile

import peer
from disk import GIT, Git, Places, written
from measure import Row, Side, alternated, flat, less, report, scratch_directory
from trees import sample

from ringfence_sandbox import Workspace

DJANGO = "Django==5.2.8"
FIRST_TARGETS = {"10,000 small files": (6, 3.5), DJANGO: (4.5, 4)}
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


def first(what: str, places: Places) -> Iterator[Row]:
    area = f"first snapshot, {what}"
    beside_peer, beside_git = FIRST_TARGETS[what]
    ours = each_anew(lambda root, store: Workspace.open(root, store=store), places)
    for beside, theirs, at_least in ((peer.NAME, peers_first, beside_peer), (GIT, Git, beside_git)):
        if beside != peer.NAME or peer.installed():
            spreads = alternated(ours, each_anew(theirs, places), seconds=5)
            yield less(area, "a workspace is opened", beside, spreads, at_least=at_least)
    spreads = alternated(ours, each_anew(least, places), seconds=5)
    yield flat(area, "a workspace is opened", "read, hash, compress", spreads, at_most=1.6)


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


def scans(area: str, places: Places, paths: list[str]) -> Iterator[Row]:
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
            yield less(area, f"snapshot by scan, {number:,} changed", peer.NAME, spreads, at_least=at_least)
    git_root, git_store = places.copy()
    git = Git(git_root, git_store)
    sleep(2.1)  # what was written within the last tick is read again, here as there
    workspace._look()
    git.run("status", "--porcelain")
    spreads = alternated(timed_look(workspace), timed_look(git), seconds=3)
    workspace.close()
    yield flat(area, "scan of an unchanged tree", "git status", spreads, at_most=1.7)


def timed_look(one: Workspace | Git) -> Side:
    look = one._look if isinstance(one, Workspace) else lambda: one.run("status", "--porcelain")

    def side(number: int) -> float:
        started = perf_counter()
        for _ in range(number):
            look()
        return (perf_counter() - started) / number

    return side


def django(scratch: Path) -> Path | None:
    """A real source tree, from the package index; None where that cannot be reached."""
    tree = scratch / "django"
    with suppress(subprocess.CalledProcessError):
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, DJANGO, "-d", scratch / "wheel"], check=True)
        with ZipFile(next((scratch / "wheel").iterdir())) as wheel:
            wheel.extractall(tree)
        return tree
    return None


def rows() -> Iterator[Row]:
    with scratch_directory() as scratch:
        files = sample(10_000)
        small = written(scratch / "small", files)
        yield from first("10,000 small files", Places(scratch, small))
        yield from scans("scan, 10,000 files", Places(scratch, small), list(files))
        tree = django(scratch)
        if tree is not None:
            yield from first(DJANGO, Places(scratch, tree))
            paths = [str(path.relative_to(tree)) for path in sorted(tree.rglob("*.py"))]
            yield from scans(f"scan, {DJANGO}", Places(scratch, tree), paths)


if __name__ == "__main__":
    report(rows())
