"""Register the server with an agent that somebody already has, or take it out again."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ringfence.extras import missing
from ringfence_mcp.client_edits import NAME, STATE_VARIABLES, Edit, Record
from ringfence_mcp.client_switches import switched_off
from ringfence_tools.runs.command_errors import NotStartedError
from ringfence_tools.runs.outputs import put, put_line

if TYPE_CHECKING:
    from ringfence_mcp.config_files import ConfigFile, KeyPath

FOLDER = "${workspaceFolder}"
"""For editors, which start a server in a directory of their own."""
GEMINI_RULES = """\
# Written by `ringfence mcp install gemini --exclusive`. Gemini CLI obeys such rules in every project.
[[rule]]
toolName = ["write_file", "replace", "run_shell_command"]
decision = "deny"
priority = 900
"""


@dataclass(frozen=True, slots=True)
class Server:
    """The command line of the server, and the environment that it needs."""

    command: str
    args: Sequence[str]
    env: Mapping[str, str]

    @staticmethod
    def here(options: Sequence[str]) -> Server:
        """This very program: by its name, unless only an activated environment finds that."""
        program = Path(sys.argv[0]).resolve()
        found = shutil.which(NAME)
        if found is not None and Path(found).resolve() == program and "VIRTUAL_ENV" not in os.environ:
            command, args = NAME, []
        elif program.name == NAME:
            command, args = str(program), []
        else:
            command, args = sys.executable, ["-m", NAME]
        env = {name: os.environ[name] for name in STATE_VARIABLES if os.environ.get(name)}
        return Server(command, [*args, "serve", *options], env)

    def entry(self, *more: str) -> dict[str, Any]:
        """The form that most clients share."""
        env = {"env": dict(self.env)} if self.env else {}
        return {"command": self.command, "args": [*self.args, *more], **env}


@dataclass(frozen=True, slots=True)
class Client:
    """One agent: where it is configured for a project and for a person, and what is written there."""

    title: str
    project: str
    """Below the project's directory."""
    personal: str
    """Below the home directory, or the directory that ``home_variable`` names."""
    key: KeyPath
    entry: Callable[[Server], dict[str, Any]]
    exclusive: Callable[[Path, bool], Sequence[Edit]] | None
    """The edits that switch off its own tools for files and commands, in a directory that is the home or not. None
    where its files cannot say that."""
    next_step: str
    also: Callable[[Path, bool], Sequence[Edit]] = lambda directory, personal: ()
    """Edits besides the entry, without which a model has not all tools at once, or may not call them."""
    home_variable: str = ""
    commands: Callable[[Server, bool], Sequence[str]] | None = None
    """Its own command for a person's configuration, where the file is its to write; to add, or else to remove."""

    def directory(self, *, personal: bool) -> Path:
        if not personal:
            return Path.cwd()
        return Path(os.environ.get(self.home_variable, "") or Path.home())

    def file(self, *, personal: bool) -> Path:
        name = self.personal
        if personal and self.home_variable and os.environ.get(self.home_variable):
            name = Path(name).name
        file = self.directory(personal=personal) / (name if personal else self.project)
        with_comments = file.with_suffix(".jsonc")
        return with_comments if with_comments.exists() and not file.exists() else file


def _claude_also(directory: Path, personal: bool) -> Sequence[Edit]:
    # Else each tool is asked for once, and `claude -p` refuses it.
    return [Edit(directory / ".claude/settings.json", ("permissions", "allow"), members=["mcp__ringfence"])]


def _claude_exclusive(directory: Path, personal: bool) -> Sequence[Edit]:
    denied = ["Edit", "Write", "NotebookEdit", "Bash"]
    return [Edit(directory / ".claude/settings.json", ("permissions", "deny"), members=denied)]


def _codex_also(directory: Path, personal: bool) -> Sequence[Edit]:
    # Else models that can search for tools begin without them. Only the name says that this is about code mode.
    key = ("features", "code_mode", "direct_only_tool_namespaces")
    return [Edit(CLIENTS["codex"].file(personal=personal), key, members=["mcp__ringfence"])]


def _codex_exclusive(directory: Path, personal: bool) -> Sequence[Edit]:
    config = CLIENTS["codex"].file(personal=personal)
    return [
        Edit(config, ("sandbox_mode",), "read-only"),  # for its apply_patch, which no setting switches off
        Edit(config, ("features", "shell_tool"), value=False),
    ]


def _gemini_exclusive(directory: Path, personal: bool) -> Sequence[Edit]:
    return [Edit(Path.home() / ".gemini/policies/ringfence.toml", text=GEMINI_RULES)]


