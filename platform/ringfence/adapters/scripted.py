"""A scripted model, for tests, demonstrations and replays without a network."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from ringfence import serde
from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.model import Message, Request, ToolCall, Turn
from ringfence.errors import PromptEvaluationError, format_error
from ringfence.filesystem.edits import read_host_text
from ringfence.limits import TokenUsage
from ringfence.session.events import ToolSchema

T = TypeVar("T")

ScriptedTurn = Mapping[str, Any]
"""``{"text": ..., "tool_calls": [{"name": ..., "arguments": {...} or raw text}], "usage": {...}, "ended": ...}``.

All keys are optional. ``ended`` has the values of `Turn.ended`.
"""

ChatMessages = Sequence[Mapping[str, Any]]
"""Messages in the style of a chat: ``{"role": ..., "content": ...}``, with ``tool_calls`` or ``tool_call_id``."""

ENDINGS = ("whole", "cut", "refused")


class ScriptedAdapter(LoopAdapter):
    """Answers requests with scripted turns, in order. Nested evaluations take their turns from the same script.

    ``requests`` has one mapping for each request, with ``messages``, ``tools`` and, for a structured output,
    ``response_format``. Requests share the mappings of equal messages.
    """

    provider = "scripted"

    def __init__(
        self,
        turns: Sequence[ScriptedTurn] | str | os.PathLike[str] | Callable[[ChatMessages], ScriptedTurn],
        *,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """``turns`` is a list, the path of a JSON Lines file, or a function of the conversation so far.

        Raises:
            ValueError: A turn has the wrong shape. The message has the number of the turn.
            OSError: The file cannot be read.
        """
        self.requests: list[Mapping[str, Any]] = []
        self.max_turns = max_turns
        self._written: dict[int, tuple[object, Mapping[str, Any]]] = {}
        self._numbers = count(1)
        self._function: Callable[[ChatMessages], ScriptedTurn] | None = None
        self._turns = deque[Turn]()
        if callable(turns):
            self._function = turns
        elif isinstance(turns, (str, os.PathLike)):
            self._turns.extend(self._turn(turn, where) for turn, where in _lines(turns))
            if not self._turns:
                raise ValueError(f"{turns} has no turns")
        else:
            self._turns.extend(self._turn(turn, f"turn {n}") for n, turn in enumerate(turns, 1))

    @property
    def unused(self) -> int:
        """The number of turns that no request has used yet."""
        return len(self._turns)

    def respond(self, request: Request) -> Turn:
        messages = [self._once(message, _chat_message) for message in request.messages]
        sent: dict[str, Any] = {"messages": messages, "tools": [self._once(tool, _chat_tool) for tool in request.tools]}
        if request.output_schema is not None:
            sent["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.output_schema}}
        self.requests.append(sent)
        number = len(self.requests)
        if self._function is not None:
            try:
                return self._turn(self._function(messages), f"turn {number}")
            except Exception as error:
                reason = str(error) if isinstance(error, ValueError) else format_error(error)
                raise PromptEvaluationError(reason, prompt_name=request.prompt_name, phase="response") from error
        if self._turns:
            return self._turns.popleft()
        calls = ", since its last turn calls tools" if messages[-1]["role"] == "tool" else ""
        raise PromptEvaluationError(
            f"the script has no turn left, but {request.prompt_name} asks for one more (request {number}){calls}: "
            'end it with a turn that calls none, such as {"text": "Done."}',
            prompt_name=request.prompt_name,
            phase="response",
        )

    def _once(self, part: T, written: Callable[[T], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The form of a message or tool in `requests`. It is made once: each request repeats all earlier messages."""
        kept = self._written.get(id(part))
        if kept is None:
            kept = self._written[id(part)] = (part, written(part))  # `part` is kept alive: its id is the key
        return kept[1]

    def _turn(self, turn: object, where: str) -> Turn:
        written = _mapping(turn, where, {"text", "tool_calls", "usage", "ended"})
        text, calls = written.get("text"), written.get("tool_calls")
        if not isinstance(text, (str, type(None))) or not isinstance(calls, (list, tuple, type(None))):
            raise ValueError(f'{where}: "text" is a string and "tool_calls" a list')
        usage = _mapping(written.get("usage") or {}, f"{where}, usage", {*TokenUsage.__dataclass_fields__} - {"prices"})
        tokens = {name: count for name, count in usage.items() if name != "cost_usd"}
        if not all(type(count) is int and count >= 0 for count in tokens.values()):
            raise ValueError(f"{where}, usage: tokens are whole numbers from 0, not {tokens!r}")
        cost = usage.get("cost_usd", 0)
        if type(cost) not in (int, float) or not 0 <= cost < math.inf:
            raise ValueError(f"{where}, usage: cost_usd is a number from 0, not {cost!r}")
        ended = written.get("ended", "whole")
        if ended not in ENDINGS:
            raise ValueError(f'{where}: "ended" is one of {", ".join(ENDINGS)}, not {ended!r}')
        asked = tuple(self._call(call, where) for call in cast("Sequence[object]", calls or ()))
        return Turn(text or "", asked, TokenUsage(**usage) if usage else None, ended=ended)

    def _call(self, call: object, where: str) -> ToolCall:
        written = _mapping(call, f"{where}, tool call", {"name", "arguments", "id"})
        name, arguments = written.get("name"), written.get("arguments")
        if not isinstance(name, str):
            raise ValueError(f'{where}: a tool call needs a "name"')
        if arguments is not None and not isinstance(arguments, (str, dict)):
            raise ValueError(f'{where}: "arguments" of {name} is an object, or raw text')
        call_id = written.get("id") or f"call_{next(self._numbers)}"
        given = cast("str | Mapping[str, object]", {} if arguments is None else arguments)
        return ToolCall(str(call_id), name, given)


def _mapping(value: object, where: str, keys: set[str]) -> Mapping[str, Any]:
    known = ", ".join(sorted(keys))
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object with {known}, got {value!r}")
    written = cast("Mapping[str, Any]", value)
    if unknown := set(written) - keys:
        raise ValueError(f"{where}: unknown {', '.join(map(repr, sorted(unknown)))}; there are {known}")
    return written


def _lines(path: str | os.PathLike[str]) -> Iterable[tuple[object, str]]:
    """Yield each value of a JSON Lines file with its place: file and line."""
    try:
        text = read_host_text(Path(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line), f"{path}, line {number}"
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None


def _chat_tool(tool: ToolSchema) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _chat_message(message: Message) -> Mapping[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "tool":
        written["tool_call_id"] = message.call_id
    if message.turn is not None and message.turn.tool_calls:
        written["tool_calls"] = [_chat_call(call) for call in message.turn.tool_calls]
    return written


def _chat_call(call: ToolCall) -> Mapping[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(serde.dump_any(call.arguments))
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
