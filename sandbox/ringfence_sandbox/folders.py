"""The directories of a step, as values: a new state shares every directory that did not change with the old one.

A step's tree has two entries, `files` and `meta`. In `files` a directory is what git takes it for: its files, symlinks
and the directories that have any. In `meta` every directory has a tree, with the blob ``entries`` (what git cannot
hold of the directory and of what is in it, a line each) and a tree ``+name`` for each directory in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeAlias

from ringfence_sandbox.deltas import Before
from ringfence_sandbox.entries import Entry, Meta, decode_line, encode_line, make_entry
from ringfence_sandbox.git_names import escaped, unescaped
from ringfence_sandbox.rows import EMPTY_ROWS, OID_BYTES, Rows, tree_rows

COMMIT, TREE, BLOB = 1, 2, 3
_LINES = b"entries"
_SUB = b"+"
_MODES = {"file": b"100644 ", "symlink": b"120000 "}
_EXECUTABLE = b"100755 "


Difference: TypeAlias = tuple[bytes, Entry | None, Entry | None]


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
        sub = self.subs.get(_SUB + encoded + b"/")
        if sub is None:
            return None
        item = self.files.get(encoded + b"/")
        folder = load(objects, sub[-OID_BYTES:], item[-OID_BYTES:] if item is not None else None)
        self.loaded[name] = folder
        return folder


def _entry(item: bytes, meta: Meta) -> Entry:
    return make_entry("symlink" if item.startswith(b"120000") else "file", meta, item[-OID_BYTES:].hex())


def load(objects: Objects, meta_oid: bytes, files_oid: bytes | None) -> Folder:
    """Read a directory.

    Raises:
        KeyError, ValueError: the store does not have all of it.
    """
    subs = tree_rows(objects.raw(meta_oid)[1])
    item = subs.get(_LINES)
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
        subs.edited({_LINES: None}).rows,
        files_oid,
        lines_oid,
        meta_oid,
    )


class Edit:
    """What becomes of one name, and of what is below it.

    ``files`` are the names of which no more is said than what they become: files, symlinks, or nothing.
    """

    __slots__ = ("below", "files", "given", "state")

    def __init__(self) -> None:
        self.given = False
        self.state: Entry | None = None
        self.below: dict[bytes, Edit] = {}
        self.files: dict[bytes, Entry | None] = {}

    def give(self, state: Entry | None) -> None:
        self.given, self.state = True, state

    def into(self, name: bytes) -> Edit:
        below = self.below.get(name)
        if below is None:
            below = self.below[name] = Edit()
            if name in self.files:
                below.give(self.files.pop(name))
        return below


def edits_of(changes: Iterable[tuple[bytes, Entry | None]]) -> Edit:
    """The changes, by paths from the root, as a tree."""
    edits = {b"": Edit()}
    for path, state in changes:
        if path in edits or (state is not None and state.kind == "directory"):
            _edit_at(path, edits).give(state)
        else:
            above, _, name = path.rpartition(b"/")
            _edit_at(above, edits).files[name] = state
    return edits[b""]


def _edit_at(path: bytes, edits: dict[bytes, Edit]) -> Edit:
    edit = edits.get(path)
    if edit is None:
        above, _, name = path.rpartition(b"/")
        edit = edits[path] = _edit_at(above, edits).into(name)
    return edit


class _NewRows(NamedTuple):
    """What becomes of the rows of a directory."""

    lines: dict[bytes, bytes | None]
    files: dict[bytes, bytes | None]
    subs: dict[bytes, bytes | None]


class Builder:
    """Makes the new directories of a step and adds their objects; ``found`` is what became different."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.found: list[Difference] = []

    def build(self, folder: Folder | None, edit: Edit, path: bytes = b"") -> Folder:
        """The directory after `edit`; None was no directory before.

        Raises:
            ValueError: something is put into a directory that there is not.
        """
        if edit.given and edit.state is not None:
            meta = edit.state.meta
        elif folder is not None:
            meta = folder.meta
        else:
            raise ValueError(f"{_shown(path)} is no directory before this step, so it must be among the changes too")
        if folder is None or meta != folder.meta:
            self.found.append((path, _directory(folder), Entry("directory", meta)))
        lines: dict[bytes, bytes | None] = {}
        files: dict[bytes, bytes | None] = {}
        subs: dict[bytes, bytes | None] = {}
        before = folder if folder is not None else Folder(meta)
        loaded = before.loaded.copy()
        rows = _NewRows(lines, files, subs)
        for name, state in edit.files.items():
            self._file(before, name, state, path, rows, loaded)
        for name, below in edit.below.items():
            self._child(before, name, below, path, rows, loaded)
        if folder is not None and not (lines or files or subs) and meta == folder.meta:
            return folder
        decoded = {name: state for name, state in edit.files.items() if state is not None}
        return self._written(before, meta, rows, loaded, decoded)

    def _child(
        self,
        before: Folder,
        name: bytes,
        edit: Edit,
        path: bytes,
        rows: _NewRows,
        loaded: dict[bytes, Folder],
    ) -> None:
        state = edit.state
        if edit.given and (state is None or state.kind != "directory"):
            if _puts_below(edit):
                whole = _shown(path + b"/" + name if path else name)
                raise ValueError(f"{whole} is no directory after this step, and yet something is put into it")
            self._file(before, name, state, path, rows, loaded)
            return
        encoded = escaped(name)
        whole = path + b"/" + name if path else name
        old = before.directory(name, self._objects)
        file = before.file(name) if edit.given and old is None else None
        new = self.build(old, edit, whole)
        if new is old:
            return
        if file is not None:
            self.found.append((whole, file, None))
            rows.lines[name] = rows.files[encoded] = None
        loaded[name] = new
        rows.subs[_SUB + encoded + b"/"] = b"40000 +%b\0%b" % (encoded, new.meta_oid)
        rows.files[encoded + b"/"] = None if new.files_oid is None else b"40000 %b\0%b" % (encoded, new.files_oid)

    def _file(
        self,
        before: Folder,
        name: bytes,
        state: Entry | None,
        path: bytes,
        rows: _NewRows,
        loaded: dict[bytes, Folder],
    ) -> None:
        """What is no directory afterwards: a file, a symlink, or nothing."""
        old = before.directory(name, self._objects)
        file = before.file(name) if old is None else None
        if old is None and file == state:
            return
        encoded = escaped(name)
        whole = path + b"/" + name if path else name
        self.found.append((whole, file, state))
        if old is not None:
            self.found += _differences(old, None, self._objects, whole)
            loaded.pop(name, None)
            rows.subs[_SUB + encoded + b"/"] = rows.files[encoded + b"/"] = None
        if state is None:
            rows.lines[name] = rows.files[encoded] = None
        else:
            if state.oid is None:
                raise ValueError(f"{_shown(whole)} has no content")
            executable = state.kind == "file" and state.meta.mode & 0o100
            mode = _EXECUTABLE if executable else _MODES[state.kind]
            rows.lines[name] = encode_line(name, state.meta)
            rows.files[encoded] = b"%b%b\0%b" % (mode, encoded, bytes.fromhex(state.oid))

    def _written(
        self, old: Folder, meta: Meta, rows: _NewRows, loaded: dict[bytes, Folder], decoded: dict[bytes, Entry]
    ) -> Folder:
        """The directory with these rows, whose objects are added."""
        add = self._objects.add
        lines, lines_oid, before = old.lines, old.lines_oid, None
        if rows.lines or meta != old.meta or not lines_oid:
            header = encode_line(b".", meta)
            was = len(encode_line(b".", old.meta)) if lines_oid else 0
            lines, pieces = old.lines.edited(rows.lines, was)
            raw = header + lines.joined
            if lines_oid:
                before = Before(lines_oid, was + len(old.lines.joined), [(0, was, header), *pieces])
            lines_oid = add(BLOB, raw, before)
        item = _lines_item(lines_oid)
        subs, pieces = old.subs.edited(rows.subs)
        raw, before = subs.joined + item, None
        if old.meta_oid and subs.joined:
            subs_size = len(old.subs.joined)
            before = Before(old.meta_oid, subs_size + len(item), [*pieces, (subs_size, len(item), item)])
        meta_oid = add(TREE, raw, before)
        files, files_oid, before = old.files, old.files_oid, None
        if rows.files:
            files, pieces = old.files.edited(rows.files)
            if files_oid:
                before = Before(files_oid, len(old.files.joined), pieces)
            files_oid = add(TREE, files.joined, before) if files.joined else None
        return Folder(meta, lines, files, subs, files_oid, lines_oid, meta_oid, loaded, decoded)


