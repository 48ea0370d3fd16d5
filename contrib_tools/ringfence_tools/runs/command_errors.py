"""The errors with which a command that opens a workspace ends, and their exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from ringfence_tools.runs.spec_error import SpecError


UNAVAILABLE = 4
"""The exit code where the sandbox is not available."""


INTERRUPTED = 130


class NotStartedError(click.ClickException):
    """Nothing was started, although the command line is correct."""

    exit_code = 2

    @classmethod
    def of(cls, error: OSError) -> Self:
        return cls(f"{error.filename!r}: {error.strerror}")


class BusyError(NotStartedError):
    """Another process has the workspace open."""


def spec_refused(error: SpecError, ctx: click.Context | None = None) -> click.BadParameter:
    """Return the usage error for a SPEC that cannot be used."""
    return click.BadParameter(str(error), ctx, param_hint=f"'{error.option}'")
