"""Forks of a workspace: a workspace of its own for each way that is tried, and the best one promoted."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.participants import Change, Step
from ringfence_workspace.forks.fork_records import Fork, fork_named, forks_of, own_fork, save_fork
from ringfence_workspace.history.commits import CommitRecord
from ringfence_workspace.history.entries import Difference
from ringfence_workspace.history.history_views import patch_text, unified
from ringfence_workspace.history.ignored_files import IgnoredInHistory, IgnoredSince, Repository
from ringfence_workspace.history.step_lookup import StepName
from ringfence_workspace.history.store import FOLDER, Store, reporting_damage
from ringfence_workspace.history.undo_plan import Planner, ReversalPlan
from ringfence_workspace.transaction.step_history import StepHistory
from ringfence_workspace.workspace_history import WorkspaceHistory

if TYPE_CHECKING:
    from ringfence_workspace.forks.fork_git import GitChanges
    from ringfence_workspace.forks.promotion import ForkChanges, OnConflict, Promotion
    from ringfence_workspace.workspace_calls import WorkspaceTransaction


class WorkspaceForks(WorkspaceHistory):
    """The forks of an opened workspace, and what is known of it if it is a fork itself."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def look(self, *, older_than: float = 0.0) -> float | None: ...

    @abstractmethod
    def _made(self, transaction: WorkspaceTransaction, history: StepHistory) -> Step | None: ...

    @abstractmethod
    def _write(
        self,
        history: StepHistory,
        plan: ReversalPlan,
        before: Sequence[str],
        *,
        whole: str | None = None,
        linked: Mapping[int, Sequence[str]] | None = None,
    ) -> Sequence[str]: ...

    @abstractmethod
    def _alone(self, tool: str) -> AbstractContextManager[tuple[WorkspaceTransaction, StepHistory]]: ...

    @property
    def _place(self) -> str:
        """The directory of its store."""
        return os.fspath(self._store.folder.parent)

    # Of the source.

    def _make_fork(
        self,
        name: str,
        at: StepName | None,
        into: str | os.PathLike[str] | None,
        share: Collection[str],
        *,
        secrets: bool,
    ) -> Fork:
        """Make what `Workspace.fork` opens."""
        from ringfence_workspace.forks.fork_making import ForkSource, make_fork

        with self._alone("fork") as (_, history):
            record = self._store.commit(self._tip()) if at is None else self._find.record(at)
            source, step = ForkSource(self.root, self._place, history), self._newest_step(record)
            place = None if into is None else os.fspath(into)
            return make_fork(source, name, record, step, place, share, secrets=secrets)

    def _newest_step(self, record: CommitRecord) -> int:
        while record.number is None and record.parent is not None:
            record = self._store.commit(record.parent)
        return record.number or 0

    def check_fork_room(
        self, copies: int, into: str | os.PathLike[str] | None = None, share: Collection[str] = ()
    ) -> None:
        """Raise OSError (ENOSPC) if there is no room for so many forks, each with all bytes of the files. Filesystems
        that share blocks among copies need none. ``share`` is as for `Workspace.fork`."""
        from ringfence_workspace.forks.fork_making import ForkSource, check_room
        from ringfence_workspace.forks.shared_directories import directories_to_share

        with self._alone("fork") as (_, history):
            source = ForkSource(self.root, self._place, history)
            shared = directories_to_share(share, self.root, self._place, history)
            check_room(source, copies, None if into is None else os.fspath(into), shared)

    def forks(self) -> Sequence[Fork]:
        """The forks that were made of it and not discarded, by name."""
        return forks_of(self._place)

    def fork_named(self, name: str) -> Fork:
        """One of `forks`. LookupError where there is none of that name."""
        return fork_named(self._place, name)

    def discard_fork(self, name: str) -> None:
        """Remove a fork of it: files and history. This needs no lock of this workspace, and can be repeated.

        Raises:
            LookupError: there is none of that name.
            WorkspaceLockedError: a process has the fork open.
            ValueError: there are forks of the fork.
            OSError: something of it cannot be removed. `forks` still has it.
        """
        from ringfence_workspace.forks.fork_removal import discard_fork

        discard_fork(self.fork_named(name))

    def _promote(self, own: WorkspaceForks, on_conflict: OnConflict, *, dry_run: bool, with_git: bool) -> Promotion:
        """Promote an opened fork, whose newest commit has its tree as it is."""
        from ringfence_workspace.forks.promotion import (
            PROMOTED,
            ForkChanges,
            Promotion,
            keep_ignored,
            outcomes_of,
            plan_promotion,
            reasons_of,
        )

        fork = own._as_fork()
        if fork.source_store != self._place:
            raise ValueError(f"{own.root} is no fork of {self.root}, but of {fork.source}")
        with self._alone("promote") as (transaction, history), own._looking_alone():
            found = ForkChanges(fork, own._store, self._store, self.filesystem.hides)
            planner = Planner(self._store, self._tip(), history.names)
            plan = plan_promotion(found, planner, self._store, fork)
            if "conflict" in plan.outcomes.values():
                keep_ignored(
                    plan, IgnoredInHistory(self._store, self.root).among(plan.outcomes, fork.commit, self._tip())
                )
            git, notes = self._git_changes(fork, with_git=with_git)
            is_planned = dry_run or (on_conflict == "abort" and "conflict" in plan.outcomes.values())
            if not is_planned:
                own._store.keep(f"{PROMOTED}/{found.tip}", found.tip)  # the next promotion compares with it
                notes += self._apply(history, plan, found, git)
                history.promotes = f"{fork.name} {found.tip}"
            outcomes = outcomes_of(plan, found.changes)
            left_out = dict(sorted({**found.submodules, **own._uncovered_changes(fork)}.items()))
        step = None if is_planned else self._made(transaction, history)
        return Promotion(fork, outcomes, reasons_of(plan), step, notes, left_out, "" if git is None else git.ref)

    def _git_changes(self, fork: Fork, *, with_git: bool) -> tuple[GitChanges | None, list[str]]:
        from ringfence_workspace.forks.fork_git import CANDIDATES, git_changes

        try:
            found = git_changes(fork, with_git=with_git)
        except ValueError as error:
            return None, [str(error)]
        if found is None or not with_git or not found.ref.startswith(CANDIDATES):
            return found, []
        why = (
            "the branch of the fork has moved here as well" if found.branch else "no branch is checked out in the fork"
        )
        return found, [f"{why}: its commits are named by {found.ref}"]

    def _apply(
        self, history: StepHistory, plan: ReversalPlan, found: ForkChanges, git: GitChanges | None
    ) -> Sequence[str]:
        """Make a plan so, and what git is to get; what could not be brought over besides, in words."""
        from ringfence_workspace.forks.fork_git import PACK_SUFFIXES

        wanted = {state.oid for state in plan.states.values() if state is not None and state.oid is not None}
        for oid in wanted - plan.contents.keys():
            if not self._store.objects.has_own(bytes.fromhex(oid)):
                self._store.add_blob(found.content(oid))
        notes = self._write(history, plan, (), linked=found.linked(plan.states))
        files: Mapping[str, bytes] = {} if git is None else git.files
        for path, content in files.items():
            if not self.filesystem.exists(path) or self.filesystem.read_bytes(path).content != content:
                self.filesystem.write_bytes(path, content)
                if path.endswith(PACK_SUFFIXES):
                    self.filesystem.chmod(path, 0o444)
        return notes

    def _drop_gone_forks(self) -> Sequence[str]:
        from ringfence_workspace.forks.fork_removal import drop_gone

        return drop_gone(self._store, self._place)

    # Of a fork.

    @property
    def fork_record(self) -> Fork | None:
        """What is known of it as a fork. None: it is none."""
        return own_fork(self._place)

    def check_commands_here(self) -> None:
        """Raise ValueError for a fork that shares directories: no command on this machine finds what is in them."""
        found = self.fork_record
        if found is not None and found.shared:
            listed = ", ".join(found.shared)
            raise ValueError(
                f"this fork shares {listed}, which only a container of it shows: run commands with Podman (--workspace "
                "podman), or make a fork that shares nothing"
            )

    def _as_fork(self) -> Fork:
        found = self.fork_record
        if found is None:
            raise ValueError(f"{self.root} is no fork")
        return found

    def _uncovered_changes(self, fork: Fork) -> dict[str, str]:
        from ringfence_workspace.forks.uncovered_changes import uncovered_changes

        history = self.filesystem.history
        assert history is not None, "it was opened to change it"
        return uncovered_changes(fork, history)

    def keep_score(self, score: str) -> None:
        """Keep how this fork was scored, in words: `forks` of its source shows that.

        Raises:
            ValueError: it is no fork.
            LookupError: its source does not have it any more.
            OSError: it cannot be written.
        """
        fork = self._as_fork()
        save_fork(replace(fork_named(fork.source_store, fork.name), score=score))

    def changes_since_fork(self) -> Sequence[Change]:
        """The net changes since it was forked, by path, including what nobody has recorded yet.

        Raises:
            ValueError: it is no fork.
            ParticipantBusyError: a call did not end in time.
        """
        base = self._as_fork().base
        self.look()
        return self.changes_since(base)

    def unpromoted(self) -> Sequence[str]:
        """The paths at which this fork has what its source has not, sorted. The directory of the source may be gone.

        Raises:
            ValueError: it is no fork, or the history of its source cannot be read.
            OSError: the history of its source is gone.
        """
        from ringfence_workspace.forks.promotion import ForkChanges

        fork = self._as_fork()
        self.look()
        with self._looking_alone(), closing(Store.open(Path(fork.source_store, FOLDER), writable=False)) as source:
            found = ForkChanges(fork, self._store, source, self.filesystem.hides)
            return sorted({*found.kept, *found.unclear, *found.missing(), *self._uncovered_changes(fork)})

    def patch(self) -> bytes:
        """The patch of `changes_since_fork` without paths that git ignores, which applies to a clean checkout.

        Raises ValueError where it is no fork."""
        base = self._as_fork().base
        self.look()
        with self._looking_alone():
            since = IgnoredSince(self._store, Repository(self.root), base)
            records = self._find.after(self._store.commit(base), self._store.commit(self._tip()))
            return unified(self._store, base, self._tip(), ignored=since.at(self._tip(), records)).text

    def _patch_to(self, other: WorkspaceForks) -> bytes:
        """The patch from this opened fork to another one of the same source."""
        from ringfence_workspace.forks.shared_directories import is_in

        mine, theirs = self._as_fork(), other._as_fork()
        self.look()
        other.look()
        with self._looking_alone(), other._looking_alone():
            here, there = self._store.states, other._store.states
            tip, other_tip = self._tip(), other._tip()
            found = [*here.differences(mine.base, tip), *there.differences(theirs.base, other_tip)]
            if mine.commit != theirs.commit:  # the newer one has borrowed both
                newer = there if theirs.created_at > mine.created_at else here
                found += newer.differences(mine.commit, theirs.commit)
            shared = {*mine.shared, *theirs.shared}
            paths = sorted({one.path for one in found if not is_in(one.path, shared)})
            pairs = [Difference(path, here.entry(tip, path), there.entry(other_tip, path)) for path in paths]
            changes = [
                Change(pair.path, here.version(pair.before), there.version(pair.after))
                for pair in pairs
                if pair.changes_content
            ]
            shown, _ = self.ignored_at(tip).split(changes)
            return patch_text(shown, lambda path: here.read(tip, path), lambda path: there.read(other_tip, path))

    def discard(self) -> None:
        """Close this fork and remove it: files and history.

        Raises:
            ValueError: it is no fork, or there are forks of it.
            WorkspaceLockedError: another process has opened it meanwhile.
            OSError: something of it cannot be removed. Its source still names it.
        """
        from ringfence_workspace.forks.fork_removal import discard_fork

        fork = self._as_fork()
        with reporting_damage(self._store.folder, (KeyError,)):
            self.close()
        discard_fork(fork)
