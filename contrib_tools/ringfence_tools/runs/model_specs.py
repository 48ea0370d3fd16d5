"""The adapter for the SPEC of a model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringfence.adapters.loop import LoopAdapter
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence_tools.printable import why
from ringfence_tools.runs.spec_error import SpecError

if TYPE_CHECKING:
    from ringfence.adapters import AnthropicAdapter, OpenAIAdapter

MAX_WAIT_SECONDS = 600.0
"""For a provider that says when to ask again, in one turn: nobody may be there to begin anew."""


def model_of(spec: str, stack: ExitStack) -> LoopAdapter:
    """Return the adapter for a SPEC. ``stack`` closes its connections. Raises SpecError."""
    kind, _, name = spec.partition(":")
    if kind not in ("openai", "anthropic", "script") or not name:
        raise _bad(
            f"there is no model {spec!r}; there is openai:MODEL and anthropic:MODEL, each with @BASE_URL for a "
            "compatible server, and script:FILE, a written model (JSON Lines of turns)"
        )
    try:
        return ScriptedAdapter(name) if kind == "script" else stack.enter_context(_provider_of(kind, name))
    except OSError as error:
        raise _bad(f"{name!r} cannot be read: {why(error)}") from None
    except (ValueError, ImportError, RecursionError) as error:
        raise _bad(str(error)) from None


def _provider_of(kind: str, name: str) -> OpenAIAdapter | AnthropicAdapter:
    """Return the adapter of a provider. Raises ValueError or ImportError with a message for the user."""
    from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ThrottlePolicy

    patient = ThrottlePolicy(max_total_delay=MAX_WAIT_SECONDS)
    model, at, url = name.partition("@")
    if at and not (model and _is_base_url(url)):
        raise ValueError(
            f"{name!r}: it is MODEL@BASE_URL, and a base URL begins with http://HOST, https://HOST or https://HOST:PORT"
        )
    if kind == "anthropic":
        return AnthropicAdapter(model, base_url=url or None, throttle=patient)
    # Compatible servers all have Chat Completions, and few have Responses.
    return OpenAIAdapter(model, base_url=url or None, api="chat" if url else "responses", throttle=patient)


def _is_base_url(url: str) -> bool:
    """Asked here, since an SDK finds out as late as its first request, or raises what is no ValueError."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is no number
        return False


def _bad(message: str) -> SpecError:
    return SpecError("--model", message)
