"""Calls whose end is told by nothing but the agent's own record of its session."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, sleep
from typing import Any

import pytest

from ringfence.prompt import PathPolicy
from ringfence_guard import AgentName, GuardedCalls, GuardLog, HookAnswer, HookEvent, open_guarded, parse_event
from ringfence_sandbox import Workspace

REFUSED: dict[str, Any] = {"toolUseResult": "User rejected tool use", "toolDenialKind": "user-rejected"}


@pytest.fixture
def log(root: Path) -> GuardLog:
    return GuardLog(root.parent)


@pytest.fixture
def calls(root: Path, log: GuardLog) -> Generator[GuardedCalls]:
    made = GuardedCalls(
        root,
        log,
        open_workspace=partial(open_guarded, str(root)),
        policies=[PathPolicy(deny=["/protected"])],
        overlap_seconds=0.1,
        verdict_seconds=0.1,
    )
    yield made
    made.close()


class Told:
    """What an agent's hooks tell of one session, and what its record has."""

    def __init__(self, root: Path, calls: GuardedCalls, agent: AgentName = "claude", **common: Any) -> None:
        self.root, self.calls = root, calls
        self.agent: AgentName = agent
        self.record = root.parent / "record.jsonl"
        self.common: dict[str, Any] = {
            "session_id": "s",
            "cwd": str(root),
            "prompt_id": "p",
            "transcript_path": str(self.record),
        }
        self.common |= common

    def event(self, name: str, **more: Any) -> HookEvent:
        return parse_event(self.agent, {"hook_event_name": name, **self.common, **more})

    def tell(self, name: str, **more: Any) -> HookAnswer:
        return self.calls.handle(self.event(name, **more))

    def begin(self, command: str, call_id: str = "c1", **more: Any) -> None:
        given = {"tool_name": "Bash", "tool_use_id": call_id, **more}
        assert self.tell("PreToolUse", tool_input={"command": command}, **given) == HookAnswer()

    def begin_write(self, name: str, call_id: str) -> None:
        arguments = {"file_path": str(self.root / name), "content": ""}
        self.tell("PreToolUse", tool_name="Write", tool_use_id=call_id, tool_input=arguments)

    def write(self, name: str, text: str = "x\n") -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text)

    def put(self, *lines: object, path: Path | None = None) -> None:
        path = path or self.record
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def put_result(self, call_id: str = "c1", path: Path | None = None, **more: Any) -> None:
        content = [{"type": "tool_result", "tool_use_id": call_id, "is_error": True, "content": "no"}]
        self.put({"type": "user", "message": {"role": "user", "content": content}, **more}, path=path)

    def open(self) -> list[str]:
        return [event.arguments for event in self.calls.open_calls]


@pytest.fixture
def claude(root: Path, calls: GuardedCalls) -> Told:
    return Told(root, calls)


def steps(root: Path) -> list[tuple[str, tuple[str, ...]]]:
    with Workspace.open(root, read_only=True) as workspace:
        return [(step.tool, step.paths) for step in workspace.steps()]


def test_an_undo_does_not_wait_for_a_call_that_the_record_shows_to_be_over(claude: Told) -> None:
    claude.begin("echo half > half.txt; sleep 60")
    claude.write("half.txt")
    claude.put_result(**REFUSED)
    claude.write("person.txt")
    assert "half.txt" in claude.calls.undo(1)
    assert claude.open() == []


def test_nor_does_a_command_that_opens_the_directory(claude: Told) -> None:
    claude.begin("sleep 60")
    claude.put_result(**REFUSED)
    assert claude.calls.lend(lambda: None) == ""


def test_nor_is_such_a_call_among_those_that_go_on(claude: Told) -> None:
    claude.begin("sleep 60")
    claude.calls.settle_proved()
    assert claude.open() == ["sleep 60"]
    claude.put_result(**REFUSED)
    claude.calls.settle_proved()
    assert claude.open() == []


@pytest.mark.parametrize("name", ["SessionStart", "PostToolUse", "PreToolUse", "SubagentStop"])
def test_any_event_settles_it(claude: Told, calls: GuardedCalls, root: Path, name: str) -> None:
    claude.begin("first")
    claude.write("half.txt")
    claude.put_result(**REFUSED)
    other = Told(root, calls, session_id="other", transcript_path="")
    other.tell(name, tool_name="Bash", tool_input={"command": "second"}, tool_use_id="c2")
    assert "first" not in claude.open()
    assert steps(root) == [("Bash", ("half.txt",))]


