"""Every adapter keeps the contract; those of real providers over real HTTP."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from provider_server import ProviderServer
from provider_shapes import Turn

from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ProviderAdapter, ScriptedAdapter
from ringfence.testing import AdapterContract


class TestScripted(AdapterContract):
    @contextmanager
    def adapter(self, turns: Sequence[Turn]) -> Generator[ProviderAdapter]:
        yield ScriptedAdapter(turns)


class OverHttp(AdapterContract):
    @contextmanager
    def adapter(self, turns: Sequence[Turn]) -> Generator[ProviderAdapter]:
        with ProviderServer(turns) as server, self.connected(server) as adapter:
            yield adapter

    def connected(self, server: ProviderServer) -> OpenAIAdapter | AnthropicAdapter:
        raise NotImplementedError


class TestResponses(OverHttp):
    def connected(self, server: ProviderServer) -> OpenAIAdapter:
        return OpenAIAdapter("m", base_url=server.openai_url, api_key="k")


class TestChat(OverHttp):
    def connected(self, server: ProviderServer) -> OpenAIAdapter:
        return OpenAIAdapter("m", api="chat", base_url=server.openai_url, api_key="k")


class TestMessages(OverHttp):
    def connected(self, server: ProviderServer) -> AnthropicAdapter:
        return AnthropicAdapter("m", base_url=server.url, api_key="k")
