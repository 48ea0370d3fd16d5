"""Keeping what a rollback is about to remove: a commit of its own, beside the history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.commits import CommitInfo
from ringfence_workspace.history.entries import Entry, Meta, is_directory
from ringfence_workspace.history.store import ABORTED, Store
from ringfence_workspace.transaction.changes import STAMP, RolledBackCall, TypedChanges
from ringfence_workspace.transaction.step_states import all_above
from ringfence_workspace.tree.confined import Confined

MOST_ABORTED = 50
KEPT_BYTES = 8 << 20
"""Of one typed call, which waits for it; beyond it only names and hashes are kept."""


def keep_commit(store: Store, commit: str) -> str:
    """Keep a prepared commit as the newest aborted call, and drop the oldest; its name. OSError."""
    there = [*store.aborted()]
    name = f"{ABORTED}{max(there, default=0) + 1}"
    store.keep(name, commit)
    for old in there[: 1 - MOST_ABORTED]:
        store.unkeep(f"{ABORTED}{old}")
    store.objects.log.flush()
    return name


def keep_typed(
    store: Store, files: Confined, changed: TypedChanges, call: RolledBackCall, hides: Callable[[str], bool]
) -> list[str]:
    """Keep what a typed call has changed, once, but for what is hidden now; what was not kept, in words.

    Raises:
        OSError: a file could not be read, or the store not be written.
    """
    newest = next(reversed(store.aborted().values()), None)
    if store.tip is None or (newest is not None and store.commit(newest).message.info.begun == call.begun):
        return []
    states = _StatesOfCall(store, store.tip, files, changed, hides)
    info = CommitInfo("aborted", datetime.now(UTC), call.tool, call.call_id, begun=call.begun)
    prepared = store.prepare(dict(states.each()), info)
    if prepared.changed:
        keep_commit(store, prepared.commit)
    return states.notes


class _StatesOfCall:
    """What a typed call left at each path that differs from the newest commit; ``notes`` are about what is too much."""

    def __init__(
        self, store: Store, tip: str, files: Confined, changed: TypedChanges, hides: Callable[[str], bool]
    ) -> None:
        self.notes: list[str] = []
        self._store = store
        self._states = store.states
        self._tip = tip
        self._files = files
        self._changed = changed
        self._hides = hides
        self._moved = {one.before.content_hash: one.path for one in changed.changes if one.before is not None}
        self._room = KEPT_BYTES

    def each(self) -> Iterator[tuple[str, Entry | None]]:
        known = self._states.entry
        there: set[str] = set()
        for change in self._changed.changes:
            if change.after is None:
                if known(self._tip, change.path) is not None:
                    yield change.path, None
            elif (state := self._state(change, change.after)) is not None:
                there.add(change.path)
                yield change.path, state
        for path in all_above(there):  # directories that somebody else made since
            found = None if path in there or is_directory(known(self._tip, path)) else self._files.look(path)
            if found is not None:
                yield path, Entry("directory", Meta.of(found))

    def _state(self, change: Change, after: FileVersion) -> Entry | None:
        found = self._changed.found(change.path) or self._files.look(change.path)
        if found is None or self._hides(change.path):  # somebody else has put it there meanwhile
            return None
        if after.kind == "directory":
            return Entry("directory", Meta.of(found))
        if after.kind == "symlink":
            return Entry("symlink", Meta.of(found), self._store.add_blob(os.fsencode(after.target or "")))
        source = self._moved.get(after.content_hash) if after.content_hash is not None else None
        old = self._states.entry(self._tip, source) if source is not None else None
        if (
            old is not None and old.kind == "file" and old.meta.mtime_ns == found.st_mtime_ns
        ):  # it moved: it is not read
            return Entry("file", Meta.of(found), old.oid)
        if after.size > self._room:
            self.notes.append(f"{change.path} was not kept, it was too much: {_describe(after)}")
            return None
        if after.content_hash is None:  # a socket, a pipe or a device
            return None
        self._room -= after.size
        return Entry("file", Meta.of(found), self._store.add_blob(self._changed.after(change.path)))


def _describe(version: FileVersion) -> str:
    known = version.content_hash or STAMP
    return f"{version.size} bytes" + ("" if known.startswith(STAMP) else f", sha256 {known}")
