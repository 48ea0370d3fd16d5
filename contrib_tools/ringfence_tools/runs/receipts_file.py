"""The file of ``--receipts``. It has a line for every tool call, also for a call that was killed."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from uuid import NAMESPACE_OID, uuid5

import click

from ringfence import serde
from ringfence.adapters.model import ModelTurn
from ringfence.receipts import Receipt
from ringfence_sandbox import KilledCall, LogEntry, Workspace
from ringfence_tools.planning import Plan
from ringfence_tools.printable import why
from ringfence_tools.runs.agent_run import RunWatcher
from ringfence_tools.runs.outputs import OutputFile, json_line

_NEWEST = 100
"""Entries of the log among which the newest step is looked for: the others are what somebody else changed since."""


MAX_ANSWER_CHARACTERS = 40_000
"""The most characters of the answer to a call in its line."""


class ReceiptsFile(OutputFile, RunWatcher):
    """A watcher that appends a line for every tool call at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, append=True)
        self._count = 0
        self._turns: dict[str, Mapping[str, object]] = {}
        """The turn that asked for each call, by the call's id."""

    def turn(self, event: ModelTurn) -> None:
        self._count += 1
        usage = {} if event.turn.usage is None else serde.dump(event.turn.usage)
        found = {"number": self._count, **usage}
        self._turns.update((call.call_id, found) for call in event.turn.tool_calls)

    def call(self, receipt: Receipt, plan: Plan | None, answer: str) -> None:
        record = receipt.to_json()
        if answer:
            record["answer"] = shorten(answer)
        if (turn := self._turns.get(receipt.call_id)) is not None:
            record["turn"] = turn
        self.write(json_line(record))

    def complete(self, workspace: Workspace) -> None:
        """Append receipts that a crash kept from being written.

        There is one for each call that recovery ended, and one for the last step of each session of the file, if the
        file lacks it. click.UsageError where they cannot be written.
        """
        written = self._read_existing()
        steps = [entry for entry in workspace.log(_NEWEST) if entry.number]
        by_commit = {entry.commit: entry for entry in steps}
        missing = [
            _of_killed(killed, by_commit.get(killed.commit or ""), workspace) for killed in workspace.killed_calls()
        ]
        last = {entry.session_id: entry for entry in reversed(steps) if entry.session_id}
        for entry in sorted(last.values(), key=lambda entry: entry.number or 0):
            if entry.session_id.encode() in written:
                at = entry.created_at.isoformat()
                killed = KilledCall("", entry.call_id, entry.tool, True, entry.commit, (), (), at)
                missing.append(_of_killed(killed, entry, workspace))
        try:
            for receipt in missing:
                if receipt.receipt_id.encode() not in written:
                    self.call(receipt, None, "")
                    written += receipt.receipt_id.encode()
        except OSError as error:
            raise click.UsageError(f"{str(self.path)!r} cannot be written: {why(error)}") from None
        workspace.forget_killed_calls()

    def _read_existing(self) -> bytes:
        try:
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                return self.path.read_bytes()
        except OSError:  # it may be written, and not be read
            pass
        return b""


def shorten(answer: str) -> str:
    """Cut a long answer in the middle. The end of an output usually has the result."""
    half = MAX_ANSWER_CHARACTERS // 2
    if len(answer) <= MAX_ANSWER_CHARACTERS:
        return answer
    return f"{answer[:half]}\n[... {len(answer) - 2 * half:,} characters left out ...]\n{answer[-half:]}"


def _of_killed(killed: KilledCall, step: LogEntry | None, workspace: Workspace) -> Receipt:
    """Return the receipt of a call whose process was killed. It has the step of the call if there is one."""
    receipt = Receipt(
        receipt_id=str(uuid5(NAMESPACE_OID, killed.begun)),
        call_id=killed.call_id,
        tool=killed.tool,
        params=None,
        outcome="committed" if killed.committed else "rolled_back",
        message="; ".join(["its process was killed", *killed.notes]),
        started_at=killed.began_at,
        duration_seconds=0.0,
        session_id="",
        prompt_name="",
        conflicts=tuple(killed.conflicts),
        recovered=True,
    )
    if step is None or step.number is None:
        return receipt
    return replace(
        receipt,
        receipt_id=step.receipt_id,
        started_at=step.created_at,
        session_id=step.session_id,
        changes=workspace.show(step.number).changes,
        commit=step.commit,
        client=step.client,
    )
