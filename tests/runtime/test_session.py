"""Sessions: events, snapshots, clones, families, and their part in a transaction."""

from __future__ import annotations

import contextvars
import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from running_calls import participant_of, within

from ringfence.adapters import PromptResponse
from ringfence.errors import CallEndedError, SectionVisibility, SnapshotRestoreError
from ringfence.prompt import ToolResult
from ringfence.runtime import (
    Append,
    CallInfo,
    ClearAllVisibilityOverrides,
    ClearVisibilityOverride,
    InProcessDispatcher,
    PromptExecuted,
    PromptRendered,
    Receipt,
    RenderedTools,
    Replace,
    RollbackReport,
    Session,
    SetVisibilityOverride,
    SlicePolicy,
    ToolInvoked,
    VisibilityOverrides,
    append_all,
    replace_latest,
    tool_transaction,
)

SOME_TIME = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Fact:
    name: str


@dataclass(frozen=True)
class Line:
    """Of a LOG slice, once `logging` has made it one."""

    text: str


@dataclass(frozen=True)
class Asked:
    pass


@dataclass
class Heap:
    names: list[str] = field(default_factory=list)


def failing(view: object, event: object, /, *, context: object) -> Append[Any]:
    raise LookupError("the reducer broke")


def logging(session: Session | None = None) -> Session:
    session = session or Session()
    session[Line].register(Line, append_all, policy=SlicePolicy.LOG)
    return session


def invoked(result: ToolResult[Any], session_id: UUID | None = None) -> ToolInvoked:
    return ToolInvoked(prompt_name="p", adapter="a", name="t", params=None, result=result, session_id=session_id)


def names(session: Session) -> str:
    return " ".join(fact.name for fact in session[Fact].all())


# Events


def test_an_event_without_a_reducer_is_kept_in_the_slice_of_its_own_type() -> None:
    session = Session()
    session.dispatch(Fact("a"))
    session.dispatch(Fact("b"))
    assert session[Fact].all() == (Fact("a"), Fact("b"))
    assert session[Fact].latest() == Fact("b")
    assert session[Fact].where(lambda fact: fact.name == "a") == (Fact("a"),)


def test_observers_hear_an_event_after_it_was_applied() -> None:
    session = Session()
    heard: list[object] = []
    session.dispatcher.subscribe(Fact, lambda event: heard.append((event, session[Fact].latest())))
    result = session.dispatch(Fact("a"))
    assert heard == [(Fact("a"), Fact("a"))]
    assert (result.handled_count, result.ok) == (1, True)


