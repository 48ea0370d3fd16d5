"""A step for every call that changed files: what a filesystem on disk reports, written into the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from ringfence.participants import Step
from ringfence_workspace.history.commits import REPLACED, CommitInfo, PreparedStep
from ringfence_workspace.history.entries import Difference, Entry, Unknown, is_directory
from ringfence_workspace.history.scan import (
    Exclusion,
    Hides,
    Progress,
    ScanLimits,
    Scanner,
    ScanResult,
    Separates,
    follow,
    no_progress,
    separates_all,
)
from ringfence_workspace.history.stat_cache import Stamp, StatCache
from ringfence_workspace.history.store import Store
from ringfence_workspace.history.unsure_names import FullScanNeededError
from ringfence_workspace.transaction.aborted_calls import RollbackKeeper, RolledBackCall
from ringfence_workspace.transaction.changes import ScannedFiles, TypedChanges
from ringfence_workspace.transaction.detection import Detector
from ringfence_workspace.transaction.hold import HoldDirectory
from ringfence_workspace.transaction.step_states import Differing
from ringfence_workspace.tree.confined import Confined, PathLooks
from ringfence_workspace.tree.extended_attributes import Attributes
from ringfence_workspace.tree.hidden_tree import HiddenTree
from ringfence_workspace.tree.linked_worktrees import LINKED_WORKTREE
from ringfence_workspace.tree.new_files import make
from ringfence_workspace.tree.state import State

if TYPE_CHECKING:
    from ringfence.receipts import Receipt

STAT_CACHE = "stat-cache"


class StepHistory:
    """The history of one workspace."""

    def __init__(self, files: Confined, store: Store, *, limits: ScanLimits, detector: Detector) -> None:
        self._files = files
        self.store: Final = store
        self.keeper: Final = RollbackKeeper(files, store)
        self.limits = limits
        self.detector: Final = detector
        self._prepared: Sequence[PreparedStep] = ()
        """The commit of a step that its commit record will make the newest, after what somebody else changed before."""
        self._cache: StatCache | None = None
        self._cache_saved = True
        self._hashes: OrderedDict[str, str] = OrderedDict()
        """Of some files that steps of late left, the sha256 by object id: their bytes need not be read for it."""
        self.left_out: Mapping[str, tuple[Exclusion, object]] = {}
        """What the newest scan did not take in, why, and its inode, size and time."""
        self.looked_at = -inf
        """When the newest scan began, on the monotonic clock."""
        self.last: Step | None = None
        """The newest step that was made since opening."""
        self.rewritten: set[str] = set()
        """What an undo or a restore has written in the open call: times and names of one file alone are no change that
        the filesystem tells of, and its step is to have them."""
        self.reverses = ""
        self.promotes = ""
        """What the step of the open call reverses or promotes, as `CommitInfo` has it."""
        self.replaced = False
        """Whether what the next look finds to differ is that of another directory in the place of the one before."""
        self.hidden: HiddenTree | None = None
        """What no scan takes in, since it is hidden."""
        self.progress: Progress = no_progress
        """Called with the progress of a scan."""

    @property
    def files(self) -> Confined:
        """The tree that it is the history of."""
        return self._files

    # What transactions ask of a history.

    def begin(self) -> None:
        """An outermost call begins. OSError: the tree cannot be taken in."""
        if self.store.tip is None:
            self.look()

    def record(self, changed: TypedChanges | ScannedFiles, receipt: Receipt) -> Step | None:
        """Prepare the step of a call that changed files; None where it makes none. Nothing of it counts until the
        commit record is written. What it raises makes the call fail and roll back."""
        self._prepared = ()
        info = CommitInfo(
            "step",
            receipt.started_at,
            receipt.tool,
            receipt.call_id,
            receipt.session_id,
            receipt.receipt_id,
            receipt.title,
            client=receipt.client,
            opaque=isinstance(changed, ScannedFiles),
            reverses=self.reverses,
            promotes=self.promotes,
        )
        steps: list[PreparedStep] = []
        if isinstance(changed, ScannedFiles):
            own, unknown = self._since_tip(changed, info), changed.unknown
        else:
            with closing(PathLooks(self._files)) as looks:
                differing = Differing(
                    self._files, self.store, changed, receipt.started_at, self.limits, self._hashes, looks
                )
                own = differing.own_states(self.rewritten)
                external = differing.external_states()
                before, unknown = differing.unknown()
            if external or before.reasons != self.store.states.unknown(self.store.tip).reasons:
                others = CommitInfo("external", receipt.started_at)
                steps.append(self.store.prepare(external, others, unknown=before))
        after = steps[-1] if steps else None
        prepared = self.store.prepare(own, info, after=after, unknown=unknown)
        if not prepared.changed:
            return None
        self._prepared = [*steps, prepared]
        return Step(
            prepared.number or 0,
            receipt.tool,
            receipt.call_id,
            receipt.session_id,
            receipt.started_at,
            prepared.changed,
            prepared.commit,
            receipt.client,
            receipt.title,
        )

    def _since_tip(self, scanned: ScannedFiles, info: CommitInfo) -> Mapping[str, Entry | None]:
        if scanned.since is None:
            return scanned.states
        now = self.store.prepare(scanned.states, info, after=scanned.since)
        tip = self.store.tip
        differences = self.store.states.differences(tip, now.commit)
        return {path: state for path, _, state in differences if not self._files.is_reserved(path)}

    def publish(self) -> None:
        """Make the step that was recorded last the newest of the history: no call is in the log that would do so.

        Raises OSError where it cannot be written. The history is as it was."""
        for prepared in self._prepared:
            self.store.publish(prepared)

    def ended(self, step: Step | None) -> None:
        """The open call has ended; the log has its commit record, where it made a step. Must not fail."""
        prepared, self._prepared = self._prepared, ()
        self.rewritten.clear()
        self.reverses = self.promotes = ""
        if step is not None:
            for commit in prepared:
                self.store.published(commit)
            self.last = step

    def rolling_back(self, changed: TypedChanges, call: RolledBackCall) -> Sequence[str]:
        """Keep what a call changed, which is about to be rolled back; notes of what was not kept. It may be asked for
        the same call again. Never fails."""
        return self.keeper.keep_typed(changed, call, self._hides)

    def _hides(self, path: str) -> bool:
        return self.hidden is not None and self.hidden.hides(path)

    def has(self, path: str) -> bool:
        """Whether the newest commit has something at a path."""
        return self.store.tip is not None and self.store.states.entry(self.store.tip, path) is not None

    def damage(self) -> Sequence[str]:
        """What was found to be lost of what was kept, in words."""
        return () if self.store.damage is None else [self.store.damage]

    def remake(self, path: str, before: State, holding: HoldDirectory) -> int | None:
        """Make what a path had again in a slot of the hold, if the newest commit has just that; else None."""
        tip = self.store.tip
        entry = self.store.states.entry(tip, path) if tip is not None else None
        if entry is None or entry.oid is None or (entry.kind, entry.meta.mtime_ns) != (before.kind, before.mtime_ns):
            return None
        try:
            content = self.store.states.content(entry.oid)
        except LookupError:
            return None
        if len(content) != before.size:
            return None
        slot = holding.new_slot()
        make(holding.descriptor, str(slot), entry.kind, content, entry.meta._replace(mode=before.mode))
        return slot

    def seal(self, *, only_long: bool = False) -> None:
        """Begin a new log, if no call needs this one, and it can be written. With ``only_long``, if it is long."""
        if only_long:
            self.store.seal_when_long()
            return
        with suppress(OSError):  # all is in the log
            self.store.seal()
            self._save_cache()

    def _save_cache(self) -> None:
        if self._cache is not None and not self._cache_saved:
            with suppress(OSError):  # without it the next opening reads more, and knows as much
                self._cache.save(self.store.folder / STAT_CACHE)
                self._cache_saved = True

    # Looking at the tree.

    def names(self, path: str) -> Collection[str]:
        """What is in a directory now; nothing where there is none, or none that can be read."""
        try:
            return self._files.names(path)
        except OSError:
            return ()

    def scan(
        self,
        commit: str | None,
        keep: Callable[[bytes], str] | None = None,
        *,
        hides: Hides | None = None,
        separates: Separates = separates_all,
    ) -> ScanResult:
        """What differs from a commit. ``keep`` takes the bytes of what had to be read, by default the store.
        ``hides`` tells what is hidden; left out, what is now. ``separates`` tells which linked worktrees are left out.

        The cache stands for no commit after changes, until `stand_for` says which.
        """
        now_hidden = self.hidden if hides is None else None
        cache = self._loaded()
        named = self._named(cache)
        if now_hidden is not None:
            now_hidden.forget_paths()
            hides = now_hidden.sees
        scanner = partial(
            Scanner,
            self._files.root,
            self.store.states,
            commit,
            keep or self.store.add_blob,
            cache,
            limits=self.limits,
            hidden=self._files.is_reserved,
            progress=self.progress,
            hides=hides,
            separates=separates,
        )
        found = None if named is None else self._scan_named(scanner, commit, named)
        if found is None:
            found = self._scan_all(scanner)
        elif keep is None and self.detector.has_to_audit:  # a change that is found then is none of a call
            self._audit(scanner, commit, found)
        worktrees = [path for path, reason in found.excluded.items() if reason == LINKED_WORKTREE]
        if now_hidden is not None:  # commands reach what is there
            now_hidden.find_below(worktrees)
        self.left_out = {
            path: (reason, None if (stamp := found.stamps.get(path)) is None else stamp[:3])
            for path, reason in found.excluded.items()
            if not self._files.is_reserved(path)
        }
        self._cache_saved = self._cache_saved and not (found.changes or found.read)
        return found

    def _loaded(self) -> StatCache:
        if self._cache is None:
            self._cache = StatCache.load(self.store.folder / STAT_CACHE)
        return self._cache

    def _named(self, cache: StatCache) -> Set[str] | None:
        """Have the cache be unsure of what the watch names. The paths that may be hidden; None: all is to be scanned.

        What is hidden is looked at each time."""
        if not self.detector.add_events(cache):
            return None
        named = set[str]() if self.hidden is None else self.hidden.looked_at
        for path in named:
            cache.doubt(path)
        return named

    def _scan_named(self, scanner: partial[Scanner], commit: str | None, named: Set[str]) -> ScanResult | None:
        """Look at what the cache is unsure of. None: that does not tell."""
        cache = self._loaded()
        try:
            found = scanner(entered=self.detector.enter, clock=self.detector.clock).scan_unsure()
        except FullScanNeededError:
            return None
        if self.hidden is not None and not self.hidden.looked_at <= named:  # a file is hidden now by another one
            for path, state in found.changes.items():
                (cache.forget_itself if is_directory(state) else cache.forget)(path)
            cache.commit = commit
            return None
        self.detector.looked(found)
        return found

    def _audit(self, scanner: partial[Scanner], commit: str | None, found: ScanResult) -> None:
        """Scan the whole tree after a look at what was named, to check the watch."""
        cache, states = self._loaded(), self.store.states
        cache.commit = commit  # but for what was found, of which it has the stamps
        audited = scanner(clock=self.detector.clock).scan()
        self.detector.audit(cache, found, audited, lambda path: states.entry(commit, path) if commit else None)
        if found.changes:
            cache.commit = None

    def guard(self, hold: int | None) -> None:
        """A call of programs begins: what it does in the hold, which is open if there is one, is a doubt."""
        self.detector.guard(self._loaded(), hold)

    def _scan_all(self, scanner: partial[Scanner]) -> ScanResult:
        with self.detector.scanning() as entered:
            found = scanner(entered=entered, clock=self.detector.clock).scan()
        self.detector.scanned(found)
        return found

    def stand_for(self, commit: str, differing: Iterable[Difference] = ()) -> None:
        """The tree that was scanned last is that of a commit, but for what is ``differing``."""
        assert self._cache is not None, "it was scanned"
        for path, before, after in differing:
            self._cache.differ(path, before, after)
        self._cache.commit = commit

    def known(self, commit: str) -> Mapping[str, Mapping[str, Stamp]]:
        """The stamps of what is in the tree as a commit has it, as far as an earlier scan left them."""
        cache = self._loaded()
        follow(cache, self.store.states, commit)
        return cache.snapshot()

    @property
    def attributes(self) -> Mapping[str, Attributes]:
        """The extended attributes of what is in the tree, as the last scan saw them, by path."""
        return {} if self._cache is None else self._cache.attributes.copy()

    @property
    def linked_worktrees(self) -> Sequence[str]:
        """The linked worktrees that the newest scan left out."""
        return tuple(sorted(path for path, (reason, _) in self.left_out.items() if reason == LINKED_WORKTREE))

    def look(self) -> ScanResult:
        """Take in the tree as it is: the baseline where there is none, else what somebody else changed, if anything.

        Raises:
            OSError: the root cannot be read, or the store not be written.
        """
        first = self._cache is None
        found = self.take_in()
        if first:  # later ones are saved with the rest, at the end
            self._save_cache()
        return found

    def take_in(self) -> ScanResult:
        """`look`, without saving what makes the next scan cheap."""
        store = self.store
        started = monotonic()
        found, tip = self.scan(store.tip), store.tip
        self.looked_at = started
        known, unknown = found.known(), Unknown.of_scan(found.excluded)
        if known or unknown.reasons != store.states.unknown(tip).reasons:
            kind = "baseline" if tip is None else "external"
            info = CommitInfo(kind, datetime.now(UTC), REPLACED if self.replaced else "")
            prepared = store.prepare(known, info, unknown=unknown)
            store.publish(prepared)
            self.stand_for(prepared.commit)
        elif found.changes and tip is not None:
            self.stand_for(tip)
        self.replaced = False
        return found
