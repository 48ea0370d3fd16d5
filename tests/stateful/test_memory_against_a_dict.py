"""The filesystem in memory against a plain dict, through random changes, snapshots and nested tool calls."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringfence.filesystem import Filesystem, FilesystemSnapshot, InMemoryFilesystem
from ringfence.runtime import Change, FileVersion
from ringfence.testing import HeldCall


class Node(NamedTuple):
    kind: str
    mode: int
    content: bytes = b""
    target: str = ""
    modified_at: datetime | None = None


Tree = dict[str, Node]
ROOT = Node("directory", 0o755)


class Refused(Exception):
    """The dict says that this cannot be done."""


def place_of(tree: Tree, path: str, follow: bool) -> str:
    """Where a path leads, links followed; refused where nothing can be there."""
    here, pending, hops = "", [(name, False) for name in path.split("/")], 0
    while pending:
        name, linked = pending.pop(0)
        if here in tree and tree[here].kind != "directory":
            raise Refused
        if name == "..":
            if here == "":
                raise Refused
            here = posixpath.dirname(here)
            continue
        there = posixpath.join(here, name)
        node = tree.get(there)
        if node is None and linked:
            raise Refused
        if node is not None and node.kind == "symlink" and (pending or follow):
            hops += 1
            if hops > 40 or node.target.startswith("/"):
                raise Refused
            pending = [(part, True) for part in node.target.split("/") if part != "."] + pending
            continue
        here = there
    return here


def put(tree: Tree, place: str, node: Node) -> None:
    parent = posixpath.dirname(place)
    while parent and parent not in tree:
        tree[parent] = Node("directory", 0o755)
        parent = posixpath.dirname(parent)
    if tree[parent].kind != "directory":
        raise Refused
    tree[place] = node


def below(tree: Tree, place: str) -> list[str]:
    return [path for path in tree if path == place or path.startswith(f"{place}/")]


def write(tree: Tree, path: str, content: bytes, mode: str) -> None:
    place = place_of(tree, path, follow=mode != "create")
    old = tree.get(place, Node("file", 0o644))
    if old.kind != "file" or (mode == "create" and place in tree):
        raise Refused
    put(tree, place, old._replace(content=old.content + content if mode == "append" else content))


def delete(tree: Tree, path: str, recursive: bool) -> None:
    gone = below(tree, place_of(tree, path, follow=False))
    if not gone or (len(gone) > 1 and not recursive):
        raise Refused
    for one in gone:
        del tree[one]


def mkdir(tree: Tree, path: str, exist_ok: bool) -> None:
    place = place_of(tree, path, follow=False)
    if place in tree:
        there = tree.get(place_of(tree, path, follow=True))
        if not exist_ok or there is None or there.kind != "directory":
            raise Refused
        return
    put(tree, place, Node("directory", 0o755))


def move(tree: Tree, source: str, target: str, overwrite: bool) -> None:
    old, new = place_of(tree, source, follow=False), place_of(tree, target, follow=False)
    if old not in tree or (new in tree and not overwrite):
        raise Refused
    if old == new:
        return
    replaces_directory = new in tree and "directory" in (tree[new].kind, tree[old].kind)
    if f"{new}/".startswith(f"{old}/") or replaces_directory:
        raise Refused
    moved = {new + path.removeprefix(old): tree.pop(path) for path in below(tree, old)}
    put(tree, new, moved[new])
    tree.update(moved)


def chmod(tree: Tree, path: str, mode: int) -> None:
    place = place_of(tree, path, follow=True)
    if place not in tree:
        raise Refused
    tree[place] = tree[place]._replace(mode=mode)


def symlink(tree: Tree, path: str, target: str) -> None:
    place = place_of(tree, path, follow=False)
    if place in tree:
        raise Refused
    put(tree, place, Node("symlink", 0o777, target=target))


def version(node: Node | None) -> FileVersion | None:
    if node is None:
        return None
    if node.kind == "file":
        return FileVersion("file", node.mode, len(node.content), hashlib.sha256(node.content).hexdigest())
    if node.kind == "symlink":
        return FileVersion("symlink", node.mode, len(os.fsencode(node.target)), None, node.target)
    return FileVersion("directory", node.mode, 0)


def differences(before: Tree, after: Tree) -> list[Change]:
    found = [Change(path, version(before.get(path)), version(after.get(path))) for path in {*before, *after}]
    return sorted((change for change in found if change.before != change.after), key=lambda change: change.path)


def tree_of(filesystem: Filesystem) -> Tree:
    found = {"": ROOT._replace(mode=filesystem.stat("").mode)}
    waiting = [""]
    while waiting:
        for entry in filesystem.list(waiting.pop()):
            if entry.is_symlink:
                found[entry.path] = Node("symlink", 0o777, target=filesystem.readlink(entry.path))
                continue
            stat = filesystem.stat(entry.path)
            if entry.is_directory:
                waiting.append(entry.path)
                found[entry.path] = Node("directory", stat.mode)
            else:
                content = filesystem.read_bytes(entry.path).content
                found[entry.path] = Node("file", stat.mode, content, modified_at=stat.modified_at)
    return found


names = st.sampled_from(["a", "b", "c", "é", "\udcff"])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
contents = st.sampled_from([b"", b"x", b"y\n", b"\x00\xff"])
targets = st.one_of(paths, st.sampled_from(["..", "../a", "../../b", ".", "/a", "b/..", "a/../../c", "./a"]))


class MemoryAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.filesystem = InMemoryFilesystem()
        self.tree: Tree = {"": ROOT}
        self.snapshots: list[tuple[FilesystemSnapshot, Tree]] = [(self.filesystem.snapshot(), dict(self.tree))]
        self.calls: list[tuple[HeldCall, Tree]] = []

    @property
    def handle(self) -> InMemoryFilesystem:
        return self.filesystem.for_call(self.calls[-1][0]) if self.calls else self.filesystem

    def both(self, change: Callable[[Filesystem], object], change_dict: Callable[[Tree], object]) -> None:
        """Make a change to both; either both refuse it, or none."""
        tree = dict(self.tree)
        try:
            change_dict(tree)
        except Refused:
            tree = None
        try:
            change(self.handle)
        except (OSError, ValueError) as error:
            assert tree is None, f"only the filesystem refuses: {error!r}"
        else:
            assert tree is not None, "only the dict refuses"
            self.tree = tree

    @rule(path=paths, content=contents, mode=st.sampled_from(["create", "overwrite", "append"]))
    def write(self, path: str, content: bytes, mode: Any) -> None:
        before = self.tree
        self.both(lambda fs: fs.write_bytes(path, content, mode=mode), lambda tree: write(tree, path, content, mode))
        if self.tree is not before:
            place = self.filesystem.resolve(path)
            now = self.filesystem.stat(place).modified_at
            self.tree[place] = self.tree[place]._replace(modified_at=now)

    @rule(path=paths, recursive=st.booleans())
    def delete(self, path: str, recursive: bool) -> None:
        self.both(lambda fs: fs.delete(path, recursive=recursive), lambda tree: delete(tree, path, recursive))

    @rule(path=paths, exist_ok=st.booleans())
    def mkdir(self, path: str, exist_ok: bool) -> None:
        self.both(lambda fs: fs.mkdir(path, exist_ok=exist_ok), lambda tree: mkdir(tree, path, exist_ok))

    @rule(old=paths, new=paths, overwrite=st.booleans())
    def move(self, old: str, new: str, overwrite: bool) -> None:
        self.both(lambda fs: fs.move(old, new, overwrite=overwrite), lambda tree: move(tree, old, new, overwrite))

    @rule(path=st.one_of(st.just(""), paths), mode=st.sampled_from([0o600, 0o644, 0o755]))
    def chmod(self, path: str, mode: int) -> None:
        self.both(lambda fs: fs.chmod(path, mode), lambda tree: chmod(tree, path, mode))

    @rule(path=paths, leads_to=targets)
    def symlink(self, path: str, leads_to: str) -> None:
        self.both(lambda fs: fs.symlink(path, leads_to), lambda tree: symlink(tree, path, leads_to))

    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((self.filesystem.snapshot(), dict(self.tree)))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, tree = data.draw(st.sampled_from(self.snapshots))
        self.handle.restore(snapshot)
        self.tree = dict(tree)

    @rule(data=st.data())
    def compare(self, data: st.DataObject) -> None:
        snapshot, tree = data.draw(st.sampled_from(self.snapshots))
        assert self.filesystem.changes(snapshot) == differences(tree, self.tree)

    @precondition(lambda self: len(self.calls) < 3)
    @rule()
    def begin(self) -> None:
        call = HeldCall(parent=self.calls[-1][0] if self.calls else None)
        call.join(self.filesystem)
        self.calls.append((call, dict(self.tree)))

    @precondition(lambda self: self.calls)
    @rule()
    def commit(self) -> None:
        call, before = self.calls.pop()
        assert call.changed() == differences(before, self.tree)
        call.commit()
        call.release()

    @precondition(lambda self: self.calls)
    @rule()
    def rollback(self) -> None:
        call, before = self.calls.pop()
        assert call.changed() == differences(before, self.tree)
        call.rollback()
        call.release()
        self.tree = before

    @invariant()
    def the_trees_are_equal(self) -> None:
        assert tree_of(self.filesystem) == self.tree


TestMemoryAgainstADict = MemoryAgainstADict.TestCase
