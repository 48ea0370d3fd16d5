"""What an opened workspace has recorded: its steps, their changes, and patches of them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.participants import Change, Step
from ringfence_workspace.history.commits import CommitRecord
from ringfence_workspace.history.history_views import (
    Export,
    LogEntry,
    ShownStep,
    log_entry,
    mailbox,
    shown_step,
    unified,
)
from ringfence_workspace.history.ignored_files import (
    IgnoredInHistory,
    IgnoredSince,
    Repository,
    file_at,
    is_new_since,
    on_disk,
    typed_paths,
)
from ringfence_workspace.history.own_changes import OwnChanges, own_changes
from ringfence_workspace.history.step_lookup import NamedStep, StepLookup, StepName
from ringfence_workspace.history.store import Store, reporting_damage
from ringfence_workspace.host import HostFilesystem


class WorkspaceHistory:
    """The recorded history of an opened workspace."""

    def __init__(self, filesystem: HostFilesystem, store: Store) -> None:
        self.filesystem = filesystem
        self._store = store
        self._find = StepLookup(store)

    @property
    def root(self) -> str:
        return self.filesystem.root

    def steps(self) -> Sequence[Step]:
        """The steps, oldest first; without the baseline and others' changes."""
        with self._looking_alone():
            return self._store.steps()

    def log(
        self, limit: int | None = None, *, with_ignored: bool = True, before: str | None = None
    ) -> Sequence[LogEntry]:
        """The history, newest first: steps, what somebody else changed in between, and the baseline; after them what
        `gc` has left for its name alone. All of it, or the newest ``limit`` entries. With ``before``, the commit of an
        entry, only what is older. Without ``with_ignored``, paths that git ignores are only counted. LookupError where
        there is no such commit."""
        with self._looking_alone():
            ignored = None if with_ignored else IgnoredInHistory(self._store, self.root)
            names = self._find.names()
            entries = (
                (record.parent, log_entry(self._store, record, names.get(record.commit, ())))
                for record in self._store.commits(before=before)
            )
            # Others' changes of nothing but times are commits too, and of no interest; but the oldest one is, always.
            shown = (
                entry
                for parent, entry in entries
                if entry.paths or entry.names or entry.number is not None or parent is None
            )
            most = None if limit is None else min(limit, sys.maxsize)
            found = list(itertools.islice(itertools.chain(shown, self._detached_entries(names, before)), most))
            return found if ignored is None else [ignored.without(entry) for entry in found]

    def _detached_entries(self, names: Mapping[str, Sequence[str]], before: str | None) -> Iterator[LogEntry]:
        records = self._find.detached_records()
        at = next((at for at, record in enumerate(records, 1) if record.commit == before), 0)
        for record in records[at:]:
            yield log_entry(self._store, record, names[record.commit], apart=True)

    def named_steps(self) -> Sequence[NamedStep]:
        """The named steps, by name."""
        with self._looking_alone():
            return self._find.named()

    def aborted(self) -> Sequence[LogEntry]:
        """What rollbacks took away, newest first; ``number`` is that of `aborted_step`."""
        with self._looking_alone():
            found = [(number, self._store.commit(commit)) for number, commit in self._store.aborted.commits().items()]
            return [replace(log_entry(self._store, record, ()), number=number) for number, record in reversed(found)]

    def aborted_step(self, number: int, *, with_ignored: bool = True) -> ShownStep:
        """What a call had changed before it was rolled back. LookupError where none of that number is kept."""
        with self._looking_alone():
            kept = self._store.aborted.commits()
            if number not in kept:
                there = f"there are {', '.join(map(str, kept))}" if kept else "there are none"
                raise LookupError(f"no rolled-back call is kept as number {number}: {there}")
            shown = self._shown(self._store.commit(kept[number]), with_ignored)
            return replace(shown, step=replace(shown.step, number=number))

    @contextmanager
    def _looking_alone(self) -> Generator[None]:
        # In a forked child the history is not to be looked at either: to read what is about to be written, it is
        # written, and the file is the parent's.
        self.filesystem.check_open()
        with self.filesystem.lock.mutex, reporting_damage(self._store.folder, (KeyError,)):
            yield

    def step(self, number: int) -> Step:
        """One step; 0 is the baseline. LookupError where there is none of that number."""
        with self._looking_alone():
            return self._store.step_of(self._find.record(number))

    def show(self, step: StepName, *, with_ignored: bool = True) -> ShownStep:
        """What a step changed; a name stands for its step. Without ``with_ignored``, paths that git ignored at the
        start of the step's session are left out. LookupError where there is none, or where what was before it was
        dropped."""
        with self._looking_alone():
            return self._shown(self._find.step(step), with_ignored)

    def _shown(self, record: CommitRecord, with_ignored: bool) -> ShownStep:
        ignored = None if with_ignored else IgnoredInHistory(self._store, self.root).of(record)
        return shown_step(self._store, record, self.root, ignored)

    def ignored_at(self, commit: str) -> IgnoredPaths:
        """The paths that git ignores by the ignore files that a commit has, and that git's index does not have now.

        So is what programs left in directories that were made since and ignore themselves now."""
        ignored = Repository(self.root).ignored(partial(self.read_at, commit))
        known: dict[str, Set[str]] = {}

        def is_typed(path: str) -> bool:
            with self._looking_alone():
                tip = self._tip()
                if tip not in known:
                    records = itertools.takewhile(lambda record: record.commit != commit, self._store.commits())
                    known.clear()
                    known[tip] = typed_paths(self._store, records)
                return path in known[tip]

        return ignored.made_since(cache(partial(self._is_new_since, commit)), partial(on_disk, self.root), is_typed)

    def _is_new_since(self, commit: str, directory: str) -> bool:
        with self._looking_alone():
            return is_new_since(self._store, commit, directory)

    def read_at(self, commit: str, path: str) -> bytes | None:
        """The bytes of a file as a commit has it; None for what is no file, or what the commit does not know.
        LookupError where there is no such commit."""
        with self._looking_alone():
            return file_at(self._store, commit, path)

    def diff(self, a: StepName | None = None, b: StepName | None = None) -> bytes:
        """The patch from the state after step `a` (by default the oldest that is known) to that after `b` (by
        default the newest, with what others changed and the history has seen). A name stands for its step."""
        return self.export(a=a, b=b).text

    def export(
        self,
        fmt: Literal["diff", "mbox"] = "diff",
        *,
        a: StepName | None = None,
        b: StepName | None = None,
        with_ignored: bool = True,
    ) -> Export:
        """The changes from `a` to `b` as one patch, or as a mailbox with a mail a commit, for ``git am``. Without
        ``with_ignored``, paths that git ignored after `a` are left out, so that it applies to a clean checkout.

        Raises:
            LookupError: there is no such step.
            ValueError: `a` is later than `b`, or, for a mailbox, what was between them has been dropped.
        """
        with self._looking_alone():
            first, last = self._find.ends(a, b)
            since = None if with_ignored else IgnoredSince(self._store, Repository(self.root), first.commit)
            if fmt == "mbox":
                line = [*self._find.after(first, last)][::-1]
                if any(record.parent is None for record in line):
                    raise ValueError("of what was between these steps, some has been dropped: only a diff is left")
                return mailbox(self._store, line, ignored=since and since.in_step)
            ignored = since and since.at(last.commit, self._find.after(first, last))
            return unified(self._store, first.commit, last.commit, ignored=ignored)

    @property
    def newest(self) -> str:
        """The newest commit of the history, somebody else's included: what `since` compares with."""
        with self._looking_alone():
            return self._tip()

    def changes_since(self, commit: str, *, without: Collection[str] = ()) -> Sequence[Change]:
        """What the history has changed since a commit, ``without`` these paths."""
        with self._looking_alone():
            changes = self._store.states.changes(commit, self._tip())
            return [change for change in changes if change.path not in without]

    def diff_since(self, commit: str) -> bytes:
        """The patch of what the history has changed since a commit."""
        with self._looking_alone():
            return unified(self._store, commit, self._tip()).text

    def own_since(
        self,
        commit: str,
        sessions: Collection[str],
        *,
        without: Collection[str] = (),
        ignored: IgnoredPaths | None = None,
    ) -> OwnChanges:
        """The changes of some sessions' steps since a commit, and the patch for them, ``without`` these paths.

        Files that only others have changed meanwhile are not among it. Those of ``ignored`` paths are apart.

        Raises:
            LookupError: the history does not go back to that commit.
        """
        with self._looking_alone():
            records: list[CommitRecord] = []
            for record in self._store.commits():
                records.append(record)
                if record.commit == commit:
                    break
            else:
                raise LookupError(f"the history does not go back to {commit}")
            return own_changes(self._store, records[::-1], sessions, without=without, ignored=ignored)

    def unclear_since(self, commit: str) -> Mapping[str, str]:
        """The paths of which that patch cannot say what became of them, with the reasons."""
        with self._looking_alone():
            return self._store.states.unclear(commit, self._tip())

    def _tip(self) -> str:
        tip = self._store.tip
        assert tip is not None, "an opened workspace has a baseline"
        return tip