def test_an_observer_that_fails_undoes_nothing() -> None:
    session = Session()
    session.dispatcher.subscribe(Fact, lambda event: 1 // 0)
    result = session.dispatch(Fact("a"))
    assert [type(failure.error) for failure in result.errors] == [ZeroDivisionError]
    assert names(session) == "a"


def test_a_reducer_that_fails_is_named_leaves_its_slice_and_stops_no_other() -> None:
    session = Session()
    session[Fact].seed(Fact("a"))
    session[Fact].register(Asked, failing)
    session[Heap].register(Asked, lambda view, event, *, context: Append(Heap()))
    result = session.dispatch(Asked())
    assert [(failure.handler, str(failure.error)) for failure in result.errors] == [(failing, "the reducer broke")]
    assert names(session) == "a"
    assert session[Heap].all() == (Heap(),)


def test_an_interrupt_in_a_reducer_is_not_held_back() -> None:
    def interrupted(view: object, event: object, /, *, context: object) -> Append[Fact]:
        raise KeyboardInterrupt

    session = Session()
    session[Fact].register(Asked, interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.dispatch(Asked())
    assert session[Fact].is_empty


EVERY_EVENT: list[Callable[[UUID | None], Any]] = [
    lambda session_id: invoked(ToolResult.ok(None), session_id),
    lambda session_id: PromptRendered("ns", "key", "p", "a", session_id, (), "text"),
    lambda session_id: PromptExecuted("p", "a", PromptResponse("p", text="done"), session_id),
    lambda session_id: RenderedTools("ns", "key", (), uuid4(), session_id),
]


@pytest.mark.parametrize("make", EVERY_EVENT, ids=["ToolInvoked", "PromptRendered", "PromptExecuted", "RenderedTools"])
def test_an_event_of_the_runtime_is_applied_once_however_it_comes(make: Callable[[UUID | None], Any]) -> None:
    session = Session()
    dispatched, published, applied = make(session.session_id), make(None), make(session.session_id)
    session.dispatch(dispatched)
    session.dispatcher.dispatch(published)
    session.apply(applied)
    session.notify(applied)
    assert session[type(applied)].all() == (dispatched, published, applied)


def test_an_equal_event_that_an_observer_dispatches_is_another_event() -> None:
    session = Session()
    heard: list[Fact] = []

    def again(event: Fact) -> None:
        heard.append(event)
        if len(heard) < 3:
            session.dispatch(Fact("a"))

    session.dispatcher.subscribe(Fact, again)
    session.dispatch(Fact("a"))
    assert names(session) == "a a a"


def test_sessions_of_one_dispatcher_apply_what_is_theirs_and_what_is_nobodys() -> None:
    dispatcher = InProcessDispatcher()
    one, other = Session(dispatcher=dispatcher), Session(dispatcher=dispatcher)
    of_one, of_nobody = invoked(ToolResult.ok(Fact("a")), one.session_id), invoked(ToolResult.ok(Fact("b")))
    one.dispatch(of_one)
    dispatcher.dispatch(of_nobody)
    assert (one[ToolInvoked].all(), names(one)) == ((of_one, of_nobody), "a b")
    assert (other[ToolInvoked].all(), names(other)) == ((of_nobody,), "b")


def test_a_published_event_that_a_reducer_cannot_take_is_an_error_of_the_dispatch() -> None:
    session = Session()
    session[Fact].register(ToolInvoked, failing)
    result = session.dispatcher.dispatch(invoked(ToolResult.ok(None)))
    assert [str(failure.error) for failure in result.errors] == ["the reducer broke"]


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        (ToolResult.ok(Fact("a")), "a"),
        (ToolResult.ok([Fact("a"), Fact("b")]), "a b"),
        (ToolResult.ok((Fact("a"), "text", None, Fact, Fact("b"))), "a b"),
        (ToolResult.ok([]), ""),
        (ToolResult.ok(None), ""),
        (ToolResult.ok("text"), ""),
        (ToolResult.error("no"), ""),
        (ToolResult(message="no", value=Fact("a"), success=False), ""),
    ],
    ids=str,
)
def test_the_value_of_a_successful_call_goes_to_its_own_type(result: ToolResult[Any], kept: str) -> None:
    session = Session()
    assert session.dispatch(invoked(result)).ok
    assert names(session) == kept
    assert len(session[ToolInvoked]) == 1


@pytest.mark.parametrize(("output", "kept"), [(Fact("a"), "a"), ([Fact("a"), Fact("b")], "a b"), (None, "")], ids=str)
def test_the_output_of_an_evaluation_goes_to_its_own_type(output: Any, kept: str) -> None:
    session = Session()
    session.dispatch(PromptExecuted("p", "a", PromptResponse("p", output=output)))
    assert names(session) == kept


def test_the_value_passes_the_reducers_of_its_type_before_the_event_passes_its_own() -> None:
    session = Session()
    session[Fact].register(Fact, replace_latest)
    session[Heap].register(
        ToolInvoked,
        lambda view, event, *, context: Append(Heap([fact.name for fact in context.session[Fact].all()])),
    )
    session[Fact].seed(Fact("old"))
    session.dispatch(invoked(ToolResult.ok([Fact("a"), Fact("b")])))
    assert names(session) == "b"
    assert session[Heap].all() == (Heap(["b"]),)


