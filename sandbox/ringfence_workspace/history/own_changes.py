"""What some commits of a history have changed, without what others have changed in between.

The commits are replayed, one after the other, on the tree as it was before the first of them: where others have changed
the same file, what the commit changed is merged into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ringfence.filesystem.ignored import IgnoredPaths
from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.commits import BY_PEOPLE, CommitRecord
from ringfence_workspace.history.entries import Entry, blob_id
from ringfence_workspace.history.history_views import patch_text, split_ignored
from ringfence_workspace.history.states import States
from ringfence_workspace.history.store import Store
from ringfence_workspace.history.text_merge import merged
from ringfence_workspace.history.trees import walk


@dataclass(frozen=True, slots=True)
class OwnChanges:
    """``changes`` since a commit, with the ``patch`` for them. ``mixed`` are paths of which others have changed the
    same lines, or something that cannot be merged: what is told of them has that, too."""

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
    changed, ``without`` these paths. Who takes steps back by `undo` or `restore` does it for them."""
    start, *later = records
    states, end = store.states, records[-1].commit
    mixed: set[str] = set()
    if all(_is_own(record, sessions) or record.message.paths == () for record in later):
        found, content = states.changes(start.commit, end), partial(states.read, end)
    else:
        replay = _Replay(states, start.commit)
        for record in later:
            if _is_own(record, sessions):
                replay.apply(record)
        replay.make_room()
        found, content, mixed = [*replay.changes()], replay.content, replay.mixed
    changes, hidden = split_ignored([change for change in found if change.path not in without], ignored)
    patch = patch_text(changes, partial(states.read, start.commit), content)
    return OwnChanges(changes, patch, sorted(mixed & {change.path for change in changes}), hidden)


def _is_own(record: CommitRecord, sessions: Collection[str]) -> bool:
    info = record.message.info
    return info.kind == "step" and (info.session_id in sessions or info.tool in BY_PEOPLE)


class _Replay:
    def __init__(self, states: States, start: str) -> None:
        self._states = states
        self._start = start
        self._made: dict[str, Entry | None] = {}
        """By path, what was made last at the end."""
        self._contents: dict[str, bytes] = {}
        """What came of merging, by object id."""
        self.mixed: set[str] = set()

    def apply(self, step: CommitRecord) -> None:
        unclear = self._states.unclear(step.parent, step.commit)
        differences = self._states.differences(step.parent, step.commit)
        found = [one for one in differences if one.path not in unclear and one.changes_content]
        gone: dict[str, Entry | None] = {}
        for path, old, new in found:
            if old is not None and old.oid is not None and new is None:
                gone[old.oid] = gone[_moved(old.oid, path)] = self._at(path)
        made = {path: self._after(path, old, new, gone) for path, old, new in found}
        for path, entry in made.items():
            self._made.pop(path, None)
            self._made[path] = entry

    def _after(self, path: str, old: Entry | None, new: Entry | None, gone: Mapping[str, Entry | None]) -> Entry | None:
        here = self._at(path)
        if new is None or new.kind == "directory":
            return new
        if old is None and here is None and new.oid is not None:  # what was moved here is what it was in the replay
            moved = gone.get(new.oid)
            if moved is not None and moved.kind == new.kind:
                return replace(moved, meta=new.meta)
            return None if _moved(new.oid, path) in gone else new  # with its directory, a file of somebody else's
        if old is None or old.same_content(here):  # where others had removed it, all of it is the step's
            return new
        both = self._merged(old, here, new)
        if both is None:
            self.mixed.add(path)
        return both or new

    def _merged(self, old: Entry, here: Entry | None, new: Entry) -> Entry | None:
        if here is None or {old.kind, here.kind, new.kind} != {"file"}:
            return None
        text = merged(*(self._bytes(one) for one in (old, here, new)))
        if text is None:
            return None
        oid = blob_id(text)
        self._contents[oid] = text
        mode = here.meta.mode if old.meta.mode == new.meta.mode else new.meta.mode
        return replace(new, oid=oid, meta=replace(new.meta, mode=mode))

    def make_room(self) -> None:
        """Take away what is in the way of something that was made later: others had removed it by then."""
        stays: set[str] = set()
        for path in [*reversed(self._made)]:
            entry = self._made[path]
            files = [one for one in _above(path) if (at := self._at(one)) is not None and at.kind != "directory"]
            if entry is None or not stays.isdisjoint(files):
                self._take_away(path)
                continue
            stays.add(path)
            in_the_way = files if entry.kind == "directory" else [*files, *self._below(path)]
            for one in in_the_way:
                self._take_away(one)

    def _below(self, path: str) -> list[str]:
        folder = self._states.folder(self._start, path)
        found = walk(folder, self._states.objects, path) if folder is not None else ()
        return [below for below, _ in found if below != path]

    def _take_away(self, path: str) -> None:
        if self._at(path) is not None:
            self._made[path] = None
            self.mixed.add(path)

    def changes(self) -> Iterator[Change]:
        """What is otherwise than where it began."""
        for path, after in sorted(self._made.items()):
            before = self._states.entry(self._start, path)
            if before is not None if after is None else not after.same_content(before):
                yield Change(path, self._states.version(before), self._version(after))

    def content(self, path: str) -> bytes:
        entry = self._made[path]
        assert entry is not None, "it is in a change that leaves something there"
        return self._bytes(entry)

    def _at(self, path: str) -> Entry | None:
        return self._made[path] if path in self._made else self._states.entry(self._start, path)

    def _bytes(self, entry: Entry) -> bytes:
        assert entry.oid is not None, "it is no directory"
        found = self._contents.get(entry.oid)
        return self._states.content(entry.oid) if found is None else found

    def _version(self, entry: Entry | None) -> FileVersion | None:
        if entry is None or entry.oid not in self._contents:
            return self._states.version(entry)
        content = self._bytes(entry)
        return FileVersion("file", entry.meta.mode, len(content), hashlib.sha256(content).hexdigest())


def _above(path: str) -> list[str]:
    return [path[:at] for at, letter in enumerate(path) if letter == "/"]


def _moved(oid: str, path: str) -> str:
    """What is the same before and after a directory was moved."""
    return f"{oid} {path.rpartition('/')[2]}"
