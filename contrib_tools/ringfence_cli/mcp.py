"""The commands ``ringfence mcp install`` and ``uninstall``."""

from __future__ import annotations

from collections.abc import Callable

import click

from ringfence_cli.options import Interruptible
from ringfence_mcp.install import CLIENTS, change


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
        click.argument("client", type=click.Choice(list(CLIENTS)), metavar="CLIENT"),
    ):
        function = decorate(function)
    return function


@mcp.command()
@_options
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS]")
def install(client: str, personal: bool, exclusive: bool, dry_run: bool, options: tuple[str, ...]) -> None:
    """Register `ringfence serve` with CLIENT: claude, codex, gemini, opencode, qwen, vscode or cursor.

    Prints the change of the client's configuration, and makes it. OPTIONS are those of `ringfence serve`. A second time
    changes nothing.
    """
    from ringfence_cli.main import serve

    change(client, "install", serve, personal=personal, exclusive=exclusive, dry_run=dry_run, options=options)


@mcp.command()
@_options
def uninstall(client: str, personal: bool, exclusive: bool, dry_run: bool) -> None:
    """Take `ringfence serve` out of the configuration of CLIENT again."""
    from ringfence_cli.main import serve

    change(client, "uninstall", serve, personal=personal, exclusive=exclusive, dry_run=dry_run)
