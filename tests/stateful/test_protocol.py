"""Every small program of calls, ended by a crash at every system call: the tree is before the call or after it.

The programs are all sequences of `OPERATIONS` up to a length, with either end (`make test` has one in four of those of
two, by the seed). A crash is played within the process:
at one failpoint, and at each that follows while the stack unwinds, `Killed` is raised, so that nothing is changed from
there on (which is looked at for one in eight). That costs a third of a process that is forked and really killed;
`test_host_recovery.py` has those.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Literal

import pytest
from captured_tree import CapturedPath, capture_tree, lasting
from effort import PROVING, SEED, amount
from failpoints import injected
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_git import blob_id, objects_of

from ringfence.runtime import RollbackReport
from ringfence.testing import HeldCall, held_call
from ringfence_sandbox import HostFilesystem, Workspace
from ringfence_workspace import Recovered
from ringfence_workspace.history.log import Log
from ringfence_workspace.transaction.interrupted_calls import forget_killed

Tree = Mapping[str, CapturedPath]
End = Literal["commit", "rollback"]
Work = Callable[[HostFilesystem, HeldCall], object]


def on(work: Callable[[HostFilesystem], object]) -> Work:
    return lambda fs, call: work(fs.for_call(call))


def inner(end: End, work: Callable[[HostFilesystem], object]) -> Work:
    """A call within the call, with an end of its own."""

    def run(fs: HostFilesystem, call: HeldCall) -> None:
        with held_call(fs, call_id="inner", parent=call) as within:
            work(fs.for_call(within))
            getattr(within, end)()

    return run


def write_and_delete(fs: HostFilesystem) -> None:
    fs.write("b", "of an inner call\n")
    fs.delete("d/c")


def write_and_move(fs: HostFilesystem) -> None:
    fs.write("a", "of an inner call\n")
    fs.move("d", "e")


def make_and_link(fs: HostFilesystem) -> None:
    fs.mkdir("n/o")
    fs.symlink("n/s", "o")


OPERATIONS: dict[str, Work] = {
    "write a": on(lambda fs: fs.write("a", "the call's\n")),
    "append to d/c": on(lambda fs: fs.write("d/c", "more\n", mode="append")),
    "delete a": on(lambda fs: fs.delete("a")),
    "move a to d/a": on(lambda fs: fs.move("a", "d/a")),
    "move b over a": on(lambda fs: fs.move("b", "a", overwrite=True)),
    "move d to e": on(lambda fs: fs.move("d", "e")),
    "remove d": on(lambda fs: fs.delete("d", recursive=True)),
    "chmod a": on(lambda fs: fs.chmod("a", 0o600)),
    "make n/s": on(make_and_link),
    "inner call": inner("commit", write_and_delete),
    "inner rollback": inner("rollback", write_and_move),
}
MORE: dict[str, Work] = {
    "write e/c": on(lambda fs: fs.write("e/c", "the call's\n")),
    "move e to d": on(lambda fs: fs.move("e", "d")),
    "chmod d": on(lambda fs: fs.chmod("d", 0o500)),
}
Program = tuple[str, ...]
RARE = {("write a", "inner rollback"), ("chmod a", "inner rollback"), ("make n/s", "move d to e")}
"""Programs that leave the rows of `TABLE` that few others leave: each run has them."""

UNDONE = "a call, partly undone"
TABLE = {
    # the log has; displaced files are; the tree is as; what the opening does
    ("no call", "none", "before", "nothing"),
    ("no call", "none", "after", "nothing"),
    ("an open call", "none", "before", "rolled back"),
    ("an open call", "none", "other", "rolled back"),  # something was made, moved, or has other bits
    ("an open call", "none", "after", "rolled back"),
    ("an open call", "the call's", "before", "rolled back"),  # not yet in their places
    ("an open call", "the call's", "other", "rolled back"),
    ("an open call", "the call's", "after", "rolled back"),
    ("an open call", "of before", "other", "rolled back"),
    ("an open call", "of before", "after", "rolled back"),
    ("an open call", "of before, the call's", "other", "rolled back"),
    ("an open call", "of before, the call's", "after", "rolled back"),
    (UNDONE, "none", "before", "rolled back"),
    (UNDONE, "none", "other", "rolled back"),
    (UNDONE, "none", "after", "rolled back"),  # an inner call was undone, none else yet
    (UNDONE, "the call's", "before", "rolled back"),
    (UNDONE, "the call's", "other", "rolled back"),
    (UNDONE, "the call's", "after", "rolled back"),
    (UNDONE, "of before", "other", "rolled back"),
    (UNDONE, "of before", "after", "rolled back"),
    (UNDONE, "of before, the call's", "other", "rolled back"),
    (UNDONE, "of before, the call's", "after", "rolled back"),
    ("a committed call", "none", "before", "finished"),  # which comes to the same
    ("a committed call", "none", "after", "finished"),
    ("a committed call", "the call's", "before", "finished"),
    ("a committed call", "the call's", "after", "finished"),
    ("a committed call", "of before", "after", "finished"),
    ("a committed call", "of before, the call's", "after", "finished"),
}
State = tuple[str, str, str, str]


class Killed(BaseException):
    """In the place of SIGKILL."""


@dataclass(frozen=True)
class Found:
    """What a crash leaves on the disk."""

    tree: Tree
    displaced: Tree
    """What is in the directory of displaced files."""
    logs: Sequence[bytes]


def log_of(store: Path) -> str:
    """What the log has of a call: in the words of `TABLE`."""
    state = "no call"
    with suppress(FileNotFoundError), closing(Log(store / "history", writable=False)) as log:
        for record in log.records:
            match record.values:
                case {"begin": _}:
                    state = "an open call"
                case {"commit": _}:
                    state = "a committed call"
                case {"restored": _}:
                    state = UNDONE
                case {"undo": _} | {"after": _} if state == UNDONE:  # an inner call was undone, and this one goes on
                    state = "an open call"
                case {"end": _}:
                    state = "no call"
                case _:
                    pass
    return state


class Kill:
    """A hook of `injected`: counts the failpoints of each stage, and ends all at one of a stage's."""

    def __init__(self, place: Place, stage: int = 0, point: int | None = None) -> None:
        self.place = place
        self.at = stage, point
        self.stage = 0
        self.counts = Counter[int]()
        self.found: Found | None = None
        self.log = ""
        self.state: tuple[str, str, str] = ("", "", "")
        self.after: Tree = {}
        """What the operations came to."""

    def __call__(self, name: str) -> None:
        if self.found is not None:
            raise Killed
        if (self.stage, self.counts[self.stage]) == self.at:
            self.found = self.place.look()
            raise Killed
        self.counts[self.stage] += 1


