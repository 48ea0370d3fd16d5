"""Repeat a request to a provider until the deadline, and classify the failures of its SDK.

The adapters switch the SDKs' own retries off. These ignore the deadline of a run and its observers, and do not repeat
an answer whose stream breaks off.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from email.utils import parsedate_to_datetime
from typing import cast

from ringfence.adapters.model import Request, Turn
from ringfence.errors import (
    ContextWindowExceededError,
    DeadlineExceededError,
    PromptEvaluationError,
    ThrottleDetails,
    ThrottleError,
    ThrottleKind,
)
from ringfence.limits import utc_now


@dataclass(frozen=True, slots=True)
class ThrottlePolicy:
    """The limits of repeated requests. Delays are in seconds.

    The n-th delay is a random time from ``base_delay`` to ``base_delay * 2 ** (n - 1)``, at most ``max_delay``. It is
    never shorter than the provider asked for. With an exhausted quota, no request is repeated.
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


CUT_OFF = "cut_off"


class AnswerError(Exception):
    """Raised for a provider's answer that is no turn. ``code`` is the provider's error code, or CUT_OFF.

    Some servers give the status that HTTP would have, as a number.
    """

    def __init__(self, message: str, code: object) -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message}


def error_of(answer: Mapping[str, object], otherwise: str) -> AnswerError:
    """Return the error that an answer has in the place of a turn. One that says nothing of it may pass."""
    error = answer.get("error") or answer.get("message")
    found = _mapping(error)
    if not found:
        return AnswerError(f"{otherwise}: {error}" if error else otherwise, CUT_OFF if not error else None)
    return AnswerError(str(found.get("message") or otherwise), found.get("code") or found.get("type"))


def retry(attempt: Callable[[int], Turn], request: Request, policy: ThrottlePolicy) -> Turn:
    """Call ``attempt`` with 1, 2 ... until it returns a turn.

    Raises:
        ThrottleError: All attempts have failed, or no time is left for another one.
        ContextWindowExceededError: The request exceeds the model's context window.
        PromptEvaluationError: The failure is permanent, or the deadline has passed.
    """
    name, deadline = request.prompt_name, request.deadline
    number, waited = 1, 0.0
    while True:
        try:
            return attempt(number)
        except Exception as error:
            failure = _classify(error)
            if deadline is not None and deadline.expired:
                late = DeadlineExceededError(f"the deadline has passed: {failure.message}")
                raise PromptEvaluationError(str(late), prompt_name=name, phase="request") from late
            if failure.kind is None:
                kind = ContextWindowExceededError if failure.is_too_long else PromptEvaluationError
                raise kind(
                    failure.message,
                    prompt_name=name,
                    phase="response" if failure.is_unreadable else "request",
                    provider_payload=failure.payload,
                ) from error
            wait = policy.delay(number, failure.retry_after)
            why = None
            if failure.kind == "quota_exhausted":
                why = "waiting does not help"
            elif number >= policy.max_attempts:
                why = f"asked {number} times"
            elif waited + wait > policy.max_total_delay:
                why = f"the next attempt would be in {wait:.1f} s, and {policy.max_total_delay:g} s is the limit"
            elif deadline is not None and deadline.remaining().total_seconds() <= wait:
                why = f"the next attempt would be in {wait:.1f} s, after the deadline"
            if why is not None:
                details = ThrottleDetails(failure.kind, failure.retry_after, number, False, failure.payload)
                raise ThrottleError(f"{failure.message} ({why})", prompt_name=name, details=details) from error
        waited += wait
        number += 1
        if request.on_retry is not None:
            request.on_retry(failure.message, number, wait)
        policy.sleep(wait)


# Classification of failures

MAX_ERROR_CHARACTERS = 500
"""The number of characters of a provider's error that a message quotes."""
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
"""Matches the errors of servers that have no code for a request that exceeds the context window."""
TOO_LARGE = re.compile(r"request (body |entity )?too large", re.IGNORECASE)
"""Matches the errors for a single request above a limit, such as the tokens per minute. Waiting does not help."""
HINTS = {401: "; check the key", 403: "; check what the key may do", 404: "; check the model's name and the URL"}


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    kind: ThrottleKind | None = None
    """The kind of a failure that a repeated request may not meet again. None for a permanent failure."""
    retry_after: float | None = None
    payload: Mapping[str, object] | None = None
    is_too_long: bool = False
    is_unreadable: bool = False


def _classify(error: Exception) -> _Failure:
    # Classes are compared by name: both SDKs use the same names. Errors of the HTTP library come through in a stream.
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names & {"AnswerError", "APIError", "TransportError"}:
        text = f"the provider's answer cannot be read: {type(error).__name__}: {str(error)[:MAX_ERROR_CHARACTERS]}"
        return _Failure(text, is_unreadable=True)
    payload = _mapping(getattr(error, "body", None))
    reported = _mapping(payload.get("error", payload))
    status = getattr(error, "status_code", None)
    if status is None and type(code := reported.get("code")) is int:
        status = code
    codes = {value for key in ("code", "type") if isinstance(value := reported.get(key), str)}
    message = reported.get("message")
    message = message if isinstance(message, str) and message else str(error) or type(error).__name__
    message = message[:MAX_ERROR_CHARACTERS]
    kind = _throttle_kind(error, names, status, codes)
    text = f"{message}{f' (HTTP {status})' if status is not None else ''}{HINTS.get(status or 0, '')}"
    retry_after = _retry_after(getattr(getattr(error, "response", None), "headers", {}))
    if _is_too_long(kind, status, codes, message):
        return _Failure(text, None, retry_after, payload or None, is_too_long=True)
    if kind is not None:
        text = f"the provider did not answer ({kind.replace('_', ' ')}): {text}"
    return _Failure(text, kind, retry_after, payload or None)


def _throttle_kind(error: Exception, names: Set[str], status: int | None, codes: Set[str]) -> ThrottleKind | None:
    """The kind of a failure by the names of its classes, its HTTP status and the codes in its body."""
    if codes & QUOTA_CODES or status == 402:
        return "quota_exhausted"
    if status == 429 or codes & RATE_CODES:
        return "rate_limit"
    if status in (408, 504) or "Timeout" in type(error).__name__:
        return "timeout"
    if codes & BUSY_CODES or (status is not None and status >= 500 and status != 501):
        return "overloaded"
    if CUT_OFF in codes or names & {"APIConnectionError", "TransportError"}:
        return "connection"
    return None


def _is_too_long(kind: ThrottleKind | None, status: int | None, codes: Set[str], message: str) -> bool:
    """Whether the request exceeds the context window, or another limit for a single request."""
    return (
        status == 413
        or (kind != "quota_exhausted" and TOO_LARGE.search(message) is not None)
        or (kind in (None, "overloaded") and bool(codes & TOO_LONG_CODES or TOO_LONG.search(message)))
    )


def _mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds of a Retry-After header. None without a readable one."""
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
