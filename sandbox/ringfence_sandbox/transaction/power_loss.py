"""What a loss of power can leave of files that were written: their names and times, and only a part of their bytes.

A file is repaired only where nothing but that can have made it what it is: it is the very inode that a call gave the
path, with the time that it had then, and every block of it is as it was written, or zeros, or missing.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ringfence_sandbox.disk.confined import Confined, read_file
from ringfence_sandbox.disk.kernel import Renames
from ringfence_sandbox.disk.state import State
from ringfence_sandbox.transaction.hold import Holding
from ringfence_sandbox.transaction.undo_records import Epoch, is_below, rebased

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class CommittedCall:
    """What the log has of one call that was committed."""

    epochs: Sequence[Epoch]
    commit: str | None


@dataclass(slots=True)
class Repaired:
    """``repaired`` have their content again. ``damaged`` have not: nobody knows it any more."""

    repaired: list[str] = field(default_factory=list[str])
    damaged: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class _Written:
    state: State
    commit: str | None
    path: str | None = None
    """Where it was at the end of the call; a later one may have moved it."""


ContentOf = Callable[[str, str], bytes | None]
"""The bytes that a commit has at a path, or None."""


def repair_torn(
    files: Confined, calls: Iterable[CommittedCall], content_of: ContentOf, renames: Renames, holding: Holding
) -> Repaired:
    """Look at every file that `calls` left, and give those that the loss of power damaged their content again.

    It may be interrupted anywhere and repeated.
    """
    found = Repaired()
    for place, written in sorted(_left_by(files, calls).items()):
        content = _damaged(files, place, written.state)
        if content is None:
            continue
        wanted = None
        if written.commit is not None:
            wanted = content_of(written.commit, written.path or place)
        if wanted is None or hashlib.sha256(wanted).hexdigest() != written.state.sha256:
            if is_torn(content, written.state.size):
                found.damaged.append(place)
        elif is_torn(content, len(wanted), wanted):
            _give(files, place, written.state, wanted, renames, holding)
            found.repaired.append(place)
    return found


def _left_by(files: Confined, calls: Iterable[CommittedCall]) -> dict[str, _Written]:
    """The files that are the calls' own work, by where they are in the end."""
    left: dict[str, _Written] = {}
    for call in calls:
        for epoch in call.epochs:
            for path, record in epoch.records.items():
                last = record.afters[-1] if record.afters else None
                if record.afters:
                    left.pop(path, None)
                if last is not None and last.sha256 is not None:
                    left[path] = _Written(last, call.commit)
            move = epoch.move
            for path in [path for path in left if move is not None and is_below(path, move.old)]:
                written = left.pop(path)
                if move is not None and not files.is_reserved(move.new):
                    left[rebased(path, move.old, move.new)] = written
        for path, written in left.items():
            if written.path is None:
                left[path] = replace(written, path=path)
    return left


def _damaged(files: Confined, place: str, written: State) -> bytes | None:
    """The content of what is no longer as it was written although nobody has written to it since; else None."""
    found = files.look(place)
    if found is None or not is_same_writing(found, written):
        return None
    try:
        content, _ = files.read_file(place)
    except OSError:
        return None
    return None if hashlib.sha256(content).hexdigest() == written.sha256 else content


def is_same_writing(found: os.stat_result, written: State) -> bool:
    """Whether it is that inode, as far as it can have come to the disk, and nobody has written to it since."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_ino == written.inode
        and found.st_mtime_ns == written.mtime_ns
        and found.st_size <= written.size
    )


def is_torn(content: bytes, size: int, wanted: bytes | None = None) -> bool:
    """Whether a loss of power can have left this of ``size`` bytes (of ``wanted``, where those are known)."""
    if len(content) > size:
        return False
    torn = len(content) < size
    for at in range(0, len(content), _BLOCK_BYTES):
        block = content[at : at + _BLOCK_BYTES]
        if wanted is not None and block == wanted[at : at + len(block)]:
            continue
        if block.strip(b"\0"):
            if wanted is not None:
                return False
        else:
            torn = True
    return torn


def _give(files: Confined, place: str, written: State, content: bytes, renames: Renames, holding: Holding) -> None:
    """Exchange a damaged file for a whole one with its owner, permission bits and time."""
    slot = holding.new_slot()
    with files.parent(place) as (at, name):
        above, damaged = os.fstat(at), os.lstat(name, dir_fd=at)
        descriptor = holding.create(slot)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            with suppress(PermissionError):
                os.fchown(descriptor, damaged.st_uid, damaged.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(damaged.st_mode))
            os.utime(descriptor, ns=(damaged.st_atime_ns, written.mtime_ns))
            os.fsync(descriptor)
        renames.exchange(at, name, holding.descriptor, str(slot))
        taken = holding.look(slot)
        if taken is None or not is_same_writing(taken, written):  # somebody's, who came in this moment
            renames.exchange(at, name, holding.descriptor, str(slot))
            return
        with suppress(PermissionError):
            os.utime(".", ns=(above.st_atime_ns, above.st_mtime_ns), dir_fd=at)


def is_torn_file(at: int, name: str, place: str, written: State) -> bool:
    """Whether what is at a name is what a loss of power left of a file whose bytes nobody has any more."""
    content, found = read_file(at, name, place)
    return is_same_writing(found, written) and is_torn(content, written.size)
