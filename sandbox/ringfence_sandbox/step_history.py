"""A step for every call that changed files: what a filesystem on disk tells, written into the store."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.participants import Change, FileVersion, Step
from ringfence_sandbox.commit_messages import CommitInfo
from ringfence_sandbox.confined import Confined, is_reserved
from ringfence_sandbox.entries import Entry, Meta, Pending
from ringfence_sandbox.history import ChangedFiles, History, Recorded
from ringfence_sandbox.kernel import Before, nothing_before
from ringfence_sandbox.scan import ScanLimits, Scanner, ScanResult
from ringfence_sandbox.stat_cache import StatCache
from ringfence_sandbox.store import PreparedStep, Store

if TYPE_CHECKING:
    from ringfence.runtime.receipts import Receipt

FOLDER = "history"
_CACHE = "stat-cache"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step that its commit record will make part of the history, after what somebody else changed before it."""

    step: Step
    commits: Sequence[PreparedStep]


class StepHistory(History):
    """The history of one workspace. The store is opened when it is first needed, which is after the lock is taken."""

    def __init__(
        self, files: Confined, folder: Path, *, limits: ScanLimits, power: bool, before: Before = nothing_before
    ) -> None:
        """``files`` is the root, whose descriptor `close` closes; ``folder`` is the workspace's store."""
        self._files = files
        self._folder = folder / FOLDER
        self._limits = limits
        self._power = power
        self._before = before
        self._opened: Store | None = None
        self._closed = False
        self._prepared: _Prepared | None = None
        self._cache: StatCache | None = None
        self._cache_saved = True
        self.last: Step | None = None
        """The newest step that was made since opening."""
        self.lost: list[str] = []
        """Commits that the journal names and the store does not have."""

    @property
    def store(self) -> Store:
        if self._opened is None:
            self._opened = Store.open(self._folder)
        return self._opened

    def close(self) -> None:
        """Let go of the files. Sealing is for before, while the workspace's lock is held."""
        if not self._closed:
            self._closed = True
            if self._opened is not None:
                self._opened.objects.close()
            os.close(self._files.root)

    # What the filesystem asks of a history.

    def record(self, changed: ChangedFiles, receipt: Receipt) -> Recorded:
        self._prepared = None
        differing = _Differing(self._files, self.store, changed, receipt.started_at)
        steps: list[PreparedStep] = []
        theirs = differing.theirs()
        if theirs:
            info = CommitInfo("external", receipt.started_at)
            steps.append(self.store.prepare(theirs, info))
        info = CommitInfo(
            "step", receipt.started_at, receipt.tool, receipt.call_id, receipt.session_id, receipt.receipt_id
        )
        after = steps[-1] if steps else None
        if self._power:
            self._before("fsync objects")
        prepared = self.store.prepare(differing.ours(), info, after=after, sync=self._power)
        if not prepared.changed:
            return Recorded()
        step = Step(
            prepared.number or 0,
            receipt.tool,
            receipt.call_id,
            receipt.session_id,
            receipt.started_at,
            prepared.changed,
            prepared.commit,
        )
        self._prepared = _Prepared(step, [*steps, prepared])
        return Recorded({"history": prepared.commit}, step=step)

    def committed(self, recorded: Recorded) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.step is recorded.step:
            for commit in prepared.commits:
                self.store.publish(commit)
            self.last = prepared.step

    def recovered(self, payload: Mapping[str, object], blob: bytes) -> None:
        commit = payload.get("history")
        if isinstance(commit, str):
            try:
                self.store.advance(commit)
            except LookupError:
                # Its files are there, so they are found as somebody else's change.
                self.lost.append(commit)

    def content(self, payload: Mapping[str, object], path: str) -> bytes | None:
        commit = payload.get("history")
        if not isinstance(commit, str):
            return None
        try:
            return self.store.states.read(commit, path)
        except (LookupError, OSError):
            return None

    def sealed(self) -> bool:
        try:
            self.store.seal()
        except OSError:
            return False
        self._save_cache()
        return True

    def _save_cache(self) -> None:
        if self._cache is not None and not self._cache_saved:
            with suppress(OSError):  # without it the next opening reads more, and knows as much
                self._cache.save(self._folder / _CACHE)
                self._cache_saved = True

    # What changes outside of calls.

    def look(self) -> ScanResult:
        """Take in the tree as it is: the baseline where there is none, else what somebody else changed, if anything.

        Raises:
            OSError: the root cannot be read, or the store not be written.
        """
        store = self.store
        first = self._cache is None
        cache = self._cache = self._cache or StatCache.load(self._folder / _CACHE)
        scanner = Scanner(
            self._files.root,
            store.states,
            store.tip,
            store.add_blob,
            cache,
            limits=self._limits,
            hidden=is_reserved,
        )
        found = scanner.scan()
        if found.changes:
            kind = "baseline" if store.tip is None else "external"
            prepared = store.prepare(found.changes, CommitInfo(kind, datetime.now(UTC)))
            store.publish(prepared)
            cache.commit = prepared.commit
        if found.changes or found.read:
            self._cache_saved = False
        if first:  # later ones are saved with the rest, at the end
            self._save_cache()
        return found


