"""Keeping what a rollback is about to remove, and what it leaves aside: nobody could look at it anywhere else.

What a call had changed becomes a commit beside the history. What conflicts keep from their paths, and what a program
has written into a file that was displaced, is copied to a directory of the store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.commits import CommitInfo, PreparedStep
from ringfence_workspace.history.entries import Entry, Meta, is_directory
from ringfence_workspace.history.store import Store
from ringfence_workspace.transaction.changes import STAMP, TypedChanges
from ringfence_workspace.transaction.hold import HoldDirectory
from ringfence_workspace.transaction.restore import RestoreReport
from ringfence_workspace.transaction.step_states import all_above
from ringfence_workspace.tree.confined import Confined

logger = logging.getLogger(__name__)

KEPT_BYTES = 8 << 20
"""Of one typed call, which waits for it; beyond it only names and hashes are kept."""
_COPIES = "kept"
"""The directory of the store that copies come to."""


@dataclass(frozen=True, slots=True)
class RolledBackCall:
    """A call that is about to be rolled back. ``begun`` distinguishes it from others of its id, also after a crash."""

    call_id: str
    tool: str
    begun: str


@dataclass(frozen=True, slots=True)
class Aborted:
    """What is kept of what a rollback takes away: a commit, and its name; and in words what is not in it."""

    commit: str | None
    name: str | None
    notes: tuple[str, ...] = ()


@contextmanager
def noting_failure(notes: list[str]) -> Generator[None]:
    """Around keeping what a rollback removes: the rollback goes on whatever fails, which is logged and noted."""
    try:
        yield
    except Exception as error:  # no space or memory, or a programming error
        words = "the changes that were rolled back could not be kept"
        if isinstance(error, OSError):
            logger.warning(words, exc_info=True)
        else:
            logger.exception(words)
        notes.append(f"{words}: {error}")


class RollbackKeeper:
    """Keeps what the rollbacks of one workspace take away."""

    def __init__(self, files: Confined, store: Store) -> None:
        self._files = files
        self._store = store
        self._copies = str(store.folder.parent / _COPIES)

    # -- what a call had changed

    def keep(
        self, states: Mapping[str, Entry | None], info: CommitInfo, *, after: PreparedStep | None = None
    ) -> Aborted:
        """Keep these states as the newest aborted call, and drop the oldest one; they differ from the newest commit,
        or from ``after``. OSError."""
        commit = self._store.prepare(states, info, after=after).commit
        name = self._store.aborted.keep(commit)
        self._store.objects.log.flush()
        return Aborted(commit, name)

    def kept_as(self, commit: str) -> Aborted:
        """What `keep` gave to a process that was killed."""
        return Aborted(commit, next((name for name, kept in self._store.kept().items() if kept == commit), None))

    def keep_typed(self, changed: TypedChanges, call: RolledBackCall, hides: Callable[[str], bool]) -> list[str]:
        """Keep what a typed call has changed, once, but for what is hidden now; what was not kept, in words. Never
        fails."""
        notes: list[str] = []
        with noting_failure(notes):
            store = self._store
            if store.tip is not None and not store.aborted.knows(call.begun):
                left = _LeftStates(store, store.tip, self._files, changed, hides, notes)
                states = dict(left.each())
                store.aborted.write_down(states, left.contents, tool=call.tool, call_id=call.call_id, begun=call.begun)
        return notes

    # -- what is left aside

    def keep_conflicts(self, holding: HoldDirectory, report: RestoreReport) -> list[str]:
        """Copy what conflicts keep from their paths, and what a program has written into a file that the call had
        displaced, to where it can be looked at; where that is, in words."""
        notes: list[str] = []
        if not report.conflicts:
            return notes
        late = {(path, place) for place, path in holding.written().items() if path in report.conflicts}
        for path, place in sorted(late.union(report.displaced.items())):
            before = report.displaced.get(path) == place
            what = f"what {path} was before the call" if before else f"what was saved as {path}"
            try:
                kept = holding.keep(place, self._copies)
            except OSError as error:
                notes.append(f"{what} could not be kept: {error}")
                continue
            if kept is not None:
                notes.append(f"{what} is kept at {kept}: copy it back from there if it is wanted")
        return notes

    def keep_written(self, holding: HoldDirectory) -> None:
        """Copy what programs have written into displaced files since, and say so in the log of the process."""
        try:
            for place, path in holding.written().items():
                kept = holding.keep(place, self._copies)
                logger.warning("a program that had %s open wrote into it after a call had replaced it: %s", path, kept)
        except OSError:
            logger.exception("what a program wrote into a file that a call had replaced is lost")


class _LeftStates:
    """What a typed call left at each path that it changed; ``notes`` get what is too much to be kept."""

    def __init__(
        self,
        store: Store,
        tip: str,
        files: Confined,
        changed: TypedChanges,
        hides: Callable[[str], bool],
        notes: list[str],
    ) -> None:
        self.contents: dict[str, bytes] = {}
        """The bytes of what has no object id."""
        self._notes = notes
        self._states = store.states
        self._tip = tip
        self._files = files
        self._changed = changed
        self._hides = hides
        self._moved = {one.before.content_hash: one.path for one in changed.changes if one.before is not None}
        self._room = KEPT_BYTES

    def each(self) -> Iterator[tuple[str, Entry | None]]:
        there: set[str] = set()
        for change in self._changed.changes:
            if change.after is None:
                yield change.path, None
            elif (state := self._state(change, change.after)) is not None:
                there.add(change.path)
                yield change.path, state
        for path in all_above(there):  # directories that somebody else made since
            is_known = path in there or is_directory(self._states.entry(self._tip, path))
            found = None if is_known else self._files.look(path)
            if found is not None:
                yield path, Entry("directory", Meta.of(found))

    def _state(self, change: Change, after: FileVersion) -> Entry | None:
        found = self._changed.found(change.path) or self._files.look(change.path)
        if found is None or self._hides(change.path):  # somebody else has put it there meanwhile
            return None
        if after.kind == "directory":
            return Entry("directory", Meta.of(found))
        if after.kind == "symlink":
            self.contents[change.path] = os.fsencode(after.target or "")
            return Entry("symlink", Meta.of(found))
        source = self._moved.get(after.content_hash) if after.content_hash is not None else None
        old = self._states.entry(self._tip, source) if source is not None else None
        if (
            old is not None and old.kind == "file" and old.meta.mtime_ns == found.st_mtime_ns
        ):  # it moved: it is not read
            return Entry("file", Meta.of(found), old.oid)
        if after.size > self._room:
            self._notes.append(f"{change.path} was not kept, it was too much: {_describe(after)}")
            return None
        if after.content_hash is None:  # a socket, a pipe or a device
            return None
        self._room -= after.size
        self.contents[change.path] = self._changed.after(change.path)
        return Entry("file", Meta.of(found))


def _describe(version: FileVersion) -> str:
    known = version.content_hash or STAMP
    return f"{version.size} bytes" + ("" if known.startswith(STAMP) else f", sha256 {known}")
