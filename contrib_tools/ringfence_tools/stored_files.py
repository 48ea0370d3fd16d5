"""Collect the files of other storage through fsspec, for a mount."""

# fsspec has no types. Its values are checked where they are read.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from fsspec.core import url_to_fs

from ringfence_tools.contents import Contents, MountedEntry, directories_above

BATCH = 64
"""The number of files that are fetched at once. Storage over a network answers many requests at a time."""


def collect_url(url: str, contents: Contents) -> bool:
    """Collect a file, under its own name, or a directory at an fsspec URL. Return whether it is a directory.

    Raises:
        FileNotFoundError: nothing is at the URL.
        Exception: any error of the storage's library.
    """
    storage, top = url_to_fs(url)
    if storage.isfile(top):
        path = top.rstrip("/").rpartition("/")[2]
        if contents.wants(path):
            _fetch(storage, [(path, top, storage.info(top))], contents)
        return False
    if not storage.isdir(top):
        raise FileNotFoundError(f"there is nothing at {url}")
    contents.add("", MountedEntry(None))
    found: Mapping[str, Mapping[str, Any]] = storage.find(top, withdirs=True, detail=True)
    prefix = top.strip("/")
    wanted: list[tuple[str, str, Mapping[str, Any]]] = []
    pruned: set[str] = set()
    for stored in sorted(found):
        path = stored.strip("/")
        path = path.removeprefix(prefix).lstrip("/") if path.startswith(f"{prefix}/") or not prefix else ""
        if not path or not pruned.isdisjoint(directories_above(path)):
            continue
        info = found[stored]
        is_directory = info["type"] == "directory"
        if not contents.wants(path, is_directory=is_directory):
            if is_directory:
                pruned.add(path)
        elif is_directory:
            contents.add(path, MountedEntry(None, stat.S_IMODE(_mode(info)) or None, _mtime_ns(info)))
        elif info["type"] == "file" and not stat.S_ISLNK(_mode(info)) and not info.get("linkname"):
            wanted.append((path, stored, info))
        else:
            contents.leave_out(path, "neither a file nor a directory")
    _fetch(storage, wanted, contents)
    return True


def _fetch(storage: Any, wanted: Sequence[tuple[str, str, Mapping[str, Any]]], contents: Contents) -> None:
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        contents.expect(sum(info.get("size") or 0 for _, _, info in batch))
        nothing: list[int | None] = [None] * len(batch)
        stored = [place for _, place, _ in batch]
        read: Sequence[object] = storage.cat_ranges(stored, nothing, nothing, on_error="return")
        for (path, _, info), content in zip(batch, read, strict=True):
            if isinstance(content, bytes):
                contents.add(path, MountedEntry(content, stat.S_IMODE(_mode(info)) or None, _mtime_ns(info)))
            else:
                contents.leave_out(path, f"cannot be read: {content}")


# fsspec promises name, size and type; each kind of storage has its own names for the rest.


def _mode(info: Mapping[str, Any]) -> int:
    """Return the permission bits. 0 if the storage does not have them."""
    if isinstance(mode := info.get("mode"), int):
        return mode
    external = info.get("external_attr")  # of a zip archive: the mode is in its upper half
    return external >> 16 if isinstance(external, int) else 0


def _mtime_ns(info: Mapping[str, Any]) -> int | None:
    for key in ("mtime", "LastModified", "last_modified", "modified", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
    if isinstance(written := info.get("date_time"), tuple):  # of a zip archive: local time, without its zone
        with suppress(ValueError, OverflowError):
            return int(time.mktime((*written, 0, 0, -1))) * 1_000_000_000
    return None
