"""The policy that every guarded call is under: files by which an agent would be let loose, or git run programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ringfence.escapes import escape_path
from ringfence.runtime.policy import ALLOW, BasePolicy, PolicyDecision
from ringfence_guard.events import MAX_LINE

if TYPE_CHECKING:
    from ringfence.participants import Change
    from ringfence.runtime.context import ToolContext
    from ringfence.runtime.tool import Tool

AGENT_SETTINGS = (
    ".claude/settings*.json",
    ".codex/hooks.json",
    ".codex/config.toml",
    ".gemini/settings.json",
    ".qwen/settings.json",
    ".opencode/command/guard-undo.md",
    ".opencode/plugin/*",
    ".opencode/plugins/*",
    "opencode.json*",
)
RUNS_PROGRAMS = (
    "alias.*",
    "core.askpass",
    "core.editor",
    "core.fsmonitor",
    "core.hookspath",
    "core.pager",
    "core.sshcommand",
    "credential.*helper",
    "diff.*command",
    "diff.*textconv",
    "diff.external",
    "filter.*",
    "gpg.*program",
    "include*",
    "merge.*driver",
    "pager.*",
    "sequence.editor",
    "url.*",
)
"""Keys of git's settings that run a program or lead elsewhere; of branches and remotes there are none."""
PERMISSIONS = ".claude/settings.local.json"
"""Where Claude Code keeps what a person permits in its dialog. It writes there while the call has begun."""
_RULE = re.compile(r"Bash\(([^*]+?)(?::\*| \*)?\)")
_SECTION = re.compile(r'\s*\[\s*([\w.-]+)(?:\s+"(.*)")?\s*\]\s*(.*)')
_KEY = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:=\s*(.*))?$")


class OwnFilesPolicy(BasePolicy):
    """Calls cannot change the settings of agents, git's hooks, and the settings by which git runs programs.

    A person may permit commands in Claude Code's dialog, which asks when the call has begun. That stays.
    """

    name = "guard"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: frozenset[tuple[str, str]] = frozenset()
        self._permissions: Mapping[str, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take the settings for what they may be. For the time between calls, when only a person changes them."""
        self._known = self._dangerous()
        self.refresh_permissions()

    def refresh_permissions(self) -> None:
        """Take Claude Code's settings for what they may be: a person has written them."""
        self._permissions = self._read_permissions()

    def check_effects(
        self, tool: Tool[Any, Any], params: Any, changes: Sequence[Change], *, context: ToolContext
    ) -> PolicyDecision:
        for change in changes:
            path, named = change.path, escape_path(change.path)
            if path == PERMISSIONS and self._permits_only(params):
                continue
            if any(fnmatchcase(path, pattern) for pattern in AGENT_SETTINGS):
                return PolicyDecision.deny(f"{named} has an agent's own settings: only people change it")
            if re.match(r"\.git/hooks(/|$)", path) and change.after is not None:
                return PolicyDecision.deny(f"{named} is a program that git runs: only people change it")
            if re.fullmatch(r"\.git/config(\.worktree)?", path):
                keys = sorted({key for key, _ in self._dangerous() - self._known})
                if keys:
                    return PolicyDecision.deny(f"{named} has new values of {', '.join(keys)}: only people change them")
        return ALLOW

    def _permits_only(self, params: object) -> bool:
        """Whether nothing is new in Claude Code's settings but that commands of these calls are permitted.

        A command that names the settings, or of which only the beginning is known, may have written there itself.
        """
        lines: Sequence[str] = _mapping(params).get("arguments", ())
        if any("claude" in line.lower() or "settings" in line.lower() or len(line) >= MAX_LINE for line in lines):
            return False
        commands = "\n".join(lines)
        (old, before), (rules, now) = _allowed(self._permissions), _allowed(self._read_permissions())
        added = [rule for rule in rules if rule not in old]
        words = [found[1] for rule in added if (found := _RULE.fullmatch(rule)) is not None]
        is_same = now == before and [rule for rule in rules if rule in old] == old
        return (
            is_same
            and bool(added)
            and len(words) == len(added)
            and all(re.search(rf"(?<![\w./-]){re.escape(' '.join(one.split()))}(?![\w./-])", commands) for one in words)
        )

    def _read_permissions(self) -> Mapping[str, Any]:
        try:
            found: object = json.loads((self._root / PERMISSIONS).read_bytes())
        except (OSError, ValueError):
            return {}
        return _mapping(found)

    def _dangerous(self) -> frozenset[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for name in ("config", "config.worktree"):
            try:
                text = (self._root / ".git" / name).read_text(errors="surrogateescape")
            except OSError:
                continue
            found |= {(key, value) for key, value in _settings(text) if _runs_program(key)}
        return frozenset(found)


def _mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return cast("Mapping[str, Any]", value)
    return {}


def _allowed(settings: Mapping[str, Any]) -> tuple[list[str], Mapping[str, Any]]:
    """The rules of what is permitted, and the rest of the settings."""
    permissions = _mapping(settings.get("permissions"))
    rules: list[Any] = permissions.get("allow") or []
    others = {key: value for key, value in permissions.items() if key != "allow" and value}
    return [str(rule) for rule in rules], {**settings, "permissions": others}


def _runs_program(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in RUNS_PROGRAMS)


def _settings(text: str) -> Sequence[tuple[str, str]]:
    """The keys of git's settings, in lower case with their sections, and the values."""
    found: list[tuple[str, str]] = []
    section = ""
    for line in text.replace("\\\n", "").splitlines():
        head = _SECTION.match(line)
        if head is not None:
            section = ".".join(filter(None, (head[1], head[2]))).lower()
            line = head[3]
        key = _KEY.match(line)
        if key is not None:
            found.append((f"{section}.{key[1].lower()}", key[2] or ""))
    return found
