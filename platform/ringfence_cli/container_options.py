"""The options of commands that have a container, as they are typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ringfence_cli.typed_values import number, seconds, size

if TYPE_CHECKING:
    from ringfence_cli.terms import Place
    from ringfence_cli.workspace import WorkspaceKind

CommandT = TypeVar("CommandT", bound=Callable[..., object])

NETWORKS = ("none", "bridge", "slirp4netns", "pasta")
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
        callback=size,
        metavar="SIZE",
        help="With podman: the memory of all commands together, such as 4g.  [default: 1g]",
    ),
    click.option(
        "--cpus",
        type=click.FloatRange(min=0.1, max=1024),
        callback=number,
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
