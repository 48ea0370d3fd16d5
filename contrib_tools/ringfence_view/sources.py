"""What a page is about: the calls of a workspace, of a file of receipts, or of both."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from time import monotonic
from typing import Any, cast

from ringfence.escapes import escape_path
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.participants import Change
from ringfence.receipts import change_json
from ringfence_sandbox import Fork, LogEntry, StepName, Workspace, remembered_hidden, store_directory
from ringfence_tools.printable import one_line, plural, printable
from ringfence_tools.runs.attention import Attention, attention
from ringfence_tools.runs.task_log import recorded_size, recorded_usage
from ringfence_view.blame import BlamedLine, blame
from ringfence_view.call_records import CallRecords, policies_of, usage_of
from ringfence_view.diffs import DiffFile, diff_files
from ringfence_view.hidden_values import HiddenValues
from ringfence_view.spending import describe_turn, describe_usage, spending_of
from ringfence_view.timeline import Timeline, TimelineEntry, merged_entries, with_words

PAGE = 200
"""The entries of one page of a timeline."""
MAX_SEARCHED = 3_000
"""The entries that one search looks through before it answers."""
LOCK_FILES = frozenset(
    "Cargo.lock Gemfile.lock Pipfile.lock composer.lock go.sum npm-shrinkwrap.json package-lock.json pnpm-lock.yaml "
    "poetry.lock requirements.lock uv.lock yarn.lock".split()
)
CI_FILES = frozenset((".gitlab-ci.yml", ".travis.yml", "Jenkinsfile", "azure-pipelines.yml", "bitbucket-pipelines.yml"))
CI_DIRECTORIES = (".github/workflows/", ".circleci/", ".gitlab/ci/", ".buildkite/", ".forgejo/workflows/")
LOOK_SECONDS = 60.0
"""How old a look at a workspace may be whose store is as it was: there may be new hidden files."""
_KEPT = 8
"""The patches that are kept for the next request."""


@dataclass(frozen=True, slots=True)
class TimelinePage:
    entries: Sequence[TimelineEntry]
    next_key: str | None
    """Where the next page begins; None at the end."""
    searched: int = 0


@dataclass(frozen=True, slots=True)
class EntryDetail:
    """All that is known of one entry, masked."""

    entry: TimelineEntry
    facts: Sequence[tuple[str, str]] = ()
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Arguments and the answer, by what they are."""
    policies: Sequence[tuple[str, bool, str]] = ()
    read: Sequence[str] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    files: Sequence[DiffFile] | None = None
    """The diff; None where no history has it."""
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StepDifference:
    """What changed between two steps, or, with None, what came of calls that have no history."""

    since: str | None
    until: str | None
    files: Sequence[DiffFile]
    look_first: Sequence[Attention]
    notes: Sequence[str]


