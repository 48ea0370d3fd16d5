"""Answers that are none: tool calls that a model wrote as text, and reasoning alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, cast

_REASONING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL)
_MARK = re.compile(
    r"<tool_calls?>|<function_calls?>|<function=|<invoke |<\|tool_calls?(_section)?(_begin)?\|>|<\|python_tag\|>"
    r"|\[TOOL_CALLS?\]|<\uff5ctool\u2581calls?\u2581begin\uff5c>"
)
"""What chat templates write before a call. A server reads it where it knows the template."""
_ENDS = (">", "}", "]")
_FENCE = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters", "input")


def why_no_answer(text: str, tools: Collection[str]) -> str | None:
    """Return why a text is no answer: "reasoning" without an answer, or a "call" of a tool and nothing else.

    ``tools`` are the names on offer. A text that has a call and prose around it is an answer: it may quote one.
    """
    said = _REASONING.sub("", text).strip()
    if not said:
        return "reasoning"
    if not tools:
        return None
    if _MARK.match(said):
        return "call" if said.endswith(_ENDS) else None
    fenced = _FENCE.fullmatch(said)
    try:
        value: object = json.loads(fenced[1] if fenced else said)
    except (ValueError, RecursionError):
        return None
    calls = cast("list[object]", value) if isinstance(value, list) else [value]
    return "call" if calls and all(_is_call(each, tools) for each in calls) else None


def _is_call(value: object, tools: Collection[str]) -> bool:
    if not isinstance(value, Mapping):
        return False
    written = cast("Mapping[str, Any]", value)
    called = written.get("function", written)
    if not isinstance(called, Mapping):
        return False
    found = cast("Mapping[str, Any]", called)
    name = found.get("name")
    return isinstance(name, str) and name in tools and any(key in found for key in _ARGUMENTS)
