"""Durations in minutes, and as people write them: ``1h30m``."""

import re

DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?")


def parse_duration(text: str) -> int:
    """The minutes of ``1h30m``, ``2h`` or ``45m``. ValueError for anything else."""
    found = DURATION.fullmatch(text.strip())
    if found is None or not text.strip():
        raise ValueError(f"{text!r} is not a duration: write 1h30m, 2h or 45m")
    hours, minutes = found.groups(default="0")
    return int(hours) * 60 + int(minutes)


def format_duration(minutes: int) -> str:
    """``1h30m`` for 90. ValueError for less than nothing."""
    if minutes < 0:
        raise ValueError(f"{minutes} minutes is no duration")
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest}m"
    return f"{hours}h{rest}m" if rest else f"{hours}h"
