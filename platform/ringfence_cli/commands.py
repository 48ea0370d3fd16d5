"""How a group of commands is listed by ``--help``."""

from __future__ import annotations

import click


class Commands(click.Group):
    """Each with the whole first sentence of what it does, where click would cut it off at the end of the line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=1000)) for name, command in sorted(self.commands.items())]
            )
