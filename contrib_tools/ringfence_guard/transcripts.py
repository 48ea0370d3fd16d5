"""What agents' records of their sessions tell: whether a call has a result."""

from __future__ import annotations

import os

TAIL_BYTES = 4 << 20
"""How far from the end of a record is read. A call whose result is asked for is among the newest."""
_RESULTS = (b"tool_result", b"_output", b"functionResponse", b"tool_use_result")


def has_result(transcript: str, call_id: str) -> bool:
    """Whether the record has the result of a call. An unknown call, or a record that cannot be read, has none."""
    if not transcript or not call_id:
        return False
    try:
        with open(transcript, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return False
    name = f'"{call_id}"'.encode(errors="replace")
    return any(name in line and any(kind in line for kind in _RESULTS) for line in lines)