def _lines_item(oid: bytes) -> bytes:
    return b"100644 " + _LINES + b"\0" + oid


def _puts_below(edit: Edit) -> bool:
    return any(state is not None for state in edit.files.values()) or any(
        (below.given and below.state is not None) or _puts_below(below) for below in edit.below.values()
    )


def _shown(path: bytes) -> str:
    return repr(path.decode("utf-8", "surrogateescape")) if path else "the root"


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
    return in_order(_differences(one, other, objects, b""))


def in_order(differences: Iterable[Difference]) -> list[Difference]:
    """Sorted, each path once."""
    found: dict[bytes, Difference] = {}
    for difference in differences:
        path, old, new = difference
        known = found.get(path)
        if known is not None:
            # A file that became a directory comes as a file that went and a directory that came.
            difference = (path, old if old is not None else known[1], new if new is not None else known[2])
        found[path] = difference
    return sorted(found.values(), key=itemgetter(0))


def _differences(one: Folder | None, other: Folder | None, objects: Objects, path: bytes) -> Iterator[Difference]:
    if one is not None and other is not None:
        if (one.meta_oid, one.files_oid) == (other.meta_oid, other.files_oid):
            return
        if one.meta != other.meta:
            yield path, Entry("directory", one.meta), Entry("directory", other.meta)
    else:
        yield path, _directory(one), _directory(other)
    prefix = path + b"/" if path else b""
    files, others = (dict(_changed_files(a, b)) for a, b in ((one, other), (other, one)))
    for name in files.keys() | others.keys():
        yield prefix + name, files.get(name), others.get(name)
    for name in {name for folder in (one, other) if folder is not None for name in folder.directories()}:
        a, b = (folder.directory(name, objects) if folder is not None else None for folder in (one, other))
        yield from _differences(a, b, objects, prefix + name)


def _directory(folder: Folder | None) -> Entry | None:
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
    return ValueError(f"the store is damaged: it has no content for {_shown(name)}")
