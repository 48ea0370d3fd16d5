"""The history of a workspace on disk against what `os.lstat` said before and after each call, in plain dictionaries.

Tools and commands change files, commit and fail; a person changes them in between; steps are undone, restored, named
and dropped. A step is what its call changed and nothing else, a person's work stays, and git reads the same trees.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from captured_tree import CapturedPath, capture_tree, shape
from effort import amount
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from real_git import blob_id, fsck, git_bytes

from ringfence import Filesystem, MarkdownSection, Prompt, Receipt, Session, Tool, ToolContext, ToolResult
from ringfence.adapters import ToolExecutor
from ringfence_sandbox import Reversal, Workspace

Seen = tuple[str, int, str]
"""What counts of a path: its kind, its permission bits, and the sha256 of its bytes or its target."""
Tree = dict[str, Seen]
Deed = tuple[str, str, str, bytes, int]
Handler = Callable[[ToolContext], object]

KINDS = {"0o100000": "file", "0o40000": "directory", "0o120000": "symlink"}
TEXTS = {
    lines: "".join(f"line {n}\n" if n % 3 else f"line {n}, {lines[n // 3]}\n" for n in range(9)).encode()
    for lines in product("xyz", repeat=3)
}
"""By what is in three lines, none of which adjoins another: so edits of different ones can be told apart."""
OF_TEXT = {hashlib.sha256(content).hexdigest(): lines for lines, content in TEXTS.items()}

paths = st.sampled_from(["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "n", "n/a", "d/\udcff \t"])
contents = st.one_of(st.sampled_from([b"", b"x", b"z", b"\0\xff", b"no end"]), st.sampled_from([*TEXTS.values()]))
modes = st.sampled_from([0o644, 0o600, 0o755])
CALLED = ["write", "write", "append", "delete", "move", "chmod", "mkdir", "symlink"]
DONE = ["write", "write", "append", "sneak", "replace", "remove", "move", "chmod", "mkdir", "symlink", "touch", "link"]


def deeds(kinds: Iterable[str], most: int) -> st.SearchStrategy[list[Deed]]:
    return st.lists(st.tuples(st.sampled_from([*kinds]), paths, paths, contents, modes), min_size=1, max_size=most)


def call(files: Filesystem, deed: Deed) -> None:
    kind, path, to, content, mode = deed
    with suppress(OSError, ValueError):
        match kind:
            case "write":
                files.write_bytes(path, content)
            case "append":
                files.write_bytes(path, b"\0" + content, mode="append")
            case "delete":
                files.delete(path, recursive=True)
            case "move":
                files.move(path, to, overwrite=True)
            case "chmod":
                files.chmod(path, mode)
            case "mkdir":
                files.mkdir(path)
            case _:
                files.symlink(path, to)


def do(root: Path, deed: Deed) -> None:
    """What a command or a person may do. What cannot be done is not done."""
    kind, path, to, content, mode = deed
    here, there = root / path, root / to
    with suppress(OSError, shutil.Error):
        match kind:
            case "write":
                here.parent.mkdir(parents=True, exist_ok=True)
                here.write_bytes(content)
            case "append":
                with here.open("ab") as file:
                    file.write(b"\0" + content)  # of which no merge is made
            case "sneak":
                found = here.stat()
                here.write_bytes(b"s" * found.st_size)
                os.utime(here, ns=(found.st_atime_ns, found.st_mtime_ns))
            case "replace":
                (root / "editor's").write_bytes(content)
                (root / "editor's").replace(here)
            case "remove":
                shutil.rmtree(here) if here.is_dir() and not here.is_symlink() else here.unlink()
            case "move":
                here.rename(there)
            case "chmod":
                here.chmod(mode | (0o100 if here.is_dir() else 0))
            case "mkdir":
                here.mkdir(parents=True)
            case "symlink":
                here.symlink_to(to)
            case "touch":
                os.utime(here, ns=(0, 10**18 + mode), follow_symlinks=False)
            case _:
                os.link(here, there, follow_symlinks=False)
    with suppress(OSError):
        (root / "editor's").unlink()


def seen(tree: Mapping[str, CapturedPath]) -> Tree:
    return {path: (KINDS[one.kind], one.mode, one.content) for path, one in tree.items() if path}


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> set[str]:
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


@dataclass(frozen=True)
class Made:
    """A step: the trees before and after it, as the history has them and as they were ``found``; ``known`` says that
    there was no edit by a person besides, which the history had not seen."""

    before: Tree
    after: Tree
    found: tuple[dict[str, CapturedPath], dict[str, CapturedPath]]
    known: bool

    @property
    def paths(self) -> set[str]:
        return differing(self.before, self.after)


class HistoryIsTrees(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="history-"))
        self.root = self.top / "root"
        self.bytes: dict[str, bytes] = {}
        self.made: dict[int, Made] = {}
        self.named: dict[str, dict[str, CapturedPath]] = {}
        self.kept: set[int] = set()
        """The steps that can be undone: those which gc has left."""
        self.calls = 0
        self.session = Session()

    # What is there.

    @initialize(first=deeds(DONE, 4))
    def begin(self, first: list[Deed]) -> None:
        (self.root / "d/e").mkdir(parents=True)
        for number, path in enumerate(("a", "b", "d/a", "d/e/a")):
            (self.root / path).write_bytes([*TEXTS.values()][number])
        for deed in first:
            do(self.root, deed)
        self._open()
        now = self.look()
        self.made[0] = Made({}, seen(now), ({}, now), True)
        self.newest, self.tip, self.known = 0, seen(now), now
        self.settled(now, looked=True)

    def _open(self) -> None:
        self.workspace = Workspace.open(self.root, store=self.top / "store")
        tools = [self._tool("call", opaque=False), self._tool("command", opaque=True)]
        section = MarkdownSection(title="Work", template="Work.", tools=tools)
        self.prompt = Prompt[None](ns="tests", key="history", sections=[section])
        self.prompt.bind(resources={Filesystem: self.workspace.filesystem})
        self.prompt.resources.__enter__()

    def _close(self) -> None:
        self.prompt.resources.__exit__(None, None, None)
        self.workspace.close()

    def _tool(self, name: str, *, opaque: bool) -> Tool[None, None]:
        def handler(params: None, *, context: ToolContext) -> ToolResult[None]:
            self.handler(context)
            return ToolResult.error("no") if self.failing else ToolResult("yes")

        return Tool[None, None](name=name, description="Work.", handler=handler, opaque=opaque)

    def call(self, name: str, handler: Handler, *, fails: bool) -> bool:
        """Whether it was committed."""
        self.handler, self.failing = handler, fails
        result = ToolExecutor(prompt=self.prompt, session=self.session).call(name, {})
        self.calls += 1
        receipts = self.session[Receipt].all()
        assert (len(receipts), receipts[-1].outcome == "committed") == (self.calls, result.success)
        assert result.success or fails, result.message
        return result.success

    def look(self) -> dict[str, CapturedPath]:
        found = shape(self.root)
        for path, one in found.items():
            if one.kind == oct(stat.S_IFREG) and one.content not in self.bytes:
                self.bytes[one.content] = (self.root / path).read_bytes()
        return found

    def read(self, commit: str) -> Tree:
        """A tree as the history has it."""
        changes = self.workspace._store.states.changes(None, commit)
        found = {change.path: change.after for change in changes}
        return {
            path: (one.kind, 0o777 if one.kind == "symlink" else one.mode, one.content_hash or one.target or "")
            for path, one in found.items()
            if one is not None and path
        }

    def settled(self, before: dict[str, CapturedPath], *, looked: bool) -> int | None:
        """Compare what the history has made of a call or a command with the trees before and after; its step, if any.

        What a person had changed is nobody's step. It is in the history when that has ``looked``, and of a path that a
        call changed before its step."""
        after, steps = self.look(), self.workspace.steps()
        was, now = seen(before), seen(after)
        step = steps[-1] if steps and steps[-1].number > self.newest else None
        tip = self.read(self.workspace.newest)
        assert (step is not None) == (was != now)
        parent = tip
        if step is not None:
            assert step.number == self.newest + 1
            assert set(step.paths) == differing(was, now)
            assert self.workspace.newest == step.commit
            above = self.workspace._store.commit(step.commit).parent
            assert above is not None
            parent = self.read(above)
            shown = self.workspace.show(step.number).changes
            assert {change.path for change in shown} == differing(was, now)
        for path in parent.keys() | was.keys() | self.tip.keys() | tip.keys():
            theirs = {was.get(path)} if looked or path in differing(was, now) else {was.get(path), self.tip.get(path)}
            assert parent.get(path) in theirs, path
            assert tip.get(path) == (now if path in differing(was, now) else parent).get(path), path
        # That a call, and no command, made a path only newer is not in its step.
        told = differing(was, now) | {os.path.dirname(path) for path in differing(was, now)}
        newer = differing(*({path: one.mtime_ns for path, one in tree.items()} for tree in (before, after)))
        known = looked or (before == self.known and newer <= told)
        if step is not None:
            self.newest = step.number
            self.made[step.number] = Made(parent, tip, (before, after), known)
            self.kept.add(step.number)
        self.tip = tip
        if looked or step is not None:
            self.known = {} if not known else after if step is not None else before
        return step.number if step is not None else None

    def numbers(self) -> list[int]:
        return [entry.number for entry in self.workspace.log() if entry.number is not None]

    # Calls and a person.

    @rule(what=deeds(CALLED, 5), fails=st.sampled_from([False, False, False, True]))
    def work(self, what: list[Deed], fails: bool) -> None:
        before, exact = self.look(), capture_tree(self.root)
        self.call("call", lambda context: [call(files_of(context), deed) for deed in what], fails=fails)
        assert not fails or capture_tree(self.root) == exact
        self.settled(before, looked=False)

    @rule(what=deeds(DONE, 5), fails=st.sampled_from([False, False, False, True]))
    def command(self, what: list[Deed], fails: bool) -> None:
        before = self.look()
        self.call("command", lambda context: [do(self.root, deed) for deed in what], fails=fails)
        assert not fails or self.look() == before
        self.settled(before, looked=not fails)

    @rule(what=deeds(CALLED, 3))
    def work_more(self, what: list[Deed]) -> None:
        self.work(what, fails=False)

    @rule(what=deeds(DONE, 3))
    def edit(self, what: list[Deed]) -> None:
        for deed in what:
            do(self.root, deed)

    # Undo and restore.

    @precondition(lambda self: self.kept)
    @rule(n=st.sampled_from([1, 1, 1, 2, 3, 5]), among=st.integers(0, 99), one=st.booleans(), fails=st.booleans())
    def undo_in_a_call(self, n: int, among: int, one: bool, fails: bool) -> None:
        self._undo(n, among, one, fails=fails)

    @precondition(lambda self: self.kept)
    @rule(
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        among=st.integers(0, 99),
        one=st.booleans(),
        between=st.one_of(st.none(), deeds(DONE, 2)),
        again=st.booleans(),
    )
    def undo(self, n: int, among: int, one: bool, between: list[Deed] | None, again: bool) -> None:
        self._undo(n, among, one, between=between)
        if again and self.done.step is not None:
            before = self.before_undo
            self._undo(1, 0, False)
            assert self.look() == before

    def _undo(
        self, n: int, among: int, one: bool, *, between: list[Deed] | None = None, fails: bool | None = None
    ) -> None:
        numbers = sorted(self.kept, reverse=True)
        chosen = [numbers[among % len(numbers)]] if one else numbers[:n]
        assume(one or len(chosen) == n)

        def undo(*, dry_run: bool = False) -> Reversal:
            return self.workspace.undo(None if one else n, step=chosen[0] if one else None, dry_run=dry_run)

        said = self._dry(lambda: undo(dry_run=True))
        for deed in between or ():
            do(self.root, deed)
        before = self.look()
        self._run(undo, fails)
        after = self.look()
        if not fails:
            if not between:
                assert (said.outcomes, said.reasons) == (self.done.outcomes, self.done.reasons)
            self._compare_undone([self.made[number] for number in chosen], before, after)
            self.before_undo = before
        self.settled(before, looked=not fails)

    def _dry(self, say: Callable[[], Reversal]) -> Reversal:
        before = capture_tree(self.root)
        said = say()
        assert capture_tree(self.root) == before
        assert said.step is None
        self.settled(self.look(), looked=True)
        return said

    def _run(self, change: Callable[[], Reversal], fails: bool | None) -> None:
        before = capture_tree(self.root)

        def handler(context: ToolContext) -> None:
            self.done = change()

        if fails is None:
            self.done = change()
            assert (self.done.step is not None) == self.done.has_changed
        else:
            self.call("call", handler, fails=fails)
        assert not fails or capture_tree(self.root) == before
        assert not self.done.notes

    def _compare_undone(
        self, made: list[Made], before: dict[str, CapturedPath], after: dict[str, CapturedPath]
    ) -> None:
        was, now = seen(before), seen(after)
        expected, outcomes = undone(made, was)
        assert now == expected
        assert self.done.outcomes.keys() == outcomes.keys()
        for path, outcome in self.done.outcomes.items():
            assert outcome == outcomes[path] or (outcome, outcomes[path]) == ("conflict", "kept"), path
            assert (outcome in ("restored", "removed")) == (was.get(path) != now.get(path)), path
            assert (path in self.done.reasons) == (outcome in ("kept", "conflict")), path
        dressed = {path for one in made for path in differing(*one.found)}
        for path in now.keys() - outcomes.keys() - dressed:
            if now[path][0] != "directory":
                assert replace(after[path], links=()) == replace(before[path], links=()), path
        whole = [one.found for one in made]
        if all(one.known for one in made) and before == whole[0][1] and all(a[0] == b[1] for a, b in pairwise(whole)):
            assert after == whole[-1][0], "nobody has changed anything but these steps"

    @rule(to=st.integers(0, 99), fails=st.sampled_from([None, None, False, True, True]), again=st.booleans())
    def restore(self, to: int, fails: bool | None, again: bool) -> None:
        assume(there := self.numbers())
        number = there[to % len(there)]
        said = self._dry(lambda: self.workspace.restore(number, dry_run=True))
        before = self.look()
        self._run(lambda: self.workspace.restore(number), fails)
        assert (said.outcomes, said.reasons) == (self.done.outcomes, self.done.reasons)
        if not fails:
            now, wanted = self.look(), self.made[number]
            assert seen(now) == wanted.after
            assert not wanted.known or now == wanted.found[1]
            gone = {path: "removed" if path not in wanted.after else "restored" for path in self.done.outcomes}
            assert self.done.outcomes == gone
            assert gone.keys() == differing(seen(before), seen(now))
        step = self.settled(before, looked=not fails)
        if again and step is not None:
            self._undo(1, 0, False)
            assert self.look() == before

    # Names, gc, and other openers.

    @precondition(lambda self: len(self.named) < 4)
    @rule()
    def name(self) -> None:
        name = f"name-{len(self.named)}"
        self.named[name] = self.look()
        number = self.workspace.checkpoint(name).number
        assert number == (self.newest if self.newest in self.numbers() else 0)
        self.settled(self.named[name], looked=True)

    @precondition(lambda self: self.named)
    @rule(which=st.integers(0, 9))
    def restore_a_name(self, which: int) -> None:
        name = sorted(self.named)[which % len(self.named)]
        before = self.look()
        self.workspace.restore(name)
        assert self.look() == self.named[name]
        self.settled(before, looked=True)

    @rule(keep=st.integers(0, 6))
    def gc(self, keep: int) -> None:
        before = capture_tree(self.root)
        self.workspace.gc(keep)
        assert capture_tree(self.root) == before
        self.kept = {*sorted(self.kept)[-keep:]} if keep else set()
        assert self.kept <= {*self.numbers()}
        self.settled(self.look(), looked=True)

    @rule(edits=st.one_of(st.none(), deeds(DONE, 3)))
    def reopen(self, edits: list[Deed] | None) -> None:
        log = self.workspace.log()
        self._close()
        self._read_by_git({one.number: one.commit for one in log if one.number is not None})
        for deed in edits or ():
            do(self.root, deed)
        before = capture_tree(self.root)
        self._open()
        assert capture_tree(self.root) == before
        assert self.workspace.log()[-len(log) :] == log
        self.settled(self.look(), looked=True)

    @rule()
    def look_beside(self) -> None:
        before = capture_tree(self.root)
        with Workspace.open(self.root, store=self.top / "store", read_only=True) as beside:
            assert beside.log() == self.workspace.log()
            assert beside.diff() == self.workspace.diff()
            with pytest.raises(PermissionError, match="read-only"):
                beside.undo()
        assert capture_tree(self.root) == before

    # What git makes of it.

    @rule(ends=st.tuples(st.integers(0, 99), st.integers(0, 99)))
    def apply(self, ends: tuple[int, int]) -> None:
        assume(there := self.numbers())
        a, b = sorted(there[end % len(there)] for end in ends)
        copy = self.top / "copy"
        copy.mkdir()
        for path, (kind, mode, content) in self.made[a].after.items():
            if kind != "directory":  # of those git knows nothing
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
            if kind == "symlink":
                (copy / path).symlink_to(content)
            elif kind == "file":
                (copy / path).write_bytes(self.bytes[content])
                (copy / path).chmod(mode)
        # Git cannot put anything in the place of a link that leads to itself.
        if not any(map(_leads_to_itself, copy.rglob("*"))):
            if patch := self.workspace.diff(a, b):
                git_bytes(copy, "apply", "--whitespace=nowarn", "-", given=patch)
            assert for_git(seen(capture_tree(copy))) == for_git(self.made[b].after)
        shutil.rmtree(copy)

    def teardown(self) -> None:
        try:
            if hasattr(self, "workspace"):
                self._close()
                fsck(self.top / "store/history")
        finally:
            shutil.rmtree(self.top)

    def _read_by_git(self, commits: Mapping[int, str]) -> None:
        assert self.kept <= commits.keys() <= self.made.keys()
        store = self.top / "store/history"
        for number, commit in commits.items():
            rows = git_bytes(store, "ls-tree", "-r", "-z", f"{commit}:files").split(b"\0")[:-1]
            found = {os.fsdecode(row[53:]): (row[:6].decode(), row[12:52].decode()) for row in rows}
            wanted = for_git(self.made[number].after)
            assert found == {
                path: (mode, blob_id(os.fsencode(content) if mode == "120000" else self.bytes[content]))
                for path, (mode, content) in wanted.items()
            }


def files_of(context: ToolContext) -> Filesystem:
    assert context.filesystem is not None
    return context.filesystem


def for_git(tree: Tree) -> dict[str, tuple[str, str]]:
    """What git knows of a tree."""
    modes = {
        path: "120000" if kind == "symlink" else oct(0o100755 if mode & 0o100 else 0o100644)[2:]
        for path, (kind, mode, _) in tree.items()
        if kind != "directory"
    }
    return {path: (mode, tree[path][2]) for path, mode in modes.items()}


# What an undo is to do.


def undone(made: Iterable[Made], now: Tree) -> tuple[Tree, dict[str, str]]:
    """The tree without these steps, newest first, and what becomes of each path."""
    made = [*made]
    tree, outcomes = dict(now), dict[str, str]()

    def put(path: str, state: Seen | None) -> None:
        if state is None:
            tree.pop(path, None)
        else:
            tree[path] = state

    for path in {path for step in made for path in step.paths}:
        states = [(step.before.get(path), step.after.get(path)) for step in made if path in step.paths]
        state, outcomes[path] = without(now.get(path), states)
        put(path, state)
    for path in sorted(outcomes, reverse=True):
        state, was = tree.get(path), now.get(path)
        # What is to come back there does not keep a directory: it has no place, if somebody removed the one it was in.
        inside = any(other.startswith(f"{path}/") for other in tree if other in now)
        if was is not None and was[0] == "directory" and (state is None or state[0] != "directory") and inside:
            put(path, was)
            outcomes[path] = "kept" if state is None else "conflict"
    for path in sorted(outcomes):
        above = path.rpartition("/")[0]
        if path in tree and tree[path] != now.get(path) and above and tree.get(above, ("",))[0] != "directory":
            put(path, now.get(path))
            outcomes[path] = "conflict"
    for path, outcome in outcomes.items():
        if outcome == "restored":
            same = tree.get(path) == now.get(path)
            outcomes[path] = "kept" if same else "restored" if path in tree else "removed"
    return tree, outcomes


def without(now: Seen | None, states: Iterable[tuple[Seen | None, Seen | None]]) -> tuple[Seen | None, str]:
    states = [*states]
    # What an earlier undo has reversed needs no reversal: the newest of the states that is there now tells how much.
    there = [number + (now != after) for number, (before, after) in enumerate(states) if now in (before, after)]
    state, outcome = now, "kept"
    for before, after in states[there[0] if there else 0 :]:
        if state == after:
            state, outcome = before, "restored"
        elif state != before and (both := together(before, after, state)) is not None:
            state, outcome = both, "restored"
        elif state != before:
            return now, "conflict"
    return state, outcome


def together(before: Seen | None, after: Seen | None, now: Seen | None) -> Seen | None:
    if before is None or after is None or now is None or not before[0] == after[0] == now[0]:
        return None
    mode = either(after[1], now[1], before[1])
    content = either(after[2], now[2], before[2]) or merged(after[2], now[2], before[2])
    return (now[0], mode, content or "") if mode is not None and (content or now[0] == "directory") else None


def either(origin: Any, one: Any, other: Any) -> Any:
    """What became of a value that at most one of two has changed; None where both did."""
    return other if one == origin else one if other in (origin, one) else None


def merged(*texts: str) -> str | None:
    if not all(text in OF_TEXT for text in texts):
        return None
    lines = tuple(either(*three) for three in zip(*(OF_TEXT[text] for text in texts), strict=True))
    return hashlib.sha256(TEXTS[lines]).hexdigest() if None not in lines else None


def _leads_to_itself(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


TestHistoryIsTrees = HistoryIsTrees.TestCase
TestHistoryIsTrees.settings = settings(max_examples=amount(prove=5000, test=12))
