"""Feedback: words for the model that come along with a tool's answer now and then, such as how much time is left."""

from __future__ import annotations

import logging
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
    """What a provider may look at; ``call_index`` counts the tool calls of the evaluation, from 1."""

    prompt: Prompt[Any]
    session: Session
    call_index: int
    deadline: Deadline | None = None


@runtime_checkable
class FeedbackProvider(Protocol):
    """Has something to say to the model now and then. What it raises is logged and that is all."""

    @property
    def name(self) -> str: ...

    def should_run(self, *, context: FeedbackContext) -> bool:
        """Whether there is something to say now; asked when the trigger is due."""
        ...

    def provide(self, *, context: FeedbackContext) -> str:
        """The words; none where they are empty."""
        ...


@dataclass(frozen=True, slots=True)
class FeedbackTrigger:
    """When a provider is due: so many calls, or so many seconds, after it last spoke. With both, either will do."""

    every_n_calls: int | None = None
    every_n_seconds: float | None = None

    def __post_init__(self) -> None:
        given = [one for one in (self.every_n_calls, self.every_n_seconds) if one is not None]
        if not given or min(given) <= 0:
            raise PromptValidationError("a trigger needs every_n_calls or every_n_seconds, more than 0")


@dataclass(frozen=True, slots=True)
class FeedbackProviderConfig:
    """A provider of feedback, and when it is asked."""

    provider: FeedbackProvider
    trigger: FeedbackTrigger


@dataclass(frozen=True, slots=True)
class Feedback:
    """What was said, in the session's slice of its type."""

    prompt_name: str
    provider: str
    text: str
    call_index: int
    created_at: datetime = field(default_factory=utc_now)


class Feedbacks:
    """Whose turn it is, over the tool calls of one evaluation."""

    def __init__(
        self, providers: Iterable[FeedbackProviderConfig], prompt_name: str, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._providers = tuple(providers)
        self._prompt_name = prompt_name
        self._clock = clock
        self._spoke = [(0, clock()) for _ in self._providers]

    def after(self, context: FeedbackContext) -> str:
        """What the first provider that is due has to say after a call; it is in the session, too."""
        for place, config in enumerate(self._providers):
            provider = config.provider
            try:
                if not self._due(config.trigger, context.call_index, *self._spoke[place]) or not provider.should_run(
                    context=context
                ):
                    continue
                text = str(provider.provide(context=context)).strip()
            except Exception:
                logger.warning("the feedback provider %s failed", provider.name, exc_info=True)
                continue
            if text:
                now = self._clock()
                self._spoke[place] = context.call_index, now
                context.session.dispatch(Feedback(self._prompt_name, provider.name, text, context.call_index, now))
                return text
        return ""

    def _due(self, trigger: FeedbackTrigger, call_index: int, spoke_index: int, at: datetime) -> bool:
        calls, seconds = trigger.every_n_calls, trigger.every_n_seconds
        if calls is not None and call_index - spoke_index >= calls:
            return True
        return seconds is not None and (self._clock() - at).total_seconds() >= seconds
