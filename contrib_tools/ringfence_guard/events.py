"""Events that an agent's hooks report, as one type for all agents."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

AgentName: TypeAlias = Literal["claude", "codex", "gemini", "qwen", "opencode"]
Phase: TypeAlias = Literal[
    "session_start", "prompt", "before", "after", "failed", "batch_end", "subagent_end", "stop", "session_end", "other"
]
MAX_LINE = 200
"""The most characters of a tool's arguments that are kept."""

_PHASES: Mapping[str, Phase] = {
    "SessionStart": "session_start",
    "UserPromptSubmit": "prompt",
    "PreToolUse": "before",
    "PostToolUse": "after",
    "PostToolUseFailure": "failed",
    "PostToolBatch": "batch_end",
    "SubagentStop": "subagent_end",
    "Stop": "stop",
    "StopFailure": "stop",
    "Interrupt": "stop",
    "SessionEnd": "session_end",
    "BeforeAgent": "prompt",
    "AfterAgent": "stop",
    "BeforeTool": "before",
    "AfterTool": "after",
    "session.created": "session_start",
    "chat.message": "prompt",
    "tool.execute.before": "before",
    "tool.execute.after": "after",
    "session.idle": "stop",
}
_FILE_TOOLS: Mapping[AgentName, frozenset[str]] = {
    "claude": frozenset({"Edit", "MultiEdit", "NotebookEdit", "Write"}),
    "codex": frozenset({"apply_patch"}),
    "gemini": frozenset({"replace", "write_file"}),
    "qwen": frozenset({"edit", "notebook_edit", "write_file"}),
    "opencode": frozenset({"apply_patch", "edit", "multiedit", "patch", "write"}),
}
_FILE_KEYS = ("file_path", "filePath", "notebook_path", "absolute_path")
_PATCH_KEYS = ("command", "patchText", "patch", "input")
_PATCHED = re.compile(r"^\*\*\* (?:(?:Add|Update|Delete) File|Move to): (.+?)\s*$", re.MULTILINE)
_EXIT_CODE = re.compile(r"^Exit [Cc]ode:? (\d{1,3})\b", re.MULTILINE)
_BACKGROUND_KEYS = ("run_in_background", "is_background")
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.""", re.DOTALL)
_HEREDOC = re.compile(r"^([^\n]*)<<-?[ \t]*(['\"]?)(\w+)\2([^\n]*)\n.*?^[ \t]*\3[ \t]*$", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"\b(?:ba|da|k|z)?sh\b")
_NO_COMMAND = re.compile(r"\$?\(\((?:[^()]|\([^()]*\))*\)\)|(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
"""Arithmetic and comments."""
_STARTS_ANOTHER = re.compile(
    r"(?<![&<>|])&(?![&>])|(?:^|[;&|(`\n]|\b(?:do|then|else|exec|sudo|time|env|command)\s)\s*(?:\w+=\S*\s+)*"
    r"(?:nohup|setsid|disown|daemonize)(?![\w.])"
)
_WAITS = re.compile(r"\bwait\s*;?\s*$")


@dataclass(frozen=True, slots=True)
class HookEvent:
    """One event of an agent's session."""

    agent: AgentName
    name: str
    """As the agent calls it."""
    phase: Phase
    session_id: str
    cwd: str
    subagent: str = ""
    """Empty for the main agent."""
    prompt_id: str = ""
    tool: str = ""
    call_id: str = ""
    """Of Gemini CLI, which gives none, made of the tool and its arguments."""
    transcript_id: str = ""
    """The name of the call in the agent's transcript; empty where it has none there."""
    arguments: str = ""
    """The tool's arguments in a line, cut."""
    paths: tuple[str, ...] | None = None
    """The files that the tool names, absolute. None for a tool that may change any file."""
    exit_code: int | None = None
    is_background: bool = False
    """Whether the command may go on after the end of its call."""
    is_detached: bool = False
    """Whether it may go on and the agent does not know: its command line has ``&`` or ``nohup``, say."""
    has_background: bool | None = None
    """At the end of a turn: whether commands of the session are running. None where the agent does not tell."""
    prompt: str = ""
    transcript: str = ""
    """The path of the agent's record of the session."""
    parent_session: str = ""
    """The session that this one works for, in an agent whose sub-agents have sessions of their own."""
    seconds: float | None = None
    """At the end of a call: how long it ran, without what it waited for a person. None where the agent does not
    tell."""
    hooked_at: float = 0.0
    """When the hook was started, in seconds since the machine was."""
    result: Any = None
    """What the tool answered, in the agent's own shape."""

    @property
    def actor(self) -> tuple[str, str, str]:
        """Whose calls follow one another."""
        return (self.agent, self.session_id, self.subagent)


def parse_event(agent: AgentName, payload: object) -> HookEvent:
    """Return the event of what an agent's hook got on standard input.

    An event without a part that this version of the agent leaves out has an empty one.

    Raises:
        ValueError: it is no event of a hook.
    """
    if not isinstance(payload, dict):
        raise ValueError(f"an event of {agent} is a JSON object, not {type(payload).__name__}")
    given = cast("dict[str, Any]", payload)
    name = _text(given, "hook_event_name")
    if not name:
        raise ValueError(f"an event of {agent} has no hook_event_name")
    event = HookEvent(
        agent,
        name,
        _PHASES.get(name, "other"),
        _text(given, "session_id") or _text(given, "sessionID"),
        _text(given, "cwd"),
        subagent=_text(given, "agent_id"),
        prompt_id=_text(given, "prompt_id") or _text(given, "turn_id") or _text(given, "messageID"),
        transcript=_text(given, "agent_transcript_path") or _text(given, "transcript_path"),
        parent_session=_text(given, "parent_session_id"),
    )
    if event.phase in ("before", "after", "failed"):
        return _call(event, given)
    if event.phase == "prompt":
        return replace(event, prompt=_text(given, "prompt"))
    return replace(event, has_background=_has_background(given)) if event.phase == "stop" else event


