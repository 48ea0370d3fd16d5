"""What shows that a call is over whose end was not told: the agent's record of its session, or a later event."""

from __future__ import annotations

import os

from ringfence_guard.events import HookEvent

TAIL_BYTES = 4 << 20
"""How far from the end of a record is read. A call whose result is asked for is among the newest."""
_RESULTS = (b"tool_result", b"_output", b"functionResponse", b"tool_use_result")


def has_result(transcript: str, call_id: str) -> bool:
    """Whether the record has the result of a call. An unknown call, or a record that cannot be read, has none."""
    if not transcript or not call_id:
        return False
    try:
        with open(transcript, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return False
    name = f'"{call_id}"'.encode(errors="replace")
    return any(name in line and any(kind in line for kind in _RESULTS) for line in lines)


def has_passed(began: HookEvent, prompt: HookEvent) -> bool:
    """Whether a prompt shows that a call is over: a person types the next one after it."""
    # qwen-code has the event of a prompt before every turn of the model.
    return began.actor == prompt.actor and (not prompt.prompt_id or began.prompt_id != prompt.prompt_id)


def is_proved_over(began: HookEvent, event: HookEvent) -> bool:
    """Whether the beginning of another call shows that a call is over: the model has had its result."""
    is_other = began.call_id != event.call_id
    same = began.actor == event.actor
    return is_other and same and has_result(event.transcript or began.transcript, began.transcript_id)
