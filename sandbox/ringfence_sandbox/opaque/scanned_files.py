"""A call that two scans found, as a history asks about it."""

from __future__ import annotations

from collections.abc import Sequence

from ringfence.participants import Change
from ringfence_sandbox.opaque.before_after import After
from ringfence_sandbox.store.entries import Entry
from ringfence_sandbox.store.store import Store
from ringfence_sandbox.transaction.changes import ChangedFiles, ScannedStates


class ScannedFiles(ChangedFiles):
    """What two scans found."""

    def __init__(
        self, store: Store, commit: str, after: After, changes: Sequence[Change], scanned: ScannedStates
    ) -> None:
        self._store = store
        self._commit = commit
        self._now = {path: now for path, now, _ in after.differing}
        self._changes = changes
        self._scanned = scanned

    @property
    def changes(self) -> Sequence[Change]:
        return self._changes

    @property
    def scanned(self) -> ScannedStates:
        return self._scanned

    def before(self, path: str) -> bytes:
        return self._content(path, self._store.states.entry(self._commit, path))

    def after(self, path: str) -> bytes:
        return self._content(path, self._now.get(path))

    def _content(self, path: str, entry: Entry | None) -> bytes:
        if entry is None or entry.oid is None:
            raise FileNotFoundError(path)
        return self._store.states.content(entry.oid)
