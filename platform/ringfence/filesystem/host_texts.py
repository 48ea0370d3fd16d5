"""Text files of the machine that a person names, such as a task or a script."""

from __future__ import annotations

from pathlib import Path

from ringfence.filesystem.protocol import MAX_TEXT_BYTES


def read_host_text(path: Path) -> str:
    """The UTF-8 text of a file. A device or a pipe may have no end, and would take all of the machine's memory.

    Raises:
        ValueError: it is longer than MAX_TEXT_BYTES, or not UTF-8.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise ValueError(too_long("characters"))
    return text


def too_long(unit: str) -> str:
    return f"it has more than {MAX_TEXT_BYTES:,} {unit}, which is too much to hold in memory"
