"""Opaque calls that damage a tree behind the filesystem's back, at random, and fail at random.

Calls are nested in any way, typed changes come in between, and the tree is compared with what `os.lstat` alone says.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from captured_tree import CapturedPath, capture_tree
from effort import amount
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kernels import OLD_KERNEL

from ringfence.testing import HeldCall, held_call
from ringfence_sandbox import HostFilesystem, ScanLimits, Workspace

names = st.sampled_from(["a", "b", "c", ".git", "\udcff"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
contents = st.sampled_from([b"", b"x", b"y\r\n", b"\x00\xff", b"long" * 9])
kinds = st.sampled_from(
    "write write append sneak remove remove tree mkdir move move link symlink chmod touch swap copy fifo".split()
)
damages = st.tuples(kinds, st.integers(0, 30), st.integers(0, 30), paths, contents)
HOLDING_PREFIX = ".ringfence"
LIMIT = ScanLimits(max_file_bytes=1000)


def shape(root: Path) -> dict[str, CapturedPath]:
    """All that a rollback brings back; which inode it is, is no part of that, nor is what calls hold."""
    return {
        path: replace(one, inode=0, links=tuple(link for link in one.links if not link.startswith(HOLDING_PREFIX)))
        for path, one in capture_tree(root).items()
        if not path.startswith(HOLDING_PREFIX)
    }


def told(root: Path) -> dict[str, tuple[CapturedPath, bool]]:
    """What is said when it is brought back: the time of a directory is not, which any file made in it changes; whether
    a file has one name or more is, also where the other one is held."""
    links = {path: one.links for path, one in capture_tree(root).items()}
    return {
        path: (replace(one, mtime_ns=0) if one.kind == oct(stat.S_IFDIR) else one, len(links[path]) > 1)
        for path, one in shape(root).items()
    }


def damage(root: Path, what: tuple[str, int, int, str, bytes], *, held: bool = False) -> None:
    """Something that a command may do to a tree, or to what is ``held``. What cannot be done is not done."""
    kind, one, other, name, content = what
    there = sorted(path for path in capture_tree(root) if path and path.startswith(HOLDING_PREFIX) == held)
    if held and (not there or _special({path: one for path, one in capture_tree(root).items() if path in there})):
        return  # a pipe that is gone does not come back, which is reported
    path = root / (there[one % len(there)] if there else name)
    second = root / (there[other % len(there)] if there else name)
    new = root / name
    if any(one.is_fifo() for one in (path, new)):  # opening one would wait for ever
        kind = "remove"
    real = Path(os.path.realpath(root))
    if not all(Path(os.path.realpath(one)).is_relative_to(real) for one in (path, new)):  # a link that was moved
        kind = "remove"
    with suppress(OSError, shutil.Error):
        match kind:
            case "write":
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_bytes(content)
            case "append":
                with path.open("ab") as file:
                    file.write(content)
            case "sneak":
                found = path.stat()
                path.write_bytes(b"z" * found.st_size)
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
            case "remove":
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            case "tree":
                shutil.rmtree(path)
            case "mkdir":
                new.mkdir(parents=True)
            case "move":
                path.rename(new)
            case "link":
                os.link(path, new, follow_symlinks=False)
            case "symlink":
                new.symlink_to(os.path.relpath(second, new.parent))
            case "chmod":
                path.chmod(0o500 + one, follow_symlinks=path.is_symlink())
            case "touch":
                os.utime(path, ns=(0, 10**18 + one), follow_symlinks=False)
            case "swap":
                between = root / "between"
                path.rename(between)
                second.rename(path)
                between.rename(second)
                if one % 3 == 0:
                    path.replace(second)
            case "copy" if not Path(os.path.realpath(new)).is_relative_to(os.path.realpath(path)):
                shutil.copytree(path, new, symlinks=True)
            case "fifo":
                os.mkfifo(new)
            case "copy":  # of a directory into itself
                pass
            case _:
                raise AssertionError(kind)


@dataclass
class Open:
    call: HeldCall
    files: HostFilesystem
    before: dict[str, CapturedPath]
    told: dict[str, tuple[CapturedPath, bool]]
    pipes: set[int]
    """The inodes of pipes that were there."""
    exact: bool = True
    """Whether nothing changed unseen that is not within an opaque call of its own."""


class OpaqueRollback(RuleBasedStateMachine):
    can: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="opaque-rollback-"))
        self.root = self.top / "root"
        self.root.mkdir()
        self.open: list[Open] = []
        self.number = 0

    @initialize(first=st.lists(damages, max_size=12))
    def build(self, first: list[tuple[str, int, int, str, bytes]]) -> None:
        for one in first:
            damage(self.root, one)
        self.workspace: Workspace | None = None
        if self.can is None:
            self.workspace = Workspace.open(self.root, store=self.top / "store", limits=LIMIT)
            self.files = self.workspace.filesystem
        else:
            self.files = HostFilesystem(self.root, store=self.top / "store", limits=LIMIT, can=self.can)

    @precondition(lambda self: not self.open)
    @rule(what=damages)
    def person(self, what: tuple[str, int, int, str, bytes]) -> None:
        damage(self.root, what)

    @precondition(lambda self: len(self.open) < 3)
    @rule(opaque=st.sampled_from([True, True, False]))
    def begin(self, opaque: bool) -> None:
        opaque = opaque and (not self.open or self.open[-1].call.opaque)
        self.number += 1
        before = shape(self.root)
        call = HeldCall(f"call-{self.number}", self.open[-1].call if self.open else None, opaque=opaque)
        call.join(self.files)
        assert shape(self.root) == before, "looking leaves no trace"
        pipes = {os.lstat(self.root / path).st_ino for path in _special(before)}
        self.open.append(Open(call, self.files.for_call(call), before, told(self.root), pipes))

    @precondition(lambda self: any(one.call.opaque for one in self.open))
    @rule(what=damages)
    def damaged(self, what: tuple[str, int, int, str, bytes]) -> None:
        self._damage(what)

    @precondition(lambda self: len(self.open) < 2 and all(one.call.opaque for one in self.open))
    @rule(displaced=st.lists(st.integers(0, 30), min_size=1, max_size=4), reached=st.lists(damages, max_size=4))
    def reach(self, displaced: list[int], reached: list[tuple[str, int, int, str, bytes]]) -> None:
        """A program gets at what the call that runs it has displaced."""
        self.begin(opaque=True)
        for number in displaced:
            there = sorted(path for path in shape(self.root) if path)
            if there:
                path = there[number % len(there)]
                self.typed(path, path, b"outer", "delete" if number % 3 == 0 else "write")
        self.begin(opaque=True)
        for what in reached:
            self._damage(what, held=True)

    def _damage(self, what: tuple[str, int, int, str, bytes], *, held: bool = False) -> None:
        damage(self.root, what, held=held)
        for one in reversed(self.open):
            if one.call.opaque:
                break
            one.exact = False

    @precondition(lambda self: self.open)
    @rule(path=paths, to=paths, content=contents, kind=st.sampled_from(["write", "delete", "move", "mkdir", "chmod"]))
    def typed(self, path: str, to: str, content: bytes, kind: str) -> None:
        files = self.open[-1].files
        with suppress(OSError, ValueError):
            match kind:
                case "write":
                    files.write_bytes(path, content)
                case "delete":
                    files.delete(path, recursive=True)
                case "move":
                    files.move(path, to, overwrite=True)
                case "mkdir":
                    files.mkdir(path)
                case _:
                    files.chmod(path, 0o640)

    @precondition(lambda self: self.open)
    @rule()
    def fail(self) -> None:
        one = self.open.pop()
        now = told(self.root)
        if self.number % 2:
            one.call.changed()
        report = one.call.rollback()
        if one.exact:
            # Pipes are not covered: one that a call removed is gone, and one that it moved stays there. Both are named.
            after = shape(self.root)
            pipes = {*_special(one.before)}
            moved = [path for path in _special(after) if os.lstat(self.root / path).st_ino in one.pipes]
            moved = [path for path in moved if path not in pipes]
            staying = [*pipes, *moved, *(parent.as_posix() for path in moved for parent in Path(path).parents)]
            assert _without(after, staying) == _without(one.before, staying)
            assert report.conflicts == () or moved
            assert not one.call.opaque or bool(report.notes) == (now != one.told)
        one.call.release()

    @precondition(lambda self: self.open)
    @rule()
    def keep(self) -> None:
        one = self.open.pop()
        now = shape(self.root)
        changed = {change.path for change in one.call.changed()}
        if one.call.opaque:
            visible = {path for path in now.keys() | one.before.keys() if _seen(now, path) != _seen(one.before, path)}
            again = {*_special(now)} & {*_special(one.before)}  # another pipe in the place of one looks like that
            assert changed - again == visible - again
        step = one.call.commit()
        assert shape(self.root) == now
        one.call.release()
        if not self.open and self.workspace is not None:
            assert (step is not None) == bool(changed) or any(path in changed for path in _special(now, one.before))
            known = len(self.workspace.log())
            with held_call(self.files, opaque=True) as looking:
                assert looking.changed() == []
                looking.rollback()
            if one.call.opaque and step is not None:
                later = self.workspace.log()[: len(self.workspace.log()) - known]
                paths = {path for entry in later for path in entry.paths}
                assert not paths, "the step has all of it"

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            for path, _, _ in os.walk(self.root):
                os.chmod(path, stat.S_IRWXU)
            shutil.rmtree(self.top)

    def _end(self) -> None:
        while self.open:
            self.fail()
        if hasattr(self, "files"):
            before = shape(self.root)
            self.workspace.close() if self.workspace is not None else self.files.close()
            assert shape(self.root) == before


def _seen(tree: dict[str, CapturedPath], path: str) -> object:
    """What counts as a change of a path: not its time, its owner, or its other names."""
    one = tree.get(path)
    if one is None:
        return None
    return one.kind, one.content, one.mode if one.kind != oct(stat.S_IFLNK) else 0


def _without(tree: dict[str, CapturedPath], paths: list[str]) -> dict[str, CapturedPath]:
    return {path: one for path, one in tree.items() if path not in paths}


def _special(*trees: dict[str, CapturedPath]) -> list[str]:
    return [path for tree in trees for path, one in tree.items() if one.kind == oct(stat.S_IFIFO)]


class OnAnOldKernel(OpaqueRollback):
    can = OLD_KERNEL


TestOpaqueRollback = OpaqueRollback.TestCase
TestOnAnOldKernel = OnAnOldKernel.TestCase
TestOpaqueRollback.settings = settings(max_examples=amount(prove=5000, test=25))
TestOnAnOldKernel.settings = settings(max_examples=amount(prove=5000, test=15))
