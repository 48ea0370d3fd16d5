"""What shows that a call is over whose end was not told: the agent's record of its session, or a later event.

A record gets the result of a call after the hook of the call's end was answered, if there is one. So a call that has a
result there, and is open, has no end that is still to come.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from ringfence_guard.events import AgentName, HookEvent, named_by_arguments
from ringfence_guard.kept_calls import OpenCall

TAIL_BYTES = 4 << 20
"""How far from the end of a record is read. A call whose result is asked for is among the newest."""
Proof: TypeAlias = Literal["", "ended", "returned", "not run"]
"""What a record says of a call: nothing; that it has ended; that its model has an answer while it may go on; that it
was not permitted, and nothing ran."""
_ONE_AFTER_ANOTHER = ("claude", "qwen")
"""The agents that begin no call while a tool that names its files is at work, but for those of sub-agents."""


def record_size(event: HookEvent) -> int:
    """How long the record of an event's session is. What is of a call that begins comes after that."""
    try:
        return os.stat(event.transcript).st_size
    except OSError:
        return 0


def proof_of(call: OpenCall) -> Proof:
    """What the record of its session says of a call. A record that cannot be read says nothing."""
    event = call.event
    if not event.transcript or not (event.transcript_id or event.agent == "gemini"):
        return ""
    read = _PROOFS.get(event.agent, _proof_in_messages)
    proofs: set[Proof] = {read(event, line) for line in _lines(event.transcript, call.record_bytes, _name(event))}
    if event.agent == "claude" and event.subagent:
        own = Path(event.transcript).with_suffix("") / "subagents" / f"agent-{event.subagent}.jsonl"
        proofs |= {read(event, line) for line in _lines(str(own), 0, _name(event))}
    order: tuple[Proof, ...] = ("not run", "ended", "returned")
    for proof in order:
        if proof in proofs:
            return proof
    return ""


def has_passed(began: HookEvent, prompt: HookEvent) -> bool:
    """Whether a prompt shows that a call is over: a person types the next one after it."""
    # qwen-code has the event of a prompt before every turn of the model.
    return began.actor == prompt.actor and (not prompt.prompt_id or began.prompt_id != prompt.prompt_id)


def is_followed(began: HookEvent, event: HookEvent) -> bool:
    """Whether the beginning of another call shows that a call of a tool that names its files is over."""
    is_other = began.call_id != event.call_id
    return is_other and began.actor == event.actor and began.paths is not None and event.agent in _ONE_AFTER_ANOTHER


def _name(event: HookEvent) -> bytes:
    """What each line has that is of a call."""
    name = event.tool if event.agent == "gemini" else event.transcript_id
    return json.dumps(name).encode()


def _lines(path: str, start: int, name: bytes) -> Iterator[Mapping[str, Any]]:
    """The lines of a record from a place on that have a name."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES, start if start <= size else 0))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        if name in line:
            try:
                held: object = json.loads(line)
            except ValueError:  # it is being written
                continue
            if isinstance(held, dict):
                yield cast("dict[str, Any]", held)


def _objects(held: object, *keys: str) -> Iterator[Mapping[str, Any]]:
    """The objects in the first list that there is below one of the keys."""
    found = cast("dict[str, Any]", held) if isinstance(held, dict) else {}
    for key in keys:
        if isinstance(found.get(key), list):
            yield from (cast("dict[str, Any]", one) for one in found[key] if isinstance(one, dict))
            return


def _proof_in_messages(event: HookEvent, line: Mapping[str, Any]) -> Proof:
    """Of Claude Code and qwen-code."""
    for one in _objects(line.get("message"), "content", "parts"):
        is_result = one.get("type") == "tool_result" and one.get("tool_use_id") == event.transcript_id
        response = one.get("functionResponse")
        if is_result or (isinstance(response, dict) and cast("Any", response).get("id") == event.transcript_id):
            return "not run" if line.get("toolDenialBeforeRun") is True else "ended"
    return ""


def _proof_in_items(event: HookEvent, line: Mapping[str, Any]) -> Proof:
    """Of Codex, whose commands may go on after the answer that the model gets."""
    held = line.get("payload")
    payload = cast("dict[str, Any]", held) if isinstance(held, dict) else {}
    item = payload.get("item")
    if payload.get("type") == "item_completed" and isinstance(item, dict):
        done = cast("dict[str, Any]", item)
        is_command = done.get("type") == "CommandExecution" and done.get("id") == event.transcript_id
        return "ended" if is_command and done.get("status") in ("completed", "failed") else ""
    is_output = str(payload.get("type")).endswith("_output") and payload.get("call_id") == event.transcript_id
    return "returned" if is_output else ""


def _proof_in_tool_calls(event: HookEvent, line: Mapping[str, Any]) -> Proof:
    """Of Gemini CLI, whose hooks have no name for a call."""
    for one in _objects(line, "toolCalls"):
        arguments = one.get("args")
        if one.get("result") and isinstance(arguments, dict):
            name = named_by_arguments(event.session_id, str(one.get("name")), cast("dict[str, Any]", arguments))
            if name == event.call_id:
                return "ended"
    return ""


_PROOFS: Mapping[AgentName, Callable[[HookEvent, Mapping[str, Any]], Proof]] = {
    "codex": _proof_in_items,
    "gemini": _proof_in_tool_calls,
}
