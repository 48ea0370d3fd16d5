"""What a promotion is to do: the net changes of a fork, played on the workspace that it was made from."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ringfence.filesystem.paths import directories_above
from ringfence.participants import Step
from ringfence_workspace.forks.fork_records import Fork
from ringfence_workspace.forks.shared_directories import is_in
from ringfence_workspace.history.commits import CommitInfo, CommitRecord
from ringfence_workspace.history.entries import Difference, Entry, blob_id
from ringfence_workspace.history.store import Store
from ringfence_workspace.history.undo_plan import AS_BEFORE, Planner, ReversalPlan, git_place

PromotionOutcome: TypeAlias = Literal["applied", "merged", "kept", "conflict"]
OnConflict: TypeAlias = Literal["abort", "keep"]

PROMOTED = "promoted"
"""Before the names that a fork's store keeps those of its commits by that were promoted."""
_AS_IN_FORK = "it is as in the fork already"
_HIDDEN = "hidden files are never promoted"
_GIT = "git's own data is not promoted as files"
_SUBMODULE = "commits of a submodule stay in the fork: push them, or fetch them from there"
_SHARED = "it is in a directory that the fork shares, which stays"
_IGNORED = "git ignores it, and it has changed here as well"


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a promotion did, or would do, by path.

    *applied*: it is as in the fork now. *merged*: both had changed its text or permissions, and it has both. *kept*: as
    it is here, since that is as in the fork already, or is nothing that a promotion changes. *conflict*: as it is here,
    since it has changed here as well. ``step`` is None where nothing was changed.
    """

    fork: Fork
    outcomes: Mapping[str, PromotionOutcome]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """By path, in words, why it is kept or a conflict."""
    step: Step | None = None
    notes: Sequence[str] = ()
    """What else is to be known, in words."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the fork has changed and no promotion takes over, by path, and why: what no history covers, as hidden and
    very large files, and commits of submodules."""
    git_ref: str = ""
    """The ref of git that has the commits of the fork now, or would; empty where it made none."""

    @property
    def conflicts(self) -> Sequence[str]:
        """The paths in conflict, sorted."""
        return [path for path, outcome in self.outcomes.items() if outcome == "conflict"]

    @property
    def has_changed(self) -> bool:
        """Whether any path was changed, or would be."""
        return not {"applied", "merged"}.isdisjoint(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class EarlierPromotion:
    """A promotion of a fork that its source's history has."""

    commit: str
    """Of the fork's history: what was promoted."""
    step: CommitRecord
    paths: Set[str]
    """The paths that it changed in the source, but for those where an undo or a restore has reversed it."""


def earlier_promotions(fork: Fork, own: Store, source: Store) -> Sequence[EarlierPromotion]:
    """The promotions of a fork, newest first, as far as `gc` has not dropped them."""
    found: list[EarlierPromotion] = []
    reversals: list[tuple[CommitInfo, Set[str]]] = []
    for record in source.commits():
        if record.commit == fork.commit:
            break
        info, number = record.message.info, record.number
        name, _, commit = info.promotes.partition(" ")
        if number is None or not (info.reverses or name == fork.name):
            continue
        reversed_since = {path for one, paths in reversals if one.is_reversal_of(number) for path in paths}
        paths = {*source.step_of(record).paths} - reversed_since
        if info.reverses:
            reversals.append((info, paths))
        elif own.has(commit):
            found.append(EarlierPromotion(commit, record, paths))
    return found


