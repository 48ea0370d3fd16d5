"""OpenAI's models, and those of every server that speaks like them (llama.cpp, Ollama, vLLM ...)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from ringfence.adapters.core import Request, ToolChoice, Turn
from ringfence.adapters.loop import MAX_TURNS, LoopAdapter
from ringfence.adapters.model_params import ModelParams
from ringfence.adapters.openai_chat import ChatWire
from ringfence.adapters.openai_responses import ResponsesWire
from ringfence.adapters.provider import ProviderApi, ask, check_client, package
from ringfence.adapters.throttling import ThrottlePolicy

if TYPE_CHECKING:
    import openai


class OpenAIAdapter(LoopAdapter):
    """Evaluates prompts with OpenAI's SDK. It owns the client that it makes: `close` it, or use it by ``with``."""

    provider = "openai"

    def __init__(
        self,
        model: str,
        *,
        api: Literal["responses", "chat"] = "responses",
        base_url: str | None = None,
        api_key: str | None = None,
        client: openai.OpenAI | None = None,
        params: ModelParams | None = None,
        tool_choice: ToolChoice = "auto",
        strict_tools: bool = False,
        native_output: bool = True,
        stream: bool = True,
        throttle: ThrottlePolicy | None = None,
        max_turns: int = MAX_TURNS,
    ) -> None:
        """
        Args:
            api: "chat" for servers that are compatible, but have no Responses.
            base_url: such as ``http://127.0.0.1:8080/v1``; left out, ``OPENAI_BASE_URL``, else OpenAI itself.
            api_key: left out, ``OPENAI_API_KEY``; a server at ``base_url`` may need none.
            client: one that is yours, in place of the two. Its own retries are not used.
            strict_tools: ask for arguments that are sure to fit, of every tool whose schema allows it. A model has to
                give every argument then, also those with a default.
            native_output: say a structured output by the provider's own means; else in words, for servers that cannot.

        Raises:
            ImportError: the SDK is not installed.
            ValueError: no key, or parameters that do not go together.
        """
        wires = {"responses": ResponsesWire, "chat": ChatWire}
        sdk: Any = package("openai", extra="openai")
        check_client(client, sdk.OpenAI)
        if client is not None and (base_url is not None or api_key is not None):
            raise ValueError("give a client, or a base_url and an api_key, not both")
        self._owned: openai.OpenAI | None = None
        if client is None:
            try:
                client = self._owned = sdk.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
            except sdk.OpenAIError as error:
                if base_url is None:
                    raise ValueError("OpenAI needs a key: set the environment variable OPENAI_API_KEY") from error
                client = self._owned = sdk.OpenAI(base_url=base_url, api_key="none", max_retries=0)
        assert client is not None
        self.model = model
        self.tool_choice = tool_choice
        self.max_turns = max_turns
        self._sdk = sdk
        self._stream = stream
        self._throttle = throttle or ThrottlePolicy()
        self._wire: ProviderApi = wires[api](
            client.with_options(max_retries=0),
            model,
            params or ModelParams(),
            strict_tools=strict_tools,
            native_output=native_output,
        )

    def respond(self, request: Request) -> Turn:
        return ask(self._wire, request, sdk=self._sdk, policy=self._throttle, stream=self._stream)

    def close(self) -> None:
        """Close the connections of a client of its own."""
        if self._owned is not None:
            self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
