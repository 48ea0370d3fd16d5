"""The states of a tree that commits have: whole, by path, or as what differs between two of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Set

from dulwich.objects import Commit

from ringfence.participants import Change, FileVersion
from ringfence_sandbox.store.entries import Difference, Entry
from ringfence_sandbox.store.folders import Folder, differences, load, walk
from ringfence_sandbox.store.history_objects import HistoryObjects
from ringfence_sandbox.store.object_ids import COMMIT
from ringfence_sandbox.store.rows import OID_BYTES, tree_rows
from ringfence_sandbox.store.unknown import NOTHING, Unknown

_KEPT_ROOTS = 4
UNKNOWN = b"unknown"
"""The name in a commit's tree of what it does not know, where there is something."""


def read_commit(objects: HistoryObjects, commit: str) -> Commit:
    """Raises LookupError where there is no such commit: KeyError where it was once, if it is one of the history."""
    try:
        kind, raw = objects.raw(bytes.fromhex(commit))
    except (KeyError, ValueError):
        raise KeyError(f"the store has no commit {commit}") from None
    if kind != COMMIT:
        raise LookupError(f"{commit} is no commit")
    return Commit.from_string(raw)


class States:
    """Reads states. A commit that is not there is a LookupError everywhere."""

    def __init__(self, objects: HistoryObjects) -> None:
        self.objects = objects
        self._roots: dict[str, Folder] = {}
        self._unknown: dict[str, Unknown] = {}

    def remember(self, commit: str, root: Folder, unknown: Unknown) -> None:
        """Keep the root of a commit that is asked for next, most likely, and what it does not know."""
        self._roots.pop(commit, None)
        while len(self._roots) >= _KEPT_ROOTS:
            oldest = next(iter(self._roots))
            del self._roots[oldest], self._unknown[oldest]
        self._roots[commit], self._unknown[commit] = root, unknown

    def root(self, commit: str) -> Folder:
        """The root directory at a commit."""
        known = self._roots.get(commit)
        if known is not None:
            return known
        tree = tree_rows(self.objects.raw(bytes.fromhex(read_commit(self.objects, commit).tree.decode()))[1])
        rows = dict(zip(tree.keys, tree.items, strict=True))
        folder = load(self.objects, rows[b"meta/"][-OID_BYTES:], rows[b"files/"][-OID_BYTES:])
        if not folder.files.keys:
            folder.files_oid = None
        unknown = rows.get(UNKNOWN)
        said = NOTHING if unknown is None else Unknown.from_bytes(self.objects.raw(unknown[-OID_BYTES:])[1])
        self.remember(commit, folder, said)
        return folder

    def unknown(self, commit: str | None) -> Unknown:
        """What a commit does not know of its tree."""
        if commit is None:
            return NOTHING
        self.root(commit)
        return self._unknown[commit]

    def files(self, commit: str) -> dict[str, Entry]:
        """Everything at a commit by path; the root is ``""``."""
        return {os.fsdecode(path): entry for path, entry in walk(self.root(commit), self.objects)}

    def linked(self, commit: str, numbers: Set[int]) -> dict[int, list[str]]:
        """All paths of these hard-link groups, sorted."""
        found: dict[int, list[str]] = {}
        # Where a package manager has linked a tree to its cache, nearly every step asks for a few numbers of all that
        # there are. So a directory's rows are searched as one text before any of them is read.
        rows = re.compile(rb"^\S+ \S+ \S+ \S+ (?:%s) " % b"|".join(b"%d" % number for number in numbers), re.MULTILINE)
        waiting = [(b"", self.root(commit))] if numbers else []
        while waiting:
            path, folder = waiting.pop()
            if rows.search(folder.lines.joined):
                for name, entry in folder.each_file():
                    if entry.meta.link in numbers:
                        found.setdefault(entry.meta.link, []).append(os.fsdecode(path + name))
            inner = ((path + name + b"/", folder.directory(name, self.objects)) for name in folder.directories())
            waiting += [(place, below) for place, below in inner if below is not None]
        return {number: sorted(paths) for number, paths in found.items()}

    def folder(self, commit: str, path: str) -> Folder | None:
        """A directory at a commit; None where it is none."""
        folder: Folder | None = self.root(commit)
        for part in os.fsencode(path).split(b"/") if path else ():
            folder = folder.directory(part, self.objects) if folder is not None else None
        return folder

    def entry(self, commit: str, path: str) -> Entry | None:
        """One path at a commit."""
        above, _, name = path.rpartition("/")
        folder = self.folder(commit, above)
        return None if folder is None else self.entry_in(folder, name)

    def entry_in(self, folder: Folder, name: str) -> Entry | None:
        """One name in a directory; "" is the directory itself."""
        if not name:
            return Entry("directory", folder.meta)
        encoded = os.fsencode(name)
        file = folder.file(encoded)
        if file is not None:
            return file
        below = folder.directory(encoded, self.objects)
        return None if below is None else Entry("directory", below.meta)

    def names(self, commit: str, path: str) -> list[str]:
        """What is in a directory at a commit; nothing where it is none."""
        folder = self.folder(commit, path)
        return [] if folder is None else [os.fsdecode(name) for name in (*folder.names(), *folder.directories())]

    def content(self, oid: str) -> bytes:
        """The bytes of a file, or the target of a symlink. KeyError where the store does not have them."""
        return self.objects.raw(bytes.fromhex(oid))[1]

    def read(self, commit: str, path: str) -> bytes:
        """The bytes of a file (of a symlink, its target) at a commit.

        Raises:
            FileNotFoundError, IsADirectoryError: at that commit there is no such file.
        """
        entry = self.entry(commit, path)
        if entry is None:
            raise FileNotFoundError(f"{path!r} is not there at {commit[:12]}")
        if entry.oid is None:
            raise IsADirectoryError(f"{path!r} is a directory at {commit[:12]}")
        return self.content(entry.oid)

    def differences(self, one: str | None, other: str) -> list[Difference]:
        """The paths that differ in anything between two commits (None: nothing at all), sorted, with both states."""
        before = self.root(one) if one is not None else None
        return differences(before, self.root(other), self.objects)

    def changes(self, one: str | None, other: str) -> list[Change]:
        """The paths whose kind, bytes or permissions differ between two commits, sorted; but for `unclear` ones."""
        unclear = self.unclear(one, other)
        return [
            Change(found.path, self.version(found.before), self.version(found.after))
            for found in self.differences(one, other)
            if found.path not in unclear and found.changes_content
        ]

    def unclear(self, one: str | None, other: str) -> dict[str, str]:
        """The paths whose states differ between two commits, one of which does not know them, with the reasons."""
        before, after = self.unknown(one), self.unknown(other)
        if not before.reasons and not after.reasons:
            return {}
        found: dict[str, str] = {}
        for difference in self.differences(one, other):
            path, old, new = difference
            why = before.why(path, there=old is not None) or after.why(path, there=new is not None)
            if why is not None and difference.changes_content:
                found[path] = why
        for path, why in before.reasons.items():  # what is gone, and was known to neither
            if path and why and path not in found and after.why(path) is None and self.entry(other, path) is None:
                found[path] = why
        return dict(sorted(found.items()))

    def version(self, entry: Entry | None) -> FileVersion | None:
        """An entry as the changes of a tool call show it."""
        if entry is None:
            return None
        if entry.oid is None:
            return FileVersion("directory", entry.meta.mode, 0)
        content = self.content(entry.oid)
        if entry.kind == "symlink":
            return FileVersion("symlink", 0o777, len(content), target=os.fsdecode(content))
        return FileVersion("file", entry.meta.mode, len(content), content_hash=hashlib.sha256(content).hexdigest())
