"""What differs between two states of a filesystem in memory, or has changed in it since a mark."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from ringfence.filesystem.nodes import Directory, File, Link, Node
from ringfence.filesystem.tree import Tree, TreeMark
from ringfence.participants import Change

_NOTHING = Directory(0, 0, 0, 0)


def changes_since(tree: Tree, mark: TreeMark) -> Sequence[Change]:
    """What has changed since a mark, sorted by path: from the log alone, unless whole directories came or went."""
    log, length, _ = mark
    if len(log) == length:
        return []
    first: dict[str, Node | None] = {}
    for entry in log[length:]:
        if not isinstance(entry, tuple) or (type(entry[1]) is Directory and entry[1].entries):
            return differences(tree.as_it_was(mark), tree.root)
        first.setdefault(entry[0], entry[1])
    changes: list[Change] = []
    for path in sorted(first):
        was, now = first[path], tree.find(path, follow=False)[1]
        if not _alike(was, now):
            changes.append(Change(path, was and was.file_version, now and now.file_version))
    return changes


def differences(before: Directory, after: Directory) -> list[Change]:
    """What differs between two states, sorted by path; it looks only where their nodes differ.

    Bytes, kinds, permission bits and link targets count, times do not.
    """
    changes: list[Change] = []
    if before.mode != after.mode:
        changes.append(Change("", before.file_version, after.file_version))
    waiting = [("", before, after)]
    while waiting:
        prefix, old, new = waiting.pop()
        for name in _names_that_may_differ(old, new):
            was, now = old.entries.get(name), new.entries.get(name)
            if was is now:
                continue
            path = prefix + name
            if not _alike(was, now):
                changes.append(Change(path, was and was.file_version, now and now.file_version))
            below_was = was if type(was) is Directory else _NOTHING
            below_now = now if type(now) is Directory else _NOTHING
            if below_was is not below_now:
                waiting.append((f"{path}/", below_was, below_now))
    changes.sort(key=attrgetter("path"))
    return changes


def _names_that_may_differ(old: Directory, new: Directory) -> set[str]:
    if new.touched is not None and new.copied_from == old.serial:
        return new.touched.copy()
    if old.touched is not None and old.copied_from == new.serial:
        return old.touched.copy()
    return {*old.entries.copy(), *new.entries.copy()} if old is not new else set()


def _alike(was: Node | None, now: Node | None) -> bool:
    if was is now:
        return True
    if type(was) is File and type(now) is File:
        return was.mode == now.mode and was.content == now.content
    if type(was) is Directory and type(now) is Directory:
        return was.mode == now.mode
    return type(was) is Link and type(now) is Link and was.target == now.target
