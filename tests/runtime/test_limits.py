"""Deadlines, budgets, token usage and the heartbeat."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.runtime import Budget, BudgetExceededError, BudgetTracker, Deadline, Heartbeat, TokenUsage

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


class Clock:
    """A clock that stands until it is told to move."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


def test_a_deadline_counts_down_and_below_zero() -> None:
    clock = Clock()
    deadline = Deadline(NOON + seconds(10), clock=clock)
    clock.now += seconds(4)
    assert (deadline.remaining(), deadline.elapsed(), deadline.expired) == (seconds(6), seconds(4), False)
    clock.now += seconds(7)
    assert (deadline.remaining(), deadline.elapsed(), deadline.expired) == (seconds(-1), seconds(11), True)


def test_a_deadline_is_expired_at_its_very_moment() -> None:
    clock = Clock()
    deadline = Deadline.after(5, clock=clock)
    clock.now = deadline.expires_at
    assert deadline.expired
    assert deadline.remaining() == seconds(0)


def test_remaining_and_elapsed_can_be_asked_for_another_moment() -> None:
    deadline = Deadline(NOON + seconds(10), NOON)
    assert deadline.remaining(NOON + seconds(3)) == seconds(7)
    assert deadline.elapsed(NOON + seconds(3)) == seconds(3)
    with pytest.raises(ValueError, match="timezone"):
        deadline.remaining(datetime(2026, 1, 1))  # noqa: DTZ001


def test_moments_of_other_timezones_are_the_same_moments() -> None:
    east = NOON.astimezone(timezone(timedelta(hours=9))) + seconds(60)
    assert Deadline(east, NOON) == Deadline(NOON + seconds(60), NOON)


@pytest.mark.parametrize(
    ("expires_at", "started_at", "words"),
    [
        (datetime(2100, 1, 1), None, "expires_at needs a timezone"),  # noqa: DTZ001
        (NOON, datetime(2026, 1, 1), "started_at needs a timezone"),  # noqa: DTZ001
        (NOON, NOON, "at least one second"),
        (NOON + seconds(0.999), NOON, "at least one second"),
        (NOON - seconds(100), NOON, "at least one second"),
        (datetime(2020, 1, 1, tzinfo=UTC), None, "at least one second"),
    ],
    ids=str,
)
def test_a_deadline_that_cannot_be_meant_is_refused(
    expires_at: datetime, started_at: datetime | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Deadline(expires_at, started_at)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -float("inf"), 1e12])
def test_a_deadline_that_no_calendar_has_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="leave it out where there is none"):
        Deadline.after(seconds)


def test_an_expired_deadline_can_be_copied_pickled_and_restored() -> None:
    old = Deadline(datetime(2020, 1, 2, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC))
    assert old.expired
    copies = [copy.copy(old), copy.deepcopy(old), replace(old), pickle.loads(pickle.dumps(old))]
    assert copies == [old] * 4
    assert Deadline(old.expires_at, old.started_at).remaining() < seconds(0)


def test_usage_adds_up_and_keeps_what_is_not_known_apart_from_zero() -> None:
    assert TokenUsage().total_tokens is None
    assert TokenUsage(input_tokens=0).total_tokens == 0
    assert TokenUsage(3, 4, 1) + TokenUsage(10, None, None) == TokenUsage(13, 4, 1)
    assert (TokenUsage(3) + TokenUsage(output_tokens=4)).total_tokens == 7


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({}, ValueError),
        ({"max_total_tokens": 0}, ValueError),
        ({"max_input_tokens": -1}, ValueError),
        ({"max_total_tokens": "10"}, TypeError),
        ({"max_cost_usd": 0.0}, ValueError),
        ({"max_cost_usd": math.nan}, ValueError),
    ],
    ids=str,
)
def test_a_budget_limits_something_by_a_positive_whole_number(limits: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        Budget(**limits)


def test_a_later_record_of_an_evaluation_takes_the_place_of_the_earlier() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=100))
    tracker.record_cumulative("a", TokenUsage(10, 5))
    tracker.record_cumulative("b", TokenUsage(1, 1))
    tracker.record_cumulative("a", TokenUsage(20, 5))
    assert tracker.consumed == TokenUsage(21, 6)


def test_a_limit_that_is_reached_exactly_is_kept() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=10, max_input_tokens=6, max_output_tokens=4))
    tracker.record_cumulative("a", TokenUsage(6, 4))
    tracker.check()
    tracker.record_cumulative("b", TokenUsage(0, 1))
    with pytest.raises(BudgetExceededError):
        tracker.check()


