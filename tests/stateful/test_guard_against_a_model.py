"""The calls of agents' own tools, interleaved with a person, lost ends and kills, against what each writer wrote.

Every file is written once, so that it is known who wrote it. A call that names its file is never charged with another
change, nor is a person's edit a call's unless a command runs or may run. What is denied is gone, and what is innocent
stays.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effort import amount
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ringfence.prompt import PathPolicy
from ringfence_guard import GuardedCalls, GuardLog, HookAnswer, parse_event
from ringfence_sandbox import Workspace

ACTORS = (("s1", ""), ("s1", "helper"), ("s2", ""))
DENIED = "denied-"


@dataclass(eq=False)
class Call:
    actor: tuple[str, str]
    number: int
    file: str | None
    """The file of a call that names one."""
    written: list[str] = field(default_factory=list)

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
    """What a person wrote meanwhile."""


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
        self.may_run = False
        """Whether a command may still run after its call."""
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
        self.workspace.close()
        shutil.rmtree(self.base)

    def tell(self, name: str, actor: tuple[str, str], **more: Any) -> HookAnswer:
        session, helper = actor
        payload = {"hook_event_name": name, "session_id": session, "cwd": str(self.root), **more}
        return self.guard.handle(parse_event("claude", {**payload, **({"agent_id": helper} if helper else {})}))

    def new_file(self, denied: bool) -> str:
        self.files += 1
        return f"{DENIED if denied else 'file-'}{self.files}"

    def write(self, name: str) -> None:
        (self.root / name).write_text(name)

    @rule()
    def guard_is_killed(self) -> None:
        self.workspace.close()
        self.workspace = Workspace.open(self.root, store=self.base / "store", look_first=False)
        self.guard = self.started()

    @precondition(lambda self: len(self.open) < 5)
    @rule(actor=st.sampled_from(ACTORS))
    def begin_command(self, actor: tuple[str, str]) -> None:
        self.calls += 1
        call = Call(actor, self.calls, None)
        assert self.tell("PreToolUse", actor, **call.payload) == HookAnswer()
        if self.group is None:
            self.group = Group()
        self.group.calls.append(call)
        self.open.append(call)

    @precondition(lambda self: len(self.open) < 5)
    @rule(actor=st.sampled_from(ACTORS), denied=st.booleans())
    def begin_file(self, actor: tuple[str, str], denied: bool) -> None:
        self.calls += 1
        call = Call(actor, self.calls, str(self.root / self.new_file(denied)))
        assert self.tell("PreToolUse", actor, **call.payload) == HookAnswer()
        self.open.append(call)

    @precondition(lambda self: any(call.file is None for call in self.open))
    @rule(data=st.data(), denied=st.booleans())
    def command_writes(self, data: st.DataObject, denied: bool) -> None:
        call = data.draw(st.sampled_from([call for call in self.open if call.file is None]))
        name = self.new_file(denied and data.draw(st.booleans()))
        self.write(name)
        call.written.append(name)

    @precondition(lambda self: any(call.file and not call.written for call in self.open))
    @rule(data=st.data())
    def file_is_written(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from([call for call in self.open if call.file and not call.written]))
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

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.open))
        answer = self.tell("PostToolUse", call.actor, **call.payload, tool_response={})
        self.ended([call], answer)

    @rule(actor=st.sampled_from(ACTORS))
    def turn_ends(self, actor: tuple[str, str]) -> None:
        lost = [call for call in self.open if call.actor == actor]
        commands = [call for call in lost if call.file is None]
        # A command alone, whose end is never told, keeps what is not denied of it.
        is_apart = self.group is not None and self.group.calls == commands and len(commands) == 1
        self.tell("SubagentStop" if actor[1] else "Stop", actor)
        self.may_run = self.may_run or bool(commands)
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
        if answer is not None:
            assert bool(answer.verdict) == is_denied
        for name in written:
            goes = name.startswith(DENIED) if is_apart else is_denied
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


TestGuardIsFair = GuardIsFair.TestCase
TestGuardIsFair.settings = settings(max_examples=amount(prove=1000, test=15), stateful_step_count=25, deadline=None)
