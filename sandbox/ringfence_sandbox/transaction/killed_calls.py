"""The calls that were killed and recovered. The store keeps them until their receipts are written.

Their processes could write none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ringfence_sandbox.disk.state_files import replacing

_NAME = "killed"
_MOST = 50


@dataclass(frozen=True, slots=True)
class KilledCall:
    """A tool call that was killed and that recovery ended. ``begun`` distinguishes it from others of the same id."""

    begun: str
    call_id: str
    tool: str
    committed: bool
    commit: str | None
    """Of the step that it became, if it changed anything and was committed."""
    conflicts: Sequence[str]
    notes: Sequence[str]
    at: str
    """When it began to change files; where nobody knows, when it was recovered."""

    @property
    def began_at(self) -> datetime:
        return datetime.fromisoformat(self.at)


def note_killed(store: Path, noted: KilledCall) -> None:
    """For who has the store's lock; the same call may be noted again. OSError."""
    others = [one for one in killed_calls(store) if (one.begun, one.call_id) != (noted.begun, noted.call_id)]
    _write(store, [*others, noted][-_MOST:])


def killed_calls(store: Path) -> list[KilledCall]:
    """The calls, oldest first."""
    try:
        return [KilledCall(**one) for one in json.loads((store / _NAME).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []  # of a later version, maybe: it is about receipts alone


def forget_killed(store: Path) -> None:
    """Their receipts are written. OSError."""
    (store / _NAME).unlink(missing_ok=True)


def _write(store: Path, calls: Sequence[KilledCall]) -> None:
    with replacing(store / _NAME) as file:
        file.write(json.dumps([asdict(one) for one in calls]).encode())
