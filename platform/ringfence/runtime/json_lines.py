"""LOG slices in files as well: a directory a session, a file a slice, a line an item."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import UUID

from ringfence.runtime.items import Items
from ringfence.tagged import decode, encode, type_id, types_within

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SliceConfig:
    """How a session keeps its slices: all in memory, and LOG slices below the directory ``logs`` as well."""

    logs: str | PathLike[str] | None = None


class JsonLines:
    """Writes what comes to LOG slices to files that only grow.

    What comes in a tool call is written when that has ended, with the id of its receipt. A disk that fails does not
    fail a call: that is logged, and nothing more is written.
    """

    def __init__(self, directory: str | PathLike[str], session_id: UUID) -> None:
        self.directory = Path(directory) / str(session_id)
        self._waiting: list[tuple[type[Any], dict[str, Any]]] = []
        self._broken = False

    def put(self, slice_type: type[Any], before: Items[Any], after: Items[Any], *, in_a_call: bool) -> None:
        """A slice holds ``after`` now."""
        kept = before.length if after.begins_with(before) else 0
        if kept < before.length:
            self._waiting.append((slice_type, {"restart": True}))
        self._waiting += [(slice_type, _record(item)) for item in after.all()[kept:]]
        if not in_a_call:
            self.flush(None)

    def appended(self, slice_type: type[Any], item: object, *, in_a_call: bool) -> None:
        self._waiting.append((slice_type, _record(item)))
        if not in_a_call:
            self.flush(None)

    def flush(self, receipt_id: str | None) -> None:
        """Write what has come; ``receipt_id`` is that of the call that has ended."""
        waiting, self._waiting = self._waiting, []
        if self._broken or not waiting:
            return
        lines: dict[Path, list[str]] = {}
        for slice_type, record in waiting:
            line = json.dumps({"receipt": receipt_id, **record}) + "\n"
            lines.setdefault(_file(self.directory, slice_type), []).append(line)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for file, texts in lines.items():
                descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.write(descriptor, "".join(texts).encode())
                finally:
                    os.close(descriptor)
        except OSError:
            self._broken = True
            logger.exception("the logs in %s are not written any more", self.directory)


def read_log(
    directory: str | PathLike[str], session_id: UUID, slice_type: type[T], *, types: Iterable[type[Any]] = ()
) -> tuple[T, ...]:
    """What a session's LOG slice held, from its file; equal to what was put there.

    ``types`` are further dataclasses and enums that the items may hold where their fields do not declare them.

    Raises:
        ValueError: a line, a torn last one aside, that is no item or holds a type that is not among these.
    """
    known = types_within((slice_type, *types))
    items: list[T] = []
    for record in _records(_file(Path(directory) / str(session_id), slice_type)):
        if record.get("restart"):
            items.clear()
        elif "item" in record:
            items.append(cast("T", decode(record["item"], known)))
        else:
            raise ValueError(f"an item had no JSON form: {record.get('lost')}")
    return tuple(items)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if not file.exists():
        return
    *whole, _torn = file.read_text(encoding="utf-8").split("\n")
    for line in whole:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"a line of {file} is no object")
        yield record


def _record(item: object) -> dict[str, Any]:
    try:
        return {"item": encode(item)}
    except (TypeError, ValueError) as error:
        return {"lost": f"{type(item).__qualname__}: {error}"}


def _file(directory: Path, slice_type: type[Any]) -> Path:
    return directory / f"{type_id(slice_type).replace(':', '.').replace('/', '_')}.jsonl"
