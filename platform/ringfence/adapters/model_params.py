"""How a model is to write: the parameters that providers have in common, and their names there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelParams:
    """What is None is the provider's default. ``extra`` goes into the request's body as it is."""

    max_tokens: int | None = None
    """Of one turn's output."""
    temperature: float | None = None
    top_p: float | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    def of_chat(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        found |= {"stop": list(self.stop)} if self.stop else {}
        found |= {"max_completion_tokens": self.max_tokens} if self.max_tokens is not None else {}
        return found | self._extra()

    def of_responses(self) -> dict[str, Any]:
        """Raises ValueError for what Responses have not."""
        self._refuse("Responses", "stop", "seed", "presence_penalty", "frequency_penalty")
        found = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        found |= {"max_output_tokens": self.max_tokens} if self.max_tokens is not None else {}
        return found | self._extra()

    def of_messages(self, max_tokens: int) -> dict[str, Any]:
        """``max_tokens`` has to be there, so there is a default. Raises ValueError for what Messages have not."""
        self._refuse("Messages", "seed", "presence_penalty", "frequency_penalty")
        found: dict[str, Any] = {"max_tokens": max_tokens if self.max_tokens is None else self.max_tokens}
        found |= {"stop_sequences": list(self.stop)} if self.stop else {}
        # The SDK's method has no arguments for these.
        body = {name: value for name in ("temperature", "top_p") if (value := getattr(self, name)) is not None}
        return found | ({"extra_body": {**body, **self.extra}} if body or self.extra else {})

    def _extra(self) -> dict[str, Any]:
        return {"extra_body": dict(self.extra)} if self.extra else {}

    def _refuse(self, what: str, *names: str) -> None:
        if given := [name for name in names if getattr(self, name) not in (None, ())]:
            raise ValueError(f"{what} have no {' or '.join(given)}: leave it out, or put it in extra")
