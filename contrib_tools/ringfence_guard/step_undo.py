"""The undo of steps that calls of agents made: by a person at a terminal, or by a prompt in the agent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ringfence.filesystem.paths import directories_above
from ringfence_guard import wording
from ringfence_guard.guard_log import GuardedCallRecord, GuardLog, now
from ringfence_sandbox import NothingToUndoError

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace


class StepUndo:
    """Undoes steps of agents, and none of anybody else. What is undone once is not undone again: the next undo goes on
    before it."""

    def __init__(
        self, workspace: Callable[[], Workspace], log: GuardLog, pending: dict[tuple[str, str], list[str]]
    ) -> None:
        self._workspace, self._log, self._pending = workspace, log, pending

    def calls_not_undone(self, session_id: str = "") -> list[GuardedCallRecord]:
        """The kept calls whose step is there and was not undone, newest first: of a session, if one is given."""
        records = self._log.read()
        undone = {number for one in records for number in one.undoes}
        there = {step.number for step in self._workspace().steps()} - undone
        found: dict[int, GuardedCallRecord] = {}
        for one in reversed(records):
            if one.kind == "kept" and one.step in there and session_id in ("", one.session_id):
                found.setdefault(one.step, one)
        return [*found.values()]

    def newest(self, n: int, by: str = "") -> list[GuardedCallRecord]:
        """The newest ``n`` calls that are left; or with ``by`` all of the newest one's "session" or "prompt".

        Raises LookupError where there are not so many.
        """
        left = self.calls_not_undone()
        if not left:
            raise LookupError("no step of an agent is left to undo")
        if by:
            last = left[0]
            return [
                one
                for one in left
                if one.session_id == last.session_id and (by == "session" or one.prompt_id == last.prompt_id)
            ]
        if n > len(left):
            raise LookupError(f"{len(left)} steps of agents are left to undo, and {n} were to be undone")
        return left[:n]

    def newest_step(self) -> int:
        """The number of the newest step of an agent; 0 where there is none."""
        return max((one.step or 0 for one in self._log.read() if one.kind == "kept"), default=0)

    def check_newest(self, asked: int) -> None:
        """Raise LookupError if an agent has made a step since a person asked, who cannot have meant that."""
        made = [one for one in self._log.read() if one.kind == "kept" and (one.step or 0) > asked]
        if made:
            what = f"step {made[-1].step} ({made[-1].agent} {made[-1].tool}: {made[-1].arguments})"
            raise LookupError(f"nothing was undone: {what} was made while this waited. Again, it undoes that")

    def undo(
        self, calls: Sequence[GuardedCallRecord], paths: Collection[str] | None = None, *, dry_run: bool = False
    ) -> str:
        """Undo the steps of these calls; with ``paths`` only what they changed there. The agents are told.

        Return what was done, or with ``dry_run`` would be, in words. Raises LookupError where they changed nothing at
        these paths.
        """
        numbers = [call.step for call in calls if call.step is not None]
        try:
            done = self._workspace().undo(step=numbers, paths=paths, dry_run=dry_run)
        except NothingToUndoError as error:
            raise LookupError(str(error)) from error
        made = None if done.step is None else done.step.number
        text = wording.describe_undo(done.outcomes, made, self._unknown(calls, paths), dry_run=dry_run)
        if not dry_run:
            self._tell(calls, done.outcomes, made, numbers if paths is None else (), text)
        return text

    def _unknown(self, calls: Sequence[GuardedCallRecord], paths: Collection[str] | None) -> list[str]:
        """What these calls changed and no history has, and what calls did since that changed nothing else."""
        found: dict[str, None] = {}
        for call in calls:
            assert call.step is not None
            known = {change.path for change in self._workspace().show(call.step).changes}
            found.update(dict.fromkeys(sorted({*call.paths} - known)))
        for one in reversed(self._log.read()):
            if one in calls or one.kind == "undone":
                break
            if one.kind == "kept" and one.step is None and any(one.session_id == call.session_id for call in calls):
                found.update(dict.fromkeys(one.paths))
        return [path for path in found if paths is None or not {path, *directories_above(path)}.isdisjoint(paths)]

    def _tell(
        self,
        calls: Sequence[GuardedCallRecord],
        outcomes: Mapping[str, str],
        made: int | None,
        reversed_steps: Sequence[int],
        text: str,
    ) -> None:
        """Log an undo, and have the agents told if it has changed anything."""
        if made is not None or reversed_steps:
            changed = [path for path, outcome in outcomes.items() if outcome != "conflict"]
            self._log.append(
                GuardedCallRecord("undone", step=made, paths=changed, note=text, undoes=reversed_steps, at=now())
            )
        for actor in {(one.agent, one.session_id) for one in calls} if made is not None else ():
            self._pending.setdefault(actor, []).append(
                f"A person has undone changes of yours. {text} Read them again before you edit them."
            )
