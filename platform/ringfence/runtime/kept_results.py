"""The whole text of a long result: reserved paths under which a model reads it."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from ringfence.session.events import ToolInvoked
from ringfence.session.tool_result import whole_text

if TYPE_CHECKING:
    from ringfence.session.session import Session


KEPT_RESULTS = ".ringfence/results/"
"""The prefix of reserved read-only paths; the id of a call follows. They are no files: the session's log has every
result."""
READER = "read_file"
"""The tool that reads such paths."""
_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9_.:+=-]{1,200}")


def full_result_path(call_id: str) -> str:
    """The reserved path of a result. An id that is no file name is hashed."""
    if _NAME.fullmatch(call_id) is None:
        call_id = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{KEPT_RESULTS}{call_id}"


def kept_result(session: Session, path: str) -> str | None:
    """The whole text of the result at a reserved path; None for other paths and unknown calls."""
    if not path.startswith(KEPT_RESULTS):
        return None
    for invoked in reversed(session[ToolInvoked].all()):
        if invoked.call_id is not None and full_result_path(invoked.call_id) == path:
            return whole_text(invoked.result, invoked.rendered_output)
    return None
