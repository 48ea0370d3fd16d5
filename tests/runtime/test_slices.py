"""Slices: what reducers, stock or declared, do to them, and what can be done to one directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from ringfence.runtime import (
    Append,
    Clear,
    Extend,
    ReducerContext,
    Replace,
    Session,
    SliceOp,
    SlicePolicy,
    SliceView,
    ToolInvoked,
    append_all,
    reducer,
    replace_latest,
    replace_latest_by,
    upsert_by,
)
from ringfence.session.items import Items


@dataclass(frozen=True)
class Fact:
    name: str
    value: int = 0


@dataclass(frozen=True)
class Noticed:
    facts: tuple[Fact, ...] = ()


@dataclass
class Unhashable:
    names: list[str] = field(default_factory=list)


def facts(session: Session) -> str:
    return " ".join(f"{fact.name}{fact.value}" for fact in session[Fact].all())


def seeded(text: str) -> Session:
    session = Session()
    session[Fact].seed([Fact(word[0], int(word[1:])) for word in text.split()])
    return session


def test_a_value_of_a_slice_never_changes_whoever_goes_on_from_it() -> None:
    one = Items.of("a")
    two, three = one.append("b"), one.append("c")
    four, five = one.extend("de"), two.extend("f")
    shared = five.share()
    six, seven = shared.append("g"), shared.extend("h")
    assert ["".join(value.all()) for value in (one, two, three, four, five)] == ["a", "ab", "ac", "ade", "abf"]
    assert ["".join(value.all()) for value in (shared, six, seven)] == ["abf", "abfg", "abfh"]
    assert [value.latest() for value in (one, four, six)] == ["a", "e", "g"]


def test_what_is_shared_is_never_appended_to_in_place() -> None:
    # Two threads, each with its own session's lock, would otherwise append to one list.
    held = ["a"]
    Items(held, 1).share().append("b")
    Items(held, 1).share().extend("b")
    assert Items(held, 1).share().reopen(truncate=True).append("b").all() == ("a", "b")
    assert held == ["a"]


OPS = [
    (Append(Fact("c", 3)), "a1 b2 c3"),
    (Extend([Fact("c", 3), Fact("d", 4)]), "a1 b2 c3 d4"),
    (Extend(Fact(name) for name in "cd"), "a1 b2 c0 d0"),
    (Extend(()), "a1 b2"),
    (Replace((Fact("z", 9),)), "z9"),
    (Replace(()), ""),
    (Clear(), ""),
    (Clear(lambda fact: fact.value == 1), "b2"),
]


@pytest.mark.parametrize(
    ("op", "after"), OPS, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_an_operation_does_what_its_name_says(op: SliceOp[Fact], after: str) -> None:
    session = seeded("a1 b2")
    session[Fact].register(Noticed, lambda view, event, *, context: op)
    assert session.dispatch(Noticed()).ok
    assert facts(session) == after


def exploding() -> Iterator[Fact]:
    yield Fact("x")
    raise LookupError("the second one")


BAD_ANSWERS = [
    None,
    (Fact("x"),),
    Fact("x"),
    Append,
    Extend(exploding()),
    Replace(exploding()),
    Replace(Fact("x")),  # type: ignore[arg-type]
    Clear(lambda fact: fact.missing),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("answer", BAD_ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_that_cannot_be_applied_leaves_the_slice_and_is_an_error(answer: SliceOp[Fact]) -> None:
    session = seeded("a1 b2")
    session[Fact].register(Noticed, lambda view, event, *, context: answer)
    assert not session.dispatch(Noticed()).ok
    assert facts(session) == "a1 b2"


@pytest.mark.parametrize(
    ("stock", "after"),
    [
        (append_all, "a1 b2 a3 a3"),
        (replace_latest, "a3"),
        (upsert_by(lambda fact: fact.name), "b2 a3"),
        (replace_latest_by(lambda fact: fact.name), "b2 a3"),
    ],
    ids=["append_all", "replace_latest", "upsert_by", "replace_latest_by"],
)
def test_a_stock_reducer_keeps_what_its_name_says(stock: object, after: str) -> None:
    session = seeded("a1 b2")
    session[Fact].register(Fact, stock)  # type: ignore[arg-type]
    session.dispatch(Fact("a", 3))
    session.dispatch(Fact("a", 3))
    assert facts(session) == after


def test_reducers_of_one_event_run_in_the_order_of_registration_each_on_what_the_last_one_left() -> None:
    session = seeded("a1")
    session[Fact].register(Noticed, lambda view, event, *, context: Append(Fact("n", len(view))))
    session[Fact].register(Noticed, lambda view, event, *, context: Replace(reversed(view.all())))
    session.dispatch(Noticed())
    assert facts(session) == "n1 a1"


def test_an_event_can_change_slices_of_several_types_and_then_is_not_kept_itself() -> None:
    session = Session()
    session[Fact].register(Noticed, lambda view, event, *, context: Extend(event.facts))
    session[Unhashable].register(
        Noticed, lambda view, event, *, context: Append(Unhashable([f.name for f in event.facts]))
    )
    session.dispatch(Noticed((Fact("a"), Fact("b"))))
    assert facts(session) == "a0 b0"
    assert session[Unhashable].latest() == Unhashable(["a", "b"])
    assert session[Noticed].is_empty


def name_of(fact: Fact) -> str:
    return fact.name


def sizes(view: SliceView[Fact], event: Fact, *, context: ReducerContext) -> Append[Fact]:
    return Append(Fact(f"{event.name}#", len(view)))


@pytest.mark.parametrize(
    ("make", "after"),
    [(lambda: append_all, "a0 b0"), (lambda: sizes, "a#0 b#1")],
    ids=["stock", "own"],
)
def test_a_reducer_that_is_registered_twice_runs_once(make: Callable[[], object], after: str) -> None:
    session = Session()
    for _ in range(2):
        session[Fact].register(Fact, make())  # type: ignore[arg-type]
    session.dispatch(Fact("a"))
    session.dispatch(Fact("b"))
    assert facts(session) == after


def test_reducers_by_key_are_the_same_if_their_keys_are() -> None:
    assert upsert_by(name_of) == upsert_by(name_of)
    assert upsert_by(name_of) != upsert_by(lambda fact: fact.name)


def test_a_reducer_sees_its_slice_and_may_look_at_others() -> None:
    session = seeded("a1 b2")
    session[Noticed].seed(Noticed((Fact("n"),)))
    seen: list[object] = []

    def look(view: SliceView[Fact], event: Noticed, *, context: ReducerContext) -> SliceOp[Fact]:
        seen.extend([view.is_empty, len(view), [fact.name for fact in view], view.latest(), view.all()[0]])
        seen.extend([view.where(lambda fact: fact.value > 1), context.session[Noticed].latest()])
        return Extend(())

    session[Fact].register(Noticed, look)
    assert session.dispatch(Noticed()).ok
    assert seen == [False, 2, ["a", "b"], Fact("b", 2), Fact("a", 1), (Fact("b", 2),), Noticed((Fact("n"),))]


def test_what_a_reducer_gets_has_no_way_to_change_the_session() -> None:
    session = Session()
    assert not {"seed", "clear", "append", "register"} & set(dir(session.view[Fact]))
    assert not {"dispatch", "restore", "reset", "install", "clone"} & set(dir(session.view))


def test_a_view_that_was_kept_shows_what_the_slice_holds_now() -> None:
    session = seeded("a1")
    view = session.view[Fact]
    session.dispatch(Fact("b", 2))
    assert [fact.name for fact in view] == ["a", "b"]


def test_reading_a_slice_of_which_nothing_is_known_finds_it_empty() -> None:
    accessor = Session()[Fact]
    assert (accessor.all(), accessor.latest(), accessor.where(bool), len(accessor)) == ((), None, (), 0)
    assert accessor.is_empty


def test_seeding_replaces_clearing_drops_and_appending_adds() -> None:
    session = seeded("a1 b2 c3")
    session[Fact].clear(lambda fact: fact.value == 2)
    session[Fact].append(Fact("d", 4))
    assert facts(session) == "a1 c3 d4"
    session[Fact].seed(Fact("e", 5))
    assert facts(session) == "e5"
    session[Fact].clear()
    assert session[Fact].is_empty


def test_a_dataclass_that_can_be_iterated_is_seeded_as_one_value() -> None:
    @dataclass(frozen=True)
    class Bag:
        items: tuple[int, ...]

        def __iter__(self) -> Iterator[int]:
            return iter(self.items)

    session = Session()
    session[Bag].seed(Bag((1, 2)))
    assert session[Bag].all() == (Bag((1, 2)),)


def test_values_that_are_mutable_cyclic_or_not_comparable_are_held_all_the_same() -> None:
    class Stubborn(list[str]):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise TypeError("not comparable")

    cyclic = Unhashable()
    cyclic.names.append(cyclic)  # type: ignore[arg-type]
    stubborn = Unhashable(Stubborn())
    session = Session()
    session.dispatch(cyclic)
    session.dispatch(stubborn)
    snapshot = session.snapshot()
    session.reset()
    session.restore(snapshot)
    assert session[Unhashable].all()[0] is cyclic
    assert session[Unhashable].latest() is stubborn


@pytest.mark.parametrize("not_a_slice_type", [int, str, object, Fact("a"), list[Fact], None, "Fact"], ids=str)
def test_only_dataclass_types_have_slices(not_a_slice_type: type[object]) -> None:
    session = Session()
    with pytest.raises(TypeError, match="dataclass"):
        session[not_a_slice_type]
    with pytest.raises(TypeError, match="dataclass"):
        session[Fact].register(not_a_slice_type, append_all)
    with pytest.raises(TypeError, match="dataclass"):
        session.view[not_a_slice_type]


@pytest.mark.parametrize("event", [1, "text", None, object(), [Fact("a")]], ids=lambda event: type(event).__name__)
def test_only_dataclass_values_can_be_dispatched(event: object) -> None:
    with pytest.raises(TypeError, match="dataclass"):
        Session().dispatch(event)


@pytest.mark.parametrize("value", [None, 5, "", "text", [5], [Fact("b"), "text"], Fact])
def test_what_is_seeded_or_appended_is_a_value_of_a_dataclass(value: Fact) -> None:
    session = seeded("a1")
    with pytest.raises(TypeError, match="dataclass"):
        session[Fact].seed(value)
    with pytest.raises(TypeError, match="dataclass"):
        session[Fact].append(value)
    assert facts(session) == "a1"


def test_a_reducer_is_something_that_can_be_called() -> None:
    with pytest.raises(TypeError, match="function"):
        Session()[Fact].register(Noticed, "append")  # type: ignore[arg-type]


def test_a_runtime_event_stays_a_log_when_a_reducer_is_registered_for_it() -> None:
    session = Session()
    session[ToolInvoked].register(ToolInvoked, append_all)
    assert ToolInvoked not in session.snapshot().slices
    session[ToolInvoked].register(Noticed, append_all, policy=SlicePolicy.STATE)
    assert ToolInvoked in session.snapshot().slices


@pytest.mark.parametrize("policy", SlicePolicy)
def test_a_slice_that_changes_its_policy_keeps_its_items(policy: SlicePolicy) -> None:
    session = seeded("a1 b2")
    session[Fact].register(Noticed, append_all, policy=SlicePolicy.LOG)
    session[Fact].register(Noticed, append_all, policy=policy)
    assert facts(session) == "a1 b2"
    assert (Fact in session.snapshot().slices) is (policy is SlicePolicy.STATE)


@dataclass(frozen=True)
class Named:
    name: str


@dataclass(frozen=True)
class Renamed:
    name: str


@dataclass(frozen=True, slots=True)
class Crew:
    names: tuple[str, ...] = ()

    @reducer(on=Named)
    def with_name(self, event: Named) -> Replace[Crew]:
        return Replace((replace(self, names=(*self.names, event.name)),))

    @reducer(on=Renamed)
    def with_another_name(self, event: Renamed) -> Append[Crew]:
        return Append(replace(self, names=(*self.names[:-1], event.name)))


def test_marked_methods_change_the_latest_value_and_say_whether_the_old_one_stays() -> None:
    session = Session()
    session.install(Crew, initial=Crew)
    session.dispatch(Named("Ada"))
    session.dispatch(Named("Bo"))
    session.dispatch(Renamed("Cy"))
    assert session[Crew].all() == (Crew(("Ada", "Bo")), Crew(("Ada", "Cy")))


def test_without_an_initial_value_an_event_leaves_an_empty_slice_empty() -> None:
    session = Session()
    session.install(Crew)
    assert session.dispatch(Named("Ada")).ok
    assert session[Crew].is_empty
    session[Crew].seed(Crew())
    session.dispatch(Named("Ada"))
    assert session[Crew].latest() == Crew(("Ada",))


def test_installing_twice_is_installing_once() -> None:
    session = Session()
    session.install(Crew, initial=Crew)
    session.install(Crew, initial=lambda: Crew(("Zoe",)))
    session.dispatch(Named("Ada"))
    assert session[Crew].latest() == Crew(("Ada",))


def test_a_marked_method_can_be_called_like_any_other() -> None:
    assert Crew(("Ada",)).with_name(Named("Bo")) == Replace((Crew(("Ada", "Bo")),))


class Plain:
    @reducer(on=Named)
    def on_named(self, event: Named) -> Extend[Plain]:
        return Extend(())


@dataclass
class Thawed:
    @reducer(on=Named)
    def on_named(self, event: Named) -> Extend[Thawed]:
        return Extend(())


@dataclass(frozen=True)
class Deaf:
    def on_named(self, event: Named) -> Extend[Deaf]:
        return Extend(())


@dataclass(frozen=True)
class Torn:
    @reducer(on=Named)
    def one(self, event: Named) -> Extend[Torn]:
        return Extend(())

    @reducer(on=Named)
    def other(self, event: Named) -> Extend[Torn]:
        return Extend(())


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Plain, TypeError, "frozen dataclass"),
        (Thawed, TypeError, "frozen=True"),
        (Deaf, ValueError, "no reducer"),
        (Torn, ValueError, "two reducers for Named: one and other"),
    ],
)
def test_only_frozen_dataclasses_with_one_marked_method_an_event_are_installed(
    kind: type[object], error: type[Exception], words: str
) -> None:
    session = Session()
    with pytest.raises(error, match=words):
        session.install(kind)
    assert session.dispatch(Named("Ada")).ok


@dataclass(frozen=True)
class Listed:
    items: list[str]


def test_values_that_can_be_changed_in_place_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    session.dispatch(Listed(["milk"]))
    session.dispatch(Listed(["bread"]))
    assert [record.getMessage() for record in caplog.records] == [
        "Listed can be changed in place, which no rollback takes back: freeze it, tuples for lists"
    ]
