"""Events that real agents' hooks have recorded, as one type, and the answers that each agent takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence_guard import AgentName, HookAnswer, HookEvent, can_take_context, format_answer, parse_event

PAYLOADS = Path(__file__).parent / "payloads"
AGENTS: tuple[AgentName, ...] = ("claude", "codex", "gemini", "opencode", "qwen")
SHELLS = {
    "claude": "Bash",
    "codex": "Bash",
    "gemini": "run_shell_command",
    "opencode": "bash",
    "qwen": "run_shell_command",
}


def payloads(agent: AgentName) -> Iterator[dict[str, Any]]:
    for line in (PAYLOADS / f"{agent}.jsonl").read_text().splitlines():
        record = json.loads(line)
        payload = record["stdin"]
        if agent == "opencode":  # as its plug-in makes them
            output = record.get("output_arg", {})
            name = record["event"].removeprefix("event:")
            payload = {"hook_event_name": name, "cwd": "/runs/cwd", "output": output, **payload}
        yield payload


def events(agent: AgentName) -> list[HookEvent]:
    return [parse_event(agent, payload) for payload in payloads(agent)]


def called(agent: AgentName, phase: str, tool: str) -> HookEvent:
    return next(one for one in events(agent) if (one.phase, one.tool) == (phase, tool))


@pytest.mark.parametrize("agent", AGENTS)
def test_every_recorded_event_says_what_it_is_and_of_which_session(agent: AgentName) -> None:
    found = events(agent)
    assert {"before", "after", "session_start", "prompt"} <= {one.phase for one in found}
    for one in found:
        if one.phase in ("before", "after", "failed"):
            assert one.session_id
            assert one.tool
            assert one.call_id
            assert one.arguments
            assert "\n" not in one.arguments
            assert bool(one.transcript) == (agent != "opencode")


@pytest.mark.parametrize("agent", AGENTS)
def test_the_end_of_a_call_has_the_name_of_its_beginning(agent: AgentName) -> None:
    begun = {(one.session_id, one.call_id): one for one in events(agent) if one.phase == "before"}
    ended = [one for one in events(agent) if one.phase == "after"]
    assert ended
    for one in ended:
        begin = begun[one.session_id, one.call_id]
        assert (begin.actor, begin.tool, begin.paths) == (one.actor, one.tool, one.paths)


@pytest.mark.parametrize(
    ("agent", "tool"),
    [
        ("claude", "Write"),
        ("codex", "apply_patch"),
        ("gemini", "write_file"),
        ("opencode", "write"),
        ("qwen", "write_file"),
    ],
)
def test_a_tool_for_files_names_its_path(agent: AgentName, tool: str) -> None:
    event = called(agent, "before", tool)
    assert event.paths is not None
    assert [Path(path).name for path in event.paths] == ["a.txt"]
    assert Path(event.paths[0]).is_absolute()


@pytest.mark.parametrize("agent", AGENTS)
def test_a_command_names_no_path_and_its_line_is_kept(agent: AgentName) -> None:
    event = called(agent, "before", SHELLS[agent])
    assert event.paths is None
    assert "echo" in event.arguments


def test_a_patch_names_all_its_files() -> None:
    hunks = "*** Update File: a/b.txt\n*** Move to: c.txt\n@@\n-x\n+y\n*** Delete File: /abs/d\n"
    patch = f"*** Begin Patch\n{hunks}*** End Patch"
    payload = {
        "hook_event_name": "PreToolUse",
        "session_id": "s",
        "cwd": "/w",
        "tool_name": "apply_patch",
        "tool_input": {"command": patch},
        "tool_use_id": "1",
    }
    assert parse_event("codex", payload).paths == ("/w/a/b.txt", "/w/c.txt", "/abs/d")


def test_a_tool_for_files_that_names_none_may_change_any() -> None:
    payload = {
        "hook_event_name": "PreToolUse",
        "session_id": "s",
        "cwd": "/w",
        "tool_name": "Write",
        "tool_use_id": "1",
    }
    assert parse_event("claude", payload).paths is None


@pytest.mark.parametrize(
    ("agent", "phase", "code"),
    [
        ("claude", "after", 0),
        ("claude", "failed", 1),
        ("qwen", "after", 0),
        ("qwen", "failed", 1),
        ("opencode", "after", 0),
    ],
)
def test_an_exit_code_is_read_where_the_agent_tells_it(agent: AgentName, phase: str, code: int) -> None:
    assert called(agent, phase, SHELLS[agent]).exit_code == code


@pytest.mark.parametrize("agent", ["codex", "gemini"])
def test_no_exit_code_is_guessed_where_the_agent_tells_none(agent: AgentName) -> None:
    assert called(agent, "after", SHELLS[agent]).exit_code is None


@pytest.mark.parametrize("agent", ["claude", "codex", "qwen"])
def test_a_sub_agents_call_is_told_from_the_main_agents(agent: AgentName) -> None:
    actors = {(one.session_id, one.subagent) for one in events(agent) if one.phase == "before"}
    sessions = {session for session, subagent in actors if subagent}
    assert sessions
    assert any((session, "") in actors for session in sessions)


def test_commands_in_the_background_are_known() -> None:
    bash = {"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "Bash", "tool_use_id": "1"}
    assert parse_event("claude", {**bash, "tool_input": {"command": "x", "run_in_background": True}}).is_background
    assert not called("qwen", "before", "run_shell_command").is_background
    assert [one.has_background for one in events("claude") if one.phase == "stop"] == [False]
    assert next(one.has_background for one in events("codex") if one.phase == "stop") is None
    stop = {"hook_event_name": "Stop", "session_id": "s"}
    running = [{"type": "subagent", "status": "running", "agent_type": "x"}]
    assert parse_event("claude", {**stop, "background_tasks": running}).has_background is False
    running.append({"type": "shell", "status": "running"})
    assert parse_event("claude", {**stop, "background_tasks": running}).has_background is True


@pytest.mark.parametrize(
    ("command", "detaches"),
    [
        ("sleep 60 &", True),
        ("(sleep 60 & echo x) > log", True),
        ("nohup sleep 60 > log", True),
        ("cd x && setsid -f ./serve", True),
        ("A=1 nohup ./serve; true", True),
        ("if true; then nohup ./serve; fi", True),
        ("bash <<'EOF'\nsleep 60 &\nEOF", True),
        ("cat > a <<EOF\nx\nEOF\nsleep 60 &", True),
        ("cat > a <<EOF & \nx\nEOF", True),
        ("make test && echo done 2>&1", False),
        ("cat > index.html <<'EOF'\n<p>Terms &amp; conditions</p>\nEOF", False),
        ("python3 - <<'EOF'\nprint(1 & 2)\nEOF", False),
        ("echo $((3 & 1))", False),
        ("echo done # a & b", False),
        ("# a & b\nmake", False),
        ("cat nohup.out", False),
        ("grep -r disown .", False),
        ("echo 'a & b' \"& c\"", False),
        ("sleep 1 & wait", False),
    ],
)
def test_a_command_line_that_leaves_a_program_running_is_told_by_its_commands(command: str, detaches: bool) -> None:
    payload = {"hook_event_name": "PreToolUse", "session_id": "s", "tool_name": "Bash", "tool_use_id": "1"}
    assert parse_event("claude", {**payload, "tool_input": {"command": command}}).is_detached is detaches


@pytest.mark.parametrize("payload", [None, [], "text", {}, {"hook_event_name": 3}])
def test_what_is_no_event_is_refused(payload: object) -> None:
    with pytest.raises(ValueError, match="event of claude"):
        parse_event("claude", payload)


def test_an_unknown_event_is_some_other_event() -> None:
    assert parse_event("gemini", {"hook_event_name": "PreCompress"}).phase == "other"


def test_odd_values_of_parts_are_as_if_they_were_not_there() -> None:
    payload = {
        "hook_event_name": "PostToolUse",
        "session_id": ["s"],
        "cwd": None,
        "tool_name": "Bash",
        "tool_input": "x",
        "tool_response": {"stdout": 3, "interrupted": 0},
    }
    event = parse_event("claude", payload)
    assert (event.session_id, event.cwd, event.arguments, event.exit_code) == ("", "", "{}", None)


def test_long_arguments_are_cut() -> None:
    payload = {"hook_event_name": "PreToolUse", "tool_name": "Bash", "tool_input": {"command": "x\n" * 500}}
    event = parse_event("claude", payload)
    assert len(event.arguments) == 200
    assert event.arguments.endswith("...")


def answered(event: HookEvent, **texts: str) -> Any:
    output = format_answer(event, HookAnswer(**texts))
    assert (output.stderr, output.exit_code) == ("", 0)
    return json.loads(output.stdout) if output.stdout else None


DENIED = {
    "hookSpecificOutput": {
        "hookEventName": "PreToolUse",
        "permissionDecision": "deny",
        "permissionDecisionReason": "no",
    }
}


@pytest.mark.parametrize(
    ("agent", "answer"),
    [
        ("claude", DENIED),
        ("codex", DENIED),
        ("gemini", {"decision": "deny", "reason": "no"}),
        ("qwen", DENIED),
        ("opencode", {"deny": "no"}),
    ],
)
def test_a_call_is_denied_before_it_runs(agent: AgentName, answer: object) -> None:
    assert answered(called(agent, "before", SHELLS[agent]), denial="no") == answer


@pytest.mark.parametrize(
    ("agent", "answer"),
    [
        (
            "claude",
            {
                "decision": "block",
                "reason": "back",
                "hookSpecificOutput": {
                    "hookEventName": "PostToolUse",
                    "updatedToolOutput": {
                        "stdout": "done",
                        "stderr": "back",
                        "interrupted": False,
                        "isImage": False,
                        "noOutputExpected": False,
                    },
                },
            },
        ),
        ("codex", {"decision": "block", "reason": "back"}),
        ("gemini", {"decision": "deny", "reason": "back"}),
        ("qwen", {"hookSpecificOutput": {"hookEventName": "PostToolUse", "additionalContext": "back"}}),
        ("opencode", {"replace": "back"}),
    ],
)
def test_a_verdict_comes_with_the_result_of_its_call(agent: AgentName, answer: object) -> None:
    assert answered(called(agent, "after", SHELLS[agent]), verdict="back") == answer


@pytest.mark.parametrize(("agent", "shown"), [("claude", "yours"), ("codex", None), ("gemini", None)])
@pytest.mark.parametrize("verdict", ["", "back"])
def test_what_a_person_is_to_see_is_shown_by_claude(agent: AgentName, shown: str | None, verdict: str) -> None:
    answer = answered(called(agent, "after", SHELLS[agent]), context="late", person="yours", verdict=verdict)
    assert answer.get("systemMessage") == shown


def test_a_result_of_claude_whose_words_are_its_own_says_it_beside_the_path() -> None:
    event = called("claude", "after", "Write")
    answer = answered(event, verdict="back")
    shown = answer["hookSpecificOutput"]["updatedToolOutput"]
    assert shown == {**event.result, "filePath": f"{event.result['filePath']}, BUT back"}
    assert (answer["decision"], answer["reason"]) == ("block", "back")


def test_a_result_that_claude_lets_no_hook_replace_stays() -> None:
    event = replace(called("claude", "after", "Write"), tool="mcp__other__write", paths=None)
    assert answered(event, verdict="back") == {"decision": "block", "reason": "back"}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("phase", ["after", "prompt"])
def test_what_is_about_another_call_never_replaces_a_result(agent: AgentName, phase: Any) -> None:
    event = replace(called(agent, "after", SHELLS[agent]), phase=phase)
    if can_take_context(event):
        answer = answered(event, context="late")
        assert not {"decision", "continue", "replace", "deny"} & answer.keys()
        assert "late" in json.dumps(answer)
    else:
        assert (agent, phase) == ("opencode", "prompt")


@pytest.mark.parametrize("agent", ["claude", "codex", "gemini", "qwen"])
def test_a_prompt_is_blocked(agent: AgentName) -> None:
    event = next(one for one in events(agent) if one.phase == "prompt")
    answer = answered(event, denial="done")
    assert answer["decision"] in ("block", "deny")
    assert answer["reason"] == "done"


@pytest.mark.parametrize("agent", AGENTS)
def test_an_answer_that_says_nothing_prints_nothing(agent: AgentName) -> None:
    assert [answered(event) for event in events(agent)] == [None] * len(events(agent))
