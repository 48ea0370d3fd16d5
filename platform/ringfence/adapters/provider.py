"""The base of the adapters that use a provider's SDK: parameters of a model, requests, and conversions."""

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
from ringfence.adapters.prices import cost_of, table_name, why_no_cost
from ringfence.adapters.retry import ThrottlePolicy, retry
from ringfence.adapters.strict_schema import strict_schema
from ringfence.extras import missing
from ringfence.limits import Deadline
from ringfence.session.tool_result import sendable

OPENING = "Begin."
"""The first message of the user. Providers and chat templates require one, and the prompt is the system message."""
REQUEST_SECONDS = 600.0
"""The timeout of a request, if no deadline comes first: the longest silence of a provider, in seconds."""


@dataclass(frozen=True, slots=True)
class ModelParams:
    """The parameters of a model. None means the provider's default. ``extra`` is added to the request's body."""

    max_tokens: int | None = None
    """The limit of output tokens of one turn."""
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    def under(self, names: Mapping[str, str], api: str) -> dict[str, Any]:
        """Return the parameters under the names of an API. Raises ValueError for one that the API lacks."""
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
    """One API of one provider. Any exception of `turn` means that the answer has not the shape of the API."""

    @abstractmethod
    def arguments(self, request: Request, *, native_output: bool) -> dict[str, Any]:
        """The arguments of the SDK's method for one request."""

    @abstractmethod
    def turn(self, answer: Any) -> Turn:
        """Build the turn from a whole answer, which is JSON. Raises AnswerError for an answer that is no turn."""

    @abstractmethod
    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        """Build the turn from a stream of the SDK's events."""


class AdapterOptions(TypedDict, total=False):
    """The options of the adapters of all providers."""

    tool_choice: ToolChoice
    native_output: bool
    """Whether the provider's own feature for structured output is used, which is the default.

    False describes the output to the model in words, for servers without the feature.
    """
    stream: bool
    """Whether answers are streamed, which is the default."""
    throttle: ThrottlePolicy
    max_turns: int


class SdkAdapter(LoopAdapter):
    """An adapter by a provider's SDK. It owns the client that it makes: `close` it, or use it by ``with``."""

    _api: ProviderApi
    _create: Callable[..., Any]
    """The SDK's method that returns a raw response."""
    _arguments: Mapping[str, Any]
    """The arguments of every call of ``_create``."""
    _owned: Any = None
    """The client, if the adapter has made it itself."""
    _server: str
    """The base URL of the client."""

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
        """Return the model's turn; a failed request is repeated. Raises the errors of `retry`."""
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
                # A server that cannot stream answers in one piece even when a stream is requested.
                if self._stream and not raw.headers.get("content-type", "").startswith("application/json"):
                    with raw.parse() as events:
                        return _sendable(api.turn_of_events(events, on_text))
                text = raw.http_response.read()
            try:
                answer = json.loads(text)
            except ValueError:
                raise ValueError(f"it is not JSON: {text[:80]!r}") from None
            return _sendable(api.turn(answer))

        turn = retry(attempt, request, self._throttle)
        if turn.usage is None:
            return turn
        cost = cost_of(turn.usage, self.model, self._server)
        prices = None if cost is None else table_name()
        return replace(turn, usage=replace(turn.usage, cost_usd=cost, prices=prices))

    def why_no_cost(self) -> str | None:
        """Return why the cost of a turn is unknown. None if it is known."""
        return why_no_cost(self.model, self._server)

    def close(self) -> None:
        """Close the client that the adapter has made. A client that was passed in stays open."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def package(name: str, *, extra: str) -> ModuleType:
    """Import a provider's package. Raises ImportError with the command that installs the package."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ImportError(missing(name, extra), name=name) from None


@contextmanager
def _cut_off_at(deadline: Deadline | None, response: Any) -> Generator[None]:
    """Shut the response's connection down at the deadline. The SDK's timeout only limits each single silence."""
    stream = response.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream is not None else None
    if deadline is None or connection is None:
        yield
        return

    def shut_down() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # not `close`: a shutdown wakes the reader up, which closes it

    timer = threading.Timer(deadline.remaining().total_seconds(), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# Conversions for requests and answers

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
    """The parts of a turn as this API sent them. None for a turn of another API: a run may change its model."""
    return cast("dict[str, Any]", turn.raw).get(api) if isinstance(turn.raw, dict) else None


def name_to_send(call: ToolCall) -> str:
    """The name of a call in a form that every provider accepts, even if the model invented it."""
    return _NOT_IN_NAMES.sub("_", call.name)[:64] or "unnamed"


def arguments_to_send(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call as an object. Arguments that are none become an empty one, since servers reject them."""
    if not isinstance(call.arguments, str):
        return _sendable_json(serde.dump_any(call.arguments))
    try:
        return _sendable_json(serde.read_json(call.arguments))
    except (ValueError, RecursionError):
        return {}


def count_tokens(usage: Any, *path: str) -> int | None:
    """The number of tokens at a path of keys or attributes. None if there is no such number."""
    for name in path:
        usage = cast("Mapping[str, Any]", usage).get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
    return usage if type(usage) is int and usage >= 0 else None


def schema_in_words(schema: Mapping[str, object]) -> str:
    """Describe the structured output in words, for a provider without a feature for it."""
    written = json.dumps(schema, ensure_ascii=False)
    return f"\n\nYour final answer is one JSON value in a ```json fence. It fits this JSON Schema:\n\n{written}"


def named_schema(request: Request, schema: Mapping[str, object]) -> dict[str, Any]:
    """Wrap the schema of a structured output in the form that OpenAI's APIs take: with a name and ``strict``."""
    name = f"{_NOT_IN_NAMES.sub('_', request.prompt_name)[:48] or 'answer'}_schema"
    strict = strict_schema(schema)
    return {"name": name, "schema": strict or schema, "strict": strict is not None}
