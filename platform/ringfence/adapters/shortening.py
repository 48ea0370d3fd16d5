"""Room in a conversation that has become longer than its model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringfence.adapters.core import Message

SHORT = 400
"""Characters of an answer of a tool that nothing is gained by leaving out."""
ANSWER_LEFT_OUT = (
    "[left out: the conversation had become too long; if you still need it, ask for it again, less at once]"
)
TURNS_LEFT_OUT = (
    "[The earlier turns of this conversation are left out, since it had become too long. What you did in them is done:"
    " look at the files before you go on.]"
)


def shortened(conversation: Sequence[Message]) -> tuple[list[Message], str] | None:
    """A shorter conversation, and in words what it lacks; None where nothing can go.

    The answers of tools go first, from the oldest until half of their text is gone. When they are all short, the older
    half of the turns goes.
    """
    return _without_answers(conversation) or _without_turns(conversation)


def _without_answers(conversation: Sequence[Message]) -> tuple[list[Message], str] | None:
    long = [place for place, each in enumerate(conversation) if each.role == "tool" and len(each.text) > SHORT]
    if not long:
        return None
    found, left_out = list(conversation), 0
    room = sum(len(conversation[place].text) for place in long) / 2
    for place in long:
        if room <= 0:
            break
        room -= len(conversation[place].text)
        found[place] = replace(conversation[place], text=ANSWER_LEFT_OUT)
        left_out += 1
    return found, f"the answers to {left_out} earlier tool call{'s' if left_out > 1 else ''}"


def _without_turns(conversation: Sequence[Message]) -> tuple[list[Message], str] | None:
    instructions, *said = conversation
    turns = [place for place, each in enumerate(said) if each.role == "assistant"]
    if len(turns) < 2:
        return None
    left_out = len(turns) // 2
    rest = said[turns[left_out] :]
    return [instructions, Message("user", TURNS_LEFT_OUT), *rest], f"the {left_out} oldest turns of it"
