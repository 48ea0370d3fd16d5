"""The agents that can be guarded: where their hooks are configured, and what is written there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence_guard.events import AgentName
from ringfence_guard.settings import client_path, guard_directory, launcher_path
from ringfence_tools.client_files import ClientScope

TIMEOUT_SECONDS = 120
"""How long an agent waits for a hook. The hook answers after 80 % of it at the latest."""
QUICK_SECONDS = 3
"""The longest that Codex waits for hooks at an interrupt, and at the end of a session."""
PLUGIN = "ringfence-guard.js"
UNDO_COMMAND = "guard-undo.md"
"""The command of an agent in which the prompt `undo!` has no effect."""


@dataclass(frozen=True, slots=True)
class HookCommand:
    """The command line that an agent's hooks run."""

    interpreter: str
    program: str
    """The program `ringfence`, whose first line names the interpreter where this one has gone."""
    state: str
    """The state directory, absolute."""
    root: str = ""
    """The directory that is guarded. Empty: the repository that the agent works in."""
    allows_unavailable: bool = False

    @property
    def undo_line(self) -> str:
        """What undoes the newest steps, for a shell. A number may follow."""
        root = ["--directory", self.root] if self.root else []
        return f"RINGFENCE_STATE_DIR={shlex.quote(self.state)} {shlex.join([self.program, 'guard', 'undo', *root])}"

    def words(self, agent: AgentName, seconds: float = TIMEOUT_SECONDS) -> Sequence[str]:
        root = ["--root", self.root, "--directory", str(guard_directory(self.root))] if self.root else []
        allow = ["--if-unavailable", "allow"] if self.allows_unavailable else []
        launcher = str(launcher_path(self.state))
        first = ["/bin/sh", launcher, self.interpreter, client_path(), self.program, agent, "--state", self.state]
        return [*first, *root, "--timeout", f"{seconds:g}", *allow]


@dataclass(frozen=True, slots=True)
class GuardedAgent:
    """One agent. Each of its hooks is a member of the list of its event in the file."""

    name: AgentName
    title: str
    file: Callable[[ClientScope], Path]
    before: str = ""
    """The event before a call of a tool."""
    calls: Sequence[str] = ()
    """The events of calls, which are asked for the tools of ``matcher`` alone."""
    others: Sequence[str] = ()
    matcher: str = ""
    units_in_second: int = 1
    """In what it counts time limits."""
    quick: Sequence[str] = ()
    """The events with a short time limit of its own."""
    on_failure: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the hook before a call also says, so that a hook that fails denies the call."""
    notes: Sequence[str] = ()
    """What a person has to do or to know after the installation."""

    def groups(self, command: HookCommand) -> Mapping[str, Mapping[str, Any]]:
        """The hook of each event, as the agent's file has it."""
        found: dict[str, Mapping[str, Any]] = {}
        for event in (*self.calls, *self.others):
            seconds = QUICK_SECONDS if event in self.quick else TIMEOUT_SECONDS
            hook: dict[str, Any] = {
                "type": "command",
                "command": shlex.join(command.words(self.name, seconds)),
                "timeout": seconds * self.units_in_second,
            }
            if event == self.before and not command.allows_unavailable:
                hook |= self.on_failure
            found[event] = {**({"matcher": self.matcher} if event in self.calls else {}), "hooks": [hook]}
        return found

    def files(self, scope: ClientScope, command: HookCommand) -> Mapping[Path, str]:
        """The whole files of an agent that has no hooks in a file of settings: a plug-in, and a command for an undo."""
        texts = {
            self.file(scope): ("opencode_plugin.js", json.dumps([*command.words(self.name)])),
            _opencode_command(scope): ("opencode_undo.md", command.undo_line),
        }
        return {
            path: Path(__file__).with_name(name).read_text(encoding="utf-8").replace("__COMMAND__", line)
            for path, (name, line) in texts.items()
        }


def _codex_file(scope: ClientScope) -> Path:
    own = scope.environ.get("CODEX_HOME") if scope.personal else None
    return Path(own) / "hooks.json" if own else scope.directory / ".codex/hooks.json"