def _opencode_exclusive(directory: Path, personal: bool) -> Sequence[Edit]:
    config = CLIENTS["opencode"].file(personal=personal)
    return [Edit(config, ("permission", "edit"), "deny"), Edit(config, ("permission", "bash"), "deny")]


def _qwen_exclusive(directory: Path, personal: bool) -> Sequence[Edit]:
    denied = ["edit", "write_file", "run_shell_command", "notebook_edit"]
    return [Edit(directory / ".qwen/settings.json", ("permissions", "deny"), members=denied)]


def _claude_entry(server: Server) -> dict[str, Any]:
    # Else a session begins without the server, and the model has to search for the tools.
    return {"type": "stdio", **server.entry(), "alwaysLoad": True}


def _claude_command(server: Server, add: bool) -> Sequence[str]:
    if not add:
        return ["claude", "mcp", "remove", "--scope", "user", NAME]
    return ["claude", "mcp", "add-json", "--scope", "user", NAME, json.dumps(_claude_entry(server))]


CLIENTS: dict[str, Client] = {
    "claude": Client(
        "Claude Code",
        ".mcp.json",
        ".claude.json",
        ("mcpServers", NAME),
        _claude_entry,
        _claude_exclusive,
        "start claude here and choose `Use this MCP server`. A `claude -p` before goes on without it",
        also=_claude_also,
        commands=_claude_command,
    ),
    "codex": Client(
        "Codex",
        ".codex/config.toml",
        ".codex/config.toml",
        ("mcp_servers", NAME),
        # Not required, a session could begin before the tools are there. Approved, since every call can be undone.
        lambda server: {**server.entry(), "required": True, "default_tools_approval_mode": "approve"},
        _codex_exclusive,
        "start codex here; it reads the file of a project that you have told it to trust. "
        "`codex mcp list` shows the server only then",
        also=_codex_also,
        home_variable="CODEX_HOME",
    ),
    "gemini": Client(
        "Gemini CLI",
        ".gemini/settings.json",
        ".gemini/settings.json",
        ("mcpServers", NAME),
        # Without trust, `gemini -p` offers no tool of a server.
        lambda server: {**server.entry(), "trust": True},
        _gemini_exclusive,
        "start gemini here, in a folder that it trusts. New files come by apply_patch: it takes write_file for its own",
    ),
    "opencode": Client(
        "opencode",
        "opencode.json",
        ".config/opencode/opencode.json",
        ("mcp", NAME),
        lambda server: {
            "type": "local",
            "command": [server.command, *server.args],
            "enabled": True,
            **({"environment": dict(server.env)} if server.env else {}),
        },
        _opencode_exclusive,
        "start opencode here",
    ),
    "qwen": Client(
        "Qwen Code",
        ".qwen/settings.json",
        ".qwen/settings.json",
        ("mcpServers", NAME),
        lambda server: {**server.entry(), "trust": True, "alwaysLoadTools": True},
        _qwen_exclusive,
        "run `qwen mcp approve ringfence` here, and start qwen",
    ),
    "vscode": Client(
        "VS Code",
        ".vscode/mcp.json",
        ".config/Code/User/mcp.json",
        ("servers", NAME),
        lambda server: {"type": "stdio", **server.entry(FOLDER)},
        None,
        "open the folder and start the server in the list of MCP servers. Take the built-in edit and terminal tools "
        "out of the agent's tools there",
    ),
    "cursor": Client(
        "Cursor",
        ".cursor/mcp.json",
        ".cursor/mcp.json",
        ("mcpServers", NAME),
        lambda server: server.entry(FOLDER),
        None,
        "open the folder and enable the server in the settings, under MCP",
    ),
}