def test_what_a_person_does_after_such_a_call_is_theirs(claude: Told, root: Path) -> None:
    claude.begin("first")
    claude.put_result(**REFUSED)
    claude.calls.settle_proved()
    claude.write("protected/mine.txt")
    claude.begin("second", "c2")
    assert (root / "protected/mine.txt").exists()


def test_the_beginning_of_a_call_in_the_record_is_no_result(claude: Told) -> None:
    claude.begin("grep -r tool_result build_output")
    call = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "grep -r tool_result build_output"}}
    claude.put({"type": "assistant", "provenance": "assistant_output", "message": {"content": [call]}})
    claude.calls.settle_proved()
    assert len(claude.open()) == 1


def test_a_result_from_before_a_call_is_that_of_another_one(claude: Told) -> None:
    claude.put_result()
    claude.begin("first")
    claude.calls.settle_proved()
    assert claude.open() == ["first"]


def test_a_sub_agents_call_has_its_result_in_a_record_of_its_own(root: Path, calls: GuardedCalls) -> None:
    helper = Told(root, calls, agent_id="helper")
    helper.begin("first")
    own = helper.record.with_suffix("") / "subagents/agent-helper.jsonl"
    helper.put_result(path=own, **REFUSED)
    calls.settle_proved()
    assert helper.open() == []


def test_qwen_codes_record_has_results_as_parts(root: Path, calls: GuardedCalls) -> None:
    qwen = Told(root, calls, "qwen")
    qwen.begin("first", "toolu_1", tool_name="run_shell_command", tool_call_id="c1")
    made = {"functionCall": {"id": "c1", "name": "run_shell_command", "args": {"command": "first"}}}
    qwen.put({"type": "assistant", "provenance": "assistant_output", "message": {"role": "model", "parts": [made]}})
    calls.settle_proved()
    assert qwen.open() == ["first"]
    answer = {"functionResponse": {"id": "c1", "name": "run_shell_command", "response": {"output": ""}}}
    qwen.put({"type": "tool_result", "message": {"role": "user", "parts": [answer]}})
    calls.settle_proved()
    assert qwen.open() == []


def test_codexs_record_says_which_command_has_ended_and_which_goes_on(root: Path, calls: GuardedCalls) -> None:
    codex = Told(root, calls, "codex")
    for command, call_id, has_ended in (("ended", "c1", True), ("goes on", "c2", False)):
        codex.begin(command, call_id)
        item = {"type": "CommandExecution", "id": call_id, "status": "completed", "exit_code": 0}
        if has_ended:
            codex.put({"type": "event_msg", "payload": {"type": "item_completed", "item": item}})
        output = {"type": "function_call_output", "call_id": call_id, "output": "Chunk ID"}
        codex.put({"type": "response_item", "payload": output})
        calls.settle_proved()
        assert codex.open() == []
        codex.write(f"protected/{call_id}")
        codex.tell("UserPromptSubmit", prompt="go on", prompt_id=call_id)
        codex.begin("true", f"{call_id}-next")
        codex.tell("PostToolUse", tool_name="Bash", tool_use_id=f"{call_id}-next", tool_response="")
        assert (root / f"protected/{call_id}").exists() == has_ended


def test_gemini_clis_record_has_results_beside_the_arguments_of_their_calls(root: Path, calls: GuardedCalls) -> None:
    gemini = Told(root, calls, "gemini")
    arguments = {"command": "first", "description": "run"}
    named = {"tool_name": "run_shell_command", "tool_input": arguments}
    gemini.tell("BeforeTool", **named)
    made: dict[str, Any] = {"id": "x", "name": "run_shell_command", "args": arguments, "status": "executing"}
    gemini.put({"type": "gemini", "toolCalls": [made]})
    calls.settle_proved()
    assert gemini.open() == ["first"]
    result: list[Any] = [{"functionResponse": {}}]
    gemini.put({"type": "gemini", "toolCalls": [{**made, "result": result, "status": "cancelled"}]})
    calls.settle_proved()
    assert gemini.open() == []


def test_a_line_that_is_being_written_and_a_record_that_is_gone_say_nothing(claude: Told) -> None:
    claude.begin("first")
    claude.calls.settle_proved()
    claude.record.write_text('{"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "c1"')
    claude.calls.settle_proved()
    assert claude.open() == ["first"]


