"""Sessions against plain lists: whatever is dispatched, marked, rolled back, snapshotted, restored and cloned."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from running_calls import within

from ringfence.errors import SnapshotRestoreError
from ringfence.runtime import (
    Append,
    CallInfo,
    Clear,
    Extend,
    Receipt,
    Replace,
    Session,
    SlicePolicy,
    Snapshot,
    append_all,
    upsert_by,
)


@dataclass(frozen=True)
class Fact:
    number: int


@dataclass(frozen=True)
class Kept:
    """One for each remainder of ten."""

    number: int


@dataclass(frozen=True)
class Line:
    """A log."""

    number: int


Op = Append["Fact"] | Extend["Fact"] | Replace["Fact"] | Clear["Fact"]


@dataclass(frozen=True)
class Change:
    """What its reducer does to the slice of `Fact`; None is not a thing that a reducer can say."""

    op: Op | None


@dataclass(frozen=True)
class Late:
    """A slice that the first session gets to know only when one of these is dispatched."""

    number: int


KINDS = (Fact, Kept, Line, Late)
STATE = (Fact, Kept, Late)
Lists = dict[type, list[object]]
Taken = tuple[Snapshot, Lists]


@dataclass
class World:
    """A session, what it should hold, and its open marks with what it should hold after a rollback."""

    session: Session
    holds: Lists
    marks: list[tuple[object, Lists]] = field(default_factory=list)

    def state(self) -> Lists:
        return {kind: list(self.holds[kind]) for kind in STATE}


def even(fact: Fact) -> bool:
    return fact.number % 2 == 0


def after(op: Op | None, items: list[object]) -> list[object]:
    match op:
        case Append(item):
            return [*items, item]
        case Extend(more):
            return [*items, *more]
        case Replace(others):
            return list(others)
        case Clear(predicate):
            return [item for item in items if predicate is not None and not predicate(item)]
    return items


NUMBERS = st.integers(0, 99)
FACTS = st.builds(Fact, NUMBERS)
OPS = st.one_of(
    st.builds(Append, FACTS),
    st.builds(Append, FACTS),
    st.builds(Append, FACTS),
    st.builds(Extend, st.lists(FACTS, max_size=3)),
    st.one_of(st.builds(Replace, st.lists(FACTS, max_size=3)), st.sampled_from([Clear(), Clear(even), None])),
)
RECEIPT = Receipt("r", "1", "tool", None, "committed", "", None, 0.0, "s", "p")  # type: ignore[arg-type]


class OneSessionIsLists(RuleBasedStateMachine):
    worlds = Bundle("worlds")
    snapshots = Bundle("snapshots")

    def __init__(self) -> None:
        self.around = ExitStack()
        self.around.enter_context(within(CallInfo("0", "all that is done here")))
        super().__init__()
        self.all: list[World] = []
        self.taken: list[Taken] = []

    @initialize(target=worlds)
    def first(self) -> World:
        session = Session()
        session[Fact].register(Change, lambda view, event, *, context: event.op)
        session[Kept].register(Kept, upsert_by(lambda kept: kept.number % 10))
        session[Line].register(Line, append_all, policy=SlicePolicy.LOG)
        self.all.append(World(session, {kind: [] for kind in KINDS}))
        return self.all[0]

    @rule(world=worlds, number=NUMBERS, kind=st.sampled_from([Fact, Fact, Fact, Line, Late]))
    def dispatch(self, world: World, number: int, kind: type[Fact]) -> None:
        assert world.session.dispatch(kind(number)).ok
        world.holds[kind].append(kind(number))

    @rule(world=worlds, number=NUMBERS)
    def upsert(self, world: World, number: int) -> None:
        assert world.session.dispatch(Kept(number)).ok
        world.holds[Kept] = [kept for kept in world.holds[Kept] if kept.number % 10 != number % 10] + [Kept(number)]

    @rule(world=worlds, op=OPS)
    def change(self, world: World, op: Op | None) -> None:
        assert world.session.dispatch(Change(op)).ok is (op is not None)
        world.holds[Fact] = after(op, world.holds[Fact])

    @rule(world=worlds, kind=st.sampled_from([*KINDS, None]), numbers=st.lists(NUMBERS, max_size=3))
    def change_directly(self, world: World, kind: type[Fact] | None, numbers: list[int]) -> None:
        if kind is None:
            world.session.reset()
            world.holds.update({kind: [] for kind in KINDS})
        elif numbers:
            world.session[kind].seed(map(kind, numbers))
            world.holds[kind] = list(map(kind, numbers))
        else:
            world.session[kind].clear(even)
            world.holds[kind] = [item for item in world.holds[kind] if not even(item)]

    def teardown(self) -> None:
        self.around.close()

    @rule(world=worlds)
    def begin(self, world: World) -> None:
        world.marks.append((world.session.begin(CallInfo("1", "tool")), world.state()))

    @rule(world=worlds)
    def commit(self, world: World) -> None:
        if world.marks:
            mark, before = world.marks.pop()
            assert world.session.changed(mark) or world.state() == before
            world.session.commit(mark, RECEIPT)

    @rule(world=worlds, twice=st.booleans())
    def roll_back(self, world: World, twice: bool) -> None:
        if world.marks:
            mark, before = world.marks.pop()
            for _ in range(1 + twice):
                world.session.rollback(mark)
            world.holds.update(before)
            assert not world.session.changed(mark)

    @rule(target=snapshots, world=worlds, ops=st.lists(OPS, min_size=1, max_size=3), fails=st.booleans())
    def call_that_takes_a_snapshot(self, world: World, ops: list[Op | None], fails: bool) -> Taken:
        """Seldom in this order by chance, and the hardest on who shares a list with whom."""
        self.begin(world)
        for op in ops:
            self.change(world, op)
        taken = self.snapshot(world, {SlicePolicy.STATE})
        if fails:
            self.roll_back(world, twice=False)
        else:
            self.commit(world)
        return taken

    @rule(world=worlds, ops=st.lists(OPS, min_size=1, max_size=3))
    def failed_call(self, world: World, ops: list[Op | None]) -> None:
        self.begin(world)
        for op in ops:
            self.change(world, op)
        self.roll_back(world, twice=False)

    @rule(
        target=snapshots,
        world=worlds,
        policies=st.sampled_from([{SlicePolicy.STATE}, set(SlicePolicy), {SlicePolicy.LOG}]),
    )
    def snapshot(self, world: World, policies: set[SlicePolicy]) -> Taken:
        held = {
            kind: list(items)
            for kind, items in world.holds.items()
            if (SlicePolicy.STATE if kind in STATE else SlicePolicy.LOG) in policies
        }
        taken = world.session.snapshot(policies=policies), held
        assert taken[0] == world.session.snapshot(policies=policies)
        self.taken.append(taken)
        return taken

    @rule(world=worlds, taken=snapshots, preserve_logs=st.booleans())
    def restore(self, world: World, taken: Taken, preserve_logs: bool) -> None:
        snapshot, held = taken
        if any(kind not in world.session.snapshot(include_all=True).slices for kind in snapshot.slices):
            with pytest.raises(SnapshotRestoreError, match="Late"):
                world.session.restore(snapshot, preserve_logs=preserve_logs)
            return
        world.session.restore(snapshot, preserve_logs=preserve_logs)
        taken_back = {kind: list(items) for kind, items in held.items() if kind is not Line or not preserve_logs}
        world.holds.update(taken_back)

    @invariant()
    def every_session_holds_what_it_should(self) -> None:
        for world in self.all:
            for kind, items in world.holds.items():
                assert world.session[kind].all() == tuple(items)
                assert world.session[kind].latest() == (items[-1] if items else None)
                assert len(world.session[kind]) == len(items)

    @invariant()
    def no_snapshot_has_changed(self) -> None:
        for snapshot, held in self.taken:
            assert {kind: list(items) for kind, items in snapshot.slices.items() if items} == {
                kind: items for kind, items in held.items() if items
            }


class ClonesAreLists(OneSessionIsLists):
    """The same with a session and its clones, which exchange snapshots."""

    worlds = OneSessionIsLists.worlds

    @rule(target=worlds, world=worlds)
    def clone(self, world: World) -> World:
        if len(self.all) == 3:
            return multiple()
        self.all.append(World(world.session.clone(), copy.deepcopy(world.holds)))
        return self.all[-1]


TestOneSessionIsLists = OneSessionIsLists.TestCase
TestClonesAreLists = ClonesAreLists.TestCase
