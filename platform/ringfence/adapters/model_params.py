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
    stop: str | Sequence[str] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    def of_chat(self) -> dict[str, Any]:
        return _given(
            max_completion_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self._stops(),
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            extra_body=dict(self.extra) or None,
        )

    def of_responses(self) -> dict[str, Any]:
        """Raises ValueError for what Responses have not."""
        self._refuse("Responses", stop=self._stops(), seed=self.seed)
        return _given(
            max_output_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            extra_body=dict(self.extra) or None,
        )

    def of_messages(self, max_tokens: int) -> dict[str, Any]:
        """``max_tokens`` has to be there, so there is a default. Raises ValueError for what Messages have not."""
        self._refuse("Messages", seed=self.seed)
        # The SDK's method has no arguments for these.
        body = {**_given(temperature=self.temperature, top_p=self.top_p), **self.extra}
        return _given(
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            stop_sequences=self._stops(),
            extra_body=body or None,
        )

    def _stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop) or None

    def _refuse(self, what: str, **others: object) -> None:
        others |= {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        if given := list(_given(**others)):
            raise ValueError(f"{what} have no {' or '.join(given)}: leave it out, or put it in extra")


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
