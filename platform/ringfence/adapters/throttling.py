"""What to do when a provider has no time: ask again, later and later, and stop before the deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

from ringfence.errors import (
    ContextWindowExceededError,
    DeadlineExceededError,
    EvaluationPhase,
    PromptEvaluationError,
    ThrottleDetails,
    ThrottleError,
    ThrottleKind,
)
from ringfence.runtime.limits import Deadline

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class ThrottlePolicy:
    """How often a request is repeated, and how many seconds are between.

    The n-th wait is a random time from ``base_delay`` to ``base_delay * 2 ** (n - 1)``, at most ``max_delay``, but
    never shorter than the provider asked for. With an exhausted quota nothing is repeated.
    """

    max_attempts: int = 5
    base_delay: float = 0.5
    max_delay: float = 8.0
    max_total_delay: float = 30.0
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False, repr=False)
    jitter: Callable[[float, float], float] = field(default=random.uniform, compare=False, repr=False)

    def __post_init__(self) -> None:
        for limit in fields(self)[:4]:
            if (value := getattr(self, limit.name)) <= 0:
                raise ValueError(f"{limit.name} has to be positive; got {value}")

    def delay(self, attempt: int, retry_after: float | None) -> float:
        longest = min(self.max_delay, self.base_delay * 2 ** (attempt - 1))
        return max(self.jitter(min(self.base_delay, longest), longest), retry_after or 0.0)


class AttemptFailedError(Exception):
    """One request to a provider failed. Without a ``kind`` there is no point in repeating it."""

    def __init__(
        self,
        message: str,
        *,
        kind: ThrottleKind | None = None,
        phase: EvaluationPhase = "request",
        retry_after: float | None = None,
        payload: Mapping[str, object] | None = None,
        too_long: bool = False,
    ) -> None:
        super().__init__(message)
        self.too_long = too_long
        self.kind: ThrottleKind | None = kind
        self.phase: EvaluationPhase = phase
        self.retry_after = retry_after
        self.payload = payload


def repeated(
    attempt: Callable[[int], AnswerT],
    policy: ThrottlePolicy,
    *,
    prompt_name: str,
    deadline: Deadline | None,
    on_retry: Callable[[str, int, float], object] | None = None,
) -> AnswerT:
    """The answer of the first attempt that has one; they are counted from 1. ``on_retry`` is as in `Request`.

    Raises:
        ThrottleError: the attempts, or the time, are used up.
        ContextWindowExceededError: the request is longer than the model takes.
        PromptEvaluationError: a failure that repeating does not mend, or the deadline has passed.
    """
    number, waited = 1, 0.0
    while True:
        try:
            return attempt(number)
        except AttemptFailedError as error:
            failed = error
        if deadline is not None and deadline.expired:
            late = DeadlineExceededError(f"the deadline has passed: {failed}")
            raise PromptEvaluationError(str(late), prompt_name=prompt_name, phase="request") from late
        if failed.kind is None:
            kind = ContextWindowExceededError if failed.too_long else PromptEvaluationError
            raise kind(
                str(failed), prompt_name=prompt_name, phase=failed.phase, provider_payload=failed.payload
            ) from failed.__cause__
        wait = policy.delay(number, failed.retry_after)
        if (why := _reason_to_stop(policy, failed, number, wait, waited, deadline)) is not None:
            details = ThrottleDetails(failed.kind, failed.retry_after, number, False, failed.payload)
            raise ThrottleError(f"{failed} ({why})", prompt_name=prompt_name, details=details) from failed.__cause__
        waited += wait
        number += 1
        if on_retry is not None:
            on_retry(str(failed), number, wait)
        policy.sleep(wait)


def _reason_to_stop(
    policy: ThrottlePolicy,
    failed: AttemptFailedError,
    number: int,
    wait: float,
    waited: float,
    deadline: Deadline | None,
) -> str | None:
    if failed.kind == "quota_exhausted":
        return "waiting does not help"
    if number >= policy.max_attempts:
        return f"asked {number} times"
    if waited + wait > policy.max_total_delay:
        return f"the next attempt would be in {wait:.1f} s, and {policy.max_total_delay:g} s is all that is waited"
    if deadline is not None and deadline.remaining().total_seconds() <= wait:
        return f"the next attempt would be in {wait:.1f} s, after the deadline"
    return None
