"""The record that every tool call leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Literal

from ringfence import serde
from ringfence.filesystem.paths import escape_path
from ringfence.participants import Change, FileVersion

Outcome = Literal["committed", "failed", "denied", "rejected", "interrupted", "doubtful", "rolled_back"]
"""How a call ended: its transaction committed; its handler or its commit failed, and all was rolled back; a policy or
the deadline denied it before it ran, or an effect policy what it had changed; it named no tool or its arguments did not
fit; it was cancelled, or an interrupt or another `BaseException` ended it, and all was rolled back; its rollback could
not be completed; it had committed within another call, which took it back."""


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """One policy's decision about one call."""

    policy: str
    allowed: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of one tool call when it has ended.

    ``read`` has the sha256 in hex of what the call read, by path; ``changes`` what the call changed, or had changed
    when it was rolled back. ``inner`` lists the call ids of the calls that its handler made.

    A call that had committed within another one gets its receipt again, with the same ``receipt_id``, when that one
    fails and takes it back: the last one of an id is what holds (`final_receipts`).
    """

    receipt_id: str
    call_id: str
    tool: str
    params: object
    """The params dataclass, or the raw arguments where they did not fit."""
    outcome: Outcome
    message: str
    started_at: datetime
    duration_seconds: float
    session_id: str
    prompt_name: str
    policies: Sequence[PolicyVerdict] = ()
    read: Mapping[str, str] | None = None
    changes: Sequence[Change] = ()
    inner: Sequence[str] = ()
    conflicts: Sequence[str] = ()
    """Paths that a rollback left alone because somebody else had changed them meanwhile."""
    commit: str | None = None
    """The git object id of the step, where the workspace keeps a history."""
    recovered: bool = False
    """Whether the process of the call was killed: then this is what the next opening of the workspace knows of it."""
    exit_code: int | None = None
    """Of the command that the call ran, where its result has one."""
    rolled_back_by: str | None = None
    """The id of the call around this one that took it back: the outcome is "rolled_back" then, or "doubtful" where that
    could not be completed."""
    client: str = ""
    """The tag `client` of the session. An MCP server has the name of its client there."""

    @property
    def diff_bytes(self) -> tuple[int, int]:
        """The sizes of the changed files before and after, added up."""
        before = sum(change.before.size for change in self.changes if change.before)
        after = sum(change.after.size for change in self.changes if change.after)
        return before, after

    def to_json(self) -> dict[str, object]:
        r"""The receipt as one JSON object; a line of a receipts file.

        Paths are spelled as a model and a terminal see them: a byte that is not UTF-8 is ``\xNN``.
        """
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["changes"] = [change_json(change) for change in self.changes]
        record["read"] = None if self.read is None else {escape_path(path): known for path, known in self.read.items()}
        record["conflicts"] = [escape_path(path) for path in self.conflicts]
        record["diff_bytes"] = self.diff_bytes
        return {name: serde.dump_any(value) for name, value in record.items()}


def final_receipts(receipts: Iterable[Receipt]) -> tuple[Receipt, ...]:
    """Each call's receipt once, as it ended for good, where some were taken back by calls around them."""
    return tuple({receipt.receipt_id: receipt for receipt in receipts}.values())


def change_json(change: Change) -> dict[str, object]:
    """A change as one JSON object, its path and the target of a link spelled so that no two are spelled alike."""
    versions = {"before": _version_json(change.before), "after": _version_json(change.after)}
    return {"kind": change.kind, "path": escape_path(change.path), **versions}


def _version_json(version: FileVersion | None) -> dict[str, object] | None:
    if version is None:
        return None
    return serde.dump(version if version.target is None else replace(version, target=escape_path(version.target)))
