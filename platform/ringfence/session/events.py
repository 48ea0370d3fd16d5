"""The events of an evaluation, and the dispatcher that publishes them to observers."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import UUID, uuid4

from ringfence.limits import RunContext, TokenUsage, utc_now

if TYPE_CHECKING:
    from ringfence.session.tool_result import ToolResult

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT")
OutputCo = TypeVar("OutputCo", covariant=True)

_event_numbers = itertools.count()


def _start_event_numbers() -> None:
    global _event_numbers  # noqa: PLW0603
    # The low 48 bits count, which is quicker than drawing them; the others are drawn once a process, forked ones too.
    _event_numbers = itertools.count(uuid4().int & ~0xFFFF_FFFF_FFFF)


_start_event_numbers()
os.register_at_fork(after_in_child=_start_event_numbers)


def new_event_id() -> UUID:
    """A UUID that no other event has, in whatever process."""
    return UUID(int=next(_event_numbers))


@dataclass(frozen=True, slots=True)
class RejectedToolParams:
    """Stands for the params of a call whose arguments did not fit, or that named no tool."""

    raw_arguments: object
    """What the model wrote: a mapping, or text that may not even be JSON."""
    error: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """Published when a tool call begins, on its handler's thread and context. A `Receipt` follows.

    The event is made only if it has a subscriber.
    """

    call_id: str
    name: str
    """The name of the tool as the model wrote it."""
    description: str | None
    """The description of the tool. None if no tool has the name."""
    arguments: Mapping[str, object] | str | None
    prompt_name: str
    session_id: UUID
    started_at: datetime


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """Published for each piece of output that a command of a running tool call writes, on its handler's thread.

    The event is made only if it has a subscriber.
    """

    call_id: str
    text: str
    """Both streams. Bytes that are not UTF-8 are replaced."""


@dataclass(frozen=True, slots=True)
class ToolInvoked:
    """Published when a tool call has ended, with any outcome.

    An outer call that fails later rolls this call back. A `Receipt` with the same ``call_id`` is then published, whose
    ``rolled_back_by`` names the outer call.

    ``params`` is the params dataclass, or a `RejectedToolParams`. ``rendered_output`` is the rendered value, which the
    model was sent after the result's message. It is whole, even where the model was sent a part of it. It is "" where
    the model was sent no value. A `ToolExecutor` leaves ``usage`` None; other publishers may set it. The usage of an
    evaluation is in `PromptExecuted` and `ModelTurn`.
    """

    prompt_name: str
    adapter: str
    name: str
    params: object
    result: ToolResult[object]
    session_id: UUID | None = None
    created_at: datetime = field(default_factory=utc_now)
    usage: TokenUsage | None = None
    rendered_output: str = ""
    call_id: str | None = None
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_event_id)


@dataclass(frozen=True, slots=True)
class PromptRendered:
    """A prompt has been rendered; ``rendered_prompt`` is the text that goes to the model."""

    prompt_ns: str
    prompt_key: str
    prompt_name: str | None
    adapter: str
    session_id: UUID | None
    render_inputs: Sequence[object]
    """The params dataclasses that were bound."""
    rendered_prompt: str
    created_at: datetime = field(default_factory=utc_now)
    descriptor: object = None
    """The `PromptDescriptor` of a prompt with an override store; None where nothing can be replaced."""
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_event_id)


@dataclass(frozen=True)
class PromptResponse(Generic[OutputCo]):
    """The end of an evaluation: ``output`` where the prompt declares an output type, else ``text``."""

    prompt_name: str
    text: str | None = None
    output: OutputCo | None = None


@dataclass(frozen=True, slots=True)
class PromptExecuted:
    """An evaluation has ended with a response; ``usage`` is the sum over its provider calls."""

    prompt_name: str
    adapter: str
    result: PromptResponse[object]
    session_id: UUID | None = None
    created_at: datetime = field(default_factory=utc_now)
    usage: TokenUsage | None = None
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_event_id)


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One tool as the model sees it. ``parameters`` is a JSON Schema, and ``examples`` are fitting arguments."""

    name: str
    description: str
    parameters: Mapping[str, object]
    examples: Sequence[Mapping[str, object]] = ()