def change(
    name: str,
    action: Literal["install", "uninstall"],
    serve: click.Command,
    *,
    personal: bool = False,
    exclusive: bool = False,
    dry_run: bool = False,
    options: Sequence[str] = (),
) -> None:
    """Register the server with a client or take it out again: print each change, and make it.

    ``options`` are those with which the client starts the command ``serve``.

    Raises:
        click.ClickException: a file cannot be read, parsed or written, or somebody has just changed it. It stays as it
            is.
    """
    client, server = CLIENTS[name], Server.here(options)
    installs = action == "install"
    if exclusive and client.exclusive is None:
        without = client.next_step if installs else f"`ringfence mcp uninstall {name}` takes the server out"
        raise click.UsageError(
            f"--exclusive: no file of {client.title} switches off its own tools. Without it: {without}"
        )
    if installs:
        _check(serve, options)
    by_command = personal and client.commands is not None
    edits = [] if by_command else [Edit(client.file(personal=personal), client.key, client.entry(server))]
    edits += client.also(client.directory(personal=personal), personal)
    if exclusive and client.exclusive is not None:
        edits += client.exclusive(client.directory(personal=personal), personal)
    try:
        record = Record.load()
        files = _edited(edits, record, add=installs)
        changed = [file for file in files if file.text != file.before]
        for file in changed:
            put(_diff(file).encode())
        if by_command and client.commands is not None:
            _run(client, client.commands(server, installs), add=installs, dry_run=dry_run)
        for entry in record.left:
            put_line(f"{entry} stays: it was there before the server, or nothing tells that it was not")
        if not by_command and not changed:
            state = "is registered already" if installs else "is not registered"
            put_line(f"{client.title}: the server {state} in {files[0].path}, and nothing was changed")
            other = _edited([Edit(client.file(personal=not personal), client.key, {})], Record.load(), add=False)[0]
            if not installs and other.text != other.before:
                scope = "without --global, in this directory" if personal else "with --global"
                put_line(f"It is registered in {other.path}: uninstall it {scope}")
            if installs:
                _say_switches(name)
            return
        if not dry_run:
            if installs:  # first, so that no change is made without it
                record.save()
            for file in changed:
                file.save()
            if not installs:
                record.save()
                _remove_empty(file.path.parent for file in changed)
    except (OSError, ValueError) as error:
        raise NotStartedError(str(error)) from error
    if installs and not dry_run:
        put_line(f"{client.title}: {'start it anew' if personal else client.next_step}")
        if exclusive and name == "gemini" and not personal:
            put_line("Its own tools are switched off in all projects: it reads policies from your home only")
    if installs:
        _say_switches(name)
    if not installs and not exclusive and client.exclusive is not None:
        left: list[ConfigFile] = []
        with suppress(ValueError):  # what cannot be edited is not said to be ours
            left = _edited(client.exclusive(client.directory(personal=personal), personal), record, add=False)
        if any(file.text != file.before for file in left):
            back = f"`ringfence mcp uninstall {name}{' --global' if personal else ''} --exclusive` switches them on"
            put_line(f"{client.title}: some of its own tools are switched off; {back}")


def _say_switches(name: str) -> None:
    for line in switched_off(name, Path.cwd()):
        put_line(f"{CLIENTS[name].title}: {line}")


def _check(serve: click.Command, options: Sequence[str]) -> None:
    """Raise click.UsageError where `serve` would not take the options over stdio."""
    with serve.make_context("ringfence serve", [*options]) as context:
        if context.params["http"] is not None:
            raise click.UsageError("--http: the client starts a server of its own, on standard input: leave --http out")


def _remove_empty(directories: Iterable[Path]) -> None:
    for directory in directories:
        if directory.name.startswith(".") and directory not in (Path.cwd(), Path.home()):
            with suppress(OSError):  # it is not empty
                directory.rmdir()


def _edited(edits: Sequence[Edit], record: Record, *, add: bool) -> list[ConfigFile]:
    try:
        from ringfence_mcp.config_files import ConfigFile
    except ModuleNotFoundError as error:
        raise click.UsageError(missing(str(error.name), "mcp")) from None
    files: dict[Path, ConfigFile] = {}
    for edit in edits:
        file = files[edit.path] = files.get(edit.path) or ConfigFile(edit.path)
        if edit.text is not None:
            if file.before not in ("", edit.text):
                raise ValueError(f"{edit.path} holds rules of somebody else, and stays as it is: move it first")
            file.text = edit.text if add else ""
        else:
            (record.install if add else record.uninstall)(file, edit)
    return list(files.values())


def _run(client: Client, command: Sequence[str], *, add: bool, dry_run: bool) -> None:
    """The client's own command. A server that it has, or has not, already is no failure."""
    put_line(f"$ {shlex.join(command)}")
    if dry_run:
        return
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is not installed, or not on PATH: {client.title} writes that file itself")
    if add:  # it does not replace what is there
        subprocess.run([*_claude_command(Server("", (), {}), add=False)], capture_output=True, check=False)
    done = subprocess.run([*command], capture_output=True, text=True, check=False)
    if done.returncode != 0 and add:
        raise ValueError(f"{shlex.join(command)} failed: {(done.stderr or done.stdout).strip()}")


def _diff(file: ConfigFile) -> str:
    lines = difflib.unified_diff(
        file.before.splitlines(keepends=True),
        [] if file.is_empty else file.text.splitlines(keepends=True),
        str(file.path) if file.before else "/dev/null",
        "/dev/null" if file.is_empty else str(file.path),
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