def test_state_and_logs_can_be_applied_apart_and_observers_told_last() -> None:
    session = logging()
    session[Heap].register(ToolInvoked, lambda view, event, *, context: Append(Heap()))
    session[ToolInvoked].register(ToolInvoked, append_all)
    heard: list[object] = []
    session.dispatcher.subscribe(ToolInvoked, heard.append)
    event = invoked(ToolResult.ok([Fact("a"), Line("x")]))

    def counts() -> list[int]:
        return [len(session[kind]) for kind in (Fact, Heap, Line, ToolInvoked)] + [len(heard)]

    assert session.apply(event, to="state") == ()
    assert counts() == [1, 1, 0, 0, 0]
    assert session.apply(event, to="log") == ()
    assert counts() == [1, 1, 1, 1, 0]
    assert session.notify(event).ok
    assert counts() == [1, 1, 1, 1, 1]


def test_a_hundred_threads_lose_nothing() -> None:
    session = Session()
    session[Heap].seed(Heap())
    session[Heap].register(Fact, lambda view, event, *, context: Replace((Heap([*view.all()[0].names, event.name]),)))
    session[Fact].register(Fact, append_all)
    start = threading.Barrier(100)

    def dispatch_ten(number: int) -> None:
        start.wait()
        for count in range(10):
            session.dispatch(Fact(f"{number}-{count}"))

    threads = [threading.Thread(target=dispatch_ten, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = sorted(f"{number}-{count}" for number in range(100) for count in range(10))
    assert sorted(fact.name for fact in session[Fact].all()) == everything
    latest = session[Heap].latest()
    assert latest is not None
    assert sorted(latest.names) == everything


def test_while_a_session_is_locked_no_other_thread_changes_it() -> None:
    session = Session()
    thread = threading.Thread(target=session.dispatch, args=(Fact("b"),))
    with session.locked(), session.locked():
        thread.start()
        thread.join(0.05)
        session.dispatch(Fact("a"))
        assert names(session) == "a"
    thread.join()
    assert names(session) == "a b"


# Snapshots


def test_restoring_brings_back_what_was_and_empties_what_was_not() -> None:
    session = Session()
    session.dispatch(Fact("a"))
    snapshot = session.snapshot(tag="before")
    session.dispatch(Fact("b"))
    session.dispatch(Asked())
    session.restore(snapshot)
    assert names(session) == "a"
    assert session[Asked].is_empty
    assert snapshot.tag == "before"


def test_snapshots_can_be_restored_in_any_order_and_again() -> None:
    session = Session()
    snapshots = []
    for name in "abc":
        session.dispatch(Fact(name))
        snapshots.append(session.snapshot())
    for index in (2, 0, 1, 1, 0, 2):
        session.restore(snapshots[index])
        assert names(session) == ("a", "a b", "a b c")[index]
        session.dispatch(Fact("x"))
    assert [len(snapshot.slices[Fact]) for snapshot in snapshots] == [1, 2, 3]


def test_a_snapshot_says_what_it_holds() -> None:
    session = Session(tags={"team": "red"})
    session.dispatch(Fact("a"))
    session.dispatch(invoked(ToolResult.ok(None)))
    snapshot = session.snapshot()
    assert snapshot.slices[Fact] == (Fact("a"),)
    assert dict(snapshot.slices) == {Fact: (Fact("a"),), VisibilityOverrides: ()}
    assert snapshot.policies == {SlicePolicy.STATE}
    assert snapshot.tags["team"] == "red"
    assert snapshot.created_at.utcoffset() == timedelta(0)


def test_a_snapshot_shows_registered_slices_that_are_empty() -> None:
    session = Session()
    session[Fact].register(Asked, failing)
    assert session.snapshot().slices[Fact] == ()
    session.dispatch(Heap())
    session.reset()
    assert session.snapshot().slices[Heap] == ()


def test_snapshots_of_the_same_state_are_equal_and_hashable_whatever_they_hold() -> None:
    session = Session()
    empty = session.snapshot()
    session.dispatch(Heap(["unhashable"]))
    one, two = session.snapshot(), session.snapshot(tag="later")
    assert len({one, two, empty}) == 2
    session.restore(empty)
    assert session.snapshot() == empty
    session.dispatch(Heap(["unhashable"]))
    assert session.snapshot() == one
    session.dispatch(Heap())
    assert session.snapshot() != one
    assert one != "a snapshot"


def test_a_slice_that_was_only_registered_meanwhile_does_not_make_snapshots_differ() -> None:
    session = Session()
    before = session.snapshot()
    session[Fact].register(Asked, failing)
    assert session.snapshot() == before


def test_logs_are_in_a_snapshot_only_where_asked_for() -> None:
    session = logging()
    session.dispatch(Line("x"))
    session.dispatch(Fact("a"))
    assert Line not in session.snapshot().slices
    logs, everything = session.snapshot(policies={SlicePolicy.LOG}), session.snapshot(include_all=True)
    assert (logs.slices[Line], Fact in logs.slices) == ((Line("x"),), False)
    assert (everything.slices[Line], everything.slices[Fact]) == ((Line("x"),), (Fact("a"),))
    assert everything.policies == set(SlicePolicy)


def lines(session: Session) -> str:
    return " ".join(line.text for line in session[Line].all())


@pytest.mark.parametrize(
    ("options", "preserve_logs", "after"),
    [
        ({}, True, ("a", "x y")),
        ({}, False, ("a", "x y")),
        ({"include_all": True}, True, ("a", "x y")),
        ({"include_all": True}, False, ("a", "x")),
        ({"policies": {SlicePolicy.LOG}}, True, ("a b", "x y")),
        ({"policies": {SlicePolicy.LOG}}, False, ("a b", "x")),
    ],
    ids=str,
)
def test_logs_stay_unless_they_are_in_the_snapshot_and_asked_back(
    options: dict[str, Any], preserve_logs: bool, after: tuple[str, str]
) -> None:
    session = logging()
    session.dispatch(Line("x"))
    session.dispatch(Fact("a"))
    snapshot = session.snapshot(**options)
    session.dispatch(Line("y"))
    session.dispatch(Fact("b"))
    session.restore(snapshot, preserve_logs=preserve_logs)
    assert (names(session), lines(session)) == after


@pytest.mark.parametrize("kind", [ToolInvoked, PromptRendered, PromptExecuted, RenderedTools, Receipt])
def test_the_records_of_the_runtime_are_logs(kind: type[object]) -> None:
    assert kind in Session().snapshot(policies={SlicePolicy.LOG}).slices


def test_a_snapshot_of_unknown_slices_is_refused_before_anything_changes() -> None:
    theirs, session = Session(), Session()
    theirs.dispatch(Fact("a"))
    theirs.dispatch(Heap())
    session.dispatch(Fact("mine"))
    with pytest.raises(SnapshotRestoreError, match="Heap"):
        session.restore(theirs.snapshot())
    assert names(session) == "mine"


def test_a_snapshot_can_be_restored_to_another_session_and_they_stay_apart() -> None:
    theirs, session = Session(), Session()
    theirs.dispatch(Fact("a"))
    session[Fact].register(Asked, failing)
    snapshot = theirs.snapshot()
    session.restore(snapshot)
    session.dispatch(Fact("mine"))
    theirs.dispatch(Fact("theirs"))
    assert (names(session), names(theirs), snapshot.slices[Fact]) == ("a mine", "a theirs", (Fact("a"),))


def test_resetting_empties_everything_and_keeps_reducers_and_policies() -> None:
    session = logging()
    session[Fact].register(Fact, replace_latest)
    for event in (Fact("a"), Line("x"), invoked(ToolResult.ok(None)), Heap()):
        session.dispatch(event)
    session.reset()
    assert [len(session[kind]) for kind in (Fact, Line, ToolInvoked, Heap)] == [0, 0, 0, 0]
    for event in (Fact("a"), Fact("b"), Line("x")):
        session.dispatch(event)
    assert names(session) == "b"
    assert Line not in session.snapshot().slices


# The part in a transaction


def call(session: Session | None = None) -> CallInfo:
    """A tool call; it holds the session that is given."""
    info = CallInfo("1", "tool")
    if session is not None:
        session.lock.acquire(info)
    return info


def receipt() -> Receipt:
    return Receipt("r", "1", "tool", None, "committed", "", SOME_TIME, 0.0, "s", "p")


def test_a_session_is_a_participant_with_a_lock_of_its_name_that_keeps_nothing_on_disk() -> None:
    session = Session()
    assert participant_of(session) is session
    assert session.lock.name == f"session {session.session_id}"
    assert not session.durable
    mark = session.begin(call())
    assert session.changes(mark) == ()
    assert session.commit(mark, receipt()) is None
    assert session.rollback(mark) == RollbackReport()


def test_a_rollback_takes_back_state_but_no_logs() -> None:
    session = logging()
    session[Fact].seed(Fact("a"))
    mark = session.begin(call())
    session.dispatch(Fact("b"))
    session[Heap].append(Heap())
    session.dispatch(Line("x"))
    session.rollback(mark)
    assert (names(session), lines(session)) == ("a", "x")
    assert session[Heap].is_empty
    assert session.snapshot().slices[Heap] == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session[Fact].clear(),
        lambda session: session[Fact].seed([Fact("z")]),
        lambda session: session[Fact].clear(lambda fact: fact.name == "a"),
        lambda session: session.reset(),
        lambda session: session.restore(Session().snapshot()),
        lambda session: [session.dispatch(Fact("z")), session.restore(session.snapshot())],
        lambda session: session[Fact].register(Asked, failing),
    ],
)
def test_whatever_a_call_does_to_state_a_rollback_takes_back(change: Callable[[Session], object]) -> None:
    session = Session()
    session[Fact].seed([Fact("a"), Fact("b")])
    before = session.snapshot()
    mark = session.begin(call())
    change(session)
    session.rollback(mark)
    assert session.snapshot() == before


