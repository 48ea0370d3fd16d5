"""The limits of a run: deadlines, token budgets, cancellation and heartbeat; and the options that carry them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias, TypeVar
from uuid import UUID, uuid4

from ringfence.errors import CallCancelledError, RingfenceError
from ringfence.participants import current_call, nearest_active

logger = logging.getLogger(__name__)

SHORTEST_DEADLINE = timedelta(seconds=1)
Number = TypeVar("Number", int, float)


def utc_now() -> datetime:
    return datetime.now(UTC)


def require_aware(name: str, moment: datetime) -> datetime:
    """`moment` in UTC. ValueError for one that has no timezone."""
    if not isinstance(moment, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not type
        raise TypeError(f"{name} is a datetime (Deadline.after(seconds) makes one): got {moment!r}")
    if moment.utcoffset() is None:
        raise ValueError(f"{name} needs a timezone (datetime.now(UTC), say): {moment!r} has none")
    return moment.astimezone(UTC)


@dataclass(frozen=True, slots=True, init=False)
class Deadline:
    """The moment at which an evaluation has to end."""

    expires_at: datetime
    started_at: datetime
    clock: Callable[[], datetime] = field(compare=False, repr=False)

    def __init__(
        self, expires_at: datetime, started_at: datetime | None = None, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """A deadline counts from `started_at`, which is now unless an earlier deadline is copied or restored.

        Raises:
            ValueError: a moment without a timezone, or less than a second between the two. (That is measured from the
                start and not from now, so that a deadline that has passed can still be copied and restored.)
        """
        expires_at = require_aware("expires_at", expires_at)
        started_at = require_aware("started_at", clock() if started_at is None else started_at)
        if expires_at - started_at < SHORTEST_DEADLINE:
            raise ValueError(
                f"a deadline needs at least one second: {expires_at.isoformat()} is"
                f" {(expires_at - started_at).total_seconds():g} s after {started_at.isoformat()}"
            )
        object.__setattr__(self, "expires_at", expires_at)
        object.__setattr__(self, "started_at", started_at)
        object.__setattr__(self, "clock", clock)

    @staticmethod
    def after(seconds: float, *, clock: Callable[[], datetime] = utc_now) -> Deadline:
        """The deadline `seconds` from now. Raises ValueError for fewer than one, and for more than a calendar has."""
        now = clock()
        try:
            expires_at = now + timedelta(seconds=seconds)
        except (OverflowError, ValueError):
            raise ValueError(f"no deadline is {seconds} seconds from now: leave it out where there is none") from None
        return Deadline(expires_at, now, clock)

    def remaining(self, now: datetime | None = None) -> timedelta:
        """The time until the deadline. It is negative after the deadline."""
        return self.expires_at - (self.clock() if now is None else require_aware("now", now))

    def elapsed(self, now: datetime | None = None) -> timedelta:
        """Time since the start."""
        return (self.clock() if now is None else require_aware("now", now)) - self.started_at

    @property
    def expired(self) -> bool:
        return self.clock() >= self.expires_at


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one provider call, or of several added up; None is what the provider did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """The part of the input that came from the provider's cache."""
    cache_write_tokens: int | None = None
    """The part of the input that the provider put into its cache."""
    cost_usd: float | None = None
    """The price in US dollars. Adapters of a provider know it by the extra "prices"."""
    prices: str | None = None
    """The table that the price is by, with its version; None where no table was asked."""

    @property
    def total_tokens(self) -> int | None:
        return _sum(self.input_tokens, self.output_tokens)

    def describe(self) -> str:
        """Return the tokens and their cost for a person. Empty if both are unknown."""
        tokens, cost = self.total_tokens, self.cost_usd
        known = [f"{tokens:,} tokens"] if tokens is not None else []
        return ", ".join(known + ([dollars(cost)] if cost is not None else []))

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            _sum(self.input_tokens, other.input_tokens),
            _sum(self.output_tokens, other.output_tokens),
            _sum(self.cached_tokens, other.cached_tokens),
            _sum(self.cache_write_tokens, other.cache_write_tokens),
            _sum(self.cost_usd, other.cost_usd),
            other.prices or self.prices,
        )