class CallSource:
    """The calls of a workspace, of a file of receipts, or of both. Any thread may use it."""

    def __init__(
        self,
        directory: Path | None,
        receipts: Path | None,
        title: str = "",
        *,
        patch: Path | None = None,
        parent: str = "",
    ) -> None:
        """``title`` is by default the path of either. ``patch`` is a file with what came of calls that have no history,
        if it comes to be there. ``parent`` is the address of the page that this one belongs to.

        Raises FileNotFoundError, OSError, ValueError: what it is about cannot be read.
        """
        self.directory = directory
        self.title = one_line(escape_path(title or str(directory or receipts)), 200)
        self.parent = parent
        self._patch = patch
        self._lock = RLock()
        self._hidden = HiddenValues(directory or Path())
        self._secrets = self._hidden.secrets
        self.records = CallRecords(receipts, self._secrets.mask) if receipts is not None else None
        self._version: object = None
        self._tip: Sequence[object] = ()
        self._mark: Sequence[object] = ()
        self._look_at = 0.0
        self._aborted: Sequence[LogEntry] = ()
        self.forks: Sequence[Fork] = ()
        self._of_forks: dict[object, CallSource] = {}
        self._timeline = Timeline(iter(()))
        self._patches: dict[str, tuple[Sequence[DiffFile], Sequence[Mapping[str, Any]], Sequence[str]]] = {}
        if directory is not None:
            self._hide = remembered_hidden(directory) or HiddenFiles()
        self.refresh()

    @property
    def notes(self) -> Sequence[str]:
        """What is to be known of the whole page, a line each."""
        found = list[str]()
        if self.directory is None:
            found.append("What the receipts masked stays masked; without the directory nothing else can be.")
        if self.records is not None and self.records.unreadable:
            found.append(f"{plural(self.records.unreadable, 'line')} of the receipts could not be read.")
        return found

    @property
    def spending(self) -> Sequence[str]:
        """What models have used, a line each. Raises OSError."""
        found = list[str]()
        if self.directory is not None and (runs := recorded_usage(store_directory(self.directory))):
            found.append(f"{plural(len(runs), 'run')} here: {spending_of(runs.values()).describe()}.")
        if self.records is not None and self.records.spending.turns:
            found.append(f"Turns with calls in the receipts: {self.records.spending.describe()}.")
        return found

    def spent_by(self, fork: Fork) -> str:
        """What the runs in a fork have used. Raises OSError."""
        return describe_usage(spending_of(recorded_usage(Path(fork.store)).values()).usage)

    @property
    def has_history(self) -> bool:
        return self.directory is not None

    @property
    def has_changes(self) -> bool:
        """Whether it can be said what came of the calls."""
        return self.has_history or (self._patch is not None and self._patch.is_file())

    @contextmanager
    def opened(self, *, writable: bool = False) -> Generator[Workspace]:
        """The workspace, by default to look at it. Raises what `Workspace.open` raises, and LookupError if there is
        none."""
        if self.directory is None:
            raise LookupError("a file of receipts alone has no contents: open the directory, with --receipts")
        with Workspace.open(self.directory, read_only=not writable, hide=self._hide) as workspace:
            yield workspace

    def refresh(self, *, anew: bool = False) -> bool:
        """Look for news. Return whether there is any. Raises OSError, ValueError.

        ``anew``: look at the workspace and its hidden files even where the files of its store are as they were.
        """
        with self._lock:
            if self.directory is not None:
                self._look(self.directory, anew)
            size = 0
            if self.records is not None:
                self.records.refresh()
                size = self.records.path.stat().st_size
            version = (*map(str, self._tip), self._hidden.mark, size)
            if version == self._version:
                return False
            self._version = version
            self._patches.clear()
            history = self._history() if self.directory is not None else iter(())
            records = self.records.newest_first() if self.records is not None else ()
            self._timeline = Timeline(merged_entries(history, self._aborted, records))
            return True

    def _look(self, directory: Path, anew: bool) -> None:
        """Look at the workspace, unless nothing has changed. To open one with many files takes long."""
        store = store_directory(directory)
        mark = [*_files_of(store), *(os.path.lexists(fork.root) for fork in self.forks)]
        is_known = mark == self._mark and not self._hidden.have_changed
        if is_known and not anew and monotonic() < self._look_at:
            return
        with self.opened() as workspace:
            self._hidden.read(workspace.filesystem)  # as they are now: new values come meanwhile
            self._aborted, self.forks = workspace.aborted(), workspace.forks()
            newest_aborted = self._aborted[0].number if self._aborted else 0
            used = recorded_size(store)
            self._tip = workspace.newest, newest_aborted, used, *map(_shown_state, self.forks)
        self._mark, self._look_at = mark, monotonic() + LOOK_SECONDS

    def _mask_anew(self) -> None:
        """Look again if a known hidden file has changed: what is shown from now on is masked as the files are now."""
        if self._hidden.have_changed:
            self.refresh(anew=True)

    @property
    def version(self) -> str:
        with self._lock:
            return str(hash(self._version))

    def _history(self) -> Iterator[LogEntry]:
        before: str | None = None
        count = PAGE
        while True:
            with self.opened() as workspace:
                entries = workspace.log(count, with_ignored=False, before=before)
            yield from entries
            if len(entries) < count:
                return
            before, count = entries[-1].commit, min(2 * count, MAX_SEARCHED)

    def page(self, after: str | None = None, outcome: str = "", words: str = "", size: int = PAGE) -> TimelinePage:
        """The next entries that have an outcome and all of these words. Raises LookupError for an unknown ``after``."""
        sought = words.casefold().split()
        with self._lock:
            self._mask_anew()
            found: list[TimelineEntry] = []
            searched = 0
            for searched, entry in enumerate(self._timeline.after(after), 1):
                if entry.matches(outcome) and self._has(entry, sought):
                    found.append(self._with_words(entry))
                if len(found) == size or searched == MAX_SEARCHED:
                    return TimelinePage(found, entry.key, searched)
            return TimelinePage(found, None, searched)

    def _has(self, entry: TimelineEntry, words: Sequence[str]) -> bool:
        if not words:
            return True
        text = entry.text.casefold()
        left = [word for word in words if word not in text]
        if left and entry.record is not None and self.records is not None:
            whole = self.records.text(entry.record).casefold()
            left = [word for word in left if word not in whole]
        return not left

    def entry(self, key: str) -> TimelineEntry:
        """Raises LookupError if there is none."""
        with self._lock:
            self._mask_anew()
            return self._with_words(self._timeline.find(key))

    def _with_words(self, entry: TimelineEntry) -> TimelineEntry:
        """Return an entry with what its receipt says."""
        if entry.record is None or self.records is None:
            return entry
        try:
            return with_words(entry, entry.record, self.records.words(entry.record))
        except (OSError, ValueError):
            return entry if entry.title else replace(entry, title="unknown", reason="its receipt cannot be read now")

    def detail(self, key: str) -> EntryDetail:
        """Raises LookupError, OSError, ValueError."""
        with self._lock:
            entry = self.entry(key)
            whole: Mapping[str, Any] = {}
            if entry.record is not None and self.records is not None:
                whole = self.records.whole(entry.record)
            files, changes, notes = self._shown(entry)
        return EntryDetail(
            entry,
            list(_facts(entry, whole)),
            dict(_texts(whole)),
            list(policies_of(whole)),
            [one_line(str(path), 300) for path in whole.get("read") or ()],
            changes or whole.get("changes") or (),
            files,
            notes,
        )

    def files(self, key: str) -> Sequence[DiffFile]:
        """The diff of an entry. Raises LookupError if there is none."""
        with self._lock:
            self._mask_anew()
            files = self._shown(self._timeline.find(key))[0]
        if files is None:
            raise LookupError("no history has this diff")
        return files

    def _shown(
        self, entry: TimelineEntry
    ) -> tuple[Sequence[DiffFile] | None, Sequence[Mapping[str, Any]], Sequence[str]]:
        if self.directory is None or (entry.number in (None, 0) and entry.aborted is None):
            return None, (), ()
        if entry.key not in self._patches:
            with self.opened() as workspace:
                shown = (
                    workspace.aborted_step(entry.aborted, with_ignored=False)
                    if entry.aborted is not None
                    else workspace.show(entry.number or 0, with_ignored=False)
                )
            changes = [change_json(change) for change in shown.changes]
            notes = [f"not in the history: {escape_path(path)} ({why})" for path, why in shown.left_out.items()]
            notes += [f"{len(shown.ignored):,} ignored paths are not shown"] if shown.ignored else []
            self._keep(entry.key, (diff_files(shown.patch, self._secrets.mask), changes, notes))
        return self._patches[entry.key]

    def _keep(self, key: str, found: tuple[Sequence[DiffFile], Sequence[Mapping[str, Any]], Sequence[str]]) -> None:
        self._patches[key] = found
        for old in [*self._patches][:-_KEPT]:
            del self._patches[old]

    def difference(self, since: str = "", until: str = "") -> StepDifference:
        """What changed between two steps, by default from the oldest to the newest.

        Raises LookupError, OSError, ValueError.
        """
        if self.directory is None and self._patch is not None:
            return StepDifference(None, None, diff_files(self._patch.read_bytes(), self._secrets.mask), (), ())
        a, b = _step(since), _step(until)
        self._mask_anew()
        with self._lock, self.opened() as workspace:
            exported = workspace.export(a=a, b=b, with_ignored=False)
            paths = workspace.ignored_at(_commit(workspace, a))
            look_first = [*attention(exported.changes, (), exported.text, paths), *_far_reaching(exported.changes)]
        files = diff_files(exported.text, self._secrets.mask)
        notes = [f"left out: {escape_path(path)} ({why})" for path, why in exported.unknown.items()]
        notes += [f"{len(exported.ignored):,} ignored paths are not shown"] if exported.ignored else []
        return StepDifference(since, until, files, look_first, notes)

    def of_fork(self, name: str) -> CallSource:
        """The calls in a fork. Raises LookupError, OSError, ValueError."""
        with self._lock:
            fork = next((one for one in self.forks if one.name == name and one.state == "ready"), None)
            if fork is None:
                raise LookupError("there is no such fork, or not any more")
            key = (name, fork.created_at)
            if key not in self._of_forks:
                self._of_forks[key] = CallSource(Path(fork.root), None, f"{name}: {fork.root}", parent="../../")
            return self._of_forks[key]

    def fork_difference(self, one: str, other: str = "") -> StepDifference:
        """What a fork has changed, or the difference from one to another.

        It is from their histories, and changes none. Raises LookupError, ValueError, OSError.
        """
        key = f"fork/{one}/{other}"
        with self._lock:
            self._mask_anew()
            if key not in self._patches:
                with self.opened() as workspace:
                    fork = workspace.fork_named(one)
                    patch = workspace.diff_forks(one, other, read_only=True) if other else _changes_of(fork)
                self._keep(key, (diff_files(patch, self._secrets.mask), (), ()))
            return StepDifference(None, None, self._patches[key][0], (), ())

    def raw_files(self, key: str) -> Sequence[DiffFile]:
        """The diff of a step as it is, not masked. Raises LookupError if there is none."""
        number = self.entry(key).number
        if not number:
            raise LookupError("only a step has hunks that can be rejected")
        with self.opened() as workspace:
            return diff_files(workspace.show(number, with_ignored=False).patch)

    def blame(self, path: str) -> Sequence[BlamedLine]:
        """Which step wrote each line of a file. Raises LookupError, ValueError."""
        self._mask_anew()
        with self.opened() as workspace:
            if workspace.filesystem.hides(path):
                raise LookupError(f"{one_line(path, 200)} is hidden")
            return blame(workspace, path, workspace.log(), self._secrets.mask)


