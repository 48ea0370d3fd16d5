"""How a task ended, for people and for programs."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

from ringfence import serde
from ringfence.filesystem.diff import moved
from ringfence.filesystem.paths import escape_path
from ringfence.participants import Change
from ringfence.runtime.receipts import change_json
from ringfence_cli.beside_patch import beside_patch
from ringfence_cli.printable import one_line, plural, printable
from ringfence_cli.task import RunOutcome
from ringfence_cli.watch import OUTCOMES, RunStats
from ringfence_cli.workspace import RunWorkspace, line_counts
from ringfence_tools.contents import LeftOut

MAX_LISTED = 20


def summary(ending: RunOutcome, tally: RunStats, *, beside: bool = False) -> Iterator[str]:
    """Lines for a person, after the diff; ``beside`` says that the task changed what is not in the history."""
    yield f"{ending.outcome.replace('_', ' ')} after {tally.seconds:.1f} s: {tally.said}"
    if (plan := ending.plan) is not None:
        done = sum(step.status == "done" for step in plan.steps)
        yield f"plan: {done} of {plural(len(plan.steps), 'step')} done"
    files = [change for change in ending.changes if not _is_directory(change)]
    if not ending.changes:
        nothing = "nothing else" if beside else "nothing"
        yield f"{nothing} was changed since it was resumed" if ending.is_part else f"{nothing} was changed"
    else:
        added, removed = line_counts(ending.patch)
        yield f"{plural(len(files) - len(moved(ending.changes)), 'file')} changed, +{added} -{removed} lines"
    for line in beside_patch(ending.changes):
        yield printable(f"not in the patch: {line}")


def left_out(paths: Sequence[LeftOut]) -> Iterator[str]:
    """Lines that say what of the directory the agent does not see, or the history does not have."""
    for one in paths[:MAX_LISTED]:
        yield f"left out: {escape_path(one.path)} ({one_line(one.reason, 200)})"
    if len(paths) > MAX_LISTED:
        yield f"left out: {len(paths) - MAX_LISTED} more; --json lists all"


def as_json(ending: RunOutcome, tally: RunStats, workspace: RunWorkspace | None) -> dict[str, object]:
    """The whole record; the shapes of ``changes`` are those of a receipt. Without a workspace nothing was begun."""
    left = (*workspace.left_out, *workspace.left_out_since()) if workspace is not None else ()
    return {
        "exit_code": ending.exit_code,
        "outcome": ending.outcome,
        "error": ending.error,
        "text": ending.text,
        "parts": tally.parts,
        "session_ids": list(ending.session_ids),
        "is_part": ending.is_part,
        "mixed": [escape_path(path) for path in ending.mixed],
        "turns": tally.turns,
        "tool_calls": {"total": tally.calls, **{outcome: tally.outcomes[outcome] for outcome in OUTCOMES}},
        "plan": serde.dump(ending.plan) if ending.plan is not None else None,
        "changes": [change_json(change) for change in ending.changes],
        **_patch(ending.patch),
        "applied": ending.applied,
        "steps": workspace.steps() if workspace is not None else 0,
        "conflicts": [escape_path(path) for path in ending.conflicts],
        "left_out": [
            {"path": escape_path(one.path), "reason": one.reason} for one in {one.path: one for one in left}.values()
        ],
        "usage": serde.dump(tally.usage),
        "duration_seconds": round(tally.seconds, 3),
    }


def _patch(patch: bytes) -> dict[str, object]:
    """As text, or, since files need not be UTF-8, as bytes."""
    try:
        return {"patch": patch.decode(), "patch_base64": None}
    except UnicodeDecodeError:
        return {"patch": None, "patch_base64": base64.b64encode(patch).decode()}


def _is_directory(change: Change) -> bool:
    version = change.after or change.before
    return version is not None and version.kind == "directory"
