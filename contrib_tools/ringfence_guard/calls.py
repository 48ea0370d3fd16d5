"""The calls of agents' own tools on one workspace: where each begins and ends, and what becomes of its changes.

Nothing is open between two events. A call begins with a look at the files and ends with another; what differs is its
step, or is rolled back if a policy denies it. Calls that may change any file and overlap are one step, named after all.
A tool that names its files is looked at by these alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from ringfence.errors import WorkspaceLockedError
from ringfence.escapes import escape_path
from ringfence.runtime.policy import Policy
from ringfence_guard import wording
from ringfence_guard.adoption import CallAdoption
from ringfence_guard.answers import HookAnswer, can_take_context
from ringfence_guard.background_commands import BackgroundCommands
from ringfence_guard.call_starts import SLACK_SECONDS
from ringfence_guard.events import HookEvent
from ringfence_guard.guard_log import GuardedCallRecord, GuardLog
from ringfence_guard.kept_calls import KeptCalls, KeptCallsFile, SessionKey
from ringfence_guard.left_processes import may_live
from ringfence_guard.open_calls import OpenCalls
from ringfence_guard.own_files import OwnFilesPolicy
from ringfence_guard.settings import GuardSettings
from ringfence_guard.step_undo import StepUndo
from ringfence_guard.transcripts import has_passed, is_followed
from ringfence_tools.runs.person_notes import PersonNotes

if TYPE_CHECKING:
    from ringfence_sandbox import Workspace

HOOK_SECONDS = 96.0
"""How long an agent waits for an answer if nothing else is said."""
POLL_SECONDS = 0.02
RECORD_SECONDS = 0.25
"""How often the agents' records are read while somebody waits for the end of a call."""
LOGGED = 10
"""How many entries of the log there may be for each step that is kept."""
OWN_TOOLS = ("mcp__ringfence", "mcp_ringfence", "ringfence_")
"""Tools of `ringfence serve`, which are transactions already."""


