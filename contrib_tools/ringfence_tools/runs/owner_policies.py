"""The policies of a workspace's owner: from the command line, and from a file that no agent can reach."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ringfence.errors import PromptValidationError
from ringfence.escapes import escape_path
from ringfence.runtime.policy import Policy
from ringfence_sandbox import record_root, store_directory
from ringfence_tools.runs.policy_specs import parse_policy_file, parse_specs, strictest
from ringfence_tools.runs.spec_error import SpecError

FILE_NAME = "ringfence.toml"


CONTAINER_TOOLS = ("shell_execute", "evaluate_python")


def owner_file(directory: Path) -> Path:
    """Return the path of the owner's policy file. It is beside the store, and neither needs to exist."""
    return store_directory(directory) / FILE_NAME


def policies_of(directory: Path, specs: Sequence[str]) -> tuple[Policy, ...]:
    """Return the policies of the owner's file and of the command line.

    Raises:
        click.UsageError: the owner's file is invalid.
        SpecError: a SPEC is invalid, or its file is unreadable, invalid or inside the workspace.
    """
    file = owner_file(directory)
    try:
        owned = parse_policy_file(file, directory) if os.path.lexists(file) else ()
    except SpecError as error:
        raise click.UsageError(f"what the owner of the directory says cannot be understood: {error}") from None
    if owned:
        record_root(directory)
    return strictest((*owned, *parse_specs(specs, directory)))


def missing_tool_error(error: PromptValidationError, directory: Path, workspace: str | None) -> click.UsageError:
    """Return the error for a policy whose tool the agent does not have. It says how to get the tool."""
    message = str(error)
    if error.placeholder in CONTAINER_TOOLS and workspace != "podman":
        message += f". {error.placeholder} is there with --workspace podman"
    file = owner_file(directory)
    if os.path.lexists(file):
        message += f". What the owner of the directory says is in {escape_path(str(file))}"
    return click.UsageError(message)
