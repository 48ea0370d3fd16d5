"""A platform on which coding agents change a repository safely: every tool call is a transaction."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.adapters import PromptResponse, ProviderAdapter, ScriptedAdapter, ToolExecutor
    from ringfence.errors import (
        DeadlineExceededError,
        PromptEvaluationError,
        PromptValidationError,
        RestoreFailedError,
        RingfenceError,
        ToolValidationError,
    )
    from ringfence.filesystem import Filesystem, InMemoryFilesystem
    from ringfence.prompt import (
        EffectPolicy,
        MarkdownSection,
        PathPolicy,
        PolicyDecision,
        Prompt,
        PromptTemplate,
        ProtectedFilesPolicy,
        ReadBeforeWritePolicy,
        Section,
        SequentialDependencyPolicy,
        Tool,
        ToolContext,
        ToolExample,
        ToolPolicy,
        ToolResult,
        ToolsSection,
    )
    from ringfence.resources import Binding, ResourceRegistry, Scope, Snapshotable
    from ringfence.runtime import (
        Budget,
        BudgetTracker,
        Deadline,
        Receipt,
        Session,
        ToolInvoked,
        reducer,
        tool_transaction,
    )

__version__ = "0.1.0"

__all__ = [
    "Binding",
    "Budget",
    "BudgetTracker",
    "Deadline",
    "DeadlineExceededError",
    "EffectPolicy",
    "Filesystem",
    "InMemoryFilesystem",
    "MarkdownSection",
    "PathPolicy",
    "PolicyDecision",
    "Prompt",
    "PromptEvaluationError",
    "PromptResponse",
    "PromptTemplate",
    "PromptValidationError",
    "ProtectedFilesPolicy",
    "ProviderAdapter",
    "ReadBeforeWritePolicy",
    "Receipt",
    "ResourceRegistry",
    "RestoreFailedError",
    "RingfenceError",
    "Scope",
    "ScriptedAdapter",
    "Section",
    "SequentialDependencyPolicy",
    "Session",
    "Snapshotable",
    "Tool",
    "ToolContext",
    "ToolExample",
    "ToolExecutor",
    "ToolInvoked",
    "ToolPolicy",
    "ToolResult",
    "ToolValidationError",
    "ToolsSection",
    "reducer",
    "tool_transaction",
]


def __getattr__(name: str) -> object:
    """Import a name at its first use. `import ringfence` is instant, and a program loads only the layers it uses."""
    if name in __all__:
        for layer in ("errors", "filesystem", "resources", "runtime", "prompt", "adapters"):
            module = import_module(f"{__name__}.{layer}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
