"""What a model is to the evaluation loop, and the events of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from uuid import UUID

from ringfence.runtime.events import ToolSchema
from ringfence.runtime.limits import Deadline, RunContext, TokenUsage, utc_now


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to run a tool; ``arguments`` is JSON text as it came, or a mapping."""

    call_id: str
    name: str
    arguments: str | Mapping[str, object]


ToolChoice = Literal["auto", "none", "required"] | Mapping[str, str]
"""Whether a model has to call tools; ``{"name": NAME}`` names the one that it has to call first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a model: text, tool calls, or both. Without tool calls it is the last one."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage | None = None
    parsed: object = None
    """The structured output, where the provider has parsed it itself."""
    raw: object = None
    """What the provider wants to see again, as it came."""
    ended: Literal["whole", "cut", "refused"] = "whole"
    """"cut" at the provider's limit of tokens; "refused" where the model or its provider would not answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation. An assistant's carries the `Turn`, a tool's the id of the call it answers; a user's
    is what the evaluation itself has to tell the model."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    turn: Turn | None = None
    call_id: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """What a model is asked: the conversation so far, the tools on offer, and the schema of a structured output."""

    prompt_name: str
    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    output_schema: Mapping[str, object] | None = None
    deadline: Deadline | None = None
    tool_choice: ToolChoice = "auto"
    on_text: Callable[[str, int], object] | None = None
    """Gets each piece of text, and the number of the attempt it belongs to. A higher number voids earlier pieces."""
    on_retry: Callable[[str, int, float], object] | None = None
    """Gets the reason of a failed attempt, the number of the next one, from 2, and the seconds until then."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """An event for observers: a piece of a turn's text, while the model still writes.

    Pieces of one ``attempt`` belong together. When a higher one begins, the connection broke and the turn is asked for
    again. The whole turn comes as a `ModelTurn`.
    """

    prompt_name: str
    number: int
    """The turn's, as in the `ModelTurn` that follows."""
    text: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ModelRetry:
    """An event for observers: the provider did not answer, and is asked again."""

    prompt_name: str
    number: int
    """The turn's that it is asked for, as in the `ModelTurn` that follows."""
    reason: str
    attempt: int
    """The next one's; from 2."""
    seconds: float
    """How long that waits."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """An event for observers: the model has answered, its tool calls run next. ``number`` counts from 1."""

    prompt_name: str
    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class EvaluationStarted:
    """An event for observers: an evaluation begins. `EvaluationEnded` follows on the same thread, however it ends."""

    evaluation_id: UUID
    prompt_name: str
    provider: str
    """Who has the model: "openai", "anthropic" ...; the name of the adapter's class where that does not say."""
    model: str | None
    session_id: UUID
    run_context: RunContext | None = None
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """An event for observers; ``error`` is what left the evaluation, where it came to no response."""

    evaluation_id: UUID
    usage: TokenUsage
    error: BaseException | None = None
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class ModelRequested:
    """An event for observers: a request goes to the model, for its turn ``number``. `ModelAnswered` follows."""

    evaluation_id: UUID
    number: int
    request: Request
    provider: str
    model: str | None
    session_id: UUID
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class ModelAnswered:
    """An event for observers: the model's turn, or the ``error`` that came in its place."""

    evaluation_id: UUID
    number: int
    turn: Turn | None
    error: BaseException | None = None
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class MessageAdded:
    """An event for observers: a message has joined the conversation. None is published for the instructions."""

    prompt_name: str
    message: Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to go on with. Put into a session, the next evaluation of that prompt begins with it: calls of the
    last turn that have no answer yet run first, then the model is asked."""

    prompt_name: str
    messages: tuple[Message, ...]
    """Without the instructions, which are rendered anew."""
    news: str = ""
    """A message of the user that is added before the model is asked."""

    def unanswered(self) -> tuple[ToolCall, ...]:
        """The calls of the last turn that have no answer."""
        answered: set[str] = set()
        for message in reversed(self.messages):
            if message.turn is not None:
                return tuple(call for call in message.turn.tool_calls if call.call_id not in answered)
            answered.add(message.call_id)
        return ()
