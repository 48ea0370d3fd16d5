"""Prompts: sections with instructions, tools and policies, and the arguments and results of tool handlers."""

from ringfence.errors import (
    OutputParseError,
    PromptError,
    PromptOverridesError,
    PromptRenderError,
    PromptValidationError,
    SectionVisibility,
    ToolValidationError,
    VisibilityExpansionRequired,
)
from ringfence.policies.approval import Approval, ApprovalPolicy, ApprovalRequest
from ringfence.policies.effects import (
    DeletionLimitPolicy,
    HiddenFilesPolicy,
    PathPolicy,
    ProtectedFilesPolicy,
    RequireCleanTestsPolicy,
)
from ringfence.policies.read_before_write import ReadBeforeWritePolicy
from ringfence.prompt.descriptor import (
    PromptDescriptor,
    PromptOverride,
    PromptOverridesStore,
    SectionDescriptor,
    ToolDescriptor,
    ToolOverride,
)
from ringfence.prompt.overrides import LocalPromptOverridesStore
from ringfence.prompt.prompt import Prompt, PromptTemplate
from ringfence.prompt.rendering import RenderedPrompt
from ringfence.prompt.section import MarkdownSection, Section, SectionOverride, ToolsSection
from ringfence.runtime.context import ToolContext, ToolHandler
from ringfence.runtime.policy import (
    BasePolicy,
    EffectPolicy,
    PolicyDecision,
    PolicyState,
    SequentialDependencyPolicy,
    ToolPolicy,
)
from ringfence.runtime.tool import ContentOf, Itself, Tool, ToolExample
from ringfence.session.tool_result import ToolRenderableResult, ToolResult

__all__ = [
    "Approval",
    "ApprovalPolicy",
    "ApprovalRequest",
    "BasePolicy",
    "ContentOf",
    "DeletionLimitPolicy",
    "EffectPolicy",
    "HiddenFilesPolicy",
    "Itself",
    "LocalPromptOverridesStore",
    "MarkdownSection",
    "OutputParseError",
    "PathPolicy",
    "PolicyDecision",
    "PolicyState",
    "Prompt",
    "PromptDescriptor",
    "PromptError",
    "PromptOverride",
    "PromptOverridesError",
    "PromptOverridesStore",
    "PromptRenderError",
    "PromptTemplate",
    "PromptValidationError",
    "ProtectedFilesPolicy",
    "ReadBeforeWritePolicy",
    "RenderedPrompt",
    "RequireCleanTestsPolicy",
    "Section",
    "SectionDescriptor",
    "SectionOverride",
    "SectionVisibility",
    "SequentialDependencyPolicy",
    "Tool",
    "ToolContext",
    "ToolDescriptor",
    "ToolExample",
    "ToolHandler",
    "ToolOverride",
    "ToolPolicy",
    "ToolRenderableResult",
    "ToolResult",
    "ToolValidationError",
    "ToolsSection",
    "VisibilityExpansionRequired",
]
