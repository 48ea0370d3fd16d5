"""The filesystem on disk against the one in memory: the same changes, the same answers, the same trees.

Somebody else edits files behind its back too, and the disk is compared with itself, down to inodes and times.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from captured_tree import CapturedPath, capture_tree
from effort import amount
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringfence.filesystem import Filesystem, FilesystemSnapshot, InMemoryFilesystem
from ringfence.testing import HeldCall
from ringfence_sandbox import HostFilesystem

names = st.sampled_from(["a", "b", "c", "é", "\udcff"])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
contents = st.sampled_from([b"", b"x", b"y\r\n", b"\x00\xff", b"long" * 9])
targets = st.one_of(paths, st.sampled_from(["..", "../a", "../../b", ".", "/a", "b/..", "a/../../c", "./a"]))
Tree = dict[str, tuple[object, ...]]


def tree_of(filesystem: Filesystem) -> Tree:
    found: Tree = {"": (filesystem.stat("").mode,)}
    waiting = [""]
    while waiting:
        for entry in filesystem.list(waiting.pop()):
            if entry.is_symlink:
                found[entry.path] = ("link", filesystem.readlink(entry.path), entry.is_file, entry.is_directory)
                continue
            mode = filesystem.stat(entry.path).mode
            if entry.is_directory:
                waiting.append(entry.path)
                found[entry.path] = ("directory", mode)
            else:
                found[entry.path] = ("file", mode, filesystem.read_bytes(entry.path).content)
    return found


def on_disk(root: Path) -> dict[str, CapturedPath]:
    return {path: one for path, one in capture_tree(root).items() if not path.startswith(".ringfence-hold-")}


class HostAgainstMemory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="host-against-memory-"))
        (self.top / "root").mkdir()
        self.memory = InMemoryFilesystem()
        self.memory.chmod("", (self.top / "root").stat().st_mode & 0o7777)
        self.disk = HostFilesystem(self.top / "root", store=self.top / "store")
        self.snapshots: list[tuple[FilesystemSnapshot, FilesystemSnapshot]] = []
        self.calls: list[tuple[HeldCall, HeldCall, dict[str, CapturedPath]]] = []

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            shutil.rmtree(self.top)

    def _end(self) -> None:
        for _, call, _ in reversed(self.calls):
            call.rollback()
            call.release()
        if self.calls:
            assert on_disk(self.top / "root") == self.calls[0][2]
        self.snapshots.clear()
        self.disk.close()
        assert [name for name in os.listdir(self.top / "root") if name.startswith(".ringfence")] == []

    def both(self, work: Callable[[Filesystem], object]) -> None:
        """Either both refuse it, for the same reason, or none."""
        answers: list[object] = []
        for filesystem, place in ((self.memory, 0), (self.disk, 1)):
            handle = filesystem.for_call(self.calls[-1][place]) if self.calls else filesystem
            try:
                answers.append(work(handle))
            except (OSError, ValueError) as error:
                answers.append((type(error), getattr(error, "errno", None)))
        assert answers[0] == answers[1]

    @rule(path=paths, content=contents, mode=st.sampled_from(["create", "overwrite", "append"]), parents=st.booleans())
    def write(self, path: str, content: bytes, mode: Any, parents: bool) -> None:
        self.both(lambda fs: fs.write_bytes(path, content, mode=mode, create_parents=parents))

    @rule(path=paths, recursive=st.booleans())
    def delete(self, path: str, recursive: bool) -> None:
        self.both(lambda fs: fs.delete(path, recursive=recursive))

    @rule(path=paths, parents=st.booleans(), exist_ok=st.booleans())
    def mkdir(self, path: str, parents: bool, exist_ok: bool) -> None:
        self.both(lambda fs: fs.mkdir(path, parents=parents, exist_ok=exist_ok))

    @rule(old=paths, new=paths, overwrite=st.booleans())
    def move(self, old: str, new: str, overwrite: bool) -> None:
        self.both(lambda fs: fs.move(old, new, overwrite=overwrite))

    @rule(path=st.one_of(st.just(""), paths), mode=st.sampled_from([0o600, 0o644, 0o755, 0o700, 0o1777]))
    def chmod(self, path: str, mode: int) -> None:
        self.both(lambda fs: fs.chmod(path, mode))

    @rule(path=paths, leads_to=targets)
    def symlink(self, path: str, leads_to: str) -> None:
        self.both(lambda fs: fs.symlink(path, leads_to))

    @rule(path=paths)
    def look(self, path: str) -> None:
        self.both(lambda fs: fs.resolve(path))
        self.both(lambda fs: [(e.path, e.is_file, e.is_directory, e.is_symlink, e.size_bytes) for e in fs.list(path)])
        self.both(lambda fs: fs.read_bytes(path, offset=1))
        self.both(lambda fs: list(fs.grep("x", path=path)))
        self.both(lambda fs: list(fs.glob("**/[ab]*", path=path)))

    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((self.memory.snapshot(), self.disk.snapshot()))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshots = data.draw(st.sampled_from(self.snapshots))
        for filesystem, place in ((self.memory, 0), (self.disk, 1)):
            handle = filesystem.for_call(self.calls[-1][place]) if self.calls else filesystem
            handle.restore(snapshots[place])

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def compare(self, data: st.DataObject) -> None:
        mine, its = data.draw(st.sampled_from(self.snapshots))
        assert list(self.memory.changes(mine)) == list(self.disk.changes(its))

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def drop_a_snapshot(self, data: st.DataObject) -> None:
        self.snapshots.remove(data.draw(st.sampled_from(self.snapshots)))

    @precondition(lambda self: len(self.calls) < 3)
    @rule()
    def begin(self) -> None:
        calls = [HeldCall(parent=self.calls[-1][place] if self.calls else None) for place in (0, 1)]
        calls[0].join(self.memory)
        calls[1].join(self.disk)
        self.calls.append((calls[0], calls[1], on_disk(self.top / "root")))

    @precondition(lambda self: self.calls)
    @rule()
    def commit(self) -> None:
        mine, its, _ = self.calls.pop()
        assert list(mine.changed()) == list(its.changed())
        for call in (mine, its):
            call.commit()
            call.release()

    @precondition(lambda self: self.calls)
    @rule(looking=st.booleans())
    def rollback(self, looking: bool) -> None:
        mine, its, before = self.calls.pop()
        if looking:
            assert list(mine.changed()) == list(its.changed())
        for call in (mine, its):
            report = call.rollback()
            assert (report.conflicts, report.notes) == ((), ())
            call.release()
        assert on_disk(self.top / "root") == before

    @invariant()
    def the_trees_are_equal(self) -> None:
        assert tree_of(self.disk) == tree_of(self.memory)


TestHostAgainstMemory = HostAgainstMemory.TestCase
TestHostAgainstMemory.settings = settings(max_examples=amount(prove=5000, test=25))