def _call(event: HookEvent, given: Mapping[str, Any]) -> HookEvent:
    """The event with what it says of a call."""
    tool = _text(given, "tool_name") or _text(given, "tool")
    arguments = _arguments(given)
    result = given.get("tool_response", given.get("output"))
    command: object = arguments.get("command")
    is_detached = tool not in _FILE_TOOLS[event.agent] and isinstance(command, str) and _detaches(command)
    call_id = _text(given, "tool_use_id") or _text(given, "callID")
    return replace(
        event,
        tool=tool,
        call_id=call_id or named_by_arguments(event.session_id, tool, arguments),
        transcript_id=_text(given, "tool_call_id") or call_id,
        arguments=_line(arguments),
        paths=_paths(event.agent, tool, arguments, event.cwd),
        exit_code=_exit_code(event.agent, event.phase, given, result),
        is_background=is_detached or any(arguments.get(key) is True for key in _BACKGROUND_KEYS),
        is_detached=is_detached,
        seconds=_seconds(event.agent, given),
        result=result,
    )


def _seconds(agent: AgentName, given: Mapping[str, Any]) -> float | None:
    lasted = given.get("duration_ms") if agent == "claude" else None
    return lasted / 1000 if isinstance(lasted, int | float) and lasted >= 0 else None


def _without_text(found: re.Match[str]) -> str:
    """The line that a text follows, without that text. For a shell it is a program."""
    return found[0] if _SHELL.search(found[1]) else f"{found[1]} {found[4]}"


def _detaches(command: str) -> bool:
    """Whether a command line may leave a program running, by what it looks like."""
    plain = _NO_COMMAND.sub(" ", _QUOTED.sub(" ", _HEREDOC.sub(_without_text, command)))
    return _STARTS_ANOTHER.search(plain) is not None and _WAITS.search(plain) is None


def _text(given: Mapping[str, Any], key: str) -> str:
    value = given.get(key)
    return value if isinstance(value, str) else ""


def _arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    held: object = given.get("tool_input", given.get("args"))
    output = given.get("output")
    if held is None and isinstance(output, dict):
        held = cast("dict[str, Any]", output).get("args")
    return cast("dict[str, Any]", held) if isinstance(held, dict) else {}


def named_by_arguments(session: str, tool: str, arguments: Mapping[str, Any]) -> str:
    """The name of a call for which the agent has none. Equal calls have the same."""
    text = json.dumps([session, tool, arguments], sort_keys=True)
    return f"call-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _line(arguments: Mapping[str, Any]) -> str:
    """The command, the path, or else all arguments, on one line."""
    for key in ("command", *_FILE_KEYS):
        if isinstance(arguments.get(key), str):
            text = arguments[key]
            break
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    words = " ".join(text.split())
    return words if len(words) <= MAX_LINE else f"{words[: MAX_LINE - 3]}..."


def _paths(agent: AgentName, tool: str, arguments: Mapping[str, Any], cwd: str) -> tuple[str, ...] | None:
    if tool not in _FILE_TOOLS[agent]:
        return None
    named = [arguments[key] for key in _FILE_KEYS if isinstance(arguments.get(key), str)]
    if not named:
        patches = [arguments[key] for key in _PATCH_KEYS if isinstance(arguments.get(key), str)]
        named = [path for patch in patches for path in _PATCHED.findall(patch)]
    return tuple(dict.fromkeys(os.path.normpath(os.path.join(cwd, path)) for path in named)) or None


def _exit_code(agent: AgentName, phase: Phase, given: Mapping[str, Any], result: object) -> int | None:
    if phase == "failed":
        found = _EXIT_CODE.search(_text(given, "error"))
        return None if found is None else int(found[1])
    if phase != "after":
        return None
    read: Callable[[Any], object] | None = _EXIT_CODES.get(agent)
    code = None if read is None or not isinstance(result, dict) else read(result)
    return code if type(code) is int else None


def _claude_code(result: Mapping[str, Any]) -> object:
    return 0 if "stdout" in result and result.get("interrupted") is False else None


def _qwen_code(result: Mapping[str, Any]) -> object:
    content = result.get("llmContent")
    found = _EXIT_CODE.search(content) if isinstance(content, str) else None
    return None if found is None else int(found[1])


def _opencode_code(result: Mapping[str, Any]) -> object:
    metadata = result.get("metadata")
    return cast("dict[str, Any]", metadata).get("exit") if isinstance(metadata, dict) else None


_EXIT_CODES: Mapping[AgentName, Callable[[Any], object]] = {
    "claude": _claude_code,
    "qwen": _qwen_code,
    "opencode": _opencode_code,
}


def _has_background(given: Mapping[str, Any]) -> bool | None:
    tasks = given.get("background_tasks")
    return any(map(_is_running_command, cast("list[object]", tasks))) if isinstance(tasks, list) else None


def _is_running_command(task: object) -> bool:
    """Whether it is a command that runs. The calls of sub-agents have events of their own."""
    if not isinstance(task, dict):
        return False
    held = cast("dict[str, Any]", task)
    return held.get("status") == "running" and "agent_type" not in held
