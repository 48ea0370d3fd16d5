"""A tool in a prompt, with the policies that govern it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringfence.receipts import PolicyVerdict
from ringfence.runtime.context import PromptOfCalls, ToolHandler
from ringfence.runtime.policy import EffectPolicy, ToolPolicy, has_hook, is_asked, runs_last
from ringfence.runtime.tool import Tool


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool in a prompt, and what a call needs of it."""

    tool: Tool[Any, Any]
    handler: ToolHandler[Any, Any] | None
    decode: Callable[[Mapping[str, object] | str | bytes], object]
    fits: Callable[[object], bool]
    read_only: bool
    opaque: bool
    policies: Sequence[tuple[ToolPolicy, PolicyVerdict, bool]]
    """Each with its verdict where it allows a call, and whether it has to be asked for that."""
    result_policies: Sequence[ToolPolicy]
    effect_policies: Sequence[tuple[EffectPolicy, PolicyVerdict]]


def bind_tool(tool: Tool[Any, Any], prompt: PromptOfCalls) -> BoundTool:
    """Sort the policies that concern a tool by their hooks."""
    policies = sorted(prompt.policies_for_tool(tool.name), key=runs_last)
    checking = [policy for policy in policies if isinstance(policy, ToolPolicy) and has_hook(policy, "check")]
    observing = [policy for policy in prompt.result_policies(tool.name) if isinstance(policy, ToolPolicy)]
    effects = [policy for policy in policies if isinstance(policy, EffectPolicy)]
    return BoundTool(
        tool,
        tool.handler,
        tool.decode,
        tool.fits,
        tool.read_only,
        tool.opaque,
        [(policy, PolicyVerdict(policy.name, True), is_asked(policy, "check", tool)) for policy in checking],
        [policy for policy in observing if is_asked(policy, "on_result", tool)],
        [(policy, PolicyVerdict(policy.name, True)) for policy in effects if is_asked(policy, "check_effects", tool)],
    )