def _sum(one: Number | None, other: Number | None) -> Number | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of an evaluation's usage. Usage that equals a limit does not exceed it."""

    deadline: Deadline | None = None
    max_total_tokens: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_cost_usd: float | None = None

    def __post_init__(self) -> None:
        limits = {
            "max_total_tokens": self.max_total_tokens,
            "max_input_tokens": self.max_input_tokens,
            "max_output_tokens": self.max_output_tokens,
            "max_cost_usd": self.max_cost_usd,
        }
        if self.deadline is None and all(limit is None for limit in limits.values()):
            raise ValueError(f"a budget limits something: give a deadline or one of {', '.join(limits)}")
        for name, limit in limits.items():
            if limit is None:
                continue
            if not limit > 0:
                raise ValueError(f"{name} has to be positive; got {limit}")


BudgetDimension: TypeAlias = Literal["deadline", "total_tokens", "input_tokens", "output_tokens", "cost_usd"]


def dollars(amount: float) -> str:
    """Format an amount of US dollars: with cents, and what is less than a dollar with four decimals."""
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.4f}"


class BudgetExceededError(RingfenceError, RuntimeError):
    """A budget is used up; ``exceeded_dimension`` names the limit."""

    def __init__(
        self,
        budget: Budget,
        consumed: TokenUsage,
        exceeded_dimension: BudgetDimension,
    ) -> None:
        if exceeded_dimension == "deadline":
            reason = "its deadline has passed"
        elif exceeded_dimension == "cost_usd":
            reason = f"{dollars(consumed.cost_usd or 0)}, of {dollars(budget.max_cost_usd or 0)} that it allows"
        else:
            used, limit = getattr(consumed, exceeded_dimension), getattr(budget, f"max_{exceeded_dimension}")
            kind = exceeded_dimension.replace("_", " ").removeprefix("total ")
            reason = f"{used:,} {kind}, of {limit:,} that it allows"
        super().__init__(f"the budget is used up: {reason}")
        self.budget = budget
        self.consumed = consumed
        self.exceeded_dimension = exceeded_dimension


class BudgetTracker:
    """Adds up what evaluations use of one budget; any thread may use it."""

    def __init__(self, budget: Budget, parent: BudgetTracker | None = None) -> None:
        """What is used of a part of a bigger budget, its ``parent``, counts there as well."""
        if not isinstance(budget, Budget):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"budget is a Budget, not {budget!r}")
        self.budget = budget
        self.parent = parent
        self._usage: dict[Hashable, TokenUsage] = {}
        self._lock = threading.Lock()

    def record_cumulative(self, evaluation_id: Hashable, usage: TokenUsage) -> None:
        """`usage` is all that this evaluation has used so far: it takes the place of what was recorded for it."""
        with self._lock:
            self._usage[evaluation_id] = usage
        if self.parent is not None:
            self.parent.record_cumulative(evaluation_id, usage)

    @property
    def consumed(self) -> TokenUsage:
        """The token usage of all evaluations together."""
        with self._lock:
            return sum(self._usage.values(), TokenUsage())

    @property
    def limits_cost(self) -> bool:
        """Whether the budget, or one around it, limits the cost."""
        return self.budget.max_cost_usd is not None or (self.parent is not None and self.parent.limits_cost)

    def check(self) -> None:
        """Raise BudgetExceededError, for the first of deadline, input, output, total and cost that is over its limit,
        here or in the parent."""
        budget, consumed = self.budget, self.consumed
        if budget.deadline is not None and budget.deadline.expired:
            raise BudgetExceededError(budget, consumed, "deadline")
        dimensions: tuple[tuple[BudgetDimension, float | None, float | None], ...] = (
            ("input_tokens", consumed.input_tokens, budget.max_input_tokens),
            ("output_tokens", consumed.output_tokens, budget.max_output_tokens),
            ("total_tokens", consumed.total_tokens, budget.max_total_tokens),
            ("cost_usd", consumed.cost_usd, budget.max_cost_usd),
        )
        for dimension, used, limit in dimensions:
            if used is not None and limit is not None and used > limit:
                raise BudgetExceededError(budget, consumed, dimension)
        if self.parent is not None:
            self.parent.check()