def test_an_inner_mark_is_a_savepoint_of_the_outer_one() -> None:
    session = Session()
    outer = session.begin(call())
    session.dispatch(Fact("a"))
    inner = session.begin(call())
    session.dispatch(Fact("b"))
    session.rollback(inner)
    assert names(session) == "a"
    second = session.begin(call())
    session.dispatch(Fact("c"))
    session.commit(second, receipt())
    assert names(session) == "a c"
    session.rollback(outer)
    assert names(session) == ""


def test_a_rollback_can_be_repeated() -> None:
    session = Session()
    session[Fact].seed(Fact("a"))
    mark = session.begin(call())
    session.dispatch(Fact("b"))
    assert [session.rollback(mark), session.rollback(mark)] == [RollbackReport(), RollbackReport()]
    assert names(session) == "a"


def fail_a_call(session: Session) -> None:
    mark = session.begin(call())
    session.dispatch(Fact("failed"))
    session.rollback(mark)


def test_a_snapshot_taken_inside_a_call_outlives_its_rollback() -> None:
    session = Session()
    session[Fact].seed(Fact("a"))
    mark = session.begin(call())
    session.dispatch(Fact("b"))
    inside = session.snapshot()
    session.rollback(mark)
    session.dispatch(Fact("c"))
    assert (names(session), inside.slices[Fact]) == ("a c", (Fact("a"), Fact("b")))


