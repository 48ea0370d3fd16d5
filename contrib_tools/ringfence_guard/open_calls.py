"""The calls that have not ended, and what becomes of each when it ends, or when its end never comes."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import monotonic, time
from typing import TYPE_CHECKING

from ringfence.errors import WorkspaceLockedError
from ringfence_guard.adoption import CallAdoption
from ringfence_guard.background_commands import BackgroundCommands
from ringfence_guard.call_starts import EarlierChangesPolicy, start_of
from ringfence_guard.events import HookEvent
from ringfence_guard.guard_log import GuardedCallRecord, GuardLog
from ringfence_guard.judging import FailedCommandPolicy
from ringfence_guard.kept_calls import CallGroup, KeptCalls, OpenCall
from ringfence_guard.left_processes import may_be_left
from ringfence_guard.transcripts import proof_of, record_size

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace

REPEATED_SECONDS = 10.0
"""How long after the beginning of a call another hook of the agent may tell of it again."""
MOST_SETTLED = 50
"""Of so many calls that were settled without an end it is known that this was so."""
_SHELL_TOOL = re.compile(r"bash|shell|exec", re.IGNORECASE)
NO_END = "its end was never told"
NOT_RUN = "it was not permitted, and did not run"
FOR_NOW = (OSError, WorkspaceLockedError)
"""Why a call cannot be looked at now, and can be later: it stays open. There is no space, say."""


class OpenCalls:
    """Of one workspace. Who asks has the turn."""

    def __init__(
        self,
        turn: threading.Condition,
        workspace: Callable[[], Workspace],
        adoption: CallAdoption,
        background: BackgroundCommands,
        kept: KeptCalls,
        log: GuardLog,
        root: str,
        slack_seconds: float,
    ) -> None:
        self._turn, self._workspace, self._log = turn, workspace, log
        self._root, self._slack_seconds = root, slack_seconds
        self._adoption, self._background, self._pending = adoption, background, kept.pending
        self._processes = kept.processes
        self._settled = kept.settled
        """Those that were settled before their end was told, for this guard and the next."""
        self.files = kept.files
        """Those of tools that name their files."""
        self.group: CallGroup | None = None
        """Those that may change any file."""
        if kept.open or kept.ended:
            self.group = CallGroup(kept.mark, kept.open, kept.ended, kept.failed, unheard=[*kept.ended])
        self._ended: deque[tuple[str, ...]] = deque(maxlen=200)
        """Those that ended last, by actor and id: an agent with two hooks tells each event twice."""

    def __iter__(self) -> Iterator[OpenCall]:
        return iter([*self.files, *([] if self.group is None else self.group.open)])

    def to_keep(self) -> KeptCalls:
        """What the next guard goes on with."""
        group, background = self.group or CallGroup(""), self._background
        return KeptCalls(
            self.files,
            group.mark,
            group.open,
            group.ended,
            group.failed,
            background.loose,
            background.detached,
            background.since,
            self._pending,
            self._processes,
            background.look,
            self._settled,
        )

    def named_as(self, event: HookEvent) -> Iterator[OpenCall]:
        """Those with the id of a call."""
        return (call for call in self if _key(call.event) == _key(event))

    def is_repeated(self, event: HookEvent) -> bool:
        """Whether a beginning was told just now, by another hook of the agent. Gemini CLI has no ids to tell it by."""
        return event.agent != "gemini" and any(
            call.began > time() - REPEATED_SECONDS and call.event.arguments == event.arguments
            for call in self.named_as(event)
        )

    def has_ended(self, event: HookEvent) -> bool:
        """Whether a call is over: its end was told before, or it was settled without one."""
        return event.agent != "gemini" and (_key(event) in self._ended or [*_key(event)] in self._settled)

    # Beginnings. They raise as `Workspace.begin_look`.

    def begin_file(self, event: HookEvent, paths: tuple[str, ...]) -> None:
        mark = self._workspace().begin_look(paths=paths)
        self.files.append(OpenCall(event, mark, paths, record_bytes=record_size(event)))

    def begin_any(self, event: HookEvent) -> None:
        """Begin a call that may change any file; with others that go on, if there are any."""
        if self.group is None:
            self.group = CallGroup(self._workspace().begin_look())
        self.group.open.append(OpenCall(event, self.group.mark, None, record_bytes=record_size(event)))

    # Ends. They raise as `Workspace.adopt`.

    def end(self, event: HookEvent, verdict_seconds: float, *, rolls_back: bool) -> str | None:
        """End a call, and return what its model is told: none for one whose beginning nobody saw.

        The verdict on others that it overlaps is waited for so long. ``rolls_back`` says whether a command that fails
        goes back.
        """
        for call in self.files:
            if _key(call.event) == _key(event):
                try:
                    verdict = self._adopt_file(call)
                except FOR_NOW:
                    self._adoption.tried.add(call.mark)
                    raise
                except BaseException:
                    self.files.remove(call)
                    raise
                self.files.remove(call)
                self._ended.append(_key(event))
                return _joined(call.verdict, verdict)
        group = self.group
        for call in [] if group is None else group.open:
            if _key(call.event) == _key(event):
                assert group is not None
                if event.exit_code and rolls_back:
                    group.failed = event.exit_code
                if len(group.open) == 1 and not group.ended:
                    group.start = start_of(self._root, call, event, self._slack_seconds)
                return self._end_in_group(group, call, event.hooked_at, verdict_seconds)
        return None

    def _end_in_group(self, group: CallGroup, call: OpenCall, hooked_at: float, verdict_seconds: float) -> str:
        group.open.remove(call)
        group.ended.append(call)
        self._ended.append(_key(call.event))
        if call.event.is_background:
            self._background.add(call)
        elif self._has_left(call, hooked_at):
            self._background.add(call, has_left=True)
        if not group.open:
            self._settle_group(group)
        until = monotonic() + verdict_seconds
        while not group.is_settled and (left := until - monotonic()) > 0:
            self._turn.wait(left)
        if not group.is_settled:
            group.unheard.append(call)
        return group.verdict

    def _has_left(self, call: OpenCall, hooked_at: float) -> bool:
        """Whether a command may have left a process that its line does not show."""
        session = call.event.actor[:2]
        agent, _ = self._processes.get(session, (0, 0))
        if not (agent and hooked_at and _SHELL_TOOL.search(call.event.tool)):
            return False
        return may_be_left(session, call.boot, hooked_at, agent, self._root)

    def settle_ended(self) -> None:
        """Try again with calls that have ended, and could not be looked at then."""
        if self.group is not None and not self.group.open:
            self._settle_group(self.group)

    def _settle_group(self, group: CallGroup) -> None:
        """Make one step of the calls of a group, or roll all of them back."""
        try:
            self.settle_files()
            more = () if group.failed is None else (FailedCommandPolicy(group.failed),)
            earlier = None if group.start is None else EarlierChangesPolicy(self._root, group.start)
            group.verdict = self._adoption.adopt(group.ended, group.mark, None, more, earlier)
        except FOR_NOW:
            self._adoption.tried.add(group.mark)
            group.unheard = [*group.ended]
            raise
        except BaseException:
            self._forget(group)
            raise
        self._forget(group)
        for key in {call.event.actor[:2] for call in group.unheard}:
            if group.verdict:
                self._pending.setdefault(key, []).append(group.verdict)

    def _forget(self, group: CallGroup) -> None:
        self.group = None
        group.is_settled = True
        self._turn.notify_all()

    def settle_files(self) -> None:
        """Make steps of what calls that name their files have done so far, so that it is not another call's."""
        for call in self.files:
            assert call.paths is not None
            call.verdict = _joined(call.verdict, self._adopt_file(call))
            call.mark = self._workspace().begin_look(paths=call.paths)

    def _adopt_file(self, call: OpenCall) -> str:
        return self._adoption.adopt([call], call.mark, call.paths)

    # Ends that never come.

    def settle_proved(self, event: HookEvent | None = None) -> None:
        """Settle the calls that are over by the agents' records, but for the one that ends with an event."""
        ends = event is not None and event.phase in ("after", "failed")
        for call in [*self]:
            if not (ends and event is not None and _key(call.event) == _key(event)) and proof_of(call):
                self.settle([call])

    def settle(self, calls: Iterable[OpenCall]) -> None:
        """Keep what calls without an end have changed, but for paths that policies deny. What has changed since the
        beginning of one that was not permitted is not its own."""
        for call in list(calls):
            if proof_of(call) == "not run":
                self._drop(call)
            elif call in self.files:
                self._settle_file(call)
            else:
                self._settle_any(call)
            self._settled.append([*_key(call.event)])
            del self._settled[:-MOST_SETTLED]

    def _drop(self, call: OpenCall) -> None:
        """Forget a call that did not run."""
        group = self.group
        if call in self.files:
            self.files.remove(call)
        elif group is not None:
            group.open.remove(call)
        if group is not None and not group.open and call.paths is None:
            if group.ended:
                self._settle_group(group)
            else:
                self._forget(group)
        if call.paths is not None or self.group is not group:
            with suppress(ValueError):  # it was adopted with others of its group
                self._workspace().drop_look(call.mark)
        self._log.append(GuardedCallRecord.of("refused", call.event, note=NOT_RUN))

    def _settle_file(self, call: OpenCall) -> None:
        self.files.remove(call)
        try:
            self._adoption.adopt_path_by_path(call, NO_END)
        except FOR_NOW:
            self._adoption.tried.add(call.mark)
            self.files.append(call)
            raise
        if call.verdict:
            self._pending.setdefault(call.event.actor[:2], []).append(call.verdict)

    def _settle_any(self, call: OpenCall) -> None:
        group = self.group
        assert group is not None
        group.open.remove(call)
        if group.open or group.ended:
            self._may_go_on(call)
            group.ended.append(call)
            group.unheard.append(call)
            if not group.open:
                self._settle_group(group)
            return
        try:
            self.settle_files()
            self._adoption.adopt_path_by_path(call, NO_END)
        except FOR_NOW:
            self._adoption.tried.add(call.mark)
            group.open.append(call)
            raise
        except BaseException:
            self.group = None
            raise
        self._may_go_on(call)
        self.group = None
        self._adoption.look_for_late()

    def _may_go_on(self, call: OpenCall) -> None:
        if call.event.is_background or proof_of(call) != "ended":
            self._background.add(call)

    def judge_loose(self) -> None:
        """Look at what commands that may still run have changed since the last look, or somebody else."""
        if self._background and self.group is None:
            self.settle_files()
            self._adoption.adopt_late()


def _key(event: HookEvent) -> tuple[str, ...]:
    return (*event.actor, event.call_id)


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))
