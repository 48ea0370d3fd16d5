"""What a call needs of a tool, looked up once for each that is on offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringfence.prompt.policy import EffectPolicy, ToolPolicy, has_hook, is_asked
from ringfence.prompt.tool import Tool, ToolHandler
from ringfence.runtime.receipts import PolicyVerdict

if TYPE_CHECKING:
    from ringfence.prompt.prompt import Prompt


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool, and what a call needs of it. (Each tool is of a class of its own, so that to ask it takes longer.)"""

    tool: Tool[Any, Any]
    handler: ToolHandler[Any, Any] | None
    decode: Callable[[Mapping[str, object] | str | bytes], object]
    fits: Callable[[object], bool]
    read_only: bool
    opaque: bool
    policies: Sequence[tuple[ToolPolicy, PolicyVerdict, bool]]
    """Each with what the receipt says where it allows a call, and whether it has to be asked for that."""
    learning: Sequence[ToolPolicy]
    """Those that are told of calls that succeeded."""
    effect_policies: Sequence[tuple[EffectPolicy, PolicyVerdict]]


def bind_tool(tool: Tool[Any, Any], prompt: Prompt[Any]) -> BoundTool:
    policies = prompt.policies_for_tool(tool.name)
    return BoundTool(
        tool,
        tool.handler,
        tool.decode,
        tool.fits,
        tool.read_only,
        tool.opaque,
        [
            (policy, PolicyVerdict(policy.name, True), is_asked(policy, "check", tool))
            for policy in policies
            if has_hook(policy, "check")
        ],
        [policy for policy in prompt.result_policies(tool.name) if is_asked(policy, "on_result", tool)],
        [(policy, PolicyVerdict(policy.name, True)) for policy in policies if is_asked(policy, "check_effects", tool)],
    )
