"""The new directories of a step, made of the old ones and of what changes in them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from ringfence_sandbox.store.deltas import Before
from ringfence_sandbox.store.entries import Difference, Entry, Meta, encode_line
from ringfence_sandbox.store.folders import (
    LINES,
    SUB,
    Folder,
    Objects,
    directory_entry,
    each_difference,
    shown_path,
)
from ringfence_sandbox.store.git_names import escaped
from ringfence_sandbox.store.object_ids import BLOB, TREE

_MODES = {"file": b"100644 ", "symlink": b"120000 "}
_EXECUTABLE = b"100755 "


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

    def build(self, folder: Folder | None, edit: Edit, path: str = "") -> Folder:
        """The directory after `edit`; None was no directory before.

        Raises:
            ValueError: something is put into a directory that there is not.
        """
        if edit.given and edit.state is not None:
            meta = edit.state.meta
        elif folder is not None:
            meta = folder.meta
        else:
            raise ValueError(
                f"{shown_path(path)} is no directory before this step, so it must be among the changes too"
            )
        if folder is None or meta != folder.meta:
            self.found.append(Difference(path, directory_entry(folder), Entry("directory", meta)))
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
        path: str,
        rows: _NewRows,
        loaded: dict[bytes, Folder],
    ) -> None:
        state = edit.state
        if edit.given and (state is None or state.kind != "directory"):
            if _puts_below(edit):
                shown = shown_path(_below(path, name))
                raise ValueError(f"{shown} is no directory after this step, and yet something is put into it")
            self._file(before, name, state, path, rows, loaded)
            return
        encoded = escaped(name)
        whole = _below(path, name)
        old = before.directory(name, self._objects)
        file = before.file(name) if edit.given and old is None else None
        new = self.build(old, edit, whole)
        if new is old:
            return
        if file is not None:
            self.found.append(Difference(whole, file, None))
            rows.lines[name] = rows.files[encoded] = None
        loaded[name] = new
        rows.subs[SUB + encoded + b"/"] = b"40000 +%b\0%b" % (encoded, new.meta_oid)
        rows.files[encoded + b"/"] = None if new.files_oid is None else b"40000 %b\0%b" % (encoded, new.files_oid)

    def _file(
        self,
        before: Folder,
        name: bytes,
        state: Entry | None,
        path: str,
        rows: _NewRows,
        loaded: dict[bytes, Folder],
    ) -> None:
        """What is no directory afterwards: a file, a symlink, or nothing."""
        old = before.directory(name, self._objects)
        file = before.file(name) if old is None else None
        if old is None and file == state:
            return
        encoded = escaped(name)
        whole = _below(path, name)
        self.found.append(Difference(whole, file, state))
        if old is not None:
            self.found += each_difference(old, None, self._objects, whole)
            loaded.pop(name, None)
            rows.subs[SUB + encoded + b"/"] = rows.files[encoded + b"/"] = None
        if state is None:
            rows.lines[name] = rows.files[encoded] = None
        else:
            if state.oid is None:
                raise ValueError(f"{shown_path(whole)} has no content")
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


def _below(path: str, name: bytes) -> str:
    return f"{path}/{os.fsdecode(name)}" if path else os.fsdecode(name)


def _lines_item(oid: bytes) -> bytes:
    return b"100644 " + LINES + b"\0" + oid


def _puts_below(edit: Edit) -> bool:
    return any(state is not None for state in edit.files.values()) or any(
        (below.given and below.state is not None) or _puts_below(below) for below in edit.below.values()
    )
