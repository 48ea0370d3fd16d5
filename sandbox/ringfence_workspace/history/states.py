"""The states of a tree that commits have: whole, by path, or as what differs between two of them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Set

from dulwich.objects import Commit

from ringfence.participants import Change, FileVersion
from ringfence_workspace.history.entries import COMMIT, NOTHING, OID_BYTES, Difference, Entry, Unknown
from ringfence_workspace.history.objects import HistoryObjects
from ringfence_workspace.history.trees import Folder, differences, entry_blobs, entry_of, load, tree_rows, walk

_KEPT_ROOTS = 4
_LINK = re.compile(rb"^\S+ \S+ \S+ \S+ ([1-9]\d*) ", re.MULTILINE)
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


class CommitStates:
    """Reads states. A commit that is not there is a LookupError everywhere."""

    def __init__(self, objects: HistoryObjects) -> None:
        self.objects = objects
        self._roots: dict[str, Folder] = {}
        self._unknown: dict[str, Unknown] = {}
        self._linked: dict[int, tuple[str, ...]] = {}
        """By number of a hard-link group, the directories that have had a name of it at a commit that was asked for."""
        self._linked_at: str | None = None
        """The commit that was asked for last."""

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
        rows = tree_rows(self.objects.raw(bytes.fromhex(read_commit(self.objects, commit).tree.decode()))[1])
        folder = load(self.objects, rows[b"meta/"][-OID_BYTES:], rows[b"files/"][-OID_BYTES:])
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
        return dict(walk(self.root(commit), self.objects))

    def linked(self, commit: str, numbers: Set[int]) -> dict[int, list[str]]:
        """All paths of these hard-link groups, sorted."""
        if numbers:
            self._find_links(commit)
        found: dict[int, list[str]] = {}
        for number in numbers:
            for path in self._linked.get(number, ()):
                folder, prefix = self.folder(commit, path), f"{path}/" if path else ""
                for name, entry in folder.each_file() if folder is not None else ():
                    if entry.meta.link == number:
                        found.setdefault(number, []).append(prefix + os.fsdecode(name))
        return {number: sorted(paths) for number, paths in found.items()}

    def _find_links(self, commit: str) -> None:
        """Bring `_linked` up to a commit: the first time by all directories, then by what differs."""
        # Where a package manager has linked a tree to its cache, nearly every file has a number, and a step asks for
        # a few. So the lines of a directory are searched as one text.
        before = self._linked_at
        if before is not None and self.objects.has(bytes.fromhex(before)):  # `gc` may have dropped it
            changed = ((one.path.rpartition("/")[0], one.after) for one in self.differences(before, commit))
            found = [(entry.meta.link, path) for path, entry in changed if entry is not None and entry.meta.link]
        else:
            texts = entry_blobs(self.objects, self.root(commit).subs.oid)
            found = [(int(number), path) for path, lines in texts for number in _LINK.findall(lines)]
        for number, path in found:
            known = self._linked.get(number, ())
            if path not in known:
                self._linked[number] = (*known, path)
        self._linked_at = commit

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
        return entry_of(folder.child(os.fsencode(name), self.objects) if name else folder)

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
        differences = self.differences(one, other)
        unclear = self._unclear(differences, one, other)
        return [
            Change(found.path, self.version(found.before), self.version(found.after))
            for found in differences
            if found.path not in unclear and found.changes_content
        ]

    def unclear(self, one: str | None, other: str) -> dict[str, str]:
        """The paths whose states differ between two commits, one of which does not know them, with the reasons."""
        return self._unclear(self.differences(one, other), one, other)

    def _unclear(self, differences: Iterable[Difference], one: str | None, other: str) -> dict[str, str]:
        before, after = self.unknown(one), self.unknown(other)
        found: dict[str, str] = {}
        for path, old, new in differences if before.reasons or after.reasons else ():
            why = before.why(path, there=old is not None) or after.why(path, there=new is not None)
            if why is not None and (old is None or not old.same_content(new)):
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