class GuardedCalls:
    """The calls on one workspace. It is open but while somebody else has it. Threads may hand events over at once."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        log: GuardLog,
        *,
        open_workspace: Callable[[], Workspace],
        policies: Sequence[Policy] = (),
        settings: GuardSettings | None = None,
        overlap_seconds: float = 10.0,
        verdict_seconds: float = 5.0,
        slack_seconds: float = SLACK_SECONDS,
        kept_steps: int = 1000,
        state: Path | None = None,
    ) -> None:
        """``open_workspace`` leaves what has changed to the next look. ``overlap_seconds`` is how long a call that may
        change any file waits for another one to end, and any call for a command of a person that has the workspace;
        ``verdict_seconds`` is how long the end of one waits for those that it overlaps, and a person's command for the
        end of a call; ``slack_seconds`` is how long the hook of an end may take to start. When a session
        ends and there are twice as many steps as ``kept_steps``, the older ones are dropped. ``state`` is a directory
        that keeps what is open: if this guard is killed, the next one goes on with it."""
        self._open_workspace = open_workspace
        self._opened: Workspace | None = None
        self._opened_at: tuple[int, int] | None = None
        """Which directory it is."""
        self._root = os.path.realpath(root)
        self._notes = PersonNotes(Path(self._root))
        self._log = log
        self._settings = GuardSettings() if settings is None else settings
        self._own_files = OwnFilesPolicy(Path(self._root))
        self._overlap_seconds, self._verdict_seconds = overlap_seconds, verdict_seconds
        self._kept_steps = kept_steps
        self._turn = threading.Condition()
        self._state = None if state is None else KeptCallsFile(state)
        kept = KeptCalls() if self._state is None else self._state.load()
        restored = {call.mark for call in (*kept.files, *kept.open, *kept.ended)}
        self._goes_on = bool(restored)
        """Whether what the opening finds changed may be of calls that an earlier guard saw begin."""
        self._background = BackgroundCommands(kept.loose, kept.detached, kept.since, kept.look)
        self._pending = kept.pending
        """By agent and session: what its model is to be told with a later event."""
        self._adoption = CallAdoption(
            lambda: self._workspace, log, (self._own_files, *policies), self._background, self._pending, restored
        )
        self._calls = OpenCalls(
            self._turn, lambda: self._workspace, self._adoption, self._background, kept, log, self._root, slack_seconds
        )
        self._step_undo = StepUndo(lambda: self._workspace, log, self._pending)
        self._processes = kept.processes
        self._undone: set[tuple[str, str, str]] = set()

    @property
    def open_calls(self) -> Sequence[HookEvent]:
        """The beginnings of calls that have not ended."""
        with self._turn:
            return [call.event for call in self._calls]

    @property
    def _workspace(self) -> Workspace:
        """Raises WorkspaceLockedError while somebody else has it, and as `Workspace.open`."""
        if self._opened is None:
            self._opened_at = self._place()
            self._opened = self._open_workspace()
            if not self._goes_on and not self._background:
                self._opened.look()
            self._goes_on = False
        return self._opened

    def open(self, patience_seconds: float = 0.0) -> None:
        """Open the workspace, unless it is open; wait for somebody else who has it.

        Raises:
            WorkspaceLockedError: somebody else has it still.
            OSError, RingfenceError, ValueError: as `Workspace.open`.
        """
        until = monotonic() + patience_seconds
        with self._turn:
            while self._opened is None:
                try:
                    assert self._workspace is not None
                except WorkspaceLockedError:
                    if monotonic() > until:
                        raise
                    self._turn.wait(POLL_SECONDS)

    def close(self) -> None:
        """Close the workspace. The next event that needs it opens it again. Raises OSError."""
        with self._turn:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _place(self) -> tuple[int, int]:
        """Which directory the root is now. Raises FileNotFoundError."""
        try:
            found = os.stat(self._root)
        except FileNotFoundError:
            again = "if it was moved, run `ringfence guard install` in it again"
            raise FileNotFoundError(f"{escape_path(self._root)} is gone: {again}") from None
        return found.st_dev, found.st_ino

    def lend(self, wait: Callable[[], None]) -> str:
        """Close the workspace for somebody else, and wait until that one has it.

        Return why that is not done, as the end of a sentence that begins with who has the workspace; else nothing.
        Raises as `handle`.
        """
        with self._turn:
            if not (busy := self._busy(self._verdict_seconds)):
                self.close()
                wait()
            return busy

    def let_write(self, paths: Sequence[str], wait: Callable[[], None]) -> str:
        """Wait while a person's command writes these files. What it writes is no call's, also while calls go on.

        Return why that is not done; else nothing. Raises as `handle`.
        """
        with self._turn:
            named = self._inside(paths)
            if not named or not ([*self._calls] or self._calls.group is not None or self._background):
                wait()
                return ""
            self.open(self._overlap_seconds)
            if changed := [path for path in named if not self._is_as_known(path)]:
                return f"a call of an agent has changed {wording.list_paths(changed)}: do this again after its end"
            wait()
            self._workspace.drop_look(self._workspace.begin_look(paths=named))
            self._own_files.refresh_permissions()
            return ""

    def _is_as_known(self, path: str) -> bool:
        """Whether a file is as the history has it."""
        try:
            content = Path(self._root, path).read_bytes()
        except FileNotFoundError:
            content = None
        return content == self._workspace.read_at(self._workspace.newest, path)

    def _busy(self, seconds: float) -> str:
        """Wait for open calls to end, and judge what goes on without one. Return who has the workspace still, as the
        end of a sentence; else nothing."""
        until = monotonic() + seconds
        self._settle_proved()
        while (calls := [*self._calls]) and (left := until - monotonic()) > 0:
            self._turn.wait(min(left, RECORD_SECONDS))
            self._settle_proved()
        if calls:
            return f"`ringfence guard`, which watches a call of {calls[0].event.agent} ({calls[0].event.arguments})"
        if self._opened is not None:
            self._calls.settle_ended()
            self._calls.judge_loose()
        return ""

    def settle_proved(self) -> None:
        """Settle the calls that are over by the agents' records, where that can be done now."""
        with self._turn:
            self._settle_proved()
            self._save()
            self._turn.notify_all()

    def _settle_proved(self, event: HookEvent | None = None) -> None:
        if self._opened is not None:
            with suppress(OSError, WorkspaceLockedError):  # they stay open
                self._calls.settle_proved(event)

    def handle(self, event: HookEvent, *, patience_seconds: float = HOOK_SECONDS) -> HookAnswer:
        """Take an event, and return the answer to it. The agent waits so long for it.

        Raises:
            WorkspaceLockedError: somebody else has the workspace.
            OSError, RingfenceError, ValueError: the files cannot be looked at, or the history not be written.
        """
        with self._turn:
            try:
                if event.phase != "before":
                    self._settle_proved(event)
                answer = self._take(event, patience_seconds)
            finally:
                self._save()
                self._turn.notify_all()
        return answer

    def judge_by(self, policies: Sequence[Policy], settings: GuardSettings) -> None:
        """Judge what ends from now on by these policies and settings."""
        with self._turn:
            self._settings = settings
            self._adoption.policies = (self._own_files, *policies)

    def watched(self, session: SessionKey, process: int, started: int) -> None:
        """The process of an agent's session is known, and when it started."""
        with self._turn:
            self._processes[session] = (process, started)

    @property
    def watched_sessions(self) -> Mapping[SessionKey, tuple[int, int]]:
        """The sessions that have not ended and whose process is known, with that and when it started."""
        with self._turn:
            return {**self._processes}

    def _save(self) -> None:
        if self._state is not None:
            self._state.save(self._calls.to_keep())

    def end_session(self, agent: str, session_id: str) -> None:
        """Settle all calls of a session whose agent is gone. Raises as `handle`."""
        with self._turn:
            try:
                self._calls.settle(call for call in self._calls if call.event.actor[:2] == (agent, session_id))
                self._calls.settle_ended()
                self._calls.judge_loose()
            finally:
                self._background.forget((agent, session_id))
                self._processes.pop((agent, session_id), None)
                self._save()
                self._turn.notify_all()
            if self._opened is None or [*self._calls]:
                return  # a call's changes are not looked at before its end
            if len(self._opened.steps()) > 2 * self._kept_steps:
                self._opened.gc(self._kept_steps)
                self._log.trim(LOGGED * self._kept_steps)

    def end_background(self, lives: Callable[[SessionKey, float, int, str], bool] = may_live) -> None:
        """Forget the commands in the background of which nothing lives any more, after a last look at what they have
        changed. ``lives`` says of a session, a time, the agent's process and the root whether something may.

        Raises as `handle`.
        """
        with self._turn:
            if not self._background or self._opened is None or [*self._calls] or self._calls.group is not None:
                return
            since, processes = self._background.since, self._processes
            over = [
                key
                for key in self._background.loose
                if not lives(key, since.get(key, 0.0), processes.get(key, (0, 0))[0], self._root)
            ]
            if over:
                self._calls.judge_loose()
                for key in over:
                    self._background.forget(key)
                self._save()

    def settle_all(self) -> None:
        """Settle the calls that are open: a person stops the guard, and need not wait for their end. Raises as
        `handle`."""
        with self._turn:
            if [*self._calls] or self._calls.group is not None:
                self.open(self._overlap_seconds)
                self._calls.settle(self._calls)
                self._calls.settle_ended()
                self._save()
                self._turn.notify_all()

    def undo(self, n: int, by: str = "", paths: Collection[str] | None = None, *, dry_run: bool = False) -> str:
        """Undo the newest ``n`` steps of agents that are not undone; or with ``by`` those of the newest one's "session"
        or "prompt". With ``paths``, only what they changed there.

        Return what was done, or with ``dry_run`` would be, in words.

        Raises:
            LookupError: there are not so many steps, they changed nothing at these paths, or one was made meanwhile.
            WorkspaceLockedError: a call goes on, whose changes an undo would take for somebody else's.
        """
        with self._turn:
            self._settle_proved()
            asked = self._step_undo.newest_step()
            if busy := self._busy(self._verdict_seconds):
                raise WorkspaceLockedError(self._workspace.root, busy)
            self._step_undo.check_newest(asked)
            return self._step_undo.undo(self._step_undo.newest(n, by), paths, dry_run=dry_run)

    def _take(self, event: HookEvent, patience: float) -> HookAnswer:
        key = event.actor[:2]
        answer = HookAnswer()
        if event.tool.startswith(OWN_TOOLS):
            return answer
        if event.phase == "before":
            answer = self._begin(event, min(self._overlap_seconds, patience / 2))
        elif event.phase in ("after", "failed"):
            answer = HookAnswer(verdict=self._end(event))
        elif event.phase == "prompt" and not event.subagent:
            if (asked := wording.asked_undo(event.prompt)) is not None:
                return self._undo_prompt(event, asked, patience / 2)
            self._calls.settle(call for call in self._calls if has_passed(call.event, event))
        elif event.phase in ("stop", "batch_end", "subagent_end"):
            self._calls.settle(call for call in self._calls if call.event.actor == event.actor)
            if event.has_background is False:
                try:
                    self._calls.judge_loose()
                finally:
                    self._background.keep_detached(key)
            if event.parent_session and (texts := self._pending.pop(key, None)):
                self._pending.setdefault((event.agent, event.parent_session), []).extend(texts)
        elif event.phase == "session_end":
            self.end_session(*key)
        if can_take_context(event) and (texts := [*self._pending.pop(key, ()), *self._said_by_person(event)]):
            person = "\n\n".join(filter(wording.is_for_person, texts))
            answer = HookAnswer(answer.denial, answer.verdict, "\n\n".join(texts), person)
        return answer

    def _said_by_person(self, event: HookEvent) -> Sequence[str]:
        """What a person has said on the page of `ringfence view`. It is told once, and to no sub-agent."""
        if event.subagent or event.parent_session:
            return ()
        try:
            said = self._notes.take(f"told to {event.agent}")
        except OSError:
            return ()
        return (said,) if said else ()

    # The beginning of a call.

    def _begin(self, event: HookEvent, patience: float) -> HookAnswer:
        if event.is_background and self._settings.deny_background:
            self._log.append(GuardedCallRecord.of("refused", event, note="in the background"))
            return HookAnswer(denial=wording.describe_background(event))
        paths = None if event.paths is None else self._inside(event.paths)
        if self._place() != self._opened_at:
            self.close()
        if paths == () or self._calls.is_repeated(event):
            return HookAnswer()
        self.open(patience)
        self._calls.settle_ended()
        self._calls.settle_proved(event)
        self._calls.settle(call for call in self._calls if is_followed(call.event, event))
        if event.agent != "gemini":  # its id is that of the call before, whose end was never told
            self._calls.settle(self._calls.named_as(event))
        if paths is not None:
            if self._calls.group is None:
                self._calls.judge_loose()
            self._own_files.refresh()
            self._calls.begin_file(event, paths)
            return HookAnswer()
        until = monotonic() + patience
        while self._calls.group is not None and (left := until - monotonic()) > 0:
            self._turn.wait(left)
            if self._calls.is_repeated(event):
                return HookAnswer()
        if self._calls.group is None:
            self._calls.settle_files()
            self._calls.judge_loose()
            self._own_files.refresh()
        self._calls.begin_any(event)
        return HookAnswer()

    def _inside(self, paths: Sequence[str]) -> tuple[str, ...]:
        """The paths in the workspace, from its root."""
        found: list[str] = []
        for path in paths:
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            if real.startswith(f"{self._root}/"):
                found.append(os.path.relpath(real, self._root))
        return tuple(found)

    def _end(self, event: HookEvent) -> str:
        verdict = self._calls.end(event, self._verdict_seconds, rolls_back=self._settings.rollback_on_failure)
        if verdict is None and not self._calls.has_ended(event) and (event.paths is None or self._inside(event.paths)):
            self._log.append(GuardedCallRecord.of("unseen", event, note="guard was not told of its beginning"))
        return verdict or ""

    # Undo by a prompt.

    def _undo_prompt(self, event: HookEvent, n: int, patience: float) -> HookAnswer:
        key = (event.agent, event.session_id, event.prompt_id)
        if event.prompt_id and key in self._undone:
            return HookAnswer()
        try:
            self.open(min(self._overlap_seconds, patience))
        except WorkspaceLockedError as error:
            return HookAnswer(denial=f"ringfence guard: {error}")
        self._undone.add(key)
        self._calls.settle(call for call in self._calls if call.event.actor == event.actor)
        if busy := self._busy(min(self._verdict_seconds, patience)):
            return HookAnswer(denial=f"ringfence guard: {WorkspaceLockedError(self._workspace.root, busy)}")
        own = self._step_undo.calls_not_undone(event.session_id)
        if n > len(own):
            return HookAnswer(denial=f"ringfence guard: this session has {len(own)} steps, and {n} were to be undone")
        return HookAnswer(denial=self._step_undo.undo(own[:n]))
