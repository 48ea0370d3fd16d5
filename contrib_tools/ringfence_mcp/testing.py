"""The contract suite of MCP clients, for clients of one's own, too. This module does not import pytest.

It is here and not in `ringfence.testing`, since the core does not know MCP.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ringfence_mcp.install import ClientRegistration
from ringfence_mcp.mcp_client import ClientScope, McpClient, ServerCommand
from ringfence_tools.client_files import ConfigFile

SERVER = ServerCommand("/bin/ringfence", ["serve", "--policy", "deletions:1"], {"RINGFENCE_STATE_DIR": "/state"})
OTHER = {"command": "other"}


class McpClientContract:
    """Subclass it in a test, as ``class TestMyClient(McpClientContract)``, with `client`."""

    def client(self) -> McpClient:
        """The client to test."""
        raise NotImplementedError

    def run(self, command: Sequence[str], scope: ClientScope) -> subprocess.CompletedProcess[str]:
        """Play the client's own command, if it has one: a stand-in that edits the files of the scope is enough."""
        raise NotImplementedError

    def test_its_entry_has_the_command_line_and_the_environment(self, tmp_path: Path) -> None:
        said = json.dumps(dict(self.client().entry(SERVER)))
        for word in (SERVER.command, *SERVER.args, *SERVER.env, *SERVER.env.values()):
            assert json.dumps(word) in said, f"{word} is not in the entry"

    def test_its_files_are_in_the_project_or_in_the_home(self, tmp_path: Path) -> None:
        for scope in _scopes(tmp_path):
            assert self.client().file(scope).is_relative_to(scope.directory)

    def test_an_uninstall_leaves_what_was_there_before(self, tmp_path: Path) -> None:
        for scope in _scopes(tmp_path):
            for exclusive in (False, self.client().exclusive is not None):
                before = self._with_another(scope, tmp_path)
                registration = self._registration(scope, tmp_path, exclusive=exclusive)
                self._install(registration)
                assert _files_below(scope.directory) != before, "it wrote nothing"
                registration.uninstall()
                assert _files_below(scope.directory) == before

    def test_other_servers_stay(self, tmp_path: Path) -> None:
        for scope in _scopes(tmp_path):
            self._with_another(scope, tmp_path)
            self._install(self._registration(scope, tmp_path))
            client = self.client()
            file = ConfigFile(client.file(scope))
            assert file.get([*client.key[:-1], "other"]) == OTHER
            assert file.get(client.key) is not None

    def test_a_second_install_changes_nothing(self, tmp_path: Path) -> None:
        for scope in _scopes(tmp_path):
            registration = self._registration(scope, tmp_path)
            self._install(registration)
            before = _files_below(tmp_path)
            registration.install(SERVER)
            assert _files_below(tmp_path) == before

    def test_a_dry_run_changes_nothing(self, tmp_path: Path) -> None:
        for scope in _scopes(tmp_path):
            self._registration(scope, tmp_path, dry_run=True).install(SERVER)
            assert _files_below(tmp_path) == {}

    def test_a_name_that_it_reports_has_a_limit(self, tmp_path: Path) -> None:
        assert self.client().shown_characters >= 1_000

    def _registration(
        self, scope: ClientScope, place: Path, *, exclusive: bool = False, dry_run: bool = False
    ) -> ClientRegistration:
        return ClientRegistration(
            self.client(),
            scope,
            place / "state/clients.json",
            exclusive,
            dry_run,
            run=lambda command: self.run(command, scope),
        )

    def _install(self, registration: ClientRegistration) -> None:
        """Install it, as the person does it to whom the entry is printed."""
        registration.install(SERVER)
        client, scope = registration.client, registration.scope
        if client.is_by_hand and client.own_command(scope, SERVER) is None:
            file = ConfigFile(client.file(scope))
            file.set(client.key, dict(client.entry(SERVER)))
            file.save(registration.record_path.parent)

    def _with_another(self, scope: ClientScope, place: Path) -> dict[str, str]:
        client = self.client()
        file = ConfigFile(client.file(scope))
        file.set([*client.key[:-1], "other"], OTHER)
        file.save(place / "state")
        return _files_below(scope.directory)


def _scopes(place: Path) -> Sequence[ClientScope]:
    project, home = place / "project", place / "home"
    for directory in (project, home):
        directory.mkdir(exist_ok=True)
    return [ClientScope(project, home, personal) for personal in (False, True)]


def _files_below(directory: Path) -> dict[str, str]:
    """The files, without layout, and without the lock of the record."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(directory)): "".join(path.read_text().split()) for path in files}
