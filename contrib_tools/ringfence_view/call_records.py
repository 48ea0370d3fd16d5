"""The receipts of a file, as they are added: each call in short, and its whole line when it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ringfence_tools.printable import one_line, params_summary

MAX_SUMMARY_CHARACTERS = 200
MAX_PATHS = 20
"""The most paths of a call that are kept in short."""
_SAID = ("params", "message", "policies", "approved_by")
"""What a receipt has that a model, a command or a person wrote."""
ROLLED_BACK = ("failed", "interrupted", "rolled_back", "doubtful")
"""Outcomes of calls whose changes were taken back."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A receipt in short. ``place`` is where its line begins in the file, and its length in bytes."""

    receipt_id: str
    call_id: str
    tool: str
    outcome: str
    reason: str
    """Why it was denied or rolled back; empty for a call that was kept."""
    began_at: datetime
    seconds: float
    session_id: str
    client: str
    commit: str
    summary: str
    paths: tuple[str, ...]
    more_paths: int
    approved_by: str
    place: tuple[int, int]

    @property
    def shown_outcome(self) -> str:
        """The outcome for a person: "ok" for a call that changed no file."""
        return "ok" if self.outcome == "committed" and not self.paths else self.outcome


class CallRecords:
    """The receipts of one file. It may grow meanwhile, and be replaced."""

    def __init__(self, path: Path, mask: Callable[[Any], Any] = lambda value: value) -> None:
        """``mask`` is asked before anything is cut: half of a secret is not known any more."""
        self.path = path
        self._mask = mask
        self.unreadable = 0
        """How many lines are no receipts."""
        self._found: dict[str, CallRecord] = {}
        self._read_to = 0
        self._inode = 0

    def refresh(self) -> None:
        """Read what was added. Raises OSError."""
        with open(self.path, "rb") as file:
            now = os.fstat(file.fileno())
            if now.st_size < self._read_to or now.st_ino != self._inode:
                self._found, self._read_to, self.unreadable = {}, 0, 0
                self._inode = now.st_ino
            file.seek(self._read_to)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._add(line)
                self._read_to += len(line)

    def newest_first(self) -> Sequence[CallRecord]:
        return sorted(self._found.values(), key=lambda record: (record.began_at, record.place), reverse=True)

    def whole(self, record: CallRecord) -> Mapping[str, Any]:
        """The receipt with all its fields. Raises OSError, and ValueError if the file has changed."""
        found = json.loads(self._line(record))
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} has changed: open it anew")
        return cast("dict[str, Any]", found)

    def text(self, record: CallRecord) -> str:
        """The line of a receipt, for a search."""
        with suppress(OSError):
            return self._line(record).decode(errors="replace")
        return ""

    def _line(self, record: CallRecord) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(record.place[0])
            return file.read(record.place[1])

    def _add(self, line: bytes) -> None:
        try:
            values: Any = json.loads(line)
            said = self._mask({name: values[name] for name in _SAID if name in values})
            record = _record({**cast("dict[str, Any]", values), **said}, (self._read_to, len(line)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self.unreadable += 1
        else:
            self._found[record.receipt_id] = record  # the last one of an id counts


def _record(values: Mapping[str, Any], place: tuple[int, int]) -> CallRecord:
    """Raises ValueError, TypeError, LookupError or AttributeError for what is no receipt."""
    paths = [str(change["path"]) for change in values.get("changes") or ()]
    outcome = str(values["outcome"])
    return CallRecord(
        str(values["receipt_id"]),
        str(values["call_id"]),
        one_line(str(values["tool"]), 80),
        one_line(outcome, 40),
        "" if outcome == "committed" else one_line(_reason(values), 400),
        _moment(values["started_at"]),
        float(values.get("duration_seconds") or 0.0),
        str(values.get("session_id") or ""),
        one_line(str(values.get("client") or ""), 80),
        str(values.get("commit") or ""),
        params_summary(values.get("params") if isinstance(values.get("params"), dict) else {}, MAX_SUMMARY_CHARACTERS),
        tuple(paths[:MAX_PATHS]),
        max(len(paths) - MAX_PATHS, 0),
        one_line(_approval(values), 80),
        place,
    )


def _moment(text: object) -> datetime:
    found = datetime.fromisoformat(str(text))
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _reason(values: Mapping[str, Any]) -> str:
    denials = (
        f"{name}: {why or values.get('message')}" for name, is_allowed, why in policies_of(values) if not is_allowed
    )
    return next(denials, str(values.get("message") or ""))


def _approval(values: Mapping[str, Any]) -> str:
    """Who approved a call; empty where nobody was asked."""
    said = next((why for name, is_allowed, why in policies_of(values) if name == "approval" and is_allowed), "")
    return str(values.get("approved_by") or said or "")


def policies_of(values: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield name, whether it allowed the call, and reason of each policy's decision in a receipt."""
    for verdict in values.get("policies") or ():
        yield str(verdict["policy"]), bool(verdict["allowed"]), str(verdict.get("reason") or "")
