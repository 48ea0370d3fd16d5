"""The paths that a step is said to have changed, and how."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ringfence_sandbox.store.folders import Difference
from ringfence_sandbox.store.unknown import Unknown


def changed_paths(differences: Iterable[Difference]) -> list[tuple[str, str]]:
    """The paths whose kind, bytes or permissions changed, and how; "" is the root, where it is not new."""
    found = {
        path: "created" if old is None else "deleted" if new is None else "modified"
        for path, old, new in differences
        if (path or old is not None) and (old is None or not old.same_content(new))
    }
    return [*zip(os.fsdecode(b"\0".join(found)).split("\0"), found.values(), strict=True)] if found else []


def with_unknown(found: list[tuple[str, str]], unknown: Unknown, before: Unknown) -> list[tuple[str, str]]:
    """With what a step has moved unseen, and with what nobody knows any more since."""
    moved = {path: "moved" for move in unknown.moves for path in (move.old, move.new)}
    return sorted({**dict.fromkeys(unknown.new_since(before), "unknown"), **moved, **dict(found)}.items())
