"""The adapter for the SPEC of a model."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringfence.adapters.loop import LoopAdapter
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence_tools.printable import why
from ringfence_tools.runs.own_code import adapter_of
from ringfence_tools.runs.plug_ins import plug_ins
from ringfence_tools.runs.reserved_stdout import reserve_stdout
from ringfence_tools.runs.spec_error import SpecError

if TYPE_CHECKING:
    from ringfence.adapters import AnthropicAdapter, OpenAIAdapter

KINDS = ("openai", "anthropic", "script")
GROUP = "ringfence.models"
MAX_WAIT_SECONDS = 600.0
"""For a provider that says when to ask again, in one turn: nobody may be there to begin anew."""


def model_of(spec: str, directory: Path, stack: ExitStack, seed: int | None = None) -> LoopAdapter:
    """Return the adapter for a SPEC. ``stack`` closes its connections. Raises SpecError.

    Code in ``directory``, the workspace of the run, is refused. ``seed`` is for a server with OpenAI's Chat
    Completions: other APIs have none.
    """
    kind, _, name = spec.partition(":")
    if is_own_model(spec, directory):
        with reserve_stdout([spec]):
            return adapter_of(spec, directory, stack)
    if kind not in KINDS or not name:
        installed = "".join(f"; the plug-in {one}" for one in sorted(plug_ins(GROUP, directory)))
        raise _bad(
            f"there is no model {spec!r}; there is openai:MODEL and anthropic:MODEL, each with @BASE_URL for a "
            "compatible server, script:FILE, a written model (JSON Lines of turns), and FILE.py:NAME or MODULE:NAME, "
            f"an adapter of your own{installed}"
        )
    try:
        return ScriptedAdapter(name) if kind == "script" else stack.enter_context(_provider_of(kind, name, seed))
    except OSError as error:
        raise _bad(f"{name!r} cannot be read: {why(error)}") from None
    except (ValueError, ImportError, RecursionError) as error:
        raise _bad(str(error)) from None


def is_own_model(spec: str, directory: Path) -> bool:
    """Whether a SPEC names an adapter of the user's own: in a file, in a module that there is, or a plug-in."""
    place, colon, name = spec.rpartition(":")
    if not colon:
        return spec in plug_ins(GROUP, directory)
    if spec.partition(":")[0] in KINDS or not name.isidentifier():
        return False
    return place.endswith(".py") or _is_module(place.partition(".")[0])


def _is_module(name: str) -> bool:
    return name.isidentifier() and find_spec(name) is not None


def _provider_of(kind: str, name: str, seed: int | None) -> OpenAIAdapter | AnthropicAdapter:
    """Return the adapter of a provider. Raises ValueError or ImportError with a message for the user."""
    from ringfence.adapters import AnthropicAdapter, ModelParams, OpenAIAdapter, ThrottlePolicy

    patient = ThrottlePolicy(max_total_delay=MAX_WAIT_SECONDS)
    model, at, url = name.partition("@")
    if at and not (model and _is_base_url(url)):
        raise ValueError(
            f"{name!r}: it is MODEL@BASE_URL, and a base URL begins with http://HOST, https://HOST or https://HOST:PORT"
        )
    if kind == "anthropic":
        return AnthropicAdapter(model, base_url=url or None, throttle=patient)
    # Compatible servers all have Chat Completions, and few have Responses.
    if url:
        return OpenAIAdapter(model, base_url=url, api="chat", throttle=patient, params=ModelParams(seed=seed))
    return OpenAIAdapter(model, api="responses", throttle=patient)


def _is_base_url(url: str) -> bool:
    """Asked here, since an SDK finds out as late as its first request, or raises what is no ValueError."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # a port that is no number
        return False


def _bad(message: str) -> SpecError:
    return SpecError("--model", message)
