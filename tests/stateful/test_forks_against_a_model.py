"""Forks of forks against plain dictionaries, one for each workspace, as `os.lstat` said.

Tools and a person change any of them, forks are made, promoted, undone, collected and discarded. What is done in one
shows in no other. A promotion is what three dictionaries say: that of the fork, that with which it began, and that of
the source. It makes all of it or nothing, and its undo brings back all of it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from itertools import product
from pathlib import Path

from captured_tree import capture_tree
from effort import amount
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from real_git import fsck

from ringfence_sandbox import Promotion, Workspace

Seen = tuple[str, int, str, int, tuple[str, ...]]
"""A path: kind, permission bits, content, time (not of directories) and the other names of the same file."""
Tree = dict[str, Seen]

TEXTS = {
    lines: "".join(f"line {n}\n" if n % 3 else f"line {n}, {lines[n // 3]}\n" for n in range(9))
    for lines in product("xy", repeat=3)
}
"""By what is in three lines, none of which adjoins another: so edits of different ones can be told apart."""
paths = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "n/a"])
contents = st.one_of(st.sampled_from(["", "x", "no end"]), st.sampled_from([*TEXTS.values()]))
kinds = st.sampled_from(["write", "write", "append", "remove", "mkdir", "chmod", "symlink", "link", "move", "touch"])
deeds = st.lists(st.tuples(kinds, paths, paths, contents, st.sampled_from([0o600, 0o755])), min_size=1, max_size=4)
numbers = st.integers(min_value=0, max_value=9)


def see(root: Path) -> Tree:
    return {
        path: (one.kind, one.mode, one.content, 0 if one.kind == "0o40000" else one.mtime_ns, one.links)
        for path, one in capture_tree(root).items()
        if path
    }


def same(one: Seen | None, other: Seen | None) -> bool:
    """Whether kind, permissions and content are the same."""
    return (one and one[:3]) == (other and other[:3])


def do(root: Path, deed: tuple[str, str, str, str, int]) -> None:
    """As a program does it; what it cannot do it leaves."""
    kind, name, to, content, mode = deed
    path, other = root / name, root / to
    with suppress(OSError, shutil.Error):
        if kind in ("write", "append", "mkdir", "symlink", "link"):
            path.parent.mkdir(parents=True, exist_ok=True)
        if kind in ("write", "append"):
            if path.is_symlink():
                path.unlink()
            with path.open("w" if kind == "write" else "a") as file:
                file.write(content)
        elif kind == "remove":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif kind == "mkdir":
            path.mkdir()
        elif kind == "chmod":
            if not path.is_symlink():
                path.chmod(mode)
        elif kind == "symlink":
            path.symlink_to(other if mode == 0o600 else to)
        elif kind == "link":
            os.link(other, path, follow_symlinks=False)
        elif kind == "move":
            os.rename(path, other)
        elif kind == "touch":
            os.utime(path, ns=(10**18, 10**18 + mode), follow_symlinks=False)


class Held:
    """An opened workspace, what is in it, and, of a fork, its source and what it began with."""

    def __init__(self, workspace: Workspace, source: Held | None = None) -> None:
        self.workspace, self.source = workspace, source
        self.root = Path(workspace.root)
        self.tree = see(self.root)
        self.began = dict(self.tree)
        self.promotions: list[tuple[int, set[str], Tree]] = []
        """Of a fork, the step of each, its paths, but those that were taken back, and what was promoted."""
        record = workspace.fork_record
        self.name = "" if record is None else record.name

    def base(self) -> Tree:
        """Of a fork, what its next promotion compares with: what `gc` has dropped of the source counts no more."""
        assert self.source is not None
        known = {entry.number for entry in self.source.workspace.log() if not entry.apart}
        base = dict(self.began)
        for number, paths, tree in self.promotions:
            for path in paths if number in known else ():
                base.pop(path, None)
                base.update({path: tree[path]} if path in tree else {})
        return base


class ForksAreTrees(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        (self.place / "root/d").mkdir(parents=True)
        (self.place / "root/a").write_text(TEXTS["x", "x", "x"])
        (self.place / "root/d/b").write_text("b\n")
        self.all = [Held(Workspace.open(self.place / "root"))]
        self.made = 0

    def teardown(self) -> None:
        for one in reversed(self.all):
            one.workspace.close()
            fsck(one.workspace.filesystem.history.store.folder)  # pyright: ignore[reportOptionalMemberAccess]
        shutil.rmtree(self.place)

    def one(self, number: int) -> Held:
        return self.all[number % len(self.all)]

    @property
    def forks(self) -> list[Held]:
        return self.all[1:]

    def check_others(self, *changed: Held) -> None:
        for one in self.all:
            if one in changed:
                one.tree = see(one.root)
            else:
                assert see(one.root) == one.tree, one.name

    @rule(number=numbers, deeds=deeds, typed=st.booleans())
    def change(self, number: int, deeds: list[tuple[str, str, str, str, int]], typed: bool) -> None:
        held = self.one(number)
        if typed:
            with held.workspace.transaction("program", opaque=True):
                for deed in deeds:
                    do(held.root, deed)
        else:
            for deed in deeds:
                do(held.root, deed)
        self.check_others(held)

    @rule(number=numbers, path=paths, content=contents)
    def call(self, number: int, path: str, content: str) -> None:
        held = self.one(number)
        with held.workspace.transaction("write", opaque=False), suppress(OSError, ValueError):
            held.workspace.filesystem.write(path, content)
        self.check_others(held)

    @precondition(lambda self: len(self.all) < 4)
    @rule(number=numbers, elsewhere=st.booleans())
    def fork(self, number: int, elsewhere: bool) -> None:
        held, self.made = self.one(number), self.made + 1
        into = self.place / f"fork {self.made}" if elsewhere else None
        made = Held(held.workspace.fork(f"f{self.made}", into=into), held)
        self.all.append(made)
        held.tree = see(held.root)
        there = {path: self.moved(one, held.root, made.root) for path, one in held.tree.items()}
        assert made.tree == there
        assert made.workspace.changes_since_fork() == []
        self.check_others()

    def moved(self, one: Seen | None, old: Path, new: Path) -> Seen | None:
        """An absolute link leads into the copy."""
        if one is None or one[0] != "0o120000" or not f"{one[2]}/".startswith(f"{old}/"):
            return one
        return (*one[:2], f"{new}{one[2].removeprefix(str(old))}", *one[3:])

    @precondition(lambda self: self.forks)
    @rule(number=numbers, keep=st.booleans(), undone=st.booleans())
    def promote(self, number: int, keep: bool, undone: bool) -> None:
        fork = self.forks[number % len(self.forks)]
        source = fork.source
        assert source is not None
        there, before, base = see(fork.root), see(source.root), fork.base()
        done = source.workspace.promote(fork.workspace, "keep" if keep else "abort")
        after = see(source.root)
        if done.conflicts and not keep:
            assert (done.step, after) == (None, before)
        else:
            self.check_promotion(done, fork, source, base, there, before, after)
        self.check_others(source)
        if undone and done.step is not None:
            source.workspace.undo()
            assert see(source.root) == before
            self.check_others(source)
        elif done.step is not None:
            fork.promotions.append((done.step.number, set(done.step.paths), there))

    def check_promotion(
        self, done: Promotion, fork: Held, source: Held, base: Tree, there: Tree, before: Tree, after: Tree
    ) -> None:
        outcomes = done.outcomes
        for path in {*there, *before, *after, *base}:
            here, now = before.get(path), after.get(path)
            began = self.moved(base.get(path), fork.root, source.root)
            wanted = self.moved(there.get(path), fork.root, source.root)
            outcome = outcomes.get(path)
            if same(wanted, began):
                assert outcome is None
                assert same(now, here), path
            elif same(here, wanted):
                assert outcome in ("kept", "applied"), path
                assert same(now, wanted), path
            elif outcome == "applied":
                assert same(now, wanted), path
                assert same(here, began), path
                if now is not None and wanted is not None:
                    assert now[3] == wanted[3], path
                    assert {*now[4]} & {*wanted[4]} >= {path}
            elif outcome == "merged":
                assert here is not None
                assert not same(here, began)
                assert not same(now, here)
            else:
                assert outcome in ("conflict", "kept"), path
                assert same(now, here), path
                if same(here, began) and outcome == "conflict":
                    reason = done.reasons[path]
                    assert "stays" in reason or "is gone" in reason, (path, reason)
        if not any(path in ("conflict", "kept", "merged") for path in outcomes.values()):
            for path in outcomes:
                assert (
                    after.get(path, ("",) * 5)[:3]
                    == (self.moved(there.get(path), fork.root, source.root) or ("",) * 5)[:3]
                )

    @rule(number=numbers, keep=st.integers(min_value=0, max_value=3))
    def gc(self, number: int, keep: int) -> None:
        self.one(number).workspace.gc(keep)
        self.check_others()

    @rule(number=numbers)
    def reopen(self, number: int) -> None:
        held = self.one(number)
        store = held.workspace.filesystem.history.store.folder.parent  # pyright: ignore[reportOptionalMemberAccess]
        held.workspace.close()
        held.workspace = Workspace.open(held.root, store=store)
        assert held.workspace.damage is None
        self.check_others()

    @precondition(lambda self: self.forks)
    @rule(number=numbers)
    def back_to_the_fork(self, number: int) -> None:
        fork = self.forks[number % len(self.forks)]
        with suppress(LookupError):  # `gc` has dropped it
            restored = fork.workspace.restore(0).step
            for one in self.forks if restored is not None else ():
                if one.source is fork:  # what was promoted into this one is taken back
                    one.promotions = [(at, paths - {*restored.paths}, tree) for at, paths, tree in one.promotions]
            assert fork.workspace.changes_since_fork() == []
        self.check_others(fork)

    @precondition(lambda self: self.forks)
    @rule(number=numbers)
    def discard(self, number: int) -> None:
        leaves = [one for one in self.forks if not any(other.source is one for other in self.all)]
        fork = leaves[number % len(leaves)]
        self.all.remove(fork)
        fork.workspace.discard()
        assert not fork.root.exists()
        assert fork.source is not None
        assert fork.name not in [record.name for record in fork.source.workspace.forks()]
        self.check_others()


TestForksAreTrees = ForksAreTrees.TestCase
TestForksAreTrees.settings = settings(
    max_examples=amount(prove=1000, test=8), stateful_step_count=amount(prove=40, test=15)
)
