"""Guard the tools that an agent already has: each changing call is a step, and what a policy denies is rolled back."""

from ringfence_guard.answers import HookAnswer, HookOutput, can_take_context, format_answer
from ringfence_guard.events import AgentName, HookEvent, Phase, parse_event

__all__ = [
    "AgentName",
    "HookAnswer",
    "HookEvent",
    "HookOutput",
    "Phase",
    "can_take_context",
    "format_answer",
    "parse_event",
]
