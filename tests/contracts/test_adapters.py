"""Every adapter keeps the contract; those of real providers over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from provider_server import ProviderServer

from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ProviderAdapter, ScriptedAdapter
from ringfence.testing import AdapterContract
from ringfence.testing.adapter_contract import Turns


class TestScripted(AdapterContract):
    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        yield ScriptedAdapter(turns)


class TestResponses(AdapterContract):
    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        with (
            ProviderServer(turns) as server,
            OpenAIAdapter("m", base_url=server.openai_url, api_key="k") as adapter,
        ):
            yield adapter


class TestChat(AdapterContract):
    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        with (
            ProviderServer(turns) as server,
            OpenAIAdapter("m", api="chat", base_url=server.openai_url, api_key="k") as adapter,
        ):
            yield adapter


class TestMessages(AdapterContract):
    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        with ProviderServer(turns) as server, AnthropicAdapter("m", base_url=server.url, api_key="k") as adapter:
            yield adapter
