"""The end of a holding directory: what a conflict needs is copied out of it, and what somebody has written into a file
since it was displaced; the rest goes."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ringfence.filesystem.paths import escape_path
from ringfence_sandbox.calls.deed_rollback import Undone
from ringfence_sandbox.calls.differences import IN_TREE, Differences
from ringfence_sandbox.calls.holding import Holding, holding_store
from ringfence_sandbox.calls.journal import Journal
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.kernel import failpoint
from ringfence_sandbox.disk.places import state_directory_of
from ringfence_sandbox.disk.records import Deed, Identity

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
    made: dict[tuple[int, int, int], str | None] = {}
    written: set[str] = set()
    slots: dict[int, str] = {}
    for deed in deeds:
        if deed.kind in ("put", "swap") and deed.new is not None and deed.slot not in slots:
            made[deed.new.inode, deed.new.size, deed.new.mtime_ns] = deed.new.sha256
            written.update([deed.new.sha256] if deed.new.sha256 else [])
        if deed.kind in ("take", "swap"):
            slots[deed.slot] = deed.path
    for where, found in since.displaced(slots):
        own = (found.st_ino, found.st_size, found.st_mtime_ns)
        if own in made and made[own] is None:
            continue
        try:
            content = since.read(where)
        except PermissionError:  # who may not read it has not saved it in place, either
            if own in made:
                continue
            raise
        # A new time alone is no save; but somebody may save as many bytes, and put the time back.
        if hashlib.sha256(content).hexdigest() not in written:
            return "/".join(filter(None, (slots[where[0]], where[1])))
    return None


def saved_after(deeds: Iterable[Deed], since: Differences) -> str | None:
    """A path at which somebody has changed what a call had left there: in its step that would be the call's. None if
    there is none. ``since`` has gone back over the deeds and compared."""
    left: dict[str, Identity | None] = {}
    for deed in deeds:
        if deed.kind in ("take", "rmdir", "move"):
            is_tree = deed.new is None or deed.new.is_directory
            below = [path for path in left if path.startswith(f"{deed.path}/")] if is_tree else []
            moved = {deed.to + path[len(deed.path) :]: left.pop(path) for path in below}
            left |= moved if deed.kind == "move" else {}
            made, left[deed.path] = left.get(deed.path), None
            if deed.kind == "move":
                left[deed.to] = made
            if deed.kind == "move" and made is None:
                del left[deed.to]
        elif deed.kind in ("put", "swap"):
            left[deed.path] = deed.new
        elif deed.kind == "mkdir":
            left.pop(deed.path, None)
    for path, identity in left.items():
        found = since.found(path)
        if (identity is None) != (found is None):
            return path
        if identity is None or found is None or identity.fits(found):
            continue
        if identity.kind != _REGULAR or not stat.S_ISREG(found.st_mode):
            return path
        if hashlib.sha256(since.read((IN_TREE, path))).hexdigest() != identity.sha256:  # a new time alone is no save
            return path
    return None


def keep_written_into(holding: Holding, deeds: Iterable[Deed], directory: str) -> None:
    """Copy what nobody would ever see otherwise to where it can be looked at, and say so in the log."""
    try:
        for slot, path in written_into(holding, deeds).items():
            kept = holding.keep(slot, directory)
            logger.warning("a program that had %s open wrote into it after a call had replaced it: %s", path, kept)
    except OSError:
        logger.exception("what a program wrote into a file that a call had replaced is lost")


def drop_holding(files: Confined, holding: Holding, journal: Journal) -> list[str]:
    """Remove a holding directory, and leave the root's times as they are; what would not go, in words."""
    try:
        left = list(holding.empty())
        if not left:
            root = os.fstat(files.root)
            times = (root.st_atime_ns, root.st_mtime_ns)
            journal.note({"dropping": holding.name, "times": [*times]})
            holding.remove()
            failpoint("utime")
            with suppress(PermissionError):
                os.utime(files.root, ns=times)
    except OSError as error:
        left = [str(error)]
    holding.close()
    if left:
        return [f"{holding.name} could not be removed whole ({', '.join(left[:5])}): the next opening tries again"]
    return []


def keep_displaced(holding: Holding | None, undone: Undone, deeds: Iterable[Deed], directory: str) -> list[str]:
    """Copy what conflicts keep from their paths to where it can be looked at, and what a program has written into a
    file that the call had made and replaced; where that is, and what a conflict keeps from going back, in words.
    ``deeds`` are those that were undone."""
    deeds = [*deeds]
    notes = [f"what was moved from {one.path} is still at {_place(one, deeds, undone)}" for one in undone.moved]
    if holding is None:
        return notes
    late = written_into(holding, deeds) if undone.conflicts else {}
    written = {(path, slot) for slot, path in late.items() if path in undone.conflicts}
    for path, slot in sorted(written.union(undone.displaced.items())):
        what = f"what {path} was before the call" if undone.displaced.get(path) == slot else f"what was saved as {path}"
        try:
            kept = holding.keep(slot, directory)
        except OSError as error:
            notes.append(f"{what} could not be kept: {error}")
            continue
        if kept is not None:
            notes.append(f"{what} is kept at {kept}: copy it back from there if it is wanted")
    return notes


def _place(moved: Deed, deeds: Iterable[Deed], undone: Undone) -> str:
    """Where something is that was not moved back, when the moves before that are undone."""
    place = moved.to
    stay = {one.seq for one in undone.moved}
    for deed in sorted(deeds, key=lambda one: -one.seq):
        if deed.kind == "move" and deed.seq < moved.seq and deed.seq not in stay and place.startswith(f"{deed.to}/"):
            place = deed.path + place[len(deed.to) :]
    return place


def said_of_unknown(files: Confined, name: str, store: str) -> str:
    """What to do about a holding directory with files in it that the journal of a store does not know, in words."""
    root, owner = os.readlink(f"/proc/self/fd/{files.root}"), holding_store(files, name)
    state = state_directory_of(owner, root) if owner != store else None
    if state is None:
        ran = "If it ran with another RINGFENCE_STATE_DIR, `ringfence recover` with that one takes it back"
    else:
        command = f"RINGFENCE_STATE_DIR={shlex.quote(escape_path(state))} ringfence recover {escape_path(root)}"
        ran = f"It ran with another state directory: end what has the root open now, and `{command}` takes it back"
    return (
        f"{name} in the root has displaced files of a call that the journal does not know. {ran}. Else take out what "
        "you miss, and remove it"
    )
