"""Answers to an agent's hook, in the form in which that agent's model gets to read them.

Each form was seen in the next request that the agent made. An answer that another agent needs may do nothing here, or
be refused as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from ringfence_guard.events import AgentName, HookEvent

CLAUDE_BASH = frozenset({"stdout", "stderr", "interrupted", "isImage", "noOutputExpected"})
"""The shape of a result that Claude Code lets a hook replace; it ignores another one."""


@dataclass(frozen=True, slots=True)
class HookAnswer:
    """What guard has to say to an event. Empty texts say nothing."""

    denial: str = ""
    """Before a call, or at a prompt: why it must not run."""
    verdict: str = ""
    """After a call: what became of this very call. It may stand in the place of the call's result."""
    context: str = ""
    """About other calls. It is added, and never replaces anything."""
    person: str = ""
    """What the person at the agent is to see, where the agent shows it: something of theirs may have gone back."""


@dataclass(frozen=True, slots=True)
class HookOutput:
    """What the hook's program prints, and its exit code."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


def format_answer(event: HookEvent, answer: HookAnswer) -> HookOutput:
    """Return the output that has the agent obey the answer, and its model read it.

    A context before a call is said by no agent: whoever calls keeps it for the next event after one.
    """
    if event.phase in ("before", "prompt") and answer.denial:
        return _json(_DENIALS[event.agent](event, answer.denial))
    if event.phase in ("after", "failed") and answer.verdict:
        text = "\n\n".join(filter(None, (answer.verdict, answer.context)))
        return _json({**_VERDICTS[event.agent](event, text), **_shown(event, answer)})
    if event.phase in ("after", "failed", "prompt", "session_start") and answer.context:
        return _json({**_context(event, answer.context), **_shown(event, answer)})
    return HookOutput()


def can_take_context(event: HookEvent) -> bool:
    """Whether the model reads a context that is answered to this event."""
    return event.phase in ("after", "failed") or (event.phase == "prompt" and event.agent != "opencode")


_Form: TypeAlias = "Callable[[HookEvent, str], dict[str, Any]]"


def _specific(event: HookEvent, **values: object) -> dict[str, Any]:
    return {"hookSpecificOutput": {"hookEventName": event.name, **values}}


def _permission(event: HookEvent, text: str) -> dict[str, Any]:
    if event.phase == "prompt":
        return {"decision": "block", "reason": text}
    return _specific(event, permissionDecision="deny", permissionDecisionReason=text)


def _gemini(event: HookEvent, text: str) -> dict[str, Any]:
    return {"decision": "deny", "reason": text}


def _claude_verdict(event: HookEvent, text: str) -> dict[str, Any]:
    blocked: dict[str, Any] = {"decision": "block", "reason": text}
    result: object = event.result
    shown = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
    replaced: dict[str, Any] = {}
    if shown.keys() >= CLAUDE_BASH:
        replaced = {**{key: shown[key] for key in CLAUDE_BASH}, "stderr": text}
    elif event.paths is not None and isinstance(shown.get("filePath"), str):
        # Its result is words of its own around the path, which say that all went well. The reason comes at the end of
        # each request, further away each time.
        replaced = {**shown, "filePath": f"{shown['filePath']}, BUT {text}"}
    if replaced:
        return {**blocked, **_specific(event, updatedToolOutput=replaced)}
    return {**blocked, **(_specific(event, additionalContext=text) if event.phase == "failed" else {})}


def _shown(event: HookEvent, answer: HookAnswer) -> dict[str, Any]:
    return {"systemMessage": answer.person} if event.agent == "claude" and answer.person else {}


def _context(event: HookEvent, text: str) -> dict[str, Any]:
    return {"append": text} if event.agent == "opencode" else _specific(event, additionalContext=text)


_DENIALS: Mapping[AgentName, _Form] = {
    "claude": _permission,
    "codex": _permission,
    "gemini": _gemini,
    "qwen": _permission,
    "opencode": lambda event, text: {"deny": text},
}
_VERDICTS: Mapping[AgentName, _Form] = {
    "claude": _claude_verdict,
    "codex": lambda event, text: {"decision": "block", "reason": text},
    "gemini": _gemini,
    "qwen": _context,  # it drops the reason of a block
    "opencode": lambda event, text: {"replace": text},
}


def _json(record: Mapping[str, Any]) -> HookOutput:
    return HookOutput(json.dumps(record))
