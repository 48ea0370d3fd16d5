"""Open the workspace of a command, with the progress and the errors that a person at a terminal needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ringfence.errors import RestoreFailedError, WorkspaceLockedError
from ringfence.failures import describe_error
from ringfence.filesystem.hidden import HiddenFiles
from ringfence.limits import Cancellation
from ringfence_sandbox import unfinished_calls
from ringfence_tools.runs.command_errors import BusyError, NotStartedError
from ringfence_tools.runs.outputs import ErrorStream, recording
from ringfence_tools.runs.place import Place
from ringfence_tools.runs.recovered_call import describe_recovery
from ringfence_tools.runs.run_workspace import DiskWorkspace, MemoryWorkspace

if TYPE_CHECKING:
    from ringfence_sandbox import Detect


def on_disk(
    directory: Path,
    *,
    hide: HiddenFiles | None = None,
    store: Path | None = None,
    quiet: bool = False,
    cancellation: Cancellation | None = None,
    detect: Detect = "auto",
) -> DiskWorkspace:
    """Open a workspace on disk. ``hide``, ``store`` and ``detect`` are as for `Workspace.open`.

    Raises:
        CallCancelledError: ``cancellation`` was cancelled while the tree was recorded.
        NotStartedError: it cannot be opened.
    """
    try:
        with recording(quiet=quiet) as show:

            def progress(files: int) -> None:
                if cancellation is not None:
                    cancellation.check()
                show(files)

            return DiskWorkspace(directory, store=store, hide=hide, progress=progress, detect=detect)
    except WorkspaceLockedError as error:
        raise BusyError(str(error)) from None
    except RestoreFailedError as error:
        raise NotStartedError(str(error)) from None
    except (OSError, ValueError) as error:
        raise NotStartedError(f"the workspace cannot be opened: {describe_error(error)}") from None


def in_memory(directory: Path, hide: HiddenFiles | None = None, store: Path | None = None) -> MemoryWorkspace:
    """Copy a directory. Raises click.BadParameter if it cannot be copied."""
    try:
        return MemoryWorkspace(directory, store=store, hide=hide)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'DIR'") from None


def recovered_before_copy(directory: Path, *, quiet: bool = False) -> Iterator[str]:
    """Recover a directory before it is copied, if a call was killed there; lines that describe its state."""
    for call in unfinished_calls(directory):
        if call.is_running:
            yield f"ringfence: {call}: the copy has its changes"
        elif call.root != os.path.realpath(directory):
            yield f"ringfence: {call}"
        else:
            with closing(on_disk(directory, quiet=quiet)) as workspace:
                if (recovered := workspace.history.recovered) is not None:
                    yield describe_recovery(recovered, directory)


def check_commands_here(workspace: DiskWorkspace) -> None:
    """Raise NotStartedError for a fork that shares directories, which a run without a container does not see."""
    try:
        workspace.history.check_commands_here()
    except ValueError as error:
        raise NotStartedError(str(error)) from None


def start_container(
    workspace: DiskWorkspace, place: Place, *, project: Path | None = None, quiet: bool = False
) -> None:
    """Start the container of a workspace. ``project`` is as for `PodmanSandbox`.

    Raises:
        NotStartedError: it cannot be started.
        SandboxUnavailableError: commands cannot be run.
    """
    from ringfence_sandbox import describe_stale_image  # only here: it loads Podman's client

    errors = ErrorStream()
    if not quiet and place.image is None and (stale := describe_stale_image(workspace.directory)) is not None:
        errors.say(f"ringfence: {stale}")
    try:
        workspace.start_container(place, None if quiet else errors.say, project=project)
    except (OSError, ValueError) as error:
        raise NotStartedError(f"the container cannot be started: {describe_error(error)}") from None
