"""What guard did, one JSON object a line. It is read without the guard, too."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ringfence_guard.events import HookEvent

CallKind: TypeAlias = Literal["kept", "denied", "unattributed", "refused", "undone", "unseen"]
"""*kept* and *denied* are of calls; *unattributed* is of changes that may be somebody else's; *refused* is a call that
was not run; *undone* is an undo; *unseen* is the end of a call whose beginning nobody saw."""
FILE = "calls.jsonl"


def now() -> str:
    """The time of an entry."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class GuardedCallRecord:
    """One entry of the log."""

    kind: CallKind
    agent: str = ""
    session_id: str = ""
    subagent: str = ""
    prompt_id: str = ""
    tool: str = ""
    arguments: str = ""
    step: int | None = None
    aborted: int | None = None
    paths: Sequence[str] = ()
    policy: str = ""
    """Of what was denied: the policy that denies it."""
    reason: str = ""
    """Why it does."""
    note: str = ""
    at: str = ""
    undoes: Sequence[int] = ()
    """Of an undo: the steps that it reversed as a whole."""

    @staticmethod
    def of(kind: CallKind, event: HookEvent, **more: Any) -> GuardedCallRecord:
        return GuardedCallRecord(
            kind,
            event.agent,
            event.session_id,
            event.subagent,
            event.prompt_id,
            event.tool,
            event.arguments,
            at=now(),
            **more,
        )

    def to_json(self) -> dict[str, Any]:
        """The parts that it has."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) not in (None, "", (), [])}


class GuardLog:
    """The log of a guard."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE

    def append(self, record: GuardedCallRecord) -> None:
        """Raises OSError."""
        line = json.dumps(record.to_json()).encode() + b"\n"
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
            file.write(line)

    def read(self) -> Sequence[GuardedCallRecord]:
        """Return all entries, oldest first. A line that a crash cut off is left out. Raises OSError."""
        if not self.path.exists():
            return ()
        found: list[GuardedCallRecord] = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                held: Mapping[str, Any] = json.loads(line)
                found.append(GuardedCallRecord(**held))
            except (ValueError, TypeError):
                continue
        return found

    def trim(self, most: int) -> None:
        """Drop the oldest entries but for so many. Raises OSError."""
        with open(self.path, "rb") as file:
            lines = file.readlines()
        if len(lines) > most:
            new = self.path.with_suffix(".new")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines(lines[-most:])
            new.replace(self.path)
