"""Prompts: sections with instructions, tools and policies, and what a tool's handler gets and answers."""

from ringfence.errors import (
    OutputParseError,
    PromptRenderError,
    PromptValidationError,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from ringfence.prompt.effects import (
    DeletionLimitPolicy,
    PathPolicy,
    ProtectedFilesPolicy,
    RequireCleanTestsPolicy,
)
from ringfence.prompt.markdown import MarkdownSection
from ringfence.prompt.policy import (
    EffectPolicy,
    PolicyDecision,
    PolicyState,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    ToolPolicy,
)
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.rendering import RenderedPrompt
from ringfence.prompt.section import Section, ToolsSection
from ringfence.prompt.tool import Tool, ToolContext, ToolExample, ToolHandler
from ringfence.prompt.tool_result import ToolRenderableResult, ToolResult
from ringfence.runtime.visibility import SectionVisibility

__all__ = [
    "DeletionLimitPolicy",
    "EffectPolicy",
    "MarkdownSection",
    "OutputParseError",
    "PathPolicy",
    "PolicyDecision",
    "PolicyState",
    "Prompt",
    "PromptRenderError",
    "PromptTemplate",
    "PromptValidationError",
    "ProtectedFilesPolicy",
    "ReadBeforeWritePolicy",
    "RenderedPrompt",
    "RequireCleanTestsPolicy",
    "Section",
    "SectionVisibility",
    "SequentialDependencyPolicy",
    "Tool",
    "ToolContext",
    "ToolExample",
    "ToolHandler",
    "ToolPolicy",
    "ToolRenderableResult",
    "ToolResult",
    "ToolValidationError",
    "ToolsSection",
    "VisibilityExpansionRequired",
]
