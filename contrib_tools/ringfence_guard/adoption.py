"""What becomes of the changes of calls that have ended: a step, or a rollback, an entry of the log and a message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ringfence.runtime.policy import Policy
from ringfence_guard import wording
from ringfence_guard.background_commands import BackgroundCommands
from ringfence_guard.events import HookEvent
from ringfence_guard.guard_log import CallKind, GuardedCallRecord, GuardLog
from ringfence_guard.judging import EachChangePolicy, SomeDeniedError
from ringfence_guard.kept_calls import OpenCall, SessionKey
from ringfence_tools.printable import one_line

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace

MAX_TITLE = 100
"""The most characters of a call's arguments in the line of its step."""


class CallAdoption:
    """Adopts calls in one workspace."""

    def __init__(
        self,
        workspace: Callable[[], Workspace],
        log: GuardLog,
        policies: Sequence[Policy],
        background: BackgroundCommands,
        pending: dict[SessionKey, list[str]],
        restored: Collection[str],
    ) -> None:
        """``pending`` gets what models are to be told with a later event. ``restored`` are looks of an earlier guard,
        which may have adopted them before it was killed."""
        self._workspace, self._log, self._policies = workspace, log, policies
        self._background, self._pending, self._restored = background, pending, restored

    def adopt(
        self, calls: Sequence[OpenCall], mark: str, paths: Sequence[str] | None, policies: Sequence[Policy]
    ) -> str:
        """Adopt calls as one. Return what their models are told."""
        first = calls[0].event
        others = [*self._background.lines()] if paths is None else []
        adopt = partial(
            self._workspace().adopt,
            tool=" + ".join(dict.fromkeys(call.event.tool for call in calls)),
            call_id=first.call_id if len(calls) == 1 else None,
            session_id=first.session_id,
            paths=paths,
            policies=policies,
            agent=first.subagent or first.agent,
            prompt_id=first.prompt_id,
            client=first.agent,
            params={"arguments": [call.event.arguments for call in calls]},
            title=one_line(" + ".join(filter(None, (call.event.arguments for call in calls))), MAX_TITLE),
        )
        try:
            done = adopt(mark)
        except ValueError:
            if mark not in self._restored:
                raise
            return ""
        changed = [change.path for change in done.changes]
        verdict = policy = reason = ""
        if not done.kept:
            denial = next((one for one in done.receipt.policies if not one.allowed), None)
            policy, reason = ("", "") if denial is None else (denial.policy, denial.reason or "")
            together = [call.event.arguments for call in calls] if len(calls) > 1 else []
            verdict = wording.describe_denial(done.receipt, done.conflicts, done.aborted, together, others)
        step = None if done.step is None else done.step.number
        for call in calls:
            if changed:
                kind: CallKind = "kept" if done.kept else "denied"
                record = GuardedCallRecord.of(kind, call.event, step=step, aborted=done.aborted, paths=changed)
                self._log.append(replace(record, policy=policy, reason=reason))
        return verdict

    def adopt_path_by_path(self, event: HookEvent, mark: str, paths: Sequence[str] | None, note: str) -> None:
        """Keep changes but for the paths that policies deny, which are rolled back alone."""
        tool = event.tool or "unattributed"
        each = EachChangePolicy(self._policies)
        client = event.agent if event.tool else ""
        adopt = partial(
            self._workspace().adopt, tool=tool, session_id=event.session_id, prompt_id=event.prompt_id, client=client
        )
        try:
            done = adopt(mark, paths=paths, policies=[each])
        except ValueError:
            if mark not in self._restored:
                raise
            return
        except SomeDeniedError:
            denied = sorted(each.denied)
            apart = self._workspace().begin_look(paths=[])
            back = adopt(apart, paths=denied, policies=self._policies)
            gone = [change.path for change in back.changes]
            policy, _, reason = each.denied[denied[0]].partition(": ")
            record = GuardedCallRecord.of(
                "denied", event, aborted=back.aborted, paths=gone, note=f"late change; {note}"
            )
            self._log.append(replace(record, policy=policy, reason=reason))
            text = wording.describe_late(event.arguments, each.denied, back.aborted)
            for key in {event.actor[:2], *self._background.loose}:
                if key[1]:
                    self._pending.setdefault(key, []).append(text)
            done = adopt(mark, paths=paths)
        if changed := [change.path for change in done.changes]:
            step = None if done.step is None else done.step.number
            kind: CallKind = "kept" if event.tool else "unattributed"
            self._log.append(GuardedCallRecord.of(kind, event, step=step, paths=changed, note=note))