def test_the_next_call_shows_that_a_file_has_been_written(claude: Told, root: Path) -> None:
    claude.begin_write("a.txt", "c1")
    claude.write("a.txt", "new\n")
    claude.begin_write("b.txt", "c2")
    assert claude.open() == [str(root / "b.txt")]
    claude.begin("true", "c3")
    assert claude.open() == ["true"]
    assert steps(root) == [("Write", ("a.txt",))]


def test_but_not_that_of_a_sub_agent(claude: Told, root: Path, calls: GuardedCalls) -> None:
    claude.begin_write("a.txt", "c1")
    Told(root, calls, agent_id="helper").begin_write("b.txt", "c2")
    assert len(claude.open()) == 2


@pytest.mark.parametrize("tool", ["Bash", "Write"])
def test_what_changes_while_a_dialog_waits_is_a_persons_if_they_say_no(
    claude: Told, root: Path, log: GuardLog, tool: str
) -> None:
    (root / "protected").mkdir()
    if tool == "Bash":
        claude.begin("first")
    else:
        claude.begin_write("protected/mine.txt", "c1")
    claude.write("protected/mine.txt")
    claude.put_result(toolDenialBeforeRun=True, **REFUSED)
    claude.calls.settle_proved()
    assert claude.open() == []
    assert (root / "protected/mine.txt").exists()
    claude.begin("second", "c2")
    claude.tell("PostToolUse", tool_name="Bash", tool_use_id="c2")
    assert (root / "protected/mine.txt").exists()
    assert steps(root) == []
    assert [(one.kind, one.note) for one in log.read()] == [("refused", "it was not permitted, and did not run")]


def test_a_call_that_was_not_permitted_leaves_one_that_it_overlaps_alone(
    claude: Told, root: Path, calls: GuardedCalls
) -> None:
    other = Told(root, calls, session_id="other", transcript_path="")
    other.begin("slow", "c0")
    claude.begin("first")
    claude.write("slow.txt")
    claude.put_result(toolDenialBeforeRun=True, **REFUSED)
    other.tell("PostToolUse", tool_name="Bash", tool_use_id="c0")
    assert claude.open() == []
    assert steps(root) == [("Bash", ("slow.txt",))]


@pytest.fixture
def dialog(root: Path, log: GuardLog) -> Generator[Dialog]:
    policies = [PathPolicy(deny=["/protected"])]
    opened = partial(open_guarded, str(root))
    made = GuardedCalls(root, log, open_workspace=opened, policies=policies, slack_seconds=0.02)
    yield Dialog(root, made)
    made.close()


class Dialog(Told):
    """A call of Claude Code that a person has to permit."""

    started = 0.0

    def permit(self) -> None:
        sleep(0.1)
        self.started = clock_gettime(CLOCK_BOOTTIME)

    def end(self) -> str:
        now = clock_gettime(CLOCK_BOOTTIME)
        more: dict[str, Any] = {"tool_response": {}, "duration_ms": (now - self.started) * 1000}
        event = self.event("PostToolUse", tool_name="Bash", tool_use_id="c1", **more)
        return self.calls.handle(replace(event, hooked_at=now)).verdict


def test_what_changes_while_a_dialog_waits_is_a_persons_if_they_say_yes(dialog: Dialog, root: Path) -> None:
    for name in ("protected/old.txt", "old/b.txt"):
        dialog.write(name)
    dialog.begin("make")
    dialog.write("protected/mine.txt")
    (root / "old/b.txt").unlink()
    dialog.permit()
    dialog.write("src/made.txt")
    assert dialog.end() == ""
    assert (root / "protected/mine.txt").exists()
    assert steps(root) == [("Bash", ("src", "src/made.txt"))]


def test_what_a_call_does_after_the_dialog_is_judged(dialog: Dialog, root: Path) -> None:
    dialog.write("elsewhere/old.txt")
    dialog.begin("mv elsewhere protected")
    dialog.write("person.txt")
    dialog.permit()
    (root / "elsewhere").rename(root / "protected")
    assert "protected" in dialog.end()
    assert not (root / "protected").exists()
    assert (root / "elsewhere/old.txt").exists()
    assert (root / "person.txt").exists()


def test_a_call_that_ran_all_the_time_is_judged_as_a_whole(dialog: Dialog, root: Path) -> None:
    dialog.started = clock_gettime(CLOCK_BOOTTIME)
    dialog.begin("make")
    dialog.write("protected/x")
    assert "protected" in dialog.end()
    assert not (root / "protected").exists()
