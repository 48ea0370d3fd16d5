"""What the tree was before an opaque call, and what differs after it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, field

from ringfence.participants import Detection
from ringfence_workspace.history.commits import PreparedStep
from ringfence_workspace.history.entries import Difference
from ringfence_workspace.history.scan import Exclusion, ScanResult
from ringfence_workspace.history.stat_cache import (
    Stamp,
    attributes_from_json,
    attributes_json,
)
from ringfence_workspace.tree.extended_attributes import Attributes
from ringfence_workspace.tree.linked_worktrees import LINKED_WORKTREE

MOST_LISTED = 20
"""Paths in a note; the rest is counted."""


def is_only_time(item: Difference) -> bool:
    """Whether it is a directory of which only the time differs, as it does after anything that was done in it."""
    _, old, now = item
    return (
        now is not None
        and old is not None
        and now.kind == old.kind == "directory"
        and now.meta == old.meta._replace(mtime_ns=now.meta.mtime_ns)
    )


SEPARATE: Collection[Exclusion] = frozenset[Exclusion]({"mounted", LINKED_WORKTREE})
"""Why directories are left out that a rollback neither moves nor changes."""


@dataclass(frozen=True, slots=True)
class ExcludedFile:
    """Something that a scan left out: it was there before the call, and only its name and status are known."""

    reason: Exclusion
    inode: int
    size: int
    mtime_ns: int
    mode: int
    """Its kind and permission bits; -1: not known, or of what is `SEPARATE`."""

    def is_at(self, found: os.stat_result) -> bool:
        """Whether this is the very thing, changed or not. (An inode's number may have gone to something else.)"""
        kind = stat.S_IFMT(found.st_mode if self.mode == -1 else self.mode)
        return (found.st_ino, stat.S_IFMT(found.st_mode)) == (self.inode, kind)

    def fits(self, found: os.stat_result) -> bool:
        return self.is_at(found) and (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)

    def is_as_before(self, found: os.stat_result) -> bool:
        """Whether nothing about it has changed; of a directory, what is in it does not count."""
        if self.mode not in (-1, found.st_mode):
            return False
        return self.is_at(found) if stat.S_ISDIR(found.st_mode) else self.fits(found)


@dataclass(slots=True)
class ScanCommit:
    """The tree as it was when a call began in which files change unseen. ``prepared`` is None where the newest commit
    has it."""

    commit: str
    prepared: PreparedStep | None = None
    known: Mapping[str, Mapping[str, Stamp]] = field(default_factory=dict[str, Mapping[str, Stamp]])
    stamps: Mapping[str, Stamp] = field(default_factory=dict[str, Stamp])
    excluded: Mapping[str, ExcludedFile] = field(default_factory=dict[str, ExcludedFile])
    attributes: Mapping[str, Attributes] = field(default_factory=dict[str, Attributes])
    """The extended attributes of what has any, by path."""
    room: int = 0
    """How many bytes may be kept of what the call makes, should it be taken back: of what the disk had left before the
    call, which a rollback needs where the tree is on it, too."""
    paths: tuple[str, ...] | None = None
    """What alone is looked at, where a call of somebody else's names its files."""
    adopted: bool = False
    """Whether somebody else ran the call, and only looks at the tree were made around it."""
    git_stays: bool = False
    """Whether git's own data stays as it is, since a git command is at work in it."""
    _by_inode: dict[int, Stamp] | None = field(default=None, init=False)
    _excluded_inodes: set[tuple[int, int]] | None = field(default=None, init=False)

    @property
    def hidden(self) -> Mapping[str, ExcludedFile]:
        """What was hidden, by path."""
        return {path: left for path, left in self.excluded.items() if left.reason == "hidden"}

    def has_stored(self, found: os.stat_result) -> bool:
        """Whether this was in the tree and was not hidden, at whatever path. A file that has been written to since is
        another one; so it is where nobody knows, as may be after a crash."""
        if self._by_inode is None:
            known = [stamp for path, stamp in self.stamps.items() if path not in self.hidden]
            known += [stamp for names in self.known.values() for stamp in names.values()]
            self._by_inode = {stamp[0]: stamp for stamp in known}
        stamp = self._by_inode.get(found.st_ino)
        if stamp is None:
            return False
        return stat.S_ISDIR(found.st_mode) or stamp[1:3] == (found.st_size, found.st_mtime_ns)

    def was_excluded(self, found: os.stat_result | None) -> bool:
        """Whether this was there and no scan took it in, at whatever path."""
        if self._excluded_inodes is None:
            self._excluded_inodes = {
                (left.inode, stat.S_IFMT(left.mode)) for left in self.excluded.values() if left.mode != -1
            }
            self._excluded_inodes |= {(left.inode, stat.S_IFDIR) for left in self.excluded.values() if left.mode == -1}
        return found is not None and (found.st_ino, stat.S_IFMT(found.st_mode)) in self._excluded_inodes

    def inode(self, path: str) -> int | None:
        """The inode at a path; None where it is not known, as may be after a crash."""
        stamp = self.stamps.get(path)
        if stamp is None:
            folder, _, name = path.rpartition("/")
            stamp = self.known.get(path, {}).get("") or self.known.get(folder, {}).get(name)
        return None if stamp is None else stamp[0]

    def paths_of(self, inodes: Set[int]) -> dict[str, int]:
        """Where files of these inodes are in the tree."""
        found = {path: stamp[0] for path, stamp in self.stamps.items() if stamp[0] in inodes}
        for folder, names in self.known.items():
            for name, stamp in names.items():
                if stamp[0] in inodes and name:
                    found[f"{folder}/{name}" if folder else name] = stamp[0]
        return found

    def more(self) -> bytes:
        """What the log is to have besides the commit."""
        left = {path: astuple(one) for path, one in self.excluded.items()}
        found = [left, attributes_json(self.attributes), self.room]
        return json.dumps([*found, self.paths, self.git_stays] if self.adopted else found).encode()

    def with_more(self, more: bytes) -> ScanCommit:
        """With what `more` gave."""
        left, attributes, self.room, *adopted = json.loads(more)
        if adopted:
            self.adopted, self.git_stays = True, adopted[1]
            self.paths = None if adopted[0] is None else tuple(adopted[0])
        self.excluded = {path: ExcludedFile(*row) for path, row in left.items()}
        self.attributes = attributes_from_json(attributes)
        return self


@dataclass(slots=True)
class After:
    """What differs from `ScanCommit`, and the stamps of what is there now."""

    found: ScanResult
    differing: Sequence[Difference]

    @property
    def stamps(self) -> Mapping[str, Stamp]:
        return self.found.stamps


@dataclass(slots=True, eq=False)
class Base:
    """The tree to which an opaque call goes back."""

    before: ScanCommit
    detection: Detection = "scan"
    """How the looks at the tree were made, so far."""
    seen: tuple[int, After] | None = None
    """What the last look at the tree found, with the version of the workspace that was looked at."""
    tried: set[str] | None = None
    """The paths of the call, once a way back was begun."""
    is_denied: bool = False
    """Of a call that is adopted: whether it is to be taken back. Whatever else goes wrong, what it did stays."""
    left_note: str = ""
    """Why a rollback leaves what the call did, in words. Empty: it does not."""

    @property
    def stays(self) -> bool:
        """Whether a rollback leaves what the call did."""
        return bool(self.left_note) or (self.before.adopted and not self.is_denied)

    def looked(self, how: Detection) -> None:
        """Another look was made so."""
        if how != "watch":
            self.detection = how

    def seen_at(self, version: int) -> After | None:
        """What a look at the tree has found, unless calls have gone on since."""
        return self.seen[1] if self.seen is not None and self.seen[0] == version else None