class Cancellation:
    """Cancels a tool call from any thread. A cancellation cannot be undone.

    A running handler is not interrupted, but can check for the cancellation. The call is rolled back at the commit
    point.
    """

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Cancel the call. Any thread may call this method, any number of times."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the cancellation, at most `seconds`. Return whether the call is cancelled."""
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise CallCancelledError if it is cancelled."""
        if self.cancelled:
            raise CallCancelledError("the call was cancelled, so nothing of it is kept")


class Heartbeat:
    """A sign of life of a running evaluation; any thread may beat, and any may watch.

    ``clock`` counts seconds from any beginning and never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        # Replaced as a whole and never changed in place, so that `beat` needs no lock.
        self._callbacks: tuple[Callable[[], object], ...] = ()
        self._lock = threading.Lock()

    def beat(self) -> None:
        """A callback that raises is logged, and the others are called all the same."""
        self._last = self._clock()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a heartbeat callback failed: %r", callback)

    def elapsed(self) -> float:
        """Seconds since the last beat, or since the beginning where there was none."""
        return self._clock() - self._last

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` at every beat, on the thread that beats."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)

    def remove_callback(self, callback: Callable[[], object]) -> bool:
        """Remove the callback's first registration. Return False if there is none."""
        with self._lock:
            if callback not in self._callbacks:
                return False
            at = self._callbacks.index(callback)
            self._callbacks = self._callbacks[:at] + self._callbacks[at + 1 :]
            return True


@dataclass(frozen=True, slots=True)
class RunContext:
    """The caller's own identifiers of an evaluation. Events and telemetry contain them."""

    run_id: UUID = field(default_factory=uuid4)
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one run, for its adapter, its loop and its tool calls."""

    deadline: Deadline | None = None
    budget_tracker: BudgetTracker | None = None
    heartbeat: Heartbeat | None = None
    run_context: RunContext | None = None
    max_answer: int | None = None
    """The most characters that a model gets for one tool call; None is the usual limit."""

    def __post_init__(self) -> None:
        """Raises TypeError for a limit of another type, such as a number of seconds for a deadline."""
        for name, kind in (("deadline", Deadline), ("budget_tracker", BudgetTracker), ("heartbeat", Heartbeat)):
            value = getattr(self, name)
            if not isinstance(value, (kind, type(None))):
                raise TypeError(f"{name} is a {kind.__name__}, not {value!r}")

    @classmethod
    def of_evaluation(
        cls,
        *,
        deadline: Deadline | None = None,
        budget: Budget | None = None,
        budget_tracker: BudgetTracker | None = None,
        heartbeat: Heartbeat | None = None,
        run_context: RunContext | None = None,
    ) -> RunOptions:
        """The options of a new evaluation. In a tool's handler the limits of its call hold as well.

        A ``budget_tracker`` that is given names its parent itself. Raises ValueError for two different budgets.
        """
        options = cls(deadline, budget_tracker, heartbeat, run_context)
        if budget_tracker is not None and budget not in (None, budget_tracker.budget):
            raise ValueError("budget and the budget_tracker's own are two budgets: give one of them")
        if budget_tracker is None and budget is not None:
            budget_tracker = BudgetTracker(budget, parent=cls().inherit().budget_tracker)
        return replace(options, budget_tracker=budget_tracker).inherit()

    def inherit(self) -> RunOptions:
        """These options within the limits of the current tool call.

        The nearest deadline of the call and of the calls around it holds. Their innermost tracker is used where these
        options have none.
        """
        deadline, tracker, call = self.deadline, self.budget_tracker, nearest_active(current_call())
        while call is not None:
            limits = call.limits
            if isinstance(limits, RunOptions):
                if limits.deadline and (deadline is None or limits.deadline.remaining() < deadline.remaining()):
                    deadline = limits.deadline
                tracker = tracker or limits.budget_tracker
            call = call.parent
        return replace(self, deadline=deadline, budget_tracker=tracker)
