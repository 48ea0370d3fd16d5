"""The settings by which clients keep a server off that is registered."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from ringfence_mcp.mcp_client import ClientScope, OffSwitch
from ringfence_tools.client_files import NAME


def _names(held: Any) -> bool:
    return isinstance(held, list) and NAME in held


def _leaves_out(held: Any) -> bool:
    return isinstance(held, list) and NAME not in held


def _is_false(held: Any) -> bool:
    return held is False


def _denies(held: Any) -> bool:
    rules = cast("list[Any]", held) if isinstance(held, list) else []
    return not {f"mcp__{NAME}", f"mcp__{NAME}__*"}.isdisjoint(rule for rule in rules if isinstance(rule, str))


def _names_in_objects(held: Any) -> bool:
    return isinstance(held, list) and {"serverName": NAME} in held


def _switches_tools_off(held: Any) -> bool:
    tools = cast("dict[str, Any]", held) if isinstance(held, dict) else {}
    return any(value is False and fnmatchcase(f"{NAME}_read_file", name) for name, value in tools.items())


TAKE_OUT = f"take {NAME} out there"


def of_claude(scope: ClientScope) -> Sequence[OffSwitch]:
    here, home = scope.project, scope.home
    settings = [
        *(here / ".claude" / name for name in ("settings.json", "settings.local.json")),
        home / ".claude/settings.json",
        Path("/etc/claude-code/managed-settings.json"),
    ]
    state, project = [home / ".claude.json"], ("projects", str(here))
    return [
        OffSwitch(settings, ("disabledMcpjsonServers",), _names, TAKE_OUT),
        OffSwitch(state, (*project, "disabledMcpjsonServers"), _names, "run `claude mcp reset-project-choices` here"),
        OffSwitch(state, (*project, "disabledMcpServers"), _names, "switch it on with /mcp in a session here"),
        OffSwitch(settings, ("deniedMcpServers",), _names_in_objects, TAKE_OUT),
        OffSwitch(settings, ("permissions", "deny"), _denies, f"take mcp__{NAME} out there"),
    ]


def of_codex(scope: ClientScope) -> Sequence[OffSwitch]:
    here, home = scope.project, scope.home
    personal = Path(scope.environ.get("CODEX_HOME", "") or home / ".codex")
    files = [here / ".codex/config.toml", personal / "config.toml"]
    return [OffSwitch(files, ("mcp_servers", NAME, "enabled"), _is_false, "remove this line")]


def _lists(files: Sequence[Path]) -> Sequence[OffSwitch]:
    """Those of Gemini CLI, which Qwen Code has taken over."""
    return [
        OffSwitch(files, ("mcp", "excluded"), _names, TAKE_OUT),
        OffSwitch(files, ("mcp", "allowed"), _leaves_out, f"add {NAME} there"),
    ]


def of_gemini(scope: ClientScope) -> Sequence[OffSwitch]:
    here, home = scope.project, scope.home
    files = [*(one / ".gemini/settings.json" for one in (here, home)), Path("/etc/gemini-cli/settings.json")]
    state = [home / ".gemini/mcp-server-enablement.json"]
    return [*_lists(files), OffSwitch(state, (NAME, "enabled"), _is_false, f"run `gemini mcp enable {NAME}`")]


def of_qwen(scope: ClientScope) -> Sequence[OffSwitch]:
    here, home = scope.project, scope.home
    return _lists([*(one / ".qwen/settings.json" for one in (here, home)), Path("/etc/qwen-code/settings.json")])


def of_opencode(scope: ClientScope) -> Sequence[OffSwitch]:
    here, home = scope.project, scope.home
    files = [
        *(here / name for name in ("opencode.json", "opencode.jsonc")),
        *(home / ".config/opencode" / name for name in ("opencode.json", "opencode.jsonc")),
    ]
    return [OffSwitch(files, ("tools",), _switches_tools_off, f"remove the entry that matches {NAME}_*")]


def of_vscode(scope: ClientScope) -> Sequence[OffSwitch]:
    here, home = scope.project, scope.home
    files = [here / ".vscode/settings.json", home / ".config/Code/User/settings.json"]
    return [
        OffSwitch(files, ("chat.mcp.access",), lambda held: held == "none", "set it to all"),
        OffSwitch(files, ("chat.mcp.enabled",), _is_false, "remove this line"),
    ]