def test_a_clone_made_inside_a_call_outlives_its_rollback() -> None:
    session = Session()
    session[Fact].seed(Fact("a"))
    mark = session.begin(call())
    session.dispatch(Fact("b"))
    clone = session.clone()
    session.rollback(mark)
    session.dispatch(Fact("c"))
    assert (names(session), names(clone)) == ("a c", "a b")


def test_a_rollback_after_a_restore_leaves_later_snapshots_alone() -> None:
    session = Session()
    session.dispatch(Fact("a"))
    early = session.snapshot()
    session.dispatch(Fact("b"))
    late = session.snapshot()
    session.restore(early)
    fail_a_call(session)
    session.dispatch(Fact("c"))
    assert (names(session), late.slices[Fact]) == ("a c", (Fact("a"), Fact("b")))


def test_a_restore_inside_a_call_leaves_the_outer_mark_alone() -> None:
    session = Session()
    session.dispatch(Fact("a"))
    early = session.snapshot()
    session.dispatch(Fact("b"))
    mark = session.begin(call())
    session.restore(early)
    fail_a_call(session)
    session.rollback(mark)
    assert names(session) == "a b"


@pytest.mark.parametrize("clone_goes_on_first", [True, False])
def test_a_failed_call_on_a_clone_or_its_original_leaves_the_other_alone(clone_goes_on_first: bool) -> None:
    session = Session()
    session.dispatch(Fact("a"))
    clone = session.clone()
    first, second = (clone, session) if clone_goes_on_first else (session, clone)
    first.dispatch(Fact("b"))
    fail_a_call(second)
    second.dispatch(Fact("c"))
    assert (names(first), names(second)) == ("a b", "a c")


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session.dispatch(Fact("late")),
        lambda session: session.dispatch(Asked()),
        lambda session: session[Fact].seed(Fact("late")),
        lambda session: session[Fact].clear(),
        lambda session: session.restore(Session().snapshot()),
    ],
    ids=["dispatch", "reducer", "seed", "clear", "restore"],
)
def test_a_thread_changes_no_state_of_a_call_that_has_ended(change: Callable[[Session], object]) -> None:
    session = logging()
    session[Fact].register(Asked, lambda view, event, *, context: Append(Fact("late")))
    with tool_transaction(session):
        session.dispatch(Fact("a"))
        of_its_thread = contextvars.copy_context()
    with tool_transaction(session), pytest.raises(CallEndedError, match="has ended: nothing changes session"):
        of_its_thread.run(change, session)
    assert names(session) == "a"
    of_its_thread.run(session.dispatch, Line("logs only grow"))
    assert session[Line].all() == (Line("logs only grow"),)


