"""When a call began to run: while its agent asks a person for a permission, what changes is that person's.

An agent that says how long a call took lets its start be reckoned from its end. The kernel notes when a file changed
last, and lets no program set that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import time
from typing import TYPE_CHECKING, Any

from ringfence.runtime.policy import ALLOW, BasePolicy, PolicyDecision
from ringfence_guard.events import HookEvent
from ringfence_guard.judging import SomeDeniedError
from ringfence_guard.kept_calls import OpenCall, boot_time

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool

SLACK_SECONDS = 2.0
"""What the way from the end of a call to the start of its hook may take at the most."""
MOST_CLOCK_STEP = 0.25
"""By how many seconds the clock may have been set during a call whose start is reckoned."""


def start_of(root: str, call: OpenCall, end: HookEvent, slack: float) -> float | None:
    """Before which time of change of a file a call had not begun to run; None where that cannot be told.

    The time is by the clock of the filesystem, which is asked for it with a file that has no name. A filesystem of a
    network has none of these, and is not trusted.
    """
    if end.seconds is None or not call.boot:
        return None
    try:
        nameless = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        changed = os.fstat(nameless).st_ctime
    finally:
        os.close(nameless)
    now, step = boot_time(), (time() - call.began) - (boot_time() - call.boot)
    if abs(step) > MOST_CLOCK_STEP:
        return None
    return changed - (now - (end.hooked_at or now)) - end.seconds - slack


class EarlierChangesPolicy(BasePolicy):
    """End an adoption once if some of its changes are from before the start of its call, and know them then."""

    name = "earlier"

    def __init__(self, root: str, start: float) -> None:
        self._root, self._start = root, start
        self.paths: Sequence[str] | None = None

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        if self.paths is None:
            self.paths = [change.path for change in changes if self._is_earlier(change)]
            if self.paths:
                raise SomeDeniedError
        return ALLOW

    def _is_earlier(self, change: Change) -> bool:
        # What a directory has in it does not change when that is moved: its own time says so. That of the directory
        # that something was removed from says so, too.
        place = change.path
        if change.after is None:
            while place and not os.path.lexists(os.path.join(self._root, place)):
                place = os.path.dirname(place)
        places = [place]
        while place := os.path.dirname(place):
            places.append(place)
        try:
            return all(os.lstat(os.path.join(self._root, one)).st_ctime < self._start for one in places)
        except OSError:
            return False
