"""Adapters of model providers: the evaluation loop, the executor of tool calls, and a scripted model."""

from typing import TYPE_CHECKING

from ringfence.adapters.loop import LoopAdapter, tool_schema
from ringfence.adapters.model import (
    Conversation,
    EvaluationEnded,
    EvaluationStarted,
    Message,
    MessageAdded,
    ModelAnswered,
    ModelRequested,
    ModelRetry,
    ModelText,
    ModelTurn,
    Request,
    ToolCall,
    ToolChoice,
    Turn,
)
from ringfence.adapters.retry import ThrottlePolicy
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.errors import ContextWindowExceededError, PromptEvaluationError, ThrottleDetails, ThrottleError
from ringfence.lazy_names import lazy_names
from ringfence.prompt.provider_adapter import ProviderAdapter
from ringfence.runtime.tool_executor import ToolCallResult, ToolExecutor
from ringfence.session.events import PromptResponse

if TYPE_CHECKING:
    from ringfence.adapters.anthropic import AnthropicAdapter
    from ringfence.adapters.openai import OpenAIAdapter
    from ringfence.adapters.provider import AdapterOptions, ModelParams

__all__ = [
    "AdapterOptions",
    "AnthropicAdapter",
    "ContextWindowExceededError",
    "Conversation",
    "EvaluationEnded",
    "EvaluationStarted",
    "LoopAdapter",
    "Message",
    "MessageAdded",
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
    "tool_schema",
]

# The module of each name is imported at the first use of the name. An SDK is imported when its adapter is made.
_LATER = {
    "AdapterOptions": ".provider",
    "AnthropicAdapter": ".anthropic",
    "ModelParams": ".provider",
    "OpenAIAdapter": ".openai",
}

__getattr__, __dir__ = lazy_names(__name__, _LATER)
