"""The receipts of a file, as they are added: of each call what a timeline is ordered by, and the rest when it is
shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from pydantic_core import from_json

from ringfence import serde
from ringfence.limits import TokenUsage
from ringfence_tools.printable import one_line, params_summary
from ringfence_view.spending import Spending

MAX_SUMMARY_CHARACTERS = 200
MAX_PATHS = 20
"""The most paths of a call that are kept in short."""
ROLLED_BACK = ("failed", "interrupted", "rolled_back", "doubtful")
"""Outcomes of calls whose changes were taken back."""
NOT_KEPT = ("denied", "rejected", *ROLLED_BACK)
"""Outcomes of calls that were refused or taken back."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Where the receipt of a call is in the file, and what it is found by.

    ``place`` is where its line begins, and its length in bytes.
    """

    receipt_id: str
    call_id: str
    outcome: str
    began_at: datetime
    seconds: float
    commit: str
    has_changes: bool
    is_approved: bool
    begins_turn: bool
    """Whether it is the first call that its turn of the model asked for."""
    place: tuple[int, int]

    @property
    def shown_outcome(self) -> str:
        """The outcome for a person: "ok" for a call that changed no file."""
        return "ok" if self.outcome == "committed" and not self.has_changes else self.outcome


@dataclass(frozen=True, slots=True)
class CallWords:
    """What a row of a timeline says of a call, masked."""

    tool: str
    reason: str
    """Why it was denied or rolled back; empty for a call that was kept."""
    client: str
    summary: str
    paths: tuple[str, ...]
    more_paths: int
    approved_by: str
    usage: TokenUsage | None
    """The tokens of the turn that asked for the call."""


class CallRecords:
    """The receipts of one file. It may grow meanwhile, and be replaced."""

    def __init__(self, path: Path, mask: Callable[[Any], Any] = lambda value: value) -> None:
        """``mask`` is asked before anything is cut: half of a secret is not known any more."""
        self.path = path
        self._mask = mask
        self._inode = 0
        self._begin()

    def _begin(self) -> None:
        self.unreadable = 0
        """How many lines are no receipts."""
        self.spending = Spending()
        """The turns that asked for the calls. Each counts once."""
        self._found: dict[str, CallRecord] = {}
        self._turns: dict[tuple[str, int], str] = {}
        """The first receipt of each turn."""
        self._read_to = 0

    def refresh(self) -> None:
        """Read what was added. Raises OSError."""
        with open(self.path, "rb") as file:
            now = os.fstat(file.fileno())
            if now.st_size < self._read_to or now.st_ino != self._inode:
                self._begin()
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
        """The receipt with all its fields, masked. Raises OSError, and ValueError if the file has changed."""
        with open(self.path, "rb") as file:
            file.seek(record.place[0])
            found: object = json.loads(file.read(record.place[1]))
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} has changed: open it anew")
        return cast("dict[str, Any]", self._mask(found))

    def words(self, record: CallRecord) -> CallWords:
        """Raises OSError, and ValueError if the file has changed."""
        try:
            return _words(self.whole(record))
        except (TypeError, LookupError, AttributeError):
            raise ValueError(f"{self.path} has changed: open it anew") from None

    def text(self, record: CallRecord) -> str:
        """What the receipt says, masked, for a search."""
        try:
            return json.dumps(self.whole(record), ensure_ascii=False)
        except (OSError, ValueError, RecursionError):
            return ""

    def _add(self, line: bytes) -> None:
        try:
            values = _parsed(line)
            record = self._record(values, (self._read_to, len(line)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            self.unreadable += 1
        else:
            self._found[record.receipt_id] = record  # the last one of an id counts

    def _record(self, values: Mapping[str, Any], place: tuple[int, int]) -> CallRecord:
        """Raises ValueError, TypeError, LookupError or AttributeError for what is no receipt."""
        receipt_id = str(values["receipt_id"])
        known = [str(values["tool"]), *(change["path"] for change in values.get("changes") or ())]
        return CallRecord(
            receipt_id,
            str(values["call_id"]),
            one_line(str(values["outcome"]), 40),
            _moment(values["started_at"]),
            float(values.get("duration_seconds") or 0.0),
            str(values.get("commit") or ""),
            len(known) > 1,
            bool(_approval(values)),
            self._begins_turn(receipt_id, values),
            place,
        )

    def _begins_turn(self, receipt_id: str, values: Mapping[str, Any]) -> bool:
        turn = values.get("turn")
        if not turn:
            return False
        key = str(values.get("session_id")), int(turn["number"])
        if key not in self._turns:
            self._turns[key] = receipt_id
            self.spending = self.spending.with_turn(usage_of(turn))
        return self._turns[key] == receipt_id


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        return from_json(line, allow_inf_nan=True)
    except ValueError:  # it is strict: half of a surrogate pair is none, and a model may have written one
        return json.loads(line)


def _words(values: Mapping[str, Any]) -> CallWords:
    """Raises ValueError, TypeError, LookupError or AttributeError for what is no receipt."""
    paths = [str(change["path"]) for change in values.get("changes") or ()]
    turn = values.get("turn")
    return CallWords(
        one_line(str(values["tool"]), 80),
        "" if values["outcome"] == "committed" else one_line(_reason(values), 400),
        one_line(str(values.get("client") or ""), 80),
        params_summary(_given(values.get("params")), MAX_SUMMARY_CHARACTERS),
        tuple(one_line(path, 200) for path in without_parents(paths[:MAX_PATHS])),
        max(len(paths) - MAX_PATHS, 0),
        one_line(_approval(values), 80),
        usage_of(turn) if turn else None,
    )


def _given(params: object) -> Mapping[str, object]:
    """The params that have a value."""
    found = cast("dict[str, object]", params) if isinstance(params, dict) else {}
    return {name: value for name, value in found.items() if value is not None}


def without_parents(paths: Sequence[str]) -> Sequence[str]:
    """Leave out the directories of other paths: who reads of a new file knows that its directory is there."""
    parents = {path[:at] for path in paths for at, letter in enumerate(path) if letter == "/"}
    return [path for path in paths if path not in parents]


def usage_of(turn: Mapping[str, Any]) -> TokenUsage:
    """The tokens of a turn, as a receipt has them."""
    with suppress(ValueError, TypeError, AttributeError):  # another program may have written it
        return serde.parse(TokenUsage, {name: value for name, value in turn.items() if name != "number"})
    return TokenUsage()


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
