"""What a call changed, as states of the store: what was there before it and is not in the history, and what it left."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.entries import NOTHING, Entry, Meta, Unknown, blob_id, is_directory, link_number
from ringfence_workspace.history.scan import ScanLimits
from ringfence_workspace.history.store import Store
from ringfence_workspace.transaction.changes import TypedChanges
from ringfence_workspace.tree.confined import Confined, PathLooks

if TYPE_CHECKING:
    from ringfence_workspace.history.trees import Folder


_HASHED_BYTES = 1 << 16
_MOST_HASHES = 4096
"""What is longer, or longer ago, is read again where its hash is asked for."""


class Differing:
    """The states of one call."""

    def __init__(
        self,
        files: Confined,
        store: Store,
        changed: TypedChanges,
        at: datetime,
        limits: ScanLimits,
        hashes: OrderedDict[str, str] | None = None,
        looks: PathLooks | None = None,
    ) -> None:
        """What is larger than the ``limits``, and has only got another path, is not read. ``hashes`` has the sha256 of
        some objects by their ids, and gets what is written here."""
        self._look = looks.look if looks is not None else files.look
        self._files = files
        self._device = os.fstat(files.root).st_dev
        self._store = store
        self._changed = changed
        self._hashes = hashes if hashes is not None else OrderedDict[str, str]()
        self._at_ns = int(at.timestamp() * 1e9)
        self._paths = {change.path for change in changed.changes}
        self._directories = all_above(self._paths)
        self._tip = store.tip
        self._folders: dict[str, Folder | None] = {}
        """Of the newest step, directories that were asked for."""
        self._large = dict(self._moved_larger_than(limits.max_file_bytes))
        """The new paths of files that are too large to be read, by the old ones."""

    def _moved_larger_than(self, most_bytes: int) -> Iterator[tuple[str, str]]:
        for change in self._changed.changes:
            before = change.before
            if before is None or before.kind != "file" or before.size <= most_bytes or change.after is not None:
                continue
            new = self._changed.moved(change.path)
            if new is not None and new in self._paths:
                found = self._files.look(new)
                if found is not None and stat.S_ISREG(found.st_mode):
                    yield change.path, new

    def unknown(self) -> tuple[Unknown, Unknown]:
        """What is not known of the tree before the call, and after it."""
        before = self._store.states.unknown(self._tip)
        if not before.reasons and not self._large:
            return NOTHING, NOTHING
        if before.reasons:
            were = {change.path: change.before for change in self._changed.changes if change.path not in self._large}
            before = before.knowing(_kinds(were))
        after = before
        if after.reasons:
            after = after.knowing(_kinds({change.path: change.after for change in self._changed.changes}))
        return before, Unknown({**after.reasons, **dict.fromkeys(self._large.values(), "too large")})

    def external_states(self) -> dict[str, Entry | None]:
        found: dict[str, Entry | None] = {}
        for change in self._changed.changes:
            known = self._known(change.path)
            if change.path in self._large:
                continue
            if change.before is None or _is_special(change.before):
                if known is not None:
                    found[change.path] = None
            elif not self._is_known(change, change.before, known):
                found[change.path] = self._before(change.path, change.before, known)
            elif change.before.kind == "directory" and (change.after is None or change.after.kind != "directory"):
                found |= dict.fromkeys(self._gone_before(change.path))
        self._add_directories(found)
        return found

    def _add_directories(self, found: dict[str, Entry | None]) -> None:
        """Add the directories that somebody else has made. They may have put a file into one that the call had made."""
        holding = set(all_above([path for path, state in found.items() if state is not None]))
        for path in self._directories:
            if is_directory(self._known(path)) or is_directory(found.get(path)):
                continue
            if path not in self._paths or path in holding:
                state = self._now(path)
                if path in holding and not is_directory(state):  # the call has removed it again
                    state = Entry("directory", Meta(0o755, os.geteuid(), os.getegid(), self._at_ns))
                if state is not None:
                    found[path] = state

    def _gone_before(self, directory: str) -> Iterator[str]:
        """What somebody else had taken from a directory before the call did away with it, which tells of the rest."""
        assert self._tip is not None, "it is known"
        for name in self._store.states.names(self._tip, directory):
            if (path := f"{directory}/{name}") not in self._paths:
                yield path

    def own_states(self, rewritten: Iterable[str] = ()) -> dict[str, Entry | None]:
        """``rewritten`` are paths of which more may have changed than was told."""
        left_out = {*self._large.values()}
        found: dict[str, Entry | None] = {
            change.path: None
            if change.after is None or change.path in left_out
            else self._now(change.path, change.after.content_hash)
            for change in self._changed.changes
        }
        again = [path for path in rewritten if path not in found]
        for path in again:
            state = self._now(path)
            if state is not None:
                found[path] = state
        for path in self._changed.made_again:
            known, state = self._known(path), self._now(path)
            # What somebody else had made of it, and the history has not seen, is not of this step.
            if path not in found and state is not None and known is not None and known.same_content(state):
                found[path] = state
                again.append(path)
        for path in all_above([*self._paths, *again]):
            state = found.get(path) or self._now(path)
            if state is not None and state.kind == "directory":
                found[path] = state if path in found else self._only_newer(path, state)
        return found

    def _only_newer(self, path: str, state: Entry) -> Entry:
        """A directory whose time the call has changed. Whoever changed its bits was somebody else."""
        known = self._known(path)
        if known is None or known.kind != "directory" or known.meta.mode == state.meta.mode:
            return state
        return state._replace(meta=state.meta._replace(mode=known.meta.mode))

    def _known(self, path: str) -> Entry | None:
        if self._tip is None:
            return None
        above, _, name = path.rpartition("/")
        if above not in self._folders:
            self._folders[above] = self._store.states.folder(self._tip, above)
        folder = self._folders[above]
        return None if folder is None else self._store.states.entry_in(folder, name)

    def _is_known(self, change: Change, before: FileVersion, known: Entry | None) -> bool:
        if known is None or known.kind != before.kind:
            return False
        if before.kind != "symlink" and known.meta.mode != before.mode:
            return False
        if known.oid is None:
            return True
        if before.content_hash is not None and known.oid in self._hashes:
            return self._hashes[known.oid] == before.content_hash
        bytes_before = self._changed.known_before(change.path)
        if bytes_before is not None:
            return blob_id(bytes_before) == known.oid
        content = self._store.states.content(known.oid)
        if before.kind == "symlink":
            return content == os.fsencode(before.target or "")
        if before.content_hash is not None:
            return hashlib.sha256(content).hexdigest() == before.content_hash
        return len(content) == before.size and content == self._changed.before(change.path)

    def _before(self, path: str, before: FileVersion, known: Entry | None) -> Entry | None:
        if known is not None:
            meta = known.meta._replace(mode=before.mode, link=0)
        else:
            meta = Meta(before.mode, os.geteuid(), os.getegid(), self._at_ns)
        if before.kind == "symlink":
            return Entry("symlink", meta, self._store.add_blob(os.fsencode(before.target or "")))
        if before.kind == "directory":
            return Entry("directory", meta)
        return Entry("file", meta, self._store.add_blob(self._changed.before(path)))

    def _now(self, path: str, sha256: str | None = None) -> Entry | None:
        found = self._changed.found(path)
        if found is None:
            found = self._look(path)
            sha256 = None  # it is read again, and may be another
        if found is None:
            return None
        mode = found.st_mode
        link = link_number(found, self._device)
        meta = Meta.of(found, link)
        if stat.S_ISREG(mode):
            return self._stored(path, meta, sha256)
        if stat.S_ISDIR(mode):
            return Entry("directory", meta)
        if stat.S_ISLNK(mode):
            return Entry("symlink", meta, self._store.add_blob(os.fsencode(self._files.read_link(path))))
        return None  # a socket, a pipe or a device: no history has it

    def _stored(self, path: str, meta: Meta, sha256: str | None) -> Entry:
        content = self._changed.after(path)
        oid = self._store.add_blob(content)
        if len(content) <= _HASHED_BYTES and oid not in self._hashes:
            if len(self._hashes) >= _MOST_HASHES:
                self._hashes.popitem(last=False)
            self._hashes[oid] = sha256 or hashlib.sha256(content).hexdigest()
        return Entry("file", meta, oid)


def all_above(paths: Iterable[str]) -> list[str]:
    """The directories above, from the top; the root is one."""
    found = {""}
    for path in paths:
        while path := path.rpartition("/")[0]:
            if path in found:
                break
            found.add(path)
    return sorted(found)


def _kinds(versions: Mapping[str, FileVersion | None]) -> dict[str, str | None]:
    return {path: one and one.kind for path, one in versions.items() if one is None or not _is_special(one)}


def _is_special(version: FileVersion) -> bool:
    """Whether it is a socket, a pipe or a device, which no history has: it has neither bytes nor a hash."""
    return version.kind == "file" and version.size == 0 and version.content_hash is None