def test_a_failed_call_after_a_foreign_snapshot_was_restored_leaves_the_foreign_session_alone() -> None:
    theirs, session = Session(), Session()
    theirs.dispatch(Fact("a"))
    session.dispatch(Fact("x"))
    session.restore(theirs.snapshot())
    theirs.dispatch(Fact("b"))
    fail_a_call(session)
    assert (names(session), names(theirs)) == ("a", "a b")


def test_changed_tells_whether_a_call_made_state_differ_from_a_mark() -> None:
    session = logging()
    with within(call()):
        of_a_call = contextvars.copy_context()
    session.dispatch(Fact("a"))
    mark = session.begin(call())
    session.dispatch(Fact("from outside"))
    assert not session.changed(mark)
    session.rollback(mark)
    of_a_call.run(session.dispatch, Line("x"))
    of_a_call.run(session[Heap].register, Asked, failing)
    assert not session.changed(mark)
    inner = session.begin(call())
    of_a_call.run(session.dispatch, Fact("b"))
    assert session.changed(mark)
    session.rollback(inner)
    assert not session.changed(mark)
    of_a_call.run(session[Fact].seed, Fact("b"))
    assert session.changed(mark)


def test_a_mark_is_the_last_one_until_a_state_slice_changes() -> None:
    session = logging()
    session.dispatch(Fact("a"))
    mark = session.begin(call())
    assert session.begin(call()) is mark
    session.dispatch(Fact("b"))
    assert session.begin(call()) is not mark
    session.rollback(mark)
    assert names(session) == "a"
    assert session.begin(call()) is not mark
    session.restore(session.snapshot())
    session.dispatch(Fact("c"))
    session.rollback(session.begin(call()))
    assert names(session) == "a c"


