"""What talks to a model provider: the loop, the way of a tool call, and a model that is written down."""

from ringfence.adapters.core import (
    Conversation,
    Message,
    Model,
    ModelTurn,
    PromptResponse,
    ProviderAdapter,
    Request,
    Said,
    ToolCall,
    Turn,
)
from ringfence.adapters.loop import evaluate_with
from ringfence.adapters.scripted import ScriptedAdapter
from ringfence.adapters.tool_executor import Answer, ToolExecutor
from ringfence.errors import PromptEvaluationError

__all__ = [
    "Answer",
    "Conversation",
    "Message",
    "Model",
    "ModelTurn",
    "PromptEvaluationError",
    "PromptResponse",
    "ProviderAdapter",
    "Request",
    "Said",
    "ScriptedAdapter",
    "ToolCall",
    "ToolExecutor",
    "Turn",
    "evaluate_with",
]
