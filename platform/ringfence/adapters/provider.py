"""What the adapters of all providers share: one request with its failures in order, and answers that are clean."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, Protocol, cast

from ringfence import serde
from ringfence.adapters.core import Request, ToolCall, Turn
from ringfence.adapters.strict_schema import strict_schema
from ringfence.adapters.throttling import AttemptFailedError, ThrottleKind, ThrottlePolicy, repeated
from ringfence.errors import PromptEvaluationError
from ringfence.extras import missing
from ringfence.prompt.tool_result import sendable
from ringfence.runtime.limits import Deadline, utc_now

OPENING = "Begin."
"""The first words of the user: providers and chat templates want some, and the prompt itself is the system's."""
REQUEST_SECONDS = 600.0
"""A provider that says nothing for so long is given up, where no deadline comes first."""
MAX_SAID = 500
"""Characters of a provider's error that are passed on."""

QUOTA_CODES = frozenset({"insufficient_quota", "billing_not_active", "billing_error"})
RATE_CODES = frozenset({"rate_limit_error", "rate_limit_exceeded", "rate_limit"})
BUSY_CODES = frozenset({"overloaded_error", "server_error", "api_error", "internal_server_error", "timeout_error"})
TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error", "request_too_large"})
TOO_LONG = re.compile(
    r"(prompt|input|request|messages|conversation) (is|are) too (long|large)|context (window|length|size|limit)"
    r"|max(imum)? (prompt|input) length|maximum (allowed )?(number of )?(input )?tokens|exceeds max length"
    r"|too many (input )?tokens|reduce the length",
    re.IGNORECASE,
)
"""How servers say that a request is longer than the model takes, where they have no code for it."""
TOO_LARGE = re.compile(r"request (body |entity )?too large", re.IGNORECASE)
"""How they say that a request alone is above a limit, such as that of tokens a minute: waiting does not help."""


class Sdk(Protocol):
    """The exceptions of a provider's SDK, which all have the same tree."""

    @property
    def APIError(self) -> type[Exception]: ...
    @property
    def APIConnectionError(self) -> type[Exception]: ...
    @property
    def APITimeoutError(self) -> type[Exception]: ...


class ProviderApi(Protocol):
    """One protocol of one provider. What reading an answer raises means that it was not in its shape."""

    def arguments(self, request: Request) -> dict[str, Any]:
        """What the SDK's method is called with, the timeout and streaming left out."""
        ...

    def send(self, arguments: Mapping[str, Any], *, seconds: float, stream: bool) -> Any:
        """Call the SDK: an answer, or where it streams its events as a context manager with ``response``."""
        ...

    def answer(self, record: Mapping[str, Any]) -> Any:
        """The SDK's answer of its JSON."""
        ...

    def turn(self, answer: Any) -> Turn: ...

    def turn_of_events(self, events: Iterable[Any], say: Callable[[str], None]) -> Turn:
        """The same from a stream. Raises CutOffError where that ends before its end."""
        ...


class CutOffError(Exception):
    """A stream ended without saying that it is at its end."""


