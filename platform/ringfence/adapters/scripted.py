"""A scripted model, for tests, demonstrations and replays without a network."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from ringfence import serde
from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.model import Message, Request, ToolCall, Turn
from ringfence.errors import PromptEvaluationError, format_error
from ringfence.filesystem.edits import read_host_text
from ringfence.runtime.limits import TokenUsage

T = TypeVar("T")

ScriptedTurn = Mapping[str, Any]
"""``{"text": ..., "tool_calls": [{"name": ..., "arguments": {...} or raw text}], "usage": {...}}``, all optional.
``"ended": "cut"`` or ``"refused"`` is as in `Turn`."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages in the style of a chat: ``{"role": ..., "content": ...}``, with ``tool_calls`` or ``tool_call_id``."""

TURN_KEYS = frozenset({"text", "tool_calls", "usage", "ended"})
ENDINGS = ("whole", "cut", "refused")
CALL_KEYS = frozenset({"name", "arguments", "id"})


class ScriptedAdapter(LoopAdapter):
    """Plays turns in the order in which they are asked for, nested evaluations included.

    ``requests`` keeps what the model would have been sent, one mapping a request with ``messages``, ``tools`` and,
    for a structured output, ``response_format``. They share the messages that they have in common.
    """

    provider = "scripted"

    def __init__(
        self,
        turns: Sequence[ScriptedTurn] | str | os.PathLike[str] | Callable[[Conversation], ScriptedTurn],
        *,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """``turns`` is a list, the path of a JSON Lines file, or a function of the conversation so far.

        Raises:
            ValueError: a turn that is not of the right shape, with its number.
            OSError: the file cannot be read.
        """
        self.requests: list[Mapping[str, Any]] = []
        self.max_turns = max_turns
        self.tool_choice = "auto"
        self._written: dict[int, tuple[object, Mapping[str, Any]]] = {}
        self._numbers = count(1)
        self._function: Callable[[Conversation], ScriptedTurn] | None = None
        self._turns = deque[Turn]()
        if callable(turns):
            self._function = turns
        elif isinstance(turns, (str, os.PathLike)):
            self._turns.extend(self._turn(turn, where) for turn, where in _lines(Path(turns)))
            if not self._turns:
                raise ValueError(f"{os.fspath(turns)} has no turns")
        else:
            self._turns.extend(self._turn(turn, f"turn {n}") for n, turn in enumerate(turns, 1))

    @property
    def unused(self) -> int:
        """How many turns nobody has asked for yet."""
        return len(self._turns)

    def respond(self, request: Request) -> Turn:
        messages = [self._once(message, _as_chat) for message in request.messages]
        sent: dict[str, Any] = {"messages": messages, "tools": [self._once(tool, _tool) for tool in request.tools]}
        if request.output_schema is not None:
            sent["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.output_schema}}
        self.requests.append(sent)
        if self._function is not None:
            try:
                return self._numbered(self._turn(self._function(messages), f"turn {len(self.requests)}"), request)
            except Exception as error:
                reason = str(error) if isinstance(error, ValueError) else format_error(error)
                raise PromptEvaluationError(reason, prompt_name=request.prompt_name, phase="response") from error
        if not self._turns:
            calls = ", since its last turn calls tools" if messages and messages[-1]["role"] == "tool" else ""
            raise PromptEvaluationError(
                f"the script has no turn left, but {request.prompt_name} asks for one more (request "
                f'{len(self.requests)}){calls}: end it with a turn that calls none, such as {{"text": "Done."}}',
                prompt_name=request.prompt_name,
                phase="response",
            )
        return self._numbered(self._turns.popleft(), request)

    def _numbered(self, turn: Turn, request: Request) -> Turn:
        """A turn whose calls have ids of their own in this conversation: one that is resumed has calls of a script that
        began with the same number."""
        taken = {call.call_id for message in request.messages if message.turn for call in message.turn.tool_calls}
        calls: list[ToolCall] = []
        for call in turn.tool_calls:
            call_id = call.call_id
            while not call_id or call_id in taken:
                call_id = f"call_{next(self._numbers)}"
            taken.add(call_id)
            calls.append(replace(call, call_id=call_id))
        return replace(turn, tool_calls=tuple(calls))

    def _once(self, part: T, written: Callable[[T], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The form of a message or tool in `requests`, made once: a request repeats all messages of those before it."""
        kept = self._written.get(id(part))
        if kept is None:
            kept = self._written[id(part)] = (part, written(part))  # with the part, so that its id stays its own
        return kept[1]

    def _turn(self, turn: object, where: str) -> Turn:
        written = _mapping(turn, where, TURN_KEYS)
        text = "" if written.get("text") is None else written["text"]
        calls = () if written.get("tool_calls") is None else written["tool_calls"]
        if not isinstance(text, str) or not isinstance(calls, (list, tuple)):
            raise ValueError(f'{where}: "text" is a string and "tool_calls" a list')
        asked = tuple(self._call(call, where) for call in cast("Sequence[object]", calls))
        usage = _mapping(written.get("usage") or {}, f"{where}, usage", frozenset(TokenUsage.__dataclass_fields__))
        if not all(type(tokens) is int and tokens >= 0 for tokens in usage.values()):
            raise ValueError(f"{where}, usage: tokens are whole numbers from 0, not {usage!r}")
        ended = written.get("ended", "whole")
        if ended not in ENDINGS:
            raise ValueError(f'{where}: "ended" is one of {", ".join(ENDINGS)}, not {ended!r}')
        return Turn(text, asked, TokenUsage(**usage) if usage else None, ended=ended)

    def _call(self, call: object, where: str) -> ToolCall:
        written = _mapping(call, f"{where}, tool call", CALL_KEYS)
        name, arguments = written.get("name"), written.get("arguments")
        if not isinstance(name, str):
            raise ValueError(f'{where}: a tool call needs a "name"')
        if arguments is not None and not isinstance(arguments, (str, dict)):
            raise ValueError(f'{where}: "arguments" of {name} is an object, or raw text')
        return ToolCall(
            str(written.get("id") or ""),
            name,
            cast("str | Mapping[str, object]", {} if arguments is None else arguments),
        )


def _mapping(value: object, where: str, keys: frozenset[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object with {', '.join(sorted(keys))}, got {value!r}")
    written = cast("Mapping[str, Any]", value)
    if extra := set(written) - keys:
        raise ValueError(f"{where}: unknown {', '.join(map(repr, sorted(extra)))}; there are {', '.join(sorted(keys))}")
    return written


def _lines(path: Path) -> Iterator[tuple[object, str]]:
    try:
        text = read_host_text(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line), f"{path}, line {number}"
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None


def _tool(tool: Any) -> Mapping[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _as_chat(message: Message) -> Mapping[str, Any]:
    if message.turn is not None and message.turn.tool_calls:
        calls = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments
                    if isinstance(call.arguments, str)
                    else json.dumps(serde.dump_any(call.arguments)),
                },
            }
            for call in message.turn.tool_calls
        ]
        return {"role": message.role, "content": message.text, "tool_calls": calls}
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.text}
    return {"role": message.role, "content": message.text}
