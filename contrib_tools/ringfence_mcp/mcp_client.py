"""What is known of an MCP client: how the server is registered with it, and how much of an answer it shows a model."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence_tools.client_files import NAME, STATE_VARIABLES, ClientScope, ConfigEdit, KeyPath

SHOWN_BY_OTHERS = 10_000
"""The characters of an answer for a client that is not known."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """The command line of the server, and the environment that it needs."""

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    @staticmethod
    def here(options: Sequence[str]) -> ServerCommand:
        """This very program: by its name, unless only an activated environment finds that."""
        program = Path(sys.argv[0]).resolve()
        on_path = shutil.which(NAME)
        if on_path is not None and Path(on_path).resolve() == program and "VIRTUAL_ENV" not in os.environ:
            command, args = NAME, []
        elif program.name == NAME:
            command, args = str(program), []
        else:
            command, args = sys.executable, ["-P", "-m", NAME]  # clients start it in a project: no module of that
        env = {name: os.environ[name] for name in STATE_VARIABLES if os.environ.get(name)}
        return ServerCommand(command, [*args, "serve", *options], env)

    def entry(self, *more: str) -> dict[str, Any]:
        """Return the form that most clients share, with ``more`` arguments."""
        env = {"env": dict(self.env)} if self.env else {}
        return {"command": self.command, "args": [*self.args, *more], **env}


@dataclass(frozen=True, slots=True)
class OffSwitch:
    """A setting, and what to do where it keeps the server off."""

    files: Sequence[Path]
    key: KeyPath
    is_off: Callable[[Any], bool]
    remedy: str


@dataclass(frozen=True, slots=True)
class OwnCommand:
    """The client's own command lines that add the server and remove it."""

    add: Sequence[str]
    remove: Sequence[str] | None
    """None where there is none: the entry is taken out of the file."""


@dataclass(frozen=True, slots=True)
class McpClient:
    """One client of MCP servers: an agent or an editor.

    The server is registered by the client's own command where ``own_command`` returns one. Else `ringfence mcp install`
    edits the file, or prints the entry if ``is_by_hand`` says so.
    """

    name: str
    """As in `ringfence mcp install NAME`."""
    title: str
    file: Callable[[ClientScope], Path]
    """The configuration file that holds the entry, JSON or TOML."""
    key: KeyPath
    """Where in the file the entry is."""
    entry: Callable[[ServerCommand], Mapping[str, Any]]
    """What the file says of the server."""
    next_step: str
    """What a person does after the installation, as an imperative."""
    own_command: Callable[[ClientScope, ServerCommand], OwnCommand | None] = lambda scope, server: None
    is_by_hand: bool = False
    also: Callable[[ClientScope], Sequence[ConfigEdit]] = lambda scope: ()
    """Edits besides the entry, without which a model has not all tools at once, or may not call them."""
    exclusive: Callable[[ClientScope], Sequence[ConfigEdit]] | None = None
    """The edits that switch off the client's own tools for files and commands. None where its files cannot say that."""
    exclusive_note: str = ""
    """What a person has to know of ``exclusive`` in a project."""
    off_switches: Callable[[ClientScope], Sequence[OffSwitch]] = lambda scope: ()
    """The settings by which the client keeps a server off that is registered."""
    reported_name: str = ""
    """How the name begins that the client gives itself in ``initialize``."""
    shown_characters: int = SHOWN_BY_OTHERS
    """How many characters of an answer it shows its model whole."""

    def edit(self, server: ServerCommand, scope: ClientScope) -> ConfigEdit:
        """The edit that registers the server in the file."""
        return ConfigEdit(self.file(scope), self.key, dict(self.entry(server)))
