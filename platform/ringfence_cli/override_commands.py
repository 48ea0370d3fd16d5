"""The commands for overrides of prompts, as they are typed."""

from __future__ import annotations

from pathlib import Path

import click

from ringfence_cli.options import Interruptible

PROMPT = click.argument("prompt", metavar="MODULE:NAME")
ROOT = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the overrides are kept.  [default: .ringfence/prompts/overrides in the git repository]",
)
TAG = click.option("--tag", default="latest", show_default=True, help="Which set of overrides.")


@click.group(cls=Interruptible)
def overrides() -> None:
    """Texts of prompts, tools and examples, replaced from files.

    MODULE:NAME is a prompt of yours: an attribute of a module that Python finds from the current directory.
    """


@overrides.command()
@PROMPT
@ROOT
@TAG
def seed(prompt: str, root: Path | None, tag: str) -> int:
    """Write the prompt's own texts to a file, to be edited; one that is there stays as it is."""
    from ringfence_cli import overrides as prompts

    return prompts.seed(prompt, root, tag)


@overrides.command("list")
@ROOT
def list_files(root: Path | None) -> int:
    """List the files with overrides, and how much is in each."""
    from ringfence_cli import overrides as prompts

    return prompts.list_files(root)


@overrides.command()
@PROMPT
@ROOT
@TAG
def check(prompt: str, root: Path | None, tag: str) -> int:
    """Say which overrides do not fit the prompt any more. Exit codes: 0 all fit, 1 some do not, 2 usage."""
    from ringfence_cli import overrides as prompts

    return prompts.check(prompt, root, tag)


@overrides.command()
@PROMPT
@ROOT
@TAG
def diff(prompt: str, root: Path | None, tag: str) -> int:
    """Print what the overrides change of the prompt's text and of its tools, as a unified diff."""
    from ringfence_cli import overrides as prompts

    return prompts.diff(prompt, root, tag)
