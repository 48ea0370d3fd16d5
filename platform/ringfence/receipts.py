"""The record that every tool call leaves."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Literal, cast

from ringfence import serde
from ringfence.escapes import escape_path
from ringfence.participants import Change, Detection, FileVersion

Outcome = Literal["committed", "failed", "denied", "rejected", "interrupted", "doubtful", "rolled_back"]
"""The outcome of a call.

- "committed": the transaction committed.
- "failed": the handler or the commit failed, and the call was rolled back.
- "denied": a policy or the deadline denied the call before it ran, or an effect policy denied its changes.
- "rejected": the call named no tool, or its arguments did not fit.
- "interrupted": a cancellation, an interrupt or another `BaseException` ended the call, and it was rolled back.
- "doubtful": the rollback could not be completed.
- "rolled_back": whoever made the call asked for that, or it had committed within an outer call, which rolled back.
"""


_MOST_LINES = 10


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """One policy's decision about one call."""

    policy: str
    allowed: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """What the processes of one command exchanged with one host over the network."""

    host: str
    """The name that they used. Empty for requests that could not be read, "(others)" for the hosts after the 100th."""
    port: int
    connections: int = 0
    sent: int = 0
    """Bytes, those of TLS and headers included."""
    received: int = 0
    refused: int = 0
    """How many connections were refused, or failed."""
    reason: str = ""
    """Why the last of them was refused."""

    @property
    def place(self) -> str:
        """The host and the port in one word."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host or "(unreadable)"


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """What the processes of one command did in a network of allowed hosts."""

    hosts: tuple[HostTraffic, ...] = ()
    bypasses: int = 0
    """How often one of them wanted to send something without the proxy. It had no network."""

    def refusals(self) -> list[str]:
        """Return a line for each host that there was no connection to, and one for programs without the proxy."""
        refused = [f"{host.reason} ({host.refused} x)" for host in self.hosts if host.refused]
        lines = [f"network refused: {reason}" for reason in refused[:_MOST_LINES]]
        if len(refused) > _MOST_LINES:
            lines.append(f"network refused: and {len(refused) - _MOST_LINES} more hosts")
        if self.bypasses:
            lines.append(
                "network: a program did not use the proxy of HTTP_PROXY and HTTPS_PROXY; there is no other way out"
            )
        return lines


@dataclass(frozen=True, slots=True)
class Receipt:
    """The record of one tool call, made when the call has ended.

    ``read`` maps each read path to the sha256 in hex of its bytes. ``changes`` are the call's changes, even if they
    were rolled back. ``inner`` has the ids of the calls that its handler made.

    If an outer call rolls back, each committed inner call gets a second receipt with the same ``receipt_id``. The last
    receipt of an id is valid (`final_receipts`).
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
    """Whether the process of the call was killed. Recovery then wrote this receipt from the log of the workspace."""
    exit_code: int | None = None
    """The exit code of the call's command, if its result has one."""
    network: Sequence[HostTraffic] = ()
    """What the call's command exchanged with hosts that were allowed by name, and with which it was refused."""
    rolled_back_by: str | None = None
    """The id of the outer call whose rollback undid this call.

    The outcome is then "rolled_back", or "doubtful" if the rollback could not be completed.
    """
    client: str = ""
    """The tag `client` of the session. An MCP server has the name of its client there."""
    parent_call: str = ""
    """The id of the call around this one, if there was one."""
    detection: Detection | None = None
    """How the changes of an opaque call were found."""
    began_at: datetime | None = None
    """When a call began that somebody else ran: at its look."""
    agent: str = ""
    """The agent or sub-agent whose call somebody else ran, as they name it."""
    prompt_id: str = ""
    """The id of the prompt that such a call belongs to."""
    approved_by: str = ""
    """Who approved such a call before it ran, as they name them."""
    title: str = ""
    """What the call did, for its line of a log: the command that it ran, shortened. Empty where the tool says it."""

    @property
    def diff_bytes(self) -> tuple[int, int]:
        """The sizes of the changed files before and after, added up."""
        before = sum(change.before.size for change in self.changes if change.before)
        after = sum(change.after.size for change in self.changes if change.after)
        return before, after

    def to_json(self) -> dict[str, object]:
        r"""The receipt as one JSON object; a line of a receipts file.

        Paths are spelled as a model and a terminal see them: a byte that is not UTF-8 is ``\xNN``. Parameters that no
        JSON can hold, such as those that nest too deeply, are their shortened ``repr``.
        """
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["changes"] = [change_json(change) for change in self.changes]
        record["read"] = None if self.read is None else {escape_path(path): known for path, known in self.read.items()}
        record["conflicts"] = [escape_path(path) for path in self.conflicts]
        record["diff_bytes"] = self.diff_bytes
        try:
            record["params"] = serde.dump_any(self.params)
        except (ValueError, TypeError, RecursionError):
            record["params"] = reprlib.repr(self.params)
        return {name: serde.dump_any(value) for name, value in record.items()}


def network_of(value: object) -> Sequence[HostTraffic]:
    """The traffic of the command whose result is ``value``."""
    found: object = getattr(value, "network", ())
    if not isinstance(found, tuple):
        return ()
    return tuple(one for one in cast("tuple[object, ...]", found) if isinstance(one, HostTraffic))


def final_receipts(receipts: Iterable[Receipt]) -> tuple[Receipt, ...]:
    """Return the last receipt of each call. An outer call that rolled back has reissued the receipts of inner calls."""
    return tuple({receipt.receipt_id: receipt for receipt in receipts}.values())


def change_json(change: Change) -> dict[str, object]:
    """A change as one JSON object, its path and the target of a link spelled so that no two are spelled alike."""
    versions = {"before": _version_json(change.before), "after": _version_json(change.after)}
    return {"kind": change.kind, "path": escape_path(change.path), **versions}


def _version_json(version: FileVersion | None) -> dict[str, object] | None:
    if version is None:
        return None
    return serde.dump(version if version.target is None else replace(version, target=escape_path(version.target)))
