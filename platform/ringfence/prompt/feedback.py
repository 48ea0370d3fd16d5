"""Feedback: texts that providers add to a tool's answer now and then, such as how much time is left."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ringfence.errors import PromptValidationError
from ringfence.runtime.limits import Deadline, utc_now

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt
    from ringfence.runtime.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FeedbackContext:
    """The state of an evaluation for a provider; ``call_index`` counts its tool calls, from 1."""

    prompt: Prompt[Any]
    session: Session
    call_index: int
    deadline: Deadline | None = None


@runtime_checkable
class FeedbackProvider(Protocol):
    """A source of texts for the model. An exception of a provider is logged and ends nothing."""

    @property
    def name(self) -> str: ...

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Whether there is a text now; asked when the trigger is due."""
        ...

    def provide(self, *, context: FeedbackContext) -> str:
        """The text; an empty one is not sent."""
        ...


@dataclass(frozen=True, slots=True)
class FeedbackTrigger:
    """When a provider is due: so many calls or seconds after its last text, whichever comes first."""

    every_n_calls: int | None = None
    every_n_seconds: float | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.every_n_calls, self.every_n_seconds) if one is not None]
        if not given or min(given) <= 0:
            raise PromptValidationError("a trigger needs every_n_calls or every_n_seconds, more than 0")

    def is_due(self, calls: int, seconds: float) -> bool:
        """Whether so many calls or seconds after the last text are enough."""
        return calls >= (self.every_n_calls or math.inf) or seconds >= (self.every_n_seconds or math.inf)


@dataclass(frozen=True, slots=True)
class FeedbackProviderConfig:
    """A provider of feedback, and when it is asked."""

    provider: FeedbackProvider
    trigger: FeedbackTrigger


@dataclass(frozen=True, slots=True)
class Feedback:
    """One text that was sent to the model, in the session's slice of its type."""

    prompt_name: str
    provider: str
    text: str
    call_index: int
    created_at: datetime = field(default_factory=utc_now)


class Feedbacks:
    """The providers of one evaluation, and when each last had a text."""

    def __init__(
        self, providers: Iterable[FeedbackProviderConfig], prompt_name: str, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._providers = tuple(providers)
        self._prompt_name = prompt_name
        self._clock = clock
        self._last = [(0, clock()) for _ in self._providers]

    def after(self, context: FeedbackContext) -> str:
        """The text of the first provider that is due after a call and has one. The session gets it, too."""
        for place, config in enumerate(self._providers):
            provider, (last_index, last_time) = config.provider, self._last[place]
            calls, seconds = context.call_index - last_index, (self._clock() - last_time).total_seconds()
            try:
                if not config.trigger.is_due(calls, seconds) or not provider.should_run(context=context):
                    continue
                text = str(provider.provide(context=context)).strip()
            except Exception:
                logger.warning("the feedback provider %s failed", provider.name, exc_info=True)
                continue
            if text:
                now = self._clock()
                self._last[place] = context.call_index, now
                context.session.dispatch(Feedback(self._prompt_name, provider.name, text, context.call_index, now))
                return text
        return ""
