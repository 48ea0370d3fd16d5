"""Whole tool calls on workspaces on disk of several sizes, beside the peer and git.

In time as a clock shows it, since the baselines work in processes of their own. A call of ours is all of it: the
policy, the receipt, the step. Of the peer's only what it does to files is counted, its snapshot before the call; git
is a commit of everything after it. The bare system calls are what any way of replacing files takes at the least.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import peer
from measure import Row, Side, Spread, alternated, flat, less, report, scratch_directory
from trees import Tree, sample, trees, written

from ringfence.adapters import ToolExecutor
from ringfence.filesystem import Filesystem
from ringfence.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    Tool,
    ToolContext,
    ToolResult,
)
from ringfence.runtime import Session
from ringfence_sandbox import Workspace
from ringfence_workspace.host import Durability
from ringfence_workspace.tree.kernel import Renames, abilities

GIT = "git"
KERNEL = "the bare system calls"
GROWTH_BYTES = 4.5 * 1024
NEEDLE = "a text that is in no file"
COMMIT_TARGETS = {0: 1_000, 1: 20, 10: 8, 100: 3, 1_000: 0.8}
ROLLBACK_TARGETS = {1: 1, 10: 1, 100: 1}
TARGETS_ARE_FOR = "10,000 files"


@dataclass(frozen=True)
class Work:
    """What a call does: it writes these files, or where there are none reads one, and then it may fail."""

    paths: tuple[str, ...]
    read: str
    content: str
    fails: bool = False


def work(params: Work, *, context: ToolContext) -> ToolResult[None]:
    files = context.filesystem
    assert files is not None
    if params.read:
        files.read(params.read)
    for path in params.paths:
        files.write(path, params.content)
    return ToolResult.error("as it was asked to") if params.fails else ToolResult.ok(None, "done")


@dataclass(frozen=True)
class Paths:
    paths: tuple[str, ...]


def read_file(params: Paths, *, context: ToolContext) -> ToolResult[None]:
    files = context.filesystem
    assert files is not None
    for path in params.paths:
        files.read(path)
    return ToolResult.ok(None, "read")


class Ours:
    def __init__(self, root: Path, store: Path, durability: Durability = "process") -> None:
        self._open = ExitStack()
        self.workspace = self._open.enter_context(Workspace.open(root, store=store, durability=durability))
        tool = Tool[Work, None](name="work", description="Works on files.", handler=work)
        reads = Tool[Paths, None](name="read_file", description="Reads files.", handler=read_file)
        section = MarkdownSection(
            title="Files", key="files", template="Files.", tools=[tool, reads], policies=[ReadBeforeWritePolicy()]
        )
        template = PromptTemplate(ns="bench", key="disk", sections=[section])
        prompt = Prompt(template).bind(resources={Filesystem: self.workspace.filesystem})
        self._open.enter_context(prompt.resources)
        self._executor = ToolExecutor(prompt=prompt, session=Session())
        self._read = first_file(root)
        self._known: set[str] = set()

    def read(self, paths: Sequence[str]) -> None:
        """What the policy asks for once, before the first call that changes a file."""
        unknown = [path for path in paths if path not in self._known]
        if unknown:
            assert self._executor.call("read_file", {"paths": unknown}).success
            self._known.update(unknown)

    def call(self, paths: Sequence[str], content: str, *, fails: bool = False) -> None:
        self.read(paths)
        arguments = {"paths": list(paths), "read": "" if paths else self._read, "content": content, "fails": fails}
        result = self._executor.call("work", arguments)
        assert result.success is not fails, result.message

    def close(self) -> None:
        self._open.close()


class Peer:
    def __init__(self, root: Path, store: Path) -> None:
        self._read = first_file(root)
        self.files = peer.on_disk(root, store)
        self.files.snapshot()

    def call(self, paths: Sequence[str], content: str, *, fails: bool = False) -> None:
        before = self.files.snapshot()
        if not paths:
            self.files.read(self._read)
        for path in paths:
            self.files.write(path, content)
        if fails:
            self.files.restore(before)

    def close(self) -> None:
        self.files.cleanup()


class Git:
    """A repository beside the tree, as a checkpoint of an agent would use it."""

    def __init__(self, root: Path, store: Path) -> None:
        self._root = root
        self._git = ["git", "--git-dir", str(store), "--work-tree", str(root)]
        subprocess.run(["git", "init", "-q", "--bare", str(store)], check=True)
        self.run("config", "user.email", "bench@localhost")
        self.run("config", "user.name", "bench")
        self.run("config", "core.bare", "false")
        self.run("config", "gc.auto", "0")
        self.commit()

    def run(self, *arguments: str) -> None:
        subprocess.run([*self._git, *arguments], check=True, cwd=self._root, stdout=subprocess.DEVNULL)

    def commit(self) -> None:
        self.run("add", "-A", "--force")
        self.run("commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", "checkpoint")

    def call(self, paths: Sequence[str], content: str, *, fails: bool = False) -> None:
        for path in paths:
            (self._root / path).write_text(content)
        if fails:
            self.run("reset", "-q", "--hard")
            self.run("clean", "-xfdq")
        else:
            self.commit()

    def close(self) -> None:
        pass


class Bare:
    """What the kernel alone takes to replace files so that they can come back: each new one is made beside, exchanged
    with the old one, and what is not kept is removed in the end. No policy, no journal, no step."""

    def __init__(self, root: Path, store: Path) -> None:
        self._root = os.open(root, os.O_PATH)
        self._renames = Renames(abilities())

    def call(self, paths: Sequence[str], content: str, *, fails: bool = False) -> None:
        os.mkdir("held", dir_fd=self._root)
        held = os.open("held", os.O_PATH, dir_fd=self._root)
        for slot, path in enumerate(paths):
            made = os.open(str(slot), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=held)
            os.write(made, content.encode())
            os.close(made)
            self._renames.exchange(self._root, path, held, str(slot))
        for slot, path in enumerate(paths):
            if fails:
                self._renames.exchange(self._root, path, held, str(slot))
            os.unlink(str(slot), dir_fd=held)
        os.close(held)
        os.rmdir("held", dir_fd=self._root)

    def close(self) -> None:
        os.close(self._root)


def first_file(root: Path) -> str:
    return next(str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file())


def timed(function: Callable[[], object]) -> Side:
    def side(number: int) -> float:
        started = perf_counter()
        for _ in range(number):
            function()
        return (perf_counter() - started) / number

    return side


class Places:
    """Copies of one tree, and a place for a store beside each."""

    def __init__(self, scratch: Path, tree: Path) -> None:
        self._scratch = scratch
        self._tree = tree

    def copy(self) -> tuple[Path, Path]:
        place = Path(tempfile.mkdtemp(dir=self._scratch))
        subprocess.run(["cp", "-a", str(self._tree), str(place / "tree")], check=True)
        return place / "tree", place / "store"


def calls_beside(area: str, places: Places, tree: Tree) -> Iterator[Row]:
    """Commits and rollbacks of calls of all sizes, beside each other, the peer and git."""
    ours = Ours(*places.copy())
    others: list[tuple[str, Any]] = [(GIT, Git(*places.copy()))]
    if peer.installed():
        others.insert(0, (peer.NAME, Peer(*places.copy())))
    bare = Bare(*places.copy())
    turns = count()
    is_target = tree.name == TARGETS_ARE_FOR
    for number in COMMIT_TARGETS:
        some = tree.paths[:: max(1, len(tree.paths) // number)][:number] if number else []

        def side(one: Any, fails: bool, some: list[str] = some) -> Side:
            return timed(lambda: one.call(some, f"# turn {next(turns)}\n" * 60, fails=fails))

        kinds = [(False, COMMIT_TARGETS), (True, ROLLBACK_TARGETS)] if some else [(False, COMMIT_TARGETS)]
        sides = [side(one, fails) for fails, _ in kinds for one in (ours, bare, *(other for _, other in others))]
        spreads = iter(alternated(*sides, seconds=3 * len(kinds)))
        own: list[Spread] = []
        for fails, targets in kinds:
            took, floor = next(spreads), next(spreads)
            own.append(took)
            what = f"call that changes {len(some):,}, {'rolled back' if fails else 'committed'}"
            if some:
                yield flat(area, what, KERNEL, (took, floor), at_most=None)
            for beside, _ in others:
                at_least = targets.get(number) if is_target and beside == GIT else None
                yield less(area, what, beside, (took, next(spreads)), at_least=at_least)
        if some:
            yield flat(area, f"call that changes {len(some):,}, rolled back", "committed", own[::-1], at_most=1)
    for one in (ours, bare, *(other for _, other in others)):
        one.close()


def durability(area: str, places: Places, path: str) -> Row:
    process, power = Ours(*places.copy()), Ours(*places.copy(), durability="power")
    turns = count()

    def side(one: Ours) -> Side:
        return timed(lambda: one.call([path], f"# turn {next(turns)}\n" * 60))

    spreads = alternated(side(power), side(process))
    power.close()
    process.close()
    return flat(area, 'call that changes 1, durability "power"', '"process"', spreads, at_most=4)


def steps(area: str, places: Places, paths: list[str]) -> Iterator[Row]:
    """A thousand one-file steps: the slowest of them, and what they leave in the store."""
    root, store = places.copy()
    ours = Ours(root, store)
    changed = [paths[n * 7 % len(paths)] for n in range(1_000)]
    ours.read(changed)
    before = size(store)
    times: list[float] = []
    for n, path in enumerate(changed):
        started = perf_counter()
        ours.call([path], f"# turn {n}\n" * 60)
        times.append(perf_counter() - started)
    ours.close()
    after = size(store)
    times.sort()
    p99, median = times[989], statistics.median(times)
    spreads = (Spread(p99, p99, p99), Spread(median, times[0], times[-1]))
    yield flat(area, "1,000 one-file steps, the 99th percentile", "their median", spreads, at_most=3)
    grown = (after[0] - before[0]) / 1_000
    bound = Spread(GROWTH_BYTES, GROWTH_BYTES, GROWTH_BYTES)
    growth = Spread(grown, grown, grown)
    fits = grown <= GROWTH_BYTES
    what = f"store growth a one-file step ({after[1] - before[1]} more files after 1,000)"
    yield Row(area, what, "the target", GROWTH_BYTES / grown, "<= 4.5 KiB", fits, growth, bound, "B")


def size(folder: Path) -> tuple[int, int]:
    """Bytes on disk, and files."""
    found = [os.lstat(os.path.join(top, name)) for top, _, names in os.walk(folder) for name in names]
    return sum(one.st_blocks * 512 for one in found), len(found)


def reading(scratch: Path) -> Row:
    """A read-only call: as dear on a hundred thousand files as on a hundred."""
    agents: list[Ours] = []
    for number in (100_000, 100):
        tree = written(scratch / f"reading-{number}", sample(number))
        agents.append(Ours(tree, scratch / f"reading-{number}-store"))
    spreads = alternated(*(timed(lambda agent=agent: agent.call([], "")) for agent in agents))
    for agent in agents:
        agent.close()
    return flat("disk", "call that only reads, 100,000 files", "100 files", spreads)


def searching(area: str, places: Places) -> Iterator[Row]:
    if not peer.installed():
        return
    root, store = places.copy()
    ours, theirs = Ours(root, store), peer.on_disk(root, store.with_name("peer"))
    spreads = alternated(
        timed(lambda: ours.workspace.filesystem.grep(NEEDLE)), timed(lambda: theirs.grep(NEEDLE)), seconds=4
    )
    ours.close()
    yield less(area, "grep a literal in no file", peer.NAME, spreads, at_least=3)


def rows() -> Iterator[Row]:
    with scratch_directory() as scratch:
        for tree in trees(scratch):
            area = f"disk, {tree.name}"
            places = Places(scratch, tree.root)
            yield from calls_beside(area, places, tree)
            yield from searching(area, places)
            yield durability(area, places, tree.paths[0])
            yield from steps(area, places, tree.paths)
        yield reading(scratch)


if __name__ == "__main__":
    report(rows())