@dataclass(frozen=True, slots=True)
class RenderedTools:
    """The tools that go to the model with a rendered prompt, whose event has the id ``render_event_id``."""

    prompt_ns: str
    prompt_key: str
    tools: Sequence[ToolSchema]
    render_event_id: UUID
    session_id: UUID | None = None
    created_at: datetime = field(default_factory=utc_now)
    run_context: RunContext | None = None
    event_id: UUID = field(default_factory=new_event_id)

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.tools)

    @property
    def tool_count(self) -> int:
        return len(self.tools)

    def get_tool(self, name: str) -> ToolSchema | None:
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """A handler, or a session's reducer, that raised."""

    handler: Callable[..., object]
    error: Exception


@dataclass(slots=True)
class DispatchResult:
    """The handlers that received an event, in order, and the failures."""

    event: object
    handlers_invoked: tuple[Callable[..., object], ...] = ()
    errors: tuple[HandlerFailure, ...] = ()

    @property
    def handled_count(self) -> int:
        return len(self.handlers_invoked)

    @property
    def ok(self) -> bool:
        return not self.errors

    def raise_if_errors(self) -> None:
        """Raise an ExceptionGroup of the handlers' errors, if there are any."""
        if self.errors:
            raise ExceptionGroup(
                f"{len(self.errors)} handlers of {type(self.event).__name__} failed",
                [failure.error for failure in self.errors],
            )


class EventReader(Protocol):
    """Receives every event before the handlers. A session is a reader."""

    def read(self, event: object) -> tuple[HandlerFailure, ...]: ...


class Dispatcher(Protocol):
    """Publishes events to the handlers of their exact type, in the order of their subscription, on the thread that
    dispatches and before `dispatch` returns."""

    def attach(self, reader: EventReader) -> None:
        """Let `reader` get every event from now on. The dispatcher does not keep it alive."""
        ...

    def subscribe(self, event_type: type[EventT], handler: Callable[[EventT], object]) -> None: ...

    def unsubscribe(self, event_type: type[EventT], handler: Callable[[EventT], object]) -> bool:
        """Remove the handler's first subscription; False where there is none."""
        ...

    def has_handlers(self, event_type: type[Any]) -> bool:
        """Whether the event type has a subscriber."""
        ...

    def dispatch(self, event: object, *, applied_by: EventReader | None = None) -> DispatchResult:
        """Publish an event. An `Exception` of a handler is not raised. The reader ``applied_by`` is left out."""
        ...


class InProcessDispatcher:
    """A `Dispatcher` for one process; any thread may use it."""

    def __init__(self) -> None:
        # The tuples are replaced and never changed, so `dispatch` goes through one without a lock, and a handler may
        # subscribe and unsubscribe: that counts from the next event on.
        self._handlers: dict[type[Any], tuple[Callable[[Any], object], ...]] = {}
        self._readers: tuple[weakref.ref[EventReader], ...] = ()
        self._lock = threading.RLock()  # re-entrant, since a reader may be collected at any line

    def attach(self, reader: EventReader) -> None:
        with self._lock:
            self._readers = (*self._readers, weakref.ref(reader, self._detach))

    def _detach(self, gone: weakref.ref[EventReader]) -> None:
        with self._lock:
            self._readers = tuple(one for one in self._readers if one is not gone)

    def subscribe(self, event_type: type[EventT], handler: Callable[[EventT], object]) -> None:
        with self._lock:
            self._handlers[event_type] = (*self._handlers.get(event_type, ()), handler)

    def unsubscribe(self, event_type: type[EventT], handler: Callable[[EventT], object]) -> bool:
        with self._lock:
            handlers = self._handlers.get(event_type, ())
            if handler not in handlers:
                return False
            at = handlers.index(handler)
            self._handlers[event_type] = handlers[:at] + handlers[at + 1 :]
            return True

    def has_handlers(self, event_type: type[Any]) -> bool:
        return bool(self._handlers.get(event_type))

    def dispatch(self, event: object, *, applied_by: EventReader | None = None) -> DispatchResult:
        failures: tuple[HandlerFailure, ...] = ()
        for reference in self._readers:
            reader = reference()
            if reader is not None and reader is not applied_by:
                failures += reader.read(event)
        handlers = self._handlers.get(type(event), ())
        for handler in handlers:
            try:
                handler(event)
            except Exception as error:
                logger.exception("a handler of %s failed: %r", type(event).__name__, handler)
                failures = (*failures, HandlerFailure(handler, error))
        return DispatchResult(event, handlers, failures)
