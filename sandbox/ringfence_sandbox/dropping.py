"""The end of a holding directory: what a conflict needs is copied out of it, the rest goes."""

from __future__ import annotations

import os
from contextlib import suppress

from ringfence_sandbox.confined import Confined
from ringfence_sandbox.holding import Holding
from ringfence_sandbox.journal import Journal
from ringfence_sandbox.kernel import Before
from ringfence_sandbox.undoing import Undone


def drop_holding(files: Confined, holding: Holding, journal: Journal, before: Before) -> list[str]:
    """Remove a holding directory, and leave the root's times as they are; what would not go, in words."""
    try:
        left = list(holding.empty())
        if not left:
            root = os.fstat(files.root)
            times = (root.st_atime_ns, root.st_mtime_ns)
            journal.note({"dropping": holding.name, "times": [*times]})
            holding.remove()
            before("utime")
            with suppress(PermissionError):
                os.utime(files.root, ns=times)
    except OSError as error:
        left = [str(error)]
    holding.close()
    if left:
        return [f"{holding.name} could not be removed whole ({', '.join(left[:5])}): the next opening tries again"]
    return []


def keep_displaced(holding: Holding | None, undone: Undone, directory: str) -> list[str]:
    """Copy what a conflict keeps from its path to where it can be looked at; where that is, in words."""
    notes: list[str] = []
    for path, slot in sorted(undone.displaced.items()):
        try:
            kept = None if holding is None else holding.keep(slot, directory)
        except OSError as error:
            notes.append(f"what {path} was before the call could not be kept: {error}")
            continue
        if kept is not None:
            notes.append(f"what {path} was before the call is kept at {kept}")
    return notes
