"""Commands on this machine as calls, over trees of many files: found by a watch, beside scans, and beside `git status`.

In time as a clock shows it, since the work is done by other processes. A call of ours looks at the tree before and
after, and can be taken back. `git status` only says what is changed, and takes nothing in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from time import sleep

from disk import timed, written
from measure import Row, Spread, alternated, flat, less, report, scratch_directory
from trees import sample

from ringfence.runtime import Session, Transactional, tool_transaction
from ringfence_sandbox import Detect, HostFilesystem

TRUE = shutil.which("true") or "/bin/true"
SIZES = (1_000, 10_000, 100_000)
MOST_SCANNED = 10_000
"""A larger tree is not copied a second time, to be scanned."""


class Undone(Exception):
    """Ends a call that is to be rolled back."""


class Commands:
    """The calls over one tree, with a store that goes with it."""

    def __init__(self, root: Path, store: Path, detect: Detect = "auto") -> None:
        self._open = ExitStack()
        self.participants: tuple[Transactional, ...] = (
            self._open.enter_context(HostFilesystem(root, store=store, detect=detect)),
        )
        self._session = Session()
        for _ in range(2):  # the first takes in the tree, and the second finds nothing that is too new to be told
            self.true()
            sleep(0.05)

    def call(self, command: Callable[[], object], *, keep: bool = True) -> None:
        try:
            with tool_transaction(self._session, self, tag="command", opaque=True):
                command()
                if not keep:
                    raise Undone
        except Undone:
            pass

    def true(self) -> None:
        self.call(run_true)

    def close(self) -> None:
        self._open.close()


def run_true() -> None:
    os.waitpid(os.posix_spawn(TRUE, ["true"], {}), 0)


def rows(scratch: Path) -> Iterator[Row]:
    small: Spread | None = None
    for number in SIZES:
        area, files = f"command, {number:,}", sample(number)
        root = written(scratch / f"tree-{number}", files)
        with closing(Commands(root, scratch / f"store-{number}")) as watched:
            true = timed(watched.true)
            ours, alone = alternated(true, timed(run_true), seconds=2)
            yield less(area, "call that runs true", "true alone", (ours, alone))
            if small is not None:
                yield flat(area, "call that runs true", "in 1,000 files", (ours, small), at_most=2)
            small = small or ours
            if number <= MOST_SCANNED:
                tree = written(scratch / f"scanned-{number}", files)
                with closing(Commands(tree, scratch / f"scans-{number}", "scan")) as scanned:
                    spreads = alternated(true, timed(scanned.true), seconds=4)
                    yield less(area, "call that runs true", "by scans", spreads, at_least=2)
            if shutil.which("git") is not None:
                status = git_status(root, scratch / f"git-{number}")
                yield less(area, "call that runs true", "git status", alternated(true, timed(status), seconds=4))
            yield from changes(area, watched, root / next(iter(files)))


def changes(area: str, watched: Commands, file: Path) -> Iterator[Row]:
    def append() -> None:
        with open(file, "ab") as opened:
            opened.write(b"more\n")

    true = timed(watched.true)
    for what, keep in (("call that changes one file", True), ("the same, rolled back", False)):
        change = timed(lambda keep=keep: watched.call(append, keep=keep))
        yield flat(area, what, "call that runs true", alternated(change, true, seconds=2), at_most=None)


def git_status(root: Path, repository: Path) -> Callable[[], object]:
    """`git status` over a tree, with a repository outside of it."""
    command = ["git", f"--git-dir={repository}", f"--work-tree={root}"]
    for arguments in (["init", "-q"], ["add", "-A"]):
        subprocess.run([*command, *arguments], check=True)
    return lambda: subprocess.run([*command, "status", "--porcelain"], check=True, capture_output=True)


def main() -> None:
    with scratch_directory() as scratch:
        report(rows(scratch))


if __name__ == "__main__":
    main()
