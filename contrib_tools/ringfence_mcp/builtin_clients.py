"""The clients that ringfence knows itself: where they are configured, and what is written there.

Some clients have a command of their own that adds a server, which is not used. `codex mcp add` cannot say that a server
is required and approved. `qwen mcp add` cannot say that its tools are always loaded. `gemini mcp add` for a project
removes the other settings of the file where Gemini CLI does not trust the folder. `opencode mcp add` asks a person.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringfence_mcp import client_switches
from ringfence_mcp.mcp_client import ClientScope, McpClient, OwnCommand, ServerCommand
from ringfence_tools.client_files import NAME, ConfigEdit

FOLDER = "${workspaceFolder}"
"""For editors, which start a server in a directory of their own."""
GEMINI_RULES = """\
# Written by `ringfence mcp install gemini --exclusive`. Gemini CLI obeys such rules in every project.
[[rule]]
toolName = ["write_file", "replace", "run_shell_command"]
decision = "deny"
priority = 900
"""


def _claude_file(scope: ClientScope) -> Path:
    return scope.directory / (".claude.json" if scope.personal else ".mcp.json")


def _claude_entry(server: ServerCommand) -> dict[str, Any]:
    # Else a session begins without the server, and the model has to search for the tools.
    return {"type": "stdio", **server.entry(), "alwaysLoad": True}


def _claude_command(scope: ClientScope, server: ServerCommand) -> OwnCommand:
    where = ["--scope", "user" if scope.personal else "project", NAME]
    return OwnCommand(
        ["claude", "mcp", "add-json", *where, json.dumps(_claude_entry(server))], ["claude", "mcp", "remove", *where]
    )


def _claude_also(scope: ClientScope) -> Sequence[ConfigEdit]:
    # Else each tool is asked for once, and `claude -p` refuses it.
    settings = scope.directory / ".claude/settings.json"
    return [ConfigEdit(settings, ("permissions", "allow"), members=["mcp__ringfence"])]


def _claude_exclusive(scope: ClientScope) -> Sequence[ConfigEdit]:
    denied = ["Edit", "Write", "NotebookEdit", "Bash"]
    return [ConfigEdit(scope.directory / ".claude/settings.json", ("permissions", "deny"), members=denied)]


def _codex_file(scope: ClientScope) -> Path:
    own = scope.environ.get("CODEX_HOME") if scope.personal else None
    return Path(own) / "config.toml" if own else scope.directory / ".codex/config.toml"


def _codex_also(scope: ClientScope) -> Sequence[ConfigEdit]:
    # Else models that can search for tools begin without them. Only the name says that this is about code mode.
    key = ("features", "code_mode", "direct_only_tool_namespaces")
    return [ConfigEdit(_codex_file(scope), key, members=["mcp__ringfence"])]


def _codex_exclusive(scope: ClientScope) -> Sequence[ConfigEdit]:
    config = _codex_file(scope)
    return [
        ConfigEdit(config, ("sandbox_mode",), "read-only"),  # for its apply_patch, which no setting switches off
        ConfigEdit(config, ("features", "shell_tool"), value=False),
    ]


def _gemini_entry(server: ServerCommand) -> dict[str, Any]:
    return {**server.entry(), "trust": True}  # else `gemini -p` offers no tool of a server


def _gemini_command(scope: ClientScope, server: ServerCommand) -> OwnCommand | None:
    if not scope.personal:
        return None
    env = [word for name, value in server.env.items() for word in ("-e", f"{name}={value}")]
    add = ["gemini", "mcp", "add", "--scope", "user", "--trust", *env, NAME, server.command, "--", *server.args]
    return OwnCommand(add, ["gemini", "mcp", "remove", "--scope", "user", NAME])


def _gemini_exclusive(scope: ClientScope) -> Sequence[ConfigEdit]:
    return [ConfigEdit(scope.home / ".gemini/policies/ringfence.toml", text=GEMINI_RULES)]


def _opencode_file(scope: ClientScope) -> Path:
    file = scope.directory / (".config/opencode/opencode.json" if scope.personal else "opencode.json")
    other = file.with_suffix(".jsonc")
    return other if other.exists() and not file.exists() else file


def _opencode_entry(server: ServerCommand) -> dict[str, Any]:
    env = {"environment": dict(server.env)} if server.env else {}
    return {"type": "local", "command": [server.command, *server.args], "enabled": True, **env}


def _opencode_exclusive(scope: ClientScope) -> Sequence[ConfigEdit]:
    return [ConfigEdit(_opencode_file(scope), ("permission", tool), "deny") for tool in ("edit", "bash")]


def _qwen_exclusive(scope: ClientScope) -> Sequence[ConfigEdit]:
    denied = ["edit", "write_file", "run_shell_command", "notebook_edit"]
    return [ConfigEdit(scope.directory / ".qwen/settings.json", ("permissions", "deny"), members=denied)]


def _vscode_entry(server: ServerCommand) -> dict[str, Any]:
    return {"type": "stdio", **server.entry(FOLDER)}


def _vscode_command(scope: ClientScope, server: ServerCommand) -> OwnCommand | None:
    add = ["code", "--add-mcp", json.dumps({"name": NAME, **_vscode_entry(server)})]
    return OwnCommand(add, None) if scope.personal else None


BUILT_IN = (
    McpClient(
        "claude",
        "Claude Code",
        _claude_file,
        ("mcpServers", NAME),
        _claude_entry,
        "start claude here and choose `Use this MCP server`. A `claude -p` before goes on without it",
        own_command=_claude_command,
        also=_claude_also,
        exclusive=_claude_exclusive,
        off_switches=client_switches.of_claude,
        reported_name="claude-code",
        shown_characters=48_000,  # 2.1.331: an answer of more than 50,000 characters goes into a file
    ),
    McpClient(
        "codex",
        "Codex",
        _codex_file,
        ("mcp_servers", NAME),
        # Not required, a session could begin before the tools are there. Approved, since every call can be undone.
        lambda server: {**server.entry(), "required": True, "default_tools_approval_mode": "approve"},
        "start codex here; it reads the file of a project that you have told it to trust. "
        "`codex mcp list` shows the server only then",
        also=_codex_also,
        exclusive=_codex_exclusive,
        off_switches=client_switches.of_codex,
        reported_name="codex-mcp-client",
        shown_characters=10_000,  # 0.169.0: 10,000 bytes, and for the models that it knows 10,000 tokens
    ),
    McpClient(
        "gemini",
        "Gemini CLI",
        lambda scope: scope.directory / ".gemini/settings.json",
        ("mcpServers", NAME),
        _gemini_entry,
        "start gemini here, in a folder that it trusts. New files come by apply_patch: it takes write_file for its own",
        own_command=_gemini_command,
        exclusive=_gemini_exclusive,
        exclusive_note="Its own tools are switched off in all projects: it reads policies from your home only",
        off_switches=client_switches.of_gemini,
        reported_name="gemini-cli-mcp-client",
        shown_characters=40_000,  # 0.61: DEFAULT_TRUNCATE_TOOL_OUTPUT_THRESHOLD
    ),
    McpClient(
        "opencode",
        "opencode",
        _opencode_file,
        ("mcp", NAME),
        _opencode_entry,
        "start opencode here",
        exclusive=_opencode_exclusive,
        off_switches=client_switches.of_opencode,
        reported_name="opencode",
        shown_characters=48_000,  # 1.18.33: MAX_BYTES is 51,200, and MAX_LINES 2,000
    ),
    McpClient(
        "qwen",
        "Qwen Code",
        lambda scope: scope.directory / ".qwen/settings.json",
        ("mcpServers", NAME),
        lambda server: {**server.entry(), "trust": True, "alwaysLoadTools": True},
        "run `qwen mcp approve ringfence` here, and start qwen",
        exclusive=_qwen_exclusive,
        off_switches=client_switches.of_qwen,
        reported_name="qwen-cli-mcp-client",  # the name of the server follows
        shown_characters=25_000,  # 0.24: DEFAULT_TRUNCATE_TOOL_OUTPUT_THRESHOLD
    ),
    McpClient(
        "vscode",
        "VS Code",
        lambda scope: scope.directory / (".config/Code/User/mcp.json" if scope.personal else ".vscode/mcp.json"),
        ("servers", NAME),
        _vscode_entry,
        "open the folder and start the server in the list of MCP servers. Take the built-in edit and terminal tools "
        "out of the agent's tools there",
        own_command=_vscode_command,
        is_by_hand=True,
        off_switches=client_switches.of_vscode,
    ),
    McpClient(
        "cursor",
        "Cursor",
        lambda scope: scope.directory / ".cursor/mcp.json",
        ("mcpServers", NAME),
        lambda server: server.entry(FOLDER),
        "open the folder and enable the server in the settings, under MCP",
        is_by_hand=True,  # it keeps its off switch in no file
    ),
)
