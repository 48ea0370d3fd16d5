"""The settings by which clients keep a server off that is registered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ringfence_mcp.client_edits import NAME

if TYPE_CHECKING:
    from ringfence_mcp.config_files import KeyPath


@dataclass(frozen=True, slots=True)
class Switch:
    """A setting, and what to do where it keeps the server off."""

    files: Sequence[Path]
    key: KeyPath
    is_off: Callable[[Any], bool]
    remedy: str


def switched_off(client: str, directory: Path) -> Iterator[str]:
    """Yield a line for each setting that keeps the server of the directory off, and what to do.

    A file that cannot be read is passed over: the client says that itself.
    """
    from ringfence_mcp.config_files import ConfigFile

    for switch in SWITCHES.get(client, lambda here, home: ())(directory, Path.home()):
        for path in switch.files:
            with suppress(OSError, ValueError):
                if switch.is_off(ConfigFile(path).get(switch.key)):
                    yield f"{'.'.join(switch.key)} in {path} keeps the server off: {switch.remedy}"


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


def _claude(here: Path, home: Path) -> Sequence[Switch]:
    settings = [
        *(here / ".claude" / name for name in ("settings.json", "settings.local.json")),
        home / ".claude/settings.json",
        Path("/etc/claude-code/managed-settings.json"),
    ]
    state, project = [home / ".claude.json"], ("projects", str(here))
    return [
        Switch(settings, ("disabledMcpjsonServers",), _names, TAKE_OUT),
        Switch(state, (*project, "disabledMcpjsonServers"), _names, "run `claude mcp reset-project-choices` here"),
        Switch(state, (*project, "disabledMcpServers"), _names, "switch it on with /mcp in a session here"),
        Switch(settings, ("deniedMcpServers",), _names_in_objects, TAKE_OUT),
        Switch(settings, ("permissions", "deny"), _denies, f"take mcp__{NAME} out there"),
    ]


def _codex(here: Path, home: Path) -> Sequence[Switch]:
    personal = Path(os.environ.get("CODEX_HOME", "") or home / ".codex")
    files = [here / ".codex/config.toml", personal / "config.toml"]
    return [Switch(files, ("mcp_servers", NAME, "enabled"), _is_false, "remove this line")]


def _lists(files: Sequence[Path]) -> Sequence[Switch]:
    """Those of Gemini CLI, which Qwen Code has taken over."""
    return [
        Switch(files, ("mcp", "excluded"), _names, TAKE_OUT),
        Switch(files, ("mcp", "allowed"), _leaves_out, f"add {NAME} there"),
    ]


def _gemini(here: Path, home: Path) -> Sequence[Switch]:
    files = [*(one / ".gemini/settings.json" for one in (here, home)), Path("/etc/gemini-cli/settings.json")]
    state = [home / ".gemini/mcp-server-enablement.json"]
    return [*_lists(files), Switch(state, (NAME, "enabled"), _is_false, f"run `gemini mcp enable {NAME}`")]


def _qwen(here: Path, home: Path) -> Sequence[Switch]:
    return _lists([*(one / ".qwen/settings.json" for one in (here, home)), Path("/etc/qwen-code/settings.json")])


def _opencode(here: Path, home: Path) -> Sequence[Switch]:
    files = [
        *(here / name for name in ("opencode.json", "opencode.jsonc")),
        *(home / ".config/opencode" / name for name in ("opencode.json", "opencode.jsonc")),
    ]
    return [Switch(files, ("tools",), _switches_tools_off, f"remove the entry that matches {NAME}_*")]


def _vscode(here: Path, home: Path) -> Sequence[Switch]:
    files = [here / ".vscode/settings.json", home / ".config/Code/User/settings.json"]
    return [
        Switch(files, ("chat.mcp.access",), lambda held: held == "none", "set it to all"),
        Switch(files, ("chat.mcp.enabled",), _is_false, "remove this line"),
    ]


SWITCHES: Mapping[str, Callable[[Path, Path], Sequence[Switch]]] = {
    "claude": _claude,
    "codex": _codex,
    "gemini": _gemini,
    "qwen": _qwen,
    "opencode": _opencode,
    "vscode": _vscode,
}
"""By client. Cursor keeps its switch where no file tells of it."""
