"""What some commits of a history have changed, path by path: without what only others have changed in between."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.participants import Change
from ringfence_workspace.history.commits import BY_PEOPLE, CommitRecord
from ringfence_workspace.history.entries import Entry
from ringfence_workspace.history.history_views import patch_text, split_ignored
from ringfence_workspace.history.states import CommitStates
from ringfence_workspace.history.store import Store


@dataclass(frozen=True, slots=True)
class OwnChanges:
    """``changes`` since a commit, with the ``patch`` for them. ``mixed`` are the paths among them that others have
    changed, too: their change has both."""

    changes: Sequence[Change]
    patch: bytes
    mixed: Sequence[str] = ()
    ignored: Sequence[Change] = ()
    """The changes of paths that git ignores. ``changes`` and ``patch`` are without them."""


def own_changes(
    store: Store,
    records: Sequence[CommitRecord],
    sessions: Collection[str],
    *,
    without: Collection[str] = (),
    ignored: IgnoredPaths | None = None,
) -> OwnChanges:
    """What the steps of these sessions among ``records`` (oldest first, the first of them where it begins) have
    changed, ``without`` these paths. Who takes steps back by `undo` or `restore` does it for them.

    The change of a path is from where it begins to the newest of these steps that changed it.
    """
    start, *later = records
    states = store.states
    newest: dict[str, str] = {}  # oldest first
    others: set[str] = set()
    for record in later:
        if _is_own(record, sessions):
            for path in _changed_paths(states, record):
                newest.pop(path, None)
                newest[path] = record.commit
        else:
            others.update(store.step_of(record).paths)
    end = records[-1].commit
    found = [*_changes(states, start.commit, newest, others)] if others else states.changes(start.commit, end)

    def content(path: str) -> bytes:
        return states.read(newest[path] if others else end, path)

    changes, hidden = split_ignored([change for change in found if change.path not in without], ignored)
    patch = patch_text(changes, partial(states.read, start.commit), content)
    return OwnChanges(changes, patch, sorted(others.intersection(change.path for change in changes)), hidden)


def _is_own(record: CommitRecord, sessions: Collection[str]) -> bool:
    info = record.message.info
    return info.kind == "step" and (info.session_id in sessions or info.tool in BY_PEOPLE)


def _changed_paths(states: CommitStates, step: CommitRecord) -> list[str]:
    unclear = states.unclear(step.parent, step.commit)
    differences = states.differences(step.parent, step.commit)
    return [one.path for one in differences if one.path not in unclear and one.changes_content]


def _changes(states: CommitStates, start: str, newest: Mapping[str, str], others: Collection[str]) -> Iterator[Change]:
    for path, after in sorted(_left_by(states, start, newest, others).items()):
        before = states.entry(start, path)
        if before is not None if after is None else not after.same_content(before):
            yield Change(path, states.version(before), states.version(after))


def _left_by(
    states: CommitStates, start: str, newest: Mapping[str, str], others: Collection[str]
) -> Mapping[str, Entry | None]:
    """What the steps have left at their paths, and None at paths in the way of that: others had removed these."""
    left: dict[str, Entry | None] = {}
    files, folders = set[str](), set[str]()
    for path in reversed([*newest]):
        entry, above = states.entry(newest[path], path), _above(path)
        is_file = entry is not None and entry.kind != "directory"
        if entry is None or not files.isdisjoint(above) or (is_file and path in folders):
            left[path] = None
            continue
        left[path] = entry
        folders.update(above)
        (files if is_file else folders).add(path)
    for path in set(others).difference(newest):
        before = states.entry(start, path)
        is_file = before is not None and before.kind != "directory"
        if not files.isdisjoint(_above(path)) or (is_file and path in folders):
            left[path] = None
    return left


def _above(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]
