"""Edits of the configuration of a client, and a record of what was there before them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ringfence_tools.runs.command_errors import NotStartedError

if TYPE_CHECKING:
    from ringfence_mcp.config_files import ConfigFile, KeyPath

NAME = "ringfence"
STATE_VARIABLES = ("RINGFENCE_STATE_DIR", "XDG_STATE_HOME")


@dataclass(frozen=True, slots=True)
class Edit:
    """One entry of one file: a value, or strings that a list has to contain. ``text`` is a whole file instead."""

    path: Path
    key: KeyPath = ()
    value: Any = None
    members: Sequence[str] = ()
    text: str | None = None


class Record:
    """What install found, per configuration file and entry, so that uninstall puts it back."""

    def __init__(self, path: Path, found: dict[str, dict[str, Any]]) -> None:
        self.path, self.found = path, found
        self.left: list[str] = []
        """The entries that uninstall could not tell from the user's own."""

    @staticmethod
    def load() -> Record:
        """Raises NotStartedError if the record cannot be read."""
        from ringfence_sandbox import store_directory

        path = store_directory(Path.cwd()).parent.parent / "clients.json"
        try:
            return Record(path, json.loads(path.read_text()) if path.exists() else {})
        except ValueError:
            message = f"{path} is damaged. It has what was in the clients' settings before: mend it, or delete it"
            raise NotStartedError(message) from None

    def save(self) -> None:
        found = {path: entries for path, entries in self.found.items() if entries}
        if found or self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            new.write_text(json.dumps(found, indent=1, default=str))
            new.replace(self.path)

    def install(self, file: ConfigFile, edit: Edit) -> None:
        """Make the edit."""
        entries, key, held = self.found.setdefault(str(edit.path), {}), ".".join(edit.key), file.get(edit.key)
        if edit.members:
            file.add(edit.key, edit.members)
            added = [member for member in edit.members if member not in (held or [])]
            entries[key] = [*entries.get(key, []), *added]
            return
        value: object = _merged(held, edit)
        if held is None or (held != value and not (isinstance(edit.value, Mapping) and key in entries)):
            entries[key] = held
        file.set(edit.key, value)

    def uninstall(self, file: ConfigFile, edit: Edit) -> None:
        """Take the edit back, as far as install made it."""
        entries, key = self.found.get(str(edit.path), {}), ".".join(edit.key)
        held: Any = file.get(edit.key)
        is_own = NAME in key or any(NAME in member for member in edit.members)  # by its name, without a record
        known, before = key in entries or is_own, entries.pop(key, None)
        if edit.members:
            added: Sequence[str] = edit.members if is_own else before or []
            file.discard(edit.key, added)
            if not set(edit.members).isdisjoint(set(map(str, held or [])) - set(added)):
                self.left.append(f"{edit.path}: {key}")
        elif held is not None and (isinstance(edit.value, Mapping) or held == edit.value):
            if not known:
                self.left.append(f"{edit.path}: {key}")
            elif before is None:
                file.remove(edit.key)
            else:
                file.set(edit.key, before)


def _merged(held: Any, edit: Edit) -> Any:
    """The value of an edit, with what else somebody has put there, such as a time limit or a variable."""
    if type(held) is not dict:
        return edit.value
    if not isinstance(edit.value, dict):
        where = f"{edit.path}: {'.'.join(edit.key)}"
        raise ValueError(f"{where} holds rules, and stays as it is: deny it by hand, or install without --exclusive")
    entry = cast("dict[str, Any]", held)
    for name in ("env", "environment"):  # what is in force now is in the value
        if type(entry.get(name)) is dict:
            kept = {key: one for key, one in entry[name].items() if key not in STATE_VARIABLES}
            entry = {key: one for key, one in entry.items() if key != name} | ({name: kept} if kept else {})
    value = cast("dict[str, Any]", edit.value)
    if "command" not in entry:  # a server over HTTP: clients refuse an entry that is both
        return value
    return entry | {
        key: entry[key] | new if type(new) is type(entry.get(key)) is dict else new for key, new in value.items()
    }
