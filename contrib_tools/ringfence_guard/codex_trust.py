"""The trust in hooks without which Codex passes over them: which it asks for, and what is written for a yes."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, cast

from ringfence_guard.installation import OWN_COMMAND
from ringfence_tools.client_files import ClientScope, ConfigEdit, ConfigFile, ConfigRecord

ANSWER_SECONDS = 30.0
_QUESTIONS: Sequence[Mapping[str, Any]] = (
    {"id": 0, "method": "initialize", "params": {"clientInfo": {"name": "ringfence", "version": "1"}}},
    {"method": "initialized"},
)


@dataclass(frozen=True, slots=True)
class CodexHook:
    """A hook as Codex knows it. The hash is of all that its definition says."""

    key: str
    event: str
    command: str
    digest: str
    trust: str

    @property
    def is_trusted(self) -> bool:
        return self.trust not in ("untrusted", "modified")


def _asked(questions: Sequence[Mapping[str, Any]], number: int, scope: ClientScope) -> Mapping[str, Any]:
    """The result of a question to `codex app-server`, which speaks JSON-RPC, a message a line."""
    with subprocess.Popen(
        ["codex", "app-server"],
        cwd=scope.project,
        env=dict(scope.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(b"".join(json.dumps(one).encode() + b"\n" for one in questions))
            server.stdin.flush()
            until, received = monotonic() + ANSWER_SECONDS, b""
            while True:
                if not select.select([server.stdout], [], [], max(0.0, until - monotonic()))[0]:
                    raise ValueError(f"no answer in {ANSWER_SECONDS:g} seconds")
                part = os.read(server.stdout.fileno(), 1 << 16)
                if not part:
                    raise ValueError("codex app-server has ended")
                received += part
                *lines, received = received.split(b"\n")
                for message in map(json.loads, filter(None, lines)):
                    if message.get("id") == number:
                        if "error" in message:
                            raise ValueError(str(cast("dict[str, Any]", message["error"]).get("message")))
                        return cast("Mapping[str, Any]", message["result"])
        finally:
            server.kill()


@dataclass(frozen=True, slots=True)
class CodexTrust:
    """What Codex's own settings say of the guard's hooks. ``record_path`` is the record of what was written there."""

    scope: ClientScope
    record_path: Path

    @property
    def path(self) -> Path:
        own = self.scope.environ.get("CODEX_HOME")
        return (Path(own) if own else self.scope.home / ".codex") / "config.toml"

    def own_hooks(self, file: Path) -> Sequence[CodexHook]:
        """Return the guard's hooks of a file, as `codex app-server` lists them.

        Raises:
            ValueError: Codex cannot be asked, or lists none of them.
        """
        question = {"id": 1, "method": "hooks/list", "params": {"cwds": [str(self.scope.project)]}}
        try:
            answer = _asked([*_QUESTIONS, question], 1, self.scope)
            listed = [hook for place in answer["data"] for hook in place["hooks"]]
            found = [
                CodexHook(*(str(hook[name]) for name in ("key", "eventName", "command", "currentHash", "trustStatus")))
                for hook in listed
                if os.path.realpath(str(hook["sourcePath"])) == os.path.realpath(file)
                and OWN_COMMAND in str(hook["command"])
            ]
        except (OSError, KeyError, TypeError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ValueError(
                f"codex does not say what it trusts: {why}. Trust the hooks in codex, by /hooks"
            ) from error
        if not found:
            raise ValueError("codex lists no hook of the guard: trust the project in codex first")
        return found

    def trust(self, hooks: Sequence[CodexHook], confirm: Callable[[Sequence[CodexHook]], bool]) -> str:
        """Ask a person about hooks that are not trusted, and write a yes. Return what was done, in words.

        Raises:
            ValueError: the settings cannot be edited.
            OSError: they cannot be read or written.
            ModuleNotFoundError: tomlkit is missing.
        """
        wanted = [hook for hook in hooks if not hook.is_trusted]
        if not wanted:
            return "the hooks are trusted already"
        if not confirm(wanted):
            return "the hooks are not trusted: it passes over them"
        with ConfigRecord.locked(self.record_path) as record:
            file = ConfigFile(self.path)
            for hook in wanted:
                key = ("hooks", "state", hook.key, "trusted_hash")
                if record.has(earlier := ConfigEdit(self.path, key, file.get(key))):
                    record.uninstall(file, earlier)
                record.install(file, ConfigEdit(self.path, key, hook.digest))
            record.save()
            file.save(record.backups)
        return f"the hooks are trusted, in {self.path}"

    def forget(self, hooks_file: Path) -> None:
        """Remove the trust that was written for hooks of a file. Raises as `trust`."""
        with ConfigRecord.locked(self.record_path) as record:
            file = ConfigFile(self.path)
            states: object = file.get(("hooks", "state")) or {}
            for key, state in cast("dict[str, Any]", states).items() if isinstance(states, dict) else ():
                edit = ConfigEdit(self.path, ("hooks", "state", key, "trusted_hash"), state.get("trusted_hash"))
                if key.startswith(f"{hooks_file}:") and record.has(edit):
                    record.uninstall(file, edit)
            if file.is_changed:
                record.save()
                file.save(record.backups)
