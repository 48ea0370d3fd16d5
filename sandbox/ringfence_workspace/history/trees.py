"""The tree of a commit: read, compared with another one, and built from the one before.

The tree of a commit has two entries, `files` and `meta`. In `files` a directory is what git takes it for: its files,
symlinks and the directories that have any. In `meta` every directory has a tree, with the blob ``entries`` (what git
cannot hold of the directory and of what is in it, a line each) and a tree ``+name`` for each directory in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from ringfence.filesystem.paths import directories_above, is_dotgit
from ringfence_workspace.history.entries import (
    BLOB,
    OID_BYTES,
    TREE,
    Difference,
    Entry,
    Meta,
    decode_line,
    encode_line,
    is_directory,
)

_ENTRIES: Final = b"entries"
_ITSELF: Final = b""
"""The key of the first line of ``entries``, which is that of the directory itself: no name is empty."""
_MODES = {"file": b"100644 ", "symlink": b"120000 "}
_EXECUTABLE = b"100755 "
_ESCAPE = b"~rf~"
_SUSPECT = re.compile(rb"[.gG\x80-\xff]|.*\\", re.DOTALL)
"""How a name must begin, or what it must have, to be looked at more closely; nearly none does."""


@dataclass(frozen=True, slots=True)
class DeltaBase:
    """The object that a new one is an edit of: its id, its rows by key, and what became of some (None: deleted)."""

    oid: bytes
    rows: Mapping[bytes, bytes]
    edits: Mapping[bytes, bytes | None]


class Objects(Protocol):
    """Where git objects are, by binary id."""

    def raw(self, oid: bytes) -> tuple[int, bytes]: ...

    def add(self, type_number: int, raw: bytes, base: DeltaBase | None = None) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one git object by key, sorted. An object that has none is not written: its id is empty."""

    by_key: Mapping[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    oid: bytes = b""

    def edited(self, edits: Mapping[bytes, bytes | None], objects: Objects, type_number: int) -> Rows:
        """These rows with some set, or (None) taken out, as a new object."""
        if not edits:
            return self
        rows = dict(self.by_key)
        for key, row in edits.items():
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        if not rows:
            return Rows()
        if not self.by_key.keys() >= edits.keys():
            rows = dict(sorted(rows.items()))
        base = DeltaBase(self.oid, self.by_key, edits) if self.oid else None
        return Rows(rows, objects.add(type_number, b"".join(rows.values()), base))


def tree_rows(raw: bytes) -> dict[bytes, bytes]:
    """The rows of a git tree by git's sort key, which is the name, and for a directory the name and a slash."""
    rows: dict[bytes, bytes] = {}
    at = 0
    while at < len(raw):
        blank = raw.index(b" ", at)
        zero = raw.index(b"\0", blank)
        end = zero + 1 + OID_BYTES
        key = raw[blank + 1 : zero] + (b"/" if raw[at:blank] == b"40000" else b"")
        rows[key] = raw[at:end]
        at = end
    return rows


@dataclass(slots=True)
class Folder:
    """One directory at one moment. States share the directories in which nothing differs.

    ``lines`` are those of ``entries`` by true name, ``files`` the rows of the tree in `files`, and ``subs`` those of
    the tree in `meta`. ``loaded`` are the directories in it that were read already.
    """

    meta: Meta
    lines: Rows = field(default_factory=Rows)
    files: Rows = field(default_factory=Rows)
    subs: Rows = field(default_factory=Rows)
    loaded: dict[bytes, Folder] = field(default_factory=dict[bytes, "Folder"])

    def file(self, name: bytes) -> Entry | None:
        """The file or symlink of that name."""
        line = self.lines.by_key.get(name) if name else None
        if line is None:
            return None
        item = self.files.by_key.get(escaped(name))
        if item is None:
            raise ValueError(f"the store is damaged: it has no content for {os.fsdecode(name)!r}")
        kind = "symlink" if item.startswith(_MODES["symlink"]) else "file"
        return Entry(kind, decode_line(line[:-1])[1], item[-OID_BYTES:].hex())

    def each_file(self) -> Iterator[tuple[bytes, Entry]]:
        for name in self.names():
            entry = self.file(name)
            assert entry is not None, "it is among the names"
            yield name, entry

    def names(self) -> Sequence[bytes]:
        """The names of the files and symlinks in it."""
        return [*self.lines.by_key][1:]  # without the directory's own line

    def directories(self) -> Iterator[bytes]:
        """The names of the directories in it."""
        return (_directory_name(key) for key in self.subs.by_key if key != _ENTRIES)

    def directory(self, name: bytes, objects: Objects) -> Folder | None:
        """The directory of that name in it."""
        known = self.loaded.get(name)
        if known is not None:
            return known
        encoded = escaped(name)
        sub = self.subs.by_key.get(b"+%b/" % encoded)
        if sub is None:
            return None
        item = self.files.by_key.get(encoded + b"/", b"")
        folder = self.loaded[name] = load(objects, sub[-OID_BYTES:], item[-OID_BYTES:])
        return folder

    def child(self, name: bytes, objects: Objects) -> Folder | Entry | None:
        return self.file(name) or self.directory(name, objects)


_NO_FOLDER = Folder(Meta(0, 0, 0, 0))


def load(objects: Objects, meta_oid: bytes, files_oid: bytes) -> Folder:
    """Read a directory; an empty ``files_oid`` says that there is no file in it, at any depth.

    Raises:
        KeyError, ValueError: the store does not have all of it.
    """
    subs = tree_rows(objects.raw(meta_oid)[1])
    if _ENTRIES not in subs:
        raise ValueError("the store is damaged: it has a directory without its entries")
    lines_oid = subs[_ENTRIES][-OID_BYTES:]
    first, *lines = [line + b"\n" for line in objects.raw(lines_oid)[1].split(b"\n")[:-1]]
    files = tree_rows(objects.raw(files_oid)[1]) if files_oid else {}
    return Folder(
        decode_line(first[:-1])[1],
        Rows({_ITSELF: first, **{_name(line): line for line in lines}}, lines_oid),
        Rows(files, files_oid if files else b""),
        Rows(subs, meta_oid),
    )


def _name(line: bytes) -> bytes:
    return decode_line(line[:-1])[0] if line.find(b"\\") != -1 else line.split(b" ", 5)[5][:-1]


def _directory_name(key: bytes) -> bytes:
    return unescaped(key[1:-1])


def walk(folder: Folder, objects: Objects, path: str = "") -> Iterator[tuple[str, Entry]]:
    """Everything in a directory, itself first, by path."""
    yield path, Entry("directory", folder.meta)
    for name, entry in folder.each_file():
        yield _join(path, name), entry
    for name in folder.directories():
        below = folder.directory(name, objects)
        if below is not None:
            yield from walk(below, objects, _join(path, name))


def entry_blobs(objects: Objects, meta_oid: bytes) -> Iterator[tuple[str, bytes]]:
    """The paths of all directories, each with its ``entries`` as they are: nothing is made of their lines."""
    waiting = [("", meta_oid)]
    while waiting:
        path, oid = waiting.pop()
        rows = tree_rows(objects.raw(oid)[1])
        yield path, objects.raw(rows.pop(_ENTRIES)[-OID_BYTES:])[1]
        waiting += [(_join(path, _directory_name(key)), row[-OID_BYTES:]) for key, row in rows.items()]


def reachable(objects: Objects, trees: Iterable[bytes]) -> set[bytes]:
    """The ids of these trees and of all that is in them."""
    found: set[bytes] = set()
    waiting = list(trees)
    while waiting:
        tree = waiting.pop()
        if tree not in found:
            found.add(tree)
            for key, row in tree_rows(objects.raw(tree)[1]).items():
                (waiting.append if key.endswith(b"/") else found.add)(row[-OID_BYTES:])
    return found


def differences(before: Folder | None, after: Folder | None, objects: Objects) -> list[Difference]:
    """The paths that differ, in bytes or in anything else, sorted. Equal directories are not looked into."""
    return sorted(_each_difference(before, after, objects, ""), key=lambda one: one.path)


def _each_difference(
    before: Folder | Entry | None, after: Folder | Entry | None, objects: Objects, path: str
) -> Iterator[Difference]:
    old, new = entry_of(before), entry_of(after)
    if old != new:
        yield Difference(path, old, new)
    one, other = (side if isinstance(side, Folder) else _NO_FOLDER for side in (before, after))
    names = _changed_keys(one.lines, other.lines) - {_ITSELF}
    names |= {unescaped(key.removesuffix(b"/")) for key in _changed_keys(one.files, other.files)}
    names |= {_directory_name(key) for key in _changed_keys(one.subs, other.subs) - {_ENTRIES}}
    for name in names:
        old, new = one.child(name, objects), other.child(name, objects)
        if isinstance(old, Folder) or isinstance(new, Folder):
            yield from _each_difference(old, new, objects, _join(path, name))
        else:
            yield Difference(_join(path, name), old, new)


def _changed_keys(one: Rows, other: Rows) -> set[bytes]:
    if one.oid == other.oid:
        return set()
    found = {key for key, row in one.by_key.items() if other.by_key.get(key) != row}
    return found | (other.by_key.keys() - one.by_key.keys())


def entry_of(one: Folder | Entry | None) -> Entry | None:
    return Entry("directory", one.meta) if isinstance(one, Folder) else one


class Builder:
    """Builds the tree of a commit from the one before and adds its objects. ``found`` are the differences.

    It goes from the bottom up: a directory is built after all that is in it.
    """

    def __init__(self, objects: Objects, before: Folder | None) -> None:
        self.found: list[Difference] = []
        self._objects = objects
        self._before: dict[str, Folder | None] = {"": before}
        """The old directories, as far as they were asked for."""

    def build(self, changes: Mapping[str, Entry | None]) -> Folder:
        """The new root. ``changes`` has the new states by path, None for what is gone, with all below it.

        Raises:
            ValueError: something is put into a directory that there is not.
        """
        edits, filled = _edits_by_directory(changes)
        metas: dict[str, Meta] = {}
        for path in sorted(edits):  # what is above comes first
            is_below_gone = path != "" and path.rpartition("/")[0] not in metas
            state = changes[path] if path in changes else entry_of(self._old(path))
            if state is not None and state.kind == "directory" and not is_below_gone:
                metas[path] = state.meta
            elif path not in changes and not is_below_gone:
                shown = _shown(path)
                raise ValueError(f"{shown} is no directory before this step, so it must be among the changes too")
            elif path in filled or not path:
                shown = _shown(path)
                raise ValueError(f"{shown} is no directory after this step, and yet something is put into it")
        for path in sorted(metas.keys() - {""}, reverse=True):
            above, _, name = path.rpartition("/")
            edits[above][name] = self._folder(path, metas[path], edits[path])
        return self._folder("", metas[""], edits[""])

    def _old(self, path: str) -> Folder | None:
        if path not in self._before:
            above, _, name = path.rpartition("/")
            folder = self._old(above)
            self._before[path] = folder.directory(os.fsencode(name), self._objects) if folder is not None else None
        return self._before[path]

    def _folder(self, path: str, meta: Meta, edits: Mapping[str, Folder | Entry | None]) -> Folder:
        """The directory with this metadata and these edits; the old one, if that is what comes of them."""
        before = self._old(path)
        old = before or Folder(meta)
        rows = _RowEdits(old.loaded.copy())
        if before is None or before.meta != meta:
            rows.lines[_ITSELF] = encode_line(b".", meta)
            if not path:
                self.found.append(Difference(path, entry_of(before), Entry("directory", meta)))
        for text, new in edits.items():
            name = os.fsencode(text)
            was = old.child(name, self._objects)
            if was is new or (not isinstance(was, Folder) and was == new):
                continue
            whole, encoded = _join(path, name), escaped(name)
            self._find(whole, was, new)
            rows.remove(name, encoded, was)
            rows.add(name, encoded, new, whole)
        if before is not None and rows.is_empty:
            return before
        new_lines = old.lines.edited(rows.lines, self._objects, BLOB)
        if rows.lines:
            rows.subs[_ENTRIES] = b"100644 " + _ENTRIES + b"\0" + new_lines.oid
        return Folder(
            meta,
            new_lines,
            old.files.edited(rows.files, self._objects, TREE),
            old.subs.edited(rows.subs, self._objects, TREE),
            rows.loaded,
        )

    def _find(self, path: str, was: Folder | Entry | None, new: Folder | Entry | None) -> None:
        if not (isinstance(was, Folder) and isinstance(new, Folder) and was.meta == new.meta):
            self.found.append(Difference(path, entry_of(was), entry_of(new)))
        if isinstance(was, Folder) and not isinstance(new, Folder):
            self.found += (one for one in _each_difference(was, None, self._objects, path) if one.path != path)


@dataclass(slots=True)
class _RowEdits:
    """What becomes of the rows of a directory, as `Rows.edited` takes it, and of the directories ``loaded`` in it."""

    loaded: dict[bytes, Folder]
    lines: dict[bytes, bytes | None] = field(default_factory=dict[bytes, "bytes | None"])
    files: dict[bytes, bytes | None] = field(default_factory=dict[bytes, "bytes | None"])
    subs: dict[bytes, bytes | None] = field(default_factory=dict[bytes, "bytes | None"])

    @property
    def is_empty(self) -> bool:
        return not (self.lines or self.files or self.subs)

    def remove(self, name: bytes, encoded: bytes, was: Folder | Entry | None) -> None:
        if isinstance(was, Folder):
            self.loaded.pop(name, None)
            self.subs[b"+%b/" % encoded] = self.files[encoded + b"/"] = None
        elif was is not None:
            self.lines[name] = self.files[encoded] = None

    def add(self, name: bytes, encoded: bytes, new: Folder | Entry | None, path: str) -> None:
        if isinstance(new, Folder):
            self.loaded[name] = new
            self.subs[b"+%b/" % encoded] = b"40000 +%b\0%b" % (encoded, new.subs.oid)
            if new.files.oid:
                self.files[encoded + b"/"] = b"40000 %b\0%b" % (encoded, new.files.oid)
        elif new is not None:
            self.lines[name] = encode_line(name, new.meta)
            self.files[encoded] = _file_row(path, encoded, new)


def _edits_by_directory(
    changes: Mapping[str, Entry | None],
) -> tuple[dict[str, dict[str, Folder | Entry | None]], set[str]]:
    """The changes by directory and name, and the directories that something is put into."""
    edits: dict[str, dict[str, Folder | Entry | None]] = {"": {}}
    filled: set[str] = set()
    for path, state in changes.items():
        if is_directory(state):
            _edits_at(path, edits)
        if path:
            above, _, name = path.rpartition("/")
            _edits_at(above, edits)[name] = state
            if state is not None and above not in filled:
                filled.update((above, *directories_above(above), ""))
    return edits, filled


def _edits_at(path: str, edits: dict[str, dict[str, Folder | Entry | None]]) -> dict[str, Folder | Entry | None]:
    """The edits in a directory; those above it have it among them then."""
    found = edits.get(path)
    if found is None:
        found = edits[path] = {}
        while (path := path.rpartition("/")[0]) not in edits:
            edits[path] = {}
    return found


def _file_row(path: str, encoded: bytes, state: Entry) -> bytes:
    if state.oid is None:
        raise ValueError(f"{_shown(path)} has no content")
    executable = state.kind == "file" and state.meta.mode & 0o100
    return b"%b%b\0%b" % (_EXECUTABLE if executable else _MODES[state.kind], encoded, bytes.fromhex(state.oid))


def _join(path: str, name: bytes) -> str:
    return f"{path}/{os.fsdecode(name)}" if path else os.fsdecode(name)


def _shown(path: str) -> str:
    return repr(path) if path else "the root"


def escaped(name: bytes) -> bytes:
    """The name for a git tree, which cannot have what git takes for `.git`. Different names stay different."""
    if not (name.startswith(_ESCAPE) or (_SUSPECT.match(name) and is_dotgit(name))):
        return name
    return _ESCAPE + name.replace(b"%", b"%25").replace(b"\\", b"%5C")


def unescaped(name: bytes) -> bytes:
    """The name that `escaped` was given."""
    if not name.startswith(_ESCAPE):
        return name
    return name[len(_ESCAPE) :].replace(b"%5C", b"\\").replace(b"%25", b"%")
