"""Collecting the files of other storage, through fsspec, for a mount."""

# fsspec has no types; what comes out of it is taken apart in `_info` and checked there.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fsspec.core import url_to_fs

from ringfence_tools.contents import Contents, directories_above

BATCH = 64
"""Files that are fetched at once: storage over a network answers many requests at a time."""


@dataclass(frozen=True, slots=True)
class _Info:
    kind: str
    size: int
    mode: int | None
    mtime_ns: int | None


def collect_url(url: str, contents: Contents) -> bool:
    """What is at an fsspec URL: a file, under its own name, or everything below a directory. Returns which it is.

    Raises:
        FileNotFoundError: there is nothing.
        Exception: whatever the storage's own library raises.
    """
    storage, top = url_to_fs(url)
    if storage.isfile(top):
        path = top.rstrip("/").rpartition("/")[2]
        if contents.wants(path):
            _fetch(storage, [(path, top, _info(storage.info(top)))], contents)
        return False
    if not storage.isdir(top):
        raise FileNotFoundError(f"there is nothing at {url}")
    contents.add_directory("")
    found: Mapping[str, Mapping[str, Any]] = storage.find(top, withdirs=True, detail=True)
    prefix = top.strip("/")
    wanted: list[tuple[str, str, _Info]] = []
    pruned: set[str] = set()
    for stored in sorted(found):
        path = stored.strip("/")
        path = path.removeprefix(prefix).lstrip("/") if path.startswith(f"{prefix}/") or not prefix else ""
        if not path or not pruned.isdisjoint(directories_above(path)):
            continue
        info = _info(found[stored])
        is_directory = info.kind == "directory"
        if not contents.wants(path, is_directory=is_directory):
            if is_directory:
                pruned.add(path)
        elif is_directory:
            contents.add_directory(path, 0o755 if info.mode is None else info.mode, info.mtime_ns)
        elif info.kind == "file":
            wanted.append((path, stored, info))
        else:
            contents.leave_out(path, "neither a file nor a directory")
    _fetch(storage, wanted, contents)
    return True


def _fetch(storage: Any, wanted: Sequence[tuple[str, str, _Info]], contents: Contents) -> None:
    for batch in _batches(wanted, contents):
        nothing: list[int | None] = [None] * len(batch)
        read: Sequence[object] = storage.cat_ranges(
            [stored for _, stored, _ in batch], nothing, nothing, on_error="return"
        )
        for (path, _, info), content in zip(batch, read, strict=True):
            if isinstance(content, bytes):
                contents.add_file(path, content, 0o644 if info.mode is None else info.mode, info.mtime_ns)
            else:
                contents.leave_out(path, f"cannot be read: {content}")


def _batches(
    wanted: Sequence[tuple[str, str, _Info]], contents: Contents
) -> Iterator[Sequence[tuple[str, str, _Info]]]:
    for start in range(0, len(wanted), BATCH):
        batch = wanted[start : start + BATCH]
        contents.expect(sum(info.size for _, _, info in batch))
        yield batch


def _info(info: Mapping[str, Any]) -> _Info:
    """fsspec promises name, size and type; each kind of storage has its own names for the rest."""
    size = info.get("size")
    bits = info.get("mode")
    if not isinstance(bits, int):
        external = info.get("external_attr")  # of a zip archive: the mode is in its upper half
        bits = external >> 16 if isinstance(external, int) else 0
    kind = "link" if stat.S_ISLNK(bits) or info.get("linkname") else str(info.get("type"))
    return _Info(kind, size if isinstance(size, int) else 0, stat.S_IMODE(bits) or None, _mtime_ns(info))


def _mtime_ns(info: Mapping[str, Any]) -> int | None:
    for key in ("mtime", "LastModified", "last_modified", "modified", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value * 1e9)
    written = info.get("date_time")  # of a zip archive: local time, without its zone
    if isinstance(written, tuple) and len(written) == 6:
        try:
            return int(time.mktime((*written, 0, 0, -1))) * 1_000_000_000
        except (ValueError, OverflowError):
            return None
    return None
