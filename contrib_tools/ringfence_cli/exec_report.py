"""What ``ringfence exec`` tells of a command that has ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ringfence.escapes import display_path
from ringfence.policies.effects import HiddenFilesPolicy
from ringfence.receipts import change_json
from ringfence_tools.printable import plural

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence_sandbox import CommandResult

DENIED = 122
OURS = 125
MAX_PATHS = 8


def exit_code(done: CommandResult) -> int:
    """Return the exit code of `exec` for a command."""
    if done.rollback_refused:
        return OURS
    return DENIED if done.outcome == "denied" else done.exit_code


def ended_by(done: CommandResult) -> str:
    """Return whose that exit code is."""
    is_ours = done.outcome == "denied" or done.rollback_refused or done.failure or done.not_started
    return "ringfence" if is_ours else "command"


def report_lines(done: CommandResult) -> Iterator[str]:
    """Yield what a person is told."""
    what = {"committed": "kept", "denied": "denied, and taken back"}.get(done.outcome, "taken back")
    what = "not taken back" if done.rollback_refused else what
    if not done.changes:
        yield "ringfence: nothing changed" if done.kept else f"ringfence: {_reason(done)}; nothing changed"
    else:
        which = f" as step {done.step.number}" if done.step is not None else ""
        reason = "" if done.kept else f" ({_reason(done)})"
        yield f"ringfence: {plural(len(done.changes), 'change')} {what}{which}{reason}:"
        yield from change_lines(done.changes)
    yield from (f"ringfence: {note}" for note in done.notes)


def _reason(done: CommandResult) -> str:
    if done.failure:
        return done.failure
    denial = next((one for one in done.receipt.policies if not one.allowed), None) if done.receipt else None
    if done.outcome == "denied" and denial is not None:
        advice = "; --allow-hidden GLOB allows it" if denial.policy == HiddenFilesPolicy.name else ""
        return f"the policy {denial.policy}: {denial.reason or 'no reason given'}{advice}"
    return "as you asked" if done.outcome == "rolled_back" else f"exit code {done.exit_code}"


def change_lines(changes: Sequence[Change]) -> list[str]:
    more = [f"  and {len(changes) - MAX_PATHS} more"] if len(changes) > MAX_PATHS else []
    return [f"  {change.kind} {display_path(change.path)}" for change in changes[:MAX_PATHS]] + more


def report_json(done: CommandResult) -> Mapping[str, object]:
    receipt = done.receipt
    return {
        "exit_code": exit_code(done),
        "ended_by": ended_by(done),
        "command_exit_code": done.exit_code,
        "outcome": done.outcome,
        "failure": done.failure or done.not_started,
        "step": None if done.step is None else done.step.number,
        "changes": [change_json(change) for change in done.changes],
        "notes": [*done.notes],
        "rollback_refused": done.rollback_refused,
        "leftovers": done.leftovers,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "output_files": done.output_files,
        "receipt": None if receipt is None else receipt.to_json(),
    }