def _opencode_file(scope: ClientScope) -> Path:
    return scope.directory / (".config/opencode/plugin" if scope.personal else ".opencode/plugin") / PLUGIN


def _opencode_command(scope: ClientScope) -> Path:
    return scope.directory / (".config/opencode/command" if scope.personal else ".opencode/command") / UNDO_COMMAND


def _claude_file(scope: ClientScope) -> Path:
    # The other file of a project is shared with people who have no ringfence.
    return scope.directory / ".claude" / ("settings.json" if scope.personal else "settings.local.json")


GUARDED_AGENTS: Mapping[str, GuardedAgent] = {
    agent.name: agent
    for agent in (
        GuardedAgent(
            "claude",
            "Claude Code",
            _claude_file,
            "PreToolUse",
            ("PreToolUse", "PostToolUse", "PostToolUseFailure"),
            ("SessionStart", "UserPromptSubmit", "PostToolBatch", "SubagentStop", "Stop", "SessionEnd"),
            r"Bash|Edit|MultiEdit|Write|NotebookEdit|mcp__.*",
            on_failure={"onFailure": "block"},
            notes=(
                "start claude anew. `--bare`, `--safe-mode` and `disableAllHooks` switch the guard off",
                "it tells nothing of a call after Esc: its record does, which is read with the next event",
            ),
        ),
        GuardedAgent(
            "codex",
            "Codex",
            _codex_file,
            "PreToolUse",
            ("PreToolUse", "PostToolUse"),
            ("SessionStart", "UserPromptSubmit", "SubagentStop", "Stop", "Interrupt", "SessionEnd"),
            r"Bash|apply_patch|mcp__.*",
            quick=("Interrupt", "SessionEnd"),
            notes=(
                (
                    "trust the hooks, by --trust here or by `/hooks` in codex: it passes over hooks that nobody has "
                    "trusted, and `codex exec` says nothing of it. Hooks of a project also need a trusted project"
                ),
                "it tells no exit code, and nothing of commands within its code mode",
                "it tells no end of `apply_patch` in a shell, nor of a command that goes on: a later event settles it",
                "a hook that is missing, or takes too long, lets the call run",
                "`codex exec` does not print what `undo!` has done",
            ),
        ),
        GuardedAgent(
            "gemini",
            "Gemini CLI",
            lambda scope: scope.directory / ".gemini/settings.json",
            "BeforeTool",
            ("BeforeTool", "AfterTool"),
            ("SessionStart", "BeforeAgent", "AfterAgent", "SessionEnd"),
            r"run_shell_command|write_file|replace|mcp_.*",
            1000,
            notes=(
                "start gemini anew, in a folder that it trusts",
                "it tells no exit code, not which calls are a sub-agent's, and no two equal calls at once apart",
                "a hook that takes too long lets the call run",
            ),
        ),
        GuardedAgent(
            "qwen",
            "Qwen Code",
            lambda scope: scope.directory / ".qwen/settings.json",
            "PreToolUse",
            ("PreToolUse", "PostToolUse", "PostToolUseFailure"),
            ("SessionStart", "UserPromptSubmit", "PostToolBatch", "SubagentStop", "Stop", "SessionEnd"),
            r"run_shell_command|write_file|edit|notebook_edit|mcp__.*",
            1000,
            notes=(
                "start qwen anew",
                "a denial is added to the result of its call, and does not take its place",
                "a hook that is missing, or takes too long, lets the call run",
                "`qwen -p` does not print what `undo!` has done",
            ),
        ),
        GuardedAgent(
            "opencode",
            "opencode",
            _opencode_file,
            notes=(
                (
                    "start opencode anew. It installs @opencode-ai/plugin beside a plug-in, which is 64 MB: "
                    "--user keeps that out of the project"
                ),
                "a call of a tool that fails has no end there: the next event settles it",
                "what a person does meanwhile is told to the model with its next call, not with a prompt",
                "the prompt `undo!` has no effect there: `/guard-undo 2` undoes the newest two steps of agents",
            ),
        ),
    )
}
