"""The end of a holding directory: what a conflict needs is copied out of it, and what somebody has written into a file
since it was displaced; the rest goes."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ringfence_sandbox.confined import Confined
from ringfence_sandbox.differing import Differences
from ringfence_sandbox.holding import Holding
from ringfence_sandbox.journal import Journal
from ringfence_sandbox.kernel import Before
from ringfence_sandbox.records import Deed, Identity
from ringfence_sandbox.undoing import Undone

logger = logging.getLogger(__name__)
_REGULAR = oct(stat.S_IFREG)


def written_into(holding: Holding, deeds: Iterable[Deed]) -> dict[int, str]:
    """The displaced files that somebody has written into since, who had them open: by slot, where each was. One look a
    file; a change of bytes alone, within a tick of the clock, is not noticed."""
    displaced: dict[int, tuple[str, Identity]] = {}
    for deed in deeds:
        was = deed.old if deed.kind == "swap" else deed.new if deed.kind == "take" else None
        if was is not None and was.kind == _REGULAR:
            displaced[deed.slot] = (deed.path, was)
    found: dict[int, str] = {}
    for slot, (path, was) in displaced.items():
        here = holding.look(slot)
        if here is None or here.st_ino != was.inode:
            continue
        if here.st_mtime_ns != was.mtime_ns or here.st_size != was.size:
            found[slot] = path
    return found


def saved_between(deeds: Sequence[Deed], since: Differences) -> str | None:
    """A path at which a call displaced a file that was not there before the call and that it had not made: somebody
    saved it between two changes of the call, too late for the look before the second. None if there is none.

    ``since`` has gone back over the deeds: what it finds held of the time before them is in the history.
    """
    made: set[tuple[int, int, int]] = set()
    written: set[str] = set()
    slots: dict[int, str] = {}
    for deed in deeds:
        if deed.kind in ("put", "swap") and deed.new is not None and deed.slot not in slots:
            made.add((deed.new.inode, deed.new.size, deed.new.mtime_ns))
            written.update([deed.new.sha256] if deed.new.sha256 else [])
        if deed.kind in ("take", "swap"):
            slots[deed.slot] = deed.path
    for where, found in since.displaced(slots):
        if (found.st_ino, found.st_size, found.st_mtime_ns) in made:
            continue
        if hashlib.sha256(since.read(where)).hexdigest() not in written:  # a new time alone is no save
            return "/".join(filter(None, (slots[where[0]], where[1])))
    return None


def keep_written_into(holding: Holding, deeds: Iterable[Deed], directory: str) -> None:
    """Copy what nobody would ever see otherwise to where it can be looked at, and say so in the log."""
    try:
        for slot, path in written_into(holding, deeds).items():
            kept = holding.keep(slot, directory)
            logger.warning("a program that had %s open wrote into it after a call had replaced it: %s", path, kept)
    except OSError:
        logger.exception("what a program wrote into a file that a call had replaced is lost")


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
