"""What a turn costs: by the table of prices, of the server that a client talks to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from genai_prices import Usage, calc_price
from provider_server import ProviderServer

from ringfence.adapters import AnthropicAdapter, OpenAIAdapter
from ringfence.prompt import MarkdownSection, Prompt
from ringfence.runtime import PromptExecuted, Session, TokenUsage

USED = {"input_tokens": 1_000, "output_tokens": 100, "cached_tokens": 400}
TURN = {"text": "Done.", "usage": USED}


class ToThisMachine(httpx2.HTTPTransport):
    """Sends all requests to a server of this machine, whatever their address."""

    def __init__(self, server: ProviderServer) -> None:
        super().__init__()
        self._url = httpx2.URL(server.url)

    def handle_request(self, request: Any) -> Any:
        request.url = request.url.copy_with(scheme="http", host=self._url.host, port=self._url.port)
        return super().handle_request(request)


def used(adapter: Any) -> TokenUsage:
    session = Session()
    prompt = Prompt[None](ns="tests", key="prices", sections=[MarkdownSection(title="T", template="x")])
    adapter.evaluate(prompt, session=session)
    executed = session[PromptExecuted].latest()
    assert executed is not None
    assert executed.usage is not None
    return executed.usage


def cost(adapter: Any) -> float | None:
    return used(adapter).cost_usd


@contextmanager
def openai_adapter(server: ProviderServer, model: str, **options: Any) -> Generator[OpenAIAdapter]:
    with httpx2.Client(transport=ToThisMachine(server)) as http:
        yield OpenAIAdapter(model, client=openai.OpenAI(api_key="k", http_client=http, **options), api="chat")


def priced(model: str, provider: str, **usage: int) -> float:
    return float(calc_price(Usage(**usage), model, provider_id=provider).total_price)


@pytest.mark.parametrize("model", ["gpt-5", "gpt-4.1-mini"])
def test_a_turn_of_openai_has_the_price_of_the_table(model: str) -> None:
    with ProviderServer([TURN]) as server, openai_adapter(server, model) as adapter:
        found = cost(adapter)
    assert found == priced(model, "openai", input_tokens=1_000, output_tokens=100, cache_read_tokens=400)
    assert found > 0


def test_a_price_names_its_table() -> None:
    with ProviderServer([TURN]) as server, openai_adapter(server, "gpt-5") as adapter:
        found = used(adapter)
    assert found.prices == f"genai-prices {version('genai-prices')}"


def test_a_turn_of_anthropic_counts_what_is_put_into_the_cache_at_its_own_price() -> None:
    turn = {"text": "Done.", "usage": {**USED, "cache_write_tokens": 300}}
    with ProviderServer([turn]) as server, httpx2.Client(transport=ToThisMachine(server)) as http:
        client = anthropic.Anthropic(api_key="k", http_client=http)
        found = cost(AnthropicAdapter("claude-sonnet-5-5", client=client))
    counted = {"input_tokens": 1_000, "output_tokens": 100, "cache_read_tokens": 400}
    assert found == priced("claude-sonnet-5-5", "anthropic", **counted, cache_write_tokens=300)
    assert found > priced("claude-sonnet-5-5", "anthropic", **counted)


@pytest.mark.parametrize(
    ("model", "base_url"), [("no-such-model", None), ("gpt-5", "https://models.example/v1"), ("gpt-5", "here")]
)
def test_a_model_or_a_server_that_the_table_lacks_has_no_price(model: str, base_url: str | None) -> None:
    with ProviderServer([TURN]) as server:
        base_url = server.openai_url if base_url == "here" else base_url
        options = {"base_url": base_url} if base_url else {}
        with openai_adapter(server, model, **options) as adapter:
            assert f"there is no price of {model} at" in (adapter.why_no_cost() or "")
            assert cost(adapter) is None


def test_a_model_of_this_machine_does_not_load_the_table() -> None:
    program = """
import sys
from ringfence.adapters import OpenAIAdapter
assert OpenAIAdapter("m", base_url="http://127.0.0.1:9/v1").why_no_cost()
assert "genai_prices" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
