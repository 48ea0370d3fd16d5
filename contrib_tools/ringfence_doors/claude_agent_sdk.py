"""Hooks for the Claude Agent SDK (the extra ``claude-agent-sdk``): each changing call of its tools is a step."""

# claude-agent-sdk is not installed where this is checked. Its client and its CLI are used as tests/doors shows.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ringfence.errors import RingfenceError
from ringfence.extras import missing
from ringfence_guard import (
    GUARDED_AGENTS,
    GuardedCalls,
    GuardLog,
    GuardSettings,
    HookAnswer,
    format_answer,
    guard_directory,
    parse_event,
)

try:
    from claude_agent_sdk import HookMatcher
except ImportError as error:
    raise ModuleNotFoundError(missing("claude_agent_sdk", "claude-agent-sdk"), name="claude_agent_sdk") from error

if TYPE_CHECKING:
    from ringfence.prompt import BasePolicy
    from ringfence_workspace import Workspace

HOOK_SECONDS = 120.0
"""How long the SDK waits for an answer. It is there after 80 % of that at the latest."""
MOST_THREADS = 64
"""Events that wait at once: a call waits for the end of one that it overlaps, and its end needs a thread, too."""
_OTHERS = ("UserPromptSubmit", "PostToolBatch", "SubagentStop", "Stop")


class RingfenceHooks(dict[str, list[HookMatcher]]):
    """The hooks of one workspace, for any number of clients. `ringfence_hooks` makes them."""

    def __init__(self, calls: GuardedCalls) -> None:
        self.calls = calls
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="ringfence-hooks")
        agent = GUARDED_AGENTS["claude"]
        for name in (*agent.calls, *_OTHERS):
            matcher = agent.matcher if name in agent.calls else None
            self[name] = [HookMatcher(matcher=matcher, hooks=[self._answer], timeout=HOOK_SECONDS)]

    def undo(self, n: int = 1) -> str:
        """Undo the newest ``n`` steps of the agents that are not undone. What it did, in words.

        Calls whose end was never told, since their client was closed, say, are over then.

        Raises:
            LookupError: there are not so many.
            OSError, RingfenceError, ValueError: as `Workspace.undo`.
        """
        self.calls.settle_all()
        return self.calls.undo(n)

    async def _answer(self, input: Any, tool_use_id: str | None, context: Any) -> dict[str, Any]:  # noqa: A002
        event = parse_event("claude", input)

        def handle() -> HookAnswer:
            try:
                return self.calls.handle(event, patience_seconds=0.8 * HOOK_SECONDS)
            except (OSError, RingfenceError, ValueError) as error:
                if event.phase == "before":
                    return HookAnswer(denial=f"ringfence cannot look at the files, so nothing may run: {error}")
                return HookAnswer(verdict=f"ringfence cannot say what became of this call: {error}")

        # Asked in a thread, since an event may wait for the end of another call.
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, handle)
        output = format_answer(event, answer).stdout
        return json.loads(output) if output else {}


def ringfence_hooks(
    workspace: Workspace,
    *,
    policies: Sequence[BasePolicy] = (),
    rollback_on_error: bool = False,
    deny_background: bool = False,
) -> RingfenceHooks:
    """Return the ``hooks`` of `ClaudeAgentOptions` for an opened workspace. Whoever opened the workspace closes it.

    Each call of a tool that changes files there is a step. What ``policies`` deny is rolled back, and the model is
    told. So is what a failed command has changed, with ``rollback_on_error``. ``deny_background`` denies commands that
    may go on after the end of their call.

    Raises OSError where the log of the calls cannot be kept.
    """
    directory = guard_directory(workspace.root)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return RingfenceHooks(
        GuardedCalls(
            workspace.root,
            GuardLog(directory),
            open_workspace=lambda: workspace,
            policies=policies,
            settings=GuardSettings(deny_background=deny_background, rollback_on_failure=rollback_on_error),
        )
    )
