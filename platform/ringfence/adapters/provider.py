"""What the adapters of all SDKs share: the parameters of a model, one request, and the cleaning of what comes back."""

from __future__ import annotations

import json
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Self, TypedDict, cast

from ringfence import serde
from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.model import Request, ToolCall, ToolChoice, Turn
from ringfence.adapters.retry import ThrottlePolicy, retry
from ringfence.adapters.strict_schema import strict_schema
from ringfence.extras import missing
from ringfence.runtime.limits import Deadline
from ringfence.runtime.tool_result import sendable

OPENING = "Begin."
"""The first words of the user: providers and chat templates want some, and the prompt itself is the system's."""
REQUEST_SECONDS = 600.0
"""A provider that is silent for so long is given up, where no deadline comes first."""


@dataclass(frozen=True, slots=True)
class ModelParams:
    """How a model is to write. What is None is the provider's default. ``extra`` goes into the request's body."""

    max_tokens: int | None = None
    """Of one turn's output."""
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    def under(self, names: Mapping[str, str], api: str) -> dict[str, Any]:
        """The parameters under the names that an API has for them. Raises ValueError for one that it has not."""
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": [self.stop] if isinstance(self.stop, str) else list(self.stop) or None,
            "seed": self.seed,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if unknown := given.keys() - names.keys():
            raise ValueError(f"{api} have no {' or '.join(sorted(unknown))}: leave it out, or put it in extra")
        found: dict[str, Any] = {names[name]: value for name, value in given.items()}
        return {**found, "extra_body": dict(self.extra)} if self.extra else found


class ProviderApi(ABC):
    """One protocol of one provider. An exception of `turn` means that the answer was not in its shape."""

    @abstractmethod
    def arguments(self, request: Request, *, native_output: bool) -> dict[str, Any]:
        """What the SDK's method is called with for one request."""

    @abstractmethod
    def turn(self, answer: Any) -> Turn:
        """The turn of a whole answer, which is JSON. Raises AnswerError for one that is none."""

    @abstractmethod
    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        """The turn of a stream of the SDK's events."""


class AdapterOptions(TypedDict, total=False):
    """What the adapters of all providers take."""

    tool_choice: ToolChoice
    native_output: bool
    """Say a structured output by the provider's own means (the default); else in words, for servers that cannot."""
    stream: bool
    """True by default."""
    throttle: ThrottlePolicy
    max_turns: int


class SdkAdapter(LoopAdapter):
    """An adapter by a provider's SDK. It owns the client that it makes: `close` it, or use it by ``with``."""

    _api: ProviderApi
    _create: Callable[..., Any]
    """The SDK's method that returns a raw response."""
    _arguments: Mapping[str, Any]
    """What goes into every call of ``_create``."""
    _owned: Any = None
    """The client, if it is the adapter's own."""

    def __init__(
        self,
        model: str,
        *,
        tool_choice: ToolChoice = "auto",
        native_output: bool = True,
        stream: bool = True,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = MAX_TURNS,
    ) -> None:
        self.model = model
        self.tool_choice = tool_choice
        self._native_output = native_output
        self._stream = stream
        self._throttle = throttle or ThrottlePolicy()
        self.max_turns = max_turns

    def respond(self, request: Request) -> Turn:
        """One turn, with as many requests as it takes. Raises what `retry` raises."""
        api, deadline = self._api, request.deadline
        sent = {**self._arguments, **api.arguments(request, native_output=self._native_output)}

        def attempt(number: int) -> Turn:
            def on_text(text: str) -> None:
                if request.on_text is not None and text:
                    request.on_text(text, number)

            seconds = REQUEST_SECONDS
            if deadline is not None:
                seconds = max(min(deadline.remaining().total_seconds(), seconds), 0.001)
            raw = self._create(model=self.model, **sent, stream=self._stream, timeout=seconds)
            with _cut_off_at(deadline, raw.http_response):
                # A server that does not stream answers in one piece, whatever it is asked for.
                if self._stream and not raw.headers.get("content-type", "").startswith("application/json"):
                    with raw.parse() as events:
                        return _sendable(api.turn_of_events(events, on_text))
                text = raw.http_response.read()
            try:
                answer = json.loads(text)
            except ValueError:
                raise ValueError(f"it is not JSON: {text[:80]!r}") from None
            return _sendable(api.turn(answer))

        return retry(attempt, request, self._throttle)

    def close(self) -> None:
        """Close the connections of a client of its own."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def package(name: str, *, extra: str) -> ModuleType:
    """Import a package that is only needed for one provider. The ImportError names the command that installs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ImportError(missing(name, extra), name=name) from None


@contextmanager
def _cut_off_at(deadline: Deadline | None, response: Any) -> Generator[None]:
    """Cut the response off at the deadline: the SDK's timeout is for each silence, and a provider may trickle."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream is not None else None
    if deadline is None or connection is None:
        yield
        return

    def shut_down() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # not closed: this wakes the reader up, which closes it

    timer = threading.Timer(deadline.remaining().total_seconds(), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# To and from the provider

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def _sendable(turn: Turn) -> Turn:
    return replace(turn, text=sendable(turn.text), raw=_sendable_json(turn.raw))


def _sendable_json(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, list):
        return [_sendable_json(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {sendable(key): _sendable_json(each) for key, each in cast("dict[str, Any]", value).items()}
    return value


def raw_of(turn: Turn, api: str) -> list[dict[str, Any]] | None:
    """The parts of a turn as this API sent them. None for the turn of another: a run may go on with another model."""
    return cast("dict[str, Any]", turn.raw).get(api) if isinstance(turn.raw, dict) else None


def name_to_send(call: ToolCall) -> str:
    """The name of a call in a form that every provider accepts, whatever the model had made up."""
    return _NOT_IN_NAMES.sub("_", call.name)[:64] or "unnamed"


def arguments_to_send(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call as an object: servers choke on anything else, and the model reads of that anyway."""
    if not isinstance(call.arguments, str):
        return _sendable_json(serde.dump_any(call.arguments))
    try:
        return _sendable_json(serde.read_json(call.arguments))
    except (ValueError, RecursionError):
        return {}


def count_tokens(usage: Any, *path: str) -> int | None:
    """A count of tokens at a path of keys or attributes, or None where there is none."""
    for name in path:
        usage = cast("Mapping[str, Any]", usage).get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
    return usage if type(usage) is int and usage >= 0 else None


def schema_in_words(schema: Mapping[str, object]) -> str:
    """The structured output for a model whose provider has no way to say it."""
    written = json.dumps(schema, ensure_ascii=False)
    return f"\n\nYour final answer is one JSON value in a ```json fence. It fits this JSON Schema:\n\n{written}"


def named_schema(request: Request, schema: Mapping[str, object]) -> dict[str, Any]:
    """The schema of the answer as OpenAI's interfaces have it."""
    name = f"{_NOT_IN_NAMES.sub('_', request.prompt_name)[:48] or 'answer'}_schema"
    strict = strict_schema(schema)
    return {"name": name, "schema": strict or schema, "strict": strict is not None}
