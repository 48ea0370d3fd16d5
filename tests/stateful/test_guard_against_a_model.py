"""The calls of agents' own tools, interleaved with a person, commands in the background, lost ends and kills.

Every file is written once, so that it is known who wrote it. A call that names its file is never charged with another
change, nor is a person's edit a call's unless a command runs or may run. What is denied is gone, and what is innocent
stays, or is kept beside the history where it went back with what was denied. A guard is killed between two events, and
anywhere in one: then the agent's client tells it to the next guard, or is killed, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effort import amount
from failpoints import injected
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from killing import killed_at

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, HookAnswer, parse_event
from ringfence_sandbox import Workspace

ACTORS = (("s1", ""), ("s1", "helper"), ("s2", ""))
DENIED = "denied-"
MOST_POINTS = 45
"""An event has about so many; where it has fewer, the guard is killed after it."""
kills = st.one_of(st.none(), st.none(), st.integers(0, MOST_POINTS))


@dataclass(eq=False)
class Call:
    actor: tuple[str, str]
    number: int
    file: str | None
    """The file of a call that names one."""
    written: list[str] = field(default_factory=list)
    is_over: bool = False
    """Whether its program has ended. Its end may have been lost."""

    @property
    def payload(self) -> dict[str, Any]:
        held = {"command": str(self.number)} if self.file is None else {"file_path": self.file}
        return {
            "tool_name": "Bash" if self.file is None else "Write",
            "tool_input": held,
            "tool_use_id": f"call-{self.number}",
        }


@dataclass(eq=False)
class Group:
    calls: list[Call] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    """What a person, or a command in the background, wrote meanwhile."""
    is_torn: bool = False
    """Whether a guard was killed while it settled some of it: it may have gone back as a whole, or half."""


class GuardIsFair(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp())
        self.root = self.base / "root"
        self.root.mkdir()
        self.workspace = Workspace.open(self.root, store=self.base / "store")
        self.log = GuardLog(self.base)
        self.guard = self.started()
        self.open: list[Call] = []
        self.group: Group | None = None
        self.calls = 0
        self.files = 0
        self.may_run: set[str] = set()
        """The sessions of which a command may still run after its call."""
        self.loose: list[str] = []
        """What such a command wrote between calls, and no event has judged since."""
        self.present: set[str] = set()
        self.gone: set[str] = set()
        self.owners: dict[str, set[int]] = {}
        """By file, the calls whose step it may be. A person's is nobody's."""

    def started(self) -> GuardedCalls:
        """A guard, which goes on with what an earlier one had begun."""
        return GuardedCalls(
            self.root,
            self.log,
            open_workspace=lambda: self.workspace,
            policies=[PathPolicy(deny=[f"/{DENIED}*"])],
            overlap_seconds=0.0,
            verdict_seconds=0.0,
            state=self.base,
        )

    def teardown(self) -> None:
        kept = {path for entry in self.workspace.aborted() for path in entry.paths}
        assert self.gone <= kept, "a copy is kept of all that went back"
        self.workspace.close()
        shutil.rmtree(self.base)

    def restart(self) -> None:
        self.workspace = Workspace.open(self.root, store=self.base / "store", look_first=False)
        self.guard = self.started()

    def killed_within(self, point: int, work: Callable[[], object]) -> None:
        """Have another guard do the work, and kill it at some point of that."""
        self.workspace.close()

        def in_child(before: Callable[[str], None]) -> None:
            self.restart()
            name_writes(before)
            with injected(before):
                work()

        killed_at(point, in_child)
        self.restart()

    def tell(self, name: str, actor: tuple[str, str], kill: int | None, **more: Any) -> HookAnswer:
        """Tell an event, which may kill the guard. The client tells it to the next one then."""
        session, helper = actor
        payload = {"hook_event_name": name, "session_id": session, "cwd": str(self.root), **more}
        event = parse_event("claude", {**payload, **({"agent_id": helper} if helper else {})})
        if kill is not None:
            self.killed_within(kill, lambda: self.guard.handle(event))
        return self.guard.handle(event)

    def tell_unheard(self, name: str, actor: tuple[str, str], kill: int, **more: Any) -> None:
        """Tell an event which kills the guard, and the client, too."""
        session, helper = actor
        payload = {"hook_event_name": name, "session_id": session, "cwd": str(self.root), **more}
        event = parse_event("claude", {**payload, **({"agent_id": helper} if helper else {})})
        self.killed_within(kill, lambda: self.guard.handle(event))

    def is_known(self, call: Call) -> bool:
        return any(event.call_id == f"call-{call.number}" for event in self.guard.open_calls)

    def new_file(self, denied: bool) -> str:
        self.files += 1
        return f"{DENIED if denied else 'file-'}{self.files}"

    def write(self, name: str) -> None:
        (self.root / name).write_text(name)

    @rule()
    def guard_is_killed(self) -> None:
        self.workspace.close()
        self.restart()

    @precondition(lambda self: len(self.open) < 5)
    @rule(actor=st.sampled_from(ACTORS), kill=kills)
    def begin_command(self, actor: tuple[str, str], kill: int | None) -> None:
        self.calls += 1
        call = Call(actor, self.calls, None)
        assert self.tell("PreToolUse", actor, kill, **call.payload) == HookAnswer()
        self.begun(call)

    @precondition(lambda self: len(self.open) < 5)
    @rule(actor=st.sampled_from(ACTORS), denied=st.booleans(), kill=kills)
    def begin_file(self, actor: tuple[str, str], denied: bool, kill: int | None) -> None:
        self.calls += 1
        call = Call(actor, self.calls, str(self.root / self.new_file(denied)))
        assert self.tell("PreToolUse", actor, kill, **call.payload) == HookAnswer()
        self.begun(call)

    @precondition(lambda self: len(self.open) < 5)
    @rule(actor=st.sampled_from(ACTORS), named=st.booleans(), kill=st.integers(0, MOST_POINTS))
    def begin_and_all_is_killed(self, actor: tuple[str, str], named: bool, kill: int) -> None:
        self.calls += 1
        call = Call(actor, self.calls, str(self.root / self.new_file(False)) if named else None, is_over=True)
        self.tell_unheard("PreToolUse", actor, kill, **call.payload)
        if self.is_known(call):  # of a call that never runs
            self.begun(call)

    def begun(self, call: Call) -> None:
        if self.group is None:
            self.judge_loose()
        self.open.append(call)
        if call.file is None:
            if self.group is None:
                self.group = Group()
            self.group.calls.append(call)

    @precondition(lambda self: any(call.file is None and not call.is_over for call in self.open))
    @rule(data=st.data(), denied=st.booleans())
    def command_writes(self, data: st.DataObject, denied: bool) -> None:
        call = data.draw(st.sampled_from([call for call in self.open if call.file is None and not call.is_over]))
        name = self.new_file(denied and data.draw(st.booleans()))
        self.write(name)
        call.written.append(name)

    @precondition(lambda self: any(call.file and not call.written and not call.is_over for call in self.open))
    @rule(data=st.data())
    def file_is_written(self, data: st.DataObject) -> None:
        calls = [call for call in self.open if call.file and not call.written and not call.is_over]
        call = data.draw(st.sampled_from(calls))
        assert call.file is not None
        name = Path(call.file).name
        self.write(name)
        call.written.append(name)

    @rule(denied=st.booleans())
    def person_writes(self, denied: bool) -> None:
        name = self.new_file(denied and not self.may_run)
        self.write(name)
        if self.group is not None:
            self.group.beside.append(name)
        else:
            self.present.add(name)
            self.owners[name] = set()

    @precondition(lambda self: self.may_run)
    @rule(denied=st.booleans())
    def background_writes(self, denied: bool) -> None:
        name = self.new_file(denied)
        self.write(name)
        (self.loose if self.group is None else self.group.beside).append(name)

    def judge_loose(self) -> None:
        for name in self.loose:
            self.settle(name, set(), name.startswith(DENIED))
        self.loose = []

    @precondition(lambda self: any(not call.is_over for call in self.open))
    @rule(data=st.data(), kill=kills)
    def end(self, data: st.DataObject, kill: int | None) -> None:
        call = data.draw(st.sampled_from([call for call in self.open if not call.is_over]))
        if kill is not None and self.group is not None:
            self.group.is_torn = True
        answer = self.tell("PostToolUse", call.actor, kill, **call.payload, tool_response={})
        self.ended([call], answer if kill is None else None)

    @precondition(lambda self: any(not call.is_over for call in self.open))
    @rule(data=st.data(), kill=st.integers(0, MOST_POINTS))
    def end_and_all_is_killed(self, data: st.DataObject, kill: int) -> None:
        call = data.draw(st.sampled_from([call for call in self.open if not call.is_over]))
        call.is_over = True
        if self.group is not None:
            self.group.is_torn = True
        self.tell_unheard("PostToolUse", call.actor, kill, **call.payload, tool_response={})
        if not self.is_known(call):
            self.ended([call], None)

    @rule(actor=st.sampled_from(ACTORS), kill=kills)
    def turn_ends(self, actor: tuple[str, str], kill: int | None) -> None:
        lost = [call for call in self.open if call.actor == actor]
        self.settled(lost, lambda: self.tell("SubagentStop" if actor[1] else "Stop", actor, kill), kill)

    @rule(session=st.sampled_from(["s1", "s2"]), kill=kills)
    def agent_dies(self, session: str, kill: int | None) -> None:
        lost = [call for call in self.open if call.actor[0] == session]

        def end() -> None:
            if kill is not None:
                self.killed_within(kill, lambda: self.guard.end_session("claude", session))
            self.guard.end_session("claude", session)

        had_any = bool(self.may_run) or any(call.file is None for call in lost)
        self.settled(lost, end, kill)
        if self.group is None and had_any:
            self.judge_loose()
        self.may_run.discard(session)

    def settled(self, lost: list[Call], tell: Callable[[], object], kill: int | None) -> None:
        commands = [call for call in lost if call.file is None]
        # A command alone, whose end is never told, keeps what is not denied of it.
        is_apart = self.group is not None and self.group.calls == commands and len(commands) == 1
        if kill is not None and self.group is not None and not is_apart:
            self.group.is_torn = True
        tell()
        self.may_run |= {call.actor[0] for call in commands}
        self.ended(lost, None, is_apart=is_apart)

    def ended(self, calls: list[Call], answer: HookAnswer | None, *, is_apart: bool = False) -> None:
        for call in calls:
            self.open.remove(call)
            if call.file is not None:
                for name in call.written:
                    self.settle(name, {call.number}, name.startswith(DENIED))
                if answer is not None:
                    assert bool(answer.verdict) == any(name.startswith(DENIED) for name in call.written)
        group = self.group
        if group is None or any(call.file is None for call in self.open):
            return
        self.group = None
        written = [*group.beside, *(name for call in group.calls for name in call.written)]
        is_denied = any(name.startswith(DENIED) for name in written)
        if answer is not None and not group.is_torn:
            assert bool(answer.verdict) == is_denied
        for name in written:
            goes = name.startswith(DENIED) if is_apart else is_denied
            if group.is_torn and is_denied and not name.startswith(DENIED):
                goes = not (self.root / name).exists()
            self.settle(name, {call.number for call in group.calls}, goes)

    def settle(self, name: str, owners: set[int], goes: bool) -> None:
        self.owners[name] = owners
        (self.gone if goes else self.present).add(name)

    @invariant()
    def what_is_denied_is_gone_and_all_else_is_there(self) -> None:
        here = {path.name for path in self.root.iterdir() if path.is_file()}
        assert self.present <= here
        assert not self.gone & here

    @invariant()
    def no_call_is_charged_with_anothers_change(self) -> None:
        for record in self.log.read():
            if record.kind in ("kept", "denied") and record.tool:
                number = int(record.arguments) if record.tool == "Bash" else None
                for path in record.paths:
                    owners = self.owners.get(path)
                    if number is not None and owners is not None:
                        assert number in owners, (record, owners)
                    elif number is None:
                        assert record.arguments == str(self.root / path), record


def name_writes(before: Callable[[str], None]) -> None:
    """Have a forked child, which ends soon, name each file that it opens or replaces, besides the points of the
    history."""

    def named(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            before(real.__name__)
            return real(*arguments, **options)

        return call

    for name in ("open", "replace"):
        setattr(os, name, named(getattr(os, name)))


TestGuardIsFair = GuardIsFair.TestCase
TestGuardIsFair.settings = settings(max_examples=amount(prove=400, test=12), stateful_step_count=25, deadline=None)
