"""What becomes of the changes of calls that have ended: a step, or a rollback, an entry of the log and a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from ringfence.errors import RingfenceError
from ringfence.runtime.policy import Policy
from ringfence_guard import wording
from ringfence_guard.background_commands import BackgroundCommands
from ringfence_guard.call_starts import EarlierChangesPolicy
from ringfence_guard.events import HookEvent
from ringfence_guard.guard_log import CallKind, GuardedCallRecord, GuardLog
from ringfence_guard.judging import EachChangePolicy, SomeDeniedError
from ringfence_guard.kept_calls import OpenCall, SessionKey
from ringfence_tools.printable import one_line

if TYPE_CHECKING:
    from ringfence_sandbox import AdoptedCall, Workspace

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
        tried: set[str],
    ) -> None:
        """``pending`` gets what models are to be told with a later event. ``tried`` are looks that may have been
        adopted: an earlier guard was killed meanwhile, or something failed."""
        self._workspace, self._log, self.policies = workspace, log, policies
        self._background, self._pending, self.tried = background, pending, tried

    def adopt(
        self,
        calls: Sequence[OpenCall],
        mark: str,
        paths: Sequence[str] | None,
        more: Sequence[Policy] = (),
        earlier: EarlierChangesPolicy | None = None,
    ) -> str:
        """Adopt calls as one, under more policies than usual. Return what their models are told.

        What is from before their start, by ``earlier``, is somebody else's."""
        first = calls[0].event
        others = [*self._background.lines()] if paths is None else []
        call_id = first.call_id if len(calls) == 1 else mark
        adopt = partial(
            self._workspace().adopt,
            tool=" + ".join(dict.fromkeys(call.event.tool for call in calls)),
            call_id=call_id,
            session_id=first.session_id,
            paths=paths,
            policies=(*([] if earlier is None else [earlier]), *self.policies, *more),
            agent=first.subagent or first.agent,
            prompt_id=first.prompt_id,
            client=first.agent,
            params={"arguments": [call.event.arguments for call in calls]},
            title=one_line(" + ".join(filter(None, (call.event.arguments for call in calls))), MAX_TITLE),
        )
        try:
            done = adopt(mark) if earlier is None else self._adopt_later(lambda: adopt(mark), earlier)
        except ValueError:
            if mark not in self.tried:
                raise
            return self._adopted_before(calls, call_id)
        if paths is None or self._hidden([change.path for change in done.changes]):
            self.look_for_late()
        if mark in self.tried and not done.changes:
            return self._adopted_before(calls, call_id)
        return self._conclude(calls, done, others)

    def _conclude(self, calls: Sequence[OpenCall], done: AdoptedCall, others: Sequence[str]) -> str:
        """Log what became of calls that were adopted now. Return what their models are told."""
        changed = [change.path for change in done.changes]
        verdict = ""
        if not done.kept:
            hidden = self._hidden(changed)
            together = [call.event.arguments for call in calls] if len(calls) > 1 else []
            verdict = wording.describe_denial(
                done.receipt,
                done.conflicts,
                hidden,
                done.aborted,
                together,
                others,
                is_apart=all(call.event.paths is not None for call in calls),
            )
        denial = next((one for one in done.receipt.policies if not one.allowed), None)
        policy, reason = ("", "") if denial is None else (denial.policy, denial.reason or "")
        if changed:
            step = None if done.step is None else done.step.number
            kind: CallKind = "kept" if done.kept else "denied"
            self._log_each(calls, kind, step, done.aborted, changed, policy, reason)
        return verdict

    def _adopt_later(self, adopt: Callable[[], AdoptedCall], earlier: EarlierChangesPolicy) -> AdoptedCall:
        """Adopt calls but for what is from before their start."""
        try:
            return adopt()
        except SomeDeniedError:
            self._workspace().drop_look(self._workspace().begin_look(paths=earlier.paths))
            return adopt()

    def _hidden(self, paths: Sequence[str]) -> Sequence[str]:
        files = self._workspace().filesystem
        return [path for path in paths if files.hides(path)]

    def _log_each(
        self,
        calls: Sequence[OpenCall],
        kind: CallKind,
        step: int | None,
        aborted: int | None,
        paths: Sequence[str],
        policy: str = "",
        reason: str = "",
    ) -> None:
        for call in calls:
            record = GuardedCallRecord.of(kind, call.event, step=step, aborted=aborted, paths=paths)
            self._log.append(replace(record, policy=policy, reason=reason))

    def _adopted_before(self, calls: Sequence[OpenCall], call_id: str | None) -> str:
        """Log what became of calls that were adopted before something ended that. Return what their models are
        told."""
        if call_id is None:
            return ""
        workspace, session = self._workspace(), calls[0].event.session_id
        began = datetime.fromtimestamp(int(calls[0].began), UTC)
        records = self._log.read()
        for step in reversed(workspace.steps()):
            if (step.call_id, step.session_id) == (call_id, session) and step.created_at >= began:
                if all(one.step != step.number or one.kind != "kept" for one in records):
                    self._log_each(calls, "kept", step.number, None, step.paths)
                return ""
        for entry in workspace.aborted():
            if entry.call_id == call_id and entry.created_at >= began:  # it names no session
                if all(one.aborted != entry.number for one in records):
                    self._log_each(calls, "denied", None, entry.number, entry.paths)
                return wording.describe_denied_before(entry.paths, entry.number)
        return ""

    def look_for_late(self) -> None:
        """What changes from now on may be of commands in the background, if there are any."""
        old, new = self._background.look, ""
        with suppress(OSError, RingfenceError):  # then it is what changes from the old look on
            if self._background:
                new = self._workspace().begin_look(paths=[])
            self._background.look = new
            if old:
                with suppress(ValueError):  # it was adopted
                    self._workspace().drop_look(old)

    def adopt_late(self) -> None:
        """Keep what commands in the background may have changed, but for paths that policies deny."""
        event = HookEvent("claude", "", "other", "", "", arguments="; ".join(self._background.lines()))
        try:
            self.adopt_path_by_path(OpenCall(event, self._background.look, None), wording.MAYBE_OTHERS)
        except ValueError:  # there is no such look: what hidden files were is not known
            loose = OpenCall(event, self._workspace().begin_look(paths=[]), None)
            self.adopt_path_by_path(loose, wording.MAYBE_OTHERS, knows_hidden=False)
        self.look_for_late()

    def adopt_path_by_path(self, call: OpenCall, note: str, *, knows_hidden: bool = True) -> None:
        """Keep changes but for the paths that policies deny, which are rolled back alone. Hidden files stay, and are
        passed over unless the look ``knows_hidden`` files."""
        event, mark = call.event, call.mark
        each = EachChangePolicy(self.policies, self._workspace().filesystem.hides)
        call_id = event.call_id or None
        adopt = partial(
            self._workspace().adopt,
            tool=event.tool or "unattributed",
            call_id=call_id,
            session_id=event.session_id,
            prompt_id=event.prompt_id,
            client=event.agent if event.tool else "",
        )
        try:
            done = adopt(mark, paths=call.paths, policies=[each])
        except ValueError:
            if mark not in self.tried:
                raise
            self._adopted_before([call], call_id)
            return
        except SomeDeniedError:
            denied = sorted(each.denied)
            apart = self._workspace().begin_look(paths=[])
            back = adopt(apart, paths=denied, policies=self.policies)
            gone = [change.path for change in back.changes]
            policy, _, reason = each.denied[denied[0]].partition(": ")
            record = GuardedCallRecord.of(
                "denied", event, aborted=back.aborted, paths=gone, note=f"late change; {note}"
            )
            self._log.append(replace(record, policy=policy, reason=reason))
            self._add_pending(event, wording.describe_late(event.arguments, each.denied, back.aborted))
            done = adopt(mark, paths=call.paths)
        passed = {*each.stays} if knows_hidden else {*self._hidden([change.path for change in done.changes])}
        if each.stays and knows_hidden:
            self._report_hidden(event, each.stays, note)
        if changed := [change.path for change in done.changes if change.path not in passed]:
            step = None if done.step is None else done.step.number
            kind: CallKind = "kept" if event.tool else "unattributed"
            self._log.append(GuardedCallRecord.of(kind, event, step=step, paths=changed, note=note))
        elif mark in self.tried:
            self._adopted_before([call], call_id)

    def _report_hidden(self, event: HookEvent, stays: Mapping[str, str], note: str) -> None:
        """Log and tell which hidden files have changed that policies deny."""
        paths = sorted(stays)
        policy, _, reason = stays[paths[0]].partition(": ")
        note = f"late change; {note}; it stays as it is, since hidden files are in no history"
        record = GuardedCallRecord.of("denied", event, paths=paths, note=note)
        self._log.append(replace(record, policy=policy, reason=reason))
        self._add_pending(event, wording.describe_late_hidden(event.arguments, stays))

    def _add_pending(self, event: HookEvent, text: str) -> None:
        for key in {event.actor[:2], *self._background.loose}:
            if key[1]:
                self._pending.setdefault(key, []).append(text)
