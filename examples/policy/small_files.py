"""A policy of your own: no file may become larger than a limit.

    ringfence run DIR --task "..." --model ... --policy small_files.py:policy

`check_effects` gets what a call has really changed, before it is kept, whether a file tool or a command did it. A call
that is denied is rolled back, and the model is told why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringfence import Tool, ToolContext
from ringfence.participants import Change
from ringfence.prompt import BasePolicy, PolicyDecision


class SmallFilesPolicy(BasePolicy):
    """Denies a call that leaves a file larger than `most_bytes`."""

    name = "small_files"

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            if change.after is None or change.after.kind != "file" or context.filesystem is None:
                continue
            size = len(context.filesystem.read_bytes(change.path).content)
            if size > self._most_bytes:
                return PolicyDecision.deny(f"{change.path} has {size} bytes, and {self._most_bytes} are allowed")
        return PolicyDecision.allow()


policy = SmallFilesPolicy(most_bytes=100_000)