@pytest.mark.parametrize(
    ("used", "dimension"),
    [
        (TokenUsage(7, 9), "input_tokens"),
        (TokenUsage(6, 9), "output_tokens"),
        (TokenUsage(6, 4), "total_tokens"),
        (TokenUsage(None, 5), "output_tokens"),
    ],
    ids=str,
)
def test_input_is_named_before_output_and_output_before_the_total(used: TokenUsage, dimension: str) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=9, max_input_tokens=6, max_output_tokens=4))
    tracker.record_cumulative("a", used)
    with pytest.raises(BudgetExceededError) as caught:
        tracker.check()
    assert (caught.value.exceeded_dimension, caught.value.consumed) == (dimension, used)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_total_tokens": 2_000}, "the budget is used up: 2,200 tokens, of 2,000 that it allows"),
        ({"max_input_tokens": 1_999}, "the budget is used up: 2,000 input tokens, of 1,999 that it allows"),
        ({"max_output_tokens": 1}, "the budget is used up: 200 output tokens, of 1 that it allows"),
        ({"max_cost_usd": 0.05}, "the budget is used up: $1.50, of $0.0500 that it allows"),
    ],
)
def test_a_used_up_budget_says_what_was_used_and_what_there_was(limits: dict[str, int], said: str) -> None:
    tracker = BudgetTracker(Budget(**limits))
    tracker.record_cumulative("a", TokenUsage(2_000, 200, cost_usd=1.5))
    with pytest.raises(BudgetExceededError) as caught:
        tracker.check()
    assert str(caught.value) == said


def test_a_budgets_deadline_comes_before_its_tokens() -> None:
    clock = Clock()
    tracker = BudgetTracker(Budget(deadline=Deadline.after(5, clock=clock), max_total_tokens=1))
    tracker.record_cumulative("a", TokenUsage(5, 5))
    clock.now += seconds(6)
    with pytest.raises(BudgetExceededError) as caught:
        tracker.check()
    assert caught.value.exceeded_dimension == "deadline"
    assert str(caught.value) == "the budget is used up: its deadline has passed"


def test_tokens_of_an_unknown_number_exceed_nothing() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    tracker.record_cumulative("a", TokenUsage())
    tracker.check()
    assert tracker.consumed.total_tokens is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 99), st.integers(0, 99))))
def test_what_was_consumed_is_the_sum_of_each_evaluations_last_record(records: list[tuple[str, int, int]]) -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    for name, given_in, out in records:
        tracker.record_cumulative(name, TokenUsage(given_in, out))
    last = {name: given_in + out for name, given_in, out in records}
    assert (tracker.consumed.total_tokens or 0) == sum(last.values())


def test_evaluations_on_many_threads_are_all_counted() -> None:
    tracker = BudgetTracker(Budget(max_total_tokens=1))
    threads = [
        threading.Thread(target=tracker.record_cumulative, args=(number, TokenUsage(1, 1))) for number in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.consumed == TokenUsage(50, 50)


def test_a_heartbeat_knows_how_long_ago_the_last_beat_was() -> None:
    moments = iter([100.0, 103.0, 110.0, 111.5])
    heartbeat = Heartbeat(clock=lambda: next(moments))
    assert heartbeat.elapsed() == 3.0
    heartbeat.beat()
    assert heartbeat.elapsed() == 1.5


def test_every_callback_hears_every_beat_until_it_is_removed() -> None:
    heard: list[str] = []
    heartbeat = Heartbeat()

    def first() -> None:
        heard.append("first")

    heartbeat.add_callback(first)
    heartbeat.add_callback(lambda: heard.append("second"))
    heartbeat.beat()
    assert heartbeat.remove_callback(first)
    assert not heartbeat.remove_callback(first)
    heartbeat.beat()
    assert heard == ["first", "second", "second"]


def test_a_callback_that_fails_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    heartbeat = Heartbeat()
    heartbeat.add_callback(lambda: 1 // 0)
    heartbeat.add_callback(lambda: heard.append(1))
    heartbeat.beat()
    assert heard == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_remove_itself_while_it_is_called() -> None:
    heard: list[int] = []
    heartbeat = Heartbeat()

    def once() -> None:
        heartbeat.remove_callback(once)
        heard.append(1)

    heartbeat.add_callback(once)
    heartbeat.beat()
    heartbeat.beat()
    assert heard == [1]
