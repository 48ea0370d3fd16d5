"""The commands ``ringfence mcp install`` and ``uninstall``."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import click

from ringfence.extras import missing
from ringfence_cli.options import Interruptible
from ringfence_mcp.install import ClientRegistration
from ringfence_mcp.known_clients import client_named, client_names
from ringfence_mcp.mcp_client import ClientScope, ServerCommand
from ringfence_sandbox import store_directory
from ringfence_tools.runs.command_errors import NotStartedError


@click.group(cls=Interruptible)
def mcp() -> None:
    """Register the server with an agent that you have."""


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        click.option("--dry-run", is_flag=True, help="Only print the change."),
        click.option(
            "--exclusive",
            is_flag=True,
            help="Switch off the agent's own tools for files and commands, too; with uninstall, on again.",
        ),
        click.option(
            "--global", "personal", is_flag=True, help="For all your projects, instead of the one in this directory."
        ),
        click.argument("client", type=click.Choice(client_names()), metavar="CLIENT"),
    ):
        function = decorate(function)
    return function


@mcp.command()
@_options
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]")
def install(client: str, personal: bool, exclusive: bool, dry_run: bool, options: tuple[str, ...]) -> None:
    """Register `ringfence serve` with CLIENT: claude, codex, gemini, opencode, qwen, vscode or cursor.

    Prints the change of the client's configuration, and makes it: by the client's own command, or in its file. For an
    editor, it prints what to write. OPTIONS are those of `ringfence serve`. A second time changes nothing.
    """
    with _failures():
        registration = _registration(client, personal, exclusive, dry_run)
        if exclusive and registration.client.exclusive is None:
            raise _not_exclusive(registration, registration.client.next_step)
        _check_options(options)
        registration.install(ServerCommand.here(options))


@mcp.command()
@_options
def uninstall(client: str, personal: bool, exclusive: bool, dry_run: bool) -> None:
    """Take `ringfence serve` out of the configuration of CLIENT again."""
    with _failures():
        registration = _registration(client, personal, exclusive, dry_run)
        if exclusive and registration.client.exclusive is None:
            raise _not_exclusive(registration, f"`ringfence mcp uninstall {client}` takes the server out")
        registration.uninstall()


def _registration(client: str, personal: bool, exclusive: bool, dry_run: bool) -> ClientRegistration:
    scope = ClientScope(Path.cwd(), Path.home(), personal, os.environ)
    record = store_directory(scope.project).parent.parent / "clients.json"
    return ClientRegistration(client_named(client), scope, record, exclusive, dry_run)


def _not_exclusive(registration: ClientRegistration, without: str) -> click.UsageError:
    title = registration.client.title
    return click.UsageError(f"--exclusive: no file of {title} switches off its own tools. Without it: {without}")


def _check_options(options: tuple[str, ...]) -> None:
    """Raise click.UsageError where `serve` would not take the options over stdio."""
    from ringfence_cli.main import serve

    with serve.make_context("ringfence serve", [*options]) as context:
        if context.params["http"] is not None:
            raise click.UsageError("--http: the client starts a server of its own, on standard input: leave --http out")


@contextmanager
def _failures() -> Generator[None]:
    """Raise click's errors for those of a registration."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.UsageError(missing(str(error.name), "mcp")) from None
    except (OSError, ValueError) as error:
        raise NotStartedError(str(error)) from error
