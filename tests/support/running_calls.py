"""The tool call that a test's code runs in, and who takes part in it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ringfence.participants import (
    CURRENT_CALL,
    TRANSITIONS,
    CallInfo,
    CallState,
    current_call,
    participant_of,
    sort_participants,
)

__all__ = ["TRANSITIONS", "CallState", "current_call", "participant_of", "sort_participants", "within"]


@contextmanager
def within(call: CallInfo) -> Generator[None]:
    """Have the block run as the handler of `call` would."""
    token = CURRENT_CALL.set(call)
    try:
        yield
    finally:
        CURRENT_CALL.reset(token)