def _files_of(store: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield what changes with each file of a store."""
    for folder, folders, names in os.walk(store):
        folders.sort()
        for name in sorted(names):
            with suppress(FileNotFoundError):
                now = os.lstat(os.path.join(folder, name))
                yield name, now.st_ino, now.st_size, now.st_mtime_ns


def _shown_state(fork: Fork) -> tuple[str, str, str]:
    return fork.name, fork.state, fork.score


def _changes_of(fork: Fork) -> bytes:
    with Workspace.open(fork.root, store=fork.store, read_only=True) as opened:
        return opened.patch()


def _commit(workspace: Workspace, step: StepName | None) -> str:
    """The commit of a step; None is the oldest."""
    if isinstance(step, str):
        return next(one.commit for one in workspace.named_steps() if one.name == step)
    try:
        return workspace.step(step or 0).commit
    except LookupError:
        return workspace.log()[-1].commit


def _far_reaching(changes: Iterable[Change]) -> Iterator[Attention]:
    """What has an effect beyond the workspace: what is installed, and what a CI job runs."""
    for change in changes:
        name = change.path.rpartition("/")[2]
        if name in LOCK_FILES:
            yield Attention(change.path, f"a lock file, {change.kind}")
        elif change.path in CI_FILES or change.path.startswith(CI_DIRECTORIES):
            yield Attention(change.path, f"what a CI job runs, {change.kind}")


def _step(text: str) -> StepName | None:
    if not text.strip():
        return None
    return int(text) if text.strip().isdecimal() and len(text) < 20 else text.strip()


def _facts(entry: TimelineEntry, whole: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Began", f"{entry.at:%Y-%m-%d %H:%M:%S} UTC" if entry.at.utcoffset() is not None else str(entry.at)
    names = {
        "exit_code": "Exit code",
        "approved_by": "Approved by",
        "client": "Client",
        "agent": "Agent",
        "call_id": "Call",
        "session_id": "Session",
        "parent_call": "Within the call",
        "rolled_back_by": "Rolled back by the call",
        "detection": "Changes found by",
    }
    for name, title in names.items():
        if (value := whole.get(name)) not in (None, "", [], {}):
            yield title, one_line(value if isinstance(value, str) else json.dumps(value), 200)
    if isinstance(turn := whole.get("turn"), dict):
        found = cast("dict[str, Any]", turn)
        yield "Turn", describe_turn(found.get("number"), usage_of(found))
    if entry.commit:
        yield "Commit", entry.commit[:12]
    for host in whole.get("network") or ():
        counts = ", ".join(f"{host.get(name, 0):,} {name}" for name in ("connections", "sent", "received", "refused"))
        yield "Network", one_line(f"{host.get('host')}:{host.get('port')}: {counts}", 200)


def _texts(whole: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    params: object = whole.get("params")
    if isinstance(params, dict):
        for name, value in cast("dict[str, object]", params).items():
            if value not in (None, "", [], {}):
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield one_line(name, 80), printable(shown)
    elif params:
        yield "As the model wrote it", printable(str(params))
    if answer := str(whole.get("answer") or ""):
        yield "Answer", printable(answer)
