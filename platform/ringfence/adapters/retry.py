"""Asking a provider again, later and later, until the deadline; and what the failures of its SDK mean.

The SDKs' own retries know neither the deadline of a run nor its observers, and none of an answer that breaks off in the
middle of its stream. So they are switched off.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeVar, cast

from ringfence.errors import (
    ContextWindowExceededError,
    DeadlineExceededError,
    EvaluationPhase,
    PromptEvaluationError,
    ThrottleDetails,
    ThrottleError,
    ThrottleKind,
)
from ringfence.runtime.limits import Deadline, utc_now

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


@dataclass(eq=False)
class AttemptFailedError(Exception):
    """One request to a provider failed. Without a ``kind`` there is no point in repeating it."""

    message: str
    kind: ThrottleKind | None = None
    phase: EvaluationPhase = "request"
    retry_after: float | None = None
    payload: Mapping[str, object] | None = None
    too_long: bool = False

    def __str__(self) -> str:
        return self.message


class CutOffError(Exception):
    """A stream ended before its end."""


class ReportedError(Exception):
    """A provider answered in order, and the answer is that it failed."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message}


def retry(
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
        why = None
        if failed.kind == "quota_exhausted":
            why = "waiting does not help"
        elif number >= policy.max_attempts:
            why = f"asked {number} times"
        elif waited + wait > policy.max_total_delay:
            why = f"the next attempt would be in {wait:.1f} s, and {policy.max_total_delay:g} s is all that is waited"
        elif deadline is not None and deadline.remaining().total_seconds() <= wait:
            why = f"the next attempt would be in {wait:.1f} s, after the deadline"
        if why is not None:
            details = ThrottleDetails(failed.kind, failed.retry_after, number, False, failed.payload)
            raise ThrottleError(f"{failed} ({why})", prompt_name=prompt_name, details=details) from failed.__cause__
        waited += wait
        number += 1
        if on_retry is not None:
            on_retry(str(failed), number, wait)
        policy.sleep(wait)


# What a failure means

MAX_ERROR_CHARACTERS = 500
"""Of a provider's error that are passed on."""
QUOTA_CODES = frozenset({"insufficient_quota", "billing_not_active", "billing_error"})
RATE_CODES = frozenset({"rate_limit_error", "rate_limit_exceeded", "rate_limit"})
BUSY_CODES = frozenset({"overloaded_error", "server_error", "api_error", "internal_server_error", "timeout_error"})
TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "request_too_large"})
TOO_LONG = re.compile(
    r"(prompt|input|request|messages|conversation) (is|are) too (long|large)|context (window|length|size|limit)"
    r"|max(imum)? (prompt|input) length|maximum (allowed )?(number of )?(input )?tokens|exceeds max length"
    r"|too many (input )?tokens|reduce the length",
    re.IGNORECASE,
)
"""How servers without a code for it report a request that is longer than the model takes."""
TOO_LARGE = re.compile(r"request (body |entity )?too large", re.IGNORECASE)
"""How they report a request that alone is above a limit, such as that of tokens a minute: waiting does not help."""
HINTS = {401: "; check the key", 403: "; check what the key may do", 404: "; check the model's name and the URL"}


class Sdk(Protocol):
    """The exceptions of a provider's SDK, which all have the same tree."""

    @property
    def APIError(self) -> type[Exception]: ...
    @property
    def APIConnectionError(self) -> type[Exception]: ...
    @property
    def APITimeoutError(self) -> type[Exception]: ...


def attempt_failure(error: Exception, sdk: Sdk) -> AttemptFailedError:
    """What became of a request, in words, and whether to repeat it."""
    if not (isinstance(error, (CutOffError, ReportedError, sdk.APIError)) or _is_of_transport(error)):
        text = f"the provider's answer cannot be read: {type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
        return AttemptFailedError(text, phase="response")
    found: object = getattr(error, "body", None)
    body = cast("Mapping[str, object]", found) if isinstance(found, Mapping) else None
    codes, status = _codes(body), getattr(error, "status_code", None)
    message = _message(error, body)
    kind = _kind(error, sdk, codes, status)
    too_long = _is_too_long(message, codes, status, kind)
    text = f"{message}{f' (HTTP {status})' if status is not None else ''}{HINTS.get(status or 0, '')}"
    if kind is not None and not too_long:
        text = f"the provider did not answer ({kind.replace('_', ' ')}): {text}"
    return AttemptFailedError(
        text,
        kind=None if too_long else kind,
        retry_after=_retry_after(getattr(getattr(error, "response", None), "headers", {})),
        payload=body,
        too_long=too_long,
    )


def _is_of_transport(error: Exception) -> bool:
    """An error of the HTTP library that an SDK lets through while it streams."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _kind(error: Exception, sdk: Sdk, codes: set[str], status: int | None) -> ThrottleKind | None:
    if codes & QUOTA_CODES or status == 402:
        return "quota_exhausted"
    if status == 429 or codes & RATE_CODES:
        return "rate_limit"
    if status in (408, 504) or isinstance(error, sdk.APITimeoutError) or "Timeout" in type(error).__name__:
        return "timeout"
    if codes & BUSY_CODES or (status is not None and status >= 500 and status != 501):
        return "overloaded"
    if isinstance(error, (CutOffError, sdk.APIConnectionError)) or _is_of_transport(error):
        return "connection"
    return None


def _is_too_long(message: str, codes: set[str], status: int | None, kind: ThrottleKind | None) -> bool:
    if status == 413 or (kind != "quota_exhausted" and TOO_LARGE.search(message)):
        return True
    found = bool(codes & TOO_LONG_CODES) or TOO_LONG.search(message) is not None
    return found and kind in (None, "overloaded")


def _codes(body: object) -> set[str]:
    """Whatever names the kind of an error, at either level of its body."""
    if not isinstance(body, Mapping):
        return set()
    known = cast("Mapping[str, object]", body)
    found = {value for key in ("code", "type") if isinstance(value := known.get(key), str)}
    return found | _codes(known.get("error"))


def _message(error: Exception, body: Mapping[str, object] | None) -> str:
    inner = (body or {}).get("error", body)
    message = cast("Mapping[str, object]", inner).get("message") if isinstance(inner, Mapping) else None
    found = message if isinstance(message, str) and message else str(error) or type(error).__name__
    return found[:MAX_ERROR_CHARACTERS]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; what cannot be read does not count."""
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "")
        try:
            seconds = float(text) * factor
        except ValueError:
            try:
                seconds = (parsedate_to_datetime(text) - utc_now()).total_seconds()
            except (ValueError, TypeError):
                continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None
