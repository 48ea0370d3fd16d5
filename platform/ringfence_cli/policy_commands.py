"""The commands for policies, as they are typed."""

from __future__ import annotations

from pathlib import Path

import click

from ringfence_cli.commands import Interruptible

POLICY = click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="SPEC",
    help="allow:GLOB, deny:GLOB, deletions:N, protected, tests:TOOL[=COMMAND]:GLOB or FILE.toml; may be given several "
    "times. A GLOB with a / (/src, docs/*.md) is from the root of DIR, one without (*.md) for names at any depth; "
    "what matches takes along all that is below it.",
)


@click.group(cls=Interruptible)
def policies() -> None:
    """Rules about what an agent's calls may change."""


@policies.command("try")
@click.argument("receipts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@POLICY
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def try_policies(receipts: Path, policies: tuple[str, ...], as_json: bool) -> int:
    """Say which calls of a past run, by its RECEIPTS, these policies would have denied.

    Exit codes: 0 none, 1 some, 2 usage.
    """
    from ringfence_cli import policies as owned
    from ringfence_cli.printable import one_line, plural
    from ringfence_cli.terminal import put

    if not policies:
        raise click.UsageError("name the policies to try with --policy")
    calls, denials = owned.replayed(receipts, owned.policies_said(policies))
    if as_json:
        put(f"{owned.as_json(calls, denials)}\n".encode())
    else:
        for denial in denials:
            said = one_line(f"{denial.tool} would have been denied by {denial.policy}: {denial.reason}", 500)
            put(f"{denial.call_id}  {said}\n".encode())
        click.echo(f"{len(denials)} of {plural(calls, 'committed call')} would have been denied", err=True)
    return 1 if denials else 0


@policies.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
def file(directory: Path) -> int:
    """Print the path of the file that has the policies for DIR, which its owner may write.

    It is out of reach of agents: beside the history of DIR, not in it.
    """
    from ringfence_cli.policies import owner_file

    click.echo(owner_file(directory))
    return 0