class ForkChanges:
    """The net changes of a fork, as they would be in its source: what the copy alone made different is as there.

    A path that was promoted is compared with what was promoted, any other one with what the fork began with."""

    def __init__(self, fork: Fork, own: Store, source: Store, hides: Callable[[str], bool]) -> None:
        """``own`` is the store of the fork, whose newest commit has its tree as it is, and ``source`` that of its
        source. ``hides`` tells what is hidden there."""
        self._fork = fork
        self._own = own
        self._source = source
        self._hides = hides
        self.tip = own.tip or ""
        self.kept: dict[str, str] = {}
        """The changed paths that are not promoted, and why."""
        self.submodules: dict[str, str] = {}
        """The git directories of submodules with new objects, and why these are not promoted."""
        self.unclear: dict[str, str] = {}
        """Those that nobody can promote, since a history does not know them, and why."""
        self.changes: list[Difference] = []
        self._contents: dict[str, bytes] = {}
        self.promotions = earlier_promotions(fork, own, source)
        found = {difference.path: difference for difference in own.states.differences(fork.base, self.tip)}
        for commit in {one.commit for one in self.promotions}:
            for path, _, after in own.states.differences(commit, self.tip):
                found.setdefault(path, Difference(path, own.states.entry(fork.base, path), after))
        for path in sorted(found):
            self._add(found[path])

    def _add(self, difference: Difference) -> None:
        path, began, after = difference
        if is_in(path, self._fork.shared):
            if difference.changes_content:
                self.kept[path] = _SHARED
            return
        place = git_place(path)
        if place is not None or self._hides(path):
            if difference.changes_content:
                self._keep(path, place, is_new=began is None)
            return
        own, source = self._own.states, self._source.states
        why = own.unknown(self.tip).why(path, there=after is not None)
        here = source.unknown(self._source.tip).why(path)
        if why is not None or here is not None:
            if difference.changes_content:
                side, reason = ("the fork has", why) if why is not None else ("is here", here)
                reasons = self.kept if "hidden" in (why, here) else self.unclear
                reasons[path] = f"what {side} is not in the history ({reason})"
            return
        self._add_known(path, began, after)

    def _keep(self, path: str, place: str | None, *, is_new: bool) -> None:
        """Keep what is hidden here, or is in the git directory at a place."""
        self.kept[place or path] = self._hidden_reason(path) if place is None else _GIT
        module, is_object, _ = path.partition("/objects/")
        if is_object and is_new and module.startswith(".git/modules/"):
            self.submodules[module] = _SUBMODULE

    def _add_known(self, path: str, began: Entry | None, after: Entry | None) -> None:
        """Add a path as it has changed since it was promoted, or else since the fork."""
        own, source = self._own.states, self._source.states
        promotion = next((one for one in self.promotions if path in one.paths), None)
        promoted = began if promotion is None else own.entry(promotion.commit, path)
        if promoted == after:
            return
        was = source.entry(self._fork.commit, path)
        wanted = self._as_in_source(began, after, was)
        if promotion is not None:
            was = self._as_in_source(began, promoted, was)
            here = source.entry(promotion.step.commit, path)
            was = here if here is not None and here.same_content(was) else was  # else it was merged
        self.changes.append(Difference(path, was, wanted))

    def _hidden_reason(self, path: str) -> str:
        for above in directories_above(path):
            place = os.path.join(self._fork.source, above)
            if os.path.lexists(place) and not os.path.isdir(place):
                return f"{above} is a hidden file here, which stays"
        return _HIDDEN

    def _as_in_source(self, before: Entry | None, after: Entry | None, was: Entry | None) -> Entry | None:
        """``after`` as it would be in the source, which has ``was`` where the fork began with ``before``."""
        if after is None:
            return None
        if before is not None and was is not None:
            meta = after.meta
            same = {
                name: getattr(was.meta, name)
                for name in ("mode", "uid", "gid")
                if getattr(meta, name) == getattr(before.meta, name)
            }
            after = after._replace(meta=meta._replace(**same))
            if after.oid == before.oid:  # a link that leads into the fork, say
                return after._replace(oid=was.oid)
        if after.kind == "symlink":
            return after._replace(oid=self._link_back(after))
        return after

    def _link_back(self, link: Entry) -> str | None:
        """A link into the fork leads into the source."""
        assert link.oid is not None, "a link has a target"
        target, root = os.fsdecode(self._own.states.content(link.oid)), self._fork.root
        if target != root and not target.startswith(f"{root}/"):
            return link.oid
        content = os.fsencode(self._fork.source + target[len(root) :])
        self._contents[oid := blob_id(content)] = content
        return oid

    def missing(self) -> Sequence[str]:
        """The paths that the source has not as the fork does."""
        states, tip = self._source.states, self._source.tip or ""
        changed = [one for one in self.changes if one.changes_content]
        return [path for path, _, after in changed if Difference(path, states.entry(tip, path), after).changes_content]

    def content(self, oid: str) -> bytes:
        """The bytes of what the fork has."""
        return self._contents[oid] if oid in self._contents else self._own.states.content(oid)

    def linked(self, states: Mapping[str, Entry | None]) -> Mapping[int, list[str]]:
        """The names of one file in the fork, by link number, of those among some states."""
        return self._own.states.linked(self.tip, {one.meta.link for one in states.values() if one is not None} - {0})


def plan_promotion(found: ForkChanges, planner: Planner, source: Store, fork: Fork) -> ReversalPlan:
    """What is to become of each path here."""
    here, contents = source.states, dict[str, bytes]()
    for path, was, after in found.changes:
        now = here.entry(source.tip or "", path)
        if after is None or after.oid is None or now is None or not after.kind == now.kind == "file":
            continue
        if not now.same_content(was) and not now.same_content(after):
            oids = [after.oid] if was is None or was.oid is None else [after.oid, was.oid]
            missing = [oid for oid in oids if not source.objects.has(bytes.fromhex(oid))]
            contents.update((oid, found.content(oid)) for oid in missing)
    since = [*(one.step for one in found.promotions), source.commit(fork.commit)]
    plan = planner.apply(found.changes, since, contents)
    for oid in contents:  # what is left was merged
        plan.contents.pop(oid, None)
    for path, reason in found.kept.items():
        plan.keep(path, reason)
    for path, reason in found.unclear.items():
        plan.keep(path, reason, "conflict")
    plan.sort()
    return plan


def keep_ignored(plan: ReversalPlan, ignored: Set[str]) -> None:
    """Have what git ignores be no conflict: both sides have made it anew."""
    for path, outcome in [*plan.outcomes.items()]:
        if outcome == "conflict" and path in ignored:
            plan.keep(path, _IGNORED)


def outcomes_of(plan: ReversalPlan, changes: Collection[Difference]) -> dict[str, PromotionOutcome]:
    """The outcomes of a plan as those of a promotion."""
    wanted = {path: after for path, _, after in changes}
    found: dict[str, PromotionOutcome] = {}
    for path, outcome in plan.outcomes.items():
        if outcome in ("kept", "conflict"):
            found[path] = outcome
            continue
        state, after = plan.states.get(path), wanted.get(path)
        is_merged = state is not None and not state.same_content(after)
        found[path] = "merged" if is_merged else "applied"
    return found


def reasons_of(plan: ReversalPlan) -> dict[str, str]:
    """Why each path of a plan is kept or a conflict."""
    return {
        path: _AS_IN_FORK if reason == AS_BEFORE else reason
        for path, reason in plan.reasons.items()
        if plan.outcomes.get(path) in ("kept", "conflict")
    }
