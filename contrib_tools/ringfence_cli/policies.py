"""The command ``ringfence policies file``."""

from __future__ import annotations

from pathlib import Path

import click

from ringfence_cli.options import THIS_DIRECTORY, Interruptible
from ringfence_tools.runs.outputs import put_line
from ringfence_tools.runs.owner_policies import owner_file


@click.group(cls=Interruptible)
def policies() -> None:
    """Rules about what an agent's calls may change."""


@policies.command("file")
@THIS_DIRECTORY
def file(directory: Path) -> int:
    """Print the path of the file that has the policies for DIR, which its owner may write.

    It is out of reach of agents: beside the history of DIR, not in it.
    """
    path = owner_file(directory)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # for an editor
    put_line(path)
    return 0
