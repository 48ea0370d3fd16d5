"""The options of commands that have a container, as they are typed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ringfence_cli.terms import Place
    from ringfence_cli.workspace import WorkspaceKind

CommandT = TypeVar("CommandT", bound=Callable[..., object])

NETWORKS = ("none", "bridge", "slirp4netns", "pasta")
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_SECONDS = 365 * 24 * 3600.0
BYTES = {"m": 1 << 20, "g": 1 << 30}
LEAST_BYTES = 64 << 20


def seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A duration such as ``90s``, ``10m`` or ``1h30m``."""
    if value is None:
        return None
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise click.BadParameter(f"{value!r} is not a duration: write 90s, 10m or 1h30m", ctx, param)
    found = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if not 1 <= found <= LONGEST_SECONDS:
        raise click.BadParameter(f"{value!r} is not between 1s and a year", ctx, param)
    return found


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as ``512m`` or ``4g``."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([mg])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size: write 512m or 4g", ctx, param)
    size = int(found[1]) * BYTES[found[2]]
    if size < LEAST_BYTES:
        raise click.BadParameter(f"{value!r} is too little: a command needs {LEAST_BYTES >> 20}m", ctx, param)
    return size


def _number(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """One that is in its range: ``nan`` is in every one for `click`."""
    if value is not None and math.isnan(value):
        raise click.BadParameter(f"{value} is not a number", ctx, param)
    return value


IMAGE = click.option("--image", metavar="NAME", help="With podman: the container's image.  [default: ringfence's own]")
_OPTIONS = (
    IMAGE,
    click.option(
        "--network", type=click.Choice(NETWORKS), help="With podman: what network commands have.  [default: none]"
    ),
    click.option(
        "--keep-environment",
        is_flag=True,
        help="With podman: a command begins in the directory where the last one ended, with the variables it exported.",
    ),
    click.option(
        "--memory",
        "memory_bytes",
        callback=_bytes,
        metavar="SIZE",
        help="With podman: the memory of all commands together, such as 4g.  [default: 1g]",
    ),
    click.option(
        "--cpus",
        type=click.FloatRange(min=0.1, max=1024),
        callback=_number,
        metavar="N",
        help="With podman: how many processors' time commands get.  [default: 1]",
    ),
    click.option(
        "--command-timeout",
        "command_seconds",
        callback=seconds,
        metavar="TIME",
        help="With podman: the most that a command may take, whatever the model asks for.  [default: 2m]",
    ),
)


def container(command: CommandT) -> CommandT:
    """Give a command the options; `place_of` takes what comes of them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def place_of(workspace: WorkspaceKind | None, given: dict[str, Any]) -> Place:
    """click.UsageError for an option of the container where there is none."""
    from ringfence_cli.terms import Place

    place = Place(workspace, **given)
    if workspace not in (None, "podman") and place.options:
        raise click.UsageError(f"{' and '.join(place.options)}: for --workspace podman, where commands run")
    return place
