"""What a model got of a tool call only in part, and where it finds the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.prompt.tool_result import whole_text
from ringfence.runtime.events import ToolInvoked

if TYPE_CHECKING:
    from ringfence.runtime.session import Session

KEPT_RESULTS = ".ringfence/results/"
"""The beginning of paths that are no files of the workspace: the id of a call follows. Nothing is stored there, since
the session's log has every result."""
READER = "read_file"
"""The tool that reads such paths."""


def kept_at(call_id: str) -> str:
    return f"{KEPT_RESULTS}{call_id}"


def kept_result(session: Session, path: str) -> str | None:
    """The whole text that the call named by `path` answered; None for other paths and calls."""
    if not path.startswith(KEPT_RESULTS):
        return None
    call_id = path.removeprefix(KEPT_RESULTS)
    for invoked in reversed(session[ToolInvoked].all()):
        if invoked.call_id == call_id:
            return whole_text(invoked.result, invoked.rendered_output)
    return None
