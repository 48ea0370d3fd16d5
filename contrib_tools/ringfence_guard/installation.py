"""Install the guard's hooks in an agent's own settings, or take them out again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ringfence_guard.agents import GuardedAgent, HookCommand
from ringfence_tools.client_files import ClientScope, ConfigEdit, ConfigFile, ConfigRecord, UneditableFileError

OWN_COMMAND = "ringfence_guard/hook_client.py"
"""By this the hooks of the guard are known, of any installation."""
_OWN_FILE = "Written by `ringfence guard install"


def cache_around(environment: Path) -> Path | None:
    """The cache that an environment of Python is in, of `uvx` or `pipx run`: a cleaning removes it."""
    above = environment.parents
    caches = (one for one in above if (one / "CACHEDIR.TAG").exists() or one.parts[-2:] == (".cache", "pipx"))
    return next(caches, None)


@dataclass(frozen=True, slots=True)
class HookInstallation:
    """The hooks of one agent in one scope. ``record_path`` is the record of what install wrote; ``say`` gets a line."""

    agent: GuardedAgent
    scope: ClientScope
    record_path: Path
    say: Callable[[str], None]

    @property
    def path(self) -> Path:
        return self.agent.file(self.scope)

    @property
    def paths(self) -> Sequence[Path]:
        """All files that `install` and `uninstall` write."""
        return [self.path] if self.agent.calls else [*self.agent.files(self.scope, HookCommand("", "", ""))]

    def is_installed(self) -> bool:
        """Whether the file has hooks of the guard. One that cannot be read has none."""
        with suppress(OSError, ValueError):
            if not self.agent.calls:
                return self.path.exists() and _OWN_FILE in self.path.read_text()
            return any(self._own(ConfigFile(self.path), event) for event in self._events())
        return False

    def install(self, command: HookCommand) -> None:
        """Write the hooks, after all that the file has. Those of an earlier installation are replaced.

        Raises:
            ValueError: the file cannot be edited. The message says what to do.
            OSError: a file cannot be read or written.
        """
        if not self.agent.calls:
            self._write_files(self.agent.files(self.scope, command))
        else:
            groups = self.agent.groups(command)
            self._edit({event: [groups[event]] for event in groups})
        for note in self.agent.notes:
            self.say(f"{self.agent.title}: {note}")

    def uninstall(self) -> None:
        """Remove the guard's hooks, and nothing else. Raises as `install`."""
        if self.agent.calls:
            self._edit({})
        else:
            self._write_files(dict.fromkeys(self.paths, ""))

    def _events(self) -> Sequence[str]:
        return (*self.agent.calls, *self.agent.others)

    def _edit(self, wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        with ConfigRecord.locked(self.record_path) as record:
            file = ConfigFile(self.path)
            is_own = any(self._own(file, event) for event in self._events())
            old = {
                event: [one for one in self._own(file, event) if one not in wanted.get(event, ())]
                for event in self._events()
            }
            for event, groups in old.items():
                if groups:
                    record.uninstall(file, ConfigEdit(self.path, ("hooks", event), members=groups))
            for event, groups in wanted.items():
                record.install(file, ConfigEdit(self.path, ("hooks", event), members=groups))
            if not file.is_changed:
                state = "has the hooks of the guard already" if wanted else "has no hooks of the guard"
                self.say(f"{self.agent.title}: {self.path} {state}, and stays as it is")
                return
            made: Sequence[Path] = ()
            if wanted:
                record.keep_original(file, is_own=is_own)
            else:
                made = record.restore_original(file)
            record.save()
            file.save(record.backups)
            for directory in made:
                with suppress(OSError):  # it is not empty
                    directory.rmdir()
            self.say(f"{self.agent.title}: {'installed in' if wanted else 'taken out of'} {self.path}")

    @staticmethod
    def _own(file: ConfigFile, event: str) -> Sequence[Mapping[str, Any]]:
        """The groups of an event that have hooks of the guard alone."""
        groups: object = file.get(("hooks", event))
        if groups is not None and not isinstance(groups, list):
            raise UneditableFileError(f"{file.path}: hooks.{event} holds no list, and stays as it is")
        return [group for group in cast("list[Any]", groups or []) if _is_own(group)]

    def _write_files(self, files: Mapping[Path, str]) -> None:
        """Write whole files, or remove those whose text is empty."""
        held = {path: path.read_text() if path.exists() else "" for path in files}
        for path, text in held.items():
            if text and _OWN_FILE not in text:
                raise UneditableFileError(f"{path} is somebody else's, and stays as it is")
        if held == files:
            self.say(f"{self.agent.title}: nothing was changed in {self.path}")
            return
        for path, text in files.items():
            if not text:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # it is not empty
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_name(f".{path.name}.{os.getpid()}")
                new.write_text(text)
                new.replace(path)
            self.say(f"{self.agent.title}: {'installed in' if text else 'removed'} {path}")


def _is_own(group: object) -> bool:
    hooks = cast("dict[str, Any]", group).get("hooks") if isinstance(group, dict) else None
    if not isinstance(hooks, list) or not hooks:
        return False
    commands = [
        cast("dict[str, Any]", hook).get("command") for hook in cast("list[Any]", hooks) if isinstance(hook, dict)
    ]
    return len(commands) == len(cast("list[Any]", hooks)) and all(OWN_COMMAND in str(command) for command in commands)
