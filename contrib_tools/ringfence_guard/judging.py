"""Policies over the changes of calls that an agent ran itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringfence.runtime.policy import ALLOW, BasePolicy, Policy, PolicyDecision

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool


class FailedCommandPolicy(BasePolicy):
    """Deny what a command changed that has failed."""

    name = "rollback-on-failure"

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        return PolicyDecision.deny(f"the command ended with exit code {self._exit_code}")


class SomeDeniedError(BaseException):
    """Ends an adoption before anything is kept or rolled back. It is no Exception, which would be a denial."""


class EachChangePolicy(BasePolicy):
    """Ask policies about every change on its own, and end the adoption if any is denied.

    It is for changes of which nobody knows whose they are: one that is denied says nothing about the others.
    """

    name = "each"

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = [policy for policy in policies if isinstance(policy, BasePolicy)]
        self.denied: dict[str, str] = {}
        """By path, which policy denies it and why."""

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            for policy in self._policies:
                decision = policy.check_effects(tool, params, (change,), context=context)
                if not decision.allowed:
                    self.denied.setdefault(change.path, f"{policy.name}: {decision.reason}")
        if self.denied:
            raise SomeDeniedError
        return ALLOW
