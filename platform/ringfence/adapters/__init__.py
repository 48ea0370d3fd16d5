"""What talks to a model provider: the loop, the way of a tool call, and a model that is written down."""

from importlib import import_module
from typing import TYPE_CHECKING

from ringfence.adapters.core import (
    Conversation,
    EvaluationEnded,
    EvaluationStarted,
    Message,
    MessageAdded,
    Model,
    ModelAnswered,
    ModelRequested,
    ModelRetry,
    ModelText,
    ModelTurn,
    ProviderAdapter,
    Request,
    ToolCall,
    ToolChoice,
    Turn,
)
from ringfence.adapters.loop import LoopAdapter, evaluate_with, tool_schema
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.adapters.throttling import ThrottleDetails, ThrottlePolicy
from ringfence.adapters.tool_executor import ToolCallResult, ToolExecutor
from ringfence.errors import ContextWindowExceededError, PromptEvaluationError, ThrottleError
from ringfence.runtime.events import PromptResponse

if TYPE_CHECKING:
    from ringfence.adapters.anthropic import AnthropicAdapter
    from ringfence.adapters.model_params import ModelParams
    from ringfence.adapters.openai import OpenAIAdapter

__all__ = [
    "AnthropicAdapter",
    "ContextWindowExceededError",
    "Conversation",
    "EvaluationEnded",
    "EvaluationStarted",
    "LoopAdapter",
    "Message",
    "MessageAdded",
    "Model",
    "ModelAnswered",
    "ModelParams",
    "ModelRequested",
    "ModelRetry",
    "ModelText",
    "ModelTurn",
    "OpenAIAdapter",
    "PromptEvaluationError",
    "PromptResponse",
    "ProviderAdapter",
    "Request",
    "ScriptedAdapter",
    "ThrottleDetails",
    "ThrottleError",
    "ThrottlePolicy",
    "ToolCall",
    "ToolCallResult",
    "ToolChoice",
    "ToolExecutor",
    "Turn",
    "evaluate_with",
    "tool_schema",
]

# Imported when asked for; the SDKs themselves only when an adapter is made.
_LATER = {"AnthropicAdapter": "anthropic", "ModelParams": "model_params", "OpenAIAdapter": "openai"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