def die(fs: HostFilesystem | None) -> None:
    """Let go of the lock and of what is open, as the kernel does."""
    if fs is not None:
        fs._opened._release()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "/.ringfence-hold-" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.close(int(descriptor))


class Place:
    """A tree to change, again and again from its beginning."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        self.store = top / "store"
        self.root.mkdir()
        self.fresh()
        self.begun = top / "begun"
        """A store that has the tree as it was."""
        Workspace.open(self.root, store=self.begun).close()

    def fresh(self) -> None:
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        (self.root / "d").mkdir()
        for number, path in enumerate(("a", "b", "d/c", "d", "")):
            if path not in ("d", ""):
                (self.root / path).write_text(f"{path} as it was\n")
            os.utime(self.root / path, ns=(10**18, 10**18 + number))
        self.before = capture_tree(self.root)
        self.inodes = {one.inode for one in self.before.values()}

    def look(self) -> Found:
        now = capture_tree(self.root, held=True)
        tree = {path: one for path, one in now.items() if not path.startswith(".ringfence")}
        held = {path: one for path, one in now.items() if path not in tree and path.count("/") == 1}
        displaced = {path: one for path, one in held.items() if not path.endswith("/.gitignore")}
        logs = sorted((self.store / "history").glob("log.??????"))
        return Found(tree, displaced, [log.read_bytes() for log in logs])

    def tree(self) -> Tree:
        return {path: one for path, one in capture_tree(self.root).items() if not path.startswith(".ringfence")}

    def open(self) -> HostFilesystem:
        return HostFilesystem(self.root, store=self.store)

    def run(self, program: Program, end: End, kill: Kill) -> None:
        """Its stages are the opening, the operations, and the end with the closing."""
        shutil.rmtree(self.store, ignore_errors=True)
        shutil.copytree(self.begun, self.store)
        with injected(kill):
            fs = self.open()
            assert fs.recovered is None, "the last opening has recovered all"
            try:
                with held_call(fs) as call:
                    for kill.stage, name in enumerate(program, 1):
                        (OPERATIONS | MORE)[name](fs, call)
                    kill.stage = len(program) + 1
                    kill.after = self.tree()
                    getattr(call, end)()
                fs.close()
            except BaseException:
                die(fs)
                raise

    def recover(self, kill: Kill) -> Recovered | None:
        try:
            with injected(kill):
                fs = self.open()
        except Killed:
            die(None)
            raise
        fs.close()
        forget_killed(self.store)
        return fs.recovered


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Generator[Place]:
    monkeypatch.setattr("ringfence_workspace.history.log._ROOM_BYTES", 80 << 10)  # read for each crash
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    top = Path(tempfile.mkdtemp(prefix="protocol-", dir=memory))
    try:
        yield Place(top)
    finally:
        shutil.rmtree(top)


class Exploration:
    """Runs programs, crashes them everywhere, and notes in which states that left them."""

    def __init__(self, place: Place, stride: int) -> None:
        self.place = place
        self.stride = stride
        self.states = set[State]()
        self.programs = self.passed = self.crashes = self.second_crashes = 0

    def explore(self, operations: Collection[str], length: int, program: Program = ()) -> None:
        """All programs that begin so, up to a length."""
        if not self.explored(program):
            return
        self.programs += 1
        for name in operations if len(program) < length else ():
            if self.is_chosen(following := (*program, name)):
                self.explore(operations, length, following)

    def is_chosen(self, program: Program) -> bool:
        if PROVING or len(program) < 2 or program in RARE:
            return True
        self.passed += 1
        return (self.passed + SEED) % 4 == 0

    def explored(self, program: Program) -> bool:
        """False where one of its operations is refused."""
        place, kill = self.place, Kill(self.place)
        try:
            place.run(program, "commit", kill)
        except OSError:
            place.recover(Kill(place))
            assert place.tree() == place.before
            return False
        self.ended(program, "commit", kill)
        last, end = len(program), len(program) + 1
        for point in range(kill.counts[last]):  # what comes before is explored with shorter programs
            self.crash(program, "rollback", Kill(place, last, point), kill.after)
        for point in range(kill.counts[end]):
            self.crash(program, "commit", Kill(place, end, point), kill.after)
        kill = Kill(place)
        place.run(program, "rollback", kill)
        self.ended(program, "rollback", kill)
        for point in range(kill.counts[end]):
            self.crash(program, "rollback", Kill(place, end, point), kill.after)
        return True

    def ended(self, program: Program, end: End, kill: Kill) -> None:
        place = self.place
        now = capture_tree(place.root)
        assert now == (kill.after if end == "commit" else place.before), (program, end)
        if now != place.before:
            place.fresh()

    def crash(self, program: Program, end: End, kill: Kill, after: Tree) -> None:
        self.crashes += 1
        self.run_into(program, end, kill, after)
        self.recover(kill, (program, end, *kill.at))
        if (self.crashes + SEED) % self.stride:
            return
        for point in count():
            first, second = Kill(self.place, *kill.at), Kill(self.place, 0, point)
            self.run_into(program, end, first, after)
            try:
                self.place.recover(second)
            except Killed:
                self.second_crashes += 1
                self.describe(second, after)
            self.recover(first, (program, end, *kill.at, point), second)
            if second.found is None:
                return

    def run_into(self, program: Program, end: End, kill: Kill, after: Tree) -> None:
        with pytest.raises(Killed):
            self.place.run(program, end, kill)
        self.describe(kill, after)

    def recover(self, kill: Kill, case: tuple[object, ...], second: Kill | None = None) -> None:
        """Recover, and look whether all is as before the call, or as after it."""
        place, found = self.place, kill.found
        assert found is not None
        match kill.log:
            case "no call":
                ends = (kill.after, place.before) if "commit" in case else (place.before, kill.after)
                alike = [one for one in ends if one and found.tree | {"": one[""]} == one]
                assert alike, case
                expected = alike[0]  # with the time of the root that it has once the hold is removed
            case "a committed call":
                expected = kill.after
            case _:
                expected = place.before
        if second is None or second.found is not None:
            recovered = place.recover(Kill(place))
            self.states.add((*(second or kill).state, "nothing" if recovered is None else recovered.outcome))
            assert recovered is None or not (recovered.conflicts or recovered.notes), case
        now = capture_tree(place.root)
        assert now == expected, case
        assert not (place.store / "kept").exists(), case
        if now != place.before:
            assert place.recover(Kill(place)) is None, case  # else the next program opens it
            place.fresh()

    def describe(self, kill: Kill, after: Tree) -> None:
        """What the crash has left, in the words of `TABLE`."""
        place, found = self.place, kill.found
        assert found is not None
        if (self.crashes + SEED) % 8 == 0:
            assert place.look() == found, "nothing is changed after a crash"
        kill.log = log_of(place.store)
        of = {"of before" if one.inode in place.inodes else "the call's" for one in found.displaced.values()}
        now = lasting(dict(found.tree))
        is_after = "after" if now == lasting(dict(after)) else "other"
        tree = "before" if now == lasting(dict(place.before)) else is_after
        kill.state = kill.log, ", ".join(sorted(of)) or "none", tree


def test_a_crash_anywhere_in_any_small_program_leaves_the_state_before_or_after(place: Place) -> None:
    exploration = Exploration(place, amount(prove=60, test=100))
    exploration.explore(OPERATIONS, amount(prove=3, test=2))
    if PROVING:
        exploration.explore(OPERATIONS | MORE, 2)
    assert exploration.programs > amount(prove=1000, test=30)
    assert exploration.crashes > amount(prove=25_000, test=700)
    assert exploration.second_crashes > 0
    assert exploration.states == TABLE


# A person saves a file


@dataclass(frozen=True)
class Save:
    """Of one path, before the failpoint with this number: of the call, or of the recovery of one that was killed."""

    path: str
    how: Literal["in place", "replace"]
    at: int
    recovery: bool = False

    @property
    def content(self) -> bytes:
        return f"the person's {self}\n".encode()


class Person:
    """A hook of `injected`: saves once, and kills ``after`` so many failpoints more."""

    def __init__(self, root: Path, save: Save, after: int | None) -> None:
        self.root = root
        self.save = save
        self.killed_at = None if after is None else save.at + after
        self.calls = 0
        self.saved = False
        self.told = set[str]()
        """What the call has told of conflicts and of what is kept, before it was killed."""

    def __call__(self, name: str) -> None:
        if self.killed_at is not None and self.calls > self.killed_at:
            raise Killed
        if self.calls == self.save.at:
            self._save(self.root / self.save.path)
        self.calls += 1
        if self.killed_at is not None and self.calls > self.killed_at:
            raise Killed

    def _save(self, path: Path) -> None:
        if path.is_symlink() or path.is_dir() or not path.parent.is_dir():
            return
        self.saved = True
        if self.save.how == "in place":
            path.write_bytes(self.save.content)
        else:
            beside = path.with_name("editor's")
            beside.write_bytes(self.save.content)
            os.replace(beside, path)

    def tell(self, report: RollbackReport | Recovered | None) -> None:
        if report is not None:
            self.told |= {*report.conflicts, *report.notes}

    def was_told(self, path: str) -> bool:
        return any(path in words for words in self.told)


def run_beside(place: Place, program: Program, end: End, person: Person) -> None:
    workspace = Workspace.open(place.root, store=place.store)
    try:
        with injected(person):
            with held_call(workspace.filesystem) as call:
                for name in program:
                    with suppress(OSError):  # what the person has saved is not written over
                        OPERATIONS[name](workspace.filesystem, call)
                try:
                    if end == "commit":
                        call.commit()
                except OSError:
                    end = "rollback"
                if end == "rollback":
                    person.tell(call.rollback())
            workspace.close()
    except Killed:
        die(workspace.filesystem)


def what_became_of(place: Place, program: Program, end: End, save: Save, after: int | None) -> str:
    """Where the saved bytes are in the end: "" where nothing was saved."""
    person = Person(place.root, save, after)
    if save.recovery:
        killed = Person(place.root, replace(save, at=-1), after)
        run_beside(place, program, end, killed)
        person.killed_at = None
        with injected(person):
            workspace = Workspace.open(place.root, store=place.store)
        person.tell(workspace.recovered)
        workspace.close()
    else:
        run_beside(place, program, end, person)
    with Workspace.open(place.root, store=place.store) as workspace:
        person.tell(workspace.recovered)
        done = any(step.call_id == "call-1" for step in workspace.steps())
    case = program, end, save, after, person.told
    if not done:
        places = [*place.root.rglob("*"), *(place.store / "kept").rglob("*")]
        there = {path.read_bytes() for path in places if path.is_file()}
        may_be_replaced = {save.path, *{"a": ["b"], "e/c": ["d/c"]}.get(save.path, [])}  # it may have been moved there
        assert {f"{path} as it was\n".encode() for path in {"a", "b", "d/c"} - may_be_replaced} <= there, case
    if not person.saved:
        return ""
    path = place.root / save.path
    if path.is_file() and path.read_bytes() == save.content:
        return "in its place"
    if any(path.read_bytes() == save.content for path in place.root.rglob("*") if path.is_file()):
        if done:
            return "where the call has moved it"
        assert person.was_told(save.path) or save.path.startswith("e/"), case
        return "where the call has moved it, named" if person.was_told(save.path) else "moved back"
    if any(path.read_bytes() == save.content for path in (place.store / "kept").rglob("*") if path.is_file()):
        assert person.was_told(save.path), case
        return "kept, named"
    assert done, case
    assert blob_id(save.content) in objects_of(place.store / "history"), case
    return "in the history"


def test_what_a_person_saves_once_is_in_its_place_or_kept_and_named(place: Place) -> None:
    ends, ways, kills = ("commit", "rollback"), ("in place", "replace"), (0, 2, None)
    saves = [Save(*one) for one in product(("a", "b", "d/c", "e/c"), ways, range(16))]
    beside = [(save, after) for save in saves for after in kills]
    beside += [(replace(save, recovery=True), after) for save in saves for after in (6, 11)]
    chosen = Random(SEED)
    became = Counter[str]()
    for length in (1, 2):
        cases = list(product(product(OPERATIONS, repeat=length), ends, beside))
        for number, (program, end, (save, after)) in enumerate(chosen.sample(cases, amount(prove=4000, test=80))):
            top = place.root.parent / f"{length}-{number}"
            top.mkdir()
            became[what_became_of(Place(top), program, end, save, after)] += 1
            shutil.rmtree(top)
    assert became["in its place"] > amount(prove=1000, test=10), became


# Moves within moves

paths = st.sampled_from(["a", "b", "d", "d/c", "d/f", "d/f/g", "e", "e/c", "e/f", "e/d", "n", "n/a", "a/n"])
steps = st.one_of(
    st.tuples(st.just("write"), paths),
    st.tuples(st.just("append"), paths),
    st.tuples(st.just("delete"), paths),
    st.tuples(st.just("mkdir"), paths),
    st.tuples(st.just("chmod"), paths),
    *[st.tuples(st.just("move"), paths, paths)] * 3,
    st.tuples(st.just("move back")),
    st.tuples(st.sampled_from(["begin", "begin", "commit", "rollback"])),
)


def follow(fs: HostFilesystem, call: HeldCall, program: Sequence[tuple[str, ...]]) -> None:
    calls, moves = [call], list[tuple[str, str]]()
    for number, step in enumerate(program):
        current = fs.for_call(calls[-1])
        with suppress(OSError, ValueError):  # what cannot be done is not done
            match step:
                case ["write", path]:
                    current.write(path, f"{number}\n")
                case ["append", path]:
                    current.write(path, f"{number}\n", mode="append")
                case ["delete", path]:
                    current.delete(path, recursive=True)
                case ["mkdir", path]:
                    current.mkdir(path)
                case ["chmod", path]:
                    current.chmod(path, 0o700 if current.stat(path).is_directory else 0o600)
                case ["move", old, new]:
                    current.move(old, new, overwrite=True)
                    moves.append((old, new))
                case ["move back"] if moves:
                    new, old = moves.pop()
                    current.move(old, new)
                case ["begin"]:
                    within = HeldCall(f"inner {number}", calls[-1])
                    within.join(fs)
                    calls.append(within)
                case ["commit" | "rollback" as end] if len(calls) > 1:
                    within = calls.pop()
                    getattr(within, end)()
                    within.release()
                case _:
                    pass
    for within in reversed(calls[1:]):
        within.rollback()
        within.release()


@given(st.lists(steps, min_size=1, max_size=14), st.sampled_from(["rollback", "kill"]))
@settings(max_examples=amount(prove=10_000, test=200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_moved_comes_back(place: Place, program: list[tuple[str, ...]], end: str) -> None:
    if not (place.root / "d/f").exists():
        (place.root / "d/f").mkdir()
        (place.root / "d/f/g").write_text("g\n")
    before = capture_tree(place.root)
    fs = place.open()
    assert fs.recovered is None
    with held_call(fs) as call:
        follow(fs, call, program)
        if end == "rollback":
            assert call.rollback() == RollbackReport()
    if end == "rollback":
        fs.close()
    else:
        die(fs)
        place.recover(Kill(place))
    assert capture_tree(place.root) == before
