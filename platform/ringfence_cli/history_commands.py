"""The commands for the history of a disk workspace, as they are typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from ringfence_cli.signals import Signals

COMMANDS: list[click.Command] = []
DIRECTORY = click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Only say what would become of each path.")


def _named_step(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    """The number of a step, or its name."""
    if value is None or not value.isdecimal():
        return value
    try:
        return int(value)
    except ValueError:  # more digits than Python takes
        raise click.BadParameter("there is no step of so high a number", ctx, param) from None


def _command(function: Any) -> None:
    COMMANDS.append(click.command()(DIRECTORY(AS_JSON(click.pass_obj(function)))))


@_command
@click.option("--aborted", is_flag=True, help="List what rollbacks took away instead.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N entries.")
def log(signals: Signals, directory: Path, as_json: bool, aborted: bool, limit: int | None) -> int:
    """List the steps of DIR, newest first, and what somebody else changed in between."""
    from ringfence_cli.history import log

    return log(directory, signals, as_json, aborted, limit)


@_command
@click.argument("step", callback=_named_step)
@click.option("--aborted", is_flag=True, help="STEP is the number of something that a rollback took away.")
def show(signals: Signals, directory: Path, as_json: bool, step: int | str, aborted: bool) -> int:
    """Show what a step of DIR changed. STEP is a number or a name."""
    from ringfence_cli.history import show

    if aborted and not isinstance(step, int):
        raise click.UsageError("with --aborted STEP is a number, as `ringfence log --aborted` has it")
    return show(directory, signals, as_json, step, aborted)


@_command
@click.argument("a", callback=_named_step, required=False)
@click.argument("b", callback=_named_step, required=False)
def diff(signals: Signals, directory: Path, as_json: bool, a: int | str | None, b: int | str | None) -> int:
    """Print the patch from the state after step A (by default the oldest) to that after B (by default the newest)."""
    from ringfence_cli.history import diff

    return diff(directory, signals, as_json, a, b)


@_command
@click.argument("n", type=click.IntRange(min=1), required=False)
@click.option("--step", callback=_named_step, metavar="K", help="Reverse step K alone, a number or a name.")
@DRY_RUN
def undo(signals: Signals, directory: Path, as_json: bool, n: int | None, step: int | str | None, dry_run: bool) -> int:
    """Reverse the newest N steps of DIR, by default one. What others changed since stays; it can be undone."""
    from ringfence_cli.history import undo

    if n is not None and step is not None:
        raise click.UsageError("give either N, for the newest N steps, or --step, for that one alone")
    return undo(directory, signals, as_json, n, step, dry_run)


@_command
@click.argument("step", callback=_named_step)
@DRY_RUN
def restore(signals: Signals, directory: Path, as_json: bool, step: int | str, dry_run: bool) -> int:
    """Bring the files of DIR back to what they were after STEP, a number or a name; 0 is the beginning.

    What others have changed since goes as well: --dry-run shows it before. It can be undone.
    """
    from ringfence_cli.history import restore

    return restore(directory, signals, as_json, step, dry_run)


@_command
@click.argument("name")
@click.option("--drop", is_flag=True, help="Take the name away again.")
def checkpoint(signals: Signals, directory: Path, as_json: bool, name: str, drop: bool) -> int:
    """Give the files of DIR as they are a NAME, for `restore` and `diff`. `gc` keeps what has one."""
    from ringfence_cli.history import checkpoint

    return checkpoint(directory, signals, as_json, name, drop)


@_command
def recover(signals: Signals, directory: Path, as_json: bool) -> int:
    """Take back a call that a crash interrupted in DIR, if there is one. Every opening does so."""
    from ringfence_cli.history import recover

    return recover(directory, signals, as_json)


@_command
@click.argument("a", callback=_named_step, required=False)
@click.argument("b", callback=_named_step, required=False)
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["diff", "mbox"]),
    default="diff",
    show_default=True,
    help="One patch for `git apply`, or a mail a step for `git am`.",
)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Save it there.")
def export(
    signals: Signals,
    directory: Path,
    as_json: bool,
    a: int | str | None,
    b: int | str | None,
    fmt: Literal["diff", "mbox"],
    output: Path | None,
) -> int:
    """Write the changes of DIR from step A (by default the oldest) to B (by default the newest) for git."""
    from ringfence_cli.history import export

    return export(directory, signals, as_json, a, b, fmt, output)


@_command
@click.option("--keep", type=click.IntRange(min=0), default=100, show_default=True, metavar="N", help="Steps to keep.")
def gc(signals: Signals, directory: Path, as_json: bool, keep: int) -> int:
    """Drop from the history of DIR what its newest and its named steps do not need. The files stay as they are."""
    from ringfence_cli.history import gc

    return gc(directory, signals, as_json, keep)
