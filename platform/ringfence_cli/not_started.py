"""What ends a command before it has begun anything."""

from __future__ import annotations

import os
from typing import Self

import click


class NotStartedError(click.ClickException):
    """Nothing was begun, for a reason that is not in the words of the command line."""

    exit_code = 2

    @classmethod
    def of(cls, error: OSError) -> Self:
        return cls(f"{error.filename!r}: {error.strerror}")


class BusyError(NotStartedError):
    """Somebody else has the workspace: it may be free later."""


def is_nowhere() -> bool:
    """Whether the current directory is no more."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