def test_a_reducer_that_fails_dooms_the_call_that_holds_the_session() -> None:
    session = Session()
    session[Fact].register(Asked, failing)
    session.dispatch(Asked())
    holder = call(session)
    session.dispatch(Asked())
    thread = threading.Thread(target=session.dispatch, args=(Asked(),))
    thread.start()
    thread.join()
    said = "the reducer failing of Fact failed on a Asked: LookupError: the reducer broke"
    assert [str(problem) for problem in holder.problems] == [said] * 2


def test_a_dispatch_from_outside_does_not_wait_for_the_call_and_rolls_back_with_it() -> None:
    session = Session()
    mark = session.begin(call(session))
    thread = threading.Thread(target=session.dispatch, args=(Fact("from outside"),))
    thread.start()
    thread.join(5)
    assert names(session) == "from outside"
    session.rollback(mark)
    assert names(session) == ""


def test_the_policy_of_a_known_slice_does_not_change_while_a_call_runs() -> None:
    session = logging()
    session.dispatch(Fact("a"))
    call(session)
    for kind, policy in ((Fact, SlicePolicy.LOG), (Line, SlicePolicy.STATE)):
        with pytest.raises(RuntimeError, match="while tool call '1'"):
            session[kind].register(Asked, append_all, policy=policy)
    session[Line].register(Asked, append_all, policy=SlicePolicy.LOG)
    session[Heap].register(Asked, append_all, policy=SlicePolicy.LOG)
    assert Heap in session.snapshot(policies={SlicePolicy.LOG}).slices


def copies_when(session: Session, repeat: Callable[[], None]) -> bool:
    """Whether `repeat` costs a copy of the slice of `Fact`, which has 200,000 items (1.6 MB) in it."""
    repeat()
    tracemalloc.start()
    try:
        repeat()
        return tracemalloc.get_traced_memory()[1] > 500_000
    finally:
        tracemalloc.stop()


def test_marks_snapshots_failures_and_appends_copy_no_slice() -> None:
    session = Session()
    session[Fact].seed([Fact("a")] * 200_000)

    def fail_and_go_on() -> None:
        mark = session.begin(call())
        session.dispatch(Fact("b"))
        inner = session.begin(call())
        session.dispatch(Fact("c"))
        session.rollback(inner)
        session.dispatch(Fact("d"))
        session.rollback(mark)
        session.dispatch(Fact("e"))
        session.snapshot()
        session.dispatch(Fact("f"))

    session.restore(session.snapshot())
    assert not copies_when(session, fail_and_go_on)
    assert len(session[Fact]) == 200_004


# Clones and families


def test_a_clone_has_the_same_values_reducers_policies_and_identity() -> None:
    session = logging(Session(tags={"team": "red"}, created_at=SOME_TIME))
    session[Fact].register(Fact, replace_latest)
    for event in (Fact("a"), Line("x"), SetVisibilityOverride(("s",), SectionVisibility.FULL)):
        session.dispatch(event)
    clone = session.clone()
    assert clone.snapshot(include_all=True) == session.snapshot(include_all=True)
    assert (clone.session_id, clone.created_at, clone.tags) == (session.session_id, SOME_TIME, session.tags)
    clone.dispatch(Fact("b"))
    clone.dispatch(Line("y"))
    assert (names(clone), lines(clone)) == ("b", "x y")
    assert Line not in clone.snapshot().slices


def test_a_clone_and_its_original_change_apart() -> None:
    session = Session()
    heard: list[Fact] = []
    session.dispatcher.subscribe(Fact, heard.append)
    session.dispatch(Fact("a"))
    clone = session.clone()
    clone.dispatch(Fact("c"))
    session.dispatch(Fact("o"))
    clone[Heap].register(Asked, failing)
    assert (names(clone), names(session)) == ("a c", "a o")
    assert heard == [Fact("a"), Fact("o")]
    assert session.dispatch(Asked()).ok