class _Differing:
    """What a call changed, as states of the store: what was there before it and is not in the history, and what it
    left."""

    def __init__(self, files: Confined, store: Store, changed: ChangedFiles, at: datetime) -> None:
        self._files = files
        self._store = store
        self._changed = changed
        self._at_ns = int(at.timestamp() * 1e9)
        self._paths = {change.path for change in changed.changes}

    def theirs(self) -> dict[str, Entry | Pending | None]:
        found: dict[str, Entry | Pending | None] = {}
        for change in self._changed.changes:
            known = self._known(change.path)
            if change.before is None or _is_special(change.before):
                if known is not None:
                    found[change.path] = None
            elif not self._is_known(change, change.before, known):
                found[change.path] = self._before(change.path, change.before, known)
        for path in self._above(self._paths):
            known = self._known(path)
            if path not in self._paths and (known is None or known.kind != "directory"):
                state = self._now(path)
                if state is not None:
                    found[path] = state
        return found

    def ours(self) -> dict[str, Entry | Pending | None]:
        found: dict[str, Entry | Pending | None] = {
            change.path: None if change.after is None else self._now(change.path) for change in self._changed.changes
        }
        for path in self._above(self._paths):
            state = found.get(path) or self._now(path)
            if state is not None and state.kind == "directory":
                found[path] = state
        return found

    def _known(self, path: str) -> Entry | None:
        return self._store.states.entry(self._store.tip, path) if self._store.tip is not None else None

    def _is_known(self, change: Change, before: FileVersion, known: Entry | None) -> bool:
        if known is None or known.kind != before.kind:
            return False
        if before.kind != "symlink" and known.meta.mode != before.mode:
            return False
        if known.oid is None:
            return True
        content = self._store.states.content(known.oid)
        if before.kind == "symlink":
            return content == os.fsencode(before.target or "")
        if before.content_hash is not None:
            return hashlib.sha256(content).hexdigest() == before.content_hash
        return len(content) == before.size and content == self._changed.before(change.path)

    def _before(self, path: str, before: FileVersion, known: Entry | None) -> Pending | None:
        if known is not None:
            meta = replace(known.meta, mode=before.mode, link=0)
        else:
            meta = Meta(before.mode, os.geteuid(), os.getegid(), self._at_ns)
        if before.kind == "symlink":
            return Pending("symlink", meta, os.fsencode(before.target or ""))
        if before.kind == "directory":
            return Pending("directory", meta)
        return Pending("file", meta, partial(self._changed.before, path))

    def _now(self, path: str) -> Pending | None:
        found = self._files.look(path)
        if found is None:
            return None
        link = found.st_ino if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode) else 0
        meta = Meta(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, link)
        if stat.S_ISDIR(found.st_mode):
            return Pending("directory", meta)
        if stat.S_ISLNK(found.st_mode):
            return Pending("symlink", meta, os.fsencode(self._files.read_link(path)))
        if stat.S_ISREG(found.st_mode):
            return Pending("file", meta, partial(self._changed.after, path))
        return None  # a socket, a pipe or a device: no history has it

    def _above(self, paths: Iterable[str]) -> Iterator[str]:
        """The directories above, from the top; the root is one."""
        found = {""}
        for path in paths:
            while path := path.rpartition("/")[0]:
                if path in found:
                    break
                found.add(path)
        return iter(sorted(found))


def _is_special(version: FileVersion) -> bool:
    """Whether it is a socket, a pipe or a device, which no history has: it has neither bytes nor a hash."""
    return version.kind == "file" and version.size == 0 and version.content_hash is None
