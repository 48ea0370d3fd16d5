"""How a group of commands is listed by ``--help``, and interrupted."""

from __future__ import annotations

from typing import Any

import click


class Commands(click.Group):
    """Each with the whole first sentence of what it does, where click would cut it off at the end of the line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=1000)) for name, command in sorted(self.commands.items())]
            )


class Interruptible(Commands):
    """Of commands that change no workspace, so that an interrupt may come at any time."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with ctx.obj.let_through():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            from ringfence_cli.terminal import ErrorStream

            ErrorStream().say("ringfence: interrupted")
            raise click.Abort from None
