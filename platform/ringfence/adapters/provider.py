"""What the adapters of all SDKs share: one request to a provider, its parameters, schemas, and the turns that come."""

from __future__ import annotations

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any, Self, cast

from ringfence import serde
from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.model import Request, ToolCall, ToolChoice, Turn
from ringfence.adapters.retry import Sdk, ThrottlePolicy, attempt_failure, retry
from ringfence.errors import PromptEvaluationError
from ringfence.extras import missing
from ringfence.runtime.events import ToolSchema
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
        given: dict[str, Any] = {
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
        found = {names[name]: value for name, value in given.items()}
        return {**found, "extra_body": dict(self.extra)} if self.extra else found


class ProviderApi(ABC):
    """One protocol of one provider. An exception from reading an answer means that it was not in its shape."""

    def __init__(
        self, client: Any, model: str, options: Mapping[str, Any], *, strict_tools: bool, native_output: bool
    ) -> None:
        self.client = client
        self.model = model
        self.options = options
        self.strict_tools = strict_tools
        self.native_output = native_output

    @abstractmethod
    def arguments(self, request: Request) -> dict[str, Any]:
        """What the SDK's method is called with, the timeout and streaming left out."""

    @abstractmethod
    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        """Call the SDK: an answer, or where it streams its events as a context manager with ``response``."""

    @abstractmethod
    def answer(self, record: Mapping[str, Any]) -> Any:
        """The SDK's answer of its JSON."""

    @abstractmethod
    def turn(self, answer: Any) -> Turn: ...

    @abstractmethod
    def turn_of_events(self, events: Iterable[Any], on_text: Callable[[str], None]) -> Turn:
        """The same from a stream. Raises CutOffError where that ends before its end."""

    def strict_parameters(self, tool: ToolSchema) -> dict[str, Any] | None:
        return strict_schema(tool.parameters) if self.strict_tools else None

    def output_in_words(self, request: Request) -> str:
        """The structured output for a model whose provider has no way to say it; empty where there is none."""
        if request.output_schema is None or self.native_output:
            return ""
        return schema_in_words(request.output_schema)


class SdkAdapter(LoopAdapter):
    """An adapter by a provider's SDK. It owns the client that it makes: `close` it, or use it by ``with``."""

    def connect(
        self,
        api: ProviderApi,
        sdk: Sdk,
        owned: Any,
        *,
        tool_choice: ToolChoice = "auto",
        stream: bool = True,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """``owned`` is the client, if it is the adapter's own."""
        self.model = api.model
        self.tool_choice = tool_choice
        self.max_turns = max_turns
        self._api = api
        self._sdk = sdk
        self._owned = owned
        self._stream = stream
        self._throttle = throttle or ThrottlePolicy()

    def respond(self, request: Request) -> Turn:
        return request_turn(self._api, request, sdk=self._sdk, policy=self._throttle, stream=self._stream)

    def close(self) -> None:
        """Close the connections of a client of its own."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def package(name: str, *, extra: str) -> ModuleType:
    """A package that is only needed for this provider. ImportError says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ImportError(missing(name, extra), name=name) from None


def check_client(client: object, kind: type[object], *, is_configured: bool) -> None:
    """Raises TypeError for a client that is none of the SDK's synchronous ones, ValueError for two ways to have one."""
    if client is not None and not isinstance(client, kind):
        raise TypeError(f"client is the SDK's {kind.__name__}, which waits for its answers, not {client!r}")
    if client is not None and is_configured:
        raise ValueError("give a client, or a base_url and an api_key, not both")


# One request


def request_turn(api: ProviderApi, request: Request, *, sdk: Sdk, policy: ThrottlePolicy, stream: bool) -> Turn:
    """One turn of the model, with as many requests as it takes.

    Raises:
        PromptEvaluationError: as `retry`.
    """
    arguments = api.arguments(request)

    def attempt(number: int) -> Turn:
        def on_text(text: str) -> None:
            if request.on_text is not None and text:
                request.on_text(text, number)

        try:
            answer = api.send(arguments, seconds=_seconds_left(request.deadline), stream=stream)
            if isinstance(answer, (str, bytes)):  # SDKs hand out so what has no content type of JSON
                raise ValueError(f"it is not JSON: {answer[:80]!r}")
            if not stream:
                return _clean(api.turn(answer), request)
            with answer as events, _cut_off_at(request.deadline, events):
                if events.response.headers.get("content-type", "").startswith("application/json"):
                    # Of a server that does not stream, whatever it is asked for.
                    return _clean(api.turn(api.answer(json.loads(events.response.read()))), request)
                return _clean(api.turn_of_events(events, on_text), request)
        except Exception as error:
            raise attempt_failure(error, sdk) from error

    return retry(attempt, policy, prompt_name=request.prompt_name, deadline=request.deadline, on_retry=request.on_retry)


def _seconds_left(deadline: Deadline | None) -> float:
    if deadline is None:
        return REQUEST_SECONDS
    return max(min(deadline.remaining().total_seconds(), REQUEST_SECONDS), 0.001)


@contextmanager
def _cut_off_at(deadline: Deadline | None, events: Any) -> Generator[None]:
    """Cut the stream off at the deadline: the SDK's timeout is for each silence, and a provider may go on trickling."""
    if deadline is None:
        yield
        return
    timer = threading.Timer(deadline.remaining().total_seconds(), _shut_down, (events.response,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _shut_down(response: Any) -> None:
    import socket

    network = response.extensions.get("network_stream")
    connection = network.get_extra_info("socket") if network is not None else None
    if connection is not None:
        try:
            # Not closed: this wakes the reader up, which closes it.
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


# To and from the provider

_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def _clean(turn: Turn, request: Request) -> Turn:
    """A turn whose calls have ids of their own in this conversation, and that can be sent back."""
    known = {call.call_id for message in request.messages if message.turn for call in message.turn.tool_calls}
    calls: list[ToolCall] = []
    for call in turn.tool_calls:
        # An SDK hands on whatever the JSON has.
        call_id, name, arguments = cast("tuple[Any, Any, Any]", (call.call_id, call.name, call.arguments))
        if not isinstance(call_id, str) or _ID.fullmatch(call_id) is None or call_id in known:
            call_id = f"call_{len(known) + 1}"
            while call_id in known:
                call_id += "x"
        known.add(call_id)
        if not isinstance(arguments, dict):
            arguments = sendable(arguments if isinstance(arguments, str) else json.dumps(arguments))
        calls.append(ToolCall(call_id, sendable(name) if isinstance(name, str) else "", cast("Any", arguments)))
    return replace(turn, text=sendable(turn.text), tool_calls=tuple(calls), raw=_sendable_json(turn.raw))


def _sendable_json(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, list):
        return [_sendable_json(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {sendable(key): _sendable_json(each) for key, each in cast("dict[str, Any]", value).items()}
    return value


def name_to_send(call: ToolCall) -> str:
    """The name of a call as every provider takes it back, whatever the model had made up."""
    return _NOT_IN_NAMES.sub("_", call.name)[:64] or "unnamed"


def arguments_to_send(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call as an object: servers choke on anything else, and the model reads of that anyway."""
    if not isinstance(call.arguments, str):
        return _sendable_json(serde.dump_any(call.arguments))
    try:
        return _sendable_json(serde.read_json(call.arguments))
    except (ValueError, RecursionError):
        return {}


def chosen_tool(request: Request) -> str | None:
    """The name of the tool that has to be called; None for a choice that is a word.

    Raises:
        PromptEvaluationError: another choice.
    """
    choice = request.tool_choice
    if choice in ("auto", "none", "required"):
        return None
    name = None if isinstance(choice, str) else choice.get("name")
    if name not in [tool.name for tool in request.tools]:
        raise PromptEvaluationError(
            f'there is no tool choice {choice!r}: it is "auto", "none", "required" or {{"name": a tool on offer}}',
            prompt_name=request.prompt_name,
            phase="request",
        )
    return name


def count_tokens(usage: Any, name: str) -> int | None:
    """A count of tokens, or None where there is none; ``a.b`` is one in a part."""
    value = usage
    for part in name.split("."):
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value if type(value) is int and value >= 0 else None


# Schemas for strict modes: closed objects, every property required

WORDED_KEYWORDS = (
    "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "pattern", "format", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "contentEncoding",
    "not",
)  # fmt: skip
"""Keywords that not every provider takes: a model reads them in the description, and parsing checks them anyway."""
KEPT_KEYWORDS = frozenset(
    {"type", "description", "enum", "const", "anyOf", "items", "properties", "required", "$ref", "$defs"}
)
DROPPED_KEYWORDS = frozenset({*WORDED_KEYWORDS, "oneOf", "discriminator", "additionalProperties", "title", "examples"})


class _NotStrictError(ValueError):
    """The schema has a part that no strict mode takes, such as an object with keys of any name."""


def strict_schema(schema: Mapping[str, object]) -> dict[str, Any] | None:
    """`schema` for a strict mode, or None where there is no such thing. What may be left out has to be given there."""
    try:
        return _strict(schema)
    except _NotStrictError:
        return None


def _strict(node: Mapping[str, Any]) -> dict[str, Any]:
    if "oneOf" in node:
        node = {**node, "anyOf": node["oneOf"]}
    out: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            out[key] = {name: _strict(each) for name, each in value.items()}
        elif key == "items":
            out[key] = _strict(value)
        elif key == "anyOf":
            out[key] = [_strict(each) for each in value]
        elif key in KEPT_KEYWORDS:
            out[key] = value
        elif key not in DROPPED_KEYWORDS:
            raise _NotStrictError(key)
    if not out.keys() & {"type", "enum", "const", "anyOf", "$ref"}:
        raise _NotStrictError("anything at all")
    if "$ref" in out:  # nothing may stand beside a reference
        out = {key: value for key, value in out.items() if key in ("$ref", "$defs")}
    elif words := [f"{key}: {json.dumps(node[key], ensure_ascii=False)}" for key in WORDED_KEYWORDS if key in node]:
        out["description"] = f"{out.get('description', '')} ({', '.join(words)})".strip()
    if out.get("type") == "object":
        if node.get("additionalProperties", False) is not False or "properties" not in out:
            raise _NotStrictError("an object with keys of any name")
        out["required"] = list(cast("dict[str, Any]", out["properties"]))
        out["additionalProperties"] = False
    if out.get("type") == "array" and "items" not in out:
        raise _NotStrictError("a list of anything")
    return out


def schema_in_words(schema: Mapping[str, object]) -> str:
    written = json.dumps(schema, ensure_ascii=False)
    return f"\n\nYour final answer is one JSON value in a ```json fence. It fits this JSON Schema:\n\n{written}"


def named_schema(request: Request, schema: Mapping[str, object]) -> dict[str, Any]:
    """The schema of the answer as OpenAI's interfaces have it."""
    name = f"{_NOT_IN_NAMES.sub('_', request.prompt_name)[:48] or 'answer'}_schema"
    strict = strict_schema(schema)
    return {"name": name, "schema": strict or schema, "strict": strict is not None}
