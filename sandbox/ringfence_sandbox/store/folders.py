"""The directories of a step, as values: a new state shares every directory that did not change with the old one.

A step's tree has two entries, `files` and `meta`. In `files` a directory is what git takes it for: its files, symlinks
and the directories that have any. In `meta` every directory has a tree, with the blob ``entries`` (what git cannot
hold of the directory and of what is in it, a line each) and a tree ``+name`` for each directory in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from ringfence_sandbox.store.deltas import Before
from ringfence_sandbox.store.entries import Difference, Entry, Meta, decode_line
from ringfence_sandbox.store.git_names import escaped, unescaped
from ringfence_sandbox.store.rows import EMPTY_ROWS, OID_BYTES, Rows, tree_rows

LINES = b"entries"
SUB = b"+"


class Objects(Protocol):
    """Where git objects are, by binary id."""

    def raw(self, oid: bytes) -> tuple[int, bytes]: ...

    def add(self, type_number: int, raw: bytes, before: Before | None = None) -> bytes: ...


@dataclass(slots=True)
class Folder:
    """One directory at one moment.

    ``lines`` has the rows of the meta blob by true name, ``files`` those of the tree in `files`, and ``subs`` those of
    the tree in `meta` without the blob, both by git's sort key. ``loaded`` are the directories in it that are known
    as values; the others are read when they are needed.
    """

    meta: Meta
    lines: Rows = EMPTY_ROWS
    files: Rows = EMPTY_ROWS
    subs: Rows = EMPTY_ROWS
    files_oid: bytes | None = None
    """None: no file in it, at any depth."""
    lines_oid: bytes = b""
    meta_oid: bytes = b""
    loaded: dict[bytes, Folder] = field(default_factory=dict[bytes, "Folder"])
    decoded: dict[bytes, Entry] = field(default_factory=dict[bytes, Entry])
    """Of some of the files, what their rows say."""

    def file(self, name: bytes) -> Entry | None:
        """The file or symlink of that name."""
        known = self.decoded.get(name)
        if known is not None or not self.lines.keys:
            return known
        line = self.lines.get(name)
        item = self.files.get(escaped(name)) if line is not None else None
        if line is None or item is None:
            return None
        entry = self.decoded[name] = _entry(item, decode_line(line[:-1])[1])
        return entry

    def each_file(self) -> Iterator[tuple[bytes, Entry]]:
        for line in self.lines.items:
            name, meta = decode_line(line[:-1])
            item = self.files.get(escaped(name))
            if item is None:
                raise _damaged(name)
            yield name, _entry(item, meta)

    def names(self) -> Iterator[bytes]:
        """The names of the files and symlinks in it."""
        yield from self.lines.keys

    def directories(self) -> Iterator[bytes]:
        """The names of the directories in it."""
        for key in self.subs.keys:
            yield unescaped(key[1:-1])

    def directory(self, name: bytes, objects: Objects) -> Folder | None:
        known = self.loaded.get(name)
        if known is not None or not self.subs.keys:
            return known
        encoded = escaped(name)
        sub = self.subs.get(SUB + encoded + b"/")
        if sub is None:
            return None
        item = self.files.get(encoded + b"/")
        folder = load(objects, sub[-OID_BYTES:], item[-OID_BYTES:] if item is not None else None)
        self.loaded[name] = folder
        return folder


def _entry(item: bytes, meta: Meta) -> Entry:
    return Entry("symlink" if item.startswith(b"120000") else "file", meta, item[-OID_BYTES:].hex())


def load(objects: Objects, meta_oid: bytes, files_oid: bytes | None) -> Folder:
    """Read a directory.

    Raises:
        KeyError, ValueError: the store does not have all of it.
    """
    subs = tree_rows(objects.raw(meta_oid)[1])
    item = subs.get(LINES)
    if item is None:
        raise ValueError("the store is damaged: it has a directory without its entries")
    lines_oid = item[-OID_BYTES:]
    blob = objects.raw(lines_oid)[1]
    first, *lines = [line + b"\n" for line in blob.split(b"\n")[:-1]]
    _, meta = decode_line(first[:-1])
    return Folder(
        meta,
        Rows.of([_name(line) for line in lines], lines),
        tree_rows(objects.raw(files_oid)[1]) if files_oid is not None else EMPTY_ROWS,
        subs.edited({LINES: None}).rows,
        files_oid,
        lines_oid,
        meta_oid,
    )


def shown_path(path: str) -> str:
    return repr(path) if path else "the root"


def walk(folder: Folder, objects: Objects, path: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
    """Everything in a directory, itself first, by path from the root."""
    yield path, Entry("directory", folder.meta)
    prefix = path + b"/" if path else b""
    for name, entry in folder.each_file():
        yield prefix + name, entry
    for name in folder.directories():
        below = folder.directory(name, objects)
        if below is not None:
            yield from walk(below, objects, prefix + name)


def reachable(objects: Objects, trees: Iterable[bytes]) -> set[bytes]:
    """The ids of these trees and of all that is in them."""
    found: set[bytes] = set()
    waiting = list(trees)
    while waiting:
        tree = waiting.pop()
        if tree not in found:
            found.add(tree)
            for item in tree_rows(objects.raw(tree)[1]).items:
                (waiting.append if item.startswith(b"40000 ") else found.add)(item[-OID_BYTES:])
    return found


def differences(one: Folder | None, other: Folder | None, objects: Objects) -> list[Difference]:
    """The paths that differ, in bytes or in anything else, with both states. Equal directories are not looked into."""
    return in_order(each_difference(one, other, objects, ""))


def in_order(differences: Iterable[Difference]) -> list[Difference]:
    """Sorted, each path once."""
    found: dict[str, Difference] = {}
    for difference in differences:
        path, old, new = difference
        known = found.get(path)
        if known is not None:
            # A file that became a directory comes as a file that went and a directory that came.
            difference = Difference(path, old or known.before, new or known.after)
        found[path] = difference
    return sorted(found.values(), key=itemgetter(0))


def each_difference(one: Folder | None, other: Folder | None, objects: Objects, path: str) -> Iterator[Difference]:
    if one is not None and other is not None:
        if (one.meta_oid, one.files_oid) == (other.meta_oid, other.files_oid):
            return
        if one.meta != other.meta:
            yield Difference(path, directory_entry(one), directory_entry(other))
    else:
        yield Difference(path, directory_entry(one), directory_entry(other))
    prefix = f"{path}/" if path else ""
    files, others = (dict(_changed_files(a, b)) for a, b in ((one, other), (other, one)))
    for name in files.keys() | others.keys():
        yield Difference(prefix + os.fsdecode(name), files.get(name), others.get(name))
    for name in {name for folder in (one, other) if folder is not None for name in folder.directories()}:
        a, b = (folder.directory(name, objects) if folder is not None else None for folder in (one, other))
        yield from each_difference(a, b, objects, prefix + os.fsdecode(name))


def directory_entry(folder: Folder | None) -> Entry | None:
    return Entry("directory", folder.meta) if folder is not None else None


def _changed_files(folder: Folder | None, other: Folder | None) -> Iterator[tuple[bytes, Entry]]:
    """The files of the one whose rows the other does not have just so."""
    if folder is None:
        return
    if other is None:
        yield from folder.each_file()
        return
    lines, items = set(other.lines.items), set(other.files.items)
    names = {_name(line) for line in folder.lines.items if line not in lines}
    for item in folder.files.items:
        if item not in items and not item.startswith(b"40000 "):
            names.add(unescaped(item[7 : -OID_BYTES - 1]))
    for name in names:
        entry = folder.file(name)
        if entry is None:
            raise _damaged(name)
        yield name, entry


def _name(line: bytes) -> bytes:
    return decode_line(line[:-1])[0] if line.find(b"\\") != -1 else line.split(b" ", 5)[5][:-1]


def _damaged(name: bytes) -> ValueError:
    return ValueError(f"the store is damaged: it has no content for {shown_path(os.fsdecode(name))}")
