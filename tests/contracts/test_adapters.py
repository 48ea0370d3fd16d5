"""Every adapter keeps the contract; those of real providers over real HTTP, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringfence.adapters import AnthropicAdapter, OpenAIAdapter, ProviderAdapter, ScriptedAdapter
from ringfence.testing import AdapterContract
from ringfence.testing.adapter_contract import Turns
from ringfence.testing.provider_server import ProviderServer


class TestScripted(AdapterContract):
    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        yield ScriptedAdapter(turns)


class TestResponses(AdapterContract):
    stream = False
    server_streams = True

    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        with (
            ProviderServer(turns, stream=self.server_streams) as server,
            OpenAIAdapter("m", base_url=server.openai_url, api_key="k", stream=self.stream) as adapter,
        ):
            yield adapter


class TestResponsesStreamed(TestResponses):
    stream = True


class TestResponsesInOnePieceWhateverWasAskedFor(TestResponsesStreamed):
    server_streams = False


class TestChat(AdapterContract):
    stream = False
    server_streams = True

    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        with (
            ProviderServer(turns, stream=self.server_streams) as server,
            OpenAIAdapter("m", api="chat", base_url=server.openai_url, api_key="k", stream=self.stream) as adapter,
        ):
            yield adapter


class TestChatStreamed(TestChat):
    stream = True


class TestChatInOnePieceWhateverWasAskedFor(TestChatStreamed):
    server_streams = False


class TestMessages(AdapterContract):
    stream = False
    server_streams = True

    @contextmanager
    def adapter(self, turns: Turns) -> Iterator[ProviderAdapter]:
        with (
            ProviderServer(turns, stream=self.server_streams) as server,
            AnthropicAdapter("m", base_url=server.url, api_key="k", stream=self.stream) as adapter,
        ):
            yield adapter


class TestMessagesStreamed(TestMessages):
    stream = True


class TestMessagesInOnePieceWhateverWasAskedFor(TestMessagesStreamed):
    server_streams = False