class ReportedError(Exception):
    """A provider answered in order, and what it answered is that it failed."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message}


def ask(wire: ProviderApi, request: Request, *, sdk: Sdk, policy: ThrottlePolicy, stream: bool) -> Turn:
    """One turn of the model, with as many requests as it takes.

    Raises:
        PromptEvaluationError: as `repeated`.
    """
    arguments = wire.arguments(request)

    def attempt(number: int) -> Turn:
        def say(text: str) -> None:
            if request.on_text is not None and text:
                request.on_text(text, number)

        try:
            answer = wire.send(arguments, seconds=_seconds_left(request.deadline), stream=stream)
            if not stream:
                return _clean(wire.turn(_of_the_sdk(answer)), request)
            with _of_the_sdk(answer) as events, _ended_by(request.deadline, events):
                if events.response.headers.get("content-type", "").startswith("application/json"):
                    # Of a server that does not stream, whatever it is asked for.
                    return _clean(wire.turn(wire.answer(json.loads(events.response.read()))), request)
                return _clean(wire.turn_of_events(events, say), request)
        except Exception as error:
            _fail(error, sdk)

    return repeated(
        attempt, policy, prompt_name=request.prompt_name, deadline=request.deadline, on_retry=request.on_retry
    )


def _seconds_left(deadline: Deadline | None) -> float:
    if deadline is None:
        return REQUEST_SECONDS
    return max(min(deadline.remaining().total_seconds(), REQUEST_SECONDS), 0.001)


def _of_the_sdk(answer: Any) -> Any:
    """SDKs hand out what is no JSON, going by its content type, as a string."""
    if isinstance(answer, (str, bytes)):
        raise ValueError(f"it is not JSON: {answer[:80]!r}")
    return answer


@contextmanager
def _ended_by(deadline: Deadline | None, events: Any) -> Generator[None]:
    """Cut the stream off at the deadline: the SDK's timeout is for each silence, and a provider may go on trickling."""
    if deadline is None:
        yield
        return
    timer = threading.Timer(deadline.remaining().total_seconds(), _shut, (events.response,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _shut(response: Any) -> None:
    import socket

    network = response.extensions.get("network_stream")
    connection = network.get_extra_info("socket") if network is not None else None
    if connection is not None:
        try:
            # Not closed: whoever reads from it is woken up by this, and closes it.
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def _fail(error: Exception, sdk: Sdk) -> NoReturn:
    """What became of a request, in words, and whether to repeat it."""
    if isinstance(error, (CutOffError, ReportedError, sdk.APIError)) or _of_transport(error):
        body: object = getattr(error, "body", None)
        kind = _kind(error, sdk, body)
        too_long = _is_too_long(error, body, kind)
        kind = None if too_long else kind
        headers = getattr(getattr(error, "response", None), "headers", {})
        said = _said(error, body)
        raise AttemptFailedError(
            said if kind is None else f"the provider did not answer ({kind.replace('_', ' ')}): {said}",
            kind=kind,
            retry_after=_retry_after(headers),
            payload=cast("Mapping[str, object]", body) if isinstance(body, Mapping) else None,
            too_long=too_long,
        ) from error
    raise AttemptFailedError(
        f"the provider's answer cannot be read: {type(error).__name__}: {str(error)[:MAX_SAID]}", phase="response"
    ) from error


def _of_transport(error: Exception) -> bool:
    """An error of the HTTP library that an SDK lets through while it streams."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _kind(error: Exception, sdk: Sdk, body: object) -> ThrottleKind | None:
    codes, status = _codes(body), getattr(error, "status_code", None)
    if codes & QUOTA_CODES or status == 402:
        return "quota_exhausted"
    if status == 429 or codes & RATE_CODES:
        return "rate_limit"
    if status in (408, 504) or isinstance(error, sdk.APITimeoutError) or "Timeout" in type(error).__name__:
        return "timeout"
    if codes & BUSY_CODES or (isinstance(status, int) and status >= 500 and status != 501):
        return "overloaded"
    if isinstance(error, (CutOffError, sdk.APIConnectionError)) or _of_transport(error):
        return "connection"
    return None


def _is_too_long(error: Exception, body: object, kind: ThrottleKind | None) -> bool:
    said = _said(error, body)
    if getattr(error, "status_code", None) == 413 or (kind != "quota_exhausted" and TOO_LARGE.search(said)):
        return True
    found = bool(_codes(body) & TOO_LONG_CODES) or TOO_LONG.search(said) is not None
    return found and kind in (None, "overloaded")


def _codes(body: object) -> set[str]:
    """Whatever names the kind of an error, at either level of its body."""
    if not isinstance(body, Mapping):
        return set()
    known = cast("Mapping[str, object]", body)
    found = {value for key in ("code", "type") if isinstance(value := known.get(key), str)}
    return found | _codes(known.get("error"))


def _said(error: Exception, body: object) -> str:
    known = cast("Mapping[str, object]", body if isinstance(body, Mapping) else {})
    inner = known.get("error", known)
    message = cast("Mapping[str, object]", inner).get("message") if isinstance(inner, Mapping) else None
    said = message if isinstance(message, str) and message else str(error) or type(error).__name__
    status = getattr(error, "status_code", None)
    hint = {401: "; check the key", 403: "; check what the key may do", 404: "; check the model's name and the URL"}
    return f"{said[:MAX_SAID]}{f' (HTTP {status})' if status is not None else ''}{hint.get(status or 0, '')}"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds. The headers' names are found in any case; what cannot be read does not count."""
    for name, factor in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name)
        if text is None:
            continue
        try:
            seconds = float(text) * factor
        except ValueError:
            try:
                seconds = (parsedate_to_datetime(text) - utc_now()).total_seconds()
            except (ValueError, TypeError):
                continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    return None


def tokens(found: Any, *names: str) -> int | None:
    """The first of these that is a count of tokens; ``a.b`` is one in a part. None for anything else."""
    for name in names:
        value = found
        for part in name.split("."):
            value = (
                cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else getattr(value, part, None)
            )
        if type(value) is int and value >= 0:
            return value
    return None


_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


def _clean(turn: Turn, request: Request) -> Turn:
    """A turn whose calls have ids of their own in this conversation, and that can be sent back."""
    taken = {call.call_id for message in request.messages if message.turn for call in message.turn.tool_calls}
    calls: list[ToolCall] = []
    for call in turn.tool_calls:
        call_id = call.call_id
        if not isinstance(call_id, str) or _ID.fullmatch(call_id) is None or call_id in taken:  # pyright: ignore[reportUnnecessaryIsInstance]
            call_id = f"call_{len(taken) + 1}"
            while call_id in taken:
                call_id += "x"
        taken.add(call_id)
        name = sendable(call.name) if isinstance(call.name, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
        arguments = call.arguments if isinstance(call.arguments, (str, dict)) else json.dumps(call.arguments)
        arguments = sendable(arguments) if isinstance(arguments, str) else arguments
        calls.append(ToolCall(call_id, name, arguments))
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
    """The arguments of a call as an object: servers choke on what is none, and the model is told of that anyway."""
    if not isinstance(call.arguments, str):
        return _sendable_json(serde.dump_any(call.arguments))
    try:
        found: object = serde.STRICT_JSON.decode(call.arguments)
        return _sendable_json(found) if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        return {}


def output_in_words(schema: Mapping[str, object]) -> str:
    """The structured output for a model whose provider has no way to say it."""
    written = json.dumps(schema, ensure_ascii=False)
    return f"\n\nYour final answer is one JSON value in a ```json fence. It fits this JSON Schema:\n\n{written}"


def named_schema(request: Request, schema: Mapping[str, object]) -> dict[str, Any]:
    """The schema of the answer as OpenAI's interfaces have it."""
    name = f"{_NOT_IN_NAMES.sub('_', request.prompt_name)[:48] or 'answer'}_schema"
    strict = strict_schema(schema)
    return {"name": name, "schema": strict or schema, "strict": strict is not None}


def chosen_tool(request: Request) -> str | None:
    """The name of the tool that has to be called; None for a choice that is a word.

    Raises:
        PromptEvaluationError: another choice.
    """
    choice = request.tool_choice
    if not isinstance(choice, Mapping):
        if choice in ("auto", "none", "required"):
            return None
        name = None
    else:
        name = choice.get("name")
    if name not in [tool.name for tool in request.tools]:
        raise PromptEvaluationError(
            f'there is no tool choice {choice!r}: it is "auto", "none", "required" or {{"name": a tool on offer}}',
            prompt_name=request.prompt_name,
            phase="request",
        )
    return name


def check_client(client: object, kind: type[object]) -> None:
    """Raises TypeError for a client that is given and is none of the SDK's, or one of its async ones."""
    if client is not None and not isinstance(client, kind):
        raise TypeError(f"client is the SDK's {kind.__name__}, which waits for its answers, not {client!r}")


def package(name: str, *, extra: str) -> ModuleType:
    """A package that is only needed for this provider. ImportError says how to get it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ImportError(missing(name, extra), name=name) from None
