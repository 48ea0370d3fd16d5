"""Three-way merge of texts, by lines: only what merges cleanly."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from ringfence.filesystem.patch import split_lines

MAX_LINES = 20_000
_WEIGHED_LINES = 1_000

Edit = tuple[int, int, Sequence[bytes]]
"""The lines from and to (exclusive) of the common origin, and what is there instead."""


def merged(origin: bytes, one: bytes, other: bytes) -> bytes | None:
    """What both made of `origin`, together; None where they changed the same or adjoining lines, or it is no text."""
    if one in (origin, other):
        return other
    if other == origin:
        return one
    if any(b"\0" in text for text in (origin, one, other)):
        return None
    base, first, second = (split_lines(text) for text in (origin, one, other))
    if max(len(base), len(first), len(second)) > MAX_LINES:
        return None
    edits = _combined(_edits(base, first), _edits(base, second))
    if edits is None:
        return None
    out: list[bytes] = []
    at = 0
    for start, end, lines in edits:
        out += base[at:start]
        out += lines
        at = end
    out += base[at:]
    # A line without its end can only be the last one.
    return b"".join(out) if all(line.endswith(b"\n") for line in out[:-1]) else None


def _edits(base: Sequence[bytes], new: Sequence[bytes]) -> list[Edit]:
    top, shorter = 0, min(len(base), len(new))
    while top < shorter and base[top] == new[top]:
        top += 1
    bottom = 0
    while bottom < shorter - top and base[-1 - bottom] == new[-1 - bottom]:
        bottom += 1
    old_part, new_part = base[top : len(base) - bottom], new[top : len(new) - bottom]
    matcher = SequenceMatcher(None, old_part, new_part, autojunk=max(len(old_part), len(new_part)) > _WEIGHED_LINES)
    return [
        (top + start, top + end, new_part[new_start:new_end])
        for kind, start, end, new_start, new_end in matcher.get_opcodes()
        if kind != "equal"
    ]


def _combined(one: list[Edit], other: list[Edit]) -> list[Edit] | None:
    edits: list[Edit] = []
    i = k = 0
    while i < len(one) and k < len(other):
        a, b = one[i], other[k]
        if a == b:
            edits.append(a)
            i, k = i + 1, k + 1
        elif a[1] < b[0]:
            edits.append(a)
            i += 1
        elif b[1] < a[0]:
            edits.append(b)
            k += 1
        else:
            return None
    return edits + one[i:] + other[k:]
