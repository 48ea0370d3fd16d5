"""Keeping what a call had changed before it was taken back: written down first, a commit when somebody looks at it.

A rollback takes little longer for it: what was written is in memory still, and what only moved is not read, since the
state before has it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from ringfence.filesystem.paths import directories_above
from ringfence.participants import Change, FileVersion
from ringfence_sandbox.calls.differences import STAMP
from ringfence_sandbox.calls.history import ChangedFiles, RolledBackCall
from ringfence_sandbox.disk.confined import Confined
from ringfence_sandbox.disk.records import Json
from ringfence_sandbox.store.commit_messages import CommitInfo
from ringfence_sandbox.store.commit_records import PreparedStep
from ringfence_sandbox.store.entries import Entry, Meta, Pending, is_directory
from ringfence_sandbox.store.spool import Spool, Spooled, spooled
from ringfence_sandbox.store.store import ABORTED, Store

MOST_ABORTED = 50
KEPT_BYTES = 8 << 20
"""Of one call; of what is beyond, only a hash is told."""


def write_down(spool: Spool, store: Store, files: Confined, changed: ChangedFiles, call: RolledBackCall) -> list[str]:
    """What a call has changed is written down before it is taken back, once; what was not kept, in words. OSError."""
    newest = spool.newest()
    if store.tip is None or (newest is not None and newest["call"] == _key(call)):
        return []
    rows, contents, notes = _rows(files, changed)
    last = newest["number"] if newest is not None else 0
    assert isinstance(last, int)
    at = datetime.now(UTC).isoformat()
    number = max(last, store.newest_aborted) + 1
    spool.append({"number": number, "call": _key(call), "at": at, "after": store.tip, "paths": rows}, contents)
    return notes


def _key(call: RolledBackCall) -> list[Json]:
    return [call.call_id, call.tool, call.begun]


def _rows(files: Confined, changed: ChangedFiles) -> tuple[list[Json], list[bytes], list[str]]:
    rows: list[Json] = []
    contents: list[bytes] = []
    notes: list[str] = []
    room = KEPT_BYTES
    moved: dict[str | None, str] | None = None
    for change in changed.changes:
        path, after = change.path, change.after
        if after is None:
            rows.append([path, None])
            continue
        found = changed.found(path) or files.look(path)
        if found is None or (after.kind == "file" and after.content_hash is None):
            continue
        row: list[Json] = [path, after.kind, after.mode, found.st_uid, found.st_gid, found.st_mtime_ns]
        if after.kind == "symlink":
            row.append(after.target)
        elif after.kind == "file":
            if moved is None and changed.found(path) is None:
                moved = _by_hash(changed.changes)
            source = moved.get(after.content_hash) if moved is not None else None
            if source is None and after.size > room:
                notes.append(f"{path} was not kept, it was too much: {_said(after)}")
                continue
            sha256 = after.content_hash
            if source is None:
                content = changed.after(path)
                if changed.found(path) is None:
                    sha256 = hashlib.sha256(content).hexdigest()
                room -= len(content)
                contents.append(content)
            row += [sha256, source, after.size if source is not None else len(contents[-1])]
        rows.append(row)
    return rows, contents, notes


def _by_hash(changes: Iterable[Change]) -> dict[str | None, str]:
    """Where bytes were before the call that are somewhere else now, maybe."""
    return {change.before.content_hash: change.path for change in changes if change.before is not None}


def _said(version: FileVersion) -> str:
    known = version.content_hash or STAMP
    return f"{version.size} bytes" + ("" if known.startswith(STAMP) else f", sha256 {known}")


def take_in(store: Store, spool: Spool, *, sync: bool) -> None:
    """Make commits of what is written down, for who has the store's lock. Where there is no space it stays as it is.
    With ``sync`` the commits are on the disk before that goes."""
    calls = spooled(spool.folder)
    if calls:
        with suppress(OSError):
            _keep_all(store, calls)
            store.objects.log.flush(sync=sync)
            spool.clear()


def look_at(store: Store, folder: Path) -> None:
    """The same for who only looks: it is in memory alone."""
    _keep_all(store, spooled(folder))


def _keep_all(store: Store, calls: Sequence[Spooled]) -> None:
    there = store.aborted()
    for values, blob in calls[-MOST_ABORTED:]:
        number = values["number"]
        if isinstance(number, int) and number not in there:
            commit = _commit(store, values, blob)
            if commit is not None:
                store.keep(f"{ABORTED}{number}", commit)
    drop_old(store)


def drop_old(store: Store) -> None:
    """Have no more than the newest of what was taken back."""
    for old in list(store.aborted())[:-MOST_ABORTED]:
        store.unkeep(f"{ABORTED}{old}")


def _commit(store: Store, values: Mapping[str, object], blob: bytes) -> str | None:
    call_id, tool, _ = cast("list[str]", values["call"])
    at = datetime.fromisoformat(str(values["at"]))
    parent = str(values["after"])
    try:
        root = store.states.root(parent)
        states = dict(_states(store, parent, cast("list[list[object]]", values["paths"]), blob))
        _complete(store, parent, states, at)
        after = PreparedStep(parent, None, None, 0, root, (), store.states.unknown(parent))
        prepared = store.prepare(states, CommitInfo("aborted", at, tool, call_id), after=after)
    except (LookupError, ValueError):  # what it came after is not there, or is not what it was
        return None
    return prepared.commit if prepared.changed else None


def _states(
    store: Store, parent: str, rows: Sequence[Sequence[object]], blob: bytes
) -> Iterator[tuple[str, Entry | Pending | None]]:
    at = 0
    for row in rows:
        match row:
            case [str(path), None]:
                if store.states.entry(parent, path) is not None:
                    yield path, None
            case [str(path), "directory", int(mode), int(uid), int(gid), int(mtime_ns)]:
                yield path, Pending("directory", Meta(mode, uid, gid, mtime_ns))
            case [str(path), "symlink", int(mode), int(uid), int(gid), int(mtime_ns), str(target)]:
                yield path, Pending("symlink", Meta(mode, uid, gid, mtime_ns), os.fsencode(target))
            case [str(path), "file", int(mode), int(uid), int(gid), int(mtime_ns), sha256, source, int(size)]:
                meta = Meta(mode, uid, gid, mtime_ns)
                if isinstance(source, str):
                    entry = store.states.entry(parent, source)
                    if entry is not None and entry.oid is not None and _is(store, entry, mtime_ns, size, sha256):
                        yield path, Entry("file", meta, entry.oid)
                    continue
                content = blob[at : at + size]
                at += size
                if hashlib.sha256(content).hexdigest() == sha256:
                    yield path, Pending("file", meta, content)
            case _:
                raise ValueError(row)


def _is(store: Store, entry: Entry, mtime_ns: int, size: int, sha256: object) -> bool:
    """Whether a file that moved is as the history has it: it keeps its time."""
    assert entry.oid is not None, "it is a file"
    content = store.states.content(entry.oid)
    return (entry.meta.mtime_ns, len(content)) == (mtime_ns, size) or hashlib.sha256(content).hexdigest() == sha256


def _complete(store: Store, parent: str, states: dict[str, Entry | Pending | None], at: datetime) -> None:
    """Directories that the history does not have yet, since somebody else made them."""
    meta = Meta(0o755, os.geteuid(), os.getegid(), int(at.timestamp() * 1e9))
    for path in [path for path, state in states.items() if state is not None]:
        for above in directories_above(path):
            if above in states:
                continue
            if not is_directory(store.states.entry(parent, above)):
                states[above] = Pending("directory", meta)
