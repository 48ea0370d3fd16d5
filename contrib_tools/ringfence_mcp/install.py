"""Register the server with an agent that somebody already has, or take it out again."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ringfence_mcp.mcp_client import ClientScope, McpClient, OwnCommand, ServerCommand
from ringfence_tools.client_files import ConfigEdit, ConfigFile, ConfigRecord, UneditableFileError, edit_files, is_made
from ringfence_tools.runs.outputs import put, put_line


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a client's own command.

    Raises:
        FileNotFoundError: it is not on PATH.
    """
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not on PATH")
    return subprocess.run(
        [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )


@dataclass(frozen=True, slots=True)
class ClientRegistration:
    """The registration of the server with one client in one scope.

    ``record_path`` is the record of what was in the client's files before. ``run`` runs the client's own commands.
    With ``dry_run``, changes are only printed.
    """

    client: McpClient
    scope: ClientScope
    record_path: Path
    exclusive: bool = False
    dry_run: bool = False
    run: Callable[[Sequence[str]], subprocess.CompletedProcess[str]] = run_command

    def install(self, server: ServerCommand) -> None:
        """Register the server: print each change, and make it.

        Raises:
            ValueError: a file cannot be edited, or the client's own command fails. The message says what to do.
            OSError: a file cannot be read or written.
            ModuleNotFoundError: a file is TOML, and tomlkit is missing.
        """
        client, own = self.client, self.client.own_command(self.scope, server)
        entry = client.edit(server, self.scope)
        with self._record() as record:
            by_file = own is None and not client.is_by_hand
            edits = [*([entry] if by_file else []), *client.also(self.scope), *self._switching_off()]
            changed = self._print_changes(edit_files(edits, record, add=True))
            is_new = not by_file and not is_made(entry)
            if not changed and not is_new:
                put_line(f"{client.title}: the server is registered already in {entry.path}, and nothing was changed")
            elif is_new:
                self._add(own, entry)
            if changed and not self.dry_run:
                record.save()  # first, so that no change is made without it
                _save(changed, record)
        if (changed or is_new) and not self.dry_run:
            self._print_next_step()
        for line in switched_off(client, self.scope):
            put_line(f"{client.title}: {line}")

    def uninstall(self) -> None:
        """Take out what `install` has registered: print each change, and make it. Raises as `install`."""
        client, server = self.client, ServerCommand("")
        entry, own = client.edit(server, self.scope), client.own_command(self.scope, server)
        with self._record() as record:
            remove = own.remove if own is not None and not record.has(entry) else None
            edits = [*([] if remove else [entry]), *client.also(self.scope), *self._switching_off()]
            files = edit_files(edits, record, add=False)
            changed = self._print_changes(files)
            removes = remove is not None and _holds(entry)
            if remove is not None and removes:
                self._remove(remove, entry)
            for name in record.unknown:
                put_line(f"{name} stays: it was there before the server, or nothing tells that it was not")
            if changed and not self.dry_run:
                _save(changed, record)
                record.save()
                self._remove_empty(file.path.parent for file in changed)
        if not changed and not removes:
            put_line(f"{client.title}: the server is not registered in {entry.path}, and nothing was changed")
            self._print_other_scope()
        elif not self.exclusive:
            self._print_switched_off(record)

    @contextmanager
    def _record(self) -> Generator[ConfigRecord]:
        if self.dry_run:
            yield ConfigRecord.load(self.record_path)
        else:
            with ConfigRecord.locked(self.record_path) as record:
                yield record

    def _switching_off(self) -> Sequence[ConfigEdit]:
        return self.client.exclusive(self.scope) if self.exclusive and self.client.exclusive is not None else ()

    @staticmethod
    def _print_changes(files: Iterable[ConfigFile]) -> list[ConfigFile]:
        changed = [file for file in files if file.is_changed]
        for file in changed:
            put(file.diff().encode())
        return changed

    def _print_next_step(self) -> None:
        client = self.client
        put_line(f"{client.title}: {'start it anew' if self.scope.personal else client.next_step}")
        if self.exclusive and client.exclusive_note and not self.scope.personal:
            put_line(client.exclusive_note)

    def _add(self, own: OwnCommand | None, entry: ConfigEdit) -> None:
        """Register the server by the client's own command, or say what to write by hand."""
        if own is None:
            put_line(f"{self.client.title}: write this into {entry.path}:\n{entry.describe()}")
            return
        put_line(f"$ {shlex.join(own.add)}")
        if self.dry_run:
            return
        try:
            if own.remove is not None and _holds(entry):  # the command does not replace what is there
                self.run(own.remove)
            done = self.run(own.add)
        except FileNotFoundError as error:
            by_hand = f"Install {self.client.title}, or write this into {entry.path} by hand"
            raise ValueError(f"{error}. {by_hand}:\n{entry.describe()}") from None
        if done.returncode != 0:
            raise ValueError(f"{shlex.join(own.add)} failed: {(done.stderr or done.stdout).strip()}")

    def _remove(self, remove: Sequence[str], entry: ConfigEdit) -> None:
        put_line(f"$ {shlex.join(remove)}")
        if self.dry_run:
            return
        by_hand = f"take {'.'.join(entry.key)} out of {entry.path} by hand"
        try:
            done = self.run(remove)
        except FileNotFoundError as error:
            raise ValueError(f"{error}: {by_hand}") from None
        if _holds(entry):
            raise ValueError(f"{shlex.join(remove)} failed: {by_hand}: {(done.stderr or done.stdout).strip()}")

    def _print_other_scope(self) -> None:
        scope = self.scope
        other = ClientScope(scope.project, scope.home, not scope.personal, scope.environ)
        entry = self.client.edit(ServerCommand(""), other)
        with suppress(OSError, ValueError):
            if ConfigFile(entry.path).get(entry.key) is not None:
                where = "without --global, in this directory" if scope.personal else "with --global"
                put_line(f"It is registered in {entry.path}: uninstall it {where}")

    def _print_switched_off(self, record: ConfigRecord) -> None:
        client = self.client
        with suppress(ValueError):  # what cannot be edited is not said to be ours
            files = edit_files(client.exclusive(self.scope) if client.exclusive else (), record, add=False)
            if any(file.is_changed for file in files):
                scope = " --global" if self.scope.personal else ""
                back = f"`ringfence mcp uninstall {client.name}{scope} --exclusive` switches them on"
                put_line(f"{client.title}: some of its own tools are switched off; {back}")

    def _remove_empty(self, directories: Iterable[Path]) -> None:
        for directory in directories:
            if directory.name.startswith(".") and directory not in (self.scope.project, self.scope.home):
                with suppress(OSError):  # it is not empty
                    directory.rmdir()


def switched_off(client: McpClient, scope: ClientScope) -> Iterator[str]:
    """Yield a line for each setting that keeps the server of the scope off, and what to do.

    A file that cannot be read is passed over: the client says that itself.
    """
    for switch in client.off_switches(scope):
        for path in switch.files:
            with suppress(OSError, ValueError):
                if switch.is_off(ConfigFile(path).get(switch.key)):
                    yield f"{'.'.join(switch.key)} in {path} keeps the server off: {switch.remedy}"


def _holds(entry: ConfigEdit) -> bool:
    """Whether the file has an entry for the server. A file that cannot be parsed may have one."""
    try:
        return ConfigFile(entry.path).get(entry.key) is not None
    except UneditableFileError:
        return True


def _save(files: Iterable[ConfigFile], record: ConfigRecord) -> None:
    for file in files:
        file.save(record.backups)