def test_a_clone_takes_what_is_given() -> None:
    dispatcher, session_id = InProcessDispatcher(), uuid4()
    clone = Session(tags={"team": "red"}).clone(
        dispatcher=dispatcher, session_id=session_id, created_at=SOME_TIME, tags={"team": "blue"}
    )
    assert (clone.dispatcher, clone.created_at) == (dispatcher, SOME_TIME)
    assert clone.tags == {"team": "blue", "session_id": str(session_id)}


def test_tags_name_the_session_and_cannot_be_changed() -> None:
    given = {"team": "red", "session_id": "somebody else's"}
    session = Session(tags=given)
    given["team"] = "blue"
    assert session.tags == {"team": "red", "session_id": str(session.session_id)}
    with pytest.raises(TypeError):
        session.tags["team"] = "blue"  # type: ignore[index]
    assert (session.view.tags, session.view.session_id) == (session.tags, session.session_id)


def test_a_class_in_the_place_of_an_event_is_said() -> None:
    with pytest.raises(TypeError, match="an event is no class: give an instance of Receipt"):
        Session().dispatch(Receipt)


def test_the_time_of_creation_has_a_timezone_and_is_kept_in_utc() -> None:
    with pytest.raises(ValueError, match="timezone"):
        Session(created_at=datetime(2026, 1, 1))  # noqa: DTZ001
    east = Session(created_at=SOME_TIME.astimezone(timezone(timedelta(hours=9))))
    assert (east.created_at, east.created_at.utcoffset()) == (SOME_TIME, timedelta(0))


def test_a_dispatcher_that_others_use_keeps_no_session_alive_and_forgets_it() -> None:
    dispatcher = InProcessDispatcher()
    session = Session(dispatcher=dispatcher)
    watched = weakref.ref(session)
    del session
    gc.collect()
    assert watched() is None
    assert dispatcher.dispatch(invoked(ToolResult.ok(None))).ok


def test_a_session_that_is_let_go_is_freed_at_once() -> None:
    session = Session()
    session.dispatch(Fact("a"))
    watched = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert watched() is None
    finally:
        gc.enable()


# Visibility


def test_visibility_overrides_are_set_and_cleared_by_events_on_every_session() -> None:
    session = Session()
    one, two = ("guide",), ("guide", "details")
    session.dispatch(SetVisibilityOverride(one, SectionVisibility.FULL))
    session.dispatch(SetVisibilityOverride(two, SectionVisibility.SUMMARY))
    session.dispatch(SetVisibilityOverride(one, SectionVisibility.SUMMARY))
    session.dispatch(ClearVisibilityOverride(two))
    session.dispatch(ClearVisibilityOverride(("never", "set")))
    assert session[VisibilityOverrides].all() == (VisibilityOverrides({one: SectionVisibility.SUMMARY}),)
    session.dispatch(ClearAllVisibilityOverrides())
    assert session[VisibilityOverrides].latest() == VisibilityOverrides()


def test_visibility_overrides_roll_back_with_a_call() -> None:
    session = Session()
    mark = session.begin(call())
    session.dispatch(SetVisibilityOverride(("guide",), SectionVisibility.FULL))
    session.rollback(mark)
    assert session[VisibilityOverrides].latest() is None


def test_visibility_overrides_are_values() -> None:
    given = {("a",): SectionVisibility.FULL}
    overrides = VisibilityOverrides(given)
    given["b",] = SectionVisibility.FULL
    more = overrides.with_override(("b",), SectionVisibility.SUMMARY)
    assert (overrides.get(("a",)), overrides.get(("b",))) == (SectionVisibility.FULL, None)
    assert more.get(("b",)) is SectionVisibility.SUMMARY
    assert more.without_override(("b",)) == overrides
