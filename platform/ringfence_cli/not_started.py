"""What ends a command before it has begun anything."""

from __future__ import annotations

import click


class NotStartedError(click.ClickException):
    """Nothing was begun, for a reason that is not in the words of the command line."""

    exit_code = 2


class BusyError(NotStartedError):
    """Somebody else has the workspace: it may be free later."""
