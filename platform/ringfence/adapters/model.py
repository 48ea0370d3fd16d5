"""The requests and turns that the evaluation loop exchanges with a model, and the events of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from uuid import UUID

from ringfence.limits import Deadline, RunContext, TokenUsage, utc_now
from ringfence.session.events import ToolSchema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's request to run a tool. ``arguments`` is the JSON text that the model wrote, or a mapping."""

    call_id: str
    name: str
    arguments: str | Mapping[str, object]


ToolChoice = Literal["auto", "none", "required"] | Mapping[str, str]
"""Whether a model has to call tools. ``{"name": NAME}`` names the tool that the model has to call first."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of a model: text, tool calls, or both. A turn without tool calls is the last one."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: TokenUsage | None = None
    parsed: object = None
    """The structured output, if the provider's SDK has parsed it."""
    raw: object = None
    """The provider's own form of the turn, for the next request to the same provider."""
    ended: Literal["whole", "cut", "refused"] = "whole"
    """"cut" for a turn that reached the limit of tokens, "refused" if the model or its provider refused to answer."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    A message of the assistant has a `Turn`. A message of a tool has the id of the call that it answers. A message of
    the user has text of the evaluation itself.
    """

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    turn: Turn | None = None
    call_id: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a model: the conversation so far, the tools on offer, and the schema of a structured output."""

    prompt_name: str
    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    output_schema: Mapping[str, object] | None = None
    deadline: Deadline | None = None
    tool_choice: ToolChoice = "auto"
    on_text: Callable[[str, int], object] | None = None
    """Receives each piece of text and the number of its attempt. A higher number voids all earlier pieces."""
    on_retry: Callable[[str, int, float], object] | None = None
    """Receives the reason of a failed attempt, the number of the next attempt (from 2), and the seconds until then."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """Published for each piece of a turn's text while the model still writes.

    A higher ``attempt`` means that the connection broke and the turn is requested again: pieces of earlier attempts
    are void. A `ModelTurn` with the whole turn follows.
    """

    prompt_name: str
    number: int
    """The number of the turn, as in the `ModelTurn` that follows."""
    text: str
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class ModelRetry:
    """Published when a request to the provider has failed and is going to be repeated."""

    prompt_name: str
    number: int
    """The number of the requested turn, as in the `ModelTurn` that follows."""
    reason: str
    attempt: int
    """The number of the next attempt, from 2."""
    seconds: float
    """The seconds until the next attempt."""


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """Published when the model has answered and before its tool calls run. ``number`` counts from 1."""

    prompt_name: str
    number: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class EvaluationStarted:
    """Published when an evaluation begins. `EvaluationEnded` always follows, on the same thread."""

    evaluation_id: UUID
    prompt_name: str
    provider: str
    """The adapter's ``provider``, such as "openai" or "anthropic", or else the name of the adapter's class."""
    model: str | None
    session_id: UUID
    run_context: RunContext | None = None
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """Published when an evaluation ends. ``error`` is the exception of an evaluation without a response."""

    evaluation_id: UUID
    usage: TokenUsage
    error: BaseException | None = None
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class ModelRequested:
    """Published before the model is asked for turn ``number``. `ModelAnswered` follows."""

    evaluation_id: UUID
    number: int
    request: Request
    provider: str
    model: str | None
    session_id: UUID
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class ModelAnswered:
    """Published when a request to the model has ended, with the turn or with the ``error``."""

    evaluation_id: UUID
    number: int
    turn: Turn | None
    error: BaseException | None = None
    created_at: datetime = field(default_factory=utc_now)


@dataclass(frozen=True, slots=True)
class MessageAdded:
    """Published when a message is added to the conversation. The instructions are no message."""

    prompt_name: str
    message: Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that the next evaluation of its prompt continues, if the session contains it.

    The evaluation first runs the calls of the last turn that have no answer yet. Then it asks the model.
    """

    prompt_name: str
    messages: tuple[Message, ...]
    """The messages without the instructions, which the evaluation renders again."""
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
