"""What turns of a model cost, by the table of prices in genai-prices. Nothing is looked up in a network."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from urllib.parse import urlsplit

from ringfence.extras import missing
from ringfence.limits import TokenUsage

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def cost_of(usage: TokenUsage, model: str, server: str) -> float | None:
    """Return the price of a turn in US dollars.

    ``server`` is the base URL of the provider's API. None: the extra "prices" is not installed, the table has no such
    model of this provider, or the provider has not said how many tokens it has counted.
    """
    table = _table(server)
    if table is None or usage.input_tokens is None or usage.output_tokens is None:
        return None
    counted = table.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        return float(table.calc_price(counted, model, provider_api_url=server).total_price)
    except (LookupError, ValueError):  # an unknown model, or counts that contradict each other
        return None


@cache
def table_name() -> str:
    """Return the name of the table with its version: it has no date of its own."""
    return f"genai-prices {version('genai-prices')}"


def why_no_cost(model: str, server: str) -> str | None:
    """Return why the cost of a model's turns is unknown, and what to do. None if it is known."""
    if cost_of(TokenUsage(0, 0), model, server) is not None:
        return None
    host = urlsplit(server).hostname
    if host not in LOOPBACK and _genai_prices() is None:
        return missing("genai_prices", "prices")
    return f"there is no price of {model} at {host}"


def _table(server: str) -> ModuleType | None:
    """Return the table of prices. No server of this machine has a price, and the table takes 0.4 s to read."""
    return None if urlsplit(server).hostname in LOOPBACK else _genai_prices()


@cache
def _genai_prices() -> ModuleType | None:
    try:
        return import_module("genai_prices")
    except ModuleNotFoundError:
        return None
