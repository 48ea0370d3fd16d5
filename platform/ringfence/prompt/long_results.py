"""What a model got of a tool call only in part, and where it finds the whole."""

from __future__ import annotations

import hashlib
import re
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


_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9_.:+=-]{1,200}")


def full_result_path(call_id: str) -> str:
    """An id that is no name, such as one with a "/" from another framework's loop, has its hash there."""
    if _NAME.fullmatch(call_id) is None:
        call_id = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{KEPT_RESULTS}{call_id}"


def kept_result(session: Session, path: str) -> str | None:
    """The whole text that the call named by `path` answered; None for other paths and calls."""
    if not path.startswith(KEPT_RESULTS):
        return None
    for invoked in reversed(session[ToolInvoked].all()):
        if invoked.call_id is not None and full_result_path(invoked.call_id) == path:
            return whole_text(invoked.result, invoked.rendered_output)
    return None
